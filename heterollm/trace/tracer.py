"""Traces an engine: records its passes, and every step of them as what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple

from heterollm.base import DeviceError, OptionError
from heterollm.engine import Action, Call, Operator, Section, Step
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuRuntime, HostClock
from heterollm.kernels.ops import Phase
from heterollm.profiler.measure import DeviceClock
from heterollm.trace.recorder import BIND, BUILD, STEP, PassTime, Recorder, SectionTime, Site
from heterollm.trace.spans import EngineCategory, PartCategory, Trace

if TYPE_CHECKING:
    from heterollm.engine import Engine

__all__ = ["Tracer", "take_trace"]

CLOCK_TRIES: Final = 3
"""On a busy machine the two clocks may be read at odds once."""

KERNELS: Final[Mapping[Operator, PartCategory]] = {
    "embedding": "embedding",
    "norm": "norm",
    "qkv": "linear",
    "rope": "attention",
    "attention": "attention",
    "attention join": "attention",
    "o": "linear",
    "gate_up": "linear",
    "activation": "activation",
    "down": "linear",
    "ffn": "linear",
    "final norm": "norm",
    "head": "linear",
    "join": "join",
    "flag": "signal",
}
"""Categories of kernels; those of all others are ``other``."""

HOST: Final[Mapping[Action, EngineCategory]] = {"wait": "wait", "finish": "wait"}
"""Categories of the host's steps; all others are ``hand-over``."""

BLOCKING: Final = ("finish", "event")
"""Strategies whose waits are the driver's, and poll nothing."""


class Tracer:
    """Observes one engine, and keeps what it did until it is taken.

    Args:
        device: The engine's device; its queue stamps events and is idle.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._recorder = Recorder(now_ns=device.gpu.now_ns)
        self._clocks = _Clocks(device.gpu)
        self._pass = PassTime(self._recorder)
        sites: Mapping[Section, Site] = {"bind": BIND, "step": STEP, "build": BUILD}
        self._sections = {name: SectionTime(self._recorder, site) for name, site in sites.items()}

    # -- as the engine's observer --------------------------------------------------------------------

    def during_pass(self, phase: Phase, tokens: int, position: int) -> AbstractContextManager[object]:
        """Begin a pass; see :class:`heterollm.engine.observer.Observer`."""
        self._pass.announce(phase, tokens, position)
        return self._pass

    def during(self, section: Section) -> AbstractContextManager[object]:
        """Return what records a section."""
        return self._sections[section]

    def watch(self, clock: HostClock) -> HostClock:
        """Return a clock whose sleeps are recorded."""
        return self._recorder.host_clock(clock)

    def call_of(self, step: Step) -> Call:
        """Return a call that runs a step and records it."""
        if step.action == "kernel":
            return self._kernel(step)
        if step.action == "graph":
            site = Site("engine", "graph", step.operator, step.layer, step.work)
        elif step.wait is not None:
            place = "end of pass" if step.operator == "end of pass" else f"before {step.operator}"
            site = Site("engine", "wait", place, step.layer, polls=step.wait.strategy not in BLOCKING)
        else:
            site = Site("engine", HOST.get(step.action, "hand-over"), step.action, step.layer)
        return self._recorder.timed(step.run, self._recorder.number_of(site))

    # -- what was recorded ---------------------------------------------------------------------------

    def take(self, engine: Engine) -> Trace:
        """Return what was recorded of the engine since the last time, and forget it."""
        if not engine.is_lost:
            self._clocks.read_again()
        passes, spans, notes = self._recorder.take(self._clocks.host_ns)
        return Trace(
            device=self._device.name,
            time_kind=self._device.time_kind,
            plan=engine.plan.level,
            precision=engine.plan.precision,
            passes=passes,
            spans=spans,
            clock_uncertainty_us=self._clocks.uncertainty_us,
            notes=(*notes, *engine.notes),
        )

    # -- pieces --------------------------------------------------------------------------------------

    def _kernel(self, step: Step) -> Call:
        parts = step.merged or (step,)
        operator: str = step.operator
        if step.merged:
            first, last = step.merged[0], step.merged[-1]
            operator = f"{first.name} to {last.name}"
            if step.layer is not None:
                operator = f"{first.operator} to {last.operator}"
        categories = {KERNELS.get(part.operator, "other") for part in parts}
        # The signal rides with other kernels, and says nothing of what the launch is.
        told = categories - {"signal"} or categories
        category: PartCategory = told.pop() if len(told) == 1 else "merged"
        names = tuple(part.name for part in step.merged)
        kernel = Site("gpu", category, operator, step.layer, step.work, names)
        launch = Site("engine", "launch", operator, step.layer)
        number_of = self._recorder.number_of
        return self._recorder.launch(step.run, number_of(launch), number_of(kernel))


def take_trace(engine: Engine) -> Trace:
    """Return what was recorded of an engine since the last time, on its thread.

    Raises:
        OptionError: Nothing is recorded.
    """
    if not isinstance(engine.observer, Tracer):
        raise OptionError("The model was not loaded to be traced.", fix="Load it with trace=True.")
    return engine.observer.take(engine)


class _Reading(NamedTuple):
    taken_ns: int
    offset_ns: int
    uncertainty_us: float


def _read(runtime: GpuRuntime) -> _Reading:
    if runtime.stamps_host_time:
        # All of its parts run on one clock.
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
