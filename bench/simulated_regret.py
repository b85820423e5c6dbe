"""How good plans from a profile are on a simulated SoC, where the truth is known.

Two questions: how far predicted times of slices are from what the simulated parts take, at points that the
profile does not hold; and how much faster a pass could be with other cuts. The search for those runs the
whole pass on the virtual clock: every cut on the alignment, group by group, until none is faster.

All times are simulated. Example: python bench/simulated_regret.py --model llama-3-8b
"""

from __future__ import annotations

import statistics

import numpy as np
from conditions import script_parser
from msgspec.structs import replace

from heterollm.engine import Engine
from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.kernels.sim import Simulation, soc_of
from heterollm.kernels.sim.soc.gpu_model import gpu_time, linear_work
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.planning import ProfiledModel, make_plan
from heterollm.simulate import SimulationRequest
from heterollm.simulate.inputs import inputs_of_simulation
from heterollm.simulate.profile import profile_of
from heterollm.solver import PhaseSync, Placement, Plan
from heterollm.solver.placements import GPU_ONLY, RowsPlacement

POINTS = 200


def changed(plan: Plan, phase: Phase, changes: dict[str, Placement]) -> Plan:
    """Return a plan with the placements of some groups changed in one phase."""
    entries = tuple(
        replace(entry, placement=changes.get(entry.group, entry.placement)) if entry.phase == phase else entry
        for entry in plan.entries
    )
    return replace(plan, entries=entries, slices=())


def opened(name: str) -> Device:
    """Open a simulated device whose NPU has the papers' forms of graphs."""
    return open_device(name, simulation=Simulation(every_form=False))


def errors(model: ProfiledModel, device: Device) -> tuple[list[float], list[float]]:
    """Return the relative errors of predicted times at random cuts and lengths, of GPU and NPU."""
    draw, soc, costs = np.random.default_rng(0), soc_of(device), model.costs
    gpu, npu = [], []
    for _ in range(POINTS):
        spec = model.shape.layer[int(draw.integers(len(model.shape.layer)))]
        rows = tuple(int(draw.integers(1, max(1, own // 256) + 1)) * 256 for own in spec.member_rows)
        rows = tuple(min(one, own) for one, own in zip(rows, spec.member_rows, strict=True))
        total, block = sum(rows), spec.weight.block
        tokens = int(draw.choice([1, 2, 5, 17, 48, 100, 200, 300, 450]))
        true_us = gpu_time(soc, linear_work(total, spec.columns, tokens, block=block)).alone_us
        gpu.append(abs(costs.gpu_us(spec, rows, tokens) / true_us - 1))
        length = int(draw.choice(device.standard_lengths))
        true_us = npu_time(soc, NpuWork(total, spec.columns, length, 4, block)).alone_us
        npu.append(abs(costs.npu_us(spec, rows, length, "matmul_nbits") / true_us - 1))
    return gpu, npu


class Searched:
    """Runs one pass with any placements."""

    def __init__(self, device_name: str, model: ProfiledModel, plan: Plan, phase: Phase, tokens: int) -> None:
        self._name, self._model, self._plan = device_name, model, plan
        self._phase, self._tokens = phase, tokens
        self._weights = shape_only_weights(model.config, model.specs)

    def time_us(self, changes: dict[str, Placement]) -> float:
        """Return the time of the pass with some placements changed."""
        device = opened(self._name)
        plan = replace(changed(self._plan, self._phase, changes), sync=PhaseSync("sleep_poll", "sleep_poll"))
        engine = Engine(device, self._weights, plan, 1024, lambda *_: None)
        cache = engine.new_cache()
        ids = np.zeros(self._tokens, np.int32)

        def once() -> None:
            if self._phase == "decode":
                engine.decode(cache, 256, 0)
            else:
                engine.prefill(cache, 0, ids, "prefill", None)

        for _ in range(3):  # graphs are built, and waits are learnt
            once()
        begin_s = device.now_s()
        once()
        return (device.now_s() - begin_s) * 1e6

    def best(self) -> tuple[float, float, dict[str, Placement]]:
        """Return the time of the solver's placements, of the best found, and what changed."""
        changes = dict[str, Placement]()
        first_us = best_us = self.time_us(changes)
        length = next(item for item in opened(self._name).standard_lengths if item >= self._tokens)
        improved = True
        while improved:
            improved = False
            for spec in self._model.shape.layer:
                for candidate in cuts(spec, length):
                    time_us = self.time_us({**changes, spec.group: candidate})
                    if time_us < best_us * 0.9999:
                        best_us, improved = time_us, True
                        changes = {**changes, spec.group: candidate}
        return first_us, best_us, changes


def cuts(spec: OpSpec, length: int) -> list[Placement]:
    """Return the GPU alone, the NPU alone, and every row cut on the alignment at one fraction a member."""
    steps = max(spec.member_rows) // 256
    found = {
        tuple(min(int(step / steps * rows / 256 + 0.5), rows // 256) * 256 for rows in spec.member_rows)
        for step in range(1, steps)
    }
    rows = [spec.member_rows, *sorted(found - {spec.member_rows})]
    return [
        GPU_ONLY,
        *(RowsPlacement(own, (length,), "matmul_nbits") for own in rows),
    ]


def main() -> None:
    """Print errors and regrets."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--soc", default="snapdragon-8gen3-paper")
    parser.add_argument("--prompt", type=int, default=256)
    options = parser.parse_args()
    name = f"sim:{options.soc}"
    found = find_model(options.model)
    specs = op_specs(found.config, "w4a16", 128, True)
    request = SimulationRequest(options.model, options.soc, options.prompt, head_bits=8, every_form=False)
    device = opened(name)
    plan = make_plan(
        inputs_of_simulation(device, found.name, found.config, specs, request, lambda *_: None)
    ).plan
    profile = profile_of(device, found.name, found.config, specs, lambda *_: None)
    model = ProfiledModel(profile, found.config, specs, "w4a16")
    print(f"{found.name} on {name}; all times are simulated")
    for part, values in zip(("GPU", "NPU"), errors(model, opened(name)), strict=True):
        worst = sorted(values)[int(0.9 * len(values))]
        print(
            f"{part} predictor: median error {statistics.median(values):.1%}, nine in ten within {worst:.1%}"
        )
    for phase, tokens in (("decode", 1), ("prefill", options.prompt)):
        first_us, best_us, changes = Searched(name, model, plan, phase, tokens).best()  # type: ignore[arg-type]
        words = ", ".join(f"{group} {item.npu_rows}" for group, item in changes.items()) or "nothing"
        print(
            f"{phase} of {tokens}: {first_us / 1e3:.2f} ms by the solver, {best_us / 1e3:.2f} ms by search, "
            f"regret {first_us / best_us - 1:.2%}; changed: {words}"
        )


if __name__ == "__main__":
    main()
