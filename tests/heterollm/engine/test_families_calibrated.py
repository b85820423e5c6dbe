"""Families with the techniques of papers: 8-bit activations, sparse attention, and experts on the NPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.base import OptionError
from heterollm.calibration import calibrate, load_calibration
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import MixtureBlock
from heterollm.planning import calibrated_scales
from heterollm.planning.techniques.experts import suitable_mixtures
from heterollm.planning.techniques.sparse_attention import assumed_heads
from heterollm.solver import (
    AttentionRequest,
    ExpertGroup,
    ExpertsEntry,
    ExpertsPlacement,
    Plan,
    PlannedAttention,
    PlannedExperts,
    SparseAttention,
)
from heterollm.solver.sparse.attention import AttentionEntry
from tests.heterollm.conftest import FAMILIES, config_of

IN_8_BITS = (
    "olmo2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("exaone4", "ministral3", "qwen2_moe")),
    pytest.param("hunyuan_v1_dense", marks=pytest.mark.slow),
)
SOME = "Only some layers of .* have attention"
UNLIKE = "have different heads, or keys of other layers"
LATENT = "share latent vectors"
WITHOUT_SPARSE = {
    **dict.fromkeys(("lfm2", "lfm3", "lfm2_moe"), SOME),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), SOME),
    **dict.fromkeys(("granitemoehybrid with state spaces", "nemotron_h"), SOME),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), UNLIKE),
    "gemma4_text with experts": UNLIKE,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    "llama4_text": "attend to chunks of positions",
    **dict.fromkeys(("gpt_oss", "granite_swa"), "has sinks"),
}
"""Why families have no sparse attention."""

WITHOUT_EXPERTS = {"gpt_oss": "with biases and a clipped gate", "nemotron_h": "without a gate"}
"""Why mixtures have no experts on the NPU."""

SPARSE = [
    pytest.param(name, marks=() if name == "olmo2" else pytest.mark.slow)
    for name in FAMILIES
    if name not in WITHOUT_SPARSE
]
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "granitemoeshared", "mellum"),
    *("glm4_moe", "dots1", "exaone_moe", "ernie4_5_moe", "llama4_text", "gemma4_text with experts"),
    *("lfm2_moe", "qwen3_next", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
WINDOWS: dict[str, Any] = {"windows": 2, "window_tokens": 128, "gpu_threads": 1}
OPTIONS: dict[str, Any] = {"scales": "stepped", "context": 256}
CHUNK, PROMPT = 128, 70

INT8_DB = 15.0
"""Measured 19 to 37 dB, and 19 dB for a random Llama."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_technique_is_refused_by_the_name_of_what_a_family_has(family: str) -> None:
    """Or it holds, which the tests below show."""
    config = config_of(family)
    for refusals, fix, check in (
        (WITHOUT_SPARSE, "Leave shadowattn out", lambda: assumed_heads(config, AttentionRequest())),
        (WITHOUT_EXPERTS, "Leave it out", lambda: suitable_mixtures(config)),
    ):
        reason = refusals.get(family, "")
        if refusals is WITHOUT_EXPERTS and not config.blocks(MixtureBlock):
            reason = "for mixtures of experts, and this model has none"
        if not reason:
            check()
            continue
        with pytest.raises(OptionError, match=reason) as caught:
            check()
        assert fix in caught.value.fix
    assert (family in {*MIXTURES, *WITHOUT_EXPERTS}) == bool(config.blocks(MixtureBlock))


def answers(llm: LLM, ids: list[int]) -> np.ndarray:
    session = llm.session()
    first = session.prefill(ids[:PROMPT], all_logits=True)
    return np.concatenate([first, *(session.decode(token)[np.newaxis] for token in ids[PROMPT:])])


@pytest.mark.parametrize("family", IN_8_BITS)
def test_8_bits_of_the_npu_are_close_to_floats(
    family: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    folder, ids, file = checkpoint(family), token_ids(PROMPT + 6), tmp_path / "ranges.json"
    calibrate(folder, output=file, precision="w8a8", **WINDOWS)
    floats = answers(host_llm(folder, precision="w8a8", plan="gpu"), ids)
    llm = host_llm(folder, precision="w8a8", plan="npu", calibration=file)
    assert INT8_DB < sqnr_db(answers(llm, ids), floats) < 60


def with_all_keys(base: Plan, heads: int, file: Path) -> Plan:
    """Return a plan whose sparse attention, estimated by the NPU, keeps all keys."""
    entries = []
    for layer, scales in calibrated_scales(file, 1).items():
        units = tuple((head,) for head in range(len(scales)))
        exponents = tuple(scale.exponent for scale in scales)
        placement = SparseAttention((1.0,) * heads, units, exponents, estimator="npu", buckets=1)
        entries.append(AttentionEntry((1, CHUNK), (1, OPTIONS["context"]), (layer, layer), placement))
    plan = base.with_technique(PlannedAttention(tuple(entries)))
    return structs.replace(plan, chunk_length=CHUNK, calibration=load_calibration(file).key)


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_attention_to_all_keys_is_dense_attention(
    family: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    folder, ids, file = checkpoint(family), token_ids(PROMPT + 6), tmp_path / "heads.json"
    calibrate(folder, output=file, **WINDOWS)
    dense = host_llm(folder, plan="gpu", **OPTIONS)
    plan = with_all_keys(dense.plan, dense.config.attention.heads, file)
    sparse = host_llm(folder, plan=plan, calibration=file, **OPTIONS)
    assert {step.processor for step in sparse.steps("prefill", PROMPT)} > {"npu"}
    assert sqnr_db(answers(sparse, ids), answers(dense, ids)) > LOGITS_SQNR_DB["fp32"]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "llama4_text" else pytest.mark.slow) for name in MIXTURES],
)
def test_experts_on_the_npu_are_those_of_the_gpu(
    family: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
) -> None:
    """A group with room for all tokens, one that overflows, and the rest on the GPU."""
    # A graph has one format, and 80 inputs have blocks of 16.
    wider = {"moe_intermediate_size": 96} if FAMILIES[family].get("moe_intermediate_size") == 80 else {}
    folder, ids = checkpoint(family, **wider), token_ids(PROMPT + 6)
    on_gpu = host_llm(folder, plan="gpu", context=256)
    groups = ExpertGroup((3, 0), CHUNK), ExpertGroup((1,), 1)
    entries = tuple(
        ExpertsEntry((1, CHUNK), (layer, layer), ExpertsPlacement(groups))
        for layer in on_gpu.config.blocks(MixtureBlock)
    )
    plan = on_gpu.plan.with_technique(PlannedExperts(entries))
    llm = host_llm(folder, plan=structs.replace(plan, chunk_length=CHUNK), context=256)
    graphs = [step for step in llm.steps("prefill", PROMPT) if step.processor == "npu"]
    assert len(graphs) == len(groups) * len(entries)
    assert sqnr_db(answers(llm, ids), answers(on_gpu, ids)) > LOGITS_SQNR_DB["fp32"]
