"""The fields of ``rope_parameters`` and ``rope_scaling`` in ``config.json``."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.table import FieldTable, rows

ROPE: Final = "transformers, modeling_rope_utils"

AXES: Final = ("mrope_section", "mrope_interleaved")
"""Fields of a rotary embedding of several axes."""

ROPE_FIELDS: Final = FieldTable(
    "config.json, rope_parameters",
    (
        *rows(
            "read",
            "Phi-3.5-MoE, modeling_phimoe.py; transformers takes the short factors there, too",
            {"long_factor": "divisors of the frequencies beyond the original context (longrope)"},
            only=frozenset({"phimoe"}),
        ),
        *rows(
            "read",
            ROPE,
            {
                "rope_type": "default, linear, dynamic, yarn, llama3 or longrope; others are refused",
                "type": "older name of rope_type, which precedes it",
                "rope_theta": "base",
                "factor": "factor of the extension",
                "original_max_position_embeddings": "context before the extension",
                "attention_factor": "factor of cosine and sine (yarn, longrope)",
                "beta_fast": "rotations above which a frequency stays (yarn); by default 32",
                "beta_slow": "rotations below which a frequency is divided (yarn); by default 1",
                "mscale": "numerator of the attention factor (yarn)",
                "mscale_all_dim": "denominator of the attention factor (yarn)",
                "truncate": "whether the range of dimensions is whole (yarn); by default yes",
                "low_freq_factor": "longest wavelength that stays (llama3)",
                "high_freq_factor": "shortest wavelength that is divided (llama3)",
                "short_factor": "divisors of the frequencies up to the original context (longrope)",
                "long_factor": "divisors of the frequencies beyond it (longrope)",
                "partial_rotary_factor": "part of a head that rotates; only 1 in types other than phi3",
            },
        ),
        *rows(
            "read",
            "transformers, PhimoeRotaryEmbedding",
            {
                "short_mscale": "attention factor up to the original context",
                "long_mscale": "attention factor beyond it",
            },
            only=frozenset({"phimoe"}),
        ),
        *rows(
            "read",
            "transformers, HunYuanDenseV1RotaryEmbedding",
            {"alpha": "stretches the base of type dynamic, whatever the context"},
            only=frozenset({"hunyuan_v1_dense"}),
        ),
        *rows(
            "read",
            "transformers, Ministral3Attention",
            {"llama_4_scaling_beta": "growth of queries with the position"},
            only=frozenset({"ministral3"}),
        ),
        *rows(
            "none",
            "transformers, Ministral3Config",
            {"max_position_embeddings": "a copy; the field beside the section counts"},
            only=frozenset({"ministral3"}),
        ),
        *rows(
            "none",
            "YaRN's own code; transformers ignores it",
            {"finetuned": "whether the model was trained on"},
        ),
        *rows(
            "refused",
            "code of other models; transformers ignores it",
            {
                "attn_factor": "a factor of cosine and sine",
                "attention_scale": "a factor of cosine and sine",
                "extrapolation_factor": "a part of the extension",
            },
            neutral=(1,),
        ),
        *rows(
            "none",
            "transformers, models with vision",
            dict.fromkeys(AXES, "rotary embedding of several axes, whose positions are equal for text"),
            only=frozenset({"qwen3_5_text", "qwen3_5_moe_text"}),
        ),
        *rows(
            "refused",
            "transformers, models with vision",
            {
                **dict.fromkeys(AXES, "rotary embedding of several axes"),
                "alpha": "a base by the length of the context",
                "llama_4_scaling_beta": "queries that grow with the position",
            },
            neutral=(False,),
        ),
    ),
)
"""Fields of ``rope_parameters`` and ``rope_scaling``, also where the kinds of layers have sections of their
own."""
