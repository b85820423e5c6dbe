"""Time and resources of a phase of a simulation: what the clock counted while it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from heterollm.base import Amount, Count
from heterollm.kernels.device import Device
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.kernels.sim import (
    AS_INTEGERS,
    EnergyRange,
    SimulatedSpan,
    clock_of,
    energy,
    soc_of,
)
from heterollm.profiler.measure import usage_between
from heterollm.simulate.account import OperatorUse, time_account
from heterollm.solver import Placement, Plan, notation


@dataclass(frozen=True, slots=True)
class Frames:
    """A game's frames during a phase.

    Args:
        due: Frames drawn or dropped; they count in the phase in which the drawn one ended.
        drawn: Frames drawn. The others were due while a frame waited for a kernel, or was being drawn.
        in_time: Frames drawn within one period after they were due.
        slowest_ms: Longest time of a drawn frame since it was due.
    """

    due: Count
    drawn: Count
    in_time: Count
    slowest_ms: Amount

    def __post_init__(self) -> None:
        if not self.in_time <= self.drawn <= self.due:
            raise ValueError(f"{self.in_time} of {self.drawn} drawn frames in time, {self.due} due")


@dataclass(frozen=True)
class PhaseUse:
    """Time and resources of a phase.

    Args:
        phase: Prefill or decode.
        tokens: Tokens of the prompt, or decoded tokens.
        elapsed_us: Virtual time.
        energy: Energy in joules, as a range.
        busy_fraction: Busy fraction of the time of ``gpu``, ``npu``, ``host`` and ``game``.
        dram_gbps: Average memory traffic.
        peak_gbps: Highest memory traffic.
        lost_us: Time of synchronisation by cause: ``poll``, ``driver``, ``copy``, ``refill``.
        padding_us: NPU time on padded rows.
        spans: The work of each processor.
        frames: Frames of a game that runs at the same time; None without one.
    """

    phase: Phase
    tokens: int
    elapsed_us: float
    energy: EnergyRange
    busy_fraction: Mapping[str, float]
    dram_gbps: float
    peak_gbps: float
    lost_us: Mapping[str, float]
    padding_us: float
    spans: tuple[SimulatedSpan, ...] = field(repr=False)
    frames: Frames | None = None

    @property
    def tokens_per_second(self) -> float:
        """Rate of the phase."""
        return self.tokens / self.elapsed_us * 1e6

    @property
    def npu_idle_fraction(self) -> float:
        """The bubbles: the fraction of the time during which no NPU graph runs."""
        return 1.0 - self.busy_fraction["npu"]

    @property
    def npu_us(self) -> tuple[float, float]:
        """NPU time in integer graphs, and in all graphs."""
        times_us = [
            (span.name, span.end_us - span.begin_us) for span in self.spans if span.processor == "npu"
        ]
        integer_us = sum(time_us for name, time_us in times_us if name.endswith(AS_INTEGERS))
        return integer_us, sum(time_us for _, time_us in times_us)

    @property
    def npu_runs(self) -> int:
        """Runs of NPU graphs."""
        return sum(span.processor == "npu" for span in self.spans)

    @property
    def attention_us(self) -> float:
        """Time of attention with rotation and cache, and with estimates and selection where it is sparse."""
        return sum(one.total_us for one in self.account if one.operator == "attention")

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold, without the spans."""
        return {
            "tokens": self.tokens,
            "milliseconds": self.elapsed_us / 1e3,
            "joules_low": self.energy.low_joules,
            "joules": self.energy.middle_joules,
            "joules_high": self.energy.high_joules,
            "busy_fraction": dict(self.busy_fraction),
            "npu_idle_fraction": self.npu_idle_fraction,
            "dram_gbps": self.dram_gbps,
            "peak_gbps": self.peak_gbps,
            "hand_over_ms": {name: value / 1e3 for name, value in self.lost_us.items()},
            "padding_ms": self.padding_us / 1e3,
            "attention_ms": self.attention_us / 1e3,
            "npu_runs": self.npu_runs,
            "frames": None if self.frames is None else asdict(self.frames),
        }

    @cached_property
    def account(self) -> tuple[OperatorUse, ...]:
        """Where the time went, by operator."""
        return time_account(self.spans)


def measure_phase(
    device: Device,
    phase: Phase,
    tokens: int,
    work: Callable[[], object],
    padding: Callable[[Sequence[SimulatedSpan]], float] = lambda _: 0.0,
) -> PhaseUse:
    """Run a phase; return its time and resources.

    Args:
        device: The simulated device.
        phase: The phase.
        tokens: Its tokens.
        work: Runs it.
        padding: Returns the NPU's time on padded rows, in microseconds, by the work of the processors.
    """
    clock = clock_of(device)
    # A game's frames during the build of graphs do not belong to the phase.
    clock.last_job()
    clock.spans.clear()
    clock.totals.peak_gbps = 0.0
    before, begin_us = clock.totals.copy(), clock.now_us
    clock.recording = True
    try:
        work()
        clock.last_job()
    finally:
        clock.recording = False
    spans, after, elapsed_us = tuple(clock.spans), clock.totals, clock.now_us - begin_us
    usage = usage_between(before, after, elapsed_us)
    frames_us = after.frame_us[len(before.frame_us) :]
    frames = None
    if clock.load is not None:
        in_time = sum(time <= clock.load.period_us for time in frames_us)
        due = after.frames_due - before.frames_due
        frames = Frames(due, len(frames_us), in_time, max(frames_us, default=0.0) / 1e3)
    busy: dict[str, float] = {
        name: (after.busy_us[name] - before.busy_us[name]) / elapsed_us for name in after.busy_us
    }
    return PhaseUse(
        phase=phase,
        tokens=tokens,
        elapsed_us=elapsed_us,
        energy=energy(soc_of(device), usage),
        busy_fraction=busy,
        dram_gbps=usage.dram_bytes / elapsed_us / 1e3,
        peak_gbps=after.peak_gbps,
        lost_us={
            name: value - before.overhead_us.get(name, 0.0) for name, value in after.overhead_us.items()
        },
        padding_us=padding(spans),
        spans=spans,
        frames=frames,
    )


def padding_us(
    spans: Sequence[SimulatedSpan],
    plan: Plan,
    specs: Sequence[OpSpec],
    phase: Phase,
    passes: Sequence[int],
    experts_share: float = 0.0,
) -> float:
    """Return the NPU's time on padded rows.

    Args:
        spans: The work of the processors.
        plan: The plan that ran.
        specs: All groups of the model.
        phase: The phase.
        passes: Tokens of its passes.
        experts_share: Share of the rows of experts' graphs that have no token.
    """
    wasted: dict[str, list[float]] = {"experts": [experts_share] * len(passes)}
    for tokens in passes:
        for spec, rows, placement in _first_layer(plan, specs, phase, tokens):
            padded = sum(placement.npu_lengths)
            share = max(0.0, 1.0 - rows / padded) if padded else 0.0
            wasted.setdefault(spec.group, []).append(share)
    return sum(
        (span.end_us - span.begin_us) * sum(shares) / len(passes)
        for span in spans
        if span.processor == "npu" and (shares := wasted.get(_graph_kind(span.name)))
    )


def _graph_kind(label: str) -> str:
    """Return the group of a graph's label, such as that of ``experts 1, 2 of layer 0``."""
    return "experts" if label.startswith("experts ") else label.split(" of layer")[0]


def splits_of(plan: Plan, specs: Sequence[OpSpec], prompt: int) -> dict[str, dict[str, str]]:
    """Return the split of each group of a layer, and of the head, by phase.

    Args:
        plan: The plan.
        specs: All groups of the model.
        prompt: Tokens of the prefill pass; the head sees one of them.
    """
    passes: tuple[tuple[Phase, int], ...] = (("prefill", prompt), ("decode", 1))
    return {
        phase: {
            spec.group: notation(placement, spec, rows)
            for spec, rows, placement in _first_layer(plan, specs, phase, tokens)
        }
        for phase, tokens in passes
    }


def _first_layer(
    plan: Plan, specs: Sequence[OpSpec], phase: Phase, tokens: int
) -> Iterator[tuple[OpSpec, int, Placement]]:
    """Yield the operators of the first layer and the head with their tokens and placements."""
    for spec, placement in plan.operators(phase, tokens, [spec for spec in specs if spec.layer <= 0]):
        yield spec, 1 if spec.group == "head" else tokens, placement
