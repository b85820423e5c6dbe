"""The declaration of Muse Glimmer: norms of heads and the embedding without weights, gates of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block import Block
from heterollm.model.family import OUTPUT_NORMS, SEPARATE, Family, TensorNames, every_layer
from heterollm.model.json_fields import JsonFields

PERIOD: Final = 4
"""Of so many layers, counted from the last, one sees everything and has no positions."""


def _by_layer(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of layers and which have positions, as transformers completes them."""
    layers = fields.count("num_hidden_layers")
    whole = [(layers - 1 - layer) % PERIOD == 0 for layer in range(layers)]
    kinds = ["full_attention" if one else "sliding_attention" for one in whole]
    found = {"layer_types": kinds, "layer_rope_theta": [0 if one else 1 for one in whole]}
    return {name: value for name, value in found.items() if fields.get(name) is None}


def _own_positions(fields: JsonFields, layer: int, block: Block) -> Block:
    """Return attention without RoPE where the base of the layer is 0; another base does not count."""
    if not isinstance(block, AttentionBlock):
        return block
    bases, layers = fields.get("layer_rope_theta"), fields.count("num_hidden_layers")
    if not isinstance(bases, list) or len(bases) != layers or not isinstance(bases[layer], int | float):
        raise fields.fail("layer_rope_theta", f"a number for each of {layers} layers")
    return block if bases[layer] else replace(block, rope=None)


MUSE_GLIMMER: Final[Mapping[str, Family]] = {
    "muse_glimmer_text": Family(
        name="Muse Glimmer",
        covers="the text part of Muse Glimmer 30B",
        architecture="MuseGlimmerForCausalLM",
        tensors=TensorNames(
            {**SEPARATE, "qkv": {**SEPARATE["qkv"], "gate": "self_attn.gate_proj"}},
            {
                "attention": "input_layernorm",
                "feed_forward": "pre_feedforward_layernorm",
                **OUTPUT_NORMS,
                "query_head": "",
                "key_head": "",
            },
        ),
        defaults={
            "vocab_size": 202_048,
            "hidden_size": 6656,
            "intermediate_size": 19_968,
            "num_hidden_layers": 52,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "hidden_activation": "silu",
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "logit_scale": 0.19611613513818404,
        },
        renamed={"logit_scale": "output_multiplier"},
        derived=_by_layer,
        adapts=_own_positions,
        follows=frozenset(
            {
                *("final_logit_softcapping", "hidden_activation", "layer_types", "layer_rope_theta"),
                *("qk_scale_factor", "post_norm_eps"),
            }
        ),
        slides=every_layer,
        norm_offset=1.0,
        plain_final_norm=True,
        norms_embedding=True,
        bos_ids=(200_000,),
        eos_ids=(200_001,),
    )
}
