"""Emits the steps of shadow outliers before, beside and behind an operator's NPU graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import PlacedOp
from heterollm.engine.shadow.cold import ColdCount, ColdProduct, OutlierShadow
from heterollm.engine.shadow.slots import COLD_WEIGHTS, OUTLIER_BATCH, OUTLIER_FLAGS, OUTLIERS
from heterollm.engine.step import Operator, Step
from heterollm.engine.techniques.technique import Around, TechniqueSteps
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels, Launch, SharedArray
from heterollm.kernels.npu import LinearRanges, StaticRanges
from heterollm.kernels.operators import HotWeights, OutlierList, find_outliers, multiply_outliers
from heterollm.kernels.ops import Group, Join, OpSpec
from heterollm.model import ChannelFile, ModelWeights
from heterollm.solver import Plan


class ShadowSteps(TechniqueSteps):
    """The weights of hot channels of all operators with a shadow, uploaded once each, and their steps.

    All are uploaded at once, so that no pass is delayed by reading them.

    Args:
        device: The device.
        weights: The model's weights.
        plan: The plan.
        ranges: Calibrated ranges by layer and group.

    Attributes:
        count: Channels that were read from disk.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        ranges: Mapping[tuple[int, Group], StaticRanges],
    ) -> None:
        self.kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self.count = ColdCount()
        self.gpu = device.gpu
        self._dtype = device.activation_dtype
        self._weights = weights
        self._ranges = ranges
        self._held: dict[tuple[int, Group], tuple[HotWeights, ChannelFile | None]] = {}
        for entry in plan.placed:
            for spec in weights.specs if entry.placement.shadow else ():
                if entry.holds(spec) and (own := self._clamped(spec)) is not None:
                    self._load(spec, own)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on the channels that were read from disk; none if there were none."""
        if not self.count.channels:
            return ()
        return (f"The weights of {self.count.channels} rarer channels with outliers were read from disk.",)

    def around(
        self, builder: PassBuilder, operator: Operator, layer: int, op: PlacedOp | None
    ) -> ShadowAround | None:
        """Return the steps around an operator with a shadow."""
        del layer
        if op is None or op.operator != operator or not (op.placement.shadow and op.placement.npu_lengths):
            return None
        ranges = self._clamped(op.spec)
        if ranges is None:
            return None
        hot, file = self._load(op.spec, ranges)
        private, shared = builder.lane.private, builder.lane.shared
        found = OutlierList(private[OUTLIER_FLAGS], shared[OUTLIERS], shared[OUTLIER_BATCH])
        shadow = OutlierShadow(hot, found, shared[COLD_WEIGHTS], file, self.count)
        return ShadowAround(self, builder, op, shadow)

    def clear(self) -> None:
        """Drop the weights and close the files."""
        for _, file in self._held.values():
            if file is not None:
                file.close()
        self._held.clear()

    def _clamped(self, spec: OpSpec) -> LinearRanges | None:
        """Return the ranges of an operator with outliers."""
        ranges = self._ranges.get((spec.layer, spec.group))
        return ranges if isinstance(ranges, LinearRanges) and ranges.shadow is not None else None

    def _load(self, spec: OpSpec, ranges: LinearRanges) -> tuple[HotWeights, ChannelFile | None]:
        """Return the weights of an operator's hot channels, and the file with all channels."""
        key = spec.layer, spec.group
        if key not in self._held:
            clamped = ranges.of_placement(shadow=True)
            assert clamped is not None
            assert ranges.shadow is not None
            channels = np.array(ranges.shadow.hot, np.int64)
            place = np.full(spec.columns, -1, np.int32)
            place[channels] = np.arange(len(channels))
            file = self._weights.channels(spec.layer, spec.group, self._dtype)
            rows = max(1, len(channels))
            if file is None:
                held = self.gpu.scratch(rows * spec.rows * self._dtype.itemsize)
            else:
                # Some drivers refuse an empty buffer.
                held = self.gpu.upload(file.weights[channels] if len(channels) else file.weights[:1].copy())
            low, high = clamped.grid.limits
            uploaded, expected = self.gpu.upload(place), ranges.shadow.expected
            hot = HotWeights(held, uploaded, spec.member_rows, spec.columns, low, high, expected)
            self._held[key] = hot, file
        return self._held[key]


@dataclass(frozen=True)
class ShadowAround(Around):
    """The steps around an operator with a shadow.

    Args:
        steps: The technique.
        builder: The pass so far.
        op: The operator.
        shadow: Its weights and lists.
    """

    steps: ShadowSteps
    builder: PassBuilder
    op: PlacedOp
    shadow: OutlierShadow
    join: Join = "sum"

    def before(self) -> None:
        """Append the kernels that list the channels with outliers, for the host and later kernels."""
        found, op, builder = self.shadow.found, self.op, self.builder
        finding, listing = find_outliers(
            self.steps.kernels, op.source, found, self.shadow.hot, tokens=self._covered
        )
        name: Operator = "finding of outliers"
        flags = (found.flags,)
        builder.kernel(name, op.layer, finding, reads=(op.source,), writes=flags, ends=False)
        builder.kernel(name, op.layer, listing, reads=flags, writes=(*flags, found.found))

    def beside(self) -> list[Step]:
        """Return the step that writes the products of hot channels to the NPU's rows in the GPU's slot."""
        op, reads = self.op, (self.op.source, self.shadow.found.found)
        return [self.builder.prepared("outliers", op.layer, self._launch(), reads, (op.gpu_output,))]

    def run(self, default: Callable[[], None]) -> None:
        """Append the graph runs, between the reading of cold channels and their product."""
        found, op, builder = self.shadow.found, self.op, self.builder
        fetched = self.shadow.cold_weights
        reads, writes = (op.source, found.found, found.batch, fetched), (op.gpu_output,)
        kernel = builder.prepared("cold outliers", op.layer, self._launch(fetched), reads, writes)
        cold = ColdProduct(self.shadow, kernel, self.steps.gpu)
        builder.on_host(op, "read_ahead", cold.read_ahead, reads=(found.found,))
        default()
        builder.on_host(op, "fetch", cold, reads=(found.found,), writes=writes)

    def acquire(self) -> None:
        """Append the mapping of the list of channels."""
        found = self.shadow.found.found
        self.builder.on_host(self.op, "acquire_to_read", found.acquire_to_read, reads=(found,))

    def release(self) -> None:
        """Append the unmapping of the list of channels."""
        found = self.shadow.found.found
        self.builder.on_host(self.op, "release", found.release, reads=(found,))

    @property
    def _covered(self) -> int:
        """Tokens of the pass that the NPU computes."""
        return min(sum(self.op.placement.npu_lengths), self.builder.tokens)

    def _launch(self, fetched: SharedArray | None = None) -> Launch:
        return multiply_outliers(
            self.steps.kernels,
            self.op.source,
            self.shadow.found,
            self.shadow.hot,
            self.op.gpu_output,
            tokens=self.builder.tokens,
            covered=self._covered,
            npu_rows=self.op.placement.npu_rows,
            fetched=fetched,
        )
