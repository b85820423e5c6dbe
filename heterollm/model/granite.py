"""Granite 3 and 4 without experts, with windows or without (``modeling_granite.py`` in transformers)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block import Block
from heterollm.model.family import BIASES, NORMS, SEPARATE, Family, TensorNames, all_but_every_fourth
from heterollm.model.json_fields import JsonFields

GRANITE_FIELDS = frozenset(
    {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}
)


def own_base(fields: JsonFields, layer: int, block: Block) -> Block:
    """Return attention with the base of RoPE that the layer has, without RoPE for 0."""
    bases = fields.get("layer_rope_theta")
    if bases is None or not isinstance(block, AttentionBlock) or block.rope is None:
        return block
    base = bases[layer] if isinstance(bases, list) and len(bases) > layer else None
    if not isinstance(base, int | float) or not (base == 0 or 1 < base < math.inf):
        raise fields.fail("layer_rope_theta", "for each layer 0 or a number above 1")
    return replace(block, rope=replace(block.rope, base=float(base)) if base else None)


GRANITES: Final[Mapping[str, Family]] = {
    "granite": Family(
        name="Granite",
        covers="Granite 3 and 4 without experts",
        architecture="GraniteForCausalLM",
        follows=GRANITE_FIELDS,
        biases=BIASES,
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    "granite_swa": Family(
        name="Granite with windows",
        covers="Granite with windows and sinks",
        architecture="GraniteSWAForCausalLM",
        tensors=TensorNames(SEPARATE, NORMS, others={"sinks": "self_attn.sinks"}),
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
        adapts=own_base,
        follows=GRANITE_FIELDS | {"layer_types", "layer_rope_theta"},
        biases=BIASES,
        slides=all_but_every_fourth,
        bos_ids=(100_257,),
        eos_ids=(100_257,),
    ),
}
