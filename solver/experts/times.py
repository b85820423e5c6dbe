"""Times of a mixture's experts on a profiled device, for predictions and for the placement of experts.

The GPU's time of a layer is that of its moves (router, choice, order, gathering and sum of rows), by the
tokens of the pass; of the launches of the networks; and of each expert's network, by its rows. The NPU's time
of a graph is a start and a time for each expert, by capacity. Between measured sizes times are straight
lines, and beyond the largest one they go on as between the last two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.kernels.ops import GraphMemory, OpSpec, Routing
from heterollm.model import ModelShape
from heterollm.profiler.measure import MOST_WEIGHT_BYTES
from heterollm.profiler.records import ContentionBound, ExpertsKey, ExpertsOperator, Profile, Record
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.experts.prices import ExpertPrices
from heterollm.solver.slice_sets import Floats

MEMORY_BOUND_FRACTION: Final = 0.5
"""A linear is bound by memory if reading its weights at full bandwidth takes this fraction of its time."""

FLAT_FACTOR: Final = 1.05
"""The NPU is bound by memory up to this factor on its time of one token, or of a graph's fewest."""

MOVES: Final = 5
"""Kernels of a pass around the networks: router, routing, order, gathering and sum."""

PRODUCTS: Final = 3
"""Kernels of the networks: gate and up, the activation, and down."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Times at ascending sizes."""

    sizes: Floats
    times_us: Floats

    @classmethod
    def of(cls, times_us: Mapping[int, float]) -> _Line:
        sizes = sorted(times_us)
        # More work takes no less time; noise would say otherwise.
        rising = np.maximum.accumulate([times_us[size] for size in sizes])
        return cls(np.array(sizes, np.float64), np.asarray(rising, np.float64))

    def at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes."""
        found: Floats = np.interp(sizes, self.sizes, self.times_us)
        if len(self.sizes) > 1:
            (first, last), (low_us, high_us) = self.sizes[-2:], self.times_us[-2:]
            found += np.maximum(sizes - last, 0.0) * (high_us - low_us) / (last - first)
        return found

    def one(self, size: float) -> float:
        """Return the time at a size."""
        return float(self.at(np.array([size], np.float64))[0])


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Times of a layer's experts by the profile.

    Args:
        spec: The experts of a layer.
        moves: The GPU's time of the moves by tokens.
        launches: The GPU's time of the networks' launches, by rows of an expert.
        network: The GPU's time of one expert's network in them, by its rows.
        graphs: The NPU's time of the start of a graph and of each of its experts, by form and capacity.
        lengths: Standard lengths of the NPU.
        most_weight_bytes: Most bytes of weights in one graph; None without a limit.
        gap_us: The GPU's time between two kernels.
    """

    spec: OpSpec
    moves: _Line
    launches: _Line
    network: _Line
    graphs: Mapping[str, Mapping[int, tuple[float, float]]]
    lengths: tuple[int, ...]
    most_weight_bytes: int | None
    gap_us: float

    @property
    def routing(self) -> Routing:
        """The routing of the layer."""
        assert self.spec.experts is not None  # of an ``experts`` group
        return self.spec.experts

    @property
    def form(self) -> str | None:
        """The fastest form of the NPU's graphs; None without graphs."""
        shared = set.intersection(*map(set, self.graphs.values())) if self.graphs else set()

        def time_us(form: str) -> float:
            return sum(sum(self.graphs[form][capacity]) for capacity in shared)

        return min(sorted(self.graphs), key=time_us, default=None)

    def kernels_us(self, tokens: int) -> tuple[float, ...]:
        """Return the GPU's time of each kernel of a pass, in order, if the tokens choose all experts evenly.

        The kernels of the moves take equally long, and so do those of the networks.
        """
        touched = self.routing.touched(tokens)
        mean = tokens * self.routing.chosen / touched
        products_us = self.launches.one(mean) + touched * self.network.one(mean)
        move_us = (self.moves.one(tokens) + self.gap_us) / MOVES
        product_us = (products_us + self.gap_us) / PRODUCTS
        return (*(move_us,) * (MOVES - 1), *(product_us,) * PRODUCTS, move_us)

    def bounds(self, tokens: int, gbps: float) -> tuple[ContentionBound, ContentionBound]:
        """Return the bounds of the GPU and of the NPU's graphs of the fastest form.

        Args:
            tokens: Tokens of the pass.
            gbps: The GPU's bandwidth.
        """
        mean = tokens * self.routing.chosen / self.routing.touched(tokens)
        read_us = self.spec.slice_bytes(self.spec.member_rows) / (gbps * 1e3)
        gpu_waits = read_us >= MEMORY_BOUND_FRACTION * self.network.one(mean)
        own = self.graphs[self.form] if self.form else {}
        # While more tokens take no longer, the NPU waits for weights.
        npu_waits = not own or own[max(own)][1] <= FLAT_FACTOR * own[min(own)][1]
        return "memory" if gpu_waits else "compute", "memory" if npu_waits else "compute"

    def prices(
        self, tokens: int, memory: GraphMemory, overheads: Overheads, slowdown: Slowdown
    ) -> ExpertPrices:
        """Return the prices of a pass for the placement of experts.

        Args:
            tokens: Tokens of the pass: no expert has more rows.
            memory: The way in which the memory of graphs counts.
            overheads: Times of syncs.
            slowdown: Of both processors while both work.
        """
        spec, form = self.spec, self.form
        own = {} if form is None else self.graphs[form]
        starts, more = (_Line.of({length: pair[at] for length, pair in own.items()}) for at in (0, 1))
        within = range(min(own), max(own) + 1) if own else range(0)
        capacities = tuple(length for length in self.lengths if length in within)
        mapped_us = 2 * overheads.map_us_per_value * 2 * spec.columns
        mean = tokens * self.routing.chosen / self.routing.touched(tokens)

        def npu_us(experts: int, capacity: int) -> float:
            if capacity not in within:
                return math.inf
            one_us = more.one(capacity) + capacity * mapped_us
            return starts.one(capacity) + experts * one_us

        network_us = self.network.at(np.arange(tokens + 1, dtype=np.float64))
        network_us[0] = 0.0
        sync_us = max(0.0, overheads.hand_over_us) + overheads.refill_us + overheads.return_us
        return ExpertPrices(
            npu_us=npu_us,
            gpu_us=network_us,
            capacities=capacities,
            expert_bytes=spec.slice_bytes(spec.member_rows),
            row_bytes=2 * spec.columns * memory.activation_bytes,
            most_weight_bytes=self.most_weight_bytes,
            gpu_base_us=self.moves.one(tokens) + self.launches.one(mean) + 2 * self.gap_us,
            hand_over_us=sync_us + 2 * overheads.map_us,
            slowdown=slowdown,
            form=form,
        )


def expert_times(profile: Profile, shape: ModelShape, streamed: bool, gap_us: float) -> ExpertTimes | None:
    """Return the times of a model's experts; None for a model without, or if the profile lacks them.

    Of several versions of kernels or graphs, the one measured last counts.

    Args:
        profile: The profile.
        shape: The model.
        streamed: Whether weights come from memory.
        gap_us: The GPU's time between two kernels.
    """
    spec = shape.experts
    if spec is None:
        return None
    found = _of_shape(profile, spec, streamed)
    moves = {key.tokens: record.median_us for key, record in found["moves"].items() if key.chosen}
    launches, network = _lines(found["products"])
    if not moves or not network:
        return None
    graphs: dict[str, dict[int, tuple[float, float]]] = {}
    for form in sorted({key.form for key in found["graph"]}):
        starts, more = _lines({key: record for key, record in found["graph"].items() if key.form == form})
        graphs[form] = {capacity: (starts[capacity], more[capacity]) for capacity in starts}
    limits = [record.values.get(MOST_WEIGHT_BYTES) for record in found["graph"].values()]
    return ExpertTimes(
        spec,
        _Line.of(moves),
        _Line.of(launches),
        _Line.of(network),
        graphs,
        tuple(profile.description.get("npu_standard_lengths") or ()),
        next((int(limit) for limit in limits if limit is not None), None),
        gap_us,
    )


def _of_shape(
    profile: Profile, spec: OpSpec, streamed: bool
) -> dict[ExpertsOperator, dict[ExpertsKey, Record]]:
    """Return the records of a model's experts by operator, of the code that was measured last."""
    own = spec.columns, spec.member_rows[0], len(spec.members) > 1, spec.weight.layout
    found: dict[ExpertsOperator, dict[ExpertsKey, Record]] = defaultdict(dict)
    for key, record in profile.of_kind(ExpertsKey):
        sizes = key.columns, key.width, key.gated, key.weight
        routing = spec.experts
        assert routing is not None  # of an ``experts`` group
        if key.operator == "moves" and (key.experts, key.chosen) != (routing.experts, routing.chosen):
            continue
        if sizes == own and (key.integer_inputs, key.streamed) == (spec.integer_inputs, streamed):
            found[key.operator][key] = record
    for operator, records in found.items():
        newest = max(records, key=lambda key: (records[key].taken_s, key)).code
        found[operator] = {key: record for key, record in records.items() if key.code == newest}
    return found


def _lines(records: Mapping[ExpertsKey, Record]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the time without experts and that of each expert by tokens, from the fewest and most experts."""
    times: dict[int, dict[int, float]] = defaultdict(dict)
    for key, record in records.items():
        times[key.tokens][key.experts] = record.planned_us
    starts, more = {}, {}
    for tokens, own in times.items():
        few, many = min(own), max(own)
        step = max(0.0, own[many] - own[few]) / (many - few) if many > few else own[few] / few
        more[tokens] = step
        starts[tokens] = max(0.0, own[few] - few * step)
    return starts, more
