"""OLMo 1 to 3 (``modeling_olmo.py`` and its successors in transformers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterollm.model.family import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    NORMS,
    OUTPUT_NORMS,
    SECTION_COUNTS,
    SEPARATE,
    Family,
    TensorNames,
    all_but_every_nth,
)

OLMOS: Final[Mapping[str, Family]] = {
    "olmo": Family(
        name="OLMo",
        covers="OLMo 1",
        architecture="OlmoForCausalLM",
        tensors=TensorNames(SEPARATE, dict.fromkeys(NORMS, ""), final_norm=""),
        defaults={"rms_norm_eps": 1e-5},
        follows=frozenset({"clip_qkv"}),
        ignores={"rms_norm_eps": "norms add 1e-05 in any case"},
        biases=ATTENTION_BIASES,
        centered_norms=True,
        norm_biases=False,
        eos_ids=(50_279,),
    ),
    "olmo2": Family(
        name="OLMo 2",
        covers="OLMo 2",
        architecture="Olmo2ForCausalLM",
        tensors=TensorNames(SEPARATE, {**OUTPUT_NORMS, **HEAD_NORMS}),
        defaults={"rms_norm_eps": 1e-5},
        biases=ATTENTION_BIASES,
        joint_head_norms=True,
        eos_ids=(50279,),
    ),
    "olmo3": Family(
        name="OLMo 3",
        covers="OLMo 3",
        architecture="Olmo3ForCausalLM",
        tensors=TensorNames(SEPARATE, {**OUTPUT_NORMS, **HEAD_NORMS}),
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            **dict.fromkeys(("rope_theta", "rope_local_base_freq"), 500_000.0),
        },
        follows=frozenset({"layer_types"}),
        layered_rope=True,
        ignores={"original_max_position_embeddings": SECTION_COUNTS},
        biases=ATTENTION_BIASES,
        slides=all_but_every_nth,
        joint_head_norms=True,
        eos_ids=(50279,),
    ),
}
