"""Accounts for the time of a simulated phase: what ran at each moment, and what nothing ran for."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from heterollm.kernels.sim import SimulatedSpan
from heterollm.model import ALL_GROUPS

TimeUse: TypeAlias = Literal["both", "gpu", "npu", "start", "copies", "maps", "waits", "submission"]
"""Uses of a moment, of which it has one: both processors compute, or the GPU while the NPU does not, or the
NPU while the GPU does not; else nothing computes, while a graph is started, the driver copies its inputs and
outputs, memory is mapped, the control thread waits (polls, sleeps, the driver's returns, a queue that ran
empty), or submits."""

USES: Final[tuple[TimeUse, ...]] = get_args(TimeUse)

GROUPS: Final = frozenset({*ALL_GROUPS, "attention"})
LABEL: Final = re.compile(r"(?:\d+\.)?([a-z_ ]+?)(?: of layer .*| \d.*| tokens .*|\[.*)?$")
"""A span's label: a group with its layer before or behind it."""

ATTENTION: Final = ("rope", "attention", "score", "selection", "sparse attention")
"""Beginnings of the names of attention's kernels and graphs."""

HOST_USES: Final[dict[str, TimeUse]] = {"map": "maps", "unmap": "maps", "submit": "submission"}


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """The time of an operator in all layers; the uses add up to its part of the phase.

    Args:
        operator: A group of linears, ``attention`` with rotation and cache, ``ffn``, or ``other`` kernels.
        used_us: Time by use.
    """

    operator: str
    used_us: dict[TimeUse, float] = field(default_factory=lambda: dict.fromkeys(USES, 0.0))

    @property
    def total_us(self) -> float:
        """The sum over all uses."""
        return sum(self.used_us.values())


class _Piece(NamedTuple):
    """A time in which a processor or the control thread does one thing."""

    begin_us: float
    end_us: float
    label: str
    use: TimeUse


def time_account(spans: Sequence[SimulatedSpan]) -> tuple[OperatorUse, ...]:
    """Return where the time of a phase went, by operator; the times of all add up to the phase's.

    Time in which nothing computes counts for the operator that comes next.

    Args:
        spans: Everything that the processors and the control thread did in the phase.
    """
    gpu, npu, host = (
        sorted(piece for span in spans if span.processor == name for piece in _pieces(span))
        for name in ("gpu", "npu", "host")
    )
    first_us = min((piece.begin_us for piece in host), default=0.0)
    last_us = max((piece.end_us for piece in host), default=0.0)
    edges = {edge for piece in (*gpu, *npu, *host) for edge in piece[:2]}
    marks = sorted(edge for edge in edges if first_us <= edge <= last_us)
    lengths_us = [end_us - begin_us for begin_us, end_us in itertools.pairwise(marks)]
    middles_us = [(begin_us + end_us) / 2 for begin_us, end_us in itertools.pairwise(marks)]
    found: dict[str, OperatorUse] = {}
    operator = "other"
    tracks = (_walk(track, middles_us) for track in (gpu, npu, host))
    for length_us, (on_gpu, next_gpu), (on_npu, next_npu), (on_host, _) in zip(
        lengths_us, *tracks, strict=True
    ):
        piece = on_npu or on_gpu or min(filter(None, (next_gpu, next_npu)), default=None)
        operator = operator if piece is None else _operator(piece.label)
        use: TimeUse = "waits"
        if on_gpu is not None:
            use = "both" if on_npu is not None and on_npu.use == "npu" else "gpu"
        elif (other := on_npu or on_host) is not None:
            use = other.use
        found.setdefault(operator, OperatorUse(operator)).used_us[use] += length_us
    return tuple(sorted(found.values(), key=lambda one: -one.total_us))


def _pieces(span: SimulatedSpan) -> Iterator[_Piece]:
    """Yield the parts of a span: a run of a graph has up to three."""
    if span.processor != "npu":
        use: TimeUse = "gpu" if span.processor == "gpu" else HOST_USES.get(span.name, "waits")
        yield _Piece(span.begin_us, span.end_us, span.name, use)
        return
    edges = [span.begin_us, span.begin_us + span.start_us]
    edges += [min(edges[1] + span.copy_us, span.end_us), span.end_us]
    uses: tuple[TimeUse, ...] = ("start", "copies", "npu")
    for (begin_us, end_us), part in zip(itertools.pairwise(edges), uses, strict=True):
        if end_us > begin_us:
            yield _Piece(begin_us, end_us, span.name, part)


def _walk(
    track: Sequence[_Piece], moments_us: Sequence[float]
) -> Iterator[tuple[_Piece | None, _Piece | None]]:
    """Yield the piece of a track at each moment, one after the other in time, and the next one."""
    begins_us = [piece.begin_us for piece in track]
    after = (*track, None)
    places = np.searchsorted(begins_us, moments_us, side="right").tolist()
    for moment_us, place in zip(moments_us, places, strict=True):
        last = track[place - 1] if place else None
        yield last if last is not None and moment_us < last.end_us else None, after[place]


@functools.lru_cache(maxsize=4096)
def _operator(label: str) -> str:
    matched = LABEL.match(label)
    name = matched.group(1).strip() if matched else label
    if name.startswith(ATTENTION):
        return "attention"
    if name.startswith("experts"):
        return "experts"
    return name if name in GROUPS else "other"
