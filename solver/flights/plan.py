"""Chunks in flight: the predicted times by which they are ordered, and how long a prompt takes in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_field
from functools import cached_property, lru_cache
from typing import Final, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from heterollm.base import PlanError
from heterollm.kernels.ops import OpSpec
from heterollm.model import kinds_of_specs
from heterollm.solver.candidates import NpuLimits
from heterollm.solver.costs import Costs
from heterollm.solver.entries import without_kinds
from heterollm.solver.ffn import first_group
from heterollm.solver.flights.schedule import SchedulePolicy, Stage, schedule_chunks
from heterollm.solver.options import Option, all_options, slowdown_of
from heterollm.solver.placements import Placement
from heterollm.solver.plan import Plan
from heterollm.solver.plan_records import ChunkSchedule, GroupTimes, PlanEntry
from heterollm.solver.predict import predict_pass
from heterollm.solver.prompts import relative_time
from heterollm.solver.request import InFlight
from heterollm.solver.slices import Slices
from heterollm.solver.solve import Solver

SAMPLED_LAYERS: Final = (4, 8)
"""Layers that are scheduled; all others take as long as those between these two numbers. The first layers
hide more than later ones: from 2 and 4 layers prompts were predicted 4 % too fast."""

SUBMITTED: Final = 3
"""Kernels that the engine thread submits before a graph, about: glue operators and a shard."""

PRICES: Final = tuple(2.0 ** (step / 4) for step in range(-8, 21))
"""Prices of the GPU's time, in that of the NPU, that are tried."""

AUTOMATIC: Final = (2, 4, 8, 16)
"""Numbers of chunks at once that are tried in turn."""

WORTH_DOUBLING: Final = 0.01
"""Fraction by which twice as many chunks at once must be faster: each takes memory for slots of its own."""

_Fits: TypeAlias = Callable[[OpSpec, Option], bool]
"""Whether the NPU may hold what an option needs."""


@dataclass(frozen=True, slots=True)
class PredictedPrompt:
    """The predicted time of a prompt's layers, and how much of it the NPU is idle."""

    time_us: float
    npu_idle_us: float

    @property
    def npu_idle_fraction(self) -> float:
        """The bubbles: the fraction of the time during which the NPU computes nothing."""
        return self.npu_idle_us / self.time_us if self.time_us else 0.0


def group_times(
    decisions: Iterable[tuple[OpSpec, Option]], tokens: int, costs_at: Callable[[int], Costs], kind: str = ""
) -> tuple[GroupTimes, ...]:
    """Return the times of a layer's groups in a chunk, with the overheads of changing the processor.

    Before a graph the engine thread submits the kernels of other chunks and waits for the hand-over. While it
    runs the graph it submits nothing, so that the queue may be empty behind it.

    Args:
        decisions: The operators of a layer in order with their placements.
        tokens: Tokens of the chunk.
        costs_at: Returns costs of passes that begin at a position.
        kind: Name of the kind of layer.
    """
    first, later = costs_at(0), costs_at(tokens)
    overheads = first.overheads
    submit_us = overheads.submit_us if math.isfinite(overheads.submit_us) else overheads.refill_us
    found, own = [], list(decisions)
    for number, (spec, option) in enumerate(own):
        # The codes of the group before, in the last layer, are read first.
        codes_us = own[number - 1][1].behind_us + option.ahead_us
        before_us = first.between_us(first_group(spec), tokens)
        more_us = later.between_us(first_group(spec), tokens) - before_us
        before_us += codes_us
        gpu_us, npu_us = option.alone_us
        if npu_us:
            npu_us += max(0.0, overheads.hand_over_us) + SUBMITTED * submit_us
        slowdown = slowdown_of(spec, tokens, option.placement, first)
        times_us = before_us, max(0.0, more_us / tokens), gpu_us, npu_us
        refill_us = overheads.refill_us if npu_us else 0.0
        found.append(GroupTimes(spec.group, *times_us, slowdown.gpu, slowdown.npu, refill_us, kind or UNSET))
    return tuple(found)


def kind_counts(specs: Sequence[OpSpec]) -> dict[str, int]:
    """Return the number of layers of each kind, by its name."""
    return {kind.name: kind.count for kind in kinds_of_specs(specs)}


def predict_prompt(
    schedule: ChunkSchedule, lengths: Sequence[int], layers: Mapping[str, int], *, position: int = 0
) -> PredictedPrompt:
    """Return the predicted time of a prompt in chunks, the first of which is a whole one.

    Args:
        schedule: The policy, the number of chunks at once, and the times of a whole chunk.
        lengths: Tokens of each chunk.
        layers: Layers of each kind, by its name.
        position: Position of the first token.
    """
    total_us = idle_us = 0.0
    counts = tuple(layers.items())
    for start in range(0, len(lengths), schedule.in_flight):
        flight = tuple(lengths[start : start + schedule.in_flight])
        found = _predict_flight(schedule.policy, schedule.times, flight, lengths[0], position, counts)
        total_us += found.time_us
        idle_us += found.npu_idle_us
        position += sum(flight)
    return PredictedPrompt(total_us, idle_us)


@lru_cache(maxsize=4096)
def _predict_flight(
    policy: SchedulePolicy,
    times: tuple[GroupTimes, ...],
    lengths: tuple[int, ...],
    whole: int,
    position: int,
    layers: tuple[tuple[str, int], ...],
) -> PredictedPrompt:
    """Return the time of chunks at once. Prompts of different lengths begin with the same flights.

    Layers of each kind are scheduled apart, so that only those of the first one count the begin of a flight.
    """
    few, more = SAMPLED_LAYERS
    time_us = idle_us = 0.0
    for number, (kind, count) in enumerate(layers):
        own = [one for one in times if (one.kind or "") == kind]
        sampled = [
            schedule_chunks(_stages(own, lengths, whole, position, sampled_layers), policy)
            for sampled_layers in (few, more)
        ]
        times_us = [one.elapsed_us for one in sampled]
        idles_us = [one.elapsed_us - one.busy_us["npu"] for one in sampled]
        rest = (count if number else count - few) / (more - few)
        time_us += (0.0 if number else times_us[0]) + rest * (times_us[1] - times_us[0])
        idle_us += (0.0 if number else idles_us[0]) + rest * (idles_us[1] - idles_us[0])
    return PredictedPrompt(time_us, idle_us)


def plan_flights(
    solver: Solver,
    plan: Plan,
    slices: Slices,
    in_flight: InFlight,
    prompts: Mapping[int, float],
    costs_at: Callable[[int], Costs],
    weights: Mapping[int, float] | None = None,
) -> Plan:
    """Return a plan that runs several chunks of a prompt at once, or the given one if that gains too little.

    The fastest split of each operator alone gives the GPU, which also computes attention, more than its share
    when another chunk can use the NPU meanwhile. So whole chunks in flight have placements of their own. The
    NPU may hold graphs for them; where the budget has no room for these, they use the graphs of the plan.

    Args:
        solver: The solver, with the longest chunk length.
        plan: Its plan, perhaps with a shorter chunk length.
        slices: The resident slices of the plan.
        in_flight: Most chunks at once; ``auto`` takes the fewest, of powers of two, after which twice as many
            are not faster by :data:`WORTH_DOUBLING`.
        prompts: Weights of prompts by length.
        costs_at: Returns costs of passes that begin at a position.
        weights: As for :meth:`heterollm.solver.solve.Solver.slices`.

    Raises:
        PlanError: No processor can compute a group.
    """
    if costs_at(0).overheads.empties_queue:
        # Each wait for one chunk would wait for the kernels of all.
        return plan
    flights = _Flights(solver, plan, slices, prompts, costs_at, weights)
    if in_flight != "auto":
        only = flights.best(in_flight)
        return plan if only is None else only[1]
    chosen: tuple[float, Plan] | None = None
    for count in AUTOMATIC:
        if count // 2 >= flights.most_chunks:
            break
        found = flights.best(count)
        if found is None and count == AUTOMATIC[0]:
            continue  # too few, perhaps
        if found is None or (chosen is not None and found[0] > (1.0 - WORTH_DOUBLING) * chosen[0]):
            break
        chosen = found
    return plan if chosen is None else chosen[1]


@dataclass(frozen=True)
class _Flights:
    """Plans with several chunks at once, against chunk after chunk. Fields are as in :func:`plan_flights`."""

    solver: Solver
    plan: Plan
    slices: Slices
    prompts: Mapping[int, float]
    costs_at: Callable[[int], Costs]
    weights: Mapping[int, float] | None

    def best(self, in_flight: int) -> tuple[float, Plan] | None:
        """Return the time of the prompts in the best plan for so many chunks at once, and that plan.

        The time is relative to one chunk after the other; it is None where the plan gains less than a split
        must.
        """
        flown = self._best_chunk(in_flight, _anything)
        if flown is None:
            return None
        free, budget = flown.applied(self._shorter(flown.tokens)), self.solver.budget
        if budget.holds(free.npu_bytes(self.solver.specs, budget.memory)):
            return self._loss(flown), free
        held = self.plan.slices
        resident = {(item.group, item.npu_rows, length) for item in held for length in item.lengths}

        def is_resident(spec: OpSpec, option: Option) -> bool:
            own = option.placement
            return all((spec.group, own.npu_rows, length) in resident for length in own.npu_lengths)

        flown = self._best_chunk(in_flight, is_resident)
        if flown is None:
            return None
        return self._loss(flown), flown.applied(shortened(self.plan, flown.tokens))

    @property
    def most_chunks(self) -> int:
        """Chunks of the longest prompt at the shortest length."""
        return math.ceil(max(self.prompts, default=1) / min(self._offered, default=1))

    @cached_property
    def _offered(self) -> list[int]:
        lengths = self.solver.limits.standard_lengths if self.solver.limits else ()
        return [length for length in lengths if 1 < length <= self.solver.chunk_length]

    @cached_property
    def _before_us(self) -> dict[int, float]:
        """The predicted time of each prompt, one chunk after the other."""
        whole = self.plan.chunk_length
        chains = self.solver.length(whole, self.slices).chains
        times: list[GroupTimes] = []
        for kind, chain in zip(self.solver.kinds, chains, strict=True):
            chosen = [(one.spec, one.chosen) for one in chain.choices]
            times += group_times(chosen, whole, self.costs_at, kind.name)
        one_by_one = ChunkSchedule("in_order", 1, tuple(times))
        return {prompt: self._prompt_us(prompt, whole, one_by_one) for prompt in self.prompts}

    def _best_chunk(self, in_flight: int, fits: _Fits) -> _Flown | None:
        """Return the best chunk for prompts in flight; None where they gain less than a split must."""
        found = (_balanced(self.solver, length, in_flight, self.costs_at, fits) for length in self._offered)
        best = min((one for one in found if one is not None), key=self._loss, default=None)
        enough = 1.0 - self.solver.objective.margin_fraction
        return best if best is not None and self._loss(best) <= enough else None

    def _loss(self, flown: _Flown) -> float:
        """Return the mean time of the prompts, relative to one chunk after the other."""

        def prompt_us(prompt: int) -> float:
            return self._prompt_us(prompt, flown.tokens, flown.schedule)

        return relative_time(self.prompts, self._before_us, prompt_us)

    def _prompt_us(self, prompt: int, chunk: int, schedule: ChunkSchedule) -> float:
        if prompt <= chunk:
            return self.solver.length(prompt, self.slices).time_us
        full, left = divmod(prompt, chunk)
        lengths = [chunk] * full + [left] * bool(left)
        return predict_prompt(schedule, lengths, kind_counts(self.solver.specs)).time_us

    def _shorter(self, tokens: int) -> Plan:
        """Return the plan of prompts in chunks of so many tokens."""
        plan = self.plan
        if tokens == plan.chunk_length:
            return plan
        own = replace_field(self.solver, chunk_length=tokens)
        return own.solve(device=plan.device, precision=plan.precision, weights=self.weights)[0]


def with_schedule(
    plan: Plan,
    specs: Sequence[OpSpec],
    in_flight: int,
    costs_at: Callable[[int], Costs],
    limits: NpuLimits | None = None,
) -> Plan:
    """Return a plan that runs several chunks at once, by the predicted times of a whole chunk.

    Args:
        plan: The plan.
        specs: Every group of the model.
        in_flight: Chunks at once.
        costs_at: Returns costs of passes that begin at a position.
        limits: Limits of the NPU, as for :func:`heterollm.solver.predict.predict_pass`.

    Raises:
        PlanError: The plan has no entry for a whole chunk, or the costs lack an operator.
    """
    tokens = plan.chunk_length
    found = predict_pass(plan, specs, costs_at(0), "prefill", tokens, limits=limits, logits=False)
    if found is None:
        raise PlanError(
            f"Chunks of {tokens} tokens cannot run at once, since the profile has no time of some operator.",
            fix="Run `heterollm profile MODEL --update`, or plan for one chunk at once.",
        )
    times: list[GroupTimes] = []
    for kind in found.kinds:
        times += group_times(((one.spec, one.option) for one in kind.operators), tokens, costs_at, kind.name)
    return replace(plan, schedule=ChunkSchedule("out_of_order", in_flight, tuple(times)))


@dataclass(frozen=True, slots=True)
class _Flown:
    """Whole chunks in flight: tokens, schedule with placements, and predicted time of as many as may fly."""

    tokens: int
    schedule: ChunkSchedule
    time_us: float

    def applied(self, plan: Plan) -> Plan:
        return replace(plan, slices=(), schedule=self.schedule)


def _balanced(
    solver: Solver, tokens: int, in_flight: int, costs_at: Callable[[int], Costs], fits: _Fits
) -> _Flown | None:
    """Return the placements of whole chunks with which these are predicted to fly fastest, if any fit.

    The dearer the GPU's time, the more rows the NPU takes of every operator. The best price is found by
    trying :data:`PRICES`.
    """
    costs = costs_at(0)
    options: dict[str, list[Option]] = {}
    for place, spec in solver.places.items():
        if spec != solver.head:
            found = all_options(spec, tokens, solver.limits, costs, solver.objective, None, None)
            options[place] = [one for one in found if fits(spec, one)]
    flown: dict[tuple[Placement, ...], _Flown] = {}
    for price, as_ffn in itertools.product(PRICES, (False, True)):
        paths = [kind.paths[-1 if as_ffn else 0] for kind in solver.kinds]
        if not all(options[spec.place] for path in paths for spec in path):
            continue
        decisions = [[(spec, _cheapest(options[spec.place], price)) for spec in path] for path in paths]
        key = tuple(option.placement for own in decisions for _, option in own)
        if key not in flown:
            entries, times = list[PlanEntry](), list[GroupTimes]()
            for kind, own in zip(solver.kinds, decisions, strict=True):
                layers = kind.kind.layers[0], kind.kind.layers[-1]
                entries += (
                    PlanEntry("prefill", (tokens, tokens), layers, spec.group, one.placement, kind.name)
                    for spec, one in own
                )
                times += group_times(own, tokens, costs_at, kind.name)
            placed = tuple(without_kinds(entries, solver.kinds))
            schedule = ChunkSchedule("out_of_order", in_flight, tuple(times), placed)
            time_us = predict_prompt(schedule, [tokens] * in_flight, kind_counts(solver.specs)).time_us
            flown[key] = _Flown(tokens, schedule, time_us)
    return min(flown.values(), key=lambda one: one.time_us, default=None)


def _anything(_spec: OpSpec, _option: Option) -> bool:
    return True


def shortened(plan: Plan, tokens: int) -> Plan:
    """Return a plan with shorter chunks, and without entries for longer ones."""
    entries = tuple(
        replace(entry, lengths=(entry.lengths[0], min(entry.lengths[1], tokens)))
        for entry in plan.entries
        if entry.lengths[0] <= tokens
    )
    return replace(plan, chunk_length=tokens, entries=entries, slices=())


def _cheapest(options: Sequence[Option], price: float) -> Option:
    """Return the option whose dearer processor costs least.

    A sum of both prices would only ever choose one whole processor or the other, since the times of a split
    are linear in its rows.
    """
    return min(options, key=lambda one: (max(price * one.gpu_us, one.npu_us), one.time_us))


def _stages(
    times: Sequence[GroupTimes], lengths: Sequence[int], whole: int, position: int, layers: int
) -> list[list[Stage]]:
    """Return the stages of chunks in flight, cut as :mod:`heterollm.engine.flights` cuts their steps."""
    chunks: list[list[Stage]] = []
    stores: list[list[tuple[int, int]]] = [[] for _ in range(layers)]
    for tokens in lengths:
        chunks.append(list(_chunk_stages(times, len(chunks), tokens / whole, position, stores)))
        position += tokens
    return chunks


def _chunk_stages(
    times: Sequence[GroupTimes],
    number: int,
    fraction: float,
    position: int,
    stores: Sequence[list[tuple[int, int]]],
) -> Iterator[Stage]:
    """Yield the stages of a chunk with this fraction of a whole one's tokens, and note its stores of keys."""
    count = itertools.count()
    kernel: tuple[tuple[int, int], ...] = ()
    graph: tuple[tuple[int, int], ...] = ()
    for stored in stores:
        for one in times:
            glue_us = fraction * (one.before_us + position * one.before_us_per_position)
            gpu_us, needs = fraction * one.gpu_us, kernel + graph
            whole_gpu = not one.npu_us
            attends, recurs = (
                one.group in ("o", "latent_out"),
                one.group in ("conv_out", "delta_out", "mamba_out"),
            )
            # Norms and activations wait for memory, and attention for arithmetic: it reads little.
            slowdown, slows = one.gpu_slowdown if whole_gpu or attends else 1.0, whole_gpu or not attends
            if attends:
                # Keys and values of a layer are stored right before its attention.
                yield Stage("gpu", 0.0, needs, refill_us=one.refill_us)
                stored.append((number, next(count)))
                needs = tuple(stored)
            elif recurs:
                needs += tuple(stored)
            yield Stage("gpu", glue_us + gpu_us * whole_gpu, needs, slowdown, slows, one.refill_us)
            kernel, graph = ((number, next(count)),), ()
            if recurs:
                stored += kernel
            if whole_gpu:
                continue
            before = kernel
            if gpu_us:
                yield Stage("gpu", gpu_us, before, one.gpu_slowdown)
                kernel = ((number, next(count)),)
            yield Stage("npu", one.npu_us, before, one.npu_slowdown)
            graph = ((number, next(count)),)
