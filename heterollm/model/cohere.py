"""Cohere 2 (``modeling_cohere2.py`` in transformers)."""

from __future__ import annotations

from typing import Final

from heterollm.model.family import ATTENTION_BIASES, SEPARATE, Family, TensorNames, alike, all_but_every_nth
from heterollm.model.json_fields import JsonFields


def checked_cohere(fields: JsonFields) -> dict[str, object]:
    """Return nothing further, after a check of the window, without which no layer would have positions."""
    fields.count("sliding_window")
    return {}


COHERE2: Final = Family(
    name="Cohere 2",
    covers="Command R7B and Tiny Aya",
    architecture="Cohere2ForCausalLM",
    tensors=TensorNames(SEPARATE, {"attention": "input_layernorm"}),
    layers=alike(("attention", "ffn")),
    defaults={
        "rms_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    renamed={"rms_norm_eps": "layer_norm_eps"},
    derived=checked_cohere,
    follows=frozenset({"layer_types", "logit_scale", "sliding_window_pattern"}),
    ignores={
        "position_embedding_type": "neighbouring elements rotate in any case",
        **dict.fromkeys(
            (
                *("layer_switch", "order_of_interleaved_layers", "rotary_pct", "use_qk_norm"),
                *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
                "use_parallel_embedding",
            ),
            "transformers ignores it",
        ),
    },
    biases=ATTENTION_BIASES,
    interleaved_rope=True,
    rope_needs_window=True,
    slides=all_but_every_nth,
    centered_norms=True,
    norm_biases=False,
    bos_ids=(5,),
    eos_ids=(255_001,),
)
