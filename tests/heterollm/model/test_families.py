"""Every family against transformers; and each of its features, which taken away must be seen."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB

import heterollm.loading
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import ModelConfig, RopeConfig, expert_specs
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.blocks import FfnBlock, LayerInputBlock, MambaBlock, MixtureBlock
from heterollm.model.layers import AnyBlock, LayerConfig
from heterollm.model.layout import other_name

Reference = Callable[[LLM, Path, list[int]], np.ndarray]
Oracle = Callable[..., np.ndarray]

LEVELS = ("gpu", "npu", "layer")
# Families that cost a declaration and no code.
DECLARED = (
    *("gemma", "granite", "stablelm", "seed_oss", "ministral", "cwm", "mellum", "granitemoehybrid"),
    *("ernie4_5", "glm", "glm4", "starcoder2", "nemotron", "arcee", "olmo2", "olmo3", "exaone4"),
    *(
        "apertus",
        "bitnet",
        "internlm3",
        "lfm3",
        "ministral3",
        "hunyuan_v1_dense",
        "cohere2",
        "exaone",
        "olmo",
        "granite_swa",
    ),
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # The remaining rows vary a family that conftest.py lists.
    "mistral": ("mistral", {}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2 with window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma3n": ("gemma3n_text", {}),
    "muse_glimmer_text": ("muse_glimmer_text", {}),
    "gemma4": ("gemma4_text", {}),
    "gemma4 with experts": ("gemma4_text with experts", {}),
    "gemma4 in one stream": ("gemma4_unified_text", {}),
    "smollm3": ("smollm3", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    **{name: (name, {}) for name in ("glm4_moe", "dots1", "exaone_moe")},
    "qwen3_moe": ("qwen3_moe", {}),
    "olmoe": ("olmoe", {}),
    "phimoe": ("phimoe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "llama4_text": ("llama4_text", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoeshared": ("granitemoeshared", {}),
    **{
        name: (name, {})
        for name in ("phi", "opt", "lfm2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", *DECLARED)
    },
    "gpt_neox": ("gpt_neox", {}),
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True}),
    "gpt_neox in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "granite 4 without positions": ("granitemoehybrid", {"position_embedding_type": None}),
    "qwen3_next with a dense layer": ("qwen3_next", {"mlp_only_layers": [1]}),
    "granitemoehybrid with state spaces": ("granitemoehybrid with state spaces", {}),
    "nemotron_h": ("nemotron_h", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 with groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1 with a norm": ("falcon_h1", {"mamba_rms_norm": True}),
    "falcon_h1 with a norm behind": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "granite 4-H with experts": (
        "granitemoehybrid with state spaces",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "mamba_conv_bias": False},
    ),
    "granite 4 with experts": ("granitemoehybrid", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}
VARIANTS = (
    *("mistral without window", "qwen2 with window", "llama with biases"),
    *("granite 4 without positions", "granite 4 with experts", "stablelm in parallel"),
    "gpt_neox in sequence",
    "gemma4 in one stream",
    "qwen3_next with a dense layer",
    "granite 4-H with experts",
    "deepseek_v2 with groups",
    *("falcon_h1 with a norm", "falcon_h1 with a norm behind"),
)

# The NPU has linears alone: a family of each kind of block runs them there. The level layer runs the same
# graphs with the kernels of gpu.
IN_LAYERS = (
    *("llama with biases", "gemma3", "gemma3n", "gpt_oss", "phi", "lfm2", "qwen3_5_moe_text"),
    *("nemotron_h", "deepseek_v3"),
)
ON_NPU = (
    *IN_LAYERS,
    *("mistral", "phi3", "gemma2", "muse_glimmer_text", "gemma4", "gemma4 with experts", "llama4_text"),
    *("qwen2_moe", "lfm2_moe", "opt", "gpt_neox", "falcon_h1", "granitemoehybrid with state spaces"),
)
SLOW = (
    *((name, "layer") for name in MODELS if name not in IN_LAYERS),
    *((name, "npu") for name in MODELS if name not in ON_NPU),
)
PROMPT, STEPS = 70, 5
# By default one of each kind of layers: plain, recurrent, of several shapes, without norms before blocks,
# with experts, with state spaces, latent.
GREEDY = ("gemma", "qwen3_5_text", "gemma4", "olmo2", "gpt_oss", "nemotron_h", "deepseek_v3")


def within_gates(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Whether logits ``[m, vocab]`` are within FP32's gates, over all and in the worst row and column."""
    gate = LOGITS_SQNR_DB["fp32"]
    error, power = np.square(actual - expected), np.square(expected)
    worst = min(
        10 * np.log10((power.sum(axis) / np.maximum(error.sum(axis), 1e-300)).min()) for axis in (0, 1)
    )
    return sqnr_db(actual, expected) >= gate and bool(worst >= gate - LOGITS_WORST_DROP_DB)


@pytest.fixture(scope="module")
def oracle(reference: Reference) -> Oracle:
    """Return a function that gives transformers' logits of a checkpoint's weights, computed once."""
    known: dict[tuple[Path, int], np.ndarray] = {}

    def logits(folder: Path, ids: list[int], loaded: LLM | None = None) -> np.ndarray:
        key = (folder, len(ids))
        if key not in known:
            with contextlib.nullcontext(loaded) if loaded else LLM.load(folder, device="host") as llm:
                known[key] = reference(llm, folder, ids)
        return known[key]

    return logits


def all_logits(llm: LLM, ids: list[int], pieces: tuple[int, ...] = (PROMPT,)) -> np.ndarray:
    """Prefill in pieces, the rest token by token; logits of every position."""
    session, rows, first = llm.session(), [], 0
    for piece in pieces:
        rows.append(session.prefill(ids[first : first + piece], all_logits=True))
        first += piece
    return np.concatenate([*rows, *(session.decode(token)[None] for token in ids[first:])])


@pytest.mark.parametrize(
    ("name", "level"),
    # For the variants the level npu would only run the graphs of layer again.
    [
        pytest.param(name, level, marks=[pytest.mark.slow] if (name, level) in SLOW else [])
        for name in MODELS
        for level in LEVELS
        if level != "npu" or name not in VARIANTS
    ],
)
def test_logits_beyond_the_window(
    name: str,
    level: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    oracle: Oracle,
    token_ids: Callable[[int], list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    """A prompt longer than the window at once, the same in pieces that begin behind it, and decode."""
    family, overrides = MODELS[name]
    folder = checkpoint(family, **overrides)
    llm = host_llm(folder, plan=level)
    ids = token_ids(PROMPT + STEPS)
    expected = oracle(folder, ids, llm)
    whole = all_logits(llm, ids)
    record_property("sqnr_db", float(sqnr_db(whole, expected)))
    assert within_gates(whole, expected)
    assert within_gates(all_logits(llm, ids, (33, 1, 30)), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in GREEDY else pytest.mark.slow) for name in MODELS]
)
def test_a_greedy_answer_is_that_of_transformers(
    name: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Reference,
    token_ids: Callable[[int], list[int]],
) -> None:
    """64 tokens, each of which must be the likeliest after those before it; windows end within them."""
    family, overrides = MODELS[name]
    folder, ids = checkpoint(family, **overrides), token_ids(13)
    llm = host_llm(folder, plan="layer", context=128)
    answer = llm.generate(ids, max_new_tokens=64, temperature=0.0, ignore_eos=True).token_ids
    expected = reference(llm, folder, [*ids, *answer])[len(ids) - 1 : -1]
    assert answer == tuple(expected.argmax(axis=1).tolist())


@pytest.mark.parametrize(
    "family", ["phi3", "granitemoe", "gpt_oss", pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_float_weights(
    family: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Reference,
    token_ids: Callable[[int], list[int]],
) -> None:
    """Fused tensors and those that a tied head shares, unquantised."""
    folder = checkpoint(family)
    llm = host_llm(folder, plan="layer", precision="fp16")
    ids = token_ids(PROMPT + STEPS)
    assert within_gates(all_logits(llm, ids), reference(llm, folder, ids))


def test_short_factors_up_to_the_original_context(
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Reference,
    token_ids: Callable[[int], list[int]],
) -> None:
    folder, ids = checkpoint("phi3"), token_ids(32)
    llm = host_llm(folder, plan="gpu", context=32)
    assert within_gates(all_logits(llm, ids, (28,)), reference(llm, folder, ids))


def test_truncating_below_the_window_brings_old_keys_back(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    llm, ids = host_llm(checkpoint("mistral"), plan="gpu"), token_ids(60)
    session = llm.session()
    session.prefill(ids)
    session.truncate(25)
    actual = session.prefill(ids[25:40])
    np.testing.assert_allclose(actual, llm.session().prefill(ids[:40]), rtol=1e-4, atol=1e-4)


# -- each feature taken away ---------------------------------------------------------------------------------


def changed(config: ModelConfig, kind: type[AnyBlock], change: Callable[[AnyBlock], Any]) -> dict[str, Any]:
    """Return the layers with other blocks of a kind."""
    layers = []
    for layer in config.per_layer:
        stages = [
            dataclasses.replace(
                stage, blocks=tuple(change(one) if isinstance(one, kind) else one for one in stage.blocks)
            )
            for stage in layer.stages
        ]
        layers.append(dataclasses.replace(layer, stages=tuple(stages)))
    return {"per_layer": tuple(layers)}


def attention(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    return changed(config, AttentionBlock, lambda block: dataclasses.replace(block, **changes))


def mixture(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    return changed(config, MixtureBlock, lambda block: dataclasses.replace(block, **changes))


def each_layer(config: ModelConfig, change: Callable[[LayerConfig], LayerConfig]) -> dict[str, Any]:
    return {"per_layer": tuple(map(change, config.per_layer))}


def each_stage(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    return each_layer(
        config,
        lambda layer: dataclasses.replace(
            layer, stages=tuple(dataclasses.replace(stage, **changes) for stage in layer.stages)
        ),
    )


def unstretched(config: ModelConfig) -> dict[str, Any]:
    return attention(config, rope=dataclasses.replace(config.rope, base=100.0))


def normed_stages(config: ModelConfig) -> dict[str, Any]:
    layers = []
    for layer in config.per_layer:
        stages = [dataclasses.replace(stage, norm=stage.output_norm) for stage in layer.stages]
        layers.append(LayerConfig(tuple(stages)))
    return {"per_layer": tuple(layers)}


def one_after_the_other(config: ModelConfig) -> dict[str, Any]:
    layers = []
    for layer in config.per_layer:
        pairs = [(stage, block) for stage in layer.stages for block in stage.blocks]
        stages = [dataclasses.replace(stage, blocks=(block,)) for stage, block in pairs]
        layers.append(LayerConfig(tuple(stages)))
    return {"per_layer": tuple(layers)}


def plain_rope(config: ModelConfig) -> dict[str, Any]:
    def plain(block: AttentionBlock) -> AttentionBlock:
        return block if block.rope is None else dataclasses.replace(block, rope=unscaled(block.rope))

    return changed(config, AttentionBlock, plain)


def one_base(config: ModelConfig) -> dict[str, Any]:
    def alike(block: AttentionBlock) -> AttentionBlock:
        return dataclasses.replace(block, rope=block.rope and config.rope)

    return changed(config, AttentionBlock, alike)


def wholly_turning(config: ModelConfig) -> dict[str, Any]:
    own = config.attention
    rope = config.rope
    if rope.kind == "longrope":
        factors = rope.long_factor + (own.head_dim - own.rotary_dim) // 2 * (1.0,)
        rope = dataclasses.replace(rope, long_factor=factors)
    return attention(config, rotary_dim=own.head_dim, rope=rope)


def other_routing(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    def routed(block: MixtureBlock) -> MixtureBlock:
        return dataclasses.replace(block, routing=dataclasses.replace(block.routing, **changes))

    return changed(config, MixtureBlock, routed)


def unscaled(rope: RopeConfig) -> RopeConfig:
    return dataclasses.replace(rope, kind="default")


REMOVALS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "window": lambda config: attention(config, window=0),
    "chunks": lambda config: attention(config, chunked=False),
    "weights of inputs": lambda config: mixture(config, weighs_inputs=False),
    "layers without window": lambda config: attention(config, window=20),
    "layers without positions": lambda config: attention(config, rope=config.rope),
    "positions of sliding layers": lambda config: attention(config, rope=config.rope),
    "scaled positions": plain_rope,
    "bases of layers": one_base,
    "part of the pairs": plain_rope,
    "norms of values": lambda config: attention(config, value_norms=False),
    "factors of layers": lambda config: each_layer(config, lambda one: LayerConfig(one.stages)),
    "norms of blocks": lambda config: each_stage(config, own_norms={}),
    "norm of the router": lambda config: mixture(config, router_normed=False),
    "factors of experts": lambda config: mixture(config, scaled=False),
    "activation beside embeddings of layers": lambda config: changed(
        config, LayerInputBlock, lambda one: dataclasses.replace(one, activation="silu")
    ),
    "partly turning heads": wholly_turning,
    "norms of heads": lambda config: attention(config, head_norms=False),
    "norms of heads behind positions": lambda config: attention(config, norms_last=False),
    "stretched positions": unstretched,
    "growth of queries": lambda config: attention(config, query_growth=None),
    "norms of outputs": lambda config: each_stage(config, output_norm=None),
    "stages without a norm before": normed_stages,
    "norm offset": lambda _config: {"norm_offset": 0.0},
    "embedding scale": lambda _config: {"embedding_scale": 1.0},
    "attention scale": lambda config: attention(config, scale=config.attention.head_dim**-0.5),
    "attention soft cap": lambda config: attention(config, soft_cap=0.0),
    "logit soft cap": lambda _config: {"logit_soft_cap": 0.0},
    "activation": lambda config: changed(
        config, FfnBlock, lambda one: dataclasses.replace(one, activation="silu")
    ),
    "biases of q, k and v": lambda config: attention(config, qkv_bias=False),
    "bias of attention": lambda config: attention(config, o_bias=False),
    "biases of the feed-forward": lambda config: changed(
        config, FfnBlock, lambda one: dataclasses.replace(one, biased=False)
    ),
    "norm of the output of attention": lambda config: attention(config, inner_norm=False),
    "norm of the embedding": lambda _config: {"norms_embedding": False},
    "eps of outputs": lambda config: {"output_norm_eps": config.rms_norm_eps},
    "offset of the last norm": lambda config: {"final_norm_offset": config.norm_offset},
    "sparse gates": lambda config: changed(
        config, FfnBlock, lambda one: dataclasses.replace(one, sparsity=0.0)
    ),
    "half of both branches": lambda config: each_stage(config, gain=1.0),
    "factors beside embeddings of layers": lambda config: each_layer(
        config, lambda one: dataclasses.replace(one, streams=dataclasses.replace(one.streams, scaled=False))
    ),
    "norm inside the network": lambda config: changed(
        config, FfnBlock, lambda one: dataclasses.replace(one, inner_norm=False)
    ),
    "bias of the head": lambda _config: {"head_bias": False},
    "one norm of all heads": lambda config: attention(config, head_norms=False, joint_head_norms=False),
    "limit of q, k and v": lambda config: attention(config, qkv_limit=0.0),
    "means of norms": lambda _config: {"centered_norms": False},
    "normalised weights": lambda config: other_routing(config, normalized=False),
    "weights as they are": lambda config: other_routing(config, normalized=True),
    "all chosen experts": lambda config: other_routing(config, chosen=1),
    "sigmoid": lambda config: other_routing(config, scoring="softmax"),
    "groups of experts": lambda config: other_routing(config, groups=1, kept_groups=1),
    "bias of the choice": lambda config: other_routing(config, biased=False),
    "factor of experts": lambda config: other_routing(config, scale=1.0),
    "sparsemixer": lambda config: other_routing(config, scoring="softmax"),
    "jitter": lambda config: other_routing(config, jitter=0.01),
    "sinks": lambda config: attention(config, sinks=False),
    "bounds of experts": lambda config: changed(
        config, MixtureBlock, lambda one: dataclasses.replace(one, clip=None)
    ),
    "slope of experts": lambda config: changed(
        config, MixtureBlock, lambda one: dataclasses.replace(one, clip=one.clip._replace(slope=1.0))
    ),
    "biases of router and experts": lambda config: changed(
        config, MixtureBlock, lambda one: dataclasses.replace(one, biased=False)
    ),
    "scale of logits": lambda _config: {"logit_scale": 1.0},
    "learned positions": lambda _config: {"learned_positions": False},
    "gate of tokens": lambda config: changed(
        config, FfnBlock, lambda one: dataclasses.replace(one, token_gated=False)
    ),
    "blocks side by side": one_after_the_other,
    "output gate": lambda config: attention(config, gated=False),
    "norm of state spaces": lambda config: changed(
        config, MambaBlock, lambda one: dataclasses.replace(one, normed=False)
    ),
    "norm behind the gate": lambda config: changed(
        config, MambaBlock, lambda one: dataclasses.replace(one, gate_first=False)
    ),
}
GEMMA = (
    *("window", "layers without window", "norms of outputs", "norm offset", "embedding scale"),
    *("attention scale", "logit soft cap", "activation"),
)
BIASES = ("biases of q, k and v", "bias of attention", "biases of the feed-forward")
FEATURES: dict[str, tuple[str, ...]] = {
    "mistral": ("window",),
    "qwen2 with window": ("window", "biases of q, k and v"),
    "qwen3": ("norms of heads", "biases of q, k and v", "bias of attention"),
    "phi3": ("window", "scaled positions", "partly turning heads"),
    "gemma2": (*GEMMA, "attention soft cap"),
    "gemma3": (*GEMMA, "norms of heads", "positions of sliding layers", "scaled positions"),
    "gemma3n": (
        *("window", "layers without window", "embedding scale", "logit soft cap"),
        *("activation", "norms of heads", "norms of values", "positions of sliding layers"),
        *("activation beside embeddings of layers", "attention scale", "sparse gates"),
        *("half of both branches", "factors beside embeddings of layers"),
    ),
    "muse_glimmer_text": (
        *("window", "layers without window", "layers without positions", "norms of outputs", "norm offset"),
        *("attention scale", "logit soft cap", "scale of logits", "norms of heads", "output gate"),
        *("norm of the embedding", "eps of outputs", "offset of the last norm"),
    ),
    "gemma4": (
        *("window", "layers without window", "norms of outputs", "embedding scale", "logit soft cap"),
        *("activation", "norms of heads", "part of the pairs", "norms of values", "factors of layers"),
        *("activation beside embeddings of layers", "attention scale"),
    ),
    "gemma4 with experts": (
        *("norms of blocks", "norm of the router", "factors of experts"),
        *("norms of outputs", "all chosen experts"),
    ),
    "smollm3": ("window", "layers without positions", *BIASES),
    "mixtral": ("window", "normalised weights", "all chosen experts"),
    "qwen2_moe": ("window", "biases of q, k and v", "weights as they are", "gate of tokens"),
    "qwen3_moe": ("window", "norms of heads", "biases of q, k and v", "normalised weights"),
    "olmoe": ("one norm of all heads", "limit of q, k and v", "weights as they are", "biases of q, k and v"),
    "phimoe": (
        *("window", "means of norms", "sparsemixer", "jitter", "bias of the head", "scaled positions"),
        *("biases of q, k and v", "bias of attention"),
    ),
    "gpt_oss": (
        *("window", "layers without window", "scaled positions", "biases of q, k and v", "bias of attention"),
        *("sinks", "bounds of experts", "slope of experts", "biases of router and experts"),
        *("all chosen experts", "normalised weights"),
    ),
    "llama4_text": (
        *("chunks", "layers without window", "layers without positions", "norms of heads"),
        *("growth of queries", "sigmoid", "weights of inputs"),
        *("biases of q, k and v", "bias of attention"),
    ),
    "granitemoe": ("embedding scale", "attention scale", "scale of logits", "bias of attention"),
    "granitemoeshared": ("embedding scale", "scale of logits"),
    "gemma": ("norm offset", "embedding scale", "activation", "biases of q, k and v", "bias of attention"),
    "granite": ("embedding scale", "attention scale", "scale of logits", *BIASES),
    "granite_swa": (
        *("window", "layers without window", "sinks", "layers without positions", "bases of layers"),
        *("embedding scale", "attention scale", "scale of logits"),
    ),
    "stablelm": ("means of norms", "partly turning heads", "biases of q, k and v"),
    "seed_oss": ("biases of q, k and v", "biases of the feed-forward"),
    "ministral": ("window", "layers without window"),
    "cwm": ("window", "layers without window"),
    "mellum": ("window", "layers without window", "positions of sliding layers", "norms of heads"),
    "ernie4_5": BIASES,
    "glm": ("partly turning heads", "biases of q, k and v"),
    "glm4": ("partly turning heads", "biases of q, k and v", "norms of outputs"),
    "granitemoehybrid": ("embedding scale", "attention scale", "scale of logits"),
    "granitemoehybrid with state spaces": (
        *("embedding scale", "attention scale", "scale of logits", "layers without positions"),
        "norm behind the gate",
    ),
    "nemotron_h": (
        *("activation", "layers without positions", "norm behind the gate", "biases of the feed-forward"),
        *("sigmoid", "bias of the choice", "factor of experts", "normalised weights"),
    ),
    "deepseek_v2": ("scaled positions", "factor of experts", "weights as they are"),
    "deepseek_v2 with groups": ("groups of experts",),
    "deepseek_v3": (
        *("scaled positions", "groups of experts", "sigmoid", "bias of the choice", "factor of experts"),
        "normalised weights",
    ),
    "glm4_moe_lite": ("sigmoid", "bias of the choice", "factor of experts", "normalised weights"),
    "falcon_h1": ("embedding scale", "scale of logits", "blocks side by side"),
    "falcon_h1 with a norm": ("norm of state spaces",),
    "falcon_h1 with a norm behind": ("norm behind the gate",),
    "phi": (
        *("means of norms", "partly turning heads", "activation", "blocks side by side"),
        *(*BIASES, "bias of the head"),
    ),
    "gpt_neox": (
        *("means of norms", "partly turning heads", "activation", "norms of blocks"),
        *BIASES,
    ),
    "opt": ("learned positions", "means of norms", "activation", *BIASES),
    "starcoder2": ("window", "means of norms", "activation", *BIASES),
    "nemotron": (
        *("norm offset", "means of norms", "partly turning heads", "activation"),
        "biases of the feed-forward",
    ),
    "arcee": ("activation", "biases of q, k and v", "bias of attention"),
    "apertus": ("activation", "norms of heads", "biases of q, k and v", "bias of attention"),
    "bitnet": (
        *("norm of the output of attention", "norm inside the network", "activation"),
        *("biases of q, k and v", "bias of attention"),
    ),
    "internlm3": BIASES,
    "lfm3": (
        *("window", "layers without window", "positions of sliding layers", "part of the pairs"),
        *("norms of outputs", "norms of heads", "output gate"),
    ),
    "lfm2": ("norms of heads",),
    "ernie4_5_moe": ("bias of the choice", "normalised weights", "bias of the head", *BIASES),
    "glm4_moe": (
        *("sigmoid", "bias of the choice", "factor of experts", "normalised weights"),
        *("norms of heads", "partly turning heads", "biases of q, k and v"),
    ),
    "dots1": (
        *("sigmoid", "bias of the choice", "factor of experts", "weights as they are"),
        *("norms of heads", "window", "layers without window", "biases of q, k and v", "bias of attention"),
    ),
    "exaone_moe": (
        *("sigmoid", "bias of the choice", "factor of experts", "normalised weights"),
        *("norms of heads", "window", "layers without window", "layers without positions"),
    ),
    "lfm2_moe": ("sigmoid", "bias of the choice", "factor of experts", "normalised weights"),
    "cohere2": (
        *("means of norms", "blocks side by side", "scale of logits", "window", "layers without window"),
        *("layers without positions", "biases of q, k and v", "bias of attention"),
    ),
    "ministral3": ("window", "growth of queries", "scaled positions"),
    "hunyuan_v1_dense": (
        *("norms of heads", "norms of heads behind positions", "stretched positions"),
        *("biases of q, k and v", "bias of attention"),
    ),
    "exaone": BIASES,
    "olmo": ("means of norms", "limit of q, k and v", "biases of q, k and v", "bias of attention"),
    "olmo2": (
        *("stages without a norm before", "norms of outputs", "one norm of all heads"),
        *("biases of q, k and v", "bias of attention"),
    ),
    "olmo3": (
        *("stages without a norm before", "norms of outputs", "one norm of all heads", "window"),
        *("layers without window", "positions of sliding layers", "scaled positions"),
    ),
    "exaone4": (
        *("stages without a norm before", "norms of outputs", "norms of heads", "window"),
        *("layers without window", "layers without positions"),
    ),
    "qwen3_next": ("norm offset", "output gate", "normalised weights", "all chosen experts"),
    "qwen3_5_text": (
        *("norms of heads", "partly turning heads", "norm offset", "output gate"),
        *("biases of q, k and v", "bias of attention"),
    ),
}


def removals() -> Iterator[Any]:
    """Yield a family for each feature; the others show that their checkpoints have it, too."""
    seen = set()
    for name, features in FEATURES.items():
        for feature in features:
            yield pytest.param(name, feature, marks=[pytest.mark.slow] if feature in seen else [])
            seen.add(feature)


@pytest.mark.parametrize(("name", "feature"), list(removals()))
def test_a_feature_that_is_taken_away_is_seen(
    name: str,
    feature: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    oracle: Oracle,
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, overrides = MODELS[name]
    folder, ids = checkpoint(family, **overrides), token_ids(PROMPT + STEPS)
    expected = oracle(folder, ids)
    load_weights = heterollm.loading.load_weights

    def without_it(*arguments: Any, **options: Any) -> Any:
        weights = load_weights(*arguments, **options)
        config = dataclasses.replace(weights.config, **REMOVALS[feature](weights.config))
        assert config != weights.config
        return dataclasses.replace(weights, config=config, experts=expert_specs(config, weights.specs))

    monkeypatch.setattr(heterollm.loading, "load_weights", without_it)
    llm = host_llm(folder, plan="gpu")
    # Even the emulator's gate would see it.
    assert sqnr_db(all_logits(llm, ids), expected) < LOGITS_SQNR_DB["fp16"]


@pytest.mark.parametrize(
    ("name", "role", "value"),
    [
        *(
            (name, *one)
            for name in ("qwen3_5_text", "granitemoehybrid with state spaces")
            for one in (("taps", 0.5), ("decay", -np.inf), ("decay_shift", 0.0), ("gated_norm", 1.0))
        ),
        *(("granitemoehybrid with state spaces", *one) for one in (("skip", 0.0), ("taps_bias", 0.0))),
        *(
            ("gemma3n_text", *one)
            for one in (
                *((role, 0.0) for role in ("laurel_left", "stream_prediction", "stream_correction")),
                *((role, 1.0) for role in ("stream_router_norm", "stream_scale")),
            )
        ),
        *(("apertus", *one) for one in (("linear", 0.0), ("rising", -3.0), ("falling", -3.0))),
    ],
)
def test_a_tensor_that_is_taken_away_is_seen(
    name: str,
    role: str,
    value: float,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    oracle: Oracle,
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, ids = checkpoint(name), token_ids(PROMPT + STEPS)
    expected = oracle(folder, ids)
    load_weights = heterollm.loading.load_weights

    def without_it(*arguments: Any, **options: Any) -> Any:
        weights = load_weights(*arguments, **options)
        names = {other_name(weights.config, layer, role) for layer in range(weights.config.layers)}
        floats = {
            name: np.full_like(own, value) if name in names else own for name, own in weights.floats.items()
        }
        return dataclasses.replace(weights, floats=floats)

    monkeypatch.setattr(heterollm.loading, "load_weights", without_it)
    llm = host_llm(folder, plan="gpu")
    assert sqnr_db(all_logits(llm, ids), expected) < LOGITS_SQNR_DB["fp16"]
