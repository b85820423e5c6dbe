"""Mixtures of experts on simulated SoCs: assumed loads, rows of both processors, and what does not fit."""

import json

import numpy as np
import pytest
from mixtures import SMALL_MIXTURE

from heterollm.base import OptionError, PlanError
from heterollm.benchmarks import BenchRow
from heterollm.benchmarks.sweep import run_case
from heterollm.kernels.ops import GraphMemory, Routing
from heterollm.model import expert_specs, find_model, op_specs
from heterollm.simulate import SimulationRequest, simulate
from heterollm.simulate.experts import AssumedExperts
from heterollm.simulate.routing import AssumedRouting
from heterollm.solver import (
    ExpertGroup,
    ExpertsEntry,
    ExpertsPlacement,
    ExpertsRequest,
    PlannedExperts,
    level_plan,
)

DENSE = {"intermediate_size": 2048}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps(SMALL_MIXTURE))
    return str(path)


def simulated(model, step=None, **options):
    techniques = () if step is None else (step,)
    given = {"prompt": 256, "decode": 1, "level": "tensor", "plan_for": "prompt"} | options
    return simulate(SimulationRequest(model, techniques=techniques, **given))


@pytest.fixture(scope="module")
def result(small):
    return simulated(small, "npumoe")


@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (16, 2), (8, 2), (64, 8)])
@pytest.mark.parametrize("imbalance", [1.0, 1.5, 3.0])
def test_loads_have_the_stated_imbalance_and_every_choice(experts, chosen, imbalance):
    routing = AssumedRouting(Routing(experts, chosen), imbalance)
    loads = routing.loads(3, 0, 40_000)
    assert loads.max() / loads.mean() == pytest.approx(imbalance, rel=0.06)
    for tokens in (1, 3, 64, 256):
        own = routing.loads(3, 64, tokens)
        assert own.sum() == tokens * chosen
        assert own.max() <= tokens


def test_loads_are_drawn_again_alike():
    routing = Routing(32, 4)
    one, other = (AssumedRouting(routing, 2.0) for _ in range(2))
    assert np.array_equal(one.loads(1, 256, 100), other.loads(1, 256, 100))
    assert not np.array_equal(one.loads(1, 256, 100), one.loads(1, 512, 100))
    assert not np.array_equal(one.loads(0, 256, 100), one.loads(1, 256, 100))
    records = one.calibrated(range(2))
    assert records == other.calibrated(range(2))
    assert [record.layer for record in records] == [0, 1]
    # The calibration prefers the experts of the layer that the prompt prefers, by other tokens.
    prompt = one.loads(1, 0, 4096)
    popular = np.argsort(-prompt, kind="stable")[:8]
    assert len({*popular} & {*records[1].most_popular(8)}) >= 6
    assert not np.array_equal(prompt, records[1].counts)


@pytest.mark.parametrize("imbalance", [0.5, 4.0, float("nan")])
def test_impossible_imbalance_is_refused(imbalance):
    with pytest.raises(OptionError, match="at most 4 times the mean load"):
        AssumedRouting(Routing(8, 2), imbalance)


@pytest.mark.parametrize("overflow", ["gpu", "drop"])
@pytest.mark.parametrize("capacity", [1, 32, 256])
def test_no_row_is_lost(small, overflow, capacity):
    config = find_model(small).config
    specs = op_specs(config, "w4a16", 128, True)
    experts = expert_specs(config, specs)
    plan = level_plan(
        "gpu", specs, device="any", precision="w4a16", standard_lengths=(1, 256), chunk_length=256
    )
    groups = ExpertGroup((3, 5, 0), capacity), ExpertGroup((7,), 64)
    entry = ExpertsEntry((2, 256), (0, 0), ExpertsPlacement(groups, overflow))
    plan = plan.with_technique(PlannedExperts((entry,)))
    assumed = AssumedExperts(plan, experts, AssumedRouting(config.mixture.routing, 2.0))
    use = assumed.use(plan.chunks(300), GraphMemory())
    assert use.pairs == 300 * 4 * 2
    assert use.npu_pairs + use.gpu_pairs + use.dropped_pairs == use.pairs
    assert (use.dropped_pairs > 0) is (overflow == "drop" and capacity < 256)
    assert (use.overflow_pairs > 0) is (overflow == "gpu" and capacity < 256)
    assert use.npu_rows == 2 * (3 * capacity + 64)
    assert use.hand_overs == 2
    by_pass = [
        assumed.rows_on_gpu(layer, "prefill", *own) for layer in (0, 1) for own in ((256, 0), (44, 256))
    ]
    assert sum(rows for _, rows in by_pass) == use.gpu_pairs
    assert assumed.rows_on_gpu(0, "decode", 1, 300) == (4, 4)


def test_experts_on_the_npu_gain(small, result):
    without = simulated(small)
    assert result.prefill.elapsed_us < without.prefill.elapsed_us
    assert without.experts.npu_rows == 0
    for use in (result.experts, without.experts):
        assert use.npu_pairs + use.gpu_pairs == use.pairs == 256 * 4 * 2
    # Decode runs on the GPU alone.
    assert result.decode.elapsed_us == pytest.approx(without.decode.elapsed_us, abs=1e-3)


def test_graphs_run_as_often_as_the_plan_says(result):
    runs = [
        span for span in result.prefill.spans if span.processor == "npu" and span.name.startswith("experts")
    ]
    assert len(runs) == result.experts.graphs_per_layer * SMALL_MIXTURE["num_hidden_layers"]


@pytest.mark.parametrize("level", ["tensor", "block"])
def test_dense_layers_are_planned_and_run_beside_sparse_ones(tmp_path, level):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL_MIXTURE | {"num_hidden_layers": 3, "mlp_only_layers": [1]} | DENSE))
    result = simulated(str(path), "npumoe", level=level)
    assert result.layers == {"attention+mixture": 2, "attention+ffn": 1}
    planned = result.plan.technique(PlannedExperts).entries
    assert {layer for entry in planned for layer in entry.layers} == {0, 2}
    assert result.experts.pairs == 256 * 4 * 2
    by_group = {}
    for entry in result.plan.entries:
        by_group.setdefault(entry.group, set()).add(entry.kind)
    assert by_group["qkv"] == by_group["o"] == by_group["head"] == {""}
    assert by_group.keys() & {"gate_up", "ffn"}
    operators = {span.name.partition(" ")[0] for span in result.prefill.spans if span.processor == "npu"}
    assert {"experts", "qkv"} <= operators
    assert operators & {"ffn", "gate_up", "down"}


def test_imbalance_changes_times(small, result):
    even = simulated(small, "npumoe", imbalance=1.0)
    assert even.experts.imbalance == 1.0
    assert even.prefill.elapsed_us != pytest.approx(result.prefill.elapsed_us, rel=0.01)


def test_equal_cases_have_equal_rows(small):
    request = SimulationRequest(
        small, techniques=("npumoe",), level="tensor", prompt=64, decode=0, plan_for="prompt"
    )
    row, again = run_case(request), run_case(request)
    assert row.error is None
    assert row == again
    own = row.modelled
    assert own.experts["loads"] == "assumed"
    assert (own.overflow, own.imbalance, own.experts["imbalance"]) == ("gpu", None, 2.0)
    assert BenchRow.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def test_dropped_tokens_are_counted(small):
    use = simulated(small, "npumoe", experts=ExpertsRequest("drop")).experts
    assert use.dropped_pairs > 0
    assert use.npu_pairs + use.gpu_pairs + use.dropped_pairs == use.pairs


def test_what_does_not_fit_is_refused_with_the_sum(small):
    with pytest.raises(PlanError, match=r"takes 22\.7 GiB \(22\.4 GiB weights .*\), .* can have 10\.0 GiB"):
        simulated("mixtral-8x7b", level="gpu", plan_for="all", prompt=32)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("qwen3-0.6b", {}, "for mixtures of experts"),
        ("gpt-oss-20b", {}, "biases and a clipped gate, as gpt-oss's"),
        ("olmoe-1b-7b", {"level": "gpu"}, "another level than gpu"),
        ("olmoe-1b-7b", {"imbalance": 9.0}, "at most 8 times"),
    ],
)
def test_the_technique_is_refused_where_it_has_no_meaning(model, options, said):
    with pytest.raises(OptionError, match=said):
        simulated(model, "npumoe", **options)
