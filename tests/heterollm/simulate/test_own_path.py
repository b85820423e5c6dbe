"""The path of this program on a modelled device: maps, copies, limits, and where the time goes."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heterollm.base import OptionError, PlanError
from heterollm.benchmarks import modelled_row
from heterollm.cli import main
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation, clock_of, load_soc, soc_of
from heterollm.kernels.sim.jobs import SimulatedJob
from heterollm.kernels.sim.soc.gpu_model import gpu_time, linear_work
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.profiler.records import Profile
from heterollm.simulate import SimulationRequest, simulate
from heterollm.simulate.account import USES
from heterollm.simulate.goals import beside_public
from heterollm.solver.profile_overheads import overheads_of

SMALL, OWN, PAPER = "llama-3.2-1b", "snapdragon-8gen3", "snapdragon-8gen3-paper"
MAPPED = {"memory.fine_grained_svm": 0.0}
BENCH = Path(__file__).resolve().parents[3] / "bench"


def asked(**options):
    return SimulationRequest(SMALL, prompt=256, decode=4, **options)


@pytest.fixture(scope="module")
def results():
    """Layer level with shared and with mapped memory, and in the paper's conditions."""
    return {
        "shared": simulate(asked(level="layer")),
        "mapped": simulate(asked(level="layer", overrides=MAPPED)),
        "paper": simulate(asked(level="layer", soc=PAPER)),
    }


def used_us(result, use):
    return sum(one.used_us[use] for one in result.prefill.account)


def test_mapped_memory_takes_the_engines_mapped_path(results):
    shared = open_device(f"sim:{OWN}")
    mapped = open_device(f"sim:{OWN}", simulation=Simulation(overrides=MAPPED))
    assert (shared.gpu.traits.coherent, mapped.gpu.traits.coherent) == (True, False)
    assert used_us(results["shared"], "maps") == used_us(results["paper"], "maps") == 0
    assert used_us(results["mapped"], "maps") > 0
    assert results["mapped"].plan.entries == results["shared"].plan.entries
    lost_us = {name: result.prefill.lost_us.get("map", 0.0) for name, result in results.items()}
    assert lost_us["mapped"] > lost_us["shared"] == 0
    assert (
        results["mapped"].prefill.elapsed_us > results["shared"].prefill.elapsed_us + 0.9 * lost_us["mapped"]
    )


def test_where_maps_do_not_wait_the_gpu_computes_meanwhile():
    found = {}
    for beside in (0.0, 1.0):
        device = open_device(
            f"sim:{OWN}", simulation=Simulation(overrides=MAPPED | {"hand_over.maps_beside_kernels": beside})
        )
        assert device.gpu.maps_beside_kernels == bool(beside)
        assert device.description().get("maps_beside_kernels", False) == bool(beside)
        clock, costs = clock_of(device), soc_of(device).hand_over
        memory = device.gpu.shared((2048,), np.float16)
        job = SimulatedJob("shard", 5 * costs.map_us)
        clock.submit(job)
        begin_us = clock.now_us
        memory.acquire()
        found[beside] = clock.now_us - begin_us
        memory.release()
    assert found[1.0] < 2 * soc_of(device).hand_over.map_us < 5 * costs.map_us < found[0.0]
    # The solver prices the same: a shard of the GPU begins before the maps.
    changed = {**MAPPED, "hand_over.maps_beside_kernels": 1.0}
    for overrides, empties in ((MAPPED, True), (changed, False)):
        simulated = open_device(f"sim:{OWN}", simulation=Simulation(overrides=overrides))
        assert overheads_of(Profile(simulated.description(), {}, {})).empties_queue == empties


@pytest.mark.parametrize("mapped_bytes", [None, 4096])
def test_a_map_costs_the_call_and_the_caches_of_its_bytes(mapped_bytes):
    device = open_device(f"sim:{OWN}", simulation=Simulation(overrides=MAPPED))
    clock, costs = clock_of(device), soc_of(device).hand_over
    memory = device.gpu.shared((1 << 20,), np.float16)
    cleaned_us = (mapped_bytes or memory.array.nbytes) / (costs.map_gbps * 1e3)
    begin_us = clock.now_us
    memory.acquire(mapped_bytes)
    memory.acquire()  # it is mapped already
    assert clock.now_us - begin_us == pytest.approx(costs.map_us + cleaned_us)
    begin_us = clock.now_us
    memory.release()
    memory.release()
    assert clock.now_us - begin_us == pytest.approx(costs.unmap_us + cleaned_us)


def test_the_account_adds_up_to_the_time_of_each_phase(results):
    for result in results.values():
        for phase in (result.prefill, result.decode):
            account = phase.account
            assert sum(one.total_us for one in account) == pytest.approx(phase.elapsed_us)
            assert all(set(one.used_us) == set(USES) and min(one.used_us.values()) >= 0 for one in account)
            npu_us = sum(one.used_us[use] for one in account for use in ("both", "npu", "start", "copies"))
            assert npu_us <= phase.busy_fraction["npu"] * phase.elapsed_us * (1 + 1e-9)
            gpu_us = sum(one.used_us[use] for one in account for use in ("both", "gpu"))
            assert gpu_us == pytest.approx(phase.busy_fraction["gpu"] * phase.elapsed_us)
        names = {one.operator for one in result.prefill.account}
        assert names == {"qkv", "o", "gate_up", "down", "head", "attention", "other"}


def test_graphs_are_copied_to_and_started_where_the_soc_says_so(results):
    assert used_us(results["paper"], "copies") == 0 < used_us(results["shared"], "copies")
    # Layer level runs four graphs a layer, nothing beside them, and hides nothing of a start.
    soc, layers = load_soc(OWN), 16
    assert used_us(results["shared"], "start") == pytest.approx(4 * layers * soc.npu.execute_us)
    work = NpuWork(4096, 4096, 256, 4, 128)
    paper, own = npu_time(load_soc(PAPER), work), npu_time(soc, work)
    assert paper.copy_us == 0
    assert own.copy_us == pytest.approx(256 * (4096 + 4096) * 2 / (soc.npu.io_copy_gbps * 1e3))
    assert own.fixed_us == pytest.approx(soc.npu.execute_us + own.copy_us)


def test_a_load_plans_for_all_lengths_within_what_the_npu_addresses():
    small = {"npu.address_space_gib": 0.5}
    found = {
        prompt: simulate(replace(asked(overrides=small), prompt=prompt, decode=0)) for prompt in (64, 256)
    }
    assert found[64].plan.entries == found[256].plan.entries
    assert found[64].graphs.limit_gib == 0.5
    assert 0 < found[64].graphs.held_gib <= 0.5
    assert found[64].graphs.fits
    alone = simulate(replace(asked(overrides=small, plan_for="prompt"), decode=0))
    assert alone.plan.entries != found[256].plan.entries
    # Predictions err by a percent or two.
    assert alone.prefill.elapsed_us <= 1.02 * found[256].prefill.elapsed_us
    assert alone.graphs.fits
    # A level that follows a rule needs all its graphs: those of each pass, or it is refused as in a load.
    layer = simulate(replace(asked(level="layer"), decode=0))
    assert not layer.graphs.fits
    assert layer.graphs.opening_s == pytest.approx(layer.graphs.count * load_soc(OWN).build.session_us / 1e6)
    with pytest.raises(PlanError, match=r"needs NPU graphs of .* addresses 512\.0 MiB"):
        simulate(replace(asked(level="layer", overrides=small), decode=0))


@pytest.mark.parametrize(
    ("changed", "slower"),
    [
        ({"npu.clock_factor": 0.5}, True),
        ({"npu.io_copy_gbps": 0.0}, False),
        ({"npu.execute_us": 400.0}, True),
    ],
)
def test_each_parameter_of_the_npu_changes_a_prompt(results, changed, slower):
    found = simulate(replace(asked(level="layer", overrides=changed), decode=0))
    assert (found.prefill.elapsed_us > results["shared"].prefill.elapsed_us) == slower
    assert found.prefill.elapsed_us != results["shared"].prefill.elapsed_us


def test_integer_graphs_expand_codes_to_bytes_and_do_not_spill():
    soc = load_soc(OWN)
    rows, columns = 4096, 14336
    work = NpuWork(rows, columns, 256, 4, 128, "integer")
    time, plain = npu_time(soc, work), npu_time(soc, replace(work, form="matmul_nbits"))
    assert time.spill_us == 0 < plain.spill_us
    # The published rate, in whole tiles and with the time to load them.
    assert time.array_us >= 2 * rows * columns * 256 / (soc.npu.int16_tflops * 1e6)
    assert time.dequantise_us == pytest.approx(rows * columns / (soc.npu.expand_gweights_per_s * 1e3))
    moved_bytes = rows * columns * soc.npu.integer_weight_bytes + (rows + columns) * 2 * 256
    assert time.dram_bytes == pytest.approx(moved_bytes)
    # Inputs and outputs are codes: nothing is converted.
    assert time.vector_us == 0
    steps = [npu_time(soc, replace(work, tokens=tokens)).array_us for tokens in (1, 32, 33, 64)]
    assert steps[0] == steps[1] < steps[2] == steps[3]


def test_parameters_of_integer_graphs_are_no_identity_of_a_soc_without_them():
    changed = {"npu.expand_gweights_per_s": 1.0}
    assert load_soc(PAPER, changed).digest() == load_soc(PAPER).digest()
    assert load_soc(OWN, changed).digest() != load_soc(OWN).digest()


@pytest.mark.slow
def test_calibrated_models_have_integer_graphs_where_the_profile_has_them_faster():
    forms = {}
    for calibrated in (False, True):
        case = asked(level="block", calibrated=calibrated)
        found = forms[calibrated] = simulate(replace(case, decode=2))
        assert found.plan.calibration == ("assumed" if calibrated else None)
        assert found.plan.has_integer_forms == (found.prefill.npu_us[0] > 0) == calibrated
    assert forms[True].prefill.elapsed_us < forms[False].prefill.elapsed_us
    integer_us, npu_us = forms[True].prefill.npu_us
    assert 0 < integer_us <= npu_us
    # Where integers are slow, the same profile keeps floats.
    slow = {"npu.int16_tflops": 0.01}
    assert not simulate(replace(case, overrides=slow)).plan.has_integer_forms


def test_a_soc_without_integer_graphs_refuses_a_calibration():
    case = asked(level="block", soc=PAPER)
    assert not simulate(replace(case, decode=0)).plan.has_integer_forms
    with pytest.raises(OptionError, match=r"--calibrated changes nothing: .*npu\.integer_graphs is 0"):
        simulate(replace(case, calibrated=True))


def test_decode_is_one_processors_where_runs_cost_more_than_they_bring():
    """Runs fall with their cost, and a dear one leaves none."""
    case = asked(level="block", calibrated=True, soc="snapdragon-x-elite")
    runs = []
    for execute_us in (30.0, 200.0, 20_000.0):
        found = simulate(replace(case, overrides={"npu.execute_us": execute_us})).decode
        assert found is not None
        runs.append(found.npu_runs / found.tokens)
    assert runs[0] >= runs[1] > runs[2] == 0


def test_a_plan_notices_slow_float_products():
    """As slow as llm.npu's Table 3 has them, no float graph remains, and integer graphs keep their share."""
    slow = {"npu.array_tflops": 0.0016}
    case = asked(level="block")
    assert simulate(case).graphs.count > 0
    assert simulate(replace(case, overrides=slow)).graphs.count == 0
    found = simulate(replace(case, overrides=slow, calibrated=True))
    assert found.plan.has_integer_forms
    assert found.prefill.npu_us[0] == found.prefill.npu_us[1] > 0


def test_an_explanation_names_what_is_missing_to_the_goal():
    """On a chip without public speeds there is none; a goal that is met has no rest."""
    case = asked(level="gpu", soc="snapdragon-x-elite")
    prefill, decode = beside_public(simulate(case))
    assert "2112 tokens/s" in prefill
    assert "ms too long" in prefill
    assert "43.8 tokens/s" in decode
    fast = {"gpu.gemm_tflops": 100.0, "gpu.small_gweights_per_s": 1e4, "gpu.attention_tflops": 100.0}
    prefill, _ = beside_public(simulate(replace(case, overrides=fast)))
    assert prefill.endswith("and the goal is 0.97.")
    assert not list(beside_public(simulate(replace(case, soc=PAPER))))


def test_the_kernel_for_one_token_takes_its_slots_or_its_bytes():
    work = linear_work(4096, 4096, 1, block=128)
    times = [
        gpu_time(load_soc(OWN, {"gpu.small_gweights_per_s": rate}), work).alone_us
        for rate in (20.0, 40.0, 1e3, 1e4)
    ]
    assert times[0] == pytest.approx(2 * times[1])
    assert times[1] > times[2] == times[3]


def test_the_command_says_where_the_time_goes(capfd):
    given = ["simulate", SMALL, "--prompt", "64", "--decode", "2", "--plan", "layer"]
    assert main([*given, "--explain"]) == 0
    shown = capfd.readouterr().out
    assert "simulated prefill" in " ".join(shown.split())
    assert all(title in shown for title in ("starts", "copies", "maps", "waits", "gate_up", "NPU graphs"))
    assert main([*given, "--explain", "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    operators = data["explained_ms"]["prefill"].values()
    assert sum(sum(one.values()) for one in operators) == pytest.approx(data["modelled"]["ttft_ms"])
    assert main([*given, "--plan", "tensor", "--calibrated", "--explain"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "Assumed: weights have stepped scales" in shown
    assert "Integer graphs take" in shown
    assert main([*given, "--calibrated", "--numerics"]) != 0
    assert "no calibration is assumed" in capfd.readouterr().err
    assert main([*given, "--json"]) == 0
    assert "explained_ms" not in json.loads(capfd.readouterr().out)
    assert main(["simulate", SMALL, "--prompt", "64,128", "--explain"]) != 0
    assert "--explain changes nothing" in capfd.readouterr().err


def test_what_the_solver_plans_for_is_checked():
    with pytest.raises(OptionError, match="plan for"):
        SimulationRequest(SMALL, plan_for="none")


def test_the_rows_of_the_what_ifs_are_those_of_the_committed_model():
    sys.path.insert(0, str(BENCH))
    try:
        what_if = importlib.import_module("what_if")
        from simulated_rows import Simulated, read
    finally:
        sys.path.remove(str(BENCH))
    rows = read(BENCH / "results" / "simulated_path.jsonl")
    cases = what_if.path_cases()
    named = ("model", "soc", "plan_level", "plan_for", "what_if", "calibrated", "prompt_tokens")
    stated = [[getattr(row, name) for name in named] for row in rows]
    assert stated == [
        [getattr(Simulated.of(modelled_row(case).to_dict()), name) for name in named] for case in cases
    ]
    again = "Run `python bench/what_if.py --out bench/results/simulated_path.jsonl`."
    for row in rows:
        assert row.error is None
        device = open_device(f"sim:{row.soc}", simulation=Simulation(overrides=row.what_if))
        assert row.fingerprint == device.fingerprint(), again
    lines = what_if.what_if_table(rows)
    assert len(lines) == 1 + len(what_if.CHANGES)
    # Alone and with all above it, the first change is the same.
    assert lines[1][1:3] == lines[1][3:5]
