"""Costs from a profile: measured times, and predictions where nothing was measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from heterollm.base import ProfileError
from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.operators import Form, name_in_profiles
from heterollm.kernels.ops import STREAM_NORM, GraphMemory, OpSpec
from heterollm.model import ModelShape
from heterollm.profiler.measure import (
    ENDING_ROWS,
    SUBMISSIONS,
    layer_key,
)
from heterollm.profiler.predict import Predictor, fitted_predictor
from heterollm.profiler.records import (
    ContentionBound,
    LaunchKey,
    LayerKey,
    LinearPoint,
    Processor,
    Profile,
)
from heterollm.solver.contention import Contention
from heterollm.solver.costs import NO_SHADOW, Errors, ShadowTimes, Slowdown
from heterollm.solver.experts.prices import ExpertPrices
from heterollm.solver.experts.times import expert_times
from heterollm.solver.profile_errors import ProfileErrors
from heterollm.solver.profile_overheads import best_strategy, graph_start_us, median_us, overheads_of
from heterollm.solver.shadows import GroupShadow
from heterollm.solver.sparse.costs import SparseTimes, attention_graph_us, sparse_times

DECODE_POSITION: Final = 256
"""Default position of a decoded token: attention reads the tokens before it."""


class ProfileCosts:
    """The times of one model's groups on the profiled device.

    Args:
        profile: The measurements.
        shape: The model.
        position: Tokens of the session before the pass, which attention reads. By default 0 for a prompt, and
            :data:`DECODE_POSITION` for a decoded token.
        predictor: The predictor; by default the cached one of the profile.
        shadows: The shadows of outliers, by place.

    Attributes:
        errors: The errors of the times; None where they are not real, and so exact.
        experts: The times of the model's experts; None if it has none, or the profile no times of them.
        missing: Operators without times in the profile: predictions leave them out.

    Raises:
        ProfileError: The profile lacks linear layers.
    """

    def __init__(
        self,
        profile: Profile,
        shape: ModelShape,
        *,
        position: int | None = None,
        predictor: Predictor | None = None,
        shadows: Mapping[str, GroupShadow] | None = None,
    ) -> None:
        self._shadows = shadows or {}
        self._kernels = _kernels_of_operators(profile)
        self.overheads = replace(
            overheads_of(profile), merges_launches=not self._kernels, endings=tuple(_endings(profile, shape))
        )
        self.position = position
        self._predictor = predictor or fitted_predictor(profile)
        self._shape = shape
        self._streamed = shape.streamed(profile.cache_bytes)
        self.errors: Errors | None = None
        if profile.time_kind == "real":
            strategy = best_strategy(profile)
            self.errors = ProfileErrors(profile, self._predictor, streamed=self._streamed, strategy=strategy)
        self._gap_us = median_us(profile, LaunchKey("chained"))
        self._start_us = graph_start_us(profile)
        self.experts = expert_times(profile, shape, self._streamed, self._gap_us)
        self.missing: set[str] = set() if shape.experts is None or self.experts else {"experts"}
        self._contention = Contention(
            profile,
            [spec for kind in shape.kinds for spec in kind.specs],
            streamed=self._streamed,
            hidden_us=max(0.0, -self.overheads.hand_over_us),
            time_us=self._us,
        )

    def at(self, position: int) -> ProfileCosts:
        """Return the costs of passes that begin at another position; both share ``missing``."""
        moved = copy.copy(self)
        moved.position = position
        return moved

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """Return the GPU's time; see :class:`heterollm.solver.costs.Costs`."""
        point = LinearPoint.of(spec, tokens, member_rows=member_rows, streamed=self._streamed)
        return self._us(point, "gpu") + self._gap_us

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """Return the time of one NPU graph; see :class:`heterollm.solver.costs.Costs`."""
        point = LinearPoint.of(spec, length, member_rows=member_rows, form=form, streamed=self._streamed)
        own_us, first = self._us(point, "npu"), spec.first
        if first is None:
            return own_us
        # One graph starts in place of two.
        linear = "integer" if form in INTEGER_FORMS else "matmul_nbits"
        first_us = self.npu_us(first, first.member_rows, length, linear)
        return own_us + max(0.0, first_us - self._start_us)

    def slowdown(self, spec: OpSpec, tokens: int, form: str = "", length: int = 0) -> Slowdown:
        """Return the slowdown of both processors; see :class:`heterollm.solver.costs.Costs`."""
        return self._contention.slowdown(spec, tokens, form, length)

    def slowdown_of_bounds(self, gpu: ContentionBound, npu: ContentionBound) -> Slowdown:
        """Return the slowdown of both processors by what each of them is bound by."""
        return self._contention.of_bounds(gpu, npu)

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """Return the time of the glue operators before a group."""
        return sum(time_us for _, time_us in self._operators_us(spec, tokens))

    def kernels_us(self, spec: OpSpec) -> tuple[float, ...]:
        """Return the time of each kernel before a group; those of one operator take equally long."""
        operators = [(self._kernels.get(key.operator, 1), us) for key, us in self._operators_us(spec, 1)]
        return tuple(time_us / count for count, time_us in operators for _ in range(count))

    def codes_us(
        self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int, covered: int
    ) -> tuple[float, float]:
        """Return the times to write and to read codes; see :class:`heterollm.solver.costs.Costs`."""
        rows = sum(member_rows) if spec.then is None else spec.then.rows
        codes = Form(codes="uint8" if spec.weight.scales == "tensor" else "uint16")
        read_us = self._layer_us(name_in_profiles("read_codes", codes), covered, width=rows)
        if not spec.follows_norm:
            write = name_in_profiles("write_codes", codes)
            write_us = self._layer_us(write, covered, width=spec.input_columns)
            stream_us = self._more_us(STREAM_NORM, codes, tokens, spec.columns) if spec.fused else 0.0
            return write_us + stream_us, read_us
        norm = spec.before[-1]
        if spec.group == "head":
            codes = Form(codes="uint16")
        return self._more_us(norm, codes, tokens, spec.columns), read_us

    def shadow_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int, covered: int) -> ShadowTimes:
        """Return the times of a group's shadow; see :class:`heterollm.solver.costs.Costs`."""
        shadow = self._shadows.get(spec.place)
        if shadow is None:
            return NO_SHADOW
        rows = sum(member_rows)

        def product_us(channels: float) -> float:
            count = round(channels)
            return self._layer_us("multiply_outliers", tokens, rows, count) if count else 0.0

        find_us = self._layer_us("find_outliers", covered, spec.columns)
        more_us = self._more_us(spec.reader, Form("sum"), tokens, spec.member_rows[0])
        sum_us = more_us * rows / spec.rows
        times = find_us, product_us(shadow.hot), product_us(shadow.cold) + sum_us
        return ShadowTimes(*(shadow.layers * one_us for one_us in times))

    def _more_us(self, operator: str, form: Form, tokens: int, width: int) -> float:
        """Return the time by which another form of an operator takes longer than the plain one."""
        names = name_in_profiles(operator, form), operator
        times_us = [self._layer_us(name, tokens, width) for name in names]
        return max(0.0, times_us[0] - times_us[1])

    def mixture_us(self, tokens: int, kind: str = "") -> tuple[float, ...]:
        """Return the time of each kernel of a mixture; see :class:`heterollm.solver.costs.Costs`."""
        layer = next((one for one in self._shape.kinds if one.name == kind), None)
        if self.experts is None or layer is None or layer.experts is None:
            return ()
        alone = not any(spec.group == "gate_up" for spec in layer.specs)
        norm = (self._layer_us("rms_norm", tokens, layer.experts.columns),) if alone else ()
        return (*norm, *self.experts.kernels_us(tokens))

    def expert_prices(self, tokens: int, memory: GraphMemory) -> ExpertPrices | None:
        """Return the prices of a pass for the placement of experts; None without times of graphs.

        Args:
            tokens: Tokens of the pass.
            memory: The way in which the memory of graphs counts.
        """
        times = self.experts
        if times is None or times.form is None:
            return None
        gpu, npu = times.bounds(tokens, self._contention.gpu_gbps)
        return times.prices(tokens, memory, self.overheads, self.slowdown_of_bounds(gpu, npu))

    def sparse_attention(self, tokens: int, keys: int) -> SparseTimes | None:
        """Return the times of a layer's sparse attention; None if the profile has no measurement of it.

        Args:
            tokens: Tokens of the pass, padded to whole tiles.
            keys: Keys that are estimated, those of the pass included.
        """
        return sparse_times(self._predictor, self._shape, tokens, keys)

    def npu_attention_us(self, tokens: int, keys: int) -> float | None:
        """Return the time of a layer's attention on the NPU; None if the profile has no measurement of it.

        It holds the graph, the kernel that writes its inputs, and the hand-overs to the graph and behind it.

        Args:
            tokens: Tokens of the graph, its padding included.
            keys: Keys of the graph.
        """
        graph_us = attention_graph_us(self._predictor, self._shape, tokens, keys)
        if graph_us is None:
            return None
        shape, over = self._shape, self.overheads
        inputs_us = self._layer_us("attention_inputs", tokens, position=max(0, keys - tokens))
        values = 2 * (shape.heads * tokens + shape.kv_heads * keys) * shape.head_dim
        handed_us = over.hand_over_us + 2 * over.mapping_us(values) + over.return_us + over.refill_us
        return inputs_us + handed_us + graph_us

    def dense_attention_us(self, tokens: int, keys: int) -> float:
        """Return the time of a layer's dense attention; 0 if the profile lacks it.

        Args:
            tokens: Tokens of the pass.
            keys: Keys that its last token sees.
        """
        return self._layer_us("attention", tokens, position=keys - tokens)

    def _layer_us(
        self,
        operator: str,
        tokens: int,
        width: int | None = None,
        channels: int = 0,
        *,
        position: int = 0,
    ) -> float:
        """Return the time of an operator; 0 if the profile lacks it."""
        try:
            key = layer_key(self._shape, operator, tokens, position, width=width, channels=channels)
            return self._predictor.predict_layer_us(key).us + self._gap_us
        except ProfileError:
            self.missing.add(operator)
            return 0.0

    def _operators_us(self, spec: OpSpec, tokens: int) -> Iterator[tuple[LayerKey, float]]:
        """Yield the glue operators before a group, as far as the profile has them, with their times."""
        position = self.position
        if position is None:
            position = DECODE_POSITION if tokens == 1 else 0
        for operator in spec.before:
            shape = self._shape.of_kind(spec.kind)
            key = layer_key(shape, operator, tokens, position, width=spec.columns)
            try:
                yield key, self._predictor.predict_layer_us(key).us + self._gap_us
            except ProfileError:
                self.missing.add(operator)

    def _us(self, point: LinearPoint, processor: Processor) -> float:
        try:
            return self._predictor.predict_us(point, processor).us
        except ProfileError:
            return math.inf


def _endings(profile: Profile, shape: ModelShape) -> Iterator[tuple[str, float]]:
    """Yield the items of :attr:`heterollm.solver.costs.Overheads.endings`."""
    for spec in shape.layer:
        if spec.before and spec.before[0] in shape.endings:
            key = layer_key(shape.of_kind(spec.kind), spec.before[0], 1, width=spec.columns)
            record = profile.records.get(key)
            if record is not None and ENDING_ROWS in record.values:
                yield spec.place, record.values[ENDING_ROWS]


def _kernels_of_operators(profile: Profile) -> dict[str, int]:
    """Return the number of kernels of each operator in a pass of one token; empty where they are merged.

    The record of the longest context counts: attention has more kernels there.
    """
    return {
        key.operator: int(record.values[SUBMISSIONS])
        for key, record in profile.of_kind(LayerKey)
        if key.tokens == 1 and SUBMISSIONS in record.values
    }
