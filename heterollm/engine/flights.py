"""Interleaves the steps of several chunks of a prompt, so that a processor rarely waits for one chunk alone.

The steps of each chunk are cut where the processor changes, before operators that need the state behind
earlier chunks, and before the GPU's shard of a split, which overlaps the NPU's. The plan's schedule orders
the pieces by predicted times. Graph runs block the engine thread, so everything that the GPU's queue can take
is enqueued before each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from heterollm.engine.step import Step
from heterollm.kernels.ops import PARTS, Group
from heterollm.model import LAYER_GROUPS
from heterollm.profiler.records import Processor
from heterollm.solver import ChunkSchedule, GroupTimes, Stage, schedule_chunks


class Chunk(NamedTuple):
    """A chunk in flight: its tokens, the position of the first, and its steps through all layers."""

    tokens: int
    position: int
    steps: Sequence[Step]


_Key: TypeAlias = tuple[int, Group]

ATTENTION: Final = "attention"
SCORE_CODES, SELECTION = "score codes", "selection"
"""Operators of sparse attention: the first, which reads the keys of earlier chunks, and one behind graphs."""

ORDERED: Final = (
    *(ATTENTION, SCORE_CODES, "short convolution", "delta convolution", "delta rule"),
    *("state convolution", "selective scan"),
)
"""Operators that need the state behind earlier chunks."""

_Times: TypeAlias = Callable[[_Key], GroupTimes]


@dataclass(slots=True)
class _Piece:
    """Consecutive steps of a chunk.

    Args:
        processor: The processor that they keep busy.
        needs: Indices of pieces of the same chunk that must end before.
        ordered: Layer and name of an operator at the beginning of the piece that needs earlier chunks.
        follows: Operators, by layer and group, whose glue operators lie in the piece.
        computes: Operators of which it computes a shard.
        steps: The steps.
    """

    processor: Processor
    needs: list[int]
    ordered: tuple[int, str] | None = None
    follows: list[_Key] = field(default_factory=list)
    computes: dict[_Key, None] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def attention_of(self) -> int | None:
        """The layer of an attention at the beginning."""
        return self.ordered[0] if self.ordered is not None and self.ordered[1] == ATTENTION else None


def interleaved(
    chunks: Sequence[Chunk], schedule: ChunkSchedule, chunk_length: int, kinds: Mapping[int, str]
) -> list[Step]:
    """Return the steps of all chunks in one order.

    Args:
        chunks: The chunks in the order of the prompt.
        schedule: The policy, and predicted times of a whole chunk.
        chunk_length: Tokens of a whole chunk.
        kinds: Name of the kind of each layer.
    """
    groups = {*LAYER_GROUPS, *PARTS} - {"experts"}
    cut = [_cut(chunk.steps, groups) for chunk in chunks]
    known = {(one.kind or "", one.group): one for one in schedule.times}

    def times(key: _Key) -> GroupTimes:
        layer, group = key
        # A shorter chunk may place other operators; without times they only order less well.
        return known.get((kinds.get(layer, ""), group)) or GroupTimes(group, 0.0, 0.0, 0.0, 0.0)

    refill_us = max((one.refill_us for one in schedule.times), default=0.0)
    stages: list[list[Stage]] = []
    stores: list[dict[tuple[int, str], tuple[int, int]]] = []
    for number, (chunk, pieces) in enumerate(zip(chunks, cut, strict=True)):
        own = []
        for piece in pieces:
            needs = [(number, need) for need in piece.needs]
            if piece.ordered is not None:
                needs += [earlier[piece.ordered] for earlier in stores]
            time_us = _time_us(piece, times, chunk.tokens / chunk_length, chunk.position)
            # Attention reads little, so that a graph beside it loses nothing.
            slows = piece.attention_of is None or bool(piece.computes)
            more_us = refill_us if piece.processor == "gpu" else 0.0
            own.append(Stage(piece.processor, time_us, tuple(needs), _slowdown(piece, times), slows, more_us))
        stages.append(own)
        # Keys and values are stored right before attention; other operators write the state themselves.
        stores.append(
            {
                piece.ordered: (number, index - (piece.ordered[1] == ATTENTION))
                for index, piece in enumerate(pieces)
                if piece.ordered is not None
            }
        )
    order = schedule_chunks(stages, schedule.policy).order
    return list(_emitted(order, cut, stages))


def _emitted(
    order: Iterable[tuple[int, int]], cut: Sequence[Sequence[_Piece]], stages: Sequence[Sequence[Stage]]
) -> Iterable[Step]:
    """Yield the steps in an order, each kernel as soon as the graphs that it needs have run."""
    kernels: deque[tuple[int, int]] = deque()
    graphs: deque[tuple[int, int]] = deque()
    for chunk, index in order:
        (kernels if cut[chunk][index].processor == "gpu" else graphs).append((chunk, index))
    done: set[tuple[int, int]] = set()
    while kernels or graphs:
        while kernels and done.issuperset(stages[kernels[0][0]][kernels[0][1]].needs):
            done.add(kernels[0])
            chunk, index = kernels.popleft()
            yield from cut[chunk][index].steps
        if graphs:
            done.add(graphs[0])
            chunk, index = graphs.popleft()
            yield from cut[chunk][index].steps


def _cut(steps: Sequence[Step], groups: Collection[str]) -> list[_Piece]:
    pieces = [_Piece("gpu", [])]
    shard, met = False, set()
    marked, ran, attended = False, False, -1
    for step in steps:
        last = len(pieces) - 1
        # Sparse attention reads the cache from its codes on. The GPU takes up each of its graphs.
        attends = step.operator in (ATTENTION, SCORE_CODES)
        ordered = step.operator in ORDERED and not (attends and step.layer == attended)
        follows = step.operator in (SELECTION, ATTENTION) and step.layer == attended
        if pieces[last].processor == "npu":
            if step.action == "kernel" and ran and not follows:
                pieces.append(_Piece("gpu", [last, last - 1]))
                shard = ran = False
        elif step.action == "wait":
            # The GPU's shard, if it has a piece of its own, does not delay the NPU.
            pieces.append(_Piece("npu", [last - shard]))
        elif marked and step.action == "kernel":
            pieces.append(_Piece("gpu", [last]))
            shard = True
        elif ordered and pieces[last].steps:
            pieces.append(_Piece("gpu", [last]))
        marked, ran = step.action == "mark", ran or step.action == "graph"
        piece = pieces[-1]
        piece.steps.append(step)
        if ordered:
            assert step.layer is not None
            piece.ordered = step.layer, ATTENTION if attends else step.operator
            attended = step.layer if attends else attended
        if step.operator in groups:
            key = -1 if step.layer is None else step.layer, step.operator
            if key not in met:
                met.add(key)
                # Before a wait without a mark, the glue operators are in the piece before.
                owner = piece if piece.processor == "gpu" else pieces[-2]
                owner.follows.append(key)
            if step.action == ("kernel" if piece.processor == "gpu" else "graph"):
                piece.computes[key] = None
            if step.action == "graph" and shard:
                # The product of shadow outliers alone names no group.
                pieces[-2].computes[key] = None
    return pieces


def _time_us(piece: _Piece, times: _Times, fraction: float, position: int) -> float:
    """Return the predicted time of a piece of a chunk with this fraction of a whole chunk's tokens."""
    if piece.processor == "npu":
        return sum(times(key).npu_us for key in piece.computes)
    glue_us = (one.before_us + position * one.before_us_per_position for one in map(times, piece.follows))
    return fraction * (sum(glue_us) + sum(times(key).gpu_us for key in piece.computes))


def _slowdown(piece: _Piece, times: _Times) -> float:
    """Return the factor on the time of a piece beside the other processor's; 1 for norms and the like."""
    if piece.processor == "npu":
        return max((times(key).npu_slowdown for key in piece.computes), default=1.0)
    keys: list[_Key] = list(piece.computes)
    if piece.attention_of is not None:
        keys.append((piece.attention_of, "o"))
    return max((times(key).gpu_slowdown for key in keys), default=1.0)
