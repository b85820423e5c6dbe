"""What a trace is: spans of time on three tracks, and the passes of the model that they belong to.

Real, emulated and simulated clocks write the same records; :attr:`Trace.time_kind` says which it was, and
goes into every file, table and picture that is made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

from heterollm.base import bandwidth_gbps
from heterollm.engine import LinearWork, operator_name
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.ops import Phase

__all__ = [
    "CATEGORIES",
    "ENGINE_CATEGORIES",
    "PART_CATEGORIES",
    "TRACKS",
    "Category",
    "Pass",
    "Span",
    "Trace",
    "Track",
]

Track: TypeAlias = Literal["gpu", "npu", "engine"]
"""Where something took place: the GPU's queue, the NPU, or the thread that drives both."""

TRACKS: Final[tuple[Track, ...]] = get_args(Track)

PartCategory: TypeAlias = Literal[
    "linear", "attention", "norm", "activation", "embedding", "join", "merged", "signal", "other"
]
EngineCategory: TypeAlias = Literal[
    "pass", "launch", "graph", "hand-over", "wait", "sleep", "poll", "bind", "build", "tracing", "call"
]
Category: TypeAlias = PartCategory | EngineCategory

PART_CATEGORIES: Final[tuple[PartCategory, ...]] = get_args(PartCategory)
"""Of kernels and graph runs. ``merged`` is one launch of several kinds of kernels, ``signal`` the kernel of a
flag, ``join`` one that does nothing but bring the parts of a cut together."""

ENGINE_CATEGORIES: Final[tuple[EngineCategory, ...]] = get_args(EngineCategory)
"""Of the engine thread. ``pass`` is what holds the others; ``launch`` enqueues a kernel; ``graph`` runs the
NPU, which keeps the thread; ``hand-over`` marks, flushes, maps and unmaps; ``wait`` waits for the GPU, in it
``sleep`` and ``poll`` (a wait without either is the driver's); ``bind`` writes the step and names a session's
memory; ``build`` compiles a list of calls; ``tracing`` reads the kernels' times."""

CATEGORIES: Final[tuple[Category, ...]] = (*PART_CATEGORIES, *ENGINE_CATEGORIES)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Args:
        track: Where.
        category: Of which kind.
        operator: What: ``qkv``, ``norm``, ``finish``, …
        begin_ns: When it began, from any fixed moment of the trace's clock.
        end_ns: When it ended.
        number: Of the pass that it belongs to.
        layer: Decoder layer; None outside of layers.
        work: What it computes, where it is linear.
        merged: Operators that one launch runs one after the other, with their layers.
    """

    track: Track
    category: Category
    operator: str
    begin_ns: int
    end_ns: int
    number: int
    layer: int | None = None
    work: LinearWork | None = None
    merged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The operator with its layer, such as ``3.qkv``."""
        return operator_name(self.operator, self.layer)

    @property
    def duration_us(self) -> float:
        """How long it took."""
        return (self.end_ns - self.begin_ns) / 1e3

    @property
    def gbps(self) -> float | None:
        """Weights read, in 10⁹ bytes a second; None where nothing is linear."""
        if self.work is None or self.end_ns <= self.begin_ns:
            return None
        return bandwidth_gbps(self.work.weight_bytes, self.duration_us)

    @property
    def gflops(self) -> float | None:
        """10⁹ operations a second; None where nothing is linear."""
        if self.work is None or self.end_ns <= self.begin_ns:
            return None
        return self.work.flops / (self.duration_us * 1e3)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the model: a chunk of a prompt, or a decoded token.

    Args:
        number: Counted from the first that was recorded, kept or not.
        phase: Which placements it used.
        tokens: How many tokens it took.
        position: Position of the first.
        begin_ns: When it began.
        end_ns: When its logits were there.
        failed: Whether an error ended it.
    """

    number: int
    phase: Phase
    tokens: int
    position: int
    begin_ns: int
    end_ns: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything that was recorded of some passes.

    Args:
        device: Name of the device.
        time_kind: Whether its times are real, emulated or simulated.
        plan: The plan's level.
        precision: Of the linears.
        passes: In order of time.
        spans: In order of their beginning, an outer one before those in it.
        clock_uncertainty_us: By how much kernels may be shifted against the rest.
        notes: What else a reader has to know, such as that the beginning is lost.
    """

    device: str
    time_kind: TimeKind
    plan: str
    precision: str
    passes: tuple[Pass, ...]
    spans: tuple[Span, ...]
    clock_uncertainty_us: float = 0.0
    notes: tuple[str, ...] = ()

    def select(self, wanted: Callable[[Pass], bool]) -> Trace:
        """Return the trace of some passes alone, such as ``lambda one: one.phase == "decode"``."""
        passes = tuple(one for one in self.passes if wanted(one))
        numbers = {one.number for one in passes}
        spans = tuple(span for span in self.spans if span.number in numbers)
        return replace(self, passes=passes, spans=spans)
