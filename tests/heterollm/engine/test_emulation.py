"""The estimate of an emulated NPU's time, from the steps of a pass, before anything is built."""

from typing import Any

import pytest
from msgspec import structs

from heterollm.base import OptionError
from heterollm.engine.emulation import check_emulation, step_seconds
from heterollm.engine.runner import Engine
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation
from heterollm.kernels.sim.npu import SimulatedNpu
from heterollm.model import ModelConfig, op_specs, shape_only_weights
from heterollm.solver import Plan, level_plan
from heterollm.solver.placements import RowsPlacement


@pytest.fixture
def engine_of(model_fields: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives an engine of a model of 0.1 billion weights, whose NPU builds no graph."""
    fields = model_fields(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=32000)
    config = ModelConfig.from_dict(fields)
    specs = op_specs(config, "w4a16", 32, True)
    monkeypatch.setattr(SimulatedNpu, "prepare", lambda *_: pytest.fail("a graph was built"))

    def make(plan: str | Plan, time_kind: Any = "emulated") -> Engine:
        device = open_device("sim:snapdragon-8gen3", simulation=Simulation())
        device.time_kind = time_kind
        if isinstance(plan, str):
            options: Any = {"device": device.name, "precision": "w4a16", "chunk_length": 32}
            plan = level_plan(plan, specs, standard_lengths=(1, 32), **options)  # type: ignore[arg-type]
        return Engine(device, shape_only_weights(config, specs), plan, 64, lambda *_: None)

    return make


def weights_of(engine: Engine, groups: set[str]) -> int:
    steps = engine.planned_steps("decode", 1)
    return sum(step.work.flops // 2 for step in steps if step.operator in groups and step.work)


def test_the_estimate_counts_what_a_pass_runs_on_the_npu(engine_of: Any) -> None:
    assert step_seconds(engine_of("gpu").planned_steps("decode", 1)) == 0
    layer, npu = engine_of("layer"), engine_of("npu")
    # Decode is the GPU's at that level, and so is the head.
    assert step_seconds(layer.planned_steps("decode", 1)) == 0
    linears = weights_of(layer, {"qkv", "o", "gate_up", "down"}) * 1.3e-7
    assert step_seconds(layer.planned_steps("prefill", 32)) == pytest.approx(linears)
    head = 32000 * 1024 * 1.3e-7
    assert step_seconds(npu.planned_steps("prefill", 32)) == pytest.approx(linears + head)
    assert step_seconds(npu.planned_steps("decode", 1)) == pytest.approx(linears + head)


def test_of_a_cut_only_the_npu_s_rows_count(engine_of: Any) -> None:
    whole = engine_of("npu")
    half = structs.replace(
        whole.plan,
        entries=tuple(
            structs.replace(entry, placement=RowsPlacement((entry.placement.npu_rows[0] // 2,), (1,)))
            if entry.group == "o" and entry.phase == "decode" and entry.lengths[1] == 1
            else entry
            for entry in whole.plan.entries
        ),
        slices=(),
    )
    difference = step_seconds(whole.planned_steps("decode", 1)) - step_seconds(
        engine_of(half).planned_steps("decode", 1)
    )
    assert difference == pytest.approx(weights_of(whole, {"o"}) / 2 * 1.3e-7)


@pytest.mark.parametrize("level", ["layer", "npu"])
def test_a_large_model_is_refused_where_the_npu_is_emulated(level: str, engine_of: Any) -> None:
    with pytest.raises(OptionError, match=r"about \d+ s.*allow-slow"):
        check_emulation(engine_of(level))


@pytest.mark.parametrize(("level", "time_kind"), [("gpu", "emulated"), ("npu", "real")])
def test_what_is_fast_is_not_refused(level: str, time_kind: str, engine_of: Any) -> None:
    check_emulation(engine_of(level, time_kind))
