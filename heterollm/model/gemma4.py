"""The declaration of Gemma 4: layers differ in heads, share keys, and have own embeddings or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block import EXPERT_FACTORS, LAYER_SCALE, ROUTER_NORM, Block, Norm
from heterollm.model.blocks import FfnBlock, LayerInputBlock
from heterollm.model.family import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    SECTION_COUNTS,
    SEPARATE,
    Family,
    Mixture,
    StageNames,
    TensorNames,
    every_layer,
)
from heterollm.model.json_fields import JsonFields

FULL: Final = "full_attention"
LAYER_INPUT_WIDTH: Final = "hidden_size_per_layer_input"
"""Elements of a token's embedding for a layer; 0 without."""

HAS_EXPERTS: Final = "enable_moe_block"
"""Whether experts stand beside the network of each layer."""

NORMS: Final[Mapping[Norm, str]] = {
    "attention": "input_layernorm",
    "attention_output": "post_attention_layernorm",
    "feed_forward": "pre_feedforward_layernorm",
    "feed_forward_output": "post_feedforward_layernorm",
    **HEAD_NORMS,
}
LAYERED_NAMES: Final = TensorNames(
    {
        **SEPARATE,
        "layer_gate": {"gate": "per_layer_input_gate"},
        "layer_out": {"out": "per_layer_projection"},
    },
    {**NORMS, "layer_input_output": "post_per_layer_input_norm"},
    layer_inputs="model.embed_tokens_per_layer",
    layer_projection="model.per_layer_model_projection",
    layer_norm="model.per_layer_projection_norm",
)
"""The tensors of models whose layers have own embeddings of tokens."""

ROPES: Final[dict[str, object]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _stages(fields: JsonFields, _layer: int) -> tuple[StageNames, ...]:
    """Return the stages of a layer: experts beside the network, and own embeddings, if the model has them."""
    has_inputs = fields.count(LAYER_INPUT_WIDTH, 0, minimum=0) > 0
    networks: StageNames = ("mixture", "ffn") if fields.flag(HAS_EXPERTS, False) else ("ffn",)
    return (("attention",), networks, *((("layer_input",),) if has_inputs else ()))


def _default_kinds(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of layers of a file without them: every sixth and the last one see everything."""
    layers = fields.count("num_hidden_layers")
    kinds = [FULL if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)]
    return {} if fields.get("layer_types") is not None else {"layer_types": [*kinds[:-1], FULL]}


def source_layer(fields: JsonFields, layer: int) -> int | None:
    """Return the layer whose keys and values a layer reads, the last that has own ones; None for itself."""
    kinds, layers = fields.get("layer_types"), fields.count("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.fail("layer_types", f"a kind for each of {layers} layers")
    own = len(kinds) - fields.count("num_kv_shared_layers", 0, minimum=0)
    if own < 1 or {*map(str, kinds[:own])} != {*map(str, kinds)}:
        raise fields.fail("num_kv_shared_layers", "few enough that a layer of each kind keeps its own keys")
    return None if layer < own else max(at for at in range(own) if kinds[at] == kinds[layer])


def _heads(fields: JsonFields, layer: int, block: AttentionBlock) -> tuple[int, int]:
    """Return the key heads and the width of heads of a layer."""
    kv_heads, head_dim = block.kv_heads, block.head_dim
    stated = fields.section("per_layer_config").get(str(layer))
    if isinstance(stated, Mapping):
        # How transformers writes what the fields of full attention say.
        own = JsonFields(dict[str, Any](stated), f"{fields.where}, per_layer_config of layer {layer}")
        return own.count("num_key_value_heads", kv_heads), own.count("head_dim", head_dim)
    if block.window:
        return kv_heads, head_dim
    if fields.flag("attention_k_eq_v", False) and fields.get("num_global_key_value_heads") is not None:
        kv_heads = fields.count("num_global_key_value_heads")
    return kv_heads, fields.count("global_head_dim", 512)


def own_sizes(fields: JsonFields, layer: int, block: Block) -> Block:
    """Return a block of a layer with the sizes of that layer (configuration_gemma4.py)."""
    source = source_layer(fields, layer)
    if fields.values["layer_types"][-1] != FULL:
        raise fields.fail("layer_types", f"a kind for each layer, of the last {FULL}")
    if isinstance(block, LayerInputBlock):
        vocabulary = fields.count("vocab_size")
        if fields.count("vocab_size_per_layer_input", vocabulary) < vocabulary:
            raise fields.fail("vocab_size_per_layer_input", f"at least the vocab_size of {vocabulary}")
        return block
    if isinstance(block, FfnBlock):
        wide = source is not None and fields.flag("use_double_wide_mlp", False)
        return replace(block, width=block.width * (2 if wide else 1))
    if not isinstance(block, AttentionBlock):
        return block
    kv_heads, head_dim = _heads(fields, layer, block)
    if head_dim % 2 or block.heads % kv_heads:
        raise fields.fail("global_head_dim", f"an even width, of {block.heads} heads that share {kv_heads}")
    return replace(
        block,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        scale=1.0,
        value_norms=True,
        values_are_keys=not block.window and source is None and fields.flag("attention_k_eq_v", False),
        kv_layer=source,
    )


_DEFAULTS: Final[dict[str, object]] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": ROPES,
}
_FOLLOWS: Final = frozenset(
    {
        *("final_logit_softcapping", "hidden_activation", "layer_types", "global_head_dim"),
        *("num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers"),
        *("use_double_wide_mlp", "per_layer_config"),
    }
)

_PLAIN: Final = Family(
    name="Gemma 4",
    covers="Gemma 4 12B, which reads text, images and sound in one stream",
    architecture="Gemma4UnifiedForCausalLM",
    tensors=TensorNames(SEPARATE, NORMS, others={LAYER_SCALE: "layer_scalar"}),
    defaults={**_DEFAULTS, "sliding_window": 1024, "max_position_embeddings": 262_144},
    derived=_default_kinds,
    follows=_FOLLOWS,
    biases=ATTENTION_BIASES,
    slides=every_layer,
    layered_rope=True,
    adapts=own_sizes,
    ignores={
        "original_max_position_embeddings": SECTION_COUNTS,
        **dict.fromkeys(("rope_theta", "rope_scaling"), "rope_parameters counts"),
    },
    scales_embedding=True,
    bos_ids=(2,),
    eos_ids=(1,),
)

GEMMA4: Final[Mapping[str, Family]] = {
    "gemma4_text": replace(
        _PLAIN,
        covers="Gemma 4 E2B, E4B, 26B-A4B and 31B",
        architecture="Gemma4ForCausalLM",
        tensors=replace(
            LAYERED_NAMES,
            norms={
                **LAYERED_NAMES.norms,
                "network_output": "post_feedforward_layernorm_1",
                "experts": "pre_feedforward_layernorm_2",
                "experts_output": "post_feedforward_layernorm_2",
            },
            others={
                LAYER_SCALE: "layer_scalar",
                ROUTER_NORM: "router.scale",
                EXPERT_FACTORS: "router.per_expert_scale",
            },
        ),
        layers=_stages,
        mixture=Mixture(
            "router.proj",
            {member: f"experts.{{expert}}.{member}_proj" for member in ("gate", "up", "down")},
            stacked={"experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",)},
            width_field="moe_intermediate_size",
            shared_field="intermediate_size",
            count_fields=("num_experts",),
            chosen_field="top_k_experts",
        ),
        defaults={
            **_DEFAULTS,
            "sliding_window": 512,
            "max_position_embeddings": 131_072,
            LAYER_INPUT_WIDTH: 256,
            "vocab_size_per_layer_input": 262_144,
        },
        follows=_FOLLOWS | {HAS_EXPERTS, LAYER_INPUT_WIDTH, "vocab_size_per_layer_input"},
    ),
    "gemma4_unified_text": _PLAIN,
}
