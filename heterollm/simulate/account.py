"""Accounts for the time of a simulated phase: what ran at each moment, and what nothing ran for."""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeAlias, TypeVar, get_args

from heterollm.kernels.sim import SimulatedSpan
from heterollm.model import LAYER_GROUPS

TimeUse: TypeAlias = Literal["both", "gpu", "npu", "start", "copies", "maps", "waits", "submission"]
"""Uses of a moment, of which it has one: both processors compute, or the GPU while the NPU does not, or the
NPU while the GPU does not; else nothing computes, while a graph is started, the driver copies its inputs and
outputs, memory is mapped, the control thread waits (polls, sleeps, the driver's returns, a queue that ran
empty), or submits."""

USES: Final[tuple[TimeUse, ...]] = get_args(TimeUse)

GROUPS: Final = frozenset({*LAYER_GROUPS, "ffn", "head", "attention"})
LABEL: Final = re.compile(r"(?:\d+\.)?([a-z_ ]+?)(?: of layer .*| \d.*| tokens .*|\[.*)?$")
"""A span's label: a group with its layer before or behind it."""

ATTENTION: Final = ("rope", "attention", "score", "selection", "sparse attention")
"""Beginnings of the names of attention's kernels and graphs."""

Text = TypeVar("Text", bound=str)

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


@dataclass(frozen=True, slots=True)
class _Track(Generic[Text]):
    """Intervals of a processor in order of time, with a text each."""

    begins_us: list[float]
    ends_us: list[float]
    texts: list[Text]

    @classmethod
    def of(cls, intervals: Sequence[tuple[float, float, Text]]) -> _Track[Text]:
        """Return the track of some intervals in any order."""
        ordered = sorted(intervals)
        return cls([one[0] for one in ordered], [one[1] for one in ordered], [one[2] for one in ordered])

    def at(self, moment_us: float) -> Text | None:
        """Return the text of the interval around a moment; None between intervals."""
        place = bisect.bisect_right(self.begins_us, moment_us) - 1
        return self.texts[place] if place >= 0 and moment_us < self.ends_us[place] else None

    def next_after(self, moment_us: float) -> tuple[float, Text] | None:
        """Return begin and text of the next interval; None after the last."""
        place = bisect.bisect_left(self.begins_us, moment_us)
        return (self.begins_us[place], self.texts[place]) if place < len(self.texts) else None


def time_account(spans: Sequence[SimulatedSpan]) -> tuple[OperatorUse, ...]:
    """Return where the time of a phase went, by operator; the times of all add up to the phase's.

    Time in which nothing computes counts for the operator that comes next.

    Args:
        spans: Everything that the processors and the control thread did in the phase.
    """
    gpu = _Track.of([(one.begin_us, one.end_us, one.name) for one in spans if one.processor == "gpu"])
    host = _Track.of([(one.begin_us, one.end_us, one.name) for one in spans if one.processor == "host"])
    parts = [part for one in spans if one.processor == "npu" for part in _parts(one)]
    npu = _Track.of([(begin, end, name) for begin, end, name, _ in parts])
    npu_uses = _Track.of([(begin, end, use) for begin, end, _, use in parts])
    first_us, last_us = min(host.begins_us, default=0.0), max(host.ends_us, default=0.0)
    edges = {edge for track in (gpu, npu, host) for edge in (*track.begins_us, *track.ends_us)}
    marks = sorted(edge for edge in edges if first_us <= edge <= last_us)
    found: dict[str, OperatorUse] = {}
    operator = "other"
    for begin_us, end_us in itertools.pairwise(marks):
        middle_us = (begin_us + end_us) / 2
        on_gpu, on_npu, npu_use = gpu.at(middle_us), npu.at(middle_us), npu_uses.at(middle_us)
        operator = _operator(on_npu or on_gpu or _coming(middle_us, gpu, npu) or operator)
        use = _use(on_gpu, npu_use, host.at(middle_us))
        found.setdefault(operator, OperatorUse(operator)).used_us[use] += end_us - begin_us
    return tuple(sorted(found.values(), key=lambda one: -one.total_us))


def _parts(span: SimulatedSpan) -> Iterator[tuple[float, float, str, TimeUse]]:
    """Yield begin, end, name and use of what a run of a graph consists of."""
    edges = [span.begin_us, span.begin_us + span.start_us]
    edges += [min(edges[1] + span.copy_us, span.end_us), span.end_us]
    uses: tuple[TimeUse, ...] = ("start", "copies", "npu")
    for (begin_us, end_us), use in zip(itertools.pairwise(edges), uses, strict=True):
        if end_us > begin_us:
            yield begin_us, end_us, span.name, use


def _use(on_gpu: str | None, npu_use: TimeUse | None, host: str | None) -> TimeUse:
    if on_gpu is not None:
        return "both" if npu_use == "npu" else "gpu"
    if npu_use is not None:
        return npu_use
    return HOST_USES.get(host or "", "waits")


def _coming(moment_us: float, *tracks: _Track[str]) -> str | None:
    """Return the label of what starts next."""
    found = [one for track in tracks if (one := track.next_after(moment_us)) is not None]
    return min(found)[1] if found else None


@functools.lru_cache(maxsize=4096)
def _operator(label: str) -> str:
    matched = LABEL.match(label)
    name = matched.group(1).strip() if matched else label
    if name.startswith(ATTENTION):
        return "attention"
    if name.startswith("experts"):
        return "experts"
    return name if name in GROUPS else "other"
