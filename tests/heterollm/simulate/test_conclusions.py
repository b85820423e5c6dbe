"""Orders that papers find: reversed as modelled, right with what the paper pays and the model does not."""

import json
import sys
from pathlib import Path

import pytest
from mixtures import SMALL_MIXTURE

from heterollm.kernels.sim import GpuLoad, load_soc
from heterollm.simulate.run import simulated

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
try:
    from conclusions import APPLE, BY_WEIGHTS, CHOOSING, CONCLUSIONS, MIXTURES, PAPER, busy_shares
    from rungs import RungRequest
    from simulated_rows import NAIVE
    from tables.simulated import moe_apple, swept_numbers
finally:
    sys.path.remove(str(BENCH))

BY_KEY = {one.key: one for one in CONCLUSIONS}
MIXTURE = SMALL_MIXTURE | {"hidden_size": 4096, "moe_intermediate_size": 2048}


def run(model, soc=PAPER, **options):
    request = RungRequest(model, soc=soc, decode=0, plan_for="prompt", **options)
    return simulated(request, plan_of=request.plan_of)


def time_us(model, **options):
    return run(model, **options).prefill.elapsed_us


RIGHT_AS_MODELLED = {"plugged in"}
"""Since chunks in flight run sparse attention."""


@pytest.mark.parametrize("key", BY_KEY)
def test_rows_have_conclusions_reversed_as_modelled_and_right_with_what_is_paid(key):
    numbers, is_right = swept_numbers(BY_KEY[key]), key in RIGHT_AS_MODELLED
    assert (numbers[0] > 1.0) is is_right
    assert numbers[-1] > 1.0
    assert (BY_KEY[key].turn(numbers) is None) is (not BY_KEY[key].parameter or is_right)


def test_sweeps_begin_with_the_modelled_value():
    for one in CONCLUSIONS:
        if "." in one.parameter:
            for request in one.requests(one.swept[0]).values():
                assert load_soc(request.soc).values()[one.parameter] == one.swept[0]


def test_the_gpus_rate_is_fitted_to_the_published_ratio():
    assert swept_numbers(BY_KEY["gpu"])[-1] == pytest.approx(1.26, rel=0.01)


def test_heterollms_watts_and_gain_contradict_each_other():
    most, least = busy_shares()
    assert most < 0.29 < 0.36 < least


def test_rows_have_npumoes_order_on_its_machine():
    lines = [list(line) for line in moe_apple()]
    for model in MIXTURES:
        own = {line[0].partition(": ")[2]: line[1:] for line in lines if line[0].startswith(model)}
        rates = {step: float(cells[0]) for step, cells in own.items()}
        joules = {step: float(cells[1]) for step, cells in own.items()}
        assert (
            rates["a graph each"]
            <= rates["tiers of capacity"]
            < rates["groups"]
            < rates["the solver's choice"]
        )
        assert min(joules, key=joules.get) == "groups"


def test_steps_of_npumoe_gain_on_its_machine(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTURE))
    given = {"prompt": 1024, "level": "layer", "techniques": ("npumoe",)}
    rungs = ("npumoe:each", "npumoe:tiers", "npumoe:groups", "")
    steps = {rung: run(str(path), APPLE, rung=rung, **given).prefill for rung in rungs}
    each, tiers, groups, solved = (phase.elapsed_us for phase in steps.values())
    assert solved <= groups < tiers <= each
    assert steps["npumoe:groups"].energy.middle_joules < steps["npumoe:each"].energy.middle_joules


DENSE = {"prompt": 512, "level": "layer", "techniques": ("llm.npu",)}


def test_groups_before_shadows_make_shadows_the_largest_step():
    for slowdown, largest in ((1.0, False), (8.1, True)):
        grouped = {"overrides": {"npu.group_slowdown": slowdown}}
        chunks = time_us("qwen1.5-0.5b", rung="llm.npu:chunks", **DENSE, **grouped)
        shadows = time_us("qwen1.5-0.5b", rung="llm.npu:shadow", **DENSE)
        whole = time_us("qwen1.5-0.5b", **DENSE)
        assert (chunks / shadows > shadows / whole) is largest


def test_pruning_pays_as_soon_as_a_join_costs():
    for join_us, pays in ((0.0, False), (660.0, True)):
        every, few = (
            time_us("qwen1.5-0.5b", pruned=pruned, overrides={"hand_over.shadow_us": join_us}, **DENSE)
            for pruned in (0.0, 0.85)
        )
        assert (every > 1.05 * few) is pays


def test_graphs_built_by_their_weights_take_the_larger_model_longer():
    given = {"prompt": 256, "level": "layer", "rung": NAIVE, "length_policy": "online"}
    by_weights = {"overrides": {**BY_WEIGHTS, "build.graph_us_per_mweight": 6010.0}}

    def build_us(model, **options):
        spans = run(model, **given, **options).prefill.spans
        return sum(span.end_us - span.begin_us for span in spans if span.name == "build")

    small, large = "qwen1.5-0.5b", "qwen1.5-1.8b"
    assert build_us(small) == pytest.approx(build_us(large))
    assert build_us(large, **by_weights) > 3 * build_us(small, **by_weights)


def test_estimates_pay_at_1024_tokens_where_one_core_computes_attention():
    sparse = {"prompt": 1024, "level": "tensor", "soc": "snapdragon-8gen3"}
    for rate, pays in ((0.1852, False), (0.02, True)):
        changed = {"overrides": {"gpu.attention_tflops": rate, **CHOOSING}}
        dense = time_us("qwen2-0.5b", **sparse, **changed)
        found = time_us("qwen2-0.5b", techniques=("shadowattn",), **sparse, **changed)
        assert (dense > 1.05 * found) is pays


def test_a_game_beside_the_gpu_alone_shows_no_frames_where_they_wait_for_the_queue():
    load = GpuLoad(60.0, 3000.0)
    for waits in (0, 1):
        alone = {"overrides": {"gpu.frames_wait": waits}, "load": load, "prompt": 256}
        frames = [run("qwen1.5-1.8b", level=level, **alone).prefill.frames for level in ("gpu", "layer")]
        assert (frames[0].in_time <= 1) is bool(waits)
        assert frames[1].in_time == frames[1].due > 5
