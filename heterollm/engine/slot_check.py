"""Debug mode that proves the order of buffer accesses in each compiled pass, and inserts random delays.

``HETEROLLM_CHECK_SLOTS=1`` (or another whole number, the seed of the delays) enables it for models that are
loaded afterwards.
"""

# The check simulates the steps of a pass: the order of the queue, the host's knowledge of finished kernels
# after each wait, and the buffers of every kernel and graph. It refuses a pass in which
#   - a step's buffers differ from the arguments of its kernel,
#   - the NPU reads a buffer that a kernel may not have written yet,
#   - the NPU writes a buffer that a kernel may still read or write, or
#   - a step reads a buffer that no step has written.
# Kernels of random duration before the kernels of the pass then expose errors that this proof does not cover.

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from heterollm.base import EngineError, OptionError
from heterollm.engine.slots import LAYER_ROWS
from heterollm.engine.step import OWN_OPERATORS, Buffer, Operator, Step
from heterollm.kernels.gpu import DeviceMemory, GpuRuntime, Launch
from heterollm.kernels.operators import StepCategory, operator_steps
from heterollm.kernels.sync import LateWriter
from heterollm.model import LAYER_GROUPS

CHECK_VARIABLE: Final = "HETEROLLM_CHECK_SLOTS"
DELAYED_FRACTION: Final = 0.25
"""Fraction of the kernels that a delay precedes."""
LONGEST_DELAY_US: Final = 400.0
LENGTHS: Final = 16
"""Number of different delays, each of which is a prepared launch."""
ALWAYS_WRITTEN: Final = ("tokens", "step", LAYER_ROWS, "kv_cache", "recurrent")
"""Buffers that the host or an earlier pass has written before a pass begins."""


def step_category(operator: Operator) -> StepCategory | None:
    """Return the category in traces of an operator that computes; None for others."""
    return "linear" if operator in LAYER_GROUPS else operator_steps().get(operator)


@dataclass(frozen=True, slots=True)
class _Access:
    """A kernel's access to a buffer, with the kernel's number in the queue."""

    number: int
    step: Step
    buffer: Buffer
    writes: bool


@dataclass
class _Course:
    """The progress of a simulated pass, in the queue and in the host's knowledge of it."""

    where: str
    enqueued: int = 0
    known: int = 0
    flagged: int = 0
    marks: dict[tuple[int, str], int] = field(default_factory=dict)
    accesses: list[_Access] = field(default_factory=list)
    written: list[Buffer] = field(default_factory=list)

    def fail(self, step: Step, what: str, buffer: Buffer) -> None:
        raise EngineError(
            f"{self.where}: {step.processor} step {step.label!r} {what} {buffer.name}.",
            fix="This is an error in heterollm: please report it.",
        )

    def need_written(self, step: Step) -> None:
        for buffer in step.reads:
            if buffer.name.partition(".")[0] in ALWAYS_WRITTEN:
                continue
            if not any(_meet(buffer, written) for written in self.written):
                self.fail(step, "reads what nothing has written in", buffer)


class SlotCheck:
    """Checks the passes of a model; ``seed`` determines the delays."""

    def __init__(self, runtime: GpuRuntime, seed: int) -> None:
        self._runtime = runtime
        self._random = random.Random(seed)  # noqa: S311 - delays, not secrets
        writer = LateWriter(runtime)
        step_us = LONGEST_DELAY_US / LENGTHS
        self._delays = [_delay(writer.launch(step_us * (place + 1))) for place in range(LENGTHS)]

    @classmethod
    def from_environment(cls, runtime: GpuRuntime) -> SlotCheck | None:
        """Return the check that the environment requests; None without a request.

        Raises:
            OptionError: The variable is not a whole number.
        """
        text = os.environ.get(CHECK_VARIABLE, "")
        if not text or text == "0":
            return None
        if not (text.isascii() and text.isdigit()):
            raise OptionError(
                f"{CHECK_VARIABLE} is {text!r:.80}, but must be a whole number.",
                fix="Set it to 1, or to another seed of the delays.",
            )
        return cls(runtime, int(text))

    def checked(
        self,
        steps: Sequence[Step],
        names: Mapping[DeviceMemory, Buffer],
        where: str,
        written: Iterable[DeviceMemory] = (),
        *,
        merged: bool = False,
    ) -> list[Step]:
        """Check the order of steps and return them with delays among them.

        Args:
            steps: The steps in order.
            names: The buffers of all slots.
            where: Name of the pass in messages.
            written: Slots that were written before the pass.
            merged: Whether launches are merged afterwards. Delays then come only before a merged launch, or
                each pass would be another program to build.

        Raises:
            EngineError: A step reads or writes a slot too early, or before the first write, or its buffers
                differ from its kernel's.
        """
        before = [names[memory] for memory in written]
        course = _Course(where, written=before)
        delayed: list[Step] = []
        for step in steps:
            if step_category(step.operator) is None and step.operator not in OWN_OPERATORS:
                course.fail(step, "names an operator that kernels/operators lacks:", Buffer(step.operator))
            if isinstance(step.run, Launch) and self._runtime.computes:
                self._compare(course, step, step.run, names)
            _follow(course, step)
            kernel = step.action == "kernel"
            here = kernel and not (merged and delayed and delayed[-1].action == "kernel")
            if here and self._random.random() < DELAYED_FRACTION:
                delayed.append(self._random.choice(self._delays))
            delayed.append(step)
        return delayed

    def _compare(
        self, course: _Course, step: Step, launch: Launch, names: Mapping[DeviceMemory, Buffer]
    ) -> None:
        """Refuse a step whose buffers differ from the arguments of its kernel."""
        reads = {buffer.name for buffer in step.reads}
        writes = {buffer.name for buffer in step.writes}
        shared = {buffer.name for buffer in names.values()}
        seen, writable = set(), set()
        for part in launch.parts:
            for argument, may_write in zip(
                part.arguments, self._runtime.written_arguments(part.kernel), strict=True
            ):
                if isinstance(argument, DeviceMemory) and argument in names:
                    seen.add(names[argument].name)
                    writable |= {names[argument].name} if may_write else set()
        for what, found in (
            ("does not say that it touches", seen - reads - writes),
            ("says that it touches, and has no argument of,", ((reads | writes) & shared) - seen),
            ("says that it writes, and cannot write,", (writes & shared) - writable),
        ):
            for name in sorted(found):
                course.fail(step, what, Buffer(name))


def _follow(course: _Course, step: Step) -> None:
    if step.action == "kernel":
        course.enqueued += 1
        course.need_written(step)
        course.accesses += [_Access(course.enqueued, step, buffer, False) for buffer in step.reads]
        course.accesses += [_Access(course.enqueued, step, buffer, True) for buffer in step.writes]
        course.written += step.writes
        if step.operator == "flag":
            course.flagged = course.enqueued
    elif step.action == "graph":
        _run(course, step)
    elif step.action in ("read_ahead", "fetch"):
        _run(course, replace(step, writes=()))
        if step.action == "fetch":
            # It may enqueue a kernel, which adds to what earlier kernels have written.
            course.enqueued += 1
            course.accesses += [_Access(course.enqueued, step, buffer, True) for buffer in step.writes]
    elif step.action == "mark":
        course.marks[step.lane, step.name] = course.enqueued
    elif step.action == "sent":
        course.marks[step.lane, step.name] = course.flagged
    elif step.wait is not None and step.wait.strategy != "finish":
        course.known = max(course.known, course.marks.get((step.lane, step.name), 0))
    elif step.action in ("wait", "finish", "acquire", "acquire_to_read", "read_weights"):
        # Mapping and copying wait for the queue as finishing it does.
        course.known = course.enqueued
        course.need_written(step)


def _run(course: _Course, step: Step) -> None:
    """Follow a graph's run, which begins at once, although kernels in the queue may not have finished."""
    course.need_written(step)
    for access in course.accesses:
        if access.number <= course.known:
            continue
        other = access.step.label
        if access.writes and any(_meet(access.buffer, buffer) for buffer in step.reads):
            course.fail(step, f"may run before kernel {other!r} has written", access.buffer)
        if any(_meet(access.buffer, buffer) for buffer in step.writes):
            course.fail(step, f"may run while kernel {other!r} still uses", access.buffer)
    course.written += step.writes


def _meet(one: Buffer, other: Buffer) -> bool:
    """Whether two buffers share a byte."""
    return (
        one.name == other.name
        and (other.stop is None or one.start < other.stop)
        and (one.stop is None or other.start < one.stop)
    )


def _delay(launch: Launch) -> Step:
    return Step(
        operator="late write",
        layer=None,
        tokens=0,
        processor="gpu",
        action="kernel",
        label="late write",
        run=launch,
    )
