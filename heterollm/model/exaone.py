"""EXAONE 3 by the code of its checkpoints, EXAONE 4 and EXAONE with experts by transformers' classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from heterollm.model.block import ROUTER_BIAS
from heterollm.model.expert_names import (
    NOT_READ,
    SHARED_EXPERTS,
    SIGMOID_EXPERTS,
    by_mlp_type,
    first_are_dense,
)
from heterollm.model.family import (
    BIASES,
    HEAD_NORMS,
    NORMS,
    OUTPUT_NORMS,
    SEPARATE,
    Family,
    TensorNames,
    all_but_every_nth,
)
from heterollm.model.json_fields import JsonFields

EXAONE_FIELDS: Final = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def exaone_fields(fields: JsonFields) -> dict[str, object]:
    """Return common fields under EXAONE's own names, which transformers reads, too."""
    return {name: fields.get(own) for own, name in EXAONE_FIELDS.items() if fields.get(own) is not None}


EXAONE3: Final = Family(
    name="EXAONE 3",
    covers="EXAONE 3, 3.5 and Deep",
    # transformers computes it as a Llama; published files name their own class.
    architecture="LlamaForCausalLM",
    tensors=TensorNames(
        {
            "qkv": {member: f"attn.attention.{member}_proj" for member in "qkv"},
            "o": {"o": "attn.attention.out_proj"},
            "gate_up": {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1"},
            "down": {"down": "mlp.c_proj"},
        },
        {"attention": "ln_1", "feed_forward": "ln_2"},
        layer="transformer.h.{layer}.",
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
    ),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 14_336,
        "rope_theta": 500_000.0,
    },
    derived=exaone_fields,
    follows=frozenset(EXAONE_FIELDS),
    biases=BIASES,
    published_code=("modeling_exaone.ExaoneForCausalLM",),
    bos_ids=(1,),
    eos_ids=(361,),
)

EXAONE4: Final = Family(
    name="EXAONE 4",
    covers="EXAONE 4",
    architecture="Exaone4ForCausalLM",
    tensors=TensorNames(SEPARATE, {**OUTPUT_NORMS, **HEAD_NORMS}),
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    follows=frozenset({"layer_types", "sliding_window_pattern"}),
    rope_needs_window=True,
    slides=all_but_every_nth,
    bos_ids=(0,),
    eos_ids=(2,),
)

EXAONE_MOE: Final = Family(
    name="K-EXAONE",
    covers="K-EXAONE",
    architecture="ExaoneMoeForCausalLM",
    tensors=TensorNames(
        SEPARATE,
        {**NORMS, **HEAD_NORMS},
        shared=SHARED_EXPERTS,
        others={ROUTER_BIAS: "mlp.e_score_correction_bias"},
        unread=("mtp.",),
    ),
    layers=by_mlp_type(("mixture", "ffn")),
    mixture=replace(SIGMOID_EXPERTS, shared_count_field="num_shared_experts", count_fields=("num_experts",)),
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "intermediate_size": 16_384,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    derived=first_are_dense,
    follows=frozenset({"layer_types", "mlp_layer_types", "first_k_dense_replace", "sliding_window_pattern"}),
    rope_needs_window=True,
    slides=all_but_every_nth,
    ignores=NOT_READ,
    bos_ids=(1,),
    eos_ids=(53,),
)
