"""Traces an engine: records its passes and their steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from heterollm.base import DeviceError, OptionError
from heterollm.engine import Action, Call, ColdProduct, EngineActivity, Step, step_category
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuRuntime, HostClock
from heterollm.kernels.ops import Phase
from heterollm.profiler.measure import DeviceClock
from heterollm.trace.recorder import BIND, BUILD, STEP, PassRecorder, Recorder, SpanRecorder, SpanTemplate
from heterollm.trace.spans import EngineCategory, ProcessorCategory, Trace

if TYPE_CHECKING:
    from heterollm.engine import Engine

CLOCK_TRIES: Final = 3
"""A busy machine may delay the host between the readings of the two clocks."""

HOST: Final[Mapping[Action, EngineCategory]] = {"wait": "wait", "finish": "wait", "read_weights": "wait"}
"""Categories of the host's steps; the default is ``hand-over``."""

BLOCKING: Final = ("finish", "event")
"""Strategies that wait in the driver and never poll."""


class Tracer:
    """An observer that records one engine.

    Args:
        device: The engine's device; its queue is idle and stamps events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._recorder = Recorder(now_ns=device.gpu.now_ns)
        self._clocks = _ClockPair(device.gpu)
        self._pass = PassRecorder(self._recorder)
        templates: Mapping[EngineActivity, SpanTemplate] = {"bind": BIND, "step": STEP, "build": BUILD}
        self._activities = {name: SpanRecorder(self._recorder, span) for name, span in templates.items()}

    # -- as the engine's observer --------------------------------------------------------------------

    def during_pass(self, phase: Phase, tokens: int, position: int) -> AbstractContextManager[object]:
        """Return the recorder of the pass that begins."""
        self._pass.announce(phase, tokens, position)
        return self._pass

    def during(self, activity: EngineActivity) -> AbstractContextManager[object]:
        """Return the recorder of an activity."""
        return self._activities[activity]

    def watch(self, clock: HostClock) -> HostClock:
        """Return a clock that records its sleeps."""
        return self._recorder.host_clock(clock)

    def call_of(self, step: Step) -> Call:
        """Return a call that runs and records a step, and the kernel that a step of the host may enqueue."""
        if isinstance(step.run, ColdProduct):
            step = replace(step, run=step.run.observed(self.call_of))
        if step.action == "kernel":
            return self._kernel(step)
        if step.action == "graph":
            category = _category(step)
            span = SpanTemplate("engine", "graph", step.operator, step.layer, step.work, npu=category)
        elif step.wait is not None:
            place = "end of pass" if step.operator == "end of pass" else f"before {step.operator}"
            polls = step.wait.strategy not in BLOCKING
            span = SpanTemplate("engine", "wait", place, step.layer, polls=polls)
        else:
            span = SpanTemplate("engine", HOST.get(step.action, "hand-over"), step.action, step.layer)
        return self._recorder.timed(step.run, span)

    # -- reading -------------------------------------------------------------------------------------

    def take(self, engine: Engine) -> Trace:
        """Return the engine's trace since the last call, and forget it."""
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

    # -- helpers -------------------------------------------------------------------------------------

    def _kernel(self, step: Step) -> Call:
        parts = step.merged or (step,)
        operator: str = step.operator
        if step.merged:
            first, last = step.merged[0], step.merged[-1]
            operator = f"{first.name} to {last.name}"
            if step.layer is not None:
                operator = f"{first.operator} to {last.operator}"
        categories = {_category(part) for part in parts}
        # A merged signal does not determine the launch's category.
        categories = categories - {"signal"} or categories
        category: ProcessorCategory = categories.pop() if len(categories) == 1 else "merged"
        names = tuple(part.name for part in step.merged)
        kernel = SpanTemplate("gpu", category, operator, step.layer, step.work, names)
        return self._recorder.launch(step.run, SpanTemplate("engine", "launch", operator, step.layer), kernel)


def _category(step: Step) -> ProcessorCategory:
    return "signal" if step.operator == "flag" else step_category(step.operator) or "other"


def take_trace(engine: Engine) -> Trace:
    """Return an engine's trace since the last call; called on the engine thread.

    Raises:
        OptionError: The engine has no tracer.
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
        return _Reading(runtime.now_ns(), 0, 0.0)  # host and device share one clock
    for left in reversed(range(CLOCK_TRIES)):
        try:
            clock = DeviceClock(runtime)
        except DeviceError:
            if not left:
                raise
        else:
            return _Reading(runtime.now_ns(), clock.offset_ns, clock.uncertainty_us)
    raise AssertionError("unreachable")


class _ClockPair:
    """Converts the GPU's clock to the host's; both are read at load and when a trace is taken.

    Between the readings the offset changes linearly, if it changed by more than the readings' uncertainty.

    Raises:
        DeviceError: The timestamps contradict the host's clock.
    """

    def __init__(self, runtime: GpuRuntime) -> None:
        self._runtime = runtime
        self._first = self._last = _read(runtime)

    @property
    def uncertainty_us(self) -> float:
        """Largest shift of a kernel against the host."""
        return max(self._first.uncertainty_us, self._last.uncertainty_us)

    def read_again(self) -> None:
        """Read the clocks again; the previous reading stays if they contradict each other."""
        try:
            self._last = _read(self._runtime)
        except DeviceError:
            return

    def host_ns(self, device_ns: int) -> int:
        """Convert a moment of the GPU's clock to the host's."""
        first, last = self._first, self._last
        drift_ns = last.offset_ns - first.offset_ns
        length_ns = last.taken_ns - first.taken_ns
        if abs(drift_ns) <= 2e3 * self.uncertainty_us or length_ns <= 0:
            return device_ns - min(first, last, key=lambda reading: reading.uncertainty_us).offset_ns
        share = (device_ns - first.offset_ns - first.taken_ns) / length_ns
        return device_ns - first.offset_ns - round(drift_ns * share)
