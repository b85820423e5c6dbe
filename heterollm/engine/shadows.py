"""Shadow outliers: the float weights of channels with outliers, in memory or read when they occur.

The NPU computes with inputs that are clamped at a threshold. At the same time the GPU multiplies the rest of
them, in the few channels that have such outliers, by float weights; the output is the sum (llm.npu,
equation 1). Weights of hot channels stay in memory. Others are rows of a mapped file. The host knows the
channels before the NPU's graph runs, and asks the system to read their rows meanwhile; behind the graph it
copies them and enqueues their product. So reading overlaps the graph without a thread of the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from heterollm.engine.lanes import Lane
from heterollm.engine.slots import COLD_CHANNELS, COLD_WEIGHTS, OUTLIER_BATCH, OUTLIER_FLAGS, OUTLIERS
from heterollm.engine.step import Call, Step
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels, GpuRuntime, SharedArray
from heterollm.kernels.npu import LinearRanges, StaticRanges
from heterollm.kernels.operators import HotWeights, OutlierList
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ChannelFile, ModelWeights
from heterollm.solver import Placement, Plan


@dataclass(frozen=True, slots=True)
class OutlierShadow:
    """The weights and lists of the shadow of one operator in one lane.

    Args:
        hot: Weights of hot channels.
        found: The channels with outliers.
        cold_weights: Slot for the weights of others.
        file: Source of those; None on a device that computes nothing.
        count: Counts them.
    """

    hot: HotWeights
    found: OutlierList
    cold_weights: SharedArray
    file: ChannelFile | None
    count: ColdCount


class ColdCount:
    """The number of channels that were read from disk, for notes.

    Attributes:
        channels: The number.
    """

    __slots__ = ("channels",)

    def __init__(self) -> None:
        self.channels = 0


class ColdProduct:
    """The product of outliers in channels whose weights are not in memory: calls for the host.

    Args:
        shadow: The operator's shadow.
        kernel: The step that adds the products of a batch of channels.
        runtime: The GPU.
    """

    __slots__ = ("_batch", "_counts", "_kernel", "_launch", "_rows", "_runtime", "_shadow")

    def __init__(self, shadow: OutlierShadow, kernel: Step, runtime: GpuRuntime) -> None:
        self._shadow = shadow
        self._kernel = kernel
        self._launch = kernel.run
        self._runtime = runtime
        # A device that computes nothing has no file, and reads no rows.
        if shadow.file is not None:
            self._rows = shadow.cold_weights.view(shadow.file.weights.dtype, (COLD_CHANNELS, shadow.hot.rows))
        self._batch = shadow.found.batch.view(np.int32, (2,))
        self._counts = shadow.found.counts()

    def observed(self, call_of: Callable[[Step], Call]) -> ColdProduct:
        """Return the same calls with the call of the kernel that ``call_of`` returns for its step."""
        kernel = replace(self._kernel, run=call_of(self._kernel))
        return ColdProduct(self._shadow, kernel, self._runtime)

    def read_ahead(self) -> None:
        """Ask the system to read the weights of the first batch; the list of outliers must be complete."""
        file = self._shadow.file
        if file is not None and self._counts[1]:
            for channel in self._shadow.found.cold[:COLD_CHANNELS]:
                file.read_ahead(int(channel))

    def __call__(self) -> None:
        """Add the products of all such channels."""
        shadow = self._shadow
        if shadow.file is None or not self._counts[1]:
            return
        cold, weights = shadow.found.cold, shadow.file.weights
        shadow.count.channels += len(cold)
        for first in range(0, len(cold), COLD_CHANNELS):
            if first:
                # The product of the batch before still reads the slots.
                self._runtime.finish()
            batch = cold[first : first + COLD_CHANNELS]
            shadow.cold_weights.acquire()
            for place, channel in enumerate(batch):
                self._rows[place] = weights[channel]
            shadow.cold_weights.release()
            shadow.found.batch.acquire()
            self._batch[0], self._batch[1] = first, len(batch)
            shadow.found.batch.release()
            self._launch()


class Shadows:
    """The weights of hot channels of all operators with a shadow, uploaded once each.

    Args:
        device: The device.
        weights: The model's weights.
        ranges: Calibrated ranges by layer and group.

    Attributes:
        kernels: Launches of shadow outliers.
        count: Channels that were read from disk.
    """

    def __init__(
        self, device: Device, weights: ModelWeights, ranges: Mapping[tuple[int, Group], StaticRanges]
    ) -> None:
        self.kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self.count = ColdCount()
        self._gpu = device.gpu
        self._dtype = device.activation_dtype
        self._weights = weights
        self._ranges = ranges
        self._held: dict[tuple[int, Group], tuple[HotWeights, ChannelFile | None]] = {}

    def of(self, lane: Lane, spec: OpSpec, placement: Placement) -> OutlierShadow | None:
        """Return the shadow of an operator in a lane; None without one."""
        ranges = self._ranges.get((spec.layer, spec.group))
        shadowed = placement.shadow and placement.npu_lengths
        if not shadowed or not isinstance(ranges, LinearRanges) or ranges.shadow is None:
            return None
        hot, file = self._load(spec, ranges)
        private, shared = lane.private, lane.shared
        found = OutlierList(private[OUTLIER_FLAGS], shared[OUTLIERS], shared[OUTLIER_BATCH])
        return OutlierShadow(hot, found, shared[COLD_WEIGHTS], file, self.count)

    def load(self, plan: Plan) -> None:
        """Upload the float weights of a plan's hot channels, so that no pass is delayed by reading them."""
        for entry in plan.placed:
            for spec in self._weights.specs if entry.placement.shadow else ():
                ranges = self._ranges.get((spec.layer, spec.group))
                used = spec.group == entry.group and entry.layers[0] <= spec.layer <= entry.layers[1]
                if used and isinstance(ranges, LinearRanges) and ranges.shadow is not None:
                    self._load(spec, ranges)

    def clear(self) -> None:
        """Drop the weights and close the files."""
        for _, file in self._held.values():
            if file is not None:
                file.close()
        self._held.clear()

    def notes(self) -> tuple[str, ...]:
        """Return a sentence on the channels that were read from disk; none if there were none."""
        if not self.count.channels:
            return ()
        return (f"The weights of {self.count.channels} rarer channels with outliers were read from disk.",)

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
                held = self._gpu.scratch(rows * spec.rows * self._dtype.itemsize)
            else:
                # Some drivers refuse an empty buffer.
                held = self._gpu.upload(file.weights[channels] if len(channels) else file.weights[:1].copy())
            low, high = clamped.grid.limits
            uploaded, expected = self._gpu.upload(place), ranges.shadow.expected
            hot = HotWeights(held, uploaded, spec.member_rows, spec.columns, low, high, expected)
            self._held[key] = hot, file
        return self._held[key]
