"""The declaration of Llama 4's text part: layers with positions see a chunk, those without everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block import Block
from heterollm.model.family import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    NORMS,
    SEPARATE,
    Family,
    Mixture,
    StageNames,
    TensorNames,
)
from heterollm.model.json_fields import JsonFields
from heterollm.model.rope import QueryGrowth

CHUNKED: Final = "chunked_attention"
EXPERTS: Final[Mapping[str, str]] = {
    member: f"feed_forward.experts.{{expert}}.{member}_proj" for member in ("gate", "up", "down")
}


def network(prefix: str) -> Mapping[Group, Mapping[str, str]]:
    """Return the modules of a network."""
    return {
        "gate_up": {member: f"{prefix}.{member}_proj" for member in ("gate", "up")},
        "down": {"down": f"{prefix}.down_proj"},
    }


def llama4_layers(fields: JsonFields) -> Mapping[str, object]:
    """Return which layers have positions, and see a chunk alone, where the file leaves it out."""
    layers, interval = fields.count("num_hidden_layers"), fields.count("no_rope_layer_interval")
    # An empty list is none.
    turning = fields.get("no_rope_layers") or [int((at + 1) % interval != 0) for at in range(layers)]
    if not isinstance(turning, list) or len(turning) < layers:
        raise fields.fail("no_rope_layers", f"a list of {layers} times 0 or 1")
    kinds = fields.get("layer_types")
    if kinds is None:
        whole = fields.get("attention_chunk_size") is None
        kinds = ["full_attention" if whole or not one else CHUNKED for one in turning[:layers]]
    return {"no_rope_layers": turning, "layer_types": kinds}


def stages(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
    """Return a layer with experts and a shared one if it is listed, or one of every so many."""
    listed, step = fields.get("moe_layers"), fields.count("interleave_moe_layer_step")
    if listed is not None and (not isinstance(listed, list) or any(type(one) is not int for one in listed)):
        raise fields.fail("moe_layers", "a list of numbers of layers")
    sparse = (layer + 1) % step == 0 if listed is None else layer in listed
    return ("attention",), ("mixture", "ffn") if sparse else ("ffn",)


def own_attention(fields: JsonFields, layer: int, block: Block) -> Block:
    """Return attention to a chunk or everything, with norms of heads and positions or queries that grow."""
    if not isinstance(block, AttentionBlock):
        return block
    kinds = fields.get("layer_types")
    chunked = isinstance(kinds, list) and kinds[layer] == CHUNKED
    growth = None
    if block.rope is None and fields.flag("attn_temperature_tuning", True):
        growth = QueryGrowth(fields.positive("attn_scale"), fields.count("floor_scale"), first=1)
    return replace(
        block,
        head_norms=block.head_norms and block.rope is not None,
        window=fields.count("attention_chunk_size") if chunked else 0,
        chunked=chunked,
        query_growth=growth,
    )


LLAMA4: Final = Family(
    name="Llama 4",
    covers="Llama 4 Scout and Maverick",
    architecture="Llama4ForCausalLM",
    tensors=TensorNames(
        {**SEPARATE, **network("feed_forward")},
        {**NORMS, **dict.fromkeys(HEAD_NORMS, "")},
        shared=network("feed_forward.shared_expert"),
    ),
    layers=stages,
    mixture=Mixture(
        "feed_forward.router",
        EXPERTS,
        inputs_first={
            "feed_forward.experts.gate_up_proj": (EXPERTS["gate"], EXPERTS["up"]),
            "feed_forward.experts.down_proj": (EXPERTS["down"],),
        },
        shared_field="intermediate_size",
        scoring="sigmoid",
        normalized_field=False,
        weighs_inputs=True,
        dense_field="intermediate_size_mlp",
        count_fields=("num_local_experts",),
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    kinds=(CHUNKED,),
    derived=llama4_layers,
    adapts=own_attention,
    follows=frozenset(
        {
            *("layer_types", "no_rope_layers", "no_rope_layer_interval", "attention_chunk_size"),
            *("moe_layers", "interleave_moe_layer_step", "use_qk_norm"),
            *("attn_temperature_tuning", "floor_scale", "attn_scale"),
        }
    ),
    ignores={
        "for_llm_compressor": "transformers ignores it",
        "attn_temperature_scale": "transformers ignores it",
    },
    biases=ATTENTION_BIASES,
    interleaved_rope=True,
    bos_ids=(1,),
    eos_ids=(2,),
)
