"""An engine whose passes are recorded; made in place of the plain one when a model is loaded to be traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from heterollm.base import DeviceError
from heterollm.engine import Call, Compiler, Engine, KvCache
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuRuntime
from heterollm.kernels.npu import NpuBackend
from heterollm.kernels.ops import Phase
from heterollm.model import ModelWeights
from heterollm.profiler.measure import DeviceClock
from heterollm.solver import Plan
from heterollm.trace.calls import CallTracer, TracedNpu
from heterollm.trace.recorder import BIND, BUILD, STEP, Recorder
from heterollm.trace.spans import Trace

if TYPE_CHECKING:
    from heterollm.engine import CompiledPass

__all__ = ["TracedEngine"]

CLOCK_TRIES: Final = 3
"""On a busy machine the two clocks may be read at odds once."""


class TracedEngine(Engine):
    """See :class:`heterollm.engine.Engine`; the device's queue must stamp its events."""

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        *arguments: Any,  # noqa: ANN401 - those of the engine
        **options: Any,  # noqa: ANN401
    ) -> None:
        self._recorder = Recorder(now_ns=device.gpu.now_ns)
        if device.npu is not None:
            device.npu = cast("NpuBackend", TracedNpu(device.npu))
        super().__init__(device, weights, plan, *arguments, **options)
        self.hand_overs.watch(self._recorder.host_clock)
        tracer = CallTracer(self._recorder, weights.specs)
        self._compiler = cast("Compiler", _TracedCompiler(self._compiler, self._recorder, tracer))
        self._clocks = _Clocks(device.gpu)
        self._numbers = {site: self._recorder.number_of(site) for site in (BIND, STEP)}

    def take_trace(self) -> Trace:
        """Return what was recorded since the last time, and forget it."""
        if not self._lost:
            self._clocks.read_again()
        passes, spans, notes = self._recorder.take(self._clocks.host_ns)
        return Trace(
            self.device.name,
            self.device.time_kind,
            self.plan.level,
            self.plan.precision,
            passes,
            spans,
            self._clocks.uncertainty_us,
            (*notes, *self.notes),
        )

    # -- pieces --------------------------------------------------------------------------------------

    def _chunk(
        self,
        cache: KvCache,
        position: int,
        tokens: NDArray[np.int32],
        phase: Phase,
        target: NDArray[np.float32] | None,
        last: bool,
    ) -> None:
        self._recorder.begin_pass(phase, len(tokens), position)
        failed = True
        try:
            super()._chunk(cache, position, tokens, phase, target, last)
            failed = False
        finally:
            self._recorder.end_pass(failed=failed)

    def _one_token(self, cache: KvCache, position: int, token: int) -> None:
        self._recorder.begin_pass("decode", 1, position)
        failed = True
        try:
            super()._one_token(cache, position, token)
            failed = False
        finally:
            self._recorder.end_pass(failed=failed)

    def _pass(self, phase: Phase, length: int, position: int, cache: KvCache) -> CompiledPass:
        begin_ns = self._recorder.now_ns()
        compiled = super()._pass(phase, length, position, cache)
        self._recorder.add(self._numbers[BIND], begin_ns, self._recorder.now_ns())
        return compiled

    def _write_step(self, position: int, length: int, head_row: int) -> None:
        begin_ns = self._recorder.now_ns()
        super()._write_step(position, length, head_row)
        self._recorder.add(self._numbers[STEP], begin_ns, self._recorder.now_ns())


class _TracedCompiler:
    """A compiler whose lists are recorded, and how long making them took; the rest is the compiler's."""

    def __init__(self, compiler: Compiler, recorder: Recorder, tracer: CallTracer) -> None:
        self._compiler = compiler
        self._tracer = tracer
        build = recorder.number_of(BUILD)
        self.compile_pass = recorder.timed(self._compile_pass, build)
        self.compile_head = recorder.timed(self._compile_head, build)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the compiler's own
        return getattr(self._compiler, name)

    def _compile_pass(self, phase: Phase, tokens: int, *others: Any, **options: Any) -> CompiledPass:  # noqa: ANN401
        compiled = self._compiler.compile_pass(phase, tokens, *others, **options)
        compiled.calls = self._tracer.traced(compiled.calls, tokens)
        return compiled

    def _compile_head(self, phase: Phase, rows: int, *others: Any, **options: Any) -> list[Call]:  # noqa: ANN401
        return self._tracer.traced(self._compiler.compile_head(phase, rows, *others, **options), rows)


class _Reading(NamedTuple):
    taken_ns: int
    offset_ns: int
    uncertainty_us: float


def _read(runtime: GpuRuntime) -> _Reading:
    if runtime.stamps_host_time:
        return _Reading(runtime.now_ns(), 0, 0.0)
    for left in reversed(range(CLOCK_TRIES)):
        try:
            clock = DeviceClock(runtime)
        except DeviceError:
            if not left:
                raise
        else:
            return _Reading(runtime.now_ns(), clock.offset_ns, clock.uncertainty_us)
    raise AssertionError("unreachable")


class _Clocks:
    """Relates the GPU's clock to the host's, read when a model is loaded and when a trace is taken.

    Between the two readings the offset is taken to change evenly, where it changed by more than the readings
    may be wrong.

    Args:
        runtime: Its queue stamps events, and is idle.

    Raises:
        DeviceError: The timestamps contradict the host's clock.
    """

    def __init__(self, runtime: GpuRuntime) -> None:
        self._runtime = runtime
        self._first = self._last = _read(runtime)

    @property
    def uncertainty_us(self) -> float:
        """By how much a kernel may be shifted against the host."""
        return max(self._first.uncertainty_us, self._last.uncertainty_us)

    def read_again(self) -> None:
        """Read the clocks once more; the last reading stays where they contradict each other."""
        try:
            self._last = _read(self._runtime)
        except DeviceError:
            return

    def host_ns(self, device_ns: int) -> int:
        """Return a moment of the GPU's clock on the host's."""
        first, last = self._first, self._last
        drift_ns = last.offset_ns - first.offset_ns
        length_ns = last.taken_ns - first.taken_ns
        if abs(drift_ns) <= 2e3 * self.uncertainty_us or length_ns <= 0:
            return device_ns - min(first, last, key=lambda reading: reading.uncertainty_us).offset_ns
        share = (device_ns - first.offset_ns - first.taken_ns) / length_ns
        return device_ns - first.offset_ns - round(drift_ns * share)
