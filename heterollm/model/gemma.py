"""Gemma 1 to 3 without vision (``modeling_gemma.py`` and its successors in transformers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterollm.model.block import Norm
from heterollm.model.family import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    OUTPUT_NORMS,
    SECTION_COUNTS,
    SEPARATE,
    Family,
    TensorNames,
    all_but_every_nth,
)

SANDWICH_NORMS: Final[Mapping[Norm, str]] = {
    "attention": "input_layernorm",
    "feed_forward": "pre_feedforward_layernorm",
    **OUTPUT_NORMS,
}
GEMMA: Final[Mapping[str, object]] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA_FIELDS = frozenset(
    {"final_logit_softcapping", "hidden_activation", "layer_types", "query_pre_attn_scalar"}
)

GEMMAS: Final[Mapping[str, Family]] = {
    "gemma": Family(
        name="Gemma",
        covers="Gemma 1",
        architecture="GemmaForCausalLM",
        defaults={
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        biases=ATTENTION_BIASES,
        # transformers takes the name in the first checkpoints for what their authors meant.
        activation_aliases={"gelu": "gelu_pytorch_tanh"},
        norm_offset=1.0,
        scales_embedding=True,
        bos_ids=(2,),
        eos_ids=(1,),
    ),
    "gemma2": Family(
        name="Gemma 2",
        covers="Gemma 2",
        architecture="Gemma2ForCausalLM",
        tensors=TensorNames(SEPARATE, SANDWICH_NORMS),
        defaults={
            **GEMMA,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        follows=GEMMA_FIELDS | {"attn_logit_softcapping"},
        biases=ATTENTION_BIASES,
        slides=all_but_every_nth,
        norm_offset=1.0,
        scales_embedding=True,
        bos_ids=(2,),
        eos_ids=(1,),
    ),
    "gemma3_text": Family(
        name="Gemma 3",
        covers="Gemma 3 without vision",
        architecture="Gemma3ForCausalLM",
        tensors=TensorNames(SEPARATE, {**SANDWICH_NORMS, **HEAD_NORMS}),
        defaults={
            **GEMMA,
            # Checkpoints with vision leave out what its class assumes.
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        follows=GEMMA_FIELDS | {"rope_local_base_freq", "sliding_window_pattern"},
        layered_rope=True,
        ignores={"original_max_position_embeddings": SECTION_COUNTS},
        biases=ATTENTION_BIASES,
        slides=all_but_every_nth,
        norm_offset=1.0,
        scales_embedding=True,
        bos_ids=(2,),
        eos_ids=(1,),
    ),
}
