"""The folder that stands for a GGUF file: what a Hugging Face checkpoint has beside its weights.

Every command takes a checkpoint's folder, so the file's metadata becomes one in the cache. The weights stay
in the file, whose path the folder states.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from heterollm.base import CheckpointError, atomic_path, own_folder, parse_json
from heterollm.model.stored.gguf_config import check_metadata, gguf_config, gguf_generation
from heterollm.model.stored.gguf_file import GgufFile
from heterollm.model.stored.gguf_model import GgufTensors
from heterollm.model.stored.gguf_split import part_names, whole_name
from heterollm.model.stored.gguf_tokenizer import gguf_tokenizer, pooling_mode

GGUF_FOLDERS: Final = "gguf"
"""Subfolder of the cache."""

SOURCE: Final = "gguf.json"
POOLING: Final = "1_Pooling"
FOLDER_VERSION: Final = 6
"""Part of each folder's name; raise it when equal files would give other files."""


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF file, named like the file; write it first if it is missing or stale.

    Args:
        path: The file, or the first part of a split one.

    Raises:
        CheckpointError: The file is damaged.
        UnsupportedModelError: Its model, tokenizer or a type of tensors is not supported.
        CacheError: The folder cannot be written.
    """
    # The hub's cache links to files without names, which the parts of a split file need.
    split = len(part_names(path.name)) > 1
    file = GgufFile.open(path.parent.resolve() / path.name if split else path.resolve())
    key = hashlib.sha256(f"{FOLDER_VERSION} {file.path}".encode())
    for part in file.parts:
        key.update(f" {len(part.data)} ".encode())
        key.update(part.data[: part.header_bytes].data)
    folder = own_folder(GGUF_FOLDERS) / key.hexdigest()[:32] / whole_name(path.name)
    if not (folder / SOURCE).is_file():
        _write(file, folder)
    return folder


def open_gguf(folder: Path) -> GgufTensors | None:
    """Return the tensors of the GGUF file that a folder stands for; None for any other folder.

    Raises:
        CheckpointError: The folder or the file is damaged.
    """
    source = folder / SOURCE
    if not source.is_file():
        return None
    try:
        stated = parse_json(source.read_bytes())
        return GgufTensors(GgufFile.open(Path(stated["file"])), tuple(map(str, stated["notes"])))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{source} is damaged: {error}.", fix="Delete its folder.") from error


def _write(file: GgufFile, folder: Path) -> None:
    """Write all files, the source last: a folder that has it is whole."""
    notes = check_metadata(file)
    config, generation = gguf_config(file), gguf_generation(file)
    GgufTensors(file)
    found = gguf_tokenizer(file.path, file.metadata)
    if (mode := pooling_mode(file.metadata)) is not None:
        # As for sentence-transformers; llama.cpp gives embeddings the length 1.
        kinds = {"": "Transformer", POOLING: "Pooling", "2_Normalize": "Normalize"}
        modules = [{"path": path, "type": kind} for path, kind in kinds.items()]
        _put(folder / POOLING / "config.json", {"pooling_mode": mode})
        _put(folder / "modules.json", json.dumps(modules, indent=1))
    if found.tokenizer is not None:
        _put(folder / "tokenizer.json", found.tokenizer)
        _put(folder / "tokenizer_config.json", found.config)
    try:
        _put(folder / "config.json", config | found.ids)
        if generation:
            _put(folder / "generation_config.json", generation | found.ids)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: a number in its metadata is not finite.") from error
    _put(folder / SOURCE, {"file": str(file.path), "notes": [*notes, *found.notes]})


def _put(path: Path, content: str | dict[str, Any]) -> None:
    text = content if isinstance(content, str) else json.dumps(content, indent=1, allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
