"""The result of a simulation, labelled as simulated everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heterollm.base import GIB
from heterollm.kernels.device import Device
from heterollm.kernels.npu import graph_memory
from heterollm.kernels.ops import OpSpec, joined_specs
from heterollm.kernels.sim import soc_of
from heterollm.simulate.experts import ExpertUse
from heterollm.simulate.phase import PhaseUse
from heterollm.simulate.request import SimulationRequest
from heterollm.solver import (
    GraphSharing,
    Plan,
    PlannedExperts,
    predict_prompt,
)
from heterollm.trace import Trace


@dataclass(frozen=True, slots=True)
class GraphUse:
    """The NPU's graphs of a plan.

    Args:
        count: Graphs of all layers and lengths.
        held_gib: Memory of their weights, counted for each length, and of their own inputs and outputs.
        limit_gib: Memory that the NPU can address; None without a limit.
        opening_s: Simulated time to open them all, once they are built.
    """

    count: int
    held_gib: float
    limit_gib: float | None
    opening_s: float

    @property
    def fits(self) -> bool:
        """Whether the NPU can hold them all at once."""
        return self.limit_gib is None or self.held_gib <= self.limit_gib


def graphs_of(device: Device, plan: Plan, specs: Sequence[OpSpec]) -> GraphUse:
    """Return the NPU's graphs of a plan.

    Args:
        device: The simulated device.
        plan: The plan.
        specs: All groups of the model, and the experts of a mixture.
    """
    soc = soc_of(device)
    every = (*specs, *joined_specs(specs))
    count = sum(len(held.lengths) for held in plan.slices for spec in every if held.holds(spec))
    count += len(
        {
            (layer, group)
            for entry in plan.technique(PlannedExperts).entries
            for layer in range(entry.layers[0], entry.layers[1] + 1)
            for group in entry.placement.groups
        }
    )
    held_bytes = plan.npu_bytes(specs, graph_memory(device.npu))
    limit_gib = soc.npu.address_space_gib * soc.npu.process_domains or None
    return GraphUse(count, held_bytes / GIB, limit_gib, count * soc.build.session_us / 1e6)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one simulation; every time in it is simulated.

    Args:
        request: The case.
        device: Name of the simulated device.
        fingerprint: Fingerprint of the device, its parameters included.
        model: Name of the model.
        note: Approximations of the model.
        plan: The plan that ran.
        graphs: The NPU's graphs of the plan, for all of its lengths.
        sharing: What the chunks of the prompt share.
        prefill: The prompt, whose time is that to the first token.
        decode: The tokens after the first; None for a simulation of the prompt alone.
        tokens: Likeliest tokens, where they were computed.
        alone: The phases without the game; empty if no game ran.
        trace: Every pass, where it was recorded.
        splits: The split of each group by phase, as :func:`heterollm.solver.notation` writes it.
        in_order: The prompt under the plan for one chunk after the other; None without chunks in flight.
        experts: The rows of a mixture's experts; None for a model without.
        layers: Layers of each kind, by its name.
    """

    request: SimulationRequest
    device: str
    fingerprint: str
    model: str
    note: str
    plan: Plan
    graphs: GraphUse
    sharing: GraphSharing
    prefill: PhaseUse
    decode: PhaseUse | None
    tokens: tuple[int, ...] = ()
    alone: tuple[PhaseUse, ...] = ()
    trace: Trace | None = None
    splits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    in_order: PhaseUse | None = None
    experts: ExpertUse | None = None
    layers: Mapping[str, int] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[PhaseUse, ...]:
        """The prompt, and the tokens after the first if there are any."""
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)

    @property
    def joules(self) -> float:
        """Energy of both phases, the middle of its range."""
        return sum(phase.energy.middle_joules for phase in self.phases)

    @property
    def elapsed_us(self) -> float:
        """Time of both phases."""
        return sum(phase.elapsed_us for phase in self.phases)

    @property
    def predicted_npu_idle_fraction(self) -> float | None:
        """The bubbles that the solver predicts for chunks in flight; None without them."""
        plan, lengths = self.plan, [length for _, length in self.plan.chunks(self.prefill.tokens)]
        if plan.schedule is None or len(lengths) == 1:
            return None
        return predict_prompt(plan.schedule, lengths, self.layers).npu_idle_fraction

    def explained(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the milliseconds of each use of time by phase and operator."""
        return {
            phase.phase: {
                one.operator: {use: used_us / 1e3 for use, used_us in one.used_us.items()}
                for one in phase.account
            }
            for phase in self.phases
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the results in a form that JSON can hold."""
        decode = self.decode
        return {
            "lanes": self.plan.lanes,
            "chunk_tokens": self.plan.chunk_length,
            "npu_graphs": self.graphs.count,
            "npu_gib": self.graphs.held_gib,
            "npu_limit_gib": self.graphs.limit_gib,
            "npu_opening_s": self.graphs.opening_s,
            "ttft_ms": self.prefill.elapsed_us / 1e3,
            "prefill_tokens_per_second": self.prefill.tokens_per_second,
            "decode_tokens_per_second": None if decode is None else decode.tokens_per_second,
            "prefill_joules": self.prefill.energy.middle_joules,
            "decode_joules_per_token": None
            if decode is None
            else decode.energy.middle_joules / decode.tokens,
            "average_watts": self.joules / self.elapsed_us * 1e6,
            "prefill": self.prefill.to_dict(),
            "decode": None if decode is None else decode.to_dict(),
            "predicted_npu_idle_fraction": self.predicted_npu_idle_fraction,
            "in_order": None if self.in_order is None else self.in_order.to_dict(),
            "slowdown": self.slowdown(),
            "experts": None if self.experts is None else self.experts.to_dict(),
            "cuts": {phase: dict(splits) for phase, splits in self.splits.items()},
            "tokens": list(self.tokens),
        }

    def slowdown(self) -> dict[str, float] | None:
        """Return the time of each phase with the game over its time without; None if no game ran."""
        pairs = zip(self.phases, self.alone, strict=False)
        return {one.phase: one.elapsed_us / alone.elapsed_us for one, alone in pairs} or None
