"""Every row of the table of GGUF metadata: read against transformers, refused by name, or without effect."""

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model import Checkpoint, ModelConfig, read_sampling_defaults
from heterollm.model.fields import GGUF_FIELDS
from heterollm.model.stored.gguf_config import check_metadata, gguf_config
from heterollm.model.stored.gguf_file import GgufFile
from tests.heterollm.model.test_gguf_tokens import ID_CASES, TEXT_CASES

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
from gguf_writer import CONVERTERS, OVERRIDES, PLAIN, rewritten, write_gguf  # noqa: E402

F32 = gguf.GGMLQuantizationType.F32

PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "llama": PLAIN,
    "phi3": {"rope_parameters": PARTIAL, "original_max_position_embeddings": 2048},
    "gemma2": OVERRIDES["gemma2"],
    "gemma3_text": OVERRIDES["gemma3_text"],
    "mixtral": OVERRIDES["mixtral"],
    "qwen3_moe": OVERRIDES["qwen3_moe"],
    "minicpm": {"attention_multiplier": 32**-0.5},
    "starcoder2": OVERRIDES["starcoder2"],
    "phimoe": OVERRIDES["phimoe"],
    "gemma3n_text": OVERRIDES["gemma3n_text"],
    "deepseek_v3": OVERRIDES["deepseek_v3"],
    # Heads as wide in layers of either kind.
    "gemma4_text": {"global_head_dim": 32},
    **{
        name: OVERRIDES[name]
        for name in (
            *("olmo", "dots1", "cohere2", "ministral3", "qwen3_5_text", "lfm2_moe", "ernie4_5_moe"),
            "nemotron_h",
        )
    },
}
"""Changes of the checkpoints whose files the cases change."""
TENSORS_OF = {"minicpm": "granite", "qwen3vl": "qwen3"}
"""Checkpoints with the same tensors, from which files are written."""
LEAST_DB = 90
"""Gate for logits in float32."""
CHANGED_DB = 70
"""A field that is read moves the logits by more than this."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


class Case(NamedTuple):
    """A field with a value, and the configuration of transformers' model that computes the same.

    Args:
        family: The checkpoint.
        value: Value of the field; None for a file without it.
        twin: Fields of ``config.json`` that differ from the checkpoint's.
        base: Other metadata of the file, also of that without the change.
        base_value: Value in the file to compare with; None for a file without the field, ``...`` for the
            checkpoint's.
    """

    family: str
    value: Any
    twin: dict[str, Any]
    base: Mapping[str, Any] = MappingProxyType({})
    base_value: Any = ...


def architecture(family: str) -> str:
    """The value of ``general.architecture`` in a family's files."""
    return CONVERTERS[family].stated if family in CONVERTERS else family


SPACES = "granitemoehybrid with state spaces"


def scales(name: str, file_name: str) -> list[Case]:
    """A factor in each architecture that has one."""
    absent = {"embedding_scale": 12.0, "residual_scale": 1.4 / 2**0.5, "logit_scale": 128 / 256}
    families = ("granite", "granitemoe", "minicpm", SPACES)
    found = [Case(family, 0.5, {name: 0.5}) for family in families]
    found += [Case(family, None, {name: 1.0}) for family in families[:2] if file_name != "logit_scale"]
    if file_name == "logit_scale":
        found.append(Case("cohere2", 0.5, {name: 1.0, "logit_scale": 0.5}))
    return [*found, Case("minicpm", None, {name: absent[file_name]}, {file_name: 7.0})]


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, **fields}}


def yarn(**fields: Any) -> dict[str, Any]:
    return rope(**{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **fields})


def gemma3(full: dict[str, Any], sliding: float) -> dict[str, Any]:
    section = {"rope_type": "default", "rope_theta": sliding}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": section}}


def olmo3(sliding: float) -> dict[str, Any]:
    full = yarn(rope_theta=2000.0, factor=8.0, original_max_position_embeddings=32)["rope_parameters"]
    return gemma3(full, sliding)


def ministral3(**fields: Any) -> dict[str, Any]:
    own = {"beta_fast": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.6, **fields}
    return yarn(factor=8.0, original_max_position_embeddings=24, **own)


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
MSCALE = 1 + 0.1 * math.log(4)
GEMMA3 = {"rope_type": "linear", "rope_theta": 2000.0, "factor": 4.0}
MELLUM = {"rope_type": "default", "rope_theta": 2000.0}
GEMMA4 = {"rope_type": "proportional", "rope_theta": 2000.0, "partial_rotary_factor": 0.25}
FULL, SLIDING = "full_attention", "sliding_attention"
SPARSITY = "activation_sparsity_pattern"

CASES: dict[str, list[Case]] = {
    "attention.layer_norm_rms_epsilon": [
        Case("llama", 0.25, {"rms_norm_eps": 0.25}),
        Case("lfm2", 0.25, {"norm_eps": 0.25}),
    ],
    "attention.layer_norm_epsilon": [
        Case("phi", 0.25, {"layer_norm_eps": 0.25}),
        Case("gpt_neox", 0.25, {"layer_norm_eps": 0.25}),
        Case("stablelm", 0.25, {"layer_norm_eps": 0.25}),
        Case("starcoder2", 0.25, {"norm_epsilon": 0.25}),
        Case("nemotron", 0.25, {"norm_eps": 0.25}),
        Case("cohere2", 0.25, {"layer_norm_eps": 0.25}),
    ],
    "attention.scale": [
        Case("granite", 0.125, {"attention_multiplier": 0.125}),
        Case("granite", None, {"attention_multiplier": 32**-0.5}),
        Case("granitemoe", 0.125, {"attention_multiplier": 0.125}),
        Case(SPACES, 0.125, {"attention_multiplier": 0.125}),
    ],
    "rope.scaling.finetuned": [
        Case(SPACES, True, {"position_embedding_type": "rope"}),
        Case(SPACES, None, {"position_embedding_type": "rope"}),
    ],
    "embedding_scale": scales("embedding_multiplier", "embedding_scale"),
    "residual_scale": scales("residual_multiplier", "residual_scale"),
    "logit_scale": scales("logits_scaling", "logit_scale"),
    "attention.sliding_window": [
        Case("phi3", 5, {"sliding_window": 5}),
        Case("phi3", 0, {"sliding_window": None}),
        Case("gemma2", 5, {"sliding_window": 5}),
        Case("gemma2", None, {"sliding_window": 4096}),
        Case("gemma3_text", 5, {"sliding_window": 5}),
        Case("gemma3_text", None, {"layer_types": [FULL] * 3}),
        Case("mellum", 5, {"sliding_window": 5}),
        Case("mellum", None, {"layer_types": [FULL] * 2}),
        Case("phimoe", 5, {"sliding_window": 5}),
        Case("gpt_oss", 5, {"sliding_window": 5}),
        Case("cohere2", 5, {"sliding_window": 5}),
        Case("olmo3", 5, {"sliding_window": 5}),
        Case("exaone4", 5, {"sliding_window": 5}),
        Case("exaone4", None, {"sliding_window": None, "layer_types": [FULL] * 2}),
        Case("gemma4_text", 5, {"sliding_window": 5}),
        Case("gemma3n_text", 5, {"sliding_window": 5}),
        Case("exaone_moe", 5, {"sliding_window": 5}),
    ],
    "attention.sliding_window_pattern": [
        Case("gemma2", 1, {"layer_types": [FULL, FULL]}),
        Case("gemma2", [False, True], {"layer_types": [FULL, SLIDING]}),
        Case("gemma3_text", 3, {"layer_types": [SLIDING, SLIDING, FULL]}),
        Case("gemma3_text", None, {"layer_types": [SLIDING] * 3}),
        Case("mellum", [True, True], {"layer_types": [SLIDING] * 2}),
        Case("mellum", None, {"layer_types": [SLIDING] * 2}),
        Case("gpt_oss", [False, True], {"layer_types": [FULL, SLIDING]}),
        Case("cohere2", [False, True], {"layer_types": [FULL, SLIDING]}),
        Case("gemma4_text", [False, True, False, False], {"layer_types": [FULL, SLIDING, FULL, FULL]}),
        Case("gemma3n_text", [False, True, False, False], {"layer_types": [FULL, SLIDING, FULL, FULL]}),
        Case("exaone4", None, {"layer_types": [SLIDING] * 2}),
        Case("exaone_moe", None, {"layer_types": [SLIDING] * 2}),
        Case("olmo3", None, {"layer_types": [SLIDING] * 3}),
    ],
    "attn_logit_softcapping": [
        Case("gemma2", 0.5, {"attn_logit_softcapping": 0.5}),
        Case("gemma2", None, {"attn_logit_softcapping": 50.0}),
    ],
    "final_logit_softcapping": [
        Case("gemma2", 0.5, {"final_logit_softcapping": 0.5}),
        Case("gemma2", None, {"final_logit_softcapping": 30.0}),
        Case("gemma3_text", 0.5, {"final_logit_softcapping": 0.5}),
        Case("gemma3_text", None, {"final_logit_softcapping": None}),
        Case("gemma4_text", 0.5, {"final_logit_softcapping": 0.5}),
        Case("gemma4_text", None, {"final_logit_softcapping": None}),
        Case("gemma3n_text", 0.5, {"final_logit_softcapping": 0.5}),
        Case("gemma3n_text", None, {"final_logit_softcapping": 30.0}),
    ],
    "rope.dimension_count": [
        Case("phi3", 24, {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.5}})
    ],
    "rope.freq_base": [
        Case("llama", 300.0, rope(rope_type="default", rope_theta=300.0)),
        Case("llama", None, rope(rope_type="default", rope_theta=10000.0)),
    ],
    "rope.freq_base_swa": [
        Case("gemma3_text", 300.0, gemma3(GEMMA3, 300.0)),
        Case("gemma3_text", None, gemma3(GEMMA3, 10000.0)),
        Case("mellum", 300.0, gemma3(MELLUM, 300.0)),
        Case("mellum", None, gemma3(MELLUM, 2000.0)),
        Case("olmo3", 300.0, olmo3(300.0)),
        Case("gemma4_text", 300.0, gemma3(GEMMA4, 300.0)),
        Case("gemma4_text", None, gemma3(GEMMA4, 10000.0)),
        Case("olmo3", None, olmo3(2000.0)),
        Case("gemma3n_text", 300.0, gemma3(MELLUM, 300.0)),
        Case("gemma3n_text", None, gemma3(MELLUM, 10000.0)),
    ],
    "expert_group_count": [Case("deepseek_v3", 6, {"n_group": 6})],
    "expert_group_used_count": [Case("deepseek_v3", 1, {"topk_group": 1})],
    "activation_sparsity_scale": [
        Case("gemma3n_text", [0.0, -math.inf, 1.0, 0.0], {SPARSITY: [0.5, 0.0, NormalDist().cdf(1.0), 0.5]}),
        Case("gemma3n_text", None, {SPARSITY: [0.0] * 4}),
    ],
    "rope.scaling.type": [
        Case("llama", "none", {}, {"rope.scaling.factor": 4.0}),
        Case("llama", "linear", rope(rope_type="linear", factor=4.0), {"rope.scaling.factor": 4.0}, "none"),
        Case("llama", "yarn", yarn(), YARN, "linear"),
    ],
    "rope.scaling.factor": [
        Case("llama", 4.0, rope(rope_type="linear", factor=4.0)),
        Case("llama", 2.0, rope(rope_type="linear", factor=2.0), {"rope.scale_linear": 4.0}),
        Case("llama", 0.0, {}, {"rope.scale_linear": 4.0}),
        Case("llama", 8.0, yarn(factor=8.0), YARN),
    ],
    "rope.scale_linear": [
        Case("llama", 4.0, rope(rope_type="linear", factor=4.0)),
        Case("gemma2", 4.0, rope(rope_type="linear", factor=4.0)),
    ],
    "rope.scaling.original_context_length": [
        Case("llama", 256, yarn(original_max_position_embeddings=256), YARN),
        Case("llama", None, yarn(original_max_position_embeddings=2048), YARN),
    ],
    "context_length": [
        Case(
            "llama",
            256,
            yarn(original_max_position_embeddings=256),
            {**YARN, "rope.scaling.original_context_length": None},
        )
    ],
    "rope.scaling.attn_factor": [
        Case("llama", 1.5, yarn(attention_factor=1.5 * MSCALE), YARN),
    ],
    "rope.scaling.yarn_beta_fast": [Case("llama", 4.0, yarn(beta_fast=4.0), YARN)],
    "rope.scaling.yarn_beta_slow": [Case("llama", 0.25, yarn(beta_slow=0.25), YARN)],
    "rope.scaling.yarn_attn_factor": [
        Case("llama", 1.5, yarn(attention_factor=1.5), YARN),
        Case("llama", 1.5, yarn(attention_factor=3.0), {**YARN, "rope.scaling.attn_factor": 2.0}),
    ],
    "rope.scaling.yarn_log_multiplier": [
        Case("ministral3", 0.5, ministral3(mscale_all_dim=0.5)),
        Case("ministral3", None, ministral3(mscale=None, mscale_all_dim=None)),
        Case(
            *("deepseek_v3", 0.1),
            yarn(factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0),
        ),
    ],
    "use_parallel_residual": [Case("gpt_neox", False, {"use_parallel_residual": False})],
    "attention.clamp_kqv": [
        Case("olmo", 0.3, {"clip_qkv": 0.3}),
        Case("olmo", None, {"clip_qkv": None}),
    ],
    "attention.temperature_scale": [
        Case("ministral3", 0.3, ministral3(llama_4_scaling_beta=0.3)),
        Case("ministral3", None, ministral3(llama_4_scaling_beta=0.0)),
    ],
    "expert_weights_scale": [
        Case(family, value, {"routed_scaling_factor": value or 1.0})
        for family in ("glm4_moe", "dots1", "exaone_moe", "nemotron_h", "deepseek_v3")
        for value in (0.5, None)
    ],
    "expert_weights_norm": [
        Case(family, value, {"norm_topk_prob": bool(value)})
        for family, value in (
            *(("glm4_moe", False), ("dots1", True), ("exaone_moe", None)),
            *(("nemotron_h", False), ("deepseek_v3", False)),
        )
    ],
    "expert_used_count": [Case("mixtral", 3, {"num_experts_per_tok": 3})],
}
"""Cases of each field that is read and whose value the tensors do not fix."""

SIZES: dict[str, tuple[str, Any]] = {
    "embedding_length": ("llama", 128),
    "block_count": ("llama", 1),
    "feed_forward_length": ("llama", 176),
    "attention.head_count": ("llama", 12),
    "attention.head_count_kv": ("llama", 1),
    "attention.key_length": ("llama", 64),
    "attention.value_length": ("llama", 16),
    "expert_count": ("mixtral", 4),
    "expert_feed_forward_length": ("qwen3_moe", 80),
    "expert_shared_feed_forward_length": ("granitemoeshared", 80),
    "shortconv.l_cache": ("lfm2", 4),
    "leading_dense_block_count": ("lfm2_moe", 2),
    "interleave_moe_layer_step": ("ernie4_5_moe", 1),
    "expert_shared_count": ("ernie4_5_moe", 1),
    "full_attention_interval": ("qwen3_5_moe_text", 1),
    "attention.recurrent_layers": ("qwen3_5_text", [True, False, True, True]),
    "attention.key_length_swa": ("gemma4_text", 16),
    "attention.shared_kv_layers": ("gemma4_text", 1),
    "altup.num_inputs": ("gemma3n_text", 3),
    "attention.q_lora_rank": ("deepseek_v3", 48),
    "attention.kv_lora_rank": ("deepseek_v3", 32),
    "attention.key_length_mla": ("deepseek_v3", 48),
    "attention.value_length_mla": ("deepseek_v3", 24),
    "expert_gating_func": ("deepseek_v2", 2),
    "embedding_length_per_layer_input": ("gemma4_text", 64),
    "ssm.conv_kernel": ("qwen3_5_text", 3),
    "ssm.group_count": ("qwen3_5_text", 4),
    "ssm.state_size": ("qwen3_5_text", 8),
    "ssm.time_step_rank": ("qwen3_5_text", 1 << 30),
    "ssm.inner_size": ("qwen3_5_text", 96),
}
"""Fields that the shapes of tensors fix: a family, and a wrong value."""


@pytest.fixture(scope="session")
def sources(checkpoint, tmp_path_factory):
    """Return a function that gives a family's checkpoint and its GGUF file in floats."""
    made: dict[str, tuple[Path, Path]] = {}

    def source(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = checkpoint(TENSORS_OF.get(family, family), **SHAPES.get(family, {}))
            path = tmp_path_factory.mktemp("files") / f"{family}.gguf"
            made[family] = folder, write_gguf(folder, path, F32, F32, stated=architecture(family))
        return made[family]

    return source


def twin_logits(folder: Path, changes: dict[str, Any], ids: list[int]) -> np.ndarray:
    """The last logits of transformers' model with other fields in its configuration."""
    import transformers

    values = json.loads((folder / "config.json").read_text()) | changes
    values.pop("time_step_limit", None)  # its infinity is none of JSON's numbers
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].numpy()


def db(found: np.ndarray, wanted: np.ndarray) -> float:
    error = np.square(found.astype(np.float64) - wanted).sum()
    return math.inf if error == 0 else 10 * math.log10(np.square(wanted, dtype=np.float64).sum() / error)


SPLIT = ("split.no", "split.count", "split.tensors.count")
SAMPLING = {
    "general.sampling.temp": ("temperature", 0.25),
    "general.sampling.top_k": ("top_k", 7),
    "general.sampling.top_p": ("top_p", 0.5),
    "general.sampling.min_p": ("min_p", 0.125),
    "general.sampling.penalty_repeat": ("repetition_penalty", 1.5),
}
"""Entries of ``generation_config.json``, and values."""
POOLING = {"pooling_type", "tokenizer.ggml.add_eos_token"}
PLACES = {
    *(*SAMPLING, *SPLIT, *POOLING),
    *("general.architecture", "general.alignment", "nextn_predict_layers"),
}
"""Fields with tests of their own, here and in other tests of GGUF files."""


def read_rows() -> list[tuple[str, frozenset[str]]]:
    return [(row.name, row.only) for row in GGUF_FIELDS.fields if row.effect == "read"]


@pytest.mark.parametrize(("name", "only"), read_rows())
def test_every_field_that_is_read_has_a_case(name, only):
    own = name.removeprefix("{arch}.")
    assert any(own in cases for cases in (CASES, SIZES, TEXT_CASES, ID_CASES, PLACES, NUMBERS))
    if only and own in CASES:
        assert {architecture(case.family) for case in CASES[own]} == only


@pytest.mark.parametrize(
    ("name", "case"),
    [
        # Further families and values are computed by the same code: by default each field runs with one.
        pytest.param(
            name,
            case,
            id=f"{name}-{case.family}-{case.value}",
            marks=[pytest.mark.slow] * (case is not cases[0]),
        )
        for name, cases in CASES.items()
        for case in cases
    ],
)
def test_a_field_that_is_read_has_the_logits_of_transformers(
    name, case, sources, host_llm, token_ids, tmp_path
):
    folder, source = sources(case.family)
    ids = token_ids(100)
    base = case.base if case.base_value is ... else {**case.base, name: case.base_value}
    plain = rewritten(source, tmp_path / "plain.gguf", base)
    changed = rewritten(source, tmp_path / "changed.gguf", {**base, name: case.value})
    without, found = (logits_of(path, host_llm, ids) for path in (plain, changed))
    assert db(found, twin_logits(folder, case.twin, ids)) >= LEAST_DB
    assert db(found, without) < CHANGED_DB


NUMBERS = tuple(f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
"""Fields with a number of each layer, which checkpoints have in tensors."""


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_layers_are_tensors(name, sources, tmp_path):
    source, tensor = sources("apertus")[1], f"model.layers.1.mlp.act_fn.{name.removeprefix('xielu.')}"
    for value, found in (([0.25, 0.5], 0.5), (0.75, 0.75)):
        path = rewritten(source, tmp_path / f"{found}.gguf", {name: value})
        assert Checkpoint(path).read(tensor).item() == found
    for wrong in (None, [0.25], [0.25, math.nan], "text"):
        with pytest.raises(CheckpointError, match=f"{name} is no list of 2 numbers"):
            Checkpoint(rewritten(source, tmp_path / "wrong.gguf", {name: wrong}))


@pytest.mark.parametrize(("name", "family", "value"), [(name, *size) for name, size in SIZES.items()])
def test_a_size_that_contradicts_the_tensors_is_refused(name, family, value, sources, tmp_path):
    path = rewritten(sources(family)[1], tmp_path / "odd.gguf", {name: value})

    def opened() -> None:
        found = Checkpoint(path)
        found.validate(ModelConfig.from_folder(found.folder))

    wrong = r"of another shape|no place for|lacks tensors|value_length|rotates"
    with pytest.raises((CheckpointError, UnsupportedModelError), match=wrong):
        opened()


def logits_of(path: Path, host_llm: Any, ids: list[int]) -> np.ndarray:
    return np.array(host_llm(path, plan="gpu", precision="fp16", context=256).session().prefill(ids))


DIVISORS = [1.0 + 0.3 * pair for pair in range(16)]
LONG = [1.5 + 0.7 * pair for pair in range(16)]
LONGROPE = {"rope_type": "longrope", "attention_factor": 1.0, "factor": 1.0}


@pytest.mark.parametrize(
    ("fields", "tensors", "twin"),
    [
        ({}, {"rope_freqs.weight": DIVISORS}, {"short_factor": DIVISORS, "long_factor": DIVISORS}),
        (
            {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.25},
            {"rope_freqs.weight": DIVISORS},
            {
                "short_factor": [2 * one for one in DIVISORS],
                "long_factor": [2 * one for one in DIVISORS],
                "attention_factor": 1.25,
            },
        ),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64},
            {"rope_factors_long.weight": LONG, "rope_factors_short.weight": DIVISORS},
            {"short_factor": DIVISORS, "long_factor": LONG, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_divisors_of_frequencies_combine_as_in_llama_cpp(
    fields, tensors, twin, sources, host_llm, token_ids, tmp_path
):
    folder, source = sources("llama")
    ids = token_ids(100)
    found = logits_of(rewritten(source, tmp_path / "a.gguf", fields, tensors), host_llm, ids)
    wanted = twin_logits(folder, rope(**{"original_max_position_embeddings": 2048, **LONGROPE, **twin}), ids)
    assert db(found, wanted) >= LEAST_DB


@pytest.mark.parametrize(
    ("family", "fields", "tensors", "said"),
    [
        ("gemma2", {}, {"rope_freqs.weight": [1.0] * 28}, "rope_freqs"),
        ("llama", {"rope.scaling.type": "yarn"}, {"rope_freqs.weight": DIVISORS}, "rope_freqs"),
        ("llama", {}, {"rope_factors_long.weight": LONG}, "rope_factors_long"),
        ("llama", {"rope.scaling.type": "longrope"}, {}, "longrope"),
        ("phi3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "yarn"),
        ("llama", {"rope.scaling.attn_factor": 1.5}, {}, "attn_factor"),
        ("llama", {"rope.scaling.type": "Linear"}, {}, "Linear"),
        ("llama", {"rope.scaling.factor": "4"}, {}, "rope.scaling.factor"),
        ("llama", {"rope.scaling.factor": -1.0}, {}, "rope.scaling.factor"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, {}, "layer_norm_rms_epsilon is missing"),
    ],
)
def test_scaling_that_llama_cpp_does_not_compute_is_refused(family, fields, tensors, said, sources, tmp_path):
    path = rewritten(sources(family)[1], tmp_path / "odd.gguf", fields, tensors)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        Checkpoint(path)


def config_of(path: Path) -> dict[str, Any]:
    """All files that stand for a GGUF file, but its own place."""
    folder = Checkpoint(path).folder
    return {file.name: json.loads(file.read_text()) for file in folder.iterdir() if file.name != "gguf.json"}


def notes_of(path: Path) -> list[str]:
    return list(Checkpoint(path).notes)


@pytest.mark.parametrize(
    ("family", "absent", "others"),
    [
        ("llama", ("attention.key_length", "attention.value_length", "rope.dimension_count"), {}),
        ("qwen3_moe", ("expert_feed_forward_length",), {"feed_forward_length": 3 * 96}),
        ("gemma3_text", ("attention.layer_norm_epsilon",), {"attention.key_length_swa": 48}),
        (
            "llama",
            (),
            {"rope.freq_base_swa": 1000.0, "attention.sliding_window": 2048, "embedding_length_out": 192},
        ),
    ],
)
def test_defaults_and_repeated_values_change_nothing(family, absent, others, sources, tmp_path):
    source = sources(family)[1]
    path = rewritten(source, tmp_path / "less.gguf", {**dict.fromkeys(absent), **others})
    found, wanted = config_of(path), config_of(source)
    if family == "qwen3_moe":
        found["config.json"].pop("intermediate_size"), wanted["config.json"].pop("intermediate_size")
    assert found == wanted


@pytest.mark.parametrize(("stated", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_attention_by_its_width(stated, largest, tmp_path):
    from heterollm.model.stored.gguf_reader import GgufEntry

    sizes = {
        "embedding_length": 4608,
        "feed_forward_length": 64,
        "attention.head_count": 32,
        "context_length": 64,
    }
    sizes |= {"attention.key_length": 128, "attention.value_length": 128}
    sizes["attention.layer_norm_rms_epsilon"] = 1e-6
    for layers, scale in ((largest, 4608 // 32), (largest - 1, 128)):
        fields = {f"{stated}.{name}": value for name, value in {**sizes, "block_count": layers}.items()}
        entries = {"token_embd.weight": GgufEntry("F32", (8, 4608), 0, 0)}
        file = GgufFile(tmp_path, {"general.architecture": stated, **fields}, entries)
        assert gguf_config(file)["query_pre_attn_scalar"] == scale


# ---- refused, and without effect ------------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "general.type": "adapter",
    "general.quantization_version": 1,
    "attention.causal": False,
    "expert_weights_norm": None,
    "rope.dimension_sections": [8, 8, 0, 0],
    "hidden_activation": "relu",
    "tokenizer.ggml.add_sep_token": True,
    "tokenizer.ggml.normalizer.*": True,
    "tokenizer.ggml.suppress_tokens": [3],
    "tokenizer.ggml.precompiled_charsmap": [1, 2, 3],
}
"""Values of refused fields that are no number; None for the opposite of the architecture's."""
FILES = {
    "llama": "llama",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "qwen3moe": "qwen3_moe",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "qwen3vl": "qwen3vl",
    "lfm2moe": "lfm2_moe",
    "ernie4_5-moe": "ernie4_5_moe",
    "olmo": "olmo",
    "llama4": "llama4_text",
    "nemotron_h_moe": "nemotron_h",
}
"""Checkpoints by architecture."""


def rows_of(effect: str) -> list[Any]:
    found = []
    for row in GGUF_FIELDS.fields:
        if row.effect == effect:
            kinds = (
                kind
                for kind in FILES
                if GGUF_FIELDS.find(row.name.replace("*", "x").replace("{arch}", kind), kind) is row
            )
            found.append(pytest.param(row, next(kinds, "olmoe"), id=f"{row.name}-{row.meaning:.20}"))
    return found


@pytest.mark.parametrize(("row", "stated"), rows_of("refused"))
def test_a_refused_field_is_named(row, stated, sources, tmp_path):
    own = row.name.removeprefix("{arch}.")
    value = GIVEN.get(own, 7)
    if own == "expert_weights_norm":
        value = not row.neutral[0]
    name = row.name.replace("*", "x").replace("{arch}", stated)
    metadata = {**metadata_of(sources, stated), name: value}
    file = GgufFile(tmp_path / "a.gguf", metadata, {})
    with pytest.raises(UnsupportedModelError) as caught:
        check_metadata(file)
    assert name in caught.value.message
    assert row.meaning in caught.value.message
    for neutral in row.neutral:
        check_metadata(dataclasses.replace(file, metadata={**metadata, name: neutral}))


def metadata_of(sources: Any, stated: str) -> dict[str, Any]:
    if stated == "olmoe":
        return {"general.architecture": "olmoe", "olmoe.expert_count": 4}
    return dict(GgufFile.open(sources(FILES[stated])[1]).metadata)


@pytest.mark.parametrize(("row", "stated"), rows_of("none"))
def test_a_field_without_effect_changes_no_file(row, stated, sources, tmp_path):
    source = sources(FILES[stated])[1]
    name = row.name.replace("*", "x").replace("{arch}", stated)
    path = rewritten(
        source, tmp_path / source.name, {name: 7} if "{arch}" not in row.name else {name.partition(".")[2]: 7}
    )
    assert config_of(path) == config_of(source)
    said = notes_of(path)
    assert any(name in note for note in said) == name.startswith("general.sampling.")


def test_unknown_fields_are_named_in_one_note(sources, host_llm, tmp_path):
    fields = {
        "llama.brand_new": 1,
        "tokenizer.ggml.brand_new": 2,
        "general.brand_new": 3,
        "split.brand_new": 4,
    }
    path = rewritten(sources("llama")[1], tmp_path / "new.gguf", {**fields, "llama.block_count": 2})
    (note,) = notes_of(path)
    assert all(name in note for name in fields)
    assert host_llm(path, plan="gpu", precision="fp16", context=64).notes.count(note) == 1


def test_fields_of_other_programs_are_no_business_of_the_reader(sources, tmp_path):
    path = rewritten(sources("llama")[1], tmp_path / "other.gguf", {"mradermacher.quantize_version": 2})
    assert notes_of(path) == []


@pytest.mark.parametrize("name", SAMPLING)
def test_recommended_sampling_is_that_of_the_generation_configuration(name, sources, tmp_path):
    entry, value = SAMPLING[name]
    source = sources("llama")[1]
    path = rewritten(source, tmp_path / "sampled.gguf", {name: value})
    assert getattr(read_sampling_defaults(Checkpoint(path).folder), entry) == value
    found = config_of(path)
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}
    wanted = {**defaults, entry: value, "do_sample": True}
    generation = found.pop("generation_config.json")
    assert {name: generation[name] for name in wanted} == wanted
    assert generation["eos_token_id"] == found["config.json"]["eos_token_id"]
    assert found == config_of(source)
    greedy = rewritten(source, tmp_path / "greedy.gguf", {"general.sampling.temp": 0.0})
    assert config_of(greedy)["generation_config.json"]["do_sample"] is False


def test_the_alignment_places_the_tensors(sources, tmp_path):
    source = sources("llama")[1]
    found = Checkpoint(rewritten(source, tmp_path / "wide.gguf", {"general.alignment": 4096}))
    for name in found.names:
        assert np.array_equal(found.read(name), Checkpoint(source).read(name))
    data = (
        (tmp_path / "wide.gguf")
        .read_bytes()
        .replace(struct.pack("<II", 4, 4096), struct.pack("<II", 4, 8192), 1)
    )
    (tmp_path / "wide.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"wide\.gguf"):
        Checkpoint(tmp_path / "wide.gguf")


def test_the_architecture_chooses_the_model(sources, tmp_path):
    path = sources("llama")[1]
    changed = tmp_path / "qwen2.gguf"
    changed.write_bytes(path.read_bytes().replace(b"llama", b"qwen2"))
    assert config_of(changed)["config.json"]["model_type"] == "qwen2"
    changed.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba'"):
        Checkpoint(changed)


def package_names() -> list[str]:
    """Every field that the package knows, with the architecture's place as in the table."""
    found: list[str] = []

    def collect(space: type) -> None:
        for value in (value for name, value in vars(space).items() if name[0] != "_"):
            if isinstance(value, str) and "." in value and " " not in value:
                found.append(
                    value.replace("{id}", "0").replace("{dense}", "dense_2").replace("{name}", "tool_use")
                )
            elif isinstance(value, type):
                collect(value)

    collect(gguf.Keys)
    return found


LOADER_NAMES = (
    *("{arch}.hidden_activation", "{arch}.attention.value_scale", "{arch}.attention.output_group_count"),
    *("{arch}.attention.output_lora_rank", "{arch}.attention.compress_rope_freq_base"),
    *("{arch}.attention.compress_ratios", "{arch}.attention.recurrent_layers", "{arch}.hash_layer_count"),
    *("{arch}.hyper_connection.count", "{arch}.hyper_connection.epsilon", "{arch}.deepstack_mapping"),
    *("{arch}.hyper_connection.sinkhorn_iterations", "{arch}.target_layers", "{arch}.target_hidden_size"),
    *("{arch}.norm_before_residual", "{arch}.rope.scale_linear", "{arch}.embedding_length_per_layer_input"),
    *("general.source.huggingface.repository", "tokenizer.ggml.cls_token_id"),
    *("tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"),
    "tokenizer.ggml.suppress_tokens",
)
"""Fields of llama.cpp's llama-arch.cpp that the package lacks."""


@pytest.mark.parametrize("stated", [*FILES, "olmoe", "smollm3", "qwen2", "qwen3"])
def test_the_table_has_every_field_of_llama_cpp_and_of_the_package(stated):
    names = [*package_names(), *LOADER_NAMES]
    assert len(names) > 200
    assert [name for name in names if GGUF_FIELDS.find(name.replace("{arch}", stated), stated) is None] == []


@pytest.mark.parametrize("kept", ["token_embd.weight", "output.weight"])
def test_a_tied_embedding_has_either_name(kept, sources, host_llm, token_ids, tmp_path):
    source = sources("llama")[1]
    file = GgufFile.open(source)
    values = file.bits("token_embd.weight").view("<f4").reshape(file.entries["token_embd.weight"].shape)
    ids = token_ids(20)

    def logits(name: str, tensors: dict[str, Any]) -> np.ndarray:
        return logits_of(rewritten(source, tmp_path / f"{name}.gguf", {}, tensors), host_llm, ids)

    alone = {"token_embd.weight": None, "output.weight": None, kept: values}
    assert np.array_equal(logits("alone", alone), logits("both", {"output.weight": values}))


def test_experts_of_older_files_lie_apart(sources, tmp_path):
    source = sources("mixtral")[1]
    file = GgufFile.open(source)
    tensors: dict[str, Any] = {}
    for name, entry in file.entries.items():
        if "_exps." in name:
            stack = file.bits(name).view("<f4").reshape(entry.shape)
            own = name.replace("_exps.weight", ".{}.weight")
            tensors |= {name: None, **{own.format(expert): part for expert, part in enumerate(stack)}}
    found, wanted = Checkpoint(rewritten(source, tmp_path / "old.gguf", {}, tensors)), Checkpoint(source)
    assert len(tensors) == 2 * 3 * (1 + 5)
    assert sorted(found.names) == sorted(wanted.names)
    for name in found.names:
        assert np.array_equal(found.read(name), wanted.read(name))
        assert np.array_equal(found.read(name, (1, 2)), wanted.read(name, (1, 2)))


@pytest.mark.parametrize(("kind", "stated"), [("imatrix", None), ("mmproj", "clip"), ("adapter", "llama")])
def test_files_that_hold_no_whole_model_are_named(kind, stated, tmp_path):
    fields = {"general.type": kind, **({"general.architecture": stated} if stated else {})}
    with pytest.raises(UnsupportedModelError, match=kind):
        check_metadata(GgufFile(tmp_path / "a.gguf", fields, {}))
