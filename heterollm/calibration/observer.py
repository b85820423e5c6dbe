"""An observer of the engine that measures the inputs and outputs of every group of linears.

It reads the engine's slots before and after the kernel of a group, with the queue finished, so that a pass
takes a multiple of its usual time. Only passes of several tokens at level ``gpu`` are legible: their kernels
are launched one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heterollm.calibration.head_statistics import HeadStatistics
from heterollm.calibration.int8_check import Int8Statistics
from heterollm.calibration.int8_records import ChannelOutliers
from heterollm.calibration.range_records import LOWEST_OCTAVE, OCTAVES, STEPS_PER_OCTAVE, LinearCalibration
from heterollm.calibration.routing import RoutingStatistics
from heterollm.engine import Call, EngineActivity, Step
from heterollm.kernels.ops import Group, OpSpec, Phase

if TYPE_CHECKING:
    from heterollm.engine import Engine, SessionState
    from heterollm.kernels.gpu import HostClock

OUTLIER_FACTOR = 8.0
"""Magnitude of an outlier in root mean squares of the first window."""

Floats = NDArray[np.float32]
Reader = Callable[[OpSpec, Floats, Floats], Floats | None]
"""Called with a group, its input ``[m, k]`` and its output ``[m, n]``, which it must not keep; an output that
it returns replaces the group's."""


StreamReader = Callable[[OpSpec, Floats, Floats, Floats], None]

FLOAT32 = np.dtype(np.float32)


class LinearStatistics:
    """Running magnitudes at one group of linears.

    Args:
        spec: The group.
        earlier: The state to continue from.
        int8: Whether to measure what 8-bit activations need.
    """

    def __init__(self, spec: OpSpec, earlier: LinearCalibration | None = None, *, int8: bool = False) -> None:
        self._spec = spec
        state = None if earlier is None else earlier.int8
        self._int8 = Int8Statistics(spec.members, spec.columns, state) if int8 else None
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

    def add(self, x: Floats, y: Floats, weight: Callable[[], Floats]) -> None:
        """Add an input ``[m, k]``, its output ``[m, n]``, and the weight ``[n, k]`` if 8 bits need it."""
        if self._int8 is not None:
            self._int8.add(x, y, weight())
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
            int8=None if self._int8 is None else self._int8.record(),
        )


class ActivationObserver:
    """Gives the inputs and outputs of groups of linears to a reader.

    Args:
        specs: The groups to read, by layer and group.
        dtype: Element type of the activations.

    Attributes:
        reader: The reader; None reads nothing.
        streams: Called with ``o`` of each layer, the input and output of that, and the residual stream
            ``[m, h]`` before; None reads none.
        only: Groups that the reader gets; None for all.
        heads: Statistics that get the queries; None reads none.
        routing: Statistics that get the experts of each token; None reads none.
    """

    def __init__(self, specs: Mapping[tuple[int, Group], OpSpec], dtype: np.dtype[Any]) -> None:
        self.reader: Reader | None = None
        self.streams: StreamReader | None = None
        self.only: Collection[tuple[int, Group]] | None = None
        self.heads: HeadStatistics | None = None
        self.routing: RoutingStatistics | None = None
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
        """Return a call that runs a step and reads its slots, for RoPE, routing and groups of linears."""
        if step.action != "kernel" or step.tokens < 2 or step.layer is None:
            return step.run
        if step.operator == "rope":
            return self._call_of_rope(step, step.layer)
        if step.operator == "routing":
            return self._call_of_routing(step, step.layer)
        spec = self._specs.get((step.layer, step.operator))
        if spec is None or step.work is None:
            return step.run
        source, target = step.reads[0].name, step.writes[0].name

        def call() -> None:
            if self.reader is None or (self.only is not None and (spec.layer, spec.group) not in self.only):
                step.run()
                return
            x = self._read(source, step.tokens, spec.columns, self._dtype)
            reads_stream = self.streams is not None and spec.group == "o"
            stream = self._read("residual", step.tokens, spec.rows, FLOAT32) if reads_stream else None
            step.run()
            y = self._read(target, step.tokens, spec.rows, self._dtype)
            made = self.reader(spec, x, y)
            if self.streams is not None and stream is not None:
                self.streams(spec, x, y, stream)
            if made is not None:
                self._write(target, made)

        return call

    def keys(self, cache: SessionState, tokens: int) -> Floats:
        """Return the keys of a session's first tokens, ``[layers, kv_heads, tokens * head_dim]``.

        The layers are those with attention. Passes are as long as the context, so that windows leave no page.
        """
        assert self._engine is not None
        self._engine.device.gpu.finish()
        keys = cache.keys().view(self._engine.device.cache_dtype)[:, :, :tokens]
        return keys.reshape(*keys.shape[:2], -1).astype(np.float32)

    def _call_of_rope(self, step: Step, layer: int) -> Call:
        target = step.writes[0].name

        def call() -> None:
            step.run()
            if self.heads is not None:
                columns, dtype = self.heads.query_columns, np.dtype(np.float32)
                self.heads.add_queries(layer, self._read(target, step.tokens, columns, dtype))

        return call

    def _call_of_routing(self, step: Step, layer: int) -> Call:
        target = step.writes[0].name

        def call() -> None:
            step.run()
            if self.routing is not None:
                columns = self.routing.chosen(layer)
                self.routing.add(layer, self._read(target, step.tokens, columns, np.dtype(np.int32)))

        return call

    def _read(self, name: str, tokens: int, columns: int, dtype: np.dtype[Any]) -> Floats:
        """Return a copy of a slot's values."""
        assert self._engine is not None
        self._engine.device.gpu.finish()
        if name in self._engine.private:
            copied = np.empty((tokens, columns), dtype)
            self._engine.device.gpu.copy(copied, self._engine.private[name].buffer)
            return copied.astype(np.float32)
        slot = self._engine.pool[name]
        slot.acquire_to_read()
        values = slot.view(dtype, (tokens, columns)).astype(np.float32)
        slot.release()
        return values

    def _write(self, name: str, values: Floats) -> None:
        """Replace a slot's values."""
        assert self._engine is not None
        given = np.ascontiguousarray(values, self._dtype)
        if name in self._engine.private:
            self._engine.device.gpu.copy(self._engine.private[name].buffer, given)
            return
        slot = self._engine.pool[name]
        slot.acquire()
        slot.view(self._dtype, given.shape)[...] = given
        slot.release()
