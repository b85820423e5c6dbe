"""The models that lie on this machine: in the hub's cache, and prepared in heterollm's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import CacheNotFound

from heterollm.base import CacheError, CheckpointError, check_fetched, delete, own_entries
from heterollm.data import BUNDLED_NAME, bundled_model
from heterollm.model.stored import GGUF_FOLDERS
from heterollm.model.tensor_file import TensorFile
from heterollm.model.weights import WEIGHTS_FOLDER

READ: Final = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Files of a model.

    Args:
        name: The hub name, or that of the folder or GGUF file that the prepared files were made from.
        kind: ``fetched`` into the hub's cache, or ``prepared``: quantised weights, or a GGUF file's settings.
        size_bytes: Size of the files.
        paths: Files and folders; of a fetched model those to load: GGUF files, or the checkpoint's folder.
        revisions: Of a fetched model, the commits.
    """

    name: str
    kind: Literal["fetched", "prepared"]
    size_bytes: int
    paths: tuple[Path, ...]
    revisions: tuple[str, ...] = ()


def stored_models() -> list[StoredModel]:
    """Return the models in both caches by name; repositories without readable weights are left out."""
    fetched = list(_fetched())
    names = {revision: model.name for model in fetched for revision in model.revisions}
    names[bundled_model().name] = BUNDLED_NAME
    return sorted([*fetched, *_prepared(names)], key=lambda model: (model.name.lower(), model.kind))


def remove_models(models: Iterable[StoredModel]) -> None:
    """Delete the files of models.

    Raises:
        CacheError: A file cannot be deleted.
    """
    for model in models:
        try:
            if model.kind == "fetched":
                _remove_fetched(model)
                continue
            for path in model.paths:
                delete(path)
        except OSError as error:
            raise CacheError(
                f"Cannot delete the files of {model.name}: {error.strerror or error}.",
                fix="Close other programs that use them, or check who owns the folder.",
            ) from error


def _remove_fetched(model: StoredModel) -> None:
    cache = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE)
    # A copy of a repository has the same commits.
    own = frozenset(one for one in cache.repos if one.repo_type == "model" and one.repo_id == model.name)
    for repository in own:
        check_fetched(repository.repo_path)
    replace(cache, repos=own).delete_revisions(*model.revisions).execute()


def _fetched() -> Iterable[StoredModel]:
    try:
        cache = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in cache.repos:
        if repository.repo_type != "model":
            continue
        files = [file for revision in repository.revisions for file in revision.files]
        if not any(file.file_name.endswith(READ) for file in files):
            continue
        ggufs = sorted(file.file_path for file in files if file.file_name.endswith(".gguf"))
        folders = [revision.snapshot_path for revision in repository.revisions]
        yield StoredModel(
            repository.repo_id,
            "fetched",
            repository.size_on_disk,
            tuple(ggufs or folders),
            tuple(revision.commit_hash for revision in repository.revisions),
        )


def _prepared(names: Mapping[str, str]) -> Iterable[StoredModel]:
    """Yield the models of heterollm's own cache.

    Args:
        names: Names of models by those of their folders, which are commits for the hub's.
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for path in own_entries(WEIGHTS_FOLDER):
        if path.suffix != ".safetensors" or path.name.startswith("."):
            continue
        try:
            model = TensorFile.open(path).metadata.get("model", "")
        except CheckpointError:
            model = ""  # damaged; `heterollm cache clear weights` deletes it
        if model:
            found[names.get(model, model)].append(path)
    for folder in own_entries(GGUF_FOLDERS):
        for source in folder.glob("*/gguf.json"):
            found[source.parent.name].append(folder)
    for name, paths in found.items():
        yield StoredModel(name, "prepared", sum(map(_size, paths)), tuple(paths))


def _size(path: Path) -> int:
    files: Sequence[Path] = [own for own in path.rglob("*") if own.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
