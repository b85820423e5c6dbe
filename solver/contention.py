"""Contention of both processors on a profiled device: by what each is bound, and how much slower it gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from heterollm.kernels.ops import OpSpec
from heterollm.profiler.records import (
    BandwidthKey,
    ContentionBound,
    ContentionKey,
    LinearPoint,
    Processor,
    Profile,
)
from heterollm.solver.costs import Slowdown
from heterollm.solver.experts.times import FLAT_FACTOR, MEMORY_BOUND_FRACTION
from heterollm.solver.ffn import first_group
from heterollm.solver.profile_limits import limits_of

SPILL_FACTOR: Final = 2.0

WAITING_FRACTION: Final = 0.5
"""Fraction of the longest integer graphs' time a token; shorter ones with less wait for their weights."""

TimeOf: TypeAlias = Callable[[LinearPoint, Processor], float]
"""Returns the time of a shard; ``math.inf`` if unknown."""


class Contention:
    """Slowdowns of both processors while both compute.

    Args:
        profile: The measurements.
        specs: The groups of each kind of layer.
        streamed: Whether every pass reads the weights from memory.
        hidden_us: Time of a graph's start that a wait hides.
        time_us: Times of shards.

    Attributes:
        gpu_gbps: The GPU's bandwidth; infinite if it was not measured.
    """

    def __init__(
        self, profile: Profile, specs: Sequence[OpSpec], *, streamed: bool, hidden_us: float, time_us: TimeOf
    ) -> None:
        self._specs, self._streamed, self._hidden_us, self._time_us = specs, streamed, hidden_us, time_us
        self._limits = limits_of(profile)
        self._integer_limits = limits_of(profile, calibrated=True)
        gbps = {
            key.processor: record.values.get("gbps", math.inf)
            for key, record in profile.of_kind(BandwidthKey)
            if not key.together
        }
        self.gpu_gbps = gbps.get("gpu", math.inf)
        self._factors = {
            (key.processor, key.bound, key.beside): max(1.0, record.values.get("slowdown", 1.0))
            for key, record in profile.of_kind(ContentionKey)
        }

    def slowdown(self, spec: OpSpec, tokens: int, form: str = "", length: int = 0) -> Slowdown:
        """Return the slowdown of both processors by their bounds; for an ffn, that of gate and up.

        Args:
            spec: The group or ffn.
            tokens: Tokens of the pass.
            form: Form of the NPU's graphs, if they compute in integers.
            length: Length of the longest of these.
        """
        linear = first_group(spec)
        graph_length = self._graph_length(tokens)
        gpu, npu = self._gpu_bound(linear, tokens), self._npu_bound(linear, graph_length)
        if form:
            npu = self._integer_bound(spec, form, length)
        elif ("npu", "spill", gpu) in self._factors and self._spills(linear, graph_length):
            npu = "spill"
        return self.of_bounds(gpu, npu)

    def of_bounds(self, gpu: ContentionBound, npu: ContentionBound) -> Slowdown:
        """Return the slowdown of both processors by what each of them is bound by."""
        return Slowdown(self._factors.get(("gpu", gpu, npu), 1.0), self._factors.get(("npu", npu, gpu), 1.0))

    def _graph_length(self, tokens: int) -> int:
        """Return the length of the graph that a pass is padded to, or of the longest graph."""
        lengths = self._limits.standard_lengths if self._limits else (tokens,)
        return next((length for length in lengths if length >= tokens), lengths[-1])

    def _spills(self, spec: OpSpec, length: int) -> bool:
        """Return whether the NPU takes much longer for each weight of a group than for other groups.

        Rows that are too long for its on-chip memory spill; the profile has the contention of that too.
        """
        return self._us_per_byte(spec, length) > SPILL_FACTOR * min(
            self._us_per_byte(one, length) for one in self._specs
        )

    def _us_per_byte(self, spec: OpSpec, length: int) -> float:
        return self._whole_us(spec, length) / spec.weight_bytes()

    def _whole_us(self, spec: OpSpec, length: int) -> float:
        """Return the NPU's time of a group without the start of a graph, which does not depend on weights."""
        forms = () if self._limits is None else self._limits.forms(spec, length)
        times_us = [self._npu_us(spec, spec.member_rows, length, form) for form in forms]
        return max(0.0, min(times_us, default=math.inf) - self._hidden_us)

    def _gpu_bound(self, spec: OpSpec, tokens: int) -> ContentionBound:
        # The bound of a shard does not depend on its number of rows.
        point = LinearPoint.of(spec, tokens, streamed=self._streamed)
        read_us = point.weight_bytes / (self.gpu_gbps * 1e3)
        return "memory" if read_us >= MEMORY_BOUND_FRACTION * self._time_us(point, "gpu") else "compute"

    def _integer_bound(self, spec: OpSpec, form: str, length: int) -> ContentionBound:
        """Return the bound of an integer graph, which may wait for weights where float graphs do not.

        It waits where more tokens than the shortest graph's take much less time each than the tokens of the
        longest graphs. They always take some: drivers copy inputs and outputs.
        """
        limits = self._integer_limits
        assert limits is not None  # the form was measured
        lengths = [own for own in limits.standard_lengths if form in limits.forms(spec, own)]

        def us_per_token(few: int, many: int) -> float:
            few_us, many_us = (self._npu_us(spec, spec.member_rows, tokens, form) for tokens in (few, many))
            return (many_us - few_us) / max(1, many - few)

        own_us, most_us = us_per_token(lengths[0], length), us_per_token(*lengths[-2:])
        return "memory" if own_us <= WAITING_FRACTION * most_us else "compute"

    def _npu_bound(self, spec: OpSpec, length: int) -> ContentionBound:
        # While more tokens take no longer, the NPU waits for weights.
        if length == 1 or self._whole_us(spec, length) <= FLAT_FACTOR * self._whole_us(spec, 1):
            return "memory"
        return "compute"

    def _npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        point = LinearPoint.of(spec, length, member_rows=member_rows, form=form, streamed=self._streamed)
        return self._time_us(point, "npu")
