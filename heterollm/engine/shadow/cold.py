"""Shadow outliers: the float weights of channels with outliers, in memory or read when they occur.

The NPU computes with inputs that are clamped at a threshold. At the same time the GPU multiplies the rest of
them, in the few channels that have such outliers, by float weights; the output is the sum (llm.npu,
equation 1). Weights of hot channels stay in memory. Others are rows of a mapped file. The host knows the
channels before the NPU's graph runs, and asks the system to read their rows meanwhile; behind the graph it
copies them and enqueues their product. So reading overlaps the graph without a thread of the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from heterollm.engine.shadow.slots import COLD_CHANNELS
from heterollm.engine.step import Call, Step
from heterollm.kernels.gpu import GpuRuntime, SharedArray
from heterollm.kernels.operators import HotWeights, OutlierList
from heterollm.model import ChannelFile


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
