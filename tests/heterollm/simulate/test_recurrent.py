"""Models with recurrent state on a simulated phone: all operators have times, which meet the clock."""

from __future__ import annotations

import numpy as np
import pytest

from heterollm.base import OptionError, silent
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.work import work_of
from heterollm.engine import Engine
from heterollm.kernels.devices import open_device
from heterollm.model import KNOWN_MODELS, ModelConfig, op_specs, shape_only_weights
from heterollm.planning import ProfiledModel
from heterollm.planning.planner import solve_plan
from heterollm.planning.techniques.sparse_attention import assumed_heads
from heterollm.simulate.profile import profile_of
from heterollm.solver import AttentionRequest, PlanRequest

SOC = "sim:snapdragon-8gen3"
CONFIG = ModelConfig.from_dict(
    {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
    }
)
"""LFM2-1.2B."""

NET = ModelConfig.from_dict(
    {
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
    }
)
"""Qwen3.5-4B."""

SPACES = KNOWN_MODELS["granite-4.0-h-micro"].config


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (CONFIG, {"conv_in", "conv_out"}),
        (NET, {"delta_in", "delta_out"}),
        (SPACES, {"mamba_in", "mamba_out"}),
        (KNOWN_MODELS["deepseek-v2-lite"].config, {"latent_in", "latent_out"}),
        pytest.param(
            *(KNOWN_MODELS["nemotron-3-nano-30b-a3b"].config, {"mamba_in", "mamba_out"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_passes_take_as_long_as_predicted(config: ModelConfig, groups: set[str]) -> None:
    specs = op_specs(config, "w4a16", 128, True)
    profile = profile_of(open_device(SOC), "tested", config, specs, silent)
    model = ProfiledModel(profile, config, specs, "w4a16")
    plan, device = solve_plan(model, PlanRequest(level="tensor")).plan, open_device(SOC)
    engine = Engine(device, shape_only_weights(config, specs), plan, 512, silent)
    cache, ids = engine.new_cache(), np.zeros(256, np.int32)
    for phase, tokens in (("prefill", 256), ("decode", 1), ("decode", 8)):
        for _ in range(3):  # graphs are built, and waits are learnt
            begin_s = device.now_s()
            if phase == "decode":
                engine.decode_several(cache, 0, ids[:tokens])
            else:
                engine.prefill(cache, 0, ids[:tokens], phase, None)
            took_s = device.now_s() - begin_s
        found = model.predict(plan, phase, tokens, position=0)
        assert found is not None
        assert found.time_us / 1e6 == pytest.approx(took_s, rel=0.05), (phase, tokens)
    assert model.missing == set()
    on_npu = {step.operator for step in engine.steps("prefill", 256) if step.action == "graph"}
    assert groups <= on_npu


def test_sparse_attention_needs_attention_in_all_layers() -> None:
    with pytest.raises(OptionError, match="Only some layers of LFM2 have attention"):
        assumed_heads(CONFIG, AttentionRequest())


def test_sparse_attention_estimates_no_latent_vectors() -> None:
    with pytest.raises(OptionError, match="Heads of DeepSeek-V2 share latent vectors"):
        assumed_heads(KNOWN_MODELS["deepseek-v2-lite"].config, AttentionRequest())


def test_sparse_attention_has_no_sinks() -> None:
    with pytest.raises(OptionError, match="Attention of gpt-oss has sinks"):
        assumed_heads(KNOWN_MODELS["gpt-oss-20b"].config, AttentionRequest())


def test_a_token_reads_the_state_of_every_convolution() -> None:
    specs = op_specs(CONFIG, "w4a16", 128, True)
    read = [
        work_of(CONFIG, specs, Case(0, 1, depth), chunk=512, cache_dtype=np.dtype(np.float16)).read_bytes
        for depth in (99, 199)
    ]
    kept = 6 * 2 * 8 * 64 * 2
    assert read[1] - read[0] == 100 * kept
    assert read[0] == sum(spec.weight_bytes() for spec in specs) + 100 * kept + 10 * 2 * 2048 * 4
