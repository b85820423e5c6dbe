"""Models of the Hugging Face hub: their names, and the files that a model needs."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import huggingface_hub

from heterollm.base import CheckpointError, OptionError, Progress, is_plain_name, locked
from heterollm.model.hub_names import parse_hub_name
from heterollm.model.stored import part_names

HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
CONFIG_FILES: Final = ("config.json", "generation_config.json")
HUB_IGNORED: Final = ("*/*", "consolidated*")

SHA_256: Final = re.compile("[0-9a-f]{64}")
NAMING_HEADERS: Final = ("ETag", "X-Linked-ETag", "X-Repo-Commit", "X-Xet-Hash")
"""Headers of which the hub's client makes names of files and folders."""

NAMING_FIELDS: Final = {"sha", "oid", "sha256", "blobId", "xetHash"}
"""Fields of its listings of which it makes them, too."""

RESUMED_BYTES: Final = 16 << 20
"""Smaller files begin again after an interruption."""

UNREACHED: Final = {"TransportError", "ConnectionError"}
"""Errors of a connection, by the names that several libraries give them."""

LISTED: Final = 12
"""Most GGUF files that a message lists."""


def hub_folder(name: str, *, weights: bool = True) -> Path:
    """Return the folder of a model in the hub's cache, after fetching the files that it lacks.

    Args:
        name: The hub name.
        weights: Whether to fetch all files, or only the model's configuration.

    Raises:
        CheckpointError: The hub did not deliver it.
    """
    try:
        _check_answers()
        found = huggingface_hub.snapshot_download(
            name,
            allow_patterns=list(HUB_FILES if weights else CONFIG_FILES),
            ignore_patterns=list(HUB_IGNORED),
        )
    except CheckpointError:
        raise
    except Exception as error:
        # The hub's client raises the errors of several libraries, without a common base.
        problem, fix = _problem(name, error)
        raise CheckpointError(f"There is no folder {name}, and {problem}.", fix=fix) from error
    return Path(found)


def pull_model(name: str, gguf: str | None, progress: Progress) -> Path:
    """Fetch the files of a model that the cache lacks; parts of files of an interrupted call stay.

    Args:
        name: The hub name.
        gguf: The name of a GGUF file, or a pattern that one of them matches; None for safetensors, or for
            the only GGUF file of a model without.
        progress: Called with the bytes done and the total.

    Returns:
        The folder of the checkpoint, or the GGUF file.

    Raises:
        OptionError: The name is not legal, or no file or several match the pattern.
        CheckpointError: The hub did not deliver, or the model has neither safetensors nor GGUF files.
    """
    named = parse_hub_name(name)
    if named is None:
        raise OptionError(f"{name!r:.200} is no name of a model on the hub.", fix="Give OWNER/NAME.")
    name, gguf = named.name, gguf or named.gguf
    try:
        _check_answers()
        info = huggingface_hub.HfApi().model_info(name, files_metadata=True)
        sizes = plain_files({file.rfilename: file.size or 0 for file in info.siblings or ()})
        wanted = needed_files(name, tuple(sizes), gguf)
        bytes_of = _Bytes(f"Fetching {name}", sum(sizes[file] for file in wanted), progress)
        paths = []
        for file in wanted:
            if sizes[file] >= RESUMED_BYTES:
                _fetch_blob(name, file, bytes_of.bar())
            found = huggingface_hub.hf_hub_download(name, file, tqdm_class=bytes_of.bar())
            paths.append(Path(found))
            bytes_of.finish(sizes[file])
    except (OptionError, CheckpointError):
        raise
    except Exception as error:
        problem, fix = _problem(name, error)
        message = f"{name} was not fetched: {problem}."
        raise CheckpointError(message, fix=f"{fix} Files that have arrived are kept.") from error
    return paths[0] if wanted[0].endswith(".gguf") else paths[0].parent


def plain_files(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files whose names stay in a folder, on every system."""
    return {file: size for file, size in sizes.items() if all(map(is_plain_name, file.split("/")))}


def _check_answers() -> None:
    """Make the hub's client refuse answers by which a hub names files outside of the client's cache."""
    session: Any = huggingface_hub.get_session()
    hooks = session.event_hooks
    if _check_answer not in hooks["response"]:
        hooks["response"].append(_check_answer)
        session.event_hooks = hooks


def _check_answer(response: Any) -> None:  # noqa: ANN401 - of the client's own HTTP library
    names: list[tuple[str, object]] = []
    if response.request.method == "HEAD":  # the others' are not read
        names = [(header, response.headers.get(header)) for header in NAMING_HEADERS]
    elif response.request.url.path.startswith("/api/") and response.is_success:
        response.read()
        with contextlib.suppress(ValueError):
            names = list(_naming_fields(json.loads(response.content)))
    for field, name in names:
        if name is not None and not is_plain_name(str(name).removeprefix("W/").strip('"')):
            raise CheckpointError(
                f"The hub names a file {name!r:.100} ({field}), which is no name.",
                fix="Fetch the model from another hub: HF_ENDPOINT names this one.",
            )


def _naming_fields(content: object) -> Iterator[tuple[str, object]]:
    """Yield the fields of a listing that the hub's client makes names of, at any depth."""
    pending = [content]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield from ((field, one[field]) for field in NAMING_FIELDS & one.keys())
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def _fetch_blob(name: str, file: str, bar: type) -> None:
    """Fetch a file's content into the hub's cache, where the client finds it; a part that is there is kept.

    The client begins an interrupted file again, in a process of its own.

    Raises:
        CheckpointError: The content is not the one that the hub states.
    """
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import build_hf_headers

    if huggingface_hub.try_to_load_from_cache(name, file) is not None:
        return
    url, headers = huggingface_hub.hf_hub_url(name, file), build_hf_headers()
    stated = huggingface_hub.get_hf_file_metadata(url, headers=headers)
    if urlsplit(stated.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)
    folder = file_download.repo_folder_name(repo_id=name, repo_type="model")
    blob = Path(constants.HF_HUB_CACHE) / folder / "blobs" / str(stated.etag)
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.part")
    with locked(part):
        if blob.exists():
            return
        # A link that someone else put there is an error.
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(part, flags, 0o666), "ab") as target:
            size = target.seek(0, os.SEEK_END)
            file_download.http_get(
                stated.location,
                target,
                resume_size=size,
                headers=headers,
                expected_size=stated.size,
                tqdm_class=bar,
            )
            target.flush()
            if SHA_256.fullmatch(blob.name) and _sha256(part) != blob.name:
                target.truncate(0)
                raise CheckpointError(
                    f"{file} of {name} has arrived with other content than the hub states.",
                    fix="Fetch it again.",
                )
        part.replace(blob)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def needed_files(name: str, files: Sequence[str], gguf: str | None) -> list[str]:
    """Return the files of a model that a load needs: safetensors with settings and tokenizer, or one GGUF.

    All parts of a split GGUF file are one.

    Raises:
        OptionError: No GGUF file or several match the pattern.
        CheckpointError: The model has neither kind of files.
    """
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    plain = [file for file in files if _matches(file, HUB_FILES) and not _matches(file, HUB_IGNORED)]
    if gguf is None and any(file.endswith(".safetensors") for file in plain):
        # Settings first: what a load refuses by them costs no download of weights.
        return sorted(plain, key=lambda file: (file.endswith(".safetensors"), file))
    found = ggufs if gguf is None else [file for file in ggufs if _matches(file, (gguf, f"*/{gguf}"))]
    if found and set(found) <= {*(parts := part_names(found[0]))}:
        return [file for file in parts if file in ggufs]
    if not ggufs:
        raise CheckpointError(
            f"{name} has no GGUF files." if gguf else f"{name} has neither safetensors nor GGUF files.",
            fix="Only these are read: no .bin and no .pth files. Look for another repository of the model.",
        )
    shown = ", ".join(found or ggufs) if len(found or ggufs) <= LISTED else f"{len(found or ggufs)} files"
    like = f" like {gguf!r:.80}" if gguf else ""
    said = f"{len(found) or 'no'} GGUF files{like}"
    raise OptionError(f"{name} has {said}: {shown}.", fix="Choose one: --gguf '*Q4_K_M*', for example.")


def _matches(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.lower(), pattern.lower()) for pattern in patterns)


class _Bytes:
    """Adds up the bytes of several files."""

    def __init__(self, stage: str, total: int, progress: Progress) -> None:
        self._stage, self._total, self._progress = stage, max(total, 1), progress
        self._whole = self._part = 0
        progress(stage, 0, self._total)

    def finish(self, size_bytes: int) -> None:
        """Count a whole file, which may have been there before."""
        self._whole += size_bytes
        self._part = 0
        self._progress(self._stage, min(self._whole, self._total), self._total)

    def add(self, size_bytes: float) -> None:
        """Count bytes of the present file."""
        self._part += int(size_bytes)
        self._progress(self._stage, min(self._whole + self._part, self._total), self._total)

    def bar(self) -> type:
        """Return a class in place of tqdm's."""
        counter = self

        class Bar:
            """Has the methods that the hub's client calls; all but the bytes are ignored."""

            def __init__(self, *_arguments: Any, initial: int = 0, **_options: Any) -> None:  # noqa: ANN401
                counter.add(initial)

            def update(self, size_bytes: float | None = 1) -> None:
                counter.add(size_bytes or 0)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_exception: object) -> None: ...

            def __getattr__(self, _name: str) -> Any:  # noqa: ANN401
                return lambda *_arguments, **_options: None

        return Bar


def _problem(name: str, error: Exception) -> tuple[str, str]:
    """Return why the hub did not give a model, and what to do."""
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(error, errors.GatedRepoError):
        return (
            "the Hugging Face hub gives the model only to accounts that its owner has accepted",
            f"Ask for access on https://huggingface.co/{name}, then run `hf auth login`.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hugging Face hub has no public model of this name",
            "Check the spelling, OWNER/NAME; for a private model run `hf auth login`.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            "the model has no revision `main` on the Hugging Face hub",
            "Download a revision, and name its folder.",
        )
    if isinstance(error, errors.OfflineModeIsEnabled) or isinstance(cause, errors.OfflineModeIsEnabled):
        return (
            "HF_HUB_OFFLINE keeps heterollm from the Hugging Face hub, whose cache here lacks the model",
            "Unset HF_HUB_OFFLINE, or name the folder of a checkpoint.",
        )
    for failed in (error, cause):
        if isinstance(failed, errors.HfHubHTTPError):
            status = failed.response.status_code
            return f"the Hugging Face hub answered with status {status}", "Run the command again later."
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, errors.LocalEntryNotFoundError) or kinds & UNREACHED:
        return (
            "the Hugging Face hub cannot be reached, and its cache here lacks the model",
            "Check the connection (HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror), or name a folder.",
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"the Hugging Face hub did not give it: {reason}",
        "Check the path; or the name, the connection and, for a gated model, `hf auth login`.",
    )
