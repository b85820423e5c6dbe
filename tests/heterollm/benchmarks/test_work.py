"""What a test computes and reads, who does it, and how near that comes to what the device can do."""

import numpy as np
import pytest

from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.shares import predicted_us, shares_of
from heterollm.benchmarks.work import Ceilings, Work, achieved, ceilings_of, passes_of, work_of
from heterollm.data import bundled_model
from heterollm.kernels.ops import ffn_specs
from heterollm.model import ModelConfig, op_specs, shape_of_specs
from heterollm.planning import ProfiledModel
from heterollm.profiler.records import BandwidthKey, LinearKey, LinearPoint, Profile, Record
from heterollm.solver import Plan, level_plan, model_shape
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry

CONFIG = ModelConfig.from_folder(bundled_model())
SPECS = op_specs(CONFIG, "w4a16", 32, True, float_bits=32)
STANDARD = (1, 32, 64, 128, 256, 512)
LAYERS = [spec for spec in SPECS if spec.group != "head"]
HEAD = SPECS[-1]
FLOAT32 = np.dtype(np.float32)


def level(name, policy="padding", chunk=512):
    return level_plan(
        name,
        SPECS,
        device="host",
        precision="w4a16",
        standard_lengths=STANDARD,
        chunk_length=chunk,
        length_policy=policy,
    )


def test_passes_are_chunks_and_then_tokens():
    assert passes_of(Case(600, 2, 10), 512) == [
        (512, 10, False),
        (88, 522, True),
        (1, 610, True),
        (1, 611, True),
    ]
    assert passes_of(Case(0, 1), 512) == [(1, 0, True)]


def test_a_token_reads_every_weight_once_and_the_cache():
    work = work_of(CONFIG, SPECS, Case(0, 1, 99), chunk=512, cache_dtype=FLOAT32)
    weights = sum(spec.weight_bytes() for spec in SPECS)
    positions = 100 * CONFIG.layers * 2 * CONFIG.attention.kv_heads
    assert work.read_bytes == weights + positions * CONFIG.attention.head_dim * 4
    codes = work_of(CONFIG, SPECS, Case(0, 1, 99), chunk=512, cache_dtype=np.dtype(np.int8))
    assert codes.read_bytes == weights + positions * (CONFIG.attention.head_dim + 4)
    linear = sum(2 * spec.rows * spec.columns for spec in SPECS)
    attention = 4 * 100 * CONFIG.layers * CONFIG.attention.heads * CONFIG.attention.head_dim
    assert work.flops == linear + attention


def test_a_prompt_in_pieces_computes_the_same_and_reads_the_weights_again():
    whole, pieces = (
        work_of(CONFIG, SPECS, Case(256, 0), chunk=chunk, cache_dtype=FLOAT32) for chunk in (256, 64)
    )
    assert pieces.flops == whole.flops
    assert pieces.read_bytes > whole.read_bytes + 2 * sum(spec.weight_bytes() for spec in LAYERS)
    floats = work_of(CONFIG, SPECS, Case(256, 0), chunk=256, cache_dtype=FLOAT32, weight_itemsize=4)
    assert floats.read_bytes > 4 * whole.read_bytes


@pytest.mark.parametrize(
    ("name", "policy", "case", "share", "padded", "processors"),
    [
        ("gpu", "padding", Case(300, 4), 1.0, 0, ("gpu",)),
        ("npu", "padding", Case(300, 4), 0.0, 212, ("npu",)),
        ("npu", "pipe", Case(300, 4), 0.0, 20, ("npu",)),
        ("npu", "pipe", Case(612, 0), 0.0, 28, ("npu",)),
        ("layer", "padding", Case(0, 4), 1.0, 0, ("gpu",)),
    ],
)
def test_levels_share_the_work_as_their_rules_say(name, policy, case, share, padded, processors):
    plan = level(name, policy)
    found = shares_of(plan, SPECS, case, chunk=plan.chunk_length)
    assert found.gpu_share == pytest.approx(share)
    assert found.padded_tokens == padded
    assert found.processors == processors
    assert found.split_groups == ()


def test_at_layer_level_the_gpu_has_the_head_of_a_prompt():
    found = shares_of(level("layer"), SPECS, Case(32, 0), chunk=512)
    head, rest = HEAD.flops(1), sum(spec.flops(32) for spec in LAYERS)
    assert found.gpu_share == pytest.approx(head / (head + rest))


def test_cuts_count_by_rows_and_tokens():
    half = {spec.group: tuple(rows // 2 for rows in spec.member_rows) for spec in SPECS}
    placements = {
        "qkv": RowsPlacement(half["qkv"], (64,)),
        "o": RowsPlacement(next(spec for spec in SPECS if spec.group == "o").member_rows, (32,)),
    }
    entries = tuple(
        PlanEntry(phase, (1, 64), (-1, CONFIG.layers), spec.group, placements.get(spec.group, GPU_ONLY))
        for phase in ("prefill", "decode")
        for spec in (*SPECS[:4], HEAD)
    )
    plan = Plan("mine", "host", "w4a16", model_shape(SPECS), 64, entries)
    found = shares_of(plan, SPECS, Case(64, 0), chunk=64)
    on_npu = sum(spec.flops(64) / 2 for spec in LAYERS if spec.group in ("qkv", "o"))
    total = sum(spec.flops(64) for spec in LAYERS) + HEAD.flops(1)
    assert found.gpu_share == pytest.approx(1 - on_npu / total)
    assert found.split_groups == ("qkv", "o")
    assert found.processors == ("gpu", "npu")


def test_a_block_counts_for_the_groups_that_it_stands_for():
    block = ffn_specs(SPECS)[0]
    quarter = tuple(rows // 4 for rows in block.member_rows)
    entries = [PlanEntry("prefill", (1, 64), (0, CONFIG.layers), "ffn", FfnPlacement(quarter[0], (64,)))]
    entries += [PlanEntry("prefill", (1, 64), (-1, 99), spec.group, GPU_ONLY) for spec in (*SPECS[:2], HEAD)]
    plan = Plan("mine", "host", "w4a16", model_shape(SPECS), 64, tuple(entries))
    found = shares_of(plan, SPECS, Case(64, 0), chunk=64)
    blocks = sum(spec.flops(64) for spec in LAYERS if spec.group in ("gate_up", "down"))
    total = sum(spec.flops(64) for spec in LAYERS) + HEAD.flops(1)
    assert found.gpu_share == pytest.approx(1 - blocks / 4 / total)
    assert found.split_groups == ("ffn",)


@pytest.fixture
def profiled():
    """The model on a made-up profile: 10 operations a nanosecond on the GPU, half that on the NPU."""
    profile = Profile(
        {
            "device": "host",
            "time": "real",
            "npu": "one",
            "npu_copies_by_length": False,
            "cache_bytes": 2**40,
            "npu_standard_lengths": list(STANDARD),
            "npu_row_alignment": 64,
        }
    )
    for spec in (*SPECS[:4], HEAD):
        halves = tuple(rows // 2 for rows in spec.member_rows)
        for rows in (spec.member_rows, halves):
            for tokens in STANDARD:
                for part, form, factor in (("gpu", "", 1e4), ("npu", "matmul_nbits", 5e3)):
                    point = LinearPoint.of(spec, tokens, member_rows=rows, form=form, streamed=False)
                    profile.add(Record(LinearKey(part, point, "code"), (1.0 + point.flops / factor,)))
    for part, gbps in (("gpu", 20.0), ("npu", 30.0)):
        profile.add(Record(BandwidthKey(part, 2**20, False), (1.0,), values={"gbps": gbps}))
        profile.add(Record(BandwidthKey(part, 2**20, True), (1.0,), values={"gbps": 0.7 * gbps}))
    shape = shape_of_specs(CONFIG, SPECS, "model")
    assert not shape.streamed(2**40)
    return ProfiledModel(profile, CONFIG, SPECS, "w4a16")


def test_predictions_add_up_the_groups_of_every_pass(profiled):
    gpu = predicted_us(profiled, level("gpu"), Case(256, 0))
    by_hand = sum(1.0 + spec.flops(256) / 1e4 for spec in LAYERS) + 1.0 + HEAD.flops(1) / 1e4
    assert gpu == pytest.approx(by_hand, rel=0.02)
    npu = predicted_us(profiled, level("npu"), Case(256, 0))
    assert npu == pytest.approx(2 * by_hand, rel=0.02)
    tokens = predicted_us(profiled, level("gpu"), Case(256, 10))
    one = sum(1.0 + spec.flops(1) / 1e4 for spec in SPECS)
    assert tokens == pytest.approx(gpu + 10 * one, rel=0.02)
    # Padding to 512 costs the NPU what 512 tokens do; the pipe hardly more than 300.
    padded, piped = (
        predicted_us(profiled, level("npu", policy), Case(300, 0)) for policy in ("padding", "pipe")
    )
    assert padded / piped == pytest.approx(512 / 320, rel=0.05)


def test_ceilings_are_of_the_parts_that_work(profiled):
    profile = profiled.profile
    alone = ceilings_of(profile, ("gpu",), integer_inputs=False)
    both = ceilings_of(profile, ("gpu", "npu"), integer_inputs=False)
    assert (alone.gbps, both.gbps) == (20.0, pytest.approx(35.0))
    assert both.gflops == pytest.approx(1.5 * alone.gflops, rel=0.01)
    assert ceilings_of(profile, ("gpu",), integer_inputs=True) is None


@pytest.mark.parametrize(
    ("time_us", "bound", "fraction"),
    [(100.0, "memory", 0.9), (60.0, "memory", 1.5), (300.0, "overhead", 0.3)],
)
def test_what_bounds_a_time_is_the_nearer_ceiling(time_us, bound, fraction):
    found = achieved(Work(read_bytes=1.8e6, flops=1e6), time_us, Ceilings(gbps=20.0, gflops=100.0))
    assert found["bound"] == bound
    assert found["gbps_fraction"] == pytest.approx(fraction)
    assert found["achieved_gbps"] == pytest.approx(1800 / time_us)
    assert achieved(Work(1e3, 9e6), 100.0, Ceilings(20.0, 100.0))["bound"] == "compute"
    assert achieved(Work(1.0, 1.0), 1.0, None).keys() == {"achieved_gbps", "achieved_gflops"}


def test_a_token_of_a_mixture_reads_its_experts_alone():
    config = ModelConfig.from_dict(
        {
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "vocab_size": 512,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
        }
    )
    specs = op_specs(config, "w4a16", 32, True, float_bits=32)
    weights = sum(spec.weight_bytes() for spec in specs)
    expert = 3 * 256 * 64
    cache_bytes = 100 * config.layers * 2 * config.attention.kv_heads * config.attention.head_dim * 4
    token = work_of(config, specs, Case(0, 1, 99), chunk=512, cache_dtype=FLOAT32)
    # A scale of two bytes for each block of 32.
    assert token.read_bytes == weights + 2 * 4 * expert * (0.5 + 2 / 32) + cache_bytes
    floats = work_of(config, specs, Case(0, 1, 99), chunk=512, cache_dtype=FLOAT32, weight_itemsize=4)
    assert (
        floats.read_bytes
        == 4 * sum(one.rows * one.columns for one in specs) + 32 * 4 * expert / 4 + cache_bytes
    )
    # Many tokens read nearly all experts, and each once.
    prompt = work_of(config, specs, Case(256, 0), chunk=512, cache_dtype=FLOAT32)
    cache_bytes = 256 * config.layers * 2 * config.attention.kv_heads * config.attention.head_dim * 4
    assert prompt.read_bytes == pytest.approx(weights + 2 * 16 * expert * (0.5 + 2 / 32) + cache_bytes)
