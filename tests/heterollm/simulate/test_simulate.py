"""Simulations: the whole stack on a modelled SoC, labelled as simulated and never mixed with measurements."""

import itertools
import json

import pytest

from heterollm.base import CheckpointError, OptionError, ProfileError, cache_root
from heterollm.cli import main
from heterollm.cli.simulate import parse_load, parse_parameter
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import GpuLoad
from heterollm.kernels.sim.soc.parameters import load_soc
from heterollm.model import find_model
from heterollm.profiler import compare
from heterollm.profiler.records import Profile
from heterollm.report import simulation_report
from heterollm.report.console import present
from heterollm.simulate import SimulationRequest, simulate
from heterollm.simulate.request import PLAN_LEVELS

SMALL, PAPER = "llama-3.2-1b", "snapdragon-8gen3-paper"


@pytest.fixture(scope="module")
def results():
    """Each level once, of a small model."""
    return {level: simulate(case(SMALL, prompt=256, decode=8, level=level)) for level in PLAN_LEVELS}


def case(model, **options):
    """The paper's conditions, planned for the prompt alone."""
    solved = options.get("level", "tensor") in ("tensor", "block", "fused")
    return SimulationRequest(model, soc=PAPER, **(({"plan_for": "prompt"} if solved else {}) | options))


def parts_of(spans, part):
    return sorted((span for span in spans if span.processor == part), key=lambda span: span.begin_us)


def test_every_level_runs_and_is_labelled(results):
    for level, result in results.items():
        data = json.loads(json.dumps(result.to_dict()))
        # The NPU of the paper has no integer graphs, and without them fused groups gain nothing.
        assert result.plan.level == ("block" if level == "fused" else level)
        assert result.device == f"sim:{PAPER}"
        for name in (
            "ttft_ms",
            "prefill_tokens_per_second",
            "decode_tokens_per_second",
            "prefill_joules",
            "decode_joules_per_token",
            "average_watts",
        ):
            assert data[name] > 0, (level, name)
        assert data["prefill_tokens_per_second"] == pytest.approx(256e3 / data["ttft_ms"])


def test_the_numbers_of_json_follow_from_each_other_and_from_the_spans(results):
    for result in results.values():
        data = result.to_dict()
        phases = [data["prefill"], data["decode"]]
        for phase, found in zip(phases, (result.prefill, result.decode), strict=True):
            begin_us = min(span.begin_us for span in found.spans)
            end_us = max(span.end_us for span in found.spans)
            assert phase["milliseconds"] == pytest.approx((end_us - begin_us) / 1e3)
            assert phase["joules_low"] <= phase["joules"] <= phase["joules_high"]
        prefill, decode = phases
        assert data["ttft_ms"] == prefill["milliseconds"]
        assert data["prefill_tokens_per_second"] == pytest.approx(256e3 / prefill["milliseconds"])
        assert data["decode_tokens_per_second"] == pytest.approx(8e3 / decode["milliseconds"])
        assert data["prefill_joules"] == prefill["joules"]
        assert data["decode_joules_per_token"] == pytest.approx(decode["joules"] / 8)
        joules, milliseconds = (sum(phase[name] for phase in phases) for name in ("joules", "milliseconds"))
        assert data["average_watts"] == pytest.approx(1e3 * joules / milliseconds)


def test_the_levels_come_in_the_papers_order(results):
    prefill = {level: result.prefill.tokens_per_second for level, result in results.items()}
    decode = {level: result.decode.tokens_per_second for level, result in results.items()}
    assert prefill["gpu"] < prefill["layer"] <= prefill["tensor"] <= prefill["block"] * 1.001
    assert decode["npu"] < decode["gpu"] <= decode["tensor"]
    # The GPU alone decodes at layer level; a plan without the NPU ends its tokens by the driver's wait.
    assert decode["layer"] == pytest.approx(decode["gpu"], rel=0.04)


def test_small_kernels_make_cuts_too_dear_to_decode_with():
    """Of half a billion weights a queue that a cut leaves empty costs more than the cut gains."""
    decode = {
        level: simulate(case("qwen2.5-0.5b", prompt=32, decode=4, level=level)).decode
        for level in ("gpu", "layer", "tensor", "block")
    }
    rates = {level: use.tokens_per_second for level, use in decode.items()}
    assert rates["tensor"] > 1.03 * max(rates["gpu"], rates["layer"])
    assert rates["block"] >= rates["tensor"] * (1 - 1e-9)
    # Most is left to the GPU.
    busy_us = {
        part: sum(span.end_us - span.begin_us for span in parts_of(decode["tensor"].spans, part))
        for part in ("gpu", "npu")
    }
    assert busy_us["npu"] < 0.5 * busy_us["gpu"]


def test_both_parts_run_at_once_where_operators_are_cut(results):
    spans = results["tensor"].decode.spans
    gpu, npu = (parts_of(spans, part) for part in ("gpu", "npu"))
    overlap_us = sum(
        max(0.0, min(one.end_us, other.end_us) - max(one.begin_us, other.begin_us))
        for one in npu
        for other in gpu
    )
    assert overlap_us > 0.5 * sum(span.end_us - span.begin_us for span in npu)
    apart = results["layer"].prefill.spans
    assert not any(
        one.begin_us < other.end_us - 1e-6 and other.begin_us < one.end_us - 1e-6
        for one in parts_of(apart, "npu")
        for other in parts_of(apart, "gpu")
    )


def joules_of(spans, polling_us, elapsed_us):
    """Power times time by each split of the power, from what the parts did, least first."""
    power, busy_us = load_soc(PAPER).power, {"gpu": 0.0, "npu": 0.0, "host": 0.0}
    for span in spans:
        busy_us[span.processor] += span.end_us - span.begin_us
    moved_gbytes = sum(span.dram_bytes for span in spans) / 1e9
    return sorted(
        (
            split.base_watts * elapsed_us
            + split.gpu_watts * busy_us["gpu"]
            + split.npu_watts * busy_us["npu"]
            + split.poll_watts * polling_us
        )
        / 1e6
        + split.dram_joules_per_gbyte * moved_gbytes
        for split in (power.mostly_base, power.balanced, power.mostly_active)
    )


def test_nothing_is_counted_twice_or_left_out(results):
    for result in results.values():
        for phase in (result.prefill, result.decode):
            for part in ("gpu", "npu"):
                spans = parts_of(phase.spans, part)
                assert all(a.end_us <= b.begin_us + 1e-6 for a, b in itertools.pairwise(spans))
                busy_us = sum(span.end_us - span.begin_us for span in spans)
                assert phase.busy_fraction[part] * phase.elapsed_us == pytest.approx(busy_us, abs=1e-3)
            # The control thread's spans are the critical path: they cover the time that is reported.
            host_us = sum(span.end_us - span.begin_us for span in parts_of(phase.spans, "host"))
            assert host_us == pytest.approx(phase.elapsed_us, rel=1e-6)
            moved = sum(span.dram_bytes for span in phase.spans)
            assert phase.dram_gbps == pytest.approx(moved / phase.elapsed_us / 1e3, rel=1e-6)
            assert phase.peak_gbps <= 61.9 * (1 + 1e-6)
            energy = phase.energy
            assert energy.middle_joules == pytest.approx(energy.middle_watts * phase.elapsed_us / 1e6)
            assert [energy.low_joules, energy.middle_joules, energy.high_joules] == pytest.approx(
                joules_of(phase.spans, phase.busy_fraction["host"] * phase.elapsed_us, phase.elapsed_us)
            )


def test_equal_requests_give_equal_results(results):
    again = simulate(case(SMALL, prompt=256, decode=8, level="tensor"))
    assert again.to_dict() == results["tensor"].to_dict()
    assert again.prefill.spans == results["tensor"].prefill.spans


def test_the_driver_costs_what_fast_synchronisation_saves(results):
    fast = results["tensor"]
    slow = simulate(case(SMALL, prompt=256, decode=8, level="tensor", sync="finish"))
    assert slow.plan.entries == fast.plan.entries  # the plan is kept
    assert slow.prefill.elapsed_us > fast.prefill.elapsed_us
    assert slow.decode.elapsed_us > 2 * fast.decode.elapsed_us


@pytest.mark.slow
def test_the_whole_stack_says_what_was_published_of_a_large_model():
    """The chain that the fit knows has neither plans nor a control thread."""
    asked = {
        "gpu": {"level": "gpu"},
        "layer": {"level": "layer"},
        "tensor": {"level": "tensor"},
        "driver": {"level": "tensor", "sync": "finish"},
    }
    found = {name: simulate(case("llama-3-8b", prompt=256, decode=16, **how)) for name, how in asked.items()}
    long = simulate(case("llama-3-8b", prompt=1024, decode=0, level="tensor"))
    prefill = {name: result.prefill.tokens_per_second for name, result in found.items()}
    decode = {name: result.decode.tokens_per_second for name, result in found.items()}
    for simulated, published in (
        (prefill["tensor"], 236.92),
        (prefill["tensor"] / prefill["driver"], 236.92 / 196.44),
        (prefill["tensor"] / prefill["layer"], 1.244),
        (long.prefill.tokens_per_second, 247.9),
        (decode["tensor"], 14.01),
        (decode["tensor"] / decode["gpu"], 1.227),
        (decode["tensor"] / decode["driver"], 4.01),  # in no fit, but it chose where spilled rows go
    ):
        assert simulated == pytest.approx(published, rel=0.05)


def test_polling_burns_what_sleeping_saves(results):
    polled = simulate(case(SMALL, prompt=256, decode=8, level="layer", sync="poll"))
    slept = results["layer"]
    assert polled.prefill.busy_fraction["host"] > slept.prefill.busy_fraction["host"]
    assert slept.prefill.elapsed_us < 1.02 * polled.prefill.elapsed_us


def test_length_policies_of_an_odd_length():
    ttft = {}
    for policy in ("auto", "padding", "pipe", "online"):
        result = simulate(case(SMALL, prompt=300, decode=0, level="layer", length_policy=policy))
        ttft[policy] = result.prefill.elapsed_us
        assert (result.prefill.padding_us > 0) == (policy != "online"), policy
        assert result.decode is None
    # A graph of the exact length wastes nothing, but is built while the user waits.
    assert ttft["online"] > ttft["padding"] > ttft["pipe"] >= ttft["auto"] * 0.999
    exact = simulate(case(SMALL, prompt=256, decode=0, level="layer"))
    assert exact.prefill.padding_us == 0


def test_a_game_slows_down_what_needs_the_gpu():
    load = parse_load("60fps:5ms")
    slower = {}
    for level in ("gpu", "layer"):
        result = simulate(case(SMALL, prompt=256, decode=4, level=level, load=load))
        slower[level] = result.slowdown()["prefill"]
        # No frame of the time in which graphs were built counts.
        frames = result.prefill.frames
        assert frames.due == pytest.approx(result.prefill.elapsed_us / load.period_us, abs=2)
        assert 0 < frames.in_time <= frames.drawn <= frames.due
        game_us = result.prefill.busy_fraction["game"] * result.prefill.elapsed_us
        assert game_us == pytest.approx(frames.drawn * load.frame_us, abs=load.frame_us)
        assert result.to_dict()["prefill"]["frames"]["due"] == frames.due
        assert result.to_dict()["slowdown"]["decode"] > 1
    assert 1.0 <= slower["layer"] < slower["gpu"] <= 1.05 / (1 - 0.3)


def test_long_kernels_cost_frames():
    """A frame waits for the kernel that runs: those of a prompt on the GPU alone are the longest."""
    kept, load = {}, parse_load("60fps:3ms")
    for level in ("gpu", "tensor"):
        request = case(SMALL, prompt=1024, decode=0, level=level, load=load)
        result = simulate(request)
        frames = result.prefill.frames
        longest_us = max(span.end_us - span.begin_us for span in parts_of(result.prefill.spans, "gpu"))
        assert load.frame_us <= frames.slowest_ms * 1e3 <= longest_us + load.frame_us + 1e-6
        kept[level] = frames.in_time / frames.due
        if level == "gpu":
            assert simulate(request).to_dict() == result.to_dict()
    assert kept["gpu"] < kept["tensor"]
    assert kept["gpu"] < 0.9


def test_a_large_model_is_simulated_in_few_calls(calls_of):
    """Of functions, which take two seconds for the prompt and 20 ms for a token on the machine of CI."""
    simulate(case("llama-3-8b", prompt=8, decode=1, level="gpu"))
    prompt = calls_of(lambda: simulate(case("llama-3-8b", prompt=1024, decode=0, level="gpu")))
    both = calls_of(lambda: simulate(case("llama-3-8b", prompt=1024, decode=4, level="gpu")))
    assert prompt < 800_000
    assert both - prompt < 4 * 40_000


def test_what_if_changes_a_parameter(results):
    slow = simulate(case(SMALL, prompt=256, decode=0, level="layer", overrides={"npu.array_tflops": 1.0}))
    assert slow.prefill.elapsed_us > 2 * results["layer"].prefill.elapsed_us
    with pytest.raises(OptionError, match="no parameter"):
        simulate(case(SMALL, level="gpu", overrides={"npu.warp": 1.0}))


def test_simulated_and_measured_profiles_are_not_compared(results):
    assert results
    paths = list((cache_root() / "profiles").rglob("*.json"))
    assert paths
    assert all("simulated" in path.name for path in paths)
    simulated = Profile.load(paths[0])
    assert simulated.time_kind == "simulated"
    measured = Profile({"device": "host", "time": "real", "cache_bytes": 0})
    with pytest.raises(ProfileError, match="simulated time"):
        compare(simulated, measured)
    with pytest.raises(ProfileError, match="another device"):
        simulated.merge(Profile(open_device("sim:snapdragon-8elite").description()))


def test_the_command_prints_json_with_the_promised_keys(capfd):
    given = [
        "simulate",
        SMALL,
        "--prompt",
        "64",
        "--decode",
        "2",
        "--plan",
        "layer",
        "--json",
    ]
    assert main(given) == 0
    data = json.loads(capfd.readouterr().out)
    assert (data["time_kind"], data["plan_level"]) == ("simulated", "layer")
    assert data["modelled"]["ttft_ms"] == data["modelled"]["prefill"]["milliseconds"] > 0


def test_the_command_shows_a_table_and_writes_a_timeline(capfd, tmp_path):
    target = tmp_path / "simulated.json"
    given = ["simulate", SMALL, "--prompt", "64", "--decode", "2", "--plan", "npu"]
    assert main([*given, "--gpu-load", "60fps:2ms", "--timeline", str(target)]) == 0
    shown = capfd.readouterr().out
    assert "simulated" in shown
    assert "frames in time" in shown
    events = json.loads(target.read_text())
    assert "simulated" in target.read_text()
    assert events
    assert target.with_name("simulated.json.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        ["--plan", "none"],
        ["--length-policy", "none"],
        ["--sync", "none"],
        ["--prompt", "0"],
        ["--decode", "-1"],
        ["--prompt", "200000"],
        ["--gpu-load", "60fps"],
        ["--gpu-load", "60fps:50ms"],
        ["--gpu-load", "nanfps:5ms"],
        ["--gpu-load", "1e9fps:1e-9ms"],
        ["--what-if", "npu.execute_us"],
        ["--what-if", "npu.execute_us=nan"],
        ["--soc", "no-such-soc"],
        ["no-such-model"],
        ["--numerics"],
    ],
)
def test_bad_input_gives_one_error(options, capfd):
    assert main(["simulate", "--json", *options]) in (1, 2)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_parsing():
    assert parse_load("60fps:5ms") == GpuLoad(60.0, 5000.0)
    assert parse_parameter("gpu.gemm_tflops = 2.5") == ("gpu.gemm_tflops", 2.5)
    with pytest.raises(CheckpointError, match="no folder"):
        find_model("no-such-model")


@pytest.fixture(scope="module")
def flown():
    return simulate(case("qwen1.5-0.5b", prompt=512, decode=0, level="layer", in_flight="auto"))


def test_chunks_in_flight_leave_fewer_bubbles_than_one_after_the_other(flown):
    assert flown.request.in_flight == "auto"
    assert flown.plan.lanes > 1
    data = json.loads(json.dumps(flown.to_dict()))
    before, after = data["in_order"], data["prefill"]
    assert after["milliseconds"] < before["milliseconds"]
    assert after["npu_idle_fraction"] < before["npu_idle_fraction"]
    for phase in (before, after):
        assert phase["npu_idle_fraction"] == pytest.approx(1 - phase["busy_fraction"]["npu"])
    assert data["predicted_npu_idle_fraction"] == pytest.approx(after["npu_idle_fraction"], abs=0.1)
    assert (data["lanes"], data["chunk_tokens"]) == (flown.plan.lanes, flown.plan.chunk_length)


def test_one_chunk_at_once_is_compared_with_nothing(results):
    assert all(result.in_order is None for result in results.values())


def test_explained_chunks_in_flight_say_what_is_shared(flown, capsys):
    present(simulation_report(flown, explain=True))
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The {flown.sharing.graphs} NPU graphs of a prompt of 512 tokens in 2 chunks" in shown
    assert f"the NPU is idle {flown.prefill.npu_idle_fraction:.0%}" in shown
    assert "(simulated)" in shown
