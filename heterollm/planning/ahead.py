"""Compiles a Snapdragon's NPU graphs ahead, on an x86 machine, into the same cache that a device reads.

Compiling on the device takes its time and memory at the first load. QNN's compiler in the x86-64 Linux wheel
makes the same context binaries for any chip, and files them under names that do not depend on the machine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from heterollm.base import (
    CACHE_VARIABLE,
    MIB,
    CacheError,
    OptionError,
    Progress,
    cache_root,
    format_bytes,
    silent,
)
from heterollm.engine import HEAD_ROWS, npu_shard, shard_ranges
from heterollm.kernels.npu import GRAPHS_FOLDER, INTEGER_FORMS, SOCS, GraphForm, QnnNpu, StaticRanges
from heterollm.kernels.ops import Group, OpSpec, Precision, Scales, ffn_specs
from heterollm.model import Checkpoint, ModelConfig, ModelWeights, load_weights
from heterollm.planning.calibrated import calibrated_ranges, calibration_key
from heterollm.planning.choice import choose_plan
from heterollm.planning.load_options import LoadOptions, choose_context
from heterollm.solver import Plan, check_plan

__all__ = ["GroupBuild", "Precompiled", "precompile"]

TARGET_DEVICE: Final = "snapdragon"

GRAPH_BYTES: Final = 96 * 1024
"""Size of a graph's files without its weights."""

GROWTH_FRACTION: Final = 0.12
"""Largest growth of weights: 5 % in heads of 8 bits, 11 % where zero points become corrections."""

SPARE_BYTES: Final = 64 * MIB
"""Room left free on the disk."""


@dataclass(frozen=True, slots=True)
class GroupBuild:
    """Build times of the graphs of one group at one length, over all layers.

    Args:
        group: The group.
        length: Tokens of each graph.
        graphs: Number of graphs.
        compiled: Number compiled now; the others were in the cache.
        loadable: Number that QNN's emulator loads on this machine.
        size_bytes: Size of their files.
        build_s: Time to compile them.
        refusal: Reason why the emulator refuses a graph, else empty.
    """

    group: Group
    length: int
    graphs: int
    compiled: int
    loadable: int
    size_bytes: int
    build_s: float
    refusal: str


@dataclass(frozen=True, slots=True)
class Precompiled:
    """The graphs of a model for one chip.

    Args:
        soc: Qualcomm's number of the chip.
        chip: Its name.
        plan: The plan whose graphs these are.
        precision: Precision of the linears.
        folder: Folder of the graphs.
        versions: The software that compiled them; a device replaces graphs of other versions.
        builds: By group and length.
    """

    soc: str
    chip: str
    plan: str
    precision: Precision
    folder: Path
    versions: dict[str, str]
    builds: tuple[GroupBuild, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all graphs."""
        return sum(build.size_bytes for build in self.builds)

    @property
    def build_s(self) -> float:
        """Time to compile the graphs that were not in the cache."""
        return sum(build.build_s for build in self.builds)

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return asdict(self) | {
            "folder": str(self.folder),
            "size_bytes": self.size_bytes,
            "build_s": self.build_s,
        }


@dataclass(frozen=True, slots=True)
class _Graph:
    """One graph to build."""

    spec: OpSpec
    npu_rows: tuple[int, ...]
    length: int
    form: GraphForm | None
    ranges: StaticRanges | None

    @property
    def weight_bytes(self) -> int:
        return self.spec.slice_bytes(self.npu_rows)


def precompile(
    model: str | Path,
    *,
    soc: str,
    plan: str | Path | Plan = "layer",
    precision: Precision = "w4a16",
    group_size: int = 32,
    symmetric: bool = True,
    scales: Scales = "free",
    calibration: str | Path | None = None,
    prompts: Sequence[int] | None = None,
    decode: bool = True,
    context: int | None = None,
    progress: Progress | None = None,
) -> Precompiled:
    """Compile every NPU graph that a model needs on a Snapdragon, and see which the emulator loads.

    Args:
        model: A local folder or a hub name.
        soc: Qualcomm's number of the chip, a key of :data:`heterollm.kernels.npu.SOCS`.
        plan: A plan made for ``snapdragon``, a plan file, or a level.
        precision: As for :meth:`heterollm.LLM.load`, and so are the next three.
        group_size: Weights that share a scale.
        symmetric: Whether 4-bit codes have no zero point.
        scales: Scales of the 4-bit weights.
        calibration: File of a calibration, with which the plan was made.
        prompts: Standard lengths of prompts to compile for; all that the plan uses by default.
        decode: Whether to compile the graphs of one token.
        context: Positions of a session; decides with the plan which lengths are used.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        HeteroLLMError: The checkpoint, the plan or an option is not usable, this machine has no QNN
            compiler, or the disk has too little room; the last before anything is compiled.
    """
    report = progress or silent
    LoadOptions(
        plan=plan,
        precision=precision,
        group_size=group_size,
        symmetric=symmetric,
        scales=scales,
        calibration=calibration,
    )
    if soc not in SOCS:
        known = ", ".join(f"{number} ({entry.name})" for number, entry in SOCS.items())
        raise OptionError(f"There is no chip {soc!r}.", fix=f"Choose a number among {known}.")
    npu = QnnNpu(emulator=True, soc_model=soc)
    wanted = _wanted(prompts, decode, npu.standard_lengths)
    checkpoint = Checkpoint(model)
    config = ModelConfig.from_folder(checkpoint.folder)
    positions = choose_context(config, context)
    weights = load_weights(
        checkpoint,
        config,
        precision=precision,
        group_size=group_size,
        symmetric=symmetric,
        scales=scales,
        float_dtype=np.float16,
        progress=lambda done, total: report("Quantising weights", done, total),
    )
    chosen = choose_plan(
        plan,
        weights.specs,
        device=TARGET_DEVICE,
        standard_lengths=npu.standard_lengths,
        precision=precision,
        context=positions,
        calibration=calibration_key(calibration),
    )
    check_plan(
        chosen,
        weights.specs,
        npu,
        longest=config.max_positions,
        head_rows=HEAD_ROWS,
        activation=config.activation,
    )
    ranges = calibrated_ranges(calibration, weights)
    every = dict.fromkeys(_graphs(chosen, weights.specs, ranges))
    graphs = [graph for graph in every if graph.length in wanted]
    if not graphs:
        raise OptionError(
            f"Plan {chosen.level!r} runs no graph of these lengths on the NPU: nothing is to compile.",
            fix="Choose plan level layer or npu, or other lengths.",
        )
    _check_disk(weights, npu, graphs)
    builds = _build(weights, npu, graphs, report)
    return Precompiled(
        soc,
        SOCS[soc].name,
        chosen.level,
        precision,
        cache_root() / GRAPHS_FOLDER,
        npu.versions(),
        tuple(builds),
    )


def _wanted(prompts: Sequence[int] | None, decode: bool, standard: tuple[int, ...]) -> frozenset[int]:
    """Return the lengths to compile for; graphs of one token are those of decode."""
    unknown = [length for length in prompts or () if length not in standard]
    if unknown:
        raise OptionError(
            f"There are no graphs of {unknown[0]} tokens.",
            fix=f"Choose prompts among {', '.join(map(str, standard))}.",
        )
    found = frozenset(standard if prompts is None else prompts) - {1}
    return found | {1} if decode or 1 in (prompts or ()) else found


def _graphs(
    plan: Plan, specs: Sequence[OpSpec], ranges: Mapping[tuple[int, Group], StaticRanges]
) -> Iterator[_Graph]:
    """Yield every graph that some pass of the plan runs, layer by layer, repeated ones included."""
    for spec in (*specs, *ffn_specs(specs)):
        for entry in plan.placed:
            placement, (first, last) = entry.placement, entry.layers
            used = entry.group == spec.group and first <= spec.layer <= last
            if used and entry.lengths[0] <= plan.longest_pass(entry, HEAD_ROWS):
                own, form = None, placement.form
                if form in INTEGER_FORMS:
                    own = shard_ranges(ranges, spec, placement.npu_rows)
                    form = None if own is None else form
                for length in placement.npu_lengths:
                    yield _Graph(spec, placement.npu_rows, length, form, own)  # type: ignore[arg-type]


def _check_disk(weights: ModelWeights, npu: QnnNpu, graphs: Sequence[_Graph]) -> None:
    """Refuse builds that the disk cannot hold.

    Raises:
        CacheError: It cannot; the message has the needed and the free bytes.
    """
    needed_bytes = SPARE_BYTES
    for graph in graphs:
        shard = npu_shard(weights, graph.spec, graph.npu_rows, graph.ranges)
        stored_bytes = npu.stored_bytes(shard, graph.length, graph.form)
        estimate_bytes = int(graph.weight_bytes * (1 + GROWTH_FRACTION)) + GRAPH_BYTES
        needed_bytes += max(0, estimate_bytes - stored_bytes)
    # While one graph is built, its weights lie beside its binary.
    needed_bytes += max(graph.weight_bytes for graph in graphs)
    folder = cache_root()
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise CacheError(
            f"{len(graphs)} graphs take about {format_bytes(needed_bytes)}, and {folder} has "
            f"{format_bytes(free_bytes)} free.",
            fix="Compile fewer lengths with --prompt, free some space, or point "
            f"{CACHE_VARIABLE} at another disk.",
        )


def _build(
    weights: ModelWeights, npu: QnnNpu, graphs: Sequence[_Graph], report: Progress
) -> Iterator[GroupBuild]:
    """Build graphs by group and length, and yield the builds of each pair."""
    total_bytes = sum(graph.weight_bytes for graph in graphs)
    done_bytes = 0
    order: tuple[Group, ...] = get_args(Group)
    kinds = {(order.index(graph.spec.group), graph.length) for graph in graphs}
    for group, length in ((order[index], length) for index, length in sorted(kinds)):
        mine = [graph for graph in graphs if (graph.spec.group, graph.length) == (group, length)]
        compiled = loadable = size_bytes = 0
        build_s = 0.0
        refusal = ""
        for graph in mine:
            report("Compiling NPU graphs", done_bytes, total_bytes)
            shard = npu_shard(weights, graph.spec, graph.npu_rows, graph.ranges)
            started = time.perf_counter()
            built = npu.build(shard, length, graph.form)
            build_s += (time.perf_counter() - started) if built.compiled else 0.0
            compiled += built.compiled
            loadable += not built.refusal
            size_bytes += built.size_bytes
            refusal = refusal or built.refusal
            done_bytes += graph.weight_bytes
        yield GroupBuild(
            group=group,
            length=length,
            graphs=len(mine),
            compiled=compiled,
            loadable=loadable,
            size_bytes=size_bytes,
            build_s=build_s,
            refusal=refusal,
        )
    report("Compiling NPU graphs", total_bytes, total_bytes)
