"""Profiles a device: chooses the measurements, their order and the file.

Measurements that every plan needs come first: launches and fences, bandwidth and contention, the coarsest
grid of linear layers and the glue operators. The rest of the budget goes to the points of the finer grid on
which the solver's choices depend most.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import psutil

from heterollm.base import HeteroLLMError, ProfileError, Progress
from heterollm.kernels.device import Device
from heterollm.kernels.sync import strategies_for
from heterollm.model import ModelShape
from heterollm.profiler.measure import (
    COPY_SIZES_BYTES,
    KERNELS_US,
    PowerSource,
    ReferenceOperators,
    SharedLoad,
    Task,
    attention_tasks,
    bandwidth_tasks,
    code_of,
    copy_costs,
    expert_tasks,
    fence_latencies,
    launch_costs,
    layer_tasks,
    linear_tasks,
    npu_return_costs,
    power_sources,
    power_tasks,
    sparse_tasks,
    step_tasks,
    sweep_tasks,
)
from heterollm.profiler.records import (
    CopyKey,
    FenceKey,
    LaunchKey,
    Processor,
    Profile,
    Record,
    profile_path,
)
from heterollm.profiler.runner import ProfileOptions, RunSummary, run_tasks
from heterollm.profiler.tune import default_jobs, tune, tune_attention
from heterollm.profiler.work import Tier
from heterollm.profiler.worth import by_worth

logger = logging.getLogger(__name__)

QUICK_BUDGET_S: Final = 45.0
QUICK_REPEATS: Final = 10
QUICK_KERNELS_US: Final = (300,)
TUNING_BUDGET_S: Final = 30.0
TUNING_SHARE: Final = 0.25
"""Largest share of the whole budget that tuning gets."""


LAUNCHES: Final = ("enqueue", "enqueue_busy", "chained", "idle")
RETURNS: Final = ("npu_to_gpu", "npu_to_gpu_busy")
LEAST_US: Final = 0.001
"""Recorded in place of a negative latency, which the uncertainty of the two clocks allows."""


@dataclass(frozen=True, slots=True)
class SessionOptions(ProfileOptions):
    """Options of a profiling session.

    Args:
        characterise: Whether to measure stages, orders and the effect of ``k`` on the NPU, too.
        quick: Whether to measure only the essential points of one model, within a minute.
        tune: Whether to search the parameters of GPU kernels first.
        sparse_attention: Whether to measure sparse attention, too: ``shadowattn`` needs it.
        expert_graphs: Whether to measure the NPU's graphs of experts, too: ``npumoe`` needs them.
        attention_graphs: Whether to measure attention on the NPU, too: ``npu-attention`` needs it.
    """

    quick: bool = False
    tune: bool = True
    characterise: bool = False
    sparse_attention: bool = False
    expert_graphs: bool = False
    attention_graphs: bool = False

    @classmethod
    def of(
        cls,
        *,
        budget_s: float | None = 240.0,
        update: bool = False,
        quick: bool = False,
        tune: bool = True,
        characterise: bool = False,
        sparse_attention: bool = False,
        expert_graphs: bool = False,
        attention_graphs: bool = False,
    ) -> SessionOptions:
        """Return options; ``quick`` lowers the budget and leaves tuning out."""
        budget_s = budget_of(budget_s, quick=quick)
        also = sparse_attention, expert_graphs, attention_graphs
        return cls(budget_s, update, quick, tune and not quick, characterise, *also)


def budget_of(budget_s: float | None, *, quick: bool) -> float | None:
    """Return the seconds of a run of which so many are wanted; a quick one has a limit of its own."""
    if not quick:
        return budget_s
    return QUICK_BUDGET_S if budget_s is None else min(budget_s, QUICK_BUDGET_S)


def measured_code() -> dict[str, str]:
    """Return the versions of kernels and graph builders that a run measures, by processor."""
    return {processor: code_of(processor) for processor in get_args(Processor)}


def profile_for(device: Device, path: Path | None = None) -> tuple[Profile, Path]:
    """Return the stored profile of a device, or an empty one, and its file.

    A damaged file counts as none; the next write renames it.

    Raises:
        ProfileError: The file given belongs to another device.
    """
    chosen = path or profile_path(device.name, device.fingerprint())
    if not chosen.exists():
        return Profile.of(device), chosen
    try:
        profile = Profile.load(chosen)
    except ProfileError as error:
        logger.warning("%s", error.message)
        return Profile.of(device), chosen
    if path is not None:
        profile.check_device(device.description(), chosen)
    return profile, chosen


def profile_device(
    device: Device,
    shapes: Sequence[ModelShape],
    options: SessionOptions | None = None,
    *,
    path: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Profile, RunSummary]:
    """Measure a device and write its profile.

    Args:
        device: The opened device; the calling thread is its engine thread.
        shapes: The models whose layers are measured.
        options: Budget and extent.
        path: File of the profile; by default in the cache, under the device's fingerprint.
        progress: Called with a stage, milliseconds done and milliseconds in all, both estimated.

    Raises:
        CacheError: The profile cannot be written.
        ProfileError: The file given belongs to another device.
    """
    options = options or SessionOptions()
    begin_s = time.monotonic()
    profile, chosen = profile_for(device, path)
    profile.save(chosen)  # a path that cannot be written fails before the work
    sources = _power_sources(device)
    details: dict[str, Any] = {
        "models": [shape.name for shape in shapes],
        "budget_s": options.budget_s,
        "quick": options.quick,
        "update": options.update,
        "clocks_mhz": [] if device.is_simulated else _clocks_mhz(),
        "power": [source.name for source in sources],
        "code": measured_code(),
    }
    if options.tune and device.gpu.is_tunable and not (options.update and profile.records):
        details["tuning"] = _tune(device, shapes, options.budget_s, progress)
    with _temporary_graphs(device), contextlib.closing(SharedLoad(device)) as load:
        finest: Tier = 0 if options.quick else 2 if options.budget_s is None else 1
        linear, skipped = linear_tasks(device, shapes, tier=finest, core=options.quick, known=profile.records)
        first = [task for task in linear if task.essential]
        finer = [task for task in linear if not task.essential]
        tasks = [
            *_link_tasks(device, quick=options.quick),
            *bandwidth_tasks(load),
            *first,
            *_operator_tasks(device, shapes, options),
        ]
        if options.quick:  # in order, since the points of a quick run are too few to rank by
            tasks, finer = [*tasks, *finer], []
        if options.characterise:
            tasks += sweep_tasks(device)
        elif not options.quick:
            tasks += step_tasks(device)
        if not options.quick:
            tasks += [*power_tasks(load, sources), *_copy_tasks(device)]
        left = options
        if options.budget_s is not None:
            left = replace(options, budget_s=max(1.0, options.budget_s - (time.monotonic() - begin_s)))
        summary = run_tasks(
            profile,
            tasks,
            left,
            path=chosen,
            ranked=finer,
            ranking=by_worth if options.budget_s is not None else None,
            reference=ReferenceOperators(device),
            details=details,
            skipped=skipped.to_dict,
            progress=progress,
        )
    summary.seconds = round(time.monotonic() - begin_s, 3)
    return profile, summary


@dataclass(frozen=True, slots=True)
class EssentialWork:
    """Estimate of the measurements that plans need.

    Args:
        seconds: Time of all.
        graphs: Number of NPU graphs to build for them.
        build_seconds: Time of these builds, included in ``seconds``.
    """

    seconds: float
    graphs: int
    build_seconds: float


def essential_work(device: Device, shapes: Sequence[ModelShape], options: SessionOptions) -> EssentialWork:
    """Return the estimate of the work that no budget leaves out, before any graph was built."""
    with contextlib.closing(SharedLoad(device)) as load:
        tasks = [
            *_link_tasks(device, quick=options.quick),
            *bandwidth_tasks(load),
            *linear_tasks(device, shapes, tier=0, core=options.quick)[0],
            *_operator_tasks(device, shapes, options),
        ]
    needed = [task for task in tasks if task.essential]
    build_s = sum(task.build_s for task in needed)
    graphs = sum(task.graphs for task in needed if task.build_s)
    return EssentialWork(sum(task.estimate_s for task in needed) + build_s, graphs, build_s)


def _operator_tasks(device: Device, shapes: Sequence[ModelShape], options: SessionOptions) -> list[Task]:
    """Return the tasks of all operators but the linear ones."""
    quick, sparse = options.quick, options.sparse_attention
    on_npu = options.attention_graphs and device.npu is not None
    tasks = [
        *layer_tasks(device, shapes, quick=quick, sparse=sparse, on_npu=on_npu),
        *expert_tasks(device, shapes, quick=quick, graphs=options.expert_graphs),
    ]
    tasks += sparse_tasks(device, shapes, quick=quick) if sparse else ()
    return [*tasks, *(attention_tasks(device, shapes, quick=quick) if on_npu else ())]


def _temporary_graphs(device: Device) -> contextlib.AbstractContextManager[None]:
    """Delete graphs of random weights afterwards; only some backends keep graphs in files."""
    keep_none = getattr(device.npu, "temporary_graphs", None)
    return contextlib.nullcontext() if keep_none is None else keep_none()


def _power_sources(device: Device) -> Sequence[PowerSource]:
    if not device.is_simulated:
        return power_sources()
    from heterollm.profiler.measure import simulated_meters

    return simulated_meters(device)


def _tune(
    device: Device, shapes: Sequence[ModelShape], whole_budget_s: float | None, progress: Progress | None
) -> dict[str, Any]:
    """Search kernel parameters in a share of the budget; a failure is noted and leaves the defaults."""
    budget_s = TUNING_BUDGET_S
    if whole_budget_s is not None:
        budget_s = min(budget_s, TUNING_SHARE * whole_budget_s)

    def report(done_fraction: float, what: str) -> None:
        if progress is not None:
            total_ms = round(1000 * budget_s)
            progress(f"Tuning GPU kernels: {what}", round(done_fraction * total_ms), total_ms)

    integer_inputs = sorted({spec.integer_inputs for shape in shapes for spec in shape.layer})
    weight = shapes[0].layer[0].weight.layout if shapes else None
    half = device.activation_dtype.itemsize == 2
    jobs = default_jobs(half=half, weight=weight, integer_inputs=integer_inputs or (False,))
    try:
        begin_s = time.monotonic()
        outcomes = tune(device.gpu, jobs, budget_s=budget_s, progress=report)
        used_s = time.monotonic() - begin_s
        compared = tune_attention(
            device.gpu,
            dict.fromkeys(
                (own.heads, own.kv_heads, own.head_dim) for shape in shapes for own in shape.by_heads
            ),
            activation_dtype=device.activation_dtype,
            kv_dtype=device.cache_dtype,
        )
        return {
            "used_s": used_s,
            "outcomes": [outcome.to_dict() for outcome in outcomes],
            "attention": [msgspec.to_builtins(chosen) for chosen in compared],
        }
    except HeteroLLMError as error:
        logger.warning("GPU kernels are not tuned: %s", error.message)
        return {"error": error.message}


# -- links -------------------------------------------------------------------------------------------


def _link_tasks(device: Device, *, quick: bool) -> list[Task]:
    stage = "Launches and fences"
    repeats = QUICK_REPEATS if quick else 40
    launches = tuple(LaunchKey(name) for name in LAUNCHES)
    tasks = [_links(stage, launches, partial(launch_costs, device.gpu, repeats=repeats), 0.5)]
    if device.npu is not None:
        returns = tuple(LaunchKey(name) for name in RETURNS)
        tasks.append(_links(stage, returns, partial(npu_return_costs, device, repeats=repeats), 0.5))
    strategies = strategies_for(device.gpu)
    for kernel_us in QUICK_KERNELS_US if quick else KERNELS_US:
        keys = tuple(FenceKey(strategy, kernel_us) for strategy in strategies)
        work = partial(fence_latencies, device.gpu, kernels_us=(kernel_us,), repeats=repeats)
        runs = (repeats + 12) * len(strategies)
        tasks.append(_links(stage, keys, work, runs * (kernel_us + 100) / 1e6))
    return tasks


def _copy_tasks(device: Device) -> list[Task]:
    methods = ("write", "read", "acquire", "release")
    return [
        _links(
            "Copies",
            tuple(CopyKey(method, size) for method in methods),
            partial(copy_costs, device.gpu, sizes_bytes=(size,)),
            0.2,
            essential=False,
        )
        for size in COPY_SIZES_BYTES
    ]


def _links(
    stage: str,
    keys: tuple[LaunchKey | FenceKey | CopyKey, ...],
    measure: Callable[[], Iterable[Record]],
    estimate_s: float,
    *,
    essential: bool = True,
) -> Task:
    def run() -> Iterator[Record]:
        for found in measure():
            yield replace(found, samples_us=tuple(max(LEAST_US, sample) for sample in found.samples_us))

    return Task(stage, keys, run, estimate_s, essential)


def _clocks_mhz() -> list[float]:
    """Return the processor's clocks as the system shows them now; recorded, never compared."""
    try:
        return [clock.current for clock in psutil.cpu_freq(percpu=True)]
    except (AttributeError, NotImplementedError, OSError):  # not every system shows them
        return []
