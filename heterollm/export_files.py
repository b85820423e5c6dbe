"""The files of an exported model: weights, plan, NPU graphs, tuned parameters and settings in one folder.

Each is written beside its place and then renamed, and the manifest last, so that an interrupted export goes
on with whole files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import structs

from heterollm.base import ExportError, Progress, atomic_path, delete, delete_left, is_exported
from heterollm.engine import planned_graphs
from heterollm.exported import (
    CALIBRATION,
    FIXED,
    GRAPHS,
    PLAN,
    TUNING,
    WEIGHTS,
    ExportedFile,
    ExportManifest,
    exported_digests,
    stated_option,
)
from heterollm.loading import SourceModel
from heterollm.model import ModelWeights, load_weights, read_floats, write_floats
from heterollm.planning import LoadKeywords, LoadOptions, build_graphs, calibrated_ranges, load_facts
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.kernels.npu import ContextPackager, GraphKeeper

SETTINGS: Final = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "modules.json", "config_sentence_transformers.json"),
    *("sentence_bert_config.json", "*/config.json"),
)
"""Files of a checkpoint beside its weights; those in folders are of an embedding model's pooling."""

PARTS: Final = {
    WEIGHTS: "weights",
    GRAPHS: "NPU graphs",
    PLAN: "plan",
    TUNING: "tuned kernel parameters",
    CALIBRATION: "calibration",
}
"""Parts of an exported model by the first name of their paths; others are settings."""


@dataclass(frozen=True, slots=True)
class ExportedPart:
    """A part of an exported model, with the number and size of its files."""

    name: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Args:
        folder: The folder.
        device: Name of the device.
        plan: Level of the plan.
        precision: Precision of the linears.
        context: Most positions of a session.
        parts: Content of the folder.
        built: NPU graphs that this call built; the others were there.
        versions: Versions of the program and of the NPU's software.
        notes: On the plan and the weights.
    """

    folder: Path
    device: str
    plan: str
    precision: str
    context: int
    parts: tuple[ExportedPart, ...]
    built: int
    versions: dict[str, str]
    notes: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(part.size_bytes for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return asdict(self) | {"folder": str(self.folder), "size_bytes": self.size_bytes}


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The device of an export, here or elsewhere.

    Args:
        name: Its name.
        plan: The plan.
        notes: Its differences from the request.
        keeper: Its NPU; None without.
        packager: The NPU, if it puts several graphs into a context.
        float_dtype: Type of the weights at ``fp16``.
        tuning: Content of the file of tuned kernel parameters; empty without.
        threads: Threads that ``auto`` chose for it.
    """

    name: str
    plan: Plan
    notes: tuple[str, ...]
    keeper: GraphKeeper | None
    packager: ContextPackager | None
    float_dtype: np.dtype[Any]
    tuning: str = ""
    threads: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportWriter:
    """Writes an exported model.

    Args:
        source: The checkpoint.
        asked: Options of the load.
        context: Most positions of a session.
        folder: The folder.
        target: The device.
        report: Progress.
        ahead: Options for a device that is not here.
    """

    source: SourceModel
    asked: LoadOptions
    context: int
    folder: Path
    target: ExportTarget
    report: Progress
    ahead: tuple[str | None, int | None]

    def write(self) -> Exported:
        """Write all files, and the manifest last."""
        target, asked = self.target, self.asked
        manifest = self._begun()
        plan = self._plan(manifest)
        manifest = self._listing(manifest, [PLAN])
        manifest.save(self.folder)
        settings = [path.relative_to(self.source.checkpoint.folder) for path in self._settings()]
        for path in settings:
            self._put(path.as_posix(), (self.source.checkpoint.folder / path).read_bytes())
        extra = [PLAN, *(path.as_posix() for path in settings)]
        if asked.calibration is not None:
            self._put(CALIBRATION, Path(asked.calibration).read_bytes())
            extra.append(CALIBRATION)
        if target.tuning:
            self._put(TUNING, target.tuning.encode())
            extra.append(TUNING)
        weights, floats = self._weights()
        built = self._graphs(plan, weights)
        delete_left(self.folder)
        inside = (path for part in (WEIGHTS, GRAPHS) for path in (self.folder / part).rglob("*"))
        extra += sorted(path.relative_to(self.folder).as_posix() for path in inside if path.is_file())
        own = weights.quantized
        manifest = structs.replace(
            self._listing(manifest, extra),
            finished=True,
            weights_key=weights.content_key,
            weights="" if own is None else own.path.relative_to(self.folder).as_posix(),
            floats=floats,
            notes=weights.notes,
            is_gguf=self.source.checkpoint.is_gguf,
        )
        manifest.save(self.folder)
        notes = (*target.notes, *weights.notes)
        stated = self.folder, target.name, plan.level, asked.precision, self.context
        return Exported(*stated, _parts(manifest), built, manifest.versions, notes)

    def _begun(self) -> ExportManifest:
        """Return the manifest of the folder, a new or an unfinished one; damaged files are deleted.

        Raises:
            ExportError: The folder holds an exported model of another request.
        """
        asked, target = self.asked, self.target
        fixed = {name: stated_option(name, getattr(asked, name)) for name in FIXED} | {"profile": None}
        facts, given = load_facts(asked)
        open_ones = {*LoadKeywords.__annotations__} - {*FIXED, "device", "context", "defaults", "sync"}
        usual = {name: facts[name] for name in sorted(given & open_ones)} | dict(target.threads)
        content = self.source.checkpoint.content_hash(
            lambda done, total: self.report("Reading the checkpoint", done, total)
        )
        stated = [content, target.name, self.context, fixed, usual, str(asked.profile), *self.ahead]
        key = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
        versions = {} if target.keeper is None else target.keeper.versions()
        versions = {"heterollm": version("heterollm"), **versions}
        fresh = ExportManifest(key, False, target.name, self.context, fixed, usual, versions=versions)
        kept: tuple[ExportedFile, ...] = ()
        if is_exported(self.folder):
            before = ExportManifest.load(self.folder)
            if before.request != key:
                raise ExportError(
                    f"{self.folder} holds a model exported with other options or from other weights.",
                    fix="Name another folder, or delete this one.",
                )
            kept = tuple(self._whole(before.files))
        manifest = structs.replace(fresh, files=kept)
        manifest.save(self.folder)
        return manifest

    def _whole(self, files: tuple[ExportedFile, ...]) -> Iterator[ExportedFile]:
        """Yield the files that are as their manifest says, and delete others."""
        here = [one for one in files if (self.folder / one.path).is_file()]
        found = exported_digests([self.folder / one.path for one in here], self.report)
        for one in here:
            path = self.folder / one.path
            if found[path] == one.sha256:
                yield one
            elif "/" in one.path and one.path.split("/")[0] in (WEIGHTS, GRAPHS):
                delete(path)

    def _plan(self, manifest: ExportManifest) -> Plan:
        """Return the plan that an interrupted export kept, or keep this one."""
        if any(one.path == PLAN for one in manifest.files):
            return Plan.load(self.folder / PLAN)
        self._put(PLAN, self.target.plan.to_json().encode())
        return self.target.plan

    def _settings(self) -> list[Path]:
        folder = self.source.checkpoint.folder
        names = SETTINGS if (folder / "modules.json").is_file() else SETTINGS[:-1]
        return sorted(path for name in names for path in folder.glob(name) if path.is_file())

    def _put(self, name: str, content: bytes) -> None:
        path = self.folder / name
        if not path.is_file() or path.read_bytes() != content:
            with atomic_path(path) as temporary:
                temporary.write_bytes(content)

    def _weights(self) -> tuple[ModelWeights, str]:
        """Write the weights; return them with the path of the file of floats, empty without."""
        asked, source, folder = self.asked, self.source, self.folder / WEIGHTS
        weights = load_weights(
            source.checkpoint,
            source.config,
            precision=asked.precision,
            group_size=asked.group_size,
            symmetric=asked.symmetric,
            scales=asked.scales,
            float_dtype=self.target.float_dtype,
            progress=lambda done, total: self.report("Quantising weights", done, total),
            folder=folder,
        )
        names = read_floats(source.config, asked.precision)
        if not names:
            return weights, ""
        path = folder / f"{weights.content_key[:32]}.floats.safetensors"
        write_floats(path, source.checkpoint, names, weights.content_key)
        return weights, path.relative_to(self.folder).as_posix()

    def _graphs(self, plan: Plan, weights: ModelWeights) -> int:
        """Write the NPU's graphs and the weights of shadows; return the number of built graphs."""
        keeper = self.target.keeper
        if keeper is None or not plan.uses_npu:
            return 0
        ranges = calibrated_ranges(self.asked.weights_calibration, weights)
        for graph in planned_graphs(plan, weights.specs, ranges):
            if graph.shadow:
                file = weights.channels(graph.spec.layer, graph.spec.group, self.target.float_dtype)
                assert file is not None  # weights with values
                file.close()
        folder = self.folder / GRAPHS
        keeper.keep_graphs(weights.content_key, folder)
        builds = build_graphs(
            *(keeper, self.target.packager, plan, weights, ranges, self.context, self.report), folder=folder
        )
        return sum(build.compiled for build in builds)

    def _listing(self, manifest: ExportManifest, paths: list[str]) -> ExportManifest:
        """Return the manifest with some files, which the cache then knows for whole."""
        found = exported_digests([self.folder / path for path in paths], self.report)
        files = (
            ExportedFile(name, (self.folder / name).stat().st_size, found[self.folder / name])
            for name in paths
        )
        return structs.replace(manifest, files=tuple(files))


def _parts(manifest: ExportManifest) -> tuple[ExportedPart, ...]:
    sizes: dict[str, list[int]] = {name: [] for name in (*PARTS.values(), "settings and tokenizer")}
    for one in manifest.files:
        sizes[PARTS.get(one.path.split("/")[0], "settings and tokenizer")].append(one.size_bytes)
    return tuple(ExportedPart(name, len(own), sum(own)) for name, own in sizes.items() if own)
