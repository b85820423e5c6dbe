"""What papers pay as quantities of a chip: nothing by default, and each alone what its paper says."""

import numpy as np
import pytest

from heterollm.base import GraphError
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import shape_only_weight
from heterollm.kernels.gpu import GpuWork
from heterollm.kernels.npu import LinearShape, LinearShard
from heterollm.kernels.ops import WeightFormat
from heterollm.kernels.sim import GpuLoad, SimulatedClock, Simulation, clock_of, soc_names
from heterollm.kernels.sim.jobs import ClockCosts, SimulatedJob
from heterollm.kernels.sim.soc.gpu_model import gpu_time
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.kernels.sim.soc.parameters import load_soc
from heterollm.kernels.sim.soc.power_model import build_us
from heterollm.kernels.sim.soc.quantities import NEUTRAL

PAPER, APPLE = "snapdragon-8gen3-paper", "apple-m2"
PACKED = WeightFormat(4, 128)


def test_phones_pay_nothing_of_it_and_a_digest_tells_each():
    later = [name for name in NEUTRAL if "scores_" not in name and name != "npu.shared_contexts"]
    for chip in soc_names():
        if chip != APPLE:
            values = load_soc(chip).values()
            assert [values[name] for name in later] == [NEUTRAL[name] for name in later]
    changed = {load_soc(PAPER, {name: value + 1}).digest() for name, value in NEUTRAL.items()}
    assert len(changed) == len(NEUTRAL)
    assert load_soc(PAPER).digest() not in changed
    assert load_soc(PAPER, dict(NEUTRAL)).digest() == load_soc(PAPER).digest()


def test_groups_slow_graphs_of_8_bits_alone():
    plain, grouped = load_soc(PAPER), load_soc(PAPER, {"npu.group_slowdown": 8.1})
    eight = NpuWork(2048, 2048, 256, bits=8, form="static_int8")
    times = [npu_time(soc, eight) for soc in (plain, grouped)]
    assert times[1].busy_us == pytest.approx(8.1 * times[0].busy_us)
    assert times[1].fixed_us == times[0].fixed_us
    four = NpuWork(2048, 2048, 256, block=128)
    assert npu_time(plain, four) == npu_time(grouped, four)


def test_gemmas_graph_takes_its_published_time():
    """Section 2.3 of llm.npu: 0.36 and 11.54 s; its 18 layers have 110 million weights each."""
    own = {"build.graph_us": 0.0, "build.graph_us_per_token": 0.0, "build.graph_us_per_mweight": 6010.0}
    soc = load_soc(PAPER, own)
    network = NpuWork(2048, 2048, 256, form="ffn", block=128, width=16384)
    weights = 18 * (network.weights + 2 * 2048 * 2048 + 2 * 256 * 2048)
    assert build_us(soc, 256, weights=weights) == pytest.approx(11.9e6, rel=0.01)


def test_choosing_takes_its_rate():
    work = GpuWork("selection", 30e9, 1e9, 0.0)
    by_operations = gpu_time(load_soc(PAPER), work).alone_us
    assert by_operations == pytest.approx(30e9 / (load_soc(PAPER).gpu.gemm_tflops * 1e6))
    by_rate = gpu_time(load_soc(PAPER, {"gpu.choose_gscores_per_s": 2.0}), work).alone_us
    assert by_rate == pytest.approx(0.5e6)


@pytest.mark.parametrize("waits", [False, True])
def test_a_frame_waits_for_the_queue_or_goes_first(waits):
    costs = ClockCosts(15.0, 75.0, 2.5, 400.0, 300.0, 8.0, 90.0, 0.25, frames_wait=waits)
    clock = SimulatedClock(costs, lambda *_: (1.0, 1.0), GpuLoad(60.0, 3000.0))
    for _ in range(100):
        last = clock.submit(SimulatedJob("kernel", 1000.0))
    clock.wait_for(last)
    # The first frame meets an empty queue.
    assert len(clock.totals.frame_us) == (1 if waits else 8)
    assert max(clock.totals.frame_us) < 4000.0
    clock.sleep(50_000.0)
    clock.wait_idle()
    assert (max(clock.totals.frame_us) > 80_000) is waits


def graph_of(device, weight, number=0):
    shard = LinearShard(shape_only_weight(256, 256, weight), number, "o", ((0, 256),), f"linear {number}")
    return device.npu.prepare(shard, 32)


def test_graphs_beyond_the_most_are_refused():
    device = open_device(f"sim:{PAPER}", simulation=Simulation(overrides={"npu.most_graphs": 2}))
    for number in (0, 1, 0):
        graph_of(device, PACKED, number)
    with pytest.raises(GraphError, match="holds 2 graphs at once, and o of layer 2 would be one more"):
        graph_of(device, PACKED, 2)


def test_the_neural_engine_holds_floats_and_graphs_of_its_size():
    npu = open_device(f"sim:{APPLE}").npu
    assert npu.forms(LinearShape(PACKED, 256), 32) == ()
    assert npu.forms(LinearShape(WeightFormat(16), 256), 32)
    assert npu.graph_weight_bytes == pytest.approx(1.2e9, rel=1e-3)


def test_a_shadow_makes_the_host_wait():
    device = open_device(f"sim:{PAPER}", simulation=Simulation(overrides={"hand_over.shadow_us": 660.0}))
    clock = clock_of(device)
    for kind, wait_us in (("elementwise", 0.0), ("shadow", 660.0)):
        launch = device.gpu.launch(
            *(object(), (), (1,), (1,), "products"), work=lambda kind=kind: GpuWork(kind, 1.0, 1.0, 1.0)
        )
        begin_us = clock.now_us
        launch()
        assert clock.now_us - begin_us == pytest.approx(clock.costs.submit_us + wait_us)
    assert clock.totals.overhead_us["shadow"] == 660.0


def test_apples_dispatch_and_watts_are_npumoes():
    soc = load_soc(APPLE)
    # Figure 8: 1.2 s for 32 layers of a graph for attention and 16 for experts.
    assert soc.npu.execute_us == pytest.approx(1.2e6 / (32 * 17), rel=1e-3)
    for split in (soc.power.mostly_base, soc.power.balanced, soc.power.mostly_active):
        watts = np.add(split.base_watts, [split.npu_watts, split.gpu_watts])
        assert watts == pytest.approx([7.1, 66.8])


def test_figure_8s_other_time_is_that_of_reading_the_experts():
    """2.66 s less 1.2 s of dispatch; nothing was fitted to it."""
    soc = load_soc(APPLE)
    expert = NpuWork(4096, 4096, 64, 16, 0, "ffn", width=6400)
    qkv, o = (NpuWork(rows, 4096, 256, 16, 0, "weight_first") for rows in (6144, 4096))
    layer_us = 16 * npu_time(soc, expert).busy_us + sum(npu_time(soc, one).busy_us for one in (qkv, o))
    assert 32 * layer_us == pytest.approx(1.46e6, rel=0.1)
