"""Rungs of papers' ablations, which bench/rungs.py makes of techniques: what each changes, and its memory."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from mixtures import SMALL_MIXTURE

from heterollm.base import PlanError
from heterollm.simulate import SimulationRequest
from heterollm.simulate.run import simulated
from heterollm.solver.experts.placements import ExpertGroup
from heterollm.solver.experts.prices import ExpertPrices, estimate_experts

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
try:
    from expert_policies import capacity_tiers, experts_by_policy, imbalance
    from rungs import RungRequest, run_rung
    from simulated_rows import view
finally:
    sys.path.remove(str(BENCH))

DENSE, PAPER = "qwen1.5-0.5b", "snapdragon-8gen3-paper"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps(SMALL_MIXTURE))
    return str(path)


def npu_lengths(plan):
    return {length for entry in plan.entries for length in entry.placement.npu_lengths}


def dense(rung="", **options):
    given = {"prompt": 512, "decode": 0, "level": "layer", "techniques": ("llm.npu",)} | options
    return RungRequest(DENSE, soc=PAPER, rung=rung, **given)


def naive(**options):
    return dense("llm.npu:naive", **({"techniques": (), "length_policy": "online"} | options))


def run(request):
    return simulated(request, plan_of=request.plan_of)


def test_graphs_for_each_prompt_are_built_in_its_time():
    by_prompt, chunks = run(naive()), run(dense("llm.npu:chunks"))
    assert npu_lengths(by_prompt.plan) == {512}
    assert npu_lengths(chunks.plan) == {256}
    assert [span for span in by_prompt.prefill.spans if span.name == "build"]
    assert by_prompt.prefill.elapsed_us > chunks.prefill.elapsed_us
    assert not [span for span in chunks.prefill.spans if span.name == "build"]
    for result in (by_prompt, chunks):
        integer_us, npu_us = result.prefill.npu_us
        assert integer_us == npu_us > 0
        assert result.plan.precision == "w8a8"
    # Graphs have whole tiles.
    assert npu_lengths(run(naive(prompt=70)).plan) == {128}


def test_shadows_cost_a_little_and_chunks_out_of_order_gain():
    chunks, shadow, whole = map(run, (dense("llm.npu:chunks"), dense("llm.npu:shadow"), dense()))
    assert not chunks.plan.has_shadows
    assert shadow.plan.has_shadows
    assert whole.plan.has_shadows
    assert chunks.prefill.elapsed_us < shadow.prefill.elapsed_us < 1.1 * chunks.prefill.elapsed_us
    assert whole.plan.lanes > 1
    assert whole.prefill.elapsed_us < shadow.prefill.elapsed_us
    assert whole.prefill.npu_idle_fraction < shadow.prefill.npu_idle_fraction
    assert any("outliers" in span.name for span in shadow.prefill.spans)
    assert not any("outliers" in span.name for span in chunks.prefill.spans)


def routed(model, rung="", **options):
    given = {"prompt": 256, "decode": 1, "level": "tensor", "plan_for": "prompt"} | options
    return RungRequest(model, techniques=("npumoe",), rung=rung, **given)


def test_each_rung_of_experts_gains(mixture):
    results = {step: run(routed(mixture, f"npumoe:{step}")) for step in ("each", "tiers", "groups")}
    results["npumoe"] = run(routed(mixture))
    times_us = {step: result.prefill.elapsed_us for step, result in results.items()}
    assert times_us["npumoe"] <= times_us["groups"] < times_us["each"]
    assert times_us["tiers"] <= times_us["each"]
    uses = {step: result.experts for step, result in results.items()}
    assert uses["each"].graphs_per_layer == SMALL_MIXTURE["num_experts"]
    assert uses["groups"].graphs_per_layer < SMALL_MIXTURE["num_experts"] / 2
    assert uses["tiers"].padding_share < uses["each"].padding_share
    for step in ("each", "tiers", "groups"):
        assert uses[step].npu_experts == 1.0


def test_experts_that_do_not_fit_are_refused(mixture):
    request = routed(mixture, "npumoe:each", overrides={"npu.address_space_gib": 0.03})
    with pytest.raises(PlanError, match=r"needs NPU graphs of .* leave"):
        run(request)
    assert "needs NPU graphs" in run_rung(request)["error"]


def test_a_plan_for_other_waits_is_at_least_as_fast():
    asked = {"prompt": 256, "decode": 8, "level": "tensor", "sync": "finish", "plan_for": "prompt"}
    kept = view(run_rung(SimulationRequest(DENSE, soc=PAPER, **asked)))
    solved = view(run_rung(RungRequest(DENSE, soc=PAPER, resolve=True, **asked)))
    assert solved["ttft_ms"] <= kept["ttft_ms"]
    assert solved["decode_tokens_per_second"] > kept["decode_tokens_per_second"]
    assert (kept["resolve"], solved["resolve"]) == (False, True)


def test_a_plan_has_no_form_that_is_left_out():
    asked = {"prompt": 256, "decode": 0, "level": "tensor", "plan_for": "prompt", "every_form": True}

    def forms(left_out):
        plan = run(RungRequest("llama-2-7b", soc=PAPER, left_out=left_out, **asked)).plan
        return {getattr(entry.placement, "form", None) for entry in plan.entries}

    assert "k_chunked" in forms(())
    assert "k_chunked" not in forms(("k_chunked",))


def test_a_row_names_its_rung():
    row = json.loads(json.dumps(run_rung(naive(prompt=64))))
    assert row["error"] is None
    assert (view(row)["techniques"], view(row)["length_policy"]) == (["llm.npu:naive"], "auto")


def test_the_papers_example_of_capacities():
    """Section 4.1: 256 tokens, 8 experts, imbalance 2 give the busiest one 64 rows."""
    loads = np.array([[64, 16, 16, 32, 32, 32, 32, 32]])
    assert imbalance(loads) == 2
    assert capacity_tiers(loads, (16, 32, 64, 128)) == (64, 32, 16)
    assert capacity_tiers(loads, (32, 64)) == (64, 32)
    assert capacity_tiers(2 * loads, (32, 64)) == (64, 32)
    assert imbalance(np.zeros((2, 4), int)) == 1


def test_each_rule_adds_to_the_one_before():
    loads = np.array([[64, 16, 16, 32, 32, 32, 30, 34]])
    prices = ExpertPrices(
        lambda size, capacity: 50.0 + size * capacity,
        3.0 * np.arange(300),
        (16, 32, 64),
        1000,
        most_weight_bytes=3000,
    )
    found = {name: experts_by_policy(loads, prices, name) for name in ("each", "tiers", "groups")}
    assert {group.capacity for group in found["each"].groups} == {64}
    assert [len(group.experts) for group in found["tiers"].groups] == [1] * 8
    assert sorted(group.capacity for group in found["tiers"].groups) == [16, 16, 32, 32, 32, 32, 64, 64]
    assert found["groups"].groups == (
        ExpertGroup((0, 7), 64),
        ExpertGroup((3, 4, 5), 32),
        ExpertGroup((6,), 32),
        ExpertGroup((1, 2), 16),
    )
    seen = {name: estimate_experts(own, loads, prices) for name, own in found.items()}
    times = [seen[name].time_us for name in found]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    assert (seen["each"].graphs, seen["groups"].graphs) == (8, 4)
    assert seen["each"].padding_share == pytest.approx(1 - 256 / 512)
    assert seen["tiers"].padding_share == pytest.approx(1 - 256 / 288)


def test_an_expert_that_exceeds_a_graph_is_refused():
    prices = ExpertPrices(lambda *_: 1.0, np.arange(300), (32, 64), 1000, most_weight_bytes=999)
    with pytest.raises(PlanError, match="1000 bytes exceeds a graph of 999"):
        experts_by_policy(np.full((1, 8), 32), prices, "tiers")
