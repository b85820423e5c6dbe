"""Windows of a chunk, in which the GPU can work beside graphs, and the pieces of decode passes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heterollm.engine.pass_times import NEWEST
from heterollm.engine.step import HANDED, Call, Step

NORMS: Final = ("norm", "residual")
"""Operators at the begin of a stage, before which no kernel's scratch memory is in use."""

MOST_LOST: Final = 0.5
"""Part of the time of decode passes by which they may make graphs longer: both use the same memory."""

MORE, LESS = 0.05, 0.1
"""Fractions of a graph's time by which a window takes more if the GPU waited, and less if it did not."""


@dataclass(slots=True)
class Spare:
    """Time of the GPU beside an operator's graphs, for the windows of all layers.

    Args:
        shared: Whether the GPU computes a part of the operator meanwhile.
        rest_s: The rest of it; at first the time of the graphs, if the GPU computes no part.
        alone_s: Usual time of the graphs without a decode pass beside them; 0 before the first.
        graph_s: Usual time of the graphs.
        lost: Usual part of the time of decode passes by which they make the graphs longer.
        is_known: Whether a decode pass has needed the rest.
    """

    shared: bool
    rest_s: float = 0.0
    alone_s: float = 0.0
    graph_s: float = 0.0
    lost: float = 0.0
    is_known: bool = False

    @property
    def seconds(self) -> float:
        """The rest, if decode passes in it are a gain."""
        return self.rest_s if self.lost < MOST_LOST else 0.0

    @property
    def likely_s(self) -> float:
        """The same, and all the time of the graphs as long as the rest is not known."""
        return self.seconds if self.is_known else self.graph_s

    def learn_alone(self, graph_s: float) -> None:
        """Take the time of graphs without a decode pass beside them."""
        self.alone_s += NEWEST * (graph_s - self.alone_s) if self.alone_s else graph_s
        self._learn(graph_s)

    def learn(self, graph_s: float, beside_s: float, gpu_waited: bool | None) -> None:
        """Take the time of graphs, and of the part of a decode pass that began beside them.

        Args:
            graph_s: Time of the graphs.
            beside_s: Time of that part alone.
            gpu_waited: Whether the GPU had no work left at the end of the graphs; None if there was none.
        """
        self._learn(graph_s)
        if self.alone_s and beside_s:
            lost = (graph_s - self.alone_s) / min(beside_s, graph_s)
            self.lost += NEWEST * (lost - self.lost)
        if gpu_waited is not None:
            self.is_known = True
            change = MORE if gpu_waited else -LESS
            self.rest_s = min(max(0.0, self.rest_s + change * graph_s), self.graph_s)

    def _learn(self, graph_s: float) -> None:
        if not self.graph_s:
            self.graph_s = graph_s
            self.rest_s = 0.0 if self.shared else graph_s
        self.graph_s += NEWEST * (graph_s - self.graph_s)


@dataclass(frozen=True, slots=True)
class Window:
    """A place in a chunk's steps where kernels may be enqueued that run beside graphs.

    Args:
        index: The first step behind it.
        begins: Calls from there to the first graph.
        graphs: Calls of the graphs.
        behind: Index of the step behind them.
        spare: Time that they leave to the GPU.
    """

    index: int
    begins: tuple[Call, ...]
    graphs: tuple[Call, ...]
    behind: int
    spare: Spare


def find_windows(
    steps: Sequence[Step], calls: Sequence[Call], spares: dict[tuple[str, int], Spare]
) -> tuple[Window, ...]:
    """Return the windows of a pass.

    Args:
        steps: The steps of the pass.
        calls: Their calls.
        spares: Spare times by operator and tokens of its graphs; missing ones are added.
    """
    windows, behind = [], 0
    for index, step in enumerate(steps):
        if step.action != "graph" or index < behind:
            continue
        first = behind
        behind = index + 1
        while behind < len(steps) and steps[behind].action == "graph":
            behind += 1
        waits = [at for at in range(first, index) if steps[at].wait is not None]
        place = waits[-1] if waits and _may_enqueue(steps, first, waits[-1], index) else index
        shared = any(
            one.action == "kernel" and one.work is not None and one.operator == step.operator
            for one in steps[first:index]
        )
        key = step.operator, sum(one.tokens for one in steps[index:behind])
        spare = spares.setdefault(key, Spare(shared))
        windows.append(Window(place, tuple(calls[place:index]), tuple(calls[index:behind]), behind, spare))
    return tuple(windows)


def _may_enqueue(steps: Sequence[Step], first: int, wait: int, graph: int) -> bool:
    """Return whether a kernel that is enqueued before a wait delays neither it nor what follows."""
    own = steps[wait]
    marked = any(one.action in ("mark", "sent") and one.name == own.name for one in steps[first:wait])
    return marked and not any(one.action == "kernel" for one in steps[wait:graph])


@dataclass(frozen=True, slots=True)
class PassPiece:
    """Consecutive calls of a decode pass.

    Args:
        calls: The calls; none waits for the queue.
        fraction: Its part of the time of the pass, by the weights that it reads.
    """

    calls: tuple[Call, ...]
    fraction: float


def find_pieces(steps: Sequence[Step], calls: Sequence[Call]) -> tuple[PassPiece, ...]:
    """Return the pieces of a pass with its head, without the wait at the end; none if it waits in between."""
    if steps[-1].action != "finish" or any(one.action not in ("kernel", "flush") for one in steps[:-1]):
        return ()
    cuts = [at for at, one in enumerate(steps) if at and (one.operator in NORMS or HANDED in one.reads)]
    ranges = list(zip([0, *cuts], [*cuts, len(steps) - 1], strict=True))
    sizes = [sum(one.work.weight_bytes for one in steps[a:b] if one.work is not None) for a, b in ranges]
    total = sum(sizes) or 1
    return tuple(
        PassPiece(tuple(calls[a:b]), size / total) for (a, b), size in zip(ranges, sizes, strict=True)
    )
