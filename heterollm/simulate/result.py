"""The result of a simulation, labelled as simulated everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from heterollm.base import GIB
from heterollm.kernels.device import Device
from heterollm.kernels.npu import graph_memory
from heterollm.kernels.ops import OpSpec, ffn_specs
from heterollm.kernels.sim import soc_of
from heterollm.simulate.experts import ExpertUse
from heterollm.simulate.phase import PhaseUse
from heterollm.solver import (
    AttentionRequest,
    GraphSharing,
    InFlight,
    Plan,
    PlannedExperts,
    Technique,
    graph_sharing,
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
    every = (*specs, *ffn_specs(specs))
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
    limit_gib = soc.npu.address_space_gib or None
    return GraphUse(count, held_bytes / GIB, limit_gib, count * soc.build.session_us / 1e6)


def sharing_of(device: Device, plan: Plan, specs: Sequence[OpSpec], prompt: int, norms: int) -> GraphSharing:
    """Return what the chunks of a prompt share; the arguments are those of :func:`graph_sharing`."""
    return graph_sharing(plan, specs, prompt, norms, graph_memory(device.npu))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one simulation; every time in it is simulated.

    Args:
        device: Name of the simulated device.
        fingerprint: Fingerprint of the device, its parameters included.
        model: Name of the model.
        note: Approximations of the model.
        plan: The plan that ran.
        sync: How the processors waited for each other.
        plan_for: What the solver planned for.
        length_policy: How lengths without a graph ran.
        in_flight: Chunks of a long prompt at once, as requested.
        calibrated: Whether ranges for integer graphs were assumed.
        passes: Techniques of papers over the plan.
        attention: Options of the technique ``shadowattn``; None without it.
        pruned: Assumed share of the layers whose outliers are pruned.
        outlier_share: Assumed share of an operator's input channels that have outliers in a pass.
        graphs: The NPU's graphs of the plan, for all of its lengths.
        sharing: What the chunks of the prompt share.
        prefill: The prompt.
        decode: The tokens after the first; None for a simulation of the prompt alone.
        ttft_us: Time to the first token.
        tokens: Likeliest tokens, where they were computed.
        alone: Prefill and decode without the game; None if no game ran.
        trace: Every pass, where it was recorded.
        splits: The split of each group by phase, as :func:`heterollm.solver.notation` writes it.
        in_order: The prompt under the plan for one chunk after the other; None without chunks in flight.
        experts: The rows of a mixture's experts; None for a model without.
        layers: Layers of each kind, by its name.
    """

    device: str
    fingerprint: str
    model: str
    note: str
    plan: Plan
    sync: str
    plan_for: str
    length_policy: str
    in_flight: InFlight
    calibrated: bool
    passes: tuple[Technique, ...]
    attention: AttentionRequest | None
    pruned: float
    outlier_share: float
    graphs: GraphUse
    sharing: GraphSharing
    prefill: PhaseUse
    decode: PhaseUse | None
    ttft_us: float
    tokens: tuple[int, ...] = ()
    alone: tuple[PhaseUse, PhaseUse | None] | None = None
    trace: Trace | None = None
    splits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    in_order: PhaseUse | None = None
    experts: ExpertUse | None = None
    layers: Mapping[str, int] = field(default_factory=dict)

    @property
    def predicted_npu_idle_fraction(self) -> float | None:
        """The bubbles that the solver predicts for chunks in flight; None without them."""
        plan, lengths = self.plan, [length for _, length in self.plan.chunks(self.prefill.tokens)]
        if plan.schedule is None or len(lengths) == 1:
            return None
        return predict_prompt(plan.schedule, lengths, self.layers).npu_idle_fraction

    @property
    def average_watts(self) -> float:
        """Mean power of both phases."""
        phases = [self.prefill, *([self.decode] if self.decode else [])]
        joules = sum(phase.energy.middle_joules for phase in phases)
        return joules / sum(phase.elapsed_us for phase in phases) * 1e6

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Rate of decode; None without decode."""
        return None if self.decode is None else self.decode.tokens_per_second

    @property
    def decode_joules_per_token(self) -> float | None:
        """Energy of a decoded token, the middle of its range; None without decode."""
        return None if self.decode is None else self.decode.energy.middle_joules / self.decode.tokens

    def explained(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the milliseconds of each use of time by phase and operator."""
        phases = [self.prefill, *([self.decode] if self.decode else [])]
        return {
            phase.phase: {
                one.operator: {use: used_us / 1e3 for use, used_us in one.used_us.items()}
                for one in phase.account
            }
            for phase in phases
        }

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        decode = self.decode
        return {
            "simulated": True,
            "time": "simulated",
            "device": self.device,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "note": self.note,
            "plan_level": self.plan.level,
            "sync": self.sync,
            "plan_for": self.plan_for,
            "length_policy": self.length_policy,
            "in_flight": self.in_flight,
            "lanes": self.plan.lanes,
            "chunk_tokens": self.plan.chunk_length,
            "calibrated": self.calibrated,
            "passes": list(self.passes),
            "attention": None if self.attention is None else structs.asdict(self.attention),
            "pruned": self.pruned,
            "outlier_share": self.outlier_share,
            "npu_graphs": self.graphs.count,
            "npu_gib": self.graphs.held_gib,
            "npu_limit_gib": self.graphs.limit_gib,
            "npu_opening_s": self.graphs.opening_s,
            "prompt_tokens": self.prefill.tokens,
            "decode_tokens": 0 if decode is None else decode.tokens,
            "ttft_ms": self.ttft_us / 1e3,
            "prefill_ms": self.prefill.elapsed_us / 1e3,
            "prefill_tokens_per_second": self.prefill.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "prefill_joules": self.prefill.energy.middle_joules,
            "decode_joules_per_token": self.decode_joules_per_token,
            "average_watts": self.average_watts,
            "prefill": self.prefill.to_dict(),
            "decode": None if decode is None else decode.to_dict(),
            "predicted_npu_idle_fraction": self.predicted_npu_idle_fraction,
            "in_order": None if self.in_order is None else self.in_order.to_dict(),
            "slowdown": self.slowdown(),
            "experts": None if self.experts is None else self.experts.to_dict(),
            **({"tokens": list(self.tokens)} if self.tokens else {}),
        }

    def slowdown(self) -> dict[str, float] | None:
        """Return the time of each phase with the game over its time without; None if no game ran."""
        if self.alone is None:
            return None
        found = {"prefill": self.prefill.elapsed_us / self.alone[0].elapsed_us}
        if self.decode is not None and self.alone[1] is not None:
            found["decode"] = self.decode.elapsed_us / self.alone[1].elapsed_us
        return found
