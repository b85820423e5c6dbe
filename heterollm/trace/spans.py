"""The records of a trace: passes of the model, and their spans on three tracks.

Real, emulated and simulated clocks write the same records. Every file, table and picture of a trace shows its
:attr:`Trace.time_kind`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

from heterollm.base import bandwidth_gbps
from heterollm.engine import LinearWork, operator_name
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.ops import Phase

Track: TypeAlias = Literal["gpu", "npu", "engine"]
"""The GPU's queue, the NPU, or the thread that drives both."""

TRACKS: Final[tuple[Track, ...]] = get_args(Track)

ProcessorCategory: TypeAlias = Literal[
    "linear", "attention", "norm", "activation", "embedding", "join", "merged", "signal", "other"
]
EngineCategory: TypeAlias = Literal[
    "pass", "launch", "graph", "hand-over", "wait", "sleep", "poll", "bind", "build", "tracing", "call"
]
Category: TypeAlias = ProcessorCategory | EngineCategory

PROCESSOR_CATEGORIES: Final[tuple[ProcessorCategory, ...]] = get_args(ProcessorCategory)
"""Categories of kernels and graph runs. ``merged`` is one launch of kernels of several categories, ``signal``
the kernel that raises a flag, ``join`` a kernel that only concatenates the shards of a split."""

ENGINE_CATEGORIES: Final[tuple[EngineCategory, ...]] = get_args(EngineCategory)
"""Categories of the engine thread. ``pass`` contains all others; ``launch`` enqueues a kernel; ``graph`` runs
the NPU and blocks the thread; ``hand-over`` marks, flushes, maps and unmaps; ``wait`` waits for the GPU, with
``sleep`` and ``poll`` inside (a wait without them is in the driver); ``bind`` writes the step buffer and
binds a session's memory; ``build`` compiles a pass; ``tracing`` reads the kernels' times."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of work on a track.

    Args:
        track: The processor or thread.
        category: The category.
        operator: The operator or action: ``qkv``, ``norm``, ``finish``, …
        begin_ns: Begin, from any fixed moment of the trace's clock.
        end_ns: End.
        number: Number of the pass.
        layer: Decoder layer; None outside of layers.
        work: Computed work of linear layers.
        merged: Operators, with their layers, that one launch runs in sequence.
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
        """Duration in microseconds."""
        return (self.end_ns - self.begin_ns) / 1e3

    @property
    def gbps(self) -> float | None:
        """Weight bandwidth in 10⁹ bytes a second; None without linear work."""
        if self.work is None or self.end_ns <= self.begin_ns:
            return None
        return bandwidth_gbps(self.work.weight_bytes, self.duration_us)

    @property
    def gflops(self) -> float | None:
        """10⁹ operations a second; None without linear work."""
        if self.work is None or self.end_ns <= self.begin_ns:
            return None
        return self.work.flops / (self.duration_us * 1e3)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the model: a chunk of a prompt, or a decoded token.

    Args:
        number: Counted from the first recorded pass, including passes that the recorder dropped.
        phase: Prefill or decode.
        tokens: Number of tokens.
        position: Position of the first token.
        begin_ns: Begin.
        end_ns: Time of the logits.
        failed: Whether an error ended the pass.
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
    """The records of some passes.

    Args:
        device: Name of the device.
        time_kind: Whether the times are real, emulated or simulated.
        plan: The plan's level.
        precision: Precision of the linear layers.
        passes: Passes in order of time.
        spans: Spans in order of their begin, outer ones before inner ones.
        clock_uncertainty_us: Largest shift of kernels against the rest.
        notes: Remarks, for example about dropped passes.
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
        """Return the trace of the passes for which ``wanted`` returns true."""
        passes = tuple(filter(wanted, self.passes))
        numbers = {item.number for item in passes}
        spans = tuple(span for span in self.spans if span.number in numbers)
        return replace(self, passes=passes, spans=spans)
