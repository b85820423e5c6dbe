"""The debug mode of the slots: proves of each compiled pass that no slot is touched too early, and delays it.

``HETEROLLM_CHECK_SLOTS=1`` (any whole number, the seed of the delays) turns it on for models that are loaded
afterwards. Each list of prepared calls is followed as it will run: what the queue does in order, what the
host knows to be done after each wait, what memory every kernel's arguments and every graph's bindings name.
A list is refused in which the NPU reads what a kernel may not have written yet, or writes what a kernel may
still read or write, or in which anything reads a slot that nothing has written. Kernels of random length are
then put before the kernels of the pass, so that an order which the proof does not see shows in the answers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from heterollm.base import EngineError, OptionError
from heterollm.kernels.gpu import ChainedLaunch, GpuRuntime, Launch, SharedArray
from heterollm.kernels.sync import LateWriter, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[], Any]

__all__ = ["CHECK_VARIABLE", "SlotCheck"]

CHECK_VARIABLE: Final = "HETEROLLM_CHECK_SLOTS"
DELAYED_FRACTION: Final = 0.25
"""Of the kernels, so many come late."""
LONGEST_DELAY_US: Final = 400.0
LENGTHS: Final = 16
"""Different delays: every one is a prepared launch."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[start, stop)`` of the process."""

    start: int
    stop: int

    @classmethod
    def of(cls, array: NDArray[Any], first_byte: int = 0) -> Span:
        """Return where an array lies, its first bytes left out."""
        start = int(array.ctypes.data)
        return cls(start + first_byte, start + array.nbytes)

    def meets(self, other: Span) -> bool:
        """Whether two spans share a byte."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class _Graph:
    """A run of an NPU graph: what it reads and writes."""

    label: str
    reads: Span
    writes: Span


@dataclass(frozen=True, slots=True)
class _Access:
    """What one kernel does to one slot: its number in the queue's order, and where it reads or writes."""

    number: int
    label: str
    span: Span
    writes: bool


@dataclass
class _Course:
    """How far a list of calls has come, in the queue and in what the host knows of it."""

    where: str
    slots: dict[str, Span]
    enqueued: int = 0
    known: int = 0
    marks: dict[int, int] = field(default_factory=dict)
    accesses: list[_Access] = field(default_factory=list)
    written: list[Span] = field(default_factory=list)

    def fail(self, label: str, what: str, span: Span) -> None:
        name = next((name for name, slot in self.slots.items() if slot.meets(span)), "memory")
        raise EngineError(
            f"{self.where}: {label} {what} {name}.", fix="This is an error in heterollm: please report it."
        )

    def need_written(self, label: str, span: Span) -> None:
        if not any(span.meets(written) for written in self.written):
            self.fail(label, "reads what nothing has written in", span)


class SlotCheck:
    """Follows the calls of passes; made once for a model.

    Args:
        runtime: The device.
        seed: Of the delays.
    """

    def __init__(self, runtime: GpuRuntime, seed: int) -> None:
        self._runtime = runtime
        self._random = random.Random(seed)  # noqa: S311 - delays, not secrets
        writer = LateWriter(runtime)
        step_us = LONGEST_DELAY_US / LENGTHS
        self._delays = [writer.launch(step_us * (place + 1)) for place in range(LENGTHS)]
        self._graphs: dict[int, tuple[Call, _Graph]] = {}
        self._rows: dict[int, tuple[Launch, Span]] = {}

    @classmethod
    def from_environment(cls, runtime: GpuRuntime) -> SlotCheck | None:
        """Return the check that the environment asks for; None where it asks for none.

        Raises:
            OptionError: The variable is no whole number.
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

    def note_graph(self, call: Call, label: str, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Take note of what a graph's call reads and writes."""
        self._graphs[id(call)] = call, _Graph(f"the NPU's part of {label}", Span.of(x), Span.of(y))

    def note_rows(self, launch: Launch, slot: SharedArray, first_byte: int) -> None:
        """Take note that of a slot a launch writes the bytes from the first on alone."""
        self._rows[id(launch)] = launch, Span.of(slot.array, first_byte)

    def checked(
        self,
        calls: Sequence[Call],
        pool: Pool,
        where: str,
        written: Iterable[SharedArray] = (),
        *,
        merged: bool = False,
    ) -> list[Call]:
        """Return the calls with delays among them, once it is shown that their order is right.

        Args:
            calls: In the order in which they run.
            pool: The slots that are followed.
            where: What to call the list in messages.
            written: Slots that were written before.
            merged: Whether launches are merged afterwards. Delays then come only where a merged one begins,
                or each list would be a program of its own to build.

        Raises:
            EngineError: A slot is read or written too early, or before anything was written to it.
        """
        slots = {name: Span.of(pool[name].array) for name in pool}
        course = _Course(where, slots, written=[Span.of(slot.array) for slot in written])
        delayed: list[Call] = []
        for call in calls:
            self._follow(course, call)
            here = isinstance(call, Launch) and not (merged and delayed and isinstance(delayed[-1], Launch))
            if here and self._random.random() < DELAYED_FRACTION:
                delayed.append(self._random.choice(self._delays))
            delayed.append(call)
        return delayed

    # -- pieces --------------------------------------------------------------------------------------

    def _follow(self, course: _Course, call: Call) -> None:
        owner, name = getattr(call, "__self__", None), getattr(call, "__name__", "")
        if isinstance(call, ChainedLaunch):
            self._launch(course, call.before)
        if isinstance(call, Launch):
            self._launch(course, call)
        elif id(call) in self._graphs:
            _run(course, self._graphs[id(call)][1])
        elif _is_hand_over(owner):
            if name in ("mark", "sent"):
                course.marks[id(owner)] = course.enqueued
            elif name == "wait":
                course.known = max(course.known, course.marks.get(id(owner), 0))
        elif _is_hand_over(call) or name == "finish" or name.startswith("acquire"):
            # A hand-over that is called marks and waits at once; mapping waits for the queue.
            course.known = course.enqueued

    def _launch(self, course: _Course, launch: Launch) -> None:
        course.enqueued += 1
        writes = self._runtime.written_arguments(launch.kernel)
        found = []
        for argument, written in zip(launch.arguments, writes, strict=True):
            if isinstance(argument, SharedArray):
                span = Span.of(argument.array)
                if written and id(launch) in self._rows and self._rows[id(launch)][1].meets(span):
                    span = self._rows[id(launch)][1]
                found.append(_Access(course.enqueued, launch.label, span, written))
        outputs = [access.span for access in found if access.writes]
        for access in found:
            # What a launch writes stands in for inputs that it has not.
            follows = not access.writes and access.span not in outputs
            if follows and any(access.span.meets(slot) for slot in course.slots.values()):
                course.need_written(f"kernel {launch.label!r}", access.span)
        course.accesses += found
        course.written += outputs


def _run(course: _Course, graph: _Graph) -> None:
    """Follow a graph's run: it begins now, whatever of the queue is not known to be done."""
    course.need_written(graph.label, graph.reads)
    for access in course.accesses:
        if access.number <= course.known:
            continue
        if access.writes and access.span.meets(graph.reads):
            course.fail(graph.label, f"may run before kernel {access.label!r} has written", access.span)
        if access.span.meets(graph.writes):
            course.fail(graph.label, f"may run while kernel {access.label!r} still uses", access.span)
    course.written.append(graph.writes)


def _is_hand_over(value: object) -> bool:
    return value is not None and all(hasattr(value, name) for name in ("strategy", "mark", "wait"))
