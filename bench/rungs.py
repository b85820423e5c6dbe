"""Rungs of papers' ablations: a technique without its later steps, a plan for other waits, or without forms.

The product has no rungs: they are edits of the inputs of a plan, and of the plan.
``python bench/figures.py --run simulated_llm_npu`` (or ``simulated_experts``, ``simulated_paper``) simulates
the rungs behind the pages again. The plan of a rung for a device, which ``heterollm bench --plan`` measures:

    python bench/rungs.py FOLDER npumoe:groups --calibration experts.json -o groups.plan.json
    python bench/rungs.py FOLDER llm.npu:shadow --calibration ranges.json --threads 1+1 -o shadow.plan.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from expert_policies import experts_by_policy
from msgspec import structs
from simulated_rows import NAIVE, NO_RUNG

from heterollm.base import PlanError, format_bytes
from heterollm.benchmarks import BenchRow
from heterollm.benchmarks.sweep import run_case
from heterollm.kernels.devices import open_device
from heterollm.kernels.ops import Precision
from heterollm.kernels.sim import SIMULATED, Simulation, clock_of, soc_of
from heterollm.loading import plan_for
from heterollm.planning import LoadOptions, PlanInputs, Planned, expert_loads, make_plan, npu_bytes_left
from heterollm.planning.techniques.experts import with_placements
from heterollm.profiler.records import FenceKey, Key, LinearKey, Profile, Record
from heterollm.simulate import SimulationRequest, planned
from heterollm.simulate.inputs import own_length
from heterollm.simulate.request import SYNC_CHOICES
from heterollm.solver import LLM_NPU, Plan, PlannedExperts, PlanRequest
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.profile_overheads import RETURN_VALUE


def experts_by(policy: str) -> Callable[[Planned], Plan]:
    """Return the edit that places all experts on the NPU by a rule of NPUMoE.

    Args:
        policy: The rule.
    """

    def edited(found: Planned) -> Plan:
        plan, model, routing = found.plan, found.model, found.evidence.get("experts")
        if model is None or routing is None or (prices := model.expert_prices(plan.chunk_length)) is None:
            return plan
        request = plan.request or PlanRequest()
        left = npu_bytes_left(model, plan, request)
        placements = {
            layer: experts_by_policy(own, prices, policy, request.experts.overflow)
            for layer, own in expert_loads(routing, plan.chunk_length).items()
        }
        placed = with_placements(model, plan, routing, placements, left, forced=True)
        need = placed.technique(PlannedExperts).npu_bytes(model.every_spec, model.profile.graph_memory)
        if left is not None and need > left:
            raise PlanError(
                f"The rung npumoe:{policy} needs NPU graphs of {format_bytes(need)} for experts, and the "
                f"linear layers leave {format_bytes(left)}.",
                fix="Choose the technique npumoe, which keeps the limit.",
            )
        return placed

    return edited


def in_order(found: Planned) -> Plan:
    """Return a plan of llm.npu for one chunk after the other."""
    return structs.replace(found.plan, schedule=None)


def without_shadows(found: Planned) -> Plan:
    """Return a plan of llm.npu for one chunk after the other, without shadows of outliers."""
    plan = in_order(found)
    entries = [
        structs.replace(entry, placement=structs.replace(entry.placement, shadow=False))
        if isinstance(entry.placement, RowsPlacement)
        else entry
        for entry in plan.entries
    ]
    return structs.replace(plan, entries=tuple(entries))


RUNGS: Final[Mapping[str, Callable[[Planned], Plan]]] = {
    NAIVE: lambda found: found.plan,
    "llm.npu:chunks": without_shadows,
    "llm.npu:shadow": in_order,
    **{f"npumoe:{policy}": experts_by(policy) for policy in ("each", "tiers", "groups")},
}
"""Edits of a technique's plan by rung: graphs for each prompt, which simulations alone build; graphs of
chunks; shadows of outliers. All experts on the NPU, one in a graph; capacities by popularity; several in a
graph."""


@dataclass(frozen=True)
class RungRequest(SimulationRequest):
    """A simulated case of a rung.

    Args:
        rung: One of :data:`RUNGS`; empty for none.
        resolve: Whether the plan is solved for ``sync``; otherwise for the fastest strategy.
        left_out: Graph forms that the plan cannot take, to measure their gain.
        gpu_share: Largest fraction of an operator's time that the GPU may compute.
    """

    rung: str = ""
    resolve: bool = False
    left_out: tuple[str, ...] = ()
    gpu_share: float = 1.0

    @property
    def online(self) -> bool:
        """Whether graphs are built for the prompt, in its time."""
        return self.rung == NAIVE or super().online

    @property
    def precision(self) -> Precision:
        """Precision of the linears."""
        return "w8a8" if self.rung == NAIVE else super().precision

    def plan_of(self, inputs: PlanInputs) -> Plan:
        """Return the plan."""
        if self.rung == NAIVE:
            own = own_length(self)
            inputs = replace(inputs, standard_lengths=(own,), longest=own)
        if self.gpu_share != 1.0 and inputs.request is not None:
            inputs = replace(inputs, request=structs.replace(inputs.request, gpu_share=self.gpu_share))
        if self.resolve or self.left_out:
            inputs = replace(inputs, profile=lambda measured=inputs.profile: self._profile(measured()))
        found = make_plan(inputs)
        return RUNGS[self.rung](found) if self.rung else found.plan

    def _profile(self, profile: Profile) -> Profile:
        """Return a profile as if graphs had no such forms, and waits had one strategy."""
        records = {
            key: record
            for key, record in profile.records.items()
            if not (isinstance(key, LinearKey) and key.point.form in self.left_out)
        }
        if self.resolve:
            records = self._one_strategy(records)
        return Profile(profile.description, records, profile.runs)

    def _one_strategy(self, records: Mapping[Key, Record]) -> dict[Key, Record]:
        # The driver's wait and copy cost the same on the way back, whether or not the GPU is busy.
        device = open_device(f"{SIMULATED}{self.soc}", simulation=Simulation(overrides=self.overrides))
        costs, strategy = clock_of(device).costs, SYNC_CHOICES[self.sync]
        copies = strategy == "finish" and bool(soc_of(device).hand_over.driver_copies)
        back_us = costs.finish_us + costs.write_us if copies else 0.0
        found: dict[Key, Record] = {}
        for key, record in records.items():
            if not isinstance(key, FenceKey):
                found[key] = record
            elif key.strategy == strategy:
                found[key] = replace(record, values={**record.values, RETURN_VALUE: back_us})
        return found


def rung_row(request: SimulationRequest, row: BenchRow) -> dict[str, Any]:
    """Return the row of a case, with the edits of a rung."""
    data = row.to_dict()
    if isinstance(request, RungRequest):
        edits = {
            "rung": request.rung,
            "resolve": request.resolve,
            "left_out": list(request.left_out),
            "gpu_share": request.gpu_share,
        }
        data |= {"edits": edits} if edits != NO_RUNG else {}
    return data


def run_rung(request: SimulationRequest) -> dict[str, Any]:
    """Simulate a case that may be a rung; a failure becomes a row that says why."""
    plan_of = request.plan_of if isinstance(request, RungRequest) else planned
    return rung_row(request, run_case(request, plan_of))


def main() -> None:
    """Write the plan of a rung on a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rung", choices=[name for name in RUNGS if name != NAIVE])
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--device", default="host")
    parser.add_argument("--threads", default="1+1", help="of GPU and NPU")
    parser.add_argument("--plan", default="auto")
    parser.add_argument("-o", dest="out", type=Path, required=True)
    asked = parser.parse_args()
    gpu, npu = map(int, asked.threads.split("+"))
    technique = asked.rung.partition(":")[0]
    options = LoadOptions(
        device=asked.device,
        plan=asked.plan,
        precision="w8a8" if technique == LLM_NPU else "w4a16",
        calibration=asked.calibration,
        gpu_threads=gpu,
        npu_threads=npu,
        request=PlanRequest(techniques=(technique,)),
    )
    RUNGS[asked.rung](plan_for(asked.model, options)).save(asked.out)


if __name__ == "__main__":
    main()
