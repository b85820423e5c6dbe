"""Reads the blocks of each layer from ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.base import CheckpointError
from heterollm.kernels.gpu import COLUMNS_MULTIPLE, LARGEST_KEY_DIM, DeltaShape
from heterollm.kernels.ops import MOST_STREAMS, Activation, GateClip, Routing
from heterollm.model.attention_blocks import AttentionBlock, LatentAttentionBlock
from heterollm.model.block import EXPERT_FACTORS, LAYER_SCALE, ROUTER_NORM, STREAM_ROUTER, Block, Norm
from heterollm.model.blocks import (
    DeltaNetBlock,
    FfnBlock,
    LaurelBlock,
    LayerInputBlock,
    MambaBlock,
    MixtureBlock,
    ShortConvBlock,
)
from heterollm.model.families import unsupported
from heterollm.model.family import MIXERS, BiasedPart, BlockName, Family, Mixture, StageNames
from heterollm.model.json_fields import JsonFields
from heterollm.model.layers import BlockNorms, LayerConfig, LayerStage, LayerStreams
from heterollm.model.rope_config import read_query_growth, read_ropes, read_rotary_dim

ACTIVATIONS: Mapping[object, Activation] = {
    "silu": "silu",
    "swish": "silu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "gelu": "gelu_erf",
    "relu": "relu",
    "relu2": "relu_squared",
    "xielu": "xielu",
}
"""Activations by their names in ``config.json``."""

KINDS_OF_LAYERS: Final = {"attention": "full_attention"}
"""Other names of kinds in ``layer_types``."""

OWN_NORMS: Final[Mapping[BlockName, tuple[Norm | None, Norm]]] = {
    "ffn": ("network", "network_output"),
    "mixture": ("experts", "experts_output"),
}
"""The norms before and behind blocks that have their own beside others."""

GREEDY: Final = "greedy"
"""The choice of experts without groups, in ``topk_method``."""

MOST_EXPERTS = 10_000
"""A limit that refuses a damaged number before any list over experts is made."""


class BlockFields:
    """The fields of ``config.json`` that belong to blocks of layers.

    Args:
        fields: The fields.
        family: The family.
        layers: Number of layers.
        hidden_size: Width of the residual stream.
        max_positions: Longest supported context.

    Attributes:
        head_dim: Width of a head.
        rope: RoPE of layers with full attention.

    Raises:
        CheckpointError: A field is missing, of the wrong type, or contradicts another.
        UnsupportedModelError: A field is not supported.
    """

    def __init__(
        self, fields: JsonFields, family: Family, layers: int, hidden_size: int, max_positions: int
    ) -> None:
        self._fields, self._family, self._hidden_size = fields, family, hidden_size
        heads = fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", heads)
        head_dim = _head_dim(fields, family, hidden_size, heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} query heads cannot share {kv_heads} key heads.")
        rotary_dim = read_rotary_dim(fields, family, head_dim)
        self.rope, self._sliding_rope = read_ropes(fields, family, rotary_dim, max_positions)
        if family.norms_last and self.rope.kind in ("yarn", "longrope"):
            raise unsupported(f"A RoPE that scales heads ({self.rope.kind}) before their norms")
        scale: float = fields.positive("query_pre_attn_scalar", head_dim) ** -0.5
        if "qk_scale_factor" in family.follows:
            scale *= fields.positive("qk_scale_factor", 1.0)
        if "attention_multiplier" in family.follows:
            scale = fields.positive("attention_multiplier", 1.0)
        modules = family.tensors.modules.get("qkv", {})
        self._attention = AttentionBlock(
            heads,
            kv_heads,
            head_dim,
            window=0,
            rope=self.rope,
            rotary_dim=rotary_dim,
            scale=scale,
            soft_cap=fields.optional_positive("attn_logit_softcapping") or 0.0,
            qkv_bias=is_biased(fields, family, "qkv"),
            o_bias=is_biased(fields, family, "o"),
            head_norms=_has_head_norms(fields, family),
            joint_head_norms=family.joint_head_norms,
            norms_last=family.norms_last,
            query_growth=read_query_growth(fields, family),
            qkv_limit=fields.optional_positive("clip_qkv") or 0.0,
            gated="gate" in modules,
            gates_heads=family.gates_heads,
            sinks="sinks" in family.tensors.others,
            inner_norm="attention_inner" in family.tensors.norms,
        )
        self._activation = _activation(fields, family)
        self._windows = _windows(fields, family, layers)
        self._rotated = _rotated(fields, family, self._windows)

    def layer(self, number: int) -> LayerConfig:
        """Return a layer."""
        stages = []
        rows = self._family.layers(self._fields, number)
        for names in rows:
            norm, output_norm = (
                one if one in self._family.tensors.norms else None for one in _stage_norms(names)
            )
            blocks = tuple(
                self._adapted(number, block) for name in names if (block := self._block(name, number, names))
            )
            stage = LayerStage(norm, blocks, output_norm, self._own_norms(norm, names))
            # The sum of both branches is one of equal size.
            stages.append(replace(stage, gain=0.5**0.5) if "laurel" in names else stage)
        others = self._family.tensors.others
        if STREAM_ROUTER not in others:
            return LayerConfig(tuple(stages), LAYER_SCALE in others)
        first, *rest, last = stages
        stages = [replace(first, streams="predicted"), *rest, replace(last, streams="corrected")]
        return LayerConfig(tuple(stages), streams=self._streams())

    def _streams(self) -> LayerStreams:
        count = self._fields.count("altup_num_inputs", minimum=2, maximum=MOST_STREAMS)
        return LayerStreams(count, scaled=self._fields.flag("altup_correct_scale", True))

    def _own_norms(self, norm: Norm | None, names: StageNames) -> Mapping[str, BlockNorms]:
        """Return the norms of blocks that have their own, in stages of several."""
        found: dict[str, BlockNorms] = {}
        declared = self._family.tensors.norms
        for name in names if len(names) > 1 else ():
            before, behind = (one if one in declared else None for one in OWN_NORMS.get(name, (None, None)))
            if before or behind:
                found[name] = BlockNorms(before or norm, behind)
        return found

    def _adapted(self, layer: int, block: Block) -> Block:
        adapts = self._family.adapts
        return block if adapts is None else adapts(self._fields, layer, block)

    def _block(self, name: BlockName, layer: int, beside: StageNames) -> Block | None:
        """Return a block of a layer; None for shared experts without width."""
        fields, mixture = self._fields, self._family.mixture
        if name == "attention":
            window = self._windows[layer]
            rope = self._sliding_rope if window else self.rope
            return replace(self._attention, window=window, rope=rope if self._rotated[layer] else None)
        if name == "latent_attention":
            return self._latent_attention()
        if name == "layer_input":
            return LayerInputBlock(fields.count("hidden_size_per_layer_input"), self._activation)
        if name == "laurel":
            rank = fields.count("laurel_rank")
            if rank % COLUMNS_MULTIPLE:
                raise fields.fail("laurel_rank", f"a multiple of {COLUMNS_MULTIPLE}")
            return LaurelBlock(self._hidden_size, rank)
        if name == "short_conv":
            return ShortConvBlock(self._hidden_size, fields.count("conv_L_cache", minimum=2))
        if name == "delta_net":
            return DeltaNetBlock(_delta_shape(fields))
        if name == "mamba":
            return self._mamba()
        if name == "mixture":
            assert mixture is not None  # by the family
            width = fields.count(mixture.width_field)
            routing = _routing(fields, mixture)
            bias: tuple[int, ...] = (1, routing.experts) if mixture.bias_row else (routing.experts,)
            clip = GateClip(*map(fields.positive, mixture.clip_fields)) if mixture.clip_fields else None
            if clip is not None and self._activation != "silu":
                raise unsupported(f"Activation {fields.get('hidden_act')!r} of a clipped gate")
            others = self._family.tensors.others
            return MixtureBlock(
                *(routing, width, self._activation),
                bias=bias if routing.biased or mixture.biased else (),
                clip=clip,
                biased=mixture.biased,
                router_normed=ROUTER_NORM in others,
                scaled=EXPERT_FACTORS in others,
                weighs_inputs=mixture.weighs_inputs,
                gated="gate" in mixture.members,
            )
        shared = mixture is not None and "mixture" in beside
        if mixture is None:
            width = fields.count("intermediate_size")
        elif shared and mixture.shared_count_field:
            width = fields.count(mixture.width_field) * fields.count(mixture.shared_count_field, minimum=0)
        elif shared:
            width = fields.count(mixture.shared_field, minimum=0)
        else:
            width = fields.count(mixture.dense_field)
        tensors = self._family.tensors
        biased, gated = is_biased(fields, self._family, "ffn"), "gate" in tensors.modules["gate_up"]
        token_gated = shared and "token_gate" in tensors.others
        inner = "network_inner" in tensors.norms
        return FfnBlock(width, self._activation, biased, gated, token_gated, inner) if width else None

    def _latent_attention(self) -> LatentAttentionBlock:
        fields, own = self._fields, self._attention
        plain = fields.count("qk_nope_head_dim")
        section = fields.section("rope_parameters") or fields.section("rope_scaling")
        growth = section.get("mscale_all_dim")
        scale = (plain + own.rotary_dim) ** -0.5
        if growth and self.rope.kind == "yarn":
            scale *= (0.1 * float(growth) * math.log(max(1.0, float(section["factor"]))) + 1.0) ** 2
        ranked = fields.get("q_lora_rank") is not None
        return LatentAttentionBlock(
            *(own.heads, 1, fields.count("kv_lora_rank") + own.rotary_dim),
            window=0,
            rope=self.rope,
            rotary_dim=own.rotary_dim,
            scale=scale,
            plain_dim=plain,
            value_dim=fields.count("v_head_dim"),
            query_rank=fields.count("q_lora_rank") if ranked else 0,
            interleaved=fields.flag("rope_interleave", True),
        )

    def _mamba(self) -> MambaBlock:
        fields, others = self._fields, self._family.tensors.others
        activation = fields.get("mamba_hidden_act") or fields.get("hidden_act") or "silu"
        if ACTIVATIONS.get(activation) != "silu":
            raise unsupported(f"Activation {activation!r} of a state space")
        groups, heads = fields.count("mamba_n_groups"), fields.count("mamba_n_heads")
        if heads % groups:
            raise fields.fail("mamba_n_heads", f"a multiple of the {groups} of mamba_n_groups")
        shape = DeltaShape(
            *(groups, heads, fields.count("mamba_d_state", maximum=LARGEST_KEY_DIM)),
            *(fields.count("mamba_d_head"), fields.count("mamba_d_conv", minimum=2)),
            recalls=False,
        )
        return MambaBlock(
            shape,
            normed="gated_norm" in others and fields.flag("mamba_rms_norm", True),
            gate_first=not fields.flag("mamba_norm_before_gate", False),
            biased=fields.flag("mamba_conv_bias", True),
        )


def _has_head_norms(fields: JsonFields, family: Family) -> bool:
    """Return whether heads have norms: where a family has them, unless a field that it follows denies it."""
    optional = "use_qk_norm" in family.follows
    return "query_head" in family.tensors.norms and (not optional or fields.flag("use_qk_norm", False))


def _stage_norms(names: StageNames) -> tuple[Norm | None, Norm]:
    """Return the norm before a stage, and that of its outputs, in families that have them."""
    if "layer_input" in names:
        return None, "layer_input_output"
    mixes = any(name in MIXERS for name in names)
    return ("attention", "attention_output") if mixes else ("feed_forward", "feed_forward_output")


def is_biased(fields: JsonFields, family: Family, part: BiasedPart) -> bool:
    """Return whether the linears of a part of the model have biases."""
    field = family.biases.get(part, False)
    return fields.flag(field, False) if isinstance(field, str) else field


def _activation(fields: JsonFields, family: Family) -> Activation:
    field = "hidden_activation" if "hidden_activation" in family.follows else "hidden_act"
    stated = fields.get(field)
    named = "silu" if stated is None else stated
    known = family.activation_aliases.get(named, named) if isinstance(named, str) else ""
    if known not in ACTIVATIONS or (known == "xielu" and "rising" not in family.tensors.others):
        raise unsupported(f"Activation {named!r}")
    return ACTIVATIONS[known]


def _windows(fields: JsonFields, family: Family, layers: int) -> list[int]:
    """Return the window of each layer, 0 for none."""
    unused = "use_sliding_window" in family.follows and not fields.flag("use_sliding_window", False)
    window = 0
    if family.slides is not None and not unused and fields.get("sliding_window") is not None:
        window = fields.count("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is None:
        slides = family.slides
        return [window if window and slides and slides(fields, at) else 0 for at in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.fail("layer_types", f"a list of {layers} kinds of layers")
    kinds = [KINDS_OF_LAYERS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", *family.kinds):
            raise unsupported(f"A layer of kind {kind!r}")
    if "sliding_attention" in kinds and not window:
        raise fields.fail("sliding_window", "a whole number, in use, for the layer_types that slide")
    if "layer_types" not in family.follows and len({*kinds, *(["sliding_attention"] if window else [])}) > 1:
        raise unsupported(f"Layers of different kinds (layer_types) in model type {family.name}")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _rotated(fields: JsonFields, family: Family, windows: list[int]) -> list[bool]:
    """Return whether each layer has RoPE."""
    layers = len(windows)
    if family.rope_needs_window and fields.get("sliding_window") is not None:
        return [bool(window) for window in windows]
    if family.tensors.positions or family.without_rope:
        return [False] * layers
    if "position_embedding_type" in family.follows:
        return [fields.get("position_embedding_type") == "rope"] * layers
    if "no_rope_layers" not in family.follows:
        return [True] * layers
    stated = fields.get("no_rope_layers")
    if stated is None:
        interval = fields.count("no_rope_layer_interval")
        return [bool((at + 1) % interval) for at in range(layers)]
    if not isinstance(stated, list) or len(stated) < layers or any(one not in (0, 1) for one in stated):
        raise fields.fail("no_rope_layers", f"a list of {layers} times 0 or 1")
    return [bool(one) for one in stated[:layers]]


def _head_dim(fields: JsonFields, family: Family, hidden_size: int, heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden_size} is not divisible by {heads} heads.")
    head_dim = fields.count("head_dim", hidden_size // heads)
    spans = family.joint_head_norms or "attention_inner" in family.tensors.norms
    if spans and head_dim * heads != hidden_size:
        raise fields.fail("head_dim", f"{hidden_size // heads}, since a norm spans all heads")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    return head_dim


def _delta_shape(fields: JsonFields) -> DeltaShape:
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    if values % keys:
        raise fields.fail("linear_num_value_heads", f"a multiple of the {keys} of linear_num_key_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    if key_dim > LARGEST_KEY_DIM:
        raise unsupported(f"A delta net with linear_key_head_dim {key_dim}, above {LARGEST_KEY_DIM},")
    return DeltaShape(keys, values, key_dim, value_dim, fields.count("linear_conv_kernel_dim", minimum=2))


def _routing(fields: JsonFields, mixture: Mixture) -> Routing:
    # transformers writes either name, whichever the family's publisher took.
    stated = (name for name in mixture.count_fields if fields.get(name) is not None)
    count = next(stated, mixture.count_fields[-1])
    experts = fields.count(count, maximum=MOST_EXPERTS)
    chosen, bias = fields.count(mixture.chosen_field), mixture.bias_field
    if chosen > experts:
        raise fields.fail(mixture.chosen_field, f"at most the {experts} of {count}")
    groups, kept_groups = _groups(fields, mixture, experts, chosen)
    sparsemixer = mixture.scoring == "sparsemixer"
    if sparsemixer and chosen != 2:
        raise fields.fail("num_experts_per_tok", "2, the number that sparsemixer chooses")
    if mixture.weighs_inputs and chosen != 1:
        raise fields.fail(mixture.chosen_field, "1, since its weight multiplies the input of an expert")
    field = mixture.normalized_field
    normalized = not sparsemixer and field is not False
    return Routing(
        experts,
        chosen,
        mixture.scoring,
        normalized=fields.flag(field, False) if field else normalized,
        scale=fields.positive(mixture.scale_field, 1.0) if mixture.scale_field else 1.0,
        jitter=fields.positive("router_jitter_noise") if sparsemixer else 0.0,
        biased=fields.flag(bias, True) if isinstance(bias, str) else bias,
        groups=groups,
        kept_groups=kept_groups,
    )


def _groups(fields: JsonFields, mixture: Mixture, experts: int, chosen: int) -> tuple[int, int]:
    """Return the groups of experts, and those from which a token chooses; 1 and 1 without groups."""
    method = fields.get("topk_method") or GREEDY
    if mixture.group_method and method not in (GREEDY, mixture.group_method):
        raise fields.fail("topk_method", f"{GREEDY} or {mixture.group_method}")
    if not mixture.group_fields or mixture.group_method not in ("", method):
        return 1, 1
    name, kept_name = mixture.group_fields
    groups = fields.count(name, 1)
    kept = fields.count(kept_name, 1, maximum=groups)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise fields.fail(name, f"a divisor of {experts} experts, with several in each group")
    if experts // groups * kept < chosen:
        raise fields.fail(kept_name, f"groups with at least the {chosen} experts that a token chooses")
    return groups, kept
