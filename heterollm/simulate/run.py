"""Simulates a model's shapes on a modelled SoC: profile, fit, solve, compile and run as on a real device.

Only the processors are modelled, and the clock is virtual. Every result is labelled as simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from heterollm.base import OptionError, Progress, silent
from heterollm.engine import Engine, MixtureOptions, fitting_need, start_engine
from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import BucketCount, ScoreScale
from heterollm.kernels.npu import (
    FfnRanges,
    FusedRanges,
    LinearRanges,
    ShadowRanges,
    StaticRanges,
    graph_memory,
)
from heterollm.kernels.ops import Group, OpSpec, Phase, Scales, WeightFormat, joined_specs
from heterollm.kernels.sim import SIMULATED, Simulation
from heterollm.model import (
    Checkpoint,
    FoundModel,
    ModelConfig,
    expert_specs,
    find_model,
    load_weights,
    op_specs,
    shape_only_weights,
)
from heterollm.planning import PlanInputs, make_plan
from heterollm.simulate.effects import check_case
from heterollm.simulate.experts import AssumedExperts
from heterollm.simulate.inputs import (
    assumed_routing,
    assumed_shadows,
    inputs_of_simulation,
    own_length,
)
from heterollm.simulate.phase import PhaseUse, measure_phase, padding_us, splits_of
from heterollm.simulate.request import SimulationRequest
from heterollm.simulate.result import SimulationResult, graphs_of
from heterollm.solver import (
    Plan,
    PlannedAttention,
    ShadowChannels,
    SparseAttention,
    graph_sharing,
    kind_counts,
)
from heterollm.trace import Tracer, take_trace

GROUP_SIZE: Final = 128

PlanOf: TypeAlias = Callable[[PlanInputs], Plan]


def simulate(request: SimulationRequest, progress: Progress | None = None) -> SimulationResult:
    """Simulate a prompt and the tokens after it.

    Args:
        request: The case.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        OptionError: There is no such model or SoC, it cannot run the case, or an option has no effect in it.
        HeteroLLMError: The plan cannot be made.
    """
    check_case(request)
    return simulated(request, progress)


def planned(inputs: PlanInputs) -> Plan:
    """Return the plan of a simulation."""
    return make_plan(inputs).plan


def simulated(
    request: SimulationRequest, progress: Progress | None = None, plan_of: PlanOf = planned
) -> SimulationResult:
    """Simulate a case of a grid, whose options may be for other cases; see :func:`simulate`.

    Args:
        request: The case.
        progress: As of :func:`simulate`.
        plan_of: Makes the plan.
    """
    found = find_model(request.model, closest=not request.numerics)
    positions = request.prompt + request.decode
    if positions > found.config.max_positions:
        raise OptionError(
            f"{found.name} holds {found.config.max_positions} positions, not {positions}.",
            fix="Simulate a shorter prompt or fewer tokens.",
        )
    if request.numerics:
        Checkpoint(request.model)  # refuses a model without weights before the work
    specs = _specs(found.config, request)
    report = progress or silent

    def own_plan(case: SimulationRequest) -> Plan:
        device = _open(replace(case, load=None, numerics=False))
        return plan_of(inputs_of_simulation(device, found.name, found.config, specs, case, report))

    plan, device = own_plan(request), _open(request)
    fitting_need(device, found.config, specs, plan, positions)
    result = _run(device, found, specs, plan, request, report)
    if plan.lanes > 1:
        before = replace(request, in_flight=1, decode=0, numerics=False, trace=False)
        in_order = _run(_open(before), found, specs, own_plan(before), before, report)
        result = replace(result, in_order=in_order.prefill)
    if request.load is not None:
        quiet = replace(request, load=None, trace=False)
        result = replace(result, alone=_run(_open(quiet), found, specs, plan, quiet, report).phases)
    return result


def _open(request: SimulationRequest) -> Device:
    own = (own_length(request),) if request.online and request.level in ("npu", "layer") else ()
    how = Simulation(request.numerics, request.overrides, request.load, own, request.forms)
    return open_device(f"{SIMULATED}{request.soc}", simulation=how)


def _specs(config: ModelConfig, request: SimulationRequest) -> tuple[OpSpec, ...]:
    """Return the groups in blocks of 128, as in the papers, or as floats where graphs hold no others."""
    scales: Scales = "stepped" if request.calibrated else "free"
    specs = op_specs(config, request.precision, GROUP_SIZE, True, scales=scales)
    if request.head_bits == 8 or request.precision == "fp16":
        return specs
    head = specs[-1]
    return (*specs[:-1], replace(head, weight=WeightFormat(4, head.weight.block)))


def _assumed_ranges(
    specs: tuple[OpSpec, ...], shadows: Mapping[tuple[int, Group], ShadowChannels]
) -> dict[tuple[int, Group], StaticRanges]:
    """Return ranges of every operator, of which times depend on the channels of shadows alone."""
    found: dict[tuple[int, Group], StaticRanges] = {}
    for spec in specs:
        key = spec.layer, spec.group
        if spec.weight.scales == "tensor":
            own = shadows.get(key)
            shadow = None if own is None else ShadowRanges(1.0, 1.0, expected=own.held)
            found[key] = LinearRanges(1.0, 1.0, bits=8, shadow=shadow)
        elif spec.weight.scales == "stepped":
            found[key] = LinearRanges(1.0, 1.0)
    for joined in joined_specs(specs):
        fused = FusedRanges(1.0, 1.0, 1.0, 1.0) if joined.fused else None
        of_ffn = FfnRanges(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, fused)
        found[joined.layer, joined.group] = (
            LinearRanges(1.0, 1.0, normed=1.0) if joined.then is None else of_ffn
        )
    return found


def _assumed_scales(plan: Plan, config: ModelConfig) -> dict[BucketCount, dict[int, tuple[ScoreScale, ...]]]:
    """Return scales of attention heads with the plan's exponents; no time depends on their steps."""
    steps = (1.0,) * (config.attention.heads // config.attention.kv_heads)
    found: dict[BucketCount, dict[int, tuple[ScoreScale, ...]]] = {}
    for entry in plan.technique(PlannedAttention).entries:
        placement = entry.placement
        if isinstance(placement, SparseAttention):
            units = zip(placement.units, placement.exponents, strict=True)
            own = {head: ScoreScale(steps, 1.0, exponent) for heads, exponent in units for head in heads}
            scales = tuple(own[head] for head in sorted(own))
            layers = range(entry.layers[0], entry.layers[1] + 1)
            found.setdefault(placement.buckets, {}).update(dict.fromkeys(layers, scales))
    return found


def _run(
    device: Device,
    found: FoundModel,
    specs: tuple[OpSpec, ...],
    plan: Plan,
    request: SimulationRequest,
    progress: Progress,
) -> SimulationResult:
    """Run a prompt and the tokens after it in one engine on one simulated device."""
    config, chunks = found.config, tuple(plan.chunks(request.prompt))
    every = (*specs, *expert_specs(config, specs))
    assumed = experts = None
    if (routing := assumed_routing(config, request)) is not None:
        assumed = AssumedExperts(plan, every[len(specs) :], routing)
        experts = assumed.use(chunks, graph_memory(device.npu))
    engine = _engine(device, config, specs, plan, request, progress, assumed)
    cache = engine.new_cache()
    if request.trace:
        take_trace(engine)
    ids = np.arange(request.prompt, dtype=np.int32) % config.vocab_size
    tokens: list[int] = []

    def choose() -> None:
        """Take the likeliest token; without numerics token 0, since no token has a value."""
        tokens.append(int(engine.last_logits.argmax()) if request.numerics else 0)

    def decode() -> None:
        for position in range(request.prompt, request.prompt + request.decode):
            choose()
            engine.decode(cache, position, tokens[-1])

    def measured(phase: Phase, count: int, passes: Sequence[int], work: Callable[[], None]) -> PhaseUse:
        share = 0.0 if experts is None else experts.padding_share
        return measure_phase(
            device, phase, count, work, lambda spans: padding_us(spans, plan, specs, phase, passes, share)
        )

    lengths = [length for _, length in chunks]
    first = measured("prefill", len(ids), lengths, lambda: engine.prefill(cache, 0, ids, "prefill", None))
    second = measured("decode", request.decode, [1], decode) if request.decode else None
    choose()
    return SimulationResult(
        request=request,
        device=device.name,
        fingerprint=device.fingerprint(),
        model=found.name,
        note=found.note,
        plan=plan,
        graphs=graphs_of(device, plan, every),
        sharing=graph_sharing(plan, specs, request.prompt, graph_memory(device.npu)),
        prefill=first,
        decode=second,
        tokens=tuple(tokens) if request.numerics else (),
        trace=take_trace(engine) if request.trace else None,
        splits=splits_of(plan, specs, lengths[0]),
        experts=experts,
        layers=kind_counts(specs),
    )


def _engine(
    device: Device,
    config: ModelConfig,
    specs: tuple[OpSpec, ...],
    plan: Plan,
    request: SimulationRequest,
    progress: Progress,
    assumed: AssumedExperts | None,
) -> Engine:
    if request.numerics:
        given = Checkpoint(request.model), config
        weights = load_weights(*given, precision=request.precision, group_size=GROUP_SIZE)
    else:
        weights = shape_only_weights(config, specs)
    flights = () if request.online else plan.flights(request.prompt)
    return start_engine(
        *(device, weights, plan, request.prompt + request.decode, progress),
        allow_slow=True,
        # Graphs are built ahead, except with the policy online.
        ahead=[(flight[0][0], sum(length for _, length in flight)) for flight in flights],
        observer=Tracer(device) if request.trace else None,
        ranges=_assumed_ranges(specs, assumed_shadows(specs, request)),
        techniques={"attention": _assumed_scales(plan, config)},
        mixture=MixtureOptions(assumed=None if assumed is None else assumed.rows_on_gpu),
    )
