"""The declaration of Gemma 3n: several residual streams, low-rank branches, sparse gates, shared keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block import (
    STREAM_CORRECTION,
    STREAM_PREDICTION,
    STREAM_ROUTER,
    STREAM_ROUTER_NORM,
    STREAM_SCALE,
    Block,
)
from heterollm.model.blocks import FfnBlock
from heterollm.model.family import ATTENTION_BIASES, SECTION_COUNTS, Family, alike, every_layer
from heterollm.model.gemma4 import FULL, LAYER_INPUT_WIDTH, LAYERED_NAMES, source_layer
from heterollm.model.json_fields import JsonFields

SPARSITY: Final = "activation_sparsity_pattern"
WIDTHS: Final = "intermediate_sizes"
"""The width of each layer's network, from an intermediate_size that lists them."""

SPARSE_LAYERS: Final = 10
"""First layers whose gates are sparse in a file that does not say which."""


def _by_layer(fields: JsonFields) -> dict[str, object]:
    """Return the kinds, widths and sparsities of layers, as transformers completes them."""
    layers = fields.count("num_hidden_layers")
    kinds = [FULL if (layer + 1) % 5 == 0 else "sliding_attention" for layer in range(layers)]
    sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
    widths, sparsity = fields.get("intermediate_size"), fields.get(SPARSITY)
    listed = widths if isinstance(widths, list) else [widths] * layers
    if len(listed) != layers:
        raise fields.fail("intermediate_size", f"a width, or one for each of {layers} layers")
    return {
        "layer_types": kinds if fields.get("layer_types") is None else fields.get("layer_types"),
        "intermediate_size": listed[0],
        WIDTHS: listed,
        SPARSITY: [0.95] * sparse + [0.0] * (layers - sparse) if sparsity is None else sparsity,
    }


def _sparsity(fields: JsonFields, layer: int) -> float:
    stated = fields.get(SPARSITY)
    layers = fields.count("num_hidden_layers")
    if not isinstance(stated, list) or len(stated) != layers:
        raise fields.fail(SPARSITY, f"a number for each of {layers} layers")
    own = stated[layer]
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own < 1:
        raise fields.fail(SPARSITY, "numbers from 0 to below 1")
    return float(own)


def _own_sizes(fields: JsonFields, layer: int, block: Block) -> Block:
    """Return a block of a layer with what differs by layer (configuration_gemma3n.py)."""
    if isinstance(block, FfnBlock):
        width = JsonFields({"intermediate_size": fields.values[WIDTHS][layer]}, fields.where)
        return replace(block, width=width.count("intermediate_size"), sparsity=_sparsity(fields, layer))
    if isinstance(block, AttentionBlock):
        source = source_layer(fields, layer)
        return replace(block, scale=1.0, value_norms=True, kv_layer=source)
    return block


GEMMA3N: Final[Mapping[str, Family]] = {
    "gemma3n_text": Family(
        name="Gemma 3n",
        covers="Gemma 3n E2B and E4B",
        architecture="Gemma3nForCausalLM",
        tensors=replace(
            LAYERED_NAMES,
            norms={**LAYERED_NAMES.norms, "laurel_output": "laurel.post_laurel_norm"},
            others={
                "laurel_left": "laurel.linear_left.weight",
                "laurel_right": "laurel.linear_right.weight",
                STREAM_ROUTER: "altup.modality_router.weight",
                STREAM_ROUTER_NORM: "altup.router_norm.weight",
                STREAM_PREDICTION: "altup.prediction_coefs.weight",
                STREAM_CORRECTION: "altup.correction_coefs.weight",
                STREAM_SCALE: "altup.correct_output_scale",
            },
            stream_openings="model.altup_projections.{stream}",
            stream_closings="model.altup_unembed_projections.{stream}",
        ),
        layers=alike(("laurel", "attention"), ("ffn",), ("layer_input",)),
        defaults={
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32_768,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": 30.0,
            "num_kv_shared_layers": 15,
            LAYER_INPUT_WIDTH: 256,
            "vocab_size_per_layer_input": 262_144,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
        },
        derived=_by_layer,
        follows=frozenset(
            {
                *("final_logit_softcapping", "hidden_activation", "layer_types", "num_kv_shared_layers"),
                *("rope_local_base_freq", LAYER_INPUT_WIDTH, "vocab_size_per_layer_input", SPARSITY),
                *("altup_num_inputs", "altup_correct_scale", "laurel_rank"),
            }
        ),
        biases=ATTENTION_BIASES,
        slides=every_layer,
        layered_rope=True,
        adapts=_own_sizes,
        ignores={"original_max_position_embeddings": SECTION_COUNTS, "altup_coef_clip": "training"},
        scales_embedding=True,
        bos_ids=(2,),
        eos_ids=(1,),
    )
}
