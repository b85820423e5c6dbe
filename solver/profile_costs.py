"""Costs from a profile: measured times, and predictions where nothing was measured."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, TypeAlias, TypeGuard

from heterollm.base import ProfileError
from heterollm.kernels.gpu import STRATEGIES, Strategy
from heterollm.kernels.npu import INTEGER_FORMS, K_SPLIT_COLUMNS, TILE_OF_INTEGERS, GraphForm
from heterollm.kernels.operators import Form, name_in_profiles
from heterollm.kernels.ops import GraphMemory, Group, OpSpec, WeightFormat
from heterollm.model import ModelShape
from heterollm.profiler.measure import (
    SUBMISSIONS,
    layer_key,
)
from heterollm.profiler.predict import Predictor, fitted_predictor
from heterollm.profiler.records import (
    BandwidthKey,
    ContentionBound,
    ContentionKey,
    CopyKey,
    FenceKey,
    LaunchKey,
    LayerKey,
    LinearKey,
    LinearPoint,
    PowerKey,
    Processor,
    Profile,
)
from heterollm.solver.candidates import NpuLimits
from heterollm.solver.costs import NO_SHADOW, Errors, Overheads, ShadowTimes, Slowdown
from heterollm.solver.expert_prices import ExpertPrices
from heterollm.solver.expert_times import FLAT_FACTOR, MEMORY_BOUND_FRACTION, expert_times
from heterollm.solver.ffn import ffn_groups, first_group
from heterollm.solver.objective import Power
from heterollm.solver.profile_errors import ProfileErrors
from heterollm.solver.shadows import GroupShadow
from heterollm.solver.sparse_costs import SparseTimes, sparse_times

BEFORE: Final[dict[Group, tuple[str, ...]]] = {
    "qkv": ("rms_norm",),
    "o": ("rope_and_store", "attention"),
    "gate_up": ("rms_norm",),
    "down": ("gated_activation",),
    "head": ("final_norm",),
}
"""The glue operators before each group."""

READERS: Final[dict[Group, str]] = {
    "qkv": "rope_and_store",
    "o": "rms_norm",
    "gate_up": "gated_activation",
    "down": "rms_norm",
}
"""The glue operator that reads the output of each group."""

_Formats: TypeAlias = tuple[WeightFormat, bool, bool, bool]
"""Weight format, whether inputs are rounded, whether it is an ffn, and whether a tensor has one scale: graph
forms depend on these."""

_Size: TypeAlias = tuple[int, int, bool]
"""Inputs, tokens, and whether ``down`` of an ffn is too wide for a graph without a k-split."""

DECODE_POSITION: Final = 256
"""Default position of a decoded token: attention reads the tokens before it."""

MAPPED_BUFFERS: Final = 2
"""Buffers that are mapped for an NPU graph: its input and its output."""

RETURN_VALUE: Final = "return_us"
"""Name of the value of a hand-over record with the time of the way back, where that takes time."""

SPILL_FACTOR: Final = 2.0

WAITING_FRACTION: Final = 0.5
"""Fraction of the longest integer graphs' time a token; shorter ones with less wait for their weights."""

LEAST_HIDDEN_FRACTION: Final = 0.25
"""Fraction of a small graph's time; a smaller gain of a graph behind a wait may be noise."""

K_SPLIT_FFNS: Final[tuple[GraphForm, ...]] = ("ffn_k_chunked", "ffn_k_chunked_int8")


class ProfileCosts:
    """The times of one model's groups on the profiled device.

    Args:
        profile: The measurements.
        shape: The model.
        position: Tokens of the session before the pass, which attention reads. By default 0 for a prompt, and
            :data:`DECODE_POSITION` for a decoded token.
        predictor: The predictor; by default the cached one of the profile.
        shadows: The shadows of outliers, by group.

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
        shadows: Mapping[Group, GroupShadow] | None = None,
    ) -> None:
        self._shadows = shadows or {}
        self._kernels = _kernels_of_operators(profile)
        self.overheads = replace(overheads_of(profile), merges_launches=not self._kernels)
        self.position = position
        self._predictor = predictor or fitted_predictor(profile)
        self._shape = shape
        self._streamed = shape.streamed(profile.cache_bytes)
        self.errors: Errors | None = None
        if profile.time_kind == "real":
            strategy = best_strategy(profile)
            self.errors = ProfileErrors(profile, self._predictor, streamed=self._streamed, strategy=strategy)
        self._gap_us = _median(profile, LaunchKey("chained"))
        self.experts = expert_times(profile, shape, self._streamed, self._gap_us)
        self.missing: set[str] = set() if shape.experts is None or self.experts else {"experts"}
        self._gbps = {
            key.processor: record.values.get("gbps", math.inf)
            for key, record in profile.of_kind(BandwidthKey)
            if not key.together
        }
        self._factors = {
            (key.processor, key.bound, key.beside): max(1.0, record.values.get("slowdown", 1.0))
            for key, record in profile.of_kind(ContentionKey)
        }

        self._limits = limits_of(profile)
        self._integer_limits = limits_of(profile, calibrated=True)

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
        return self._us(point, "npu")

    def slowdown(self, spec: OpSpec, tokens: int, form: str = "", length: int = 0) -> Slowdown:
        """Return the slowdown of both processors by their bounds; for an ffn, that of gate and up.

        Args:
            spec: The group or ffn.
            tokens: Tokens of the pass.
            form: Form of the NPU's graphs, if they compute in integers.
            length: Length of the longest of these.
        """
        linear = spec if spec.then is None else ffn_groups(spec)[0]
        graph_length = self._graph_length(tokens)
        gpu, npu = self._gpu_bound(linear, tokens), self._npu_bound(linear, graph_length)
        if form:
            npu = self._integer_bound(spec, form, length)
        elif ("npu", "spill", gpu) in self._factors and self._spills(linear, graph_length):
            npu = "spill"
        return self.slowdown_of_bounds(gpu, npu)

    def slowdown_of_bounds(self, gpu: ContentionBound, npu: ContentionBound) -> Slowdown:
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
            self._us_per_byte(one, length) for one in self._shape.layer
        )

    def _us_per_byte(self, spec: OpSpec, length: int) -> float:
        return self._whole_us(spec, length) / spec.weight_bytes()

    def _whole_us(self, spec: OpSpec, length: int) -> float:
        """Return the NPU's time of a group without the start of a graph, which does not depend on weights."""
        forms = () if self._limits is None else self._limits.forms(spec, length)
        times_us = [self.npu_us(spec, spec.member_rows, length, form) for form in forms]
        return max(0.0, min(times_us, default=math.inf) - max(0.0, -self.overheads.hand_over_us))

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
        before = BEFORE[first_group(spec).group][-1]
        if before not in ("rms_norm", "final_norm"):
            write = name_in_profiles("write_codes", codes)
            return self._layer_us(write, covered, width=spec.columns), read_us
        if before == "final_norm":
            codes = Form(codes="uint16")
        return self._more_us(before, name_in_profiles(before, codes), tokens), read_us

    def shadow_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int, covered: int) -> ShadowTimes:
        """Return the times of a group's shadow; see :class:`heterollm.solver.costs.Costs`."""
        shadow = self._shadows.get(spec.group)
        if shadow is None:
            return NO_SHADOW
        rows = sum(member_rows)

        def product_us(channels: float) -> float:
            count = round(channels)
            return self._layer_us("multiply_outliers", tokens, rows, count) if count else 0.0

        find_us = self._layer_us("find_outliers", covered, spec.columns)
        reader = READERS[spec.group]
        sum_us = self._more_us(reader, name_in_profiles(reader, Form("sum")), tokens) * rows / spec.rows
        times = find_us, product_us(shadow.hot), product_us(shadow.cold) + sum_us
        return ShadowTimes(*(shadow.layers * one_us for one_us in times))

    def _more_us(self, plain: str, other: str, tokens: int) -> float:
        """Return the time by which an operator takes longer than a plain one."""
        return max(0.0, self._layer_us(other, tokens) - self._layer_us(plain, tokens))

    def mixture_us(self, tokens: int) -> tuple[float, ...]:
        """Return the time of each kernel of a mixture; see :class:`heterollm.solver.costs.Costs`."""
        if self.experts is None:
            return ()
        alone = not any(spec.group == "gate_up" for spec in self._shape.layer)
        norm = (self._layer_us("rms_norm", tokens),) if alone else ()
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
        gbps = self._gbps.get("gpu", math.inf)
        gpu, npu = times.bounds(tokens, gbps)
        return times.prices(tokens, memory, self.overheads, self.slowdown_of_bounds(gpu, npu))

    def sparse_attention(self, tokens: int, keys: int) -> SparseTimes | None:
        """Return the times of a layer's sparse attention; None if the profile has no measurement of it.

        Args:
            tokens: Tokens of the pass, padded to whole tiles.
            keys: Keys that are estimated, those of the pass included.
        """
        return sparse_times(self._predictor, self._shape, tokens, keys)

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
        shape, position = self._shape, self.position
        if position is None:
            position = DECODE_POSITION if tokens == 1 else 0
        if spec.group == "down" and spec.columns != shape.intermediate_size:
            shape = replace(shape, intermediate_size=spec.columns)
        for operator in BEFORE[spec.group]:
            key = layer_key(shape, operator, tokens, position)
            try:
                yield key, self._predictor.predict_layer_us(key).us + self._gap_us
            except ProfileError:
                self.missing.add(operator)

    def _us(self, point: LinearPoint, processor: Processor) -> float:
        try:
            return self._predictor.predict_us(point, processor).us
        except ProfileError:
            return math.inf

    def _gpu_bound(self, spec: OpSpec, tokens: int) -> ContentionBound:
        # The bound of a shard does not depend on its number of rows.
        point = LinearPoint.of(spec, tokens, streamed=self._streamed)
        read_us = point.weight_bytes / (self._gbps.get("gpu", math.inf) * 1e3)
        return "memory" if read_us >= MEMORY_BOUND_FRACTION * self._us(point, "gpu") else "compute"

    def _integer_bound(self, spec: OpSpec, form: str, length: int) -> ContentionBound:
        """Return the bound of an integer graph, which may wait for weights where float graphs do not.

        It waits where more tokens than the shortest graph's take much less time each than the tokens of the
        longest graphs. They always take some: drivers copy inputs and outputs.
        """
        limits = self._integer_limits
        assert limits is not None  # the form was measured
        lengths = [own for own in limits.standard_lengths if form in limits.forms(spec, own)]

        def us_per_token(few: int, many: int) -> float:
            few_us, many_us = (self.npu_us(spec, spec.member_rows, tokens, form) for tokens in (few, many))
            return (many_us - few_us) / max(1, many - few)

        own_us, most_us = us_per_token(lengths[0], length), us_per_token(*lengths[-2:])
        return "memory" if own_us <= WAITING_FRACTION * most_us else "compute"

    def _npu_bound(self, spec: OpSpec, length: int) -> ContentionBound:
        # While more tokens take no longer, the NPU waits for weights.
        if length == 1 or self._whole_us(spec, length) <= FLAT_FACTOR * self._whole_us(spec, 1):
            return "memory"
        return "compute"


def limits_of(profile: Profile, *, calibrated: bool = False) -> NpuLimits | None:
    """Return the limits of the profiled device's NPU; None without an NPU.

    A form is legal for a group or an ffn at a length if it was measured there; for other sizes, if it was
    measured at every size of the same formats.

    Args:
        profile: The profile.
        calibrated: Whether the model has calibrated ranges, so that integer forms may compute weights with
            stepped scales, or with one for a tensor.

    Raises:
        ProfileError: The description of the device lacks its standard lengths.
    """
    description = profile.description
    lengths, alignment = description.get("npu_standard_lengths"), description.get("npu_row_alignment")
    if description.get("npu") is None:
        return None
    if not _are_lengths(lengths) or not isinstance(alignment, int) or alignment < 1:
        raise ProfileError(
            f"The profile of {profile.device} does not say what its NPU can be given: standard lengths "
            f"{lengths!r:.80}, row alignment {alignment!r:.80}.",
            fix="Run `heterollm profile` again.",
        )
    measured: dict[_Formats, dict[_Size, set[str]]] = {}
    for key, _ in profile.of_kind(LinearKey):
        if key.processor == "npu":
            point = key.point
            one_scale = point.bits == 8 and point.form in INTEGER_FORMS
            key_of = (point.weight.layout, point.integer_inputs, point.is_ffn, one_scale)
            sizes = measured.setdefault(key_of, {})
            wide = point.is_ffn and point.member_rows[0] > K_SPLIT_COLUMNS
            sizes.setdefault((point.columns, point.tokens, wide), set()).add(point.form)

    def forms(spec: OpSpec, length: int) -> tuple[str, ...]:
        one_scale = spec.weight.scales == "tensor"
        key = (spec.weight.layout, spec.integer_inputs, spec.then is not None, one_scale)
        sizes = measured.get(key, {})
        wide = spec.then is not None and spec.then.columns > K_SPLIT_COLUMNS
        own = sizes.get((spec.columns, length, wide))
        if own is None:
            alike = [found for size, found in sizes.items() if size[2] == wide] or list(sizes.values())
            own = set.intersection(*alike) if alike else set()
            for form, tile in TILE_OF_INTEGERS.items():
                # Integer forms have no graphs of other lengths.
                tiles = [found for size, found in sizes.items() if size[1] % tile == 0 and size[2] == wide]
                if length % tile:
                    own.discard(form)
                elif tiles and all(form in found for found in tiles):
                    own.add(form)
        # Where only wide ffns were measured, their forms serve narrow ones too, except for k-splits.
        found = sorted(form for form in own if wide or form not in K_SPLIT_FFNS)
        if one_scale:
            # Where the ranges of a layer have 16 bits, ``integer`` takes its place.
            found = [form for form in found if form == "static_int8"]
        integer = calibrated and spec.weight.scales != "free"
        return tuple(form for form in found if integer or form not in INTEGER_FORMS)

    return NpuLimits(tuple(lengths), alignment, forms)


def _are_lengths(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and item > 0 for item in value)
        and value == sorted(set(value))
    )


def best_strategy(profile: Profile) -> Strategy | None:
    """Return the strategy with the least latency from the end of a kernel to the host; None without times.

    Of strategies within a tenth, or two microseconds, of the fastest, it is the one with the least processor
    time.
    """
    latencies: dict[str, list[float]] = {}
    burnt: dict[str, list[float]] = {}
    for key, record in profile.of_kind(FenceKey):
        latencies.setdefault(key.strategy, []).append(record.median_us)
        burnt.setdefault(key.strategy, []).append(record.values.get("processor_fraction", 1.0))
    if not latencies:
        return None
    medians = {strategy: statistics.median(values) for strategy, values in latencies.items()}
    fastest = min(medians.values())
    near = [name for name, value in medians.items() if value <= max(1.1 * fastest, fastest + 2.0)]
    least = min(near, key=lambda name: (statistics.median(burnt[name]), name))
    return next(strategy for strategy in STRATEGIES if strategy == least)


def overheads_of(profile: Profile) -> Overheads:
    """Return the times that syncs and submissions add on the profiled device, with its best strategy."""
    best = best_strategy(profile)
    records = [record for key, record in profile.of_kind(FenceKey) if key.strategy == best]
    latencies = [record.median_us for record in records]
    returns = [record.values.get(RETURN_VALUE, 0.0) for record in records]
    refill_us = _median(profile, LaunchKey("npu_to_gpu")) - _median(profile, LaunchKey("npu_to_gpu_busy"))
    mapped = not profile.description.get("coherent", True)
    map_us, map_us_per_value = _map_costs(profile) if mapped else (0.0, 0.0)
    submission, hidden_us = LaunchKey("enqueue_busy"), _hidden_start_us(profile)
    return Overheads(
        hand_over_us=(statistics.median(latencies) if latencies else 0.0) - hidden_us,
        refill_us=max(0.0, refill_us),
        map_us=map_us,
        return_us=statistics.median(returns) if returns else 0.0,
        # The driver's wait and most maps wait for the whole queue: the GPU's shard is enqueued behind them.
        empties_queue=(mapped and not profile.description.get("maps_beside_kernels")) or best == "finish",
        submit_us=_median(profile, submission) if submission in profile.records else math.inf,
        hidden_us=hidden_us,
        map_us_per_value=map_us_per_value,
    )


def _map_costs(profile: Profile) -> tuple[float, float]:
    """Return the mean time to map and to unmap a graph's two buffers, and that of each value in them."""
    times_us: dict[int, float] = {}
    for key, record in profile.of_kind(CopyKey):
        if key.method in ("acquire", "release"):
            times_us[key.size_bytes] = times_us.get(key.size_bytes, 0.0) + record.median_us / 2
    if not times_us:
        return 0.0, 0.0
    small, large = min(times_us), max(times_us)
    us_per_byte = max(0.0, times_us[large] - times_us[small]) / max(1, large - small)
    fixed_us = max(0.0, times_us[small] - us_per_byte * small)
    item_bytes = 4 if profile.description.get("activation_dtype") == "float32" else 2
    return MAPPED_BUFFERS * fixed_us, us_per_byte * item_bytes


def _kernels_of_operators(profile: Profile) -> dict[str, int]:
    """Return the number of kernels of each operator in a pass of one token; empty where they are merged.

    The record of the longest context counts: attention has more kernels there.
    """
    return {
        key.operator: int(record.values[SUBMISSIONS])
        for key, record in profile.of_kind(LayerKey)
        if key.tokens == 1 and SUBMISSIONS in record.values
    }


def _hidden_start_us(profile: Profile) -> float:
    """Return the time that a graph saves behind a wait of the host for its input; 0 within noise.

    Measured times of graphs include their whole start.
    """
    record = profile.records.get(LaunchKey("npu_to_gpu"))
    if record is None or record.failed:
        return 0.0
    alone_us = record.values.get("graph_us", 0.0)
    hidden_us = alone_us - record.values.get("graph_behind_wait_us", alone_us)
    return hidden_us if hidden_us > LEAST_HIDDEN_FRACTION * alone_us else 0.0


def power_of(profile: Profile) -> Power | None:
    """Return the power of the device; None if the profile has none."""
    watts: dict[str, float] = {}
    source = next((key.source for key, _ in profile.of_kind(PowerKey)), None)
    for key, record in profile.of_kind(PowerKey):
        if key.source == source:
            watts[key.load] = record.values["watts"]
    if not {"idle", "gpu", "npu"} <= watts.keys():
        return None
    idle = watts["idle"]
    return Power(idle, max(0.0, watts["gpu"] - idle), max(0.0, watts["npu"] - idle))


def _median(profile: Profile, key: LaunchKey | CopyKey) -> float:
    record = profile.records.get(key)
    return 0.0 if record is None or record.failed else record.median_us
