"""A simulated SoC behind the classes of real devices."""

import numpy as np
import pytest

from heterollm.base import GraphError, OptionError
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import concatenate_rows, shape_only_weight
from heterollm.kernels.gpu import (
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GlueKernels,
    GpuLinear,
    HeadShape,
    KvLayer,
    Scores,
)
from heterollm.kernels.npu import LinearShape, LinearShard
from heterollm.kernels.operators.attention import attend
from heterollm.kernels.operators.score_codes import ScoresCase
from heterollm.kernels.ops import WeightFormat
from heterollm.kernels.sim import Simulation, clock_of, soc_of
from heterollm.kernels.sim.soc.gpu_model import gpu_time
from heterollm.kernels.sim.soc.npu_model import ScoresWork, npu_time, scores_time
from heterollm.kernels.sim.soc.power_model import build_us
from heterollm.kernels.sync import prepare_fence, refused_strategies, strategies_for

NAME = "sim:snapdragon-8gen3-paper"
PACKED = WeightFormat(4, 128)


@pytest.fixture
def simulated():
    return open_device(NAME)


def linear_of(device, rows=4096, columns=4096):
    weight = shape_only_weight(rows, columns, PACKED)
    return GpuLinear.pack(device.gpu, [weight], activation_dtype=np.float16)


def launch_of(device, tokens, rows=4096, columns=4096):
    linear = linear_of(device, rows, columns)
    x = device.gpu.shared((tokens, columns), np.float16)
    y = device.gpu.shared((tokens, rows), np.float16)
    return linear.launch(x, y, tokens=tokens, label="linear")


def graph_call(device, tokens, rows=4096, columns=4096):
    part = LinearShard(shape_only_weight(rows, columns, PACKED), 0, "o", ((0, rows),), "shapes")
    graph = device.npu.prepare(part, tokens)
    x = device.gpu.shared((tokens, columns), np.float16)
    y = device.gpu.shared((tokens, rows), np.float16)
    return graph, graph.bind({"x": x.array}, {"y": y.array})


def test_its_times_are_labelled_and_filed_under_its_parameters(simulated):
    description = simulated.description()
    assert simulated.time_kind == description["time"] == "simulated"
    assert simulated.npu.time_kind == "simulated"
    assert soc_of(simulated).digest() in description["gpu_driver"]
    other = open_device(NAME, simulation=Simulation(overrides={"npu.execute_us": 50.0}))
    assert other.name == simulated.name
    assert other.fingerprint() != simulated.fingerprint() == open_device(NAME).fingerprint()


def test_a_launch_takes_the_modelled_time(simulated):
    clock = clock_of(simulated)
    clock.recording = True
    launch = launch_of(simulated, 256)
    launch()
    simulated.gpu.finish()
    [span] = [span for span in clock.spans if span.processor == "gpu"]
    work = launch.work()
    assert work.flops == 2 * 256 * 4096 * 4096
    assert work.read_bytes == PACKED.weight_bytes(4096, 4096) + 2 * 256 * 4096
    assert span.end_us - span.begin_us == pytest.approx(gpu_time(soc_of(simulated), work).alone_us)


def test_attention_takes_longer_the_more_positions_there_are(simulated):
    runtime = simulated.gpu
    layers = GlueKernels(runtime, np.float16, np.float16)
    step = runtime.shared((STEP_WORDS,), np.int32)
    query, out = runtime.shared((1, 4096), np.float32), runtime.shared((1, 4096), np.float16)
    cache = runtime.shared((2 * 8 * 64 * 128,), np.float16)
    sizes = {"shape": HeadShape(32, 8, 128, 4096), "scores": Scores(1.0), "tokens": 1}
    launches = attend(layers, query, KvLayer(cache, STEP_WORDS), out, step, **sizes)
    clock = clock_of(simulated)
    times = []
    for position in (100, 2000):
        step.array[STEP_POSITION], step.array[STEP_LENGTH] = position, 1
        busy_us = clock.totals.busy_us["gpu"]
        for launch in launches:
            launch()
        runtime.finish()
        times.append(clock.totals.busy_us["gpu"] - busy_us)
    assert times[1] > 4 * times[0]


def test_windows_bound_what_attention_reads(simulated):
    layers = GlueKernels(simulated.gpu, np.float16, np.float16)
    step = simulated.gpu.shared((STEP_WORDS,), np.int32)
    query, out = simulated.gpu.shared((64, 256), np.float32), simulated.gpu.shared((64, 256), np.float16)
    cache = simulated.gpu.shared((2 * 2 * 64 * 64,), np.float16)
    sizes = {"shape": HeadShape(4, 2, 64, 256), "tokens": 64}
    for position, rows, window in ((0, 40, 16), (5, 40, 16), (30, 8, 16), (100, 1, 16), (3, 4, 0)):
        step.array[STEP_POSITION], step.array[STEP_LENGTH] = position, rows
        scores = Scores(1.0, window)
        (launch,) = attend(layers, query, KvLayer(cache, STEP_WORDS), out, step, scores=scores, **sizes)
        work = launch.work()
        seen = sum(min(position + t + 1, window or 10**9) for t in range(rows))
        assert work.flops == 4 * seen * 4 * 64, (position, rows, window)


def test_a_graph_takes_the_modelled_time_and_its_shape_is_built_once(simulated):
    clock, soc = clock_of(simulated), soc_of(simulated)
    begin_us = clock.now_us
    graph, call = graph_call(simulated, 256)
    assert clock.now_us - begin_us == pytest.approx(build_us(soc, 256))
    begin_us = clock.now_us
    graph_call(simulated, 256)
    assert clock.now_us == begin_us
    call()
    assert clock.now_us - begin_us == pytest.approx(npu_time(soc, graph.work).alone_us)
    assert simulated.npu.compiled_count == 1


def test_what_a_real_graph_refuses_is_refused(simulated):
    part = LinearShard(shape_only_weight(256, 256, WeightFormat(4, 32)), 0, "o", ((0, 256),), "shapes")
    with pytest.raises(GraphError, match="length"):
        simulated.npu.prepare(part, 100)
    graph = simulated.npu.prepare(part, 32)
    x = np.zeros((32, 256), np.float16)
    with pytest.raises(GraphError):
        graph.bind({"x": x}, {"y": np.zeros((32, 128), np.float16)})
    with pytest.raises(GraphError, match="overlap"):
        graph.bind({"x": x}, {"y": x})


def test_attention_scores_take_their_time_and_have_the_numbers_of_a_real_graph():
    device = open_device(NAME, simulation=Simulation(numerics=True))
    case = ScoresCase(2, 128, 256, 64)
    found, exact = case.on_npu(device.npu)
    assert np.abs(found - exact).max() <= 1
    shard, inputs, _ = case.data()
    call = device.npu.prepare(shard, 128).bind(inputs, {"scores": np.zeros(exact.shape, np.uint8)})
    begin_us = clock_of(device).now_us
    call()
    time = scores_time(soc_of(device), ScoresWork(2, 128, 256, 64))
    assert clock_of(device).now_us - begin_us == pytest.approx(time.alone_us)
    baseline = open_device(NAME, simulation=Simulation(every_form=False))
    with pytest.raises(GraphError, match="cannot compute scores of 2 heads"):
        baseline.npu.prepare(shard, 128)


def test_own_forms_can_be_left_out_and_lengths_added():
    every = open_device(NAME, simulation=Simulation(lengths=(135,)))
    baseline = open_device(NAME, simulation=Simulation(every_form=False))
    forms = [device.npu.forms(LinearShape(PACKED, 14336), 256) for device in (every, baseline)]
    assert forms == [("matmul_nbits", "k_chunked"), ("matmul_nbits",)]
    assert 135 in every.standard_lengths
    assert 135 not in baseline.standard_lengths
    assert every.fingerprint() != baseline.fingerprint()


def test_hand_overs_cost_what_the_parameters_say(simulated):
    clock, soc = clock_of(simulated), soc_of(simulated)
    assert strategies_for(simulated.gpu) == ("finish", "event", "poll", "sleep_poll")
    assert "flag" in refused_strategies(simulated.gpu)
    launch = launch_of(simulated, 256)
    late = {}
    for strategy in strategies_for(simulated.gpu):
        hand_over = prepare_fence(simulated.gpu, strategy, "test")
        for _ in range(20):
            event = launch()
            hand_over()
            late[strategy] = clock.now_us - event.end / 1e3
            graph_call(simulated, 1)[1]()
            simulated.gpu.finish()
    own = soc.hand_over
    assert late["finish"] == pytest.approx(own.finish_us + own.write_us, abs=0.01)
    assert late["event"] == pytest.approx(own.finish_us, abs=0.01)
    assert late["poll"] == pytest.approx(own.poll_us, abs=0.01)
    # It has learnt when to wake up, though a sleep comes back late.
    assert 0 <= late["sleep_poll"] <= own.poll_us + 0.01


def test_sleeping_leaves_the_core_to_others(simulated):
    launch, busy = launch_of(simulated, 256), {}
    for strategy in ("poll", "sleep_poll"):
        hand_over = prepare_fence(simulated.gpu, strategy, "test")
        for _ in range(20):
            launch()
            before_ns = simulated.gpu.processor_ns()[0]
            hand_over()
            busy[strategy] = simulated.gpu.processor_ns()[0] - before_ns
    assert busy["sleep_poll"] < 0.5 * busy["poll"]


def test_shapes_alone_take_no_memory():
    weight = shape_only_weight(1 << 20, 1 << 14, WeightFormat(4, 128, symmetric=False))
    assert weight.format == WeightFormat(4, 128, symmetric=False)
    both = concatenate_rows([weight, weight])
    assert both.rows == 2 << 20
    assert both.codes.base.nbytes <= 16


@pytest.mark.parametrize("name", ["sim:", "sim:no-such-soc", "sim:/tmp", "sim:\0"])
def test_names_of_no_soc_are_refused(name):
    with pytest.raises(OptionError):
        open_device(name)


def test_an_override_must_name_a_parameter():
    with pytest.raises(OptionError):
        open_device(NAME, simulation=Simulation(overrides={"npu.warp": 9.0}))
