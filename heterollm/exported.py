"""Reads the folder of an exported model: its manifest, its files, and the options of its load.

:mod:`heterollm.exporting` writes it. Each format has its version in its own files, and its reader refuses
others: plan, NPU graphs, calibration, tuned parameters. The manifest has that of the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta, Struct
from numpy.typing import DTypeLike

from heterollm.base import (
    EXPORTED,
    Count,
    ExportError,
    Positive,
    Progress,
    atomic_path,
    decode,
    decode_json,
    file_digests,
    is_plain_name,
    parse_json,
    read_file,
    shown_option,
)
from heterollm.kernels.device import Device
from heterollm.kernels.ops import OpSpec
from heterollm.model import ExportedCheckpoint, ModelConfig, ModelWeights, exported_weights
from heterollm.planning import LoadOptions, calibration_key, read_plan
from heterollm.solver import LEVELS, SOLVED_LEVELS, Plan, PlanRequest

FOLDER_VERSION: Final = 1
"""Version of the folder; raise it when a program would misread the folders of an older one."""

PLAN, TUNING, CALIBRATION = "plan.json", "tuning.json", "calibration.json"
WEIGHTS, GRAPHS = "weights", "graphs"

FORMATS: Final = ("precision", "group_size", "symmetric", "scales")
FIXED: Final = (*FORMATS, "plan", "request", "calibration", "length_policy", "lora", "profile")
"""Options of a load that an exported model has already, beside the device and the most positions."""

AGAIN: Final = "Export the model again: `heterollm export MODEL -o {}`."


class ExportedFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of an exported model.

    Args:
        path: Path in the folder, with slashes.
        size_bytes: Its size.
        sha256: Hash of its content.
    """

    path: Annotated[str, Meta(min_length=1, max_length=1024)]
    size_bytes: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ExportManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of an exported model.

    Args:
        request: Hash of the checkpoint and of the options, by which an interrupted export goes on.
        finished: Whether all files are there.
        device: Name of the device.
        context: Most positions of a session.
        fixed: Options that the files follow from, in the form of :func:`stated_option`.
        usual: Options of a load that may be replaced.
        files: Its files.
        versions: Versions of the program and of the NPU's software.
        weights_key: Content hash of the weights.
        weights: File of the quantised weights; empty at precision ``fp16``.
        floats: File of the float tensors; empty without.
        notes: Those of the weights.
        is_gguf: Whether the model came from a GGUF file.
    """

    request: str
    finished: bool
    device: str
    context: Positive
    fixed: dict[str, Any]
    usual: dict[str, Any]
    files: tuple[ExportedFile, ...] = ()
    versions: dict[str, str] = {}
    weights_key: str = ""
    weights: str = ""
    floats: str = ""
    notes: tuple[str, ...] = ()
    is_gguf: bool = False

    def save(self, folder: Path) -> None:
        """Write the manifest, with its own hash.

        Raises:
            CacheError: The folder cannot be written.
        """
        content = msgspec.to_builtins(self)
        data = {"version": FOLDER_VERSION, "sha256": _hash(content), "content": content}
        with atomic_path(folder / EXPORTED) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read and check the manifest of a folder.

        Raises:
            ExportError: It cannot be read, is damaged, or of another version.
        """
        path, fix = folder / EXPORTED, AGAIN.format(folder)
        try:
            data = decode_json(read_file(path), source=str(path), error=ExportError, fix=fix)
        except OSError as error:
            raise ExportError(f"{path} cannot be read: {error.strerror}.", fix=fix) from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != FOLDER_VERSION:
            raise ExportError(
                f"{folder} has version {version!r:.20} of exported models, and this program reads "
                f"{FOLDER_VERSION}.",
                fix=fix,
            )
        content = data.get("content")
        if data.get("sha256") != _hash(content):
            raise ExportError(f"{path} is damaged: its content has another hash.", fix=fix)
        found = decode(content, cls, source=f"{path} is damaged", error=ExportError, fix=fix)
        names = [one.path for one in found.files] + [name for name in (found.weights, found.floats) if name]
        for name in names:
            if not all(map(is_plain_name, name.split("/"))):
                raise ExportError(f"{path} names a file {name!r:.80} outside of the folder.", fix=fix)
        return found


@dataclass(frozen=True, slots=True)
class ExportedFolder:
    """A finished exported model.

    Args:
        folder: The folder.
        manifest: Its manifest.
    """

    folder: Path
    manifest: ExportManifest

    @classmethod
    def find(cls, model: object) -> Self | None:
        """Return the exported model in a folder; None for any other model.

        Raises:
            ExportError: The export is unfinished, or its manifest is damaged or of another version.
        """
        if not isinstance(model, str | Path):
            return None
        try:
            folder = Path(model).expanduser()
            if not (folder / EXPORTED).is_file():
                return None
        except (OSError, RuntimeError, ValueError):  # the reader of checkpoints says more
            return None
        manifest = ExportManifest.load(folder)
        if not manifest.finished:
            raise ExportError(
                f"The export into {folder} has not finished.",
                fix="Run the same command again; it goes on where it stopped.",
            )
        return cls(folder, manifest)

    def check(self, report: Progress) -> None:
        """Compare all files with the manifest: sizes always, contents once for each state of a file.

        The cache keeps the hash of a file until its size, inode or a time changes.

        Raises:
            ExportError: A file is missing or differs; the message names it.
        """
        files = self.manifest.files
        for one in files:
            path = self.folder / one.path
            try:
                size_bytes = path.stat().st_size
            except OSError as error:
                raise self._error(f"{path} is missing: {error.strerror}.") from error
            if size_bytes != one.size_bytes:
                raise self._error(f"{path} has {size_bytes} bytes instead of {one.size_bytes}.")
        found = exported_digests([self.folder / one.path for one in files], report)
        for one in files:
            if found[self.folder / one.path] != one.sha256:
                raise self._error(f"{self.folder / one.path} is damaged: its content has another hash.")

    def check_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return given options of a load that the folder leaves open.

        Args:
            given: Options by name, as of :meth:`heterollm.LLM.load`; defaults of a file yield to the folder.

        Raises:
            ExportError: A given option contradicts the folder.
        """
        held, of_file = self.manifest, given.get("defaults", frozenset())
        yielding = {"defaults", *(of_file & {*FIXED, "device", "context"})}
        own = {name: value for name, value in given.items() if name not in yielding}
        device, context = own.pop("device", "auto"), own.get("context")
        if device not in ("auto", held.device):
            raise self._contradiction("device", device, held.device)
        if type(context) is int and context > held.context:
            raise self._contradiction("context", context, f"at most {held.context}")
        for name in own.keys() & {*FIXED}:
            value = own.pop(name)
            if value is not None and stated_option(name, value) != held.fixed[name]:
                raise self._contradiction(name, value, held.fixed[name])
        return own if context is not None else {n: value for n, value in own.items() if n != "context"}

    def options(self, given: Mapping[str, Any], report: Progress) -> LoadOptions:
        """Return the options of a load: those of the folder, and given ones that it leaves open.

        Args:
            given: Options by name, as of :meth:`heterollm.LLM.load`.
            report: Called while files are checked.

        Raises:
            ExportError: A given option contradicts the folder, or a file is missing or damaged.
            OptionError: A given option is not legal.
            PlanError: The plan is of another version.
        """
        own, held = self.check_options(given), self.manifest
        self.check(report)
        formats = {name: held.fixed[name] for name in FORMATS}
        usual = {"device": held.device, "context": held.context} | formats | held.usual
        chosen: dict[str, Any] = usual | own
        # Those of the folder were checked with it.
        chosen["defaults"] = frozenset(usual.keys() - own.keys()) | given.get("defaults", frozenset())
        calibration = self.folder / CALIBRATION
        if calibration.is_file() and reads_calibration(chosen):
            chosen["calibration"] = calibration
        return LoadOptions(plan=Plan.load(self.folder / PLAN), **chosen)

    def checkpoint(self) -> ExportedCheckpoint:
        """Return its settings and float tensors."""
        held = self.manifest
        sizes = (one.size_bytes for one in held.files if one.path.startswith(f"{WEIGHTS}/"))
        floats = self.folder / held.floats if held.floats else None
        return ExportedCheckpoint(self.folder, floats, sum(sizes), is_gguf=held.is_gguf)

    def weights(
        self, checkpoint: ExportedCheckpoint, config: ModelConfig, specs: Sequence[OpSpec], dtype: DTypeLike
    ) -> ModelWeights:
        """Return its weights.

        Args:
            checkpoint: That of :meth:`checkpoint`.
            config: The model.
            specs: All its groups, the head last.
            dtype: Type of the weights at ``fp16``.
        """
        held = self.manifest
        quantized = self.folder / held.weights if held.weights else None
        kept = held.weights_key, held.notes, quantized, self.folder / WEIGHTS
        return exported_weights(checkpoint, config, specs, *kept, dtype)

    def give_to(self, device: Device) -> tuple[str, ...]:
        """Give a device the tuned parameters and the NPU's graphs; return notes on unused ones."""
        if device.keeper is not None:
            device.keeper.keep_graphs(self.manifest.weights_key, self.folder / GRAPHS)
        if not (self.folder / TUNING).is_file():
            return ()
        reason = device.gpu.tuning.take(read_file(self.folder / TUNING))
        return (f"The exported kernel parameters are not used. {reason}",) if reason else ()

    def _error(self, text: str) -> ExportError:
        return ExportError(text, fix=AGAIN.format(self.folder))

    def _contradiction(self, name: str, value: object, held: object) -> ExportError:
        return ExportError(
            f"{shown_option(name, value)} contradicts the exported model {self.folder}, in which it is "
            f"{held!s:.80}.",
            fix="Leave it out, or export the model again with it.",
        )


def reads_calibration(options: Mapping[str, Any]) -> bool:
    """Return whether a load with a plan that is made reads the calibration of its weights or experts."""
    stepped = options["precision"] == "w4a16" and options["scales"] == "stepped"
    return stepped or options["precision"] == "w8a8" or options.get("experts_gib") is not None


def stated_option(name: str, value: Any) -> Any:  # noqa: ANN401 - any option
    """Return an option in a form that JSON can hold, so that equal forms mean equal files.

    Raises:
        HeteroLLMError: A file that it names cannot be read.
    """
    if isinstance(value, PlanRequest):
        return parse_json(msgspec.json.encode(value, order="deterministic"))
    if not isinstance(value, str | Path | Plan):
        return value
    if name == "plan" and value not in ("auto", *LEVELS, *SOLVED_LEVELS):
        return hashlib.sha256(read_plan(value).to_json().encode()).hexdigest()
    if isinstance(value, Plan) or name not in ("calibration", "lora"):
        return str(value)
    if name == "calibration":
        return calibration_key(value)
    files = sorted(path for path in Path(value).glob("adapter_*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def exported_digests(paths: Sequence[Path], report: Progress) -> dict[Path, str]:
    """Return the SHA-256 of files, and report the bytes read as a stage.

    Raises:
        ExportError: A file cannot be read.
    """
    return file_digests(paths, partial(report, "Checking the exported model"), error=ExportError)


def _hash(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
