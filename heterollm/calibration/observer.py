"""An observer of the engine that measures the inputs and outputs of every group of linears.

It reads the engine's slots before and after the kernel of a group, with the queue finished, so that a pass
takes a multiple of its usual time. Only passes of several tokens at level ``gpu`` are legible: their kernels
are launched one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heterollm.calibration.records import (
    LOWEST_OCTAVE,
    OCTAVES,
    STEPS_PER_OCTAVE,
    ChannelOutliers,
    LinearCalibration,
)
from heterollm.engine import Call, EngineActivity, Step
from heterollm.kernels.ops import Group, OpSpec, Phase

if TYPE_CHECKING:
    from heterollm.engine import Engine
    from heterollm.kernels.gpu import HostClock

__all__ = ["ActivationObserver", "LinearStatistics", "Reader"]

OUTLIER_FACTOR = 8.0
"""Magnitude of an outlier in root mean squares of the first window."""

Floats = NDArray[np.float32]
Reader = Callable[[OpSpec, Floats, Floats], None]
"""Called with a group, its input ``[m, k]`` and its output ``[m, n]``, which it must not keep."""


class LinearStatistics:
    """Running magnitudes at one group of linears.

    Args:
        spec: The group.
        earlier: The state to continue from.
    """

    def __init__(self, spec: OpSpec, earlier: LinearCalibration | None = None) -> None:
        self._spec = spec
        self._inputs = 0.0
        self._outputs = [0.0] * len(spec.members)
        self._relative = [0.0] * len(spec.members)
        self._histogram = np.zeros(OCTAVES * STEPS_PER_OCTAVE, np.int64)
        self._threshold = 0.0
        self._counts = np.zeros(spec.columns, np.int64)
        self._maxima = np.zeros(spec.columns, np.float32)
        if earlier is not None:
            self._inputs, self._outputs = earlier.inputs, list(earlier.outputs)
            self._relative = list(earlier.relative_outputs)
            self._histogram += np.array(earlier.histogram, np.int64)
            self._threshold = earlier.threshold
            for one in earlier.outliers:
                self._counts[one.channel], self._maxima[one.channel] = one.count, one.maximum

    def add(self, x: Floats, y: Floats) -> None:
        """Add an input ``[m, k]`` and its output ``[m, n]``."""
        sizes = np.abs(x)
        tokens = sizes.max(axis=1)
        self._inputs = max(self._inputs, float(tokens.max()))
        first = 0
        for place, member in enumerate(self._spec.members):
            part = np.abs(y[:, first : first + member.rows]).max(axis=1)
            self._outputs[place] = max(self._outputs[place], float(part.max()))
            relative = np.divide(part, tokens, out=np.zeros_like(part), where=tokens > 0)
            self._relative[place] = max(self._relative[place], float(relative.max()))
            first += member.rows
        if not self._threshold:
            self._threshold = OUTLIER_FACTOR * float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
        self._counts += (sizes > self._threshold).sum(axis=0)
        np.maximum(self._maxima, sizes.max(axis=0), out=self._maxima)
        with np.errstate(divide="ignore"):
            places = np.floor((np.log2(sizes) - LOWEST_OCTAVE) * STEPS_PER_OCTAVE)
        places = np.clip(places, 0, self._histogram.size - 1).astype(np.int64)
        self._histogram += np.bincount(places.ravel(), minlength=self._histogram.size)

    def record(self) -> LinearCalibration:
        """Return the magnitudes so far."""
        channels = np.flatnonzero(self._counts)
        return LinearCalibration(
            layer=self._spec.layer,
            group=self._spec.group,
            inputs=self._inputs,
            outputs=tuple(self._outputs),
            relative_outputs=tuple(self._relative),
            histogram=tuple(self._histogram.tolist()),
            threshold=self._threshold,
            outliers=tuple(
                ChannelOutliers(int(c), int(self._counts[c]), float(self._maxima[c])) for c in channels
            ),
        )


class ActivationObserver:
    """Gives the inputs and outputs of groups of linears to a reader.

    Args:
        specs: The groups to read, by layer and group.
        dtype: Element type of the activations.

    Attributes:
        reader: The reader; None reads nothing.
    """

    def __init__(self, specs: Mapping[tuple[int, Group], OpSpec], dtype: np.dtype[Any]) -> None:
        self.reader: Reader | None = None
        self._specs = specs
        self._dtype = dtype
        self._engine: Engine | None = None

    def follow(self, engine: Engine) -> None:
        """Take the engine whose slots to read."""
        self._engine = engine

    # -- as the engine's observer --------------------------------------------------------------------

    def during_pass(self, phase: Phase, tokens: int, position: int) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return an empty context."""
        return contextlib.nullcontext()

    def during(self, activity: EngineActivity) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return an empty context."""
        return contextlib.nullcontext()

    def watch(self, clock: HostClock) -> HostClock:
        """Return the clock as it is."""
        return clock

    def call_of(self, step: Step) -> Call:
        """Return a call that runs a step and reads its slots, for a group of linears."""
        spec = None if step.layer is None else self._specs.get((step.layer, step.operator))  # type: ignore[arg-type]
        if spec is None or step.action != "kernel" or step.work is None or step.tokens < 2:
            return step.run
        source, target = step.reads[0].name, step.writes[0].name

        def call() -> None:
            if self.reader is None:
                step.run()
                return
            x = self._read(source, step.tokens, spec.columns)
            step.run()
            self.reader(spec, x, self._read(target, step.tokens, spec.rows))

        return call

    def _read(self, name: str, tokens: int, columns: int) -> Floats:
        """Return a copy of a slot's activations."""
        assert self._engine is not None
        self._engine.device.gpu.finish()
        if name in self._engine.private:
            copied = np.empty((tokens, columns), self._dtype)
            self._engine.device.gpu.copy(copied, self._engine.private[name].buffer)
            return copied.astype(np.float32)
        slot = self._engine.pool[name]
        slot.acquire_to_read()
        values = slot.view(self._dtype, (tokens, columns)).astype(np.float32)
        slot.release()
        return values
