"""GGUF files of every architecture, with the logits of the checkpoints that they were converted from."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import Checkpoint, ModelConfig
from heterollm.model.families import FAMILIES
from heterollm.model.stored.gguf_architectures import ARCHITECTURES, MIXTURES
from heterollm.model.stored.gguf_file import GgufFile

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
from gguf_writer import CONVERTERS, OVERRIDES, PLAIN, rewritten, write_gguf  # noqa: E402
from own_code import OWN_CODE  # noqa: E402
from own_code_checkpoints import write_own_code  # noqa: E402

Types = gguf.GGMLQuantizationType
LEAST_DB = 110
"""Gate for logits in float32: 1 + w - 1 is not w, and multipliers are float32 in the file."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True}),
    "granite 4 with experts": (
        "granitemoehybrid",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96},
    ),
    "granite 4-H with experts": (
        "granitemoehybrid with state spaces",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96},
    ),
    "nemotron_h without experts": (
        "nemotron_h",
        {"layers_block_type": ["full_attention", "linear_attention", "mlp"]},
    ),
    "exaone4 with windows": (
        "exaone4",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4 with experts": ("gemma4_text with experts", {}),
    "gemma3 without window": ("gemma3_text", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
}
STATED = {"granite 4 with experts": "granitemoe", "nemotron_h without experts": "nemotron_h"}
"""Architectures of variants, where their family has another."""
VISION = {"qwen3vl"}
"""The text part of a model with vision."""
QUICK = (
    *("gemma", "granitemoeshared", "internlm2", "minicpm", "phi", "lfm2", "glm4"),
    *("gemma3n_text", "gemma4_text", "qwen3_5_text", "qwen3_next", "ernie4_5_moe"),
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


def test_every_architecture_is_a_supported_family_and_written_here() -> None:
    assert {one.model_type for one in (*ARCHITECTURES.values(), *MIXTURES.values())} <= FAMILIES.keys()
    written = {one.stated for one in CONVERTERS.values()} | {*STATED.values()} | VISION
    assert written == {*ARCHITECTURES, *MIXTURES}


def logits(model: Path, host_llm: Callable[..., LLM], ids: list[int], **options: Any) -> np.ndarray:
    options = {"plan": "gpu", "precision": "fp16", "context": 256, **options}
    session = host_llm(model, **options).session()
    prompt = session.prefill(ids[:-4], all_logits=True)
    return np.concatenate([prompt, [session.decode(token) for token in ids[-4:]]])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one in QUICK else pytest.mark.slow)
        for one in (*CONVERTERS, *VARIANTS, *VISION)
    ],
)
def test_logits_are_those_of_the_checkpoint(
    family: str,
    checkpoint: Callable[..., Path],
    bundled_model: Path,
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    if family in OWN_CODE:
        folder = tmp_path
        write_own_code(folder, family, bundled_model)
    else:
        kind, changes = VARIANTS.get(family, ("qwen3" if family in VISION else family, {}))
        folder = checkpoint(kind, **{**OVERRIDES.get(kind, {}), **changes})
    stated = STATED.get(family, family if family in VISION else "")
    path = write_gguf(folder, tmp_path / "float.gguf", Types.F32, Types.F32, stated=stated)
    ids = token_ids(44)
    found, wanted = (logits(model, host_llm, ids) for model in (path, folder))
    assert sqnr_db(found, wanted) >= LEAST_DB


@pytest.mark.parametrize("kinds", [(), (("ffn_down", Types.Q4_1),)])
def test_joined_experts_keep_their_integers(
    kinds: tuple[tuple[str, Any], ...],
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """Granite's experts and shared experts, whose gate and up are apart in the file."""
    folder = checkpoint("granitemoeshared", intermediate_size=96, shared_intermediate_size=160)
    path = write_gguf(folder, tmp_path / "integers.gguf", Types.Q4_0, Types.Q8_0, kinds)
    assert all("bit for bit" in note for note in host_llm(path, plan="gpu").notes if " tensors of " in note)
    ids = token_ids(20)
    found, wanted = (logits(path, host_llm, ids, precision=one) for one in ("w4a16", "fp16"))
    assert sqnr_db(found, wanted) >= 90


def matrix(file: GgufFile, own: str) -> np.ndarray:
    return file.bits(own).view("<f4").reshape(file.entries[own].shape)


def same_tensors(path: Path, source: Path) -> bool:
    found, wanted = Checkpoint(path), Checkpoint(source)
    found.validate(ModelConfig.from_folder(found.folder))
    alike = (np.array_equal(found.read(name), wanted.read(name)) for name in wanted.names)
    return {*found.names} >= {*wanted.names} and all(alike)


def test_heads_in_turns_keep_their_integers(
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """Qwen3.5's value heads, whose order is also that of an output's columns."""
    sizes = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
    folder = checkpoint("qwen3_5_text", **OVERRIDES["qwen3_5_text"], **sizes, intermediate_size=192)
    path = write_gguf(folder, tmp_path / "integers.gguf", Types.Q4_1, Types.Q8_0)
    assert all("bit for bit" in note for note in host_llm(path, plan="gpu").notes if " tensors of " in note)
    ids = token_ids(20)
    found, wanted = (logits(path, host_llm, ids, precision=one) for one in ("w4a16", "fp16"))
    assert sqnr_db(found, wanted) >= 90
    sizes["linear_value_head_dim"] = 48
    odd = checkpoint("qwen3_5_text", **OVERRIDES["qwen3_5_text"], **sizes, intermediate_size=192)
    with pytest.raises(UnsupportedModelError, match=r"ssm_out\.weight has blocks of 32 inputs"):
        Checkpoint(write_gguf(odd, tmp_path / "odd.gguf", Types.Q4_1, Types.Q8_0))


def test_older_files_of_qwen3_next_have_linears_by_key_heads(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_next")
    source = write_gguf(folder, tmp_path / "apart.gguf", Types.F32, Types.F32)
    tensors: dict[str, Any] = {}
    for layer in (0, 2):
        tensors |= dict.fromkeys(f"blk.{layer}.attn_{one}.weight" for one in ("qkv", "gate"))
        whole = Checkpoint(folder).read(f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight")
        tensors[f"blk.{layer}.ssm_in.weight"] = whole
    path = rewritten(source, tmp_path / "whole.gguf", {}, tensors)
    assert same_tensors(path, source)
    tensors["blk.0.ssm_in.weight"] = whole[:-1]
    with pytest.raises(CheckpointError, match=r"ssm_in\.weight \[\d+, 128\] is of another shape"):
        Checkpoint(rewritten(source, tmp_path / "short.gguf", {}, tensors))


def test_layers_that_predict_further_tokens_are_not_read(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_5_text", **OVERRIDES["qwen3_5_text"])
    source = write_gguf(folder, tmp_path / "plain.gguf", Types.F32, Types.F32)
    file = GgufFile.open(source)
    further = {own.replace("blk.2.", "blk.4."): matrix(file, own) for own in file.entries if "blk.2." in own}
    further["blk.4.nextn.eh_proj.weight"] = np.ones((128, 256))
    fields = {"block_count": 5, "nextn_predict_layers": 1}
    path = rewritten(source, tmp_path / "further.gguf", fields, further)
    assert same_tensors(path, source)
    assert not any("layers.4." in name or "blk" in name for name in Checkpoint(path).names)
    with pytest.raises(CheckpointError, match=r"nextn_predict_layers is 5; expected fewer"):
        Checkpoint(rewritten(source, tmp_path / "none.gguf", {"nextn_predict_layers": 5, "block_count": 5}))


def test_experts_may_have_gate_and_up_in_one_stack(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = write_gguf(checkpoint("qwen3_5_moe_text"), tmp_path / "apart.gguf", Types.F32, Types.F32)
    file, tensors = GgufFile.open(source), {}
    for layer in range(2):
        owns = [f"blk.{layer}.ffn_{one}_exps.weight" for one in ("gate", "up")]
        whole = np.concatenate([matrix(file, own) for own in owns], 1)
        tensors |= {**dict.fromkeys(owns), f"blk.{layer}.ffn_gate_up_exps.weight": whole}
    assert same_tensors(rewritten(source, tmp_path / "fused.gguf", {}, tensors), source)


def test_layers_embeddings_are_gathered_from_integers(
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """And keys of layers that read those of others are left alone."""
    folder, ids = checkpoint("gemma4_text"), token_ids(24)
    path = write_gguf(folder, tmp_path / "integers.gguf", Types.Q8_0, Types.Q8_0)
    table = "model.embed_tokens_per_layer.weight"
    opened, rows = Checkpoint(path), np.array([5, 3, 5], np.int32)
    assert opened.kind(table) == "Q8_0"
    assert np.array_equal(opened.gather(table, rows), opened.read(table)[rows])
    found, wanted = (logits(path, host_llm, ids, precision=one) for one in ("w4a16", "fp16"))
    assert sqnr_db(found, wanted) >= 90
    source = write_gguf(folder, tmp_path / "floats.gguf", Types.F32, Types.F32)
    file = GgufFile.open(source)
    unused = {f"blk.2.{one}.weight": matrix(file, f"blk.0.{one}.weight") for one in ("attn_k", "attn_k_norm")}
    assert same_tensors(rewritten(source, tmp_path / "keys.gguf", {}, unused), source)


def test_tensors_of_one_weight_must_fit(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("granitemoe")
    path = write_gguf(folder, tmp_path / "mixed.gguf", Types.Q4_0, Types.Q8_0, (("ffn_up_exps", Types.Q8_0),))
    with pytest.raises(UnsupportedModelError, match="have the types Q4_0 and Q8_0"):
        Checkpoint(path)
    source = write_gguf(folder, tmp_path / "float.gguf", Types.F32, Types.F32)
    lacking = rewritten(source, tmp_path / "lacking.gguf", {}, {"blk.1.ffn_up_exps.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks .*blk\.1\.ffn_up_exps\.weight"):
        Checkpoint(lacking)
    biases = dict.fromkeys(("blk.1.ffn_gate_exps.bias", "blk.1.ffn_up_exps.bias"), np.ones(96))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up_exps\.bias, or their shapes do not fit"):
        Checkpoint(rewritten(source, tmp_path / "biased.gguf", {}, biases))


def test_a_phimoe_may_have_positions_without_an_attention_factor(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = write_gguf(
        checkpoint("phimoe", **OVERRIDES["phimoe"]), tmp_path / "long.gguf", Types.F32, Types.F32
    )
    tensors = dict.fromkeys(f"rope_factors_{one}.weight" for one in ("long", "short"))
    fields = {"rope.scaling.attn_factor": None, "rope.scaling.factor": 2.0}
    found = Checkpoint(rewritten(source, tmp_path / "linear.gguf", fields, tensors))
    assert ModelConfig.from_folder(found.folder).rope.kind == "linear"


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_one_tensor_of_queries_keys_and_values_is_divided(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As in older files of Phi-2 and GLM; rows of Llama's q and k stand in pairs there, too."""
    folder = checkpoint(family, **({**PLAIN, "attention_bias": True} if family == "llama" else {}))
    source = write_gguf(folder, tmp_path / "apart.gguf", Types.F32, Types.F32)
    file, changes = GgufFile.open(source), {}
    for layer in range(2):
        for ending in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{one}.{ending}" for one in "qkv"]
            parts = [file.bits(one).view("<f4").reshape(file.entries[one].shape) for one in names]
            changes |= {**dict.fromkeys(names), f"blk.{layer}.attn_qkv.{ending}": np.concatenate(parts)}
    whole, apart = Checkpoint(rewritten(source, tmp_path / "whole.gguf", {}, changes)), Checkpoint(source)
    for name in apart.names:
        assert np.array_equal(whole.read(name), apart.read(name)), name
        if name.endswith("weight") and len(apart.shape(name)) > 1:
            assert np.array_equal(whole.read(name, (3, 7)), apart.read(name, (3, 7))), name


def test_parts_of_a_head_that_rotate_are_whole_numbers() -> None:
    from heterollm.model.stored.gguf_config import rotated_part

    for head_dim in range(2, 260, 2):
        for rotated in range(2, head_dim + 1, 2):
            assert int(head_dim * rotated_part(rotated, head_dim)) == rotated
    assert rotated_part(64, 64) == 1
    assert math.isclose(rotated_part(30, 44), 30 / 44)
