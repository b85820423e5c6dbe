"""Simulates a model's shapes on a modelled SoC: profile, fit, solve, compile and run as on a real device.

Only the processors are modelled, and the clock is virtual. Every result is labelled as simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from heterollm.base import OptionError, Progress, silent
from heterollm.engine import Engine, ExpertRows, MixtureOptions, fitting_need, start_engine
from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import BucketCount, ScoreScale
from heterollm.kernels.npu import (
    FfnRanges,
    LinearRanges,
    ShadowRanges,
    StaticRanges,
    graph_memory,
)
from heterollm.kernels.ops import Group, OpSpec, Phase, Scales, WeightFormat, ffn_specs
from heterollm.kernels.sim import SIMULATED, SimulatedClock, SimulatedSpan, Simulation, clock_of
from heterollm.model import (
    Checkpoint,
    ModelConfig,
    block_norms,
    expert_specs,
    find_model,
    load_weights,
    op_specs,
    shape_only_weights,
)
from heterollm.planning import PlanInputs, make_plan
from heterollm.simulate.effects import check_case
from heterollm.simulate.experts import AssumedExperts, ExpertUse
from heterollm.simulate.inputs import (
    assumed_routing,
    assumed_shadows,
    inputs_of_simulation,
    own_length,
)
from heterollm.simulate.phase import PhaseUse, padding_us, splits_of, used
from heterollm.simulate.profile import profile_of
from heterollm.simulate.request import SimulationRequest
from heterollm.simulate.result import SimulationResult, graphs_of, sharing_of
from heterollm.solver import (
    NPU_EXPERTS,
    SHADOW_ATTENTION,
    SOLVED_LEVELS,
    Plan,
    PlannedAttention,
    ShadowChannels,
    SparseAttention,
    kind_counts,
)
from heterollm.trace import Trace, Tracer, take_trace

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
    report, alone = progress or silent, replace(request, load=None)

    def own_plan(case: SimulationRequest) -> Plan:
        device = _open(replace(case, load=None, numerics=False))
        return plan_of(inputs_of_simulation(device, found.name, found.config, specs, case, report))

    plan = own_plan(request)
    device, every = _open(request), (*specs, *expert_specs(found.config, specs))
    fitting_need(device, found.config, specs, plan, positions)
    run = _Run(device, found.config, specs, plan, request)
    phases = run.measured(report)
    in_order = None
    if plan.lanes > 1:
        before = replace(request, in_flight=1, decode=0, numerics=False, trace=False)
        in_order, _ = _Run(_open(before), found.config, specs, own_plan(before), before).measured(report)
    without = None
    if request.load is not None:
        quiet = replace(request, load=None, trace=False)
        without = _Run(_open(alone), found.config, specs, plan, quiet).measured(report)
    first = next(length for _, length in plan.chunks(request.prompt))
    prefill, decode = phases
    return SimulationResult(
        request=request,
        device=device.name,
        fingerprint=device.fingerprint(),
        model=found.name,
        note=found.note,
        plan=plan,
        graphs=graphs_of(device, plan, every),
        sharing=sharing_of(device, plan, specs, request.prompt, block_norms(found.config)),
        prefill=prefill,
        decode=decode,
        tokens=tuple(run.tokens) if request.numerics else (),
        alone=without,
        trace=run.trace,
        splits=splits_of(plan, specs, first),
        in_order=in_order,
        experts=run.experts,
        layers=kind_counts(specs),
    )


def profile_ahead(request: SimulationRequest) -> None:
    """Measure the profile that the solver needs for a request, unless the cache has it.

    Raises:
        HeteroLLMError: The case cannot be simulated.
    """
    if not needs_profile(request):
        return
    found = find_model(request.model)
    device = _open(replace(request, load=None, numerics=False))
    specs = _specs(found.config, request)
    profile_of(device, found.name, found.config, specs, silent, request.techniques)


def needs_profile(request: SimulationRequest) -> bool:
    """Return whether the plan of a request needs a profile."""
    by_time = request.length_policy == "auto" and request.level != "gpu"
    adds = bool({SHADOW_ATTENTION, NPU_EXPERTS}.intersection(request.techniques))
    return adds or request.level in SOLVED_LEVELS or by_time


def _open(request: SimulationRequest) -> Device:
    own = (own_length(request),) if request.online and request.level in ("npu", "layer") else ()
    how = Simulation(request.numerics, request.overrides, request.load, own, request.forms)
    return open_device(f"{SIMULATED}{request.soc}", simulation=how)


def _specs(config: ModelConfig, request: SimulationRequest) -> tuple[OpSpec, ...]:
    """Return the groups in blocks of 128, as in the papers."""
    scales: Scales = "stepped" if request.calibrated else "free"
    specs = op_specs(config, request.precision, GROUP_SIZE, True, scales=scales)
    if request.head_bits == 8:
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
    ffns: dict[tuple[int, Group], StaticRanges] = {
        (ffn.layer, "ffn"): FfnRanges(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) for ffn in ffn_specs(specs)
    }
    return found | ffns


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


class _Run:
    """One engine on one simulated device.

    Attributes:
        tokens: The chosen tokens, the first after the prompt; with numerics the likeliest.
        trace: The recorded passes; None without recording.
        experts: The rows of a mixture's experts in the prompt; None for a model without.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        specs: tuple[OpSpec, ...],
        plan: Plan,
        request: SimulationRequest,
    ) -> None:
        self.device = device
        self.config = config
        self.specs = specs
        self.plan = plan
        self.request = request
        self.tokens: list[int] = []
        self.trace: Trace | None = None
        self.experts: ExpertUse | None = None
        self._expert_rows: ExpertRows | None = None
        if (routing := assumed_routing(config, request)) is not None:
            assumed = AssumedExperts(plan, expert_specs(config, specs), routing)
            self.experts = assumed.use(plan.chunks(request.prompt), graph_memory(device.npu))
            self._expert_rows = assumed.rows_on_gpu

    def measured(self, progress: Progress) -> tuple[PhaseUse, PhaseUse | None]:
        """Return time and resources of prefill and decode."""
        request, clock = self.request, clock_of(self.device)
        engine = self._engine(progress)
        cache = engine.new_cache()
        if request.trace:
            take_trace(engine)
        ids = np.arange(request.prompt, dtype=np.int32) % self.config.vocab_size

        def prefill() -> None:
            engine.prefill(cache, 0, ids, "prefill", None)

        def decode() -> None:
            for position in range(request.prompt, request.prompt + request.decode):
                self._choose(engine)
                engine.decode(cache, position, self.tokens[-1])

        first = self._phase(clock, "prefill", request.prompt, prefill)
        second = self._phase(clock, "decode", request.decode, decode) if request.decode else None
        self._choose(engine)
        if request.trace:
            self.trace = take_trace(engine)
        return first, second

    def _engine(self, progress: Progress) -> Engine:
        request = self.request
        if request.numerics:
            weights = load_weights(Checkpoint(request.model), self.config, group_size=GROUP_SIZE)
        else:
            weights = shape_only_weights(self.config, self.specs)
        flights = () if request.online else self.plan.flights(request.prompt)
        return start_engine(
            *(self.device, weights, self.plan, request.prompt + request.decode, progress),
            allow_slow=True,
            # Graphs are built ahead, except with the policy online.
            ahead=[(flight[0][0], sum(length for _, length in flight)) for flight in flights],
            observer=Tracer(self.device) if request.trace else None,
            ranges=_assumed_ranges(self.specs, assumed_shadows(self.specs, request)),
            techniques={"attention": _assumed_scales(self.plan, self.config)},
            mixture=MixtureOptions(assumed=self._expert_rows),
        )

    def _choose(self, engine: Engine) -> None:
        """Take the likeliest token; without numerics token 0, since no token has a value."""
        self.tokens.append(int(engine.last_logits.argmax()) if self.request.numerics else 0)

    def _phase(self, clock: SimulatedClock, phase: Phase, tokens: int, work: Callable[[], None]) -> PhaseUse:
        # A game's frames during the build of graphs do not belong to the phase.
        clock.last_job()
        clock.spans.clear()
        clock.recording = True
        clock.totals.peak_gbps = 0.0
        before, begin_us = clock.totals.copy(), clock.now_us
        try:
            work()
            clock.last_job()
        finally:
            clock.recording = False
        spans: list[SimulatedSpan] = list(clock.spans)
        lengths = [length for _, length in self.plan.chunks(tokens)] if phase == "prefill" else [1]
        experts = 0.0 if self.experts is None else self.experts.padding_share
        wasted_us = padding_us(spans, self.plan, self.specs, phase, lengths, experts)
        return used(self.device, phase, tokens, before, begin_us, spans, wasted_us)
