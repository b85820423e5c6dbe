"""Models of the Hugging Face hub: their names, and the files that a model needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import huggingface_hub

from heterollm.base import CheckpointError, OptionError, Progress, is_plain_name, locked, silent
from heterollm.model.hub_files import HUB_FILES, HUB_IGNORED, needed_files, plain_files
from heterollm.model.hub_names import HubName, parse_hub_name
from heterollm.model.stored import part_names

CONFIG_FILES: Final = ("config.json", "generation_config.json")

SHA_256: Final = re.compile("[0-9a-f]{64}")
NAMING_HEADERS: Final = ("ETag", "X-Linked-ETag", "X-Repo-Commit", "X-Xet-Hash")
"""Headers of which the hub's client makes names of files and folders."""

NAMING_FIELDS: Final = {"sha", "oid", "sha256", "blobId", "xetHash"}
"""Fields of its listings of which it makes them, too."""

RESUMED_BYTES: Final = 16 << 20
"""Smaller files begin again after an interruption."""

UNREACHED: Final = {"TransportError", "ConnectionError"}
"""Errors of a connection, by the names that several libraries give them."""


LOCK: Final = threading.Lock()
"""Of the client's threads, where they show bars."""


class HubUnreachedError(CheckpointError):
    """The hub could not be asked: there is no connection, or it is forbidden."""


def hub_folder(name: str, *, weights: bool = True, progress: Progress = silent) -> Path:
    """Return the folder of a model in the hub's cache, after fetching the files that it lacks.

    Args:
        name: The hub name.
        weights: Whether to fetch all files, or only the model's configuration.
        progress: Called with the bytes done and the total.

    Raises:
        CheckpointError: The hub did not deliver it.
    """
    try:
        _check_answers()
        found = huggingface_hub.snapshot_download(
            name,
            allow_patterns=list(HUB_FILES if weights else CONFIG_FILES),
            ignore_patterns=list(HUB_IGNORED),
            tqdm_class=_snapshot_bar(f"Fetching {name}", progress),
        )
    except CheckpointError:
        raise
    except Exception as error:
        # The hub's client raises the errors of several libraries, without a common base.
        problem, fix = _problem(name, error)
        raise CheckpointError(f"There is no folder {name}, and {problem}.", fix=fix) from error
    return Path(found)


def hub_file(named: HubName, progress: Progress = silent) -> Path:
    """Return the GGUF file of a model, after fetching it; without a connection the one in the hub's cache.

    Args:
        named: The model, with or without the quantisation of its file.
        progress: Called with the bytes done and the total.

    Raises:
        OptionError: No file or several have the quantisation.
        CheckpointError: The hub did not deliver it.
    """
    try:
        return _pull(named, named.gguf, progress)
    except HubUnreachedError:
        if (kept := _kept_file(named)) is None:
            raise
        return kept


def _kept_file(named: HubName) -> Path | None:
    """Return the GGUF file that the hub's cache has of a model; None unless one alone is meant and whole."""
    try:
        folder = Path(huggingface_hub.snapshot_download(named.name, local_files_only=True))
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.is_file()]
        found = needed_files(named.name, files, named.gguf, named.quant)
    except Exception:  # noqa: BLE001 - the error of the connection says more
        return None
    return folder / found[0] if set(found) == {*part_names(found[0])} else None


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
    return _pull(named, gguf or named.gguf, progress)


def _pull(named: HubName, gguf: str | None, progress: Progress) -> Path:
    name = named.name
    try:
        _check_answers()
        info = huggingface_hub.HfApi().model_info(name, files_metadata=True)
        sizes = plain_files({file.rfilename: file.size or 0 for file in info.siblings or ()})
        wanted = needed_files(name, tuple(sizes), gguf, named.quant)
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
        kind = HubUnreachedError if _is_unreached(error) else CheckpointError
        raise kind(message, fix=f"{fix} Files that have arrived are kept.") from error
    return paths[0] if wanted[0].endswith(".gguf") else paths[0].parent


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


class _QuietBar:
    """Stands for tqdm's: has every method that the hub's client calls, in all versions, and shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None: ...

    def __getattr__(self, _name: str) -> Any:  # noqa: ANN401
        return lambda *_arguments, **_options: None


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

        class Bar(_QuietBar):
            """Counts the bytes of a file."""

            def __init__(self, *_arguments: Any, initial: int = 0, **_options: Any) -> None:  # noqa: ANN401
                counter.add(initial)

            def update(self, size_bytes: float | None = 1) -> None:
                counter.add(size_bytes or 0)

        return Bar


def _snapshot_bar(stage: str, progress: Progress) -> type:
    """Return a class in place of tqdm's that reports the bytes of a snapshot and shows nothing itself."""

    class Bar(_QuietBar):
        """Reports bytes; the client's bars of files are not reported."""

        _lock = LOCK

        def __init__(
            self,
            items: Iterable[Any] = (),
            total: float | None = None,
            **options: Any,  # noqa: ANN401
        ) -> None:
            self._items = items
            self.total, self.n = total, options.get("initial", 0)
            self._in_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._in_bytes and self.total:
                progress(stage, int(min(self.n, self.total)), int(self.total))

        def __iter__(self) -> Iterator[Any]:
            yield from self._items

        @classmethod
        def get_lock(cls) -> threading.Lock:
            """Return the lock of the client's threads."""
            return LOCK

        @classmethod
        def set_lock(cls, _lock: object) -> None:
            """Keep the lock."""

    return Bar


def _is_unreached(error: Exception) -> bool:
    """Return whether nobody answered, or nobody was asked."""
    from huggingface_hub import errors

    unasked = (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, unasked) or isinstance(error.__cause__, unasked) or bool(kinds & UNREACHED)


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
    if _is_unreached(error):
        return (
            "the Hugging Face hub cannot be reached, and its cache here lacks the model",
            "Check the connection (HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror), or name a folder.",
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"the Hugging Face hub did not give it: {reason}",
        "Check the path; or the name, the connection and, for a gated model, `hf auth login`.",
    )
