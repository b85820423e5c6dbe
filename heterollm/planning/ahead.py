"""Builds a plan's NPU graphs; a Snapdragon's ahead, on an x86 machine, into the cache that a device reads.

Compiling on the device takes its time and memory at the first load. QNN's compiler in the x86-64 Linux wheel
makes the same context binaries for any chip, and files them under names that do not depend on the machine.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from heterollm.base import (
    CACHE_VARIABLE,
    MIB,
    CacheError,
    OptionError,
    ProfileError,
    Progress,
    format_bytes,
    make_own_folder,
    own_folder,
    silent,
)
from heterollm.engine import (
    PlannedGraph,
    attention_graphs,
    check_runs,
    context_graphs,
    planned_contexts,
    planned_graphs,
    planned_shard,
    score_graphs,
)
from heterollm.kernels.npu import (
    GRAPHS_FOLDER,
    SOCS,
    BuiltGraph,
    ContextPackager,
    GraphForm,
    GraphKeeper,
    GraphShard,
    QnnNpu,
    SharedShard,
    StaticRanges,
    WeightShard,
    chosen_context_layers,
)
from heterollm.kernels.ops import Group, Precision, Scales
from heterollm.model import ALL_GROUPS, Checkpoint, ModelConfig, ModelWeights, load_weights
from heterollm.planning.calibrated import calibrated_ranges
from heterollm.planning.inputs import inputs_of_file
from heterollm.planning.load_options import LoadOptions, choose_context
from heterollm.planning.plan import make_plan
from heterollm.planning.planned import Planned
from heterollm.profiler.records import Profile
from heterollm.solver import Plan, PlanRequest

TARGET_DEVICE: Final = "snapdragon"

GRAPH_BYTES: Final = 96 * 1024
"""Size of a graph's files without its weights."""

GROWTH_FRACTION: Final = 0.12
"""Largest growth of weights: 5 % in heads of 8 bits, 11 % where zero points become corrections."""

SPARE_BYTES: Final = 64 * MIB
"""Room left free on the disk."""


_SharedGraph: TypeAlias = tuple[str, int, SharedShard, int]
"""Operator, tokens, shard and length of a graph that layers share."""


@dataclass(frozen=True, slots=True)
class GroupBuild:
    """Build times of the graphs of one group at one length, or of all that share contexts, over all layers.

    Args:
        group: The group, or all of a context; layers share ``scores`` of sparse attention and ``attention``.
        lengths: Tokens of each graph, or of each of its experts.
        graphs: Number of graphs.
        contexts: Number of context binaries that hold them.
        compiled: Number compiled now; the others were in the cache.
        loadable: Number that QNN's emulator loads on this machine.
        size_bytes: Size of their files.
        build_s: Time to compile them.
        refusal: Reason why the emulator refuses a graph, else empty.
    """

    group: str
    lengths: tuple[int, ...]
    graphs: int
    contexts: int
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
        notes: On what the profile lacks, or what does not pay by it.
    """

    soc: str
    chip: str
    plan: str
    precision: Precision
    folder: Path
    versions: dict[str, str]
    builds: tuple[GroupBuild, ...]
    notes: tuple[str, ...] = ()

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


def precompile(
    model: str | Path,
    *,
    soc: str,
    plan: str | Path | Plan = "layer",
    profile: Path | None = None,
    request: PlanRequest | None = None,
    precision: Precision = "w4a16",
    group_size: int = 32,
    symmetric: bool = True,
    scales: Scales = "free",
    calibration: str | Path | None = None,
    prompts: Sequence[int] | None = None,
    decode: bool = True,
    context: int | None = None,
    context_layers: int | None = None,
    progress: Progress | None = None,
) -> Precompiled:
    """Compile every NPU graph that a model needs on a Snapdragon, and see which the emulator loads.

    Args:
        model: A local folder, a GGUF file or a hub name.
        soc: Qualcomm's number of the chip, a key of :data:`heterollm.kernels.npu.SOCS`.
        plan: A plan made for ``snapdragon``, a plan file, or a level.
        profile: File of a Snapdragon's profile, for the solver's levels and for techniques.
        request: Options of the solver's plan, with its techniques.
        precision: As for :meth:`heterollm.LLM.load`, and so are the next three.
        group_size: Weights that share a scale.
        symmetric: Whether 4-bit codes have no zero point.
        scales: Scales of the 4-bit weights.
        calibration: File of a calibration, with which the plan was made.
        prompts: Standard lengths of prompts to compile for; all that the plan uses by default.
        decode: Whether to compile the graphs of one token.
        context: Positions of a session; decides with the plan which lengths are used.
        context_layers: Layers that share a context, which holds all lengths of their slices and equal weights
            once; 0 for contexts of one graph. By default as ``$HETEROLLM_CONTEXT_LAYERS`` says, else 1; 0 if
            not all lengths are compiled, since a device looks for contexts of all lengths of its plan.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        HeteroLLMError: The checkpoint, the plan or an option is not usable, this machine has no QNN
            compiler, or the disk has too little room; the last before anything is compiled.
    """
    report = progress or silent
    options = LoadOptions(
        plan=plan,
        request=request,
        precision=precision,
        group_size=group_size,
        symmetric=symmetric,
        scales=scales,
        calibration=calibration,
    )
    layers = _context_layers(context_layers, partly=prompts is not None or not decode)
    npu = open_compiler(soc, layers)
    wanted = _wanted(prompts, decode, npu.standard_lengths)
    checkpoint = Checkpoint(model, progress=report)
    config = ModelConfig.from_folder(checkpoint.folder)
    positions = choose_context(config, context)
    planned = plan_ahead(npu, options, config, positions, profile)
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
    ranges = calibrated_ranges(options.weights_calibration, weights)
    builds = build_graphs(npu, npu, planned.plan, weights, ranges, positions, report, wanted=wanted)
    if not builds:
        raise OptionError(
            f"Plan {planned.plan.level!r} runs no graph of these lengths on the NPU: nothing is to compile.",
            fix="Choose plan level layer or npu, or other lengths.",
        )
    return Precompiled(
        soc,
        SOCS[soc].name,
        planned.plan.level,
        precision,
        own_folder(GRAPHS_FOLDER),
        npu.versions(),
        builds,
        planned.notes,
    )


def open_compiler(soc: str, context_layers: int | None = None) -> QnnNpu:
    """Return the compiler of a chip's graphs.

    Args:
        soc: Qualcomm's number of the chip.
        context_layers: Layers that share a context; None as ``$HETEROLLM_CONTEXT_LAYERS`` says, else 1.

    Raises:
        OptionError: There is no such chip, or the number of layers is negative.
        DeviceError: This machine has no compiler.
    """
    if soc not in SOCS:
        known = ", ".join(f"{number} ({entry.name})" for number, entry in SOCS.items())
        raise OptionError(f"There is no chip {soc!r}.", fix=f"Choose a number among {known}.")
    return QnnNpu(emulator=True, soc_model=soc, context_layers=_context_layers(context_layers, partly=False))


def plan_ahead(
    npu: QnnNpu, options: LoadOptions, config: ModelConfig, context: int, profile: str | Path | None
) -> Planned:
    """Return the plan of a Snapdragon that is not here, after a check that its NPU runs it.

    Args:
        npu: The compiler of its graphs.
        options: Of the load.
        config: The model.
        context: Positions of a session.
        profile: File of the device's profile, for the solver's levels and for techniques.

    Raises:
        HeteroLLMError: The plan, the profile or an option is not usable.
    """
    inputs = inputs_of_file(
        *(options, config, context, _profile(profile)),
        device=TARGET_DEVICE,
        standard_lengths=npu.standard_lengths,
    )
    planned = make_plan(inputs)
    check_runs(config, inputs.specs, planned.plan, npu)
    return planned


def build_graphs(
    keeper: GraphKeeper,
    packager: ContextPackager | None,
    plan: Plan,
    weights: ModelWeights,
    ranges: Mapping[tuple[int, Group], StaticRanges],
    context: int,
    report: Progress,
    *,
    wanted: frozenset[int] | None = None,
    folder: Path | None = None,
) -> tuple[GroupBuild, ...]:
    """Build every graph that some pass of a plan runs, and return the builds by group and length.

    Args:
        keeper: Builds and keeps the graphs.
        packager: The same NPU, if it puts several graphs into a context.
        plan: The plan.
        weights: The model's weights.
        ranges: Calibrated ranges by layer and group.
        context: Positions of a session.
        report: Called with a stage's name, steps done and steps in all.
        wanted: Lengths of prompts and decode to build for; None for all.
        folder: Folder of the graphs; None for that of the cache.

    Raises:
        GraphError: A graph does not compile.
        CacheError: The disk has too little room, before anything is built; or the folder cannot be written.
    """
    layers = 0 if packager is None else packager.context_layers
    every = dict.fromkeys(planned_graphs(plan, (*weights.specs, *weights.experts), ranges))
    # Capacities of experts are no lengths of prompts.
    graphs = [graph for graph in every if wanted is None or graph.length in wanted or graph.experts]
    config, heads = weights.config, weights.config.attention
    members = heads.heads // heads.kv_heads
    shared: list[_SharedGraph] = [
        *(("scores", rows // members, own, rows) for own, rows in score_graphs(config, plan, context)),
        *(("attention", rows, own, rows) for own, rows in attention_graphs(config, plan, context)),
    ]
    shared = [graph for graph in shared if wanted is None or graph[1] in wanted]
    if not (graphs or shared):
        return ()
    contexts = planned_contexts(graphs, layers)
    shard_of = functools.partial(planned_shard, weights, ranges)
    if packager is not None:
        packager.package(context_graphs(contexts, shard_of))
    files = contexts
    if not keeper.graphs_by_length:
        files = list({replace(context[0], length=1): context for context in contexts}.values())
    _check_disk(keeper, files, shard_of, len(shared), folder or make_own_folder(GRAPHS_FOLDER))
    return (*_build(keeper, contexts, shard_of, report), *_build_shared(keeper, shared, report))


def _profile(path: str | Path | None) -> Profile | None:
    """Return a Snapdragon's profile from a file.

    Raises:
        ProfileError: The file is damaged, or of another device.
    """
    if path is None:
        return None
    profile = Profile.load(Path(path))
    if profile.device != TARGET_DEVICE:
        raise ProfileError(
            f"{path} is a profile of {profile.device!r}, and graphs are compiled for {TARGET_DEVICE}.",
            fix="Give a file that `heterollm profile export FILE` wrote on the device.",
        )
    return profile


def _context_layers(asked: int | None, *, partly: bool) -> int:
    """Return the layers that share a context.

    Raises:
        OptionError: The number is negative, or not 0 although not all lengths are compiled.
    """
    if asked is None:
        return 0 if partly else chosen_context_layers()
    if asked < 0:
        raise OptionError(f"{asked} layers cannot share a context.", fix="Give 0 or more.")
    if asked and partly:
        raise OptionError(
            "A context holds all lengths of the plan, so that some lengths alone cannot share one.",
            fix="Leave the lengths out, or give --context-layers 0.",
        )
    return asked


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


def _check_disk(
    npu: GraphKeeper,
    contexts: Sequence[tuple[PlannedGraph, ...]],
    shard_of: Callable[[PlannedGraph], WeightShard],
    shared: int,
    folder: Path,
) -> None:
    """Refuse builds that the disk cannot hold, with so many graphs that layers share.

    Raises:
        CacheError: It cannot; the message has the needed and the free bytes.
    """
    needed_bytes, count = SPARE_BYTES + shared * GRAPH_BYTES, shared
    for context in contexts:
        first = context[0]
        stored_bytes = npu.stored_bytes(shard_of(first), first.length, first.form)
        weight_bytes = sum(
            {(graph.spec, graph.experts, graph.form): graph.weight_bytes for graph in context}.values()
        )
        estimate_bytes = int(weight_bytes * (1 + GROWTH_FRACTION)) + GRAPH_BYTES * len(context)
        needed_bytes += max(0, estimate_bytes - stored_bytes)
        count += len(context)
    # While a context is built, the weights of each of its graphs lie beside its binary.
    needed_bytes += max((sum(graph.weight_bytes for graph in context) for context in contexts), default=0)
    free_bytes = shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
    if needed_bytes > free_bytes:
        raise CacheError(
            f"{count} graphs take about {format_bytes(needed_bytes)}, and {folder} has "
            f"{format_bytes(free_bytes)} free.",
            fix="Compile fewer lengths with --prompt, free some space, or point "
            f"{CACHE_VARIABLE} at another disk.",
        )


def _build(
    npu: GraphKeeper,
    contexts: Sequence[tuple[PlannedGraph, ...]],
    shard_of: Callable[[PlannedGraph], WeightShard],
    report: Progress,
) -> Iterator[GroupBuild]:
    """Build graphs by groups of a context and lengths, and yield the builds of each pair."""
    total_bytes = sum(graph.weight_bytes for context in contexts for graph in context)
    done_bytes = 0
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[PlannedGraph, ...]]] = {}
    for context in contexts:
        lengths = tuple(sorted({graph.length for graph in context}))
        groups = tuple(dict.fromkeys(ALL_GROUPS.index(graph.spec.group) for graph in context))
        kinds.setdefault((groups, lengths), []).append(context)
    for (groups, lengths), mine in sorted(kinds.items(), key=lambda item: item[0]):
        built = []
        for context in mine:
            report("Compiling NPU graphs", done_bytes, total_bytes)
            first = context[0]
            built.append((len(context), *_timed(npu, shard_of(first), first.length, first.form)))
            done_bytes += sum(graph.weight_bytes for graph in context)
        yield _counted(", ".join(ALL_GROUPS[index] for index in groups), lengths, built)
    report("Compiling NPU graphs", total_bytes, total_bytes)


def _build_shared(npu: GraphKeeper, graphs: Sequence[_SharedGraph], report: Progress) -> Iterator[GroupBuild]:
    """Build graphs that layers share, and yield the builds of each operator and length."""
    built: dict[tuple[str, int], list[tuple[int, BuiltGraph, float]]] = {}
    for done, (operator, tokens, shard, rows) in enumerate(graphs):
        report("Compiling graphs of attention", done, len(graphs))
        built.setdefault((operator, tokens), []).append((1, *_timed(npu, shard, rows)))
    for (operator, tokens), own in sorted(built.items()):
        yield _counted(operator, (tokens,), own)
    if graphs:
        report("Compiling graphs of attention", len(graphs), len(graphs))


def _timed(
    npu: GraphKeeper, shard: GraphShard, length: int, form: GraphForm | None = None
) -> tuple[BuiltGraph, float]:
    """Build a graph; return it with the seconds that compiling it took."""
    started = time.perf_counter()
    built = npu.build(shard, length, form)
    return built, (time.perf_counter() - started) if built.compiled else 0.0


def _counted(
    group: str,
    lengths: tuple[int, ...],
    built: Sequence[tuple[int, BuiltGraph, float]],
) -> GroupBuild:
    """Return the sum of some contexts: each with its number of graphs, and the seconds of its build."""
    return GroupBuild(
        group=group,
        lengths=lengths,
        graphs=sum(count for count, _, _ in built),
        contexts=len(built),
        compiled=sum(count for count, one, _ in built if one.compiled),
        loadable=sum(count for count, one, _ in built if not one.refusal),
        size_bytes=sum(one.size_bytes for _, one, _ in built),
        build_s=sum(seconds for _, _, seconds in built),
        refusal=next((one.refusal for _, one, _ in built if one.refusal), ""),
    )
