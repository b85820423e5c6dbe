"""The parts of a declaration of a model family, and tensor names that many families have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from heterollm.kernels.ops import Group, Scoring
from heterollm.model.block import Block, Norm
from heterollm.model.fields import TypeFields
from heterollm.model.json_fields import JsonFields
from heterollm.model.rope import RopeKind

BlockName = Literal[
    "attention",
    "latent_attention",
    "short_conv",
    "delta_net",
    "mamba",
    "ffn",
    "layer_input",
    "laurel",
    "mixture",
]
MIXERS: Final = ("attention", "latent_attention", "short_conv", "delta_net", "mamba")
"""Blocks that mix tokens; the others compute each token by itself."""

BiasedPart = Literal["qkv", "o", "ffn", "head"]
StageNames: TypeAlias = tuple[BlockName, ...]
LayerNames: TypeAlias = Callable[[JsonFields, int], tuple[StageNames, ...]]
"""Returns the blocks of each stage of a layer; where attention is alone, feed-forward networks come next."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensor names of a family in its Hugging Face checkpoints.

    Args:
        modules: For each group that a layer may have, the module of each member, below the prefix. Members
            that share a module are stacked in its tensor: q and its gate head by head, and the members of a
            delta net by key heads if z is among those of q.
        shared: The modules of groups in layers with experts, where they differ.
        norms: For each norm that a layer may have, the module; "" for one without weights.
        others: For the role of each other tensor of a layer, its name.
        layer: Prefix of a decoder layer's tensors, with ``{layer}`` for its number.
        embedding: Module of the token embedding.
        layer_inputs: Module of the table with an embedding of each token for each layer; "" without.
        layer_projection: Module of the linear of the embedding whose output is added to that.
        layer_norm: Module of the norm of its output for each layer.
        stream_openings: Module of the linear that makes a further stream of the embedding, with
            ``{stream}`` for its number from 0 on; "" with one stream.
        stream_closings: Module of the linear of its end, likewise.
        positions: Module of a table of learned positions, which layers have instead of RoPE; "" without.
        final_norm: Module of the norm before the head; "" for one without weights.
        head: Module of an untied LM head.
        unread: Beginnings of names of tensors that the model does not compute with, with ``{layers}`` for the
            number of layers, and ``{layer}`` for that of each.
    """

    modules: Mapping[Group, Mapping[str, str]]
    norms: Mapping[Norm, str]
    shared: Mapping[Group, Mapping[str, str]] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    layer: str = "model.layers.{layer}."
    embedding: str = "model.embed_tokens"
    layer_inputs: str = ""
    layer_projection: str = ""
    layer_norm: str = ""
    stream_openings: str = ""
    stream_closings: str = ""
    positions: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mixture:
    """The mixture of experts in layers of a family.

    Args:
        router: Module of the router, below the layer's prefix.
        members: Module of gate, up and down, with ``{expert}`` for the number of an expert; without it the
            tensor ``[experts, rows, k]`` holds all experts, and members that share it follow each other.
        stacked: Tensors ``[experts, rows, k]`` that some checkpoints have instead, with the members in each,
            whose rows follow each other.
        alternating: Modules with a stack of all experts in which the rows of these members alternate, as
            floats with inputs first, or as MXFP4 (:mod:`heterollm.model.stored.stacked_experts`).
        inputs_first: Such modules of floats in which the rows of these members follow each other.
        width_field: Field with the width of an expert.
        shared_field: Field with the width of the experts that compute every token, 0 for none; "" in a family
            without them.
        shared_count_field: Field with their number instead, each of which is as wide as another expert.
        scoring: Function from the router's logits to the scores. ``sparsemixer`` chooses the largest logit,
            then the largest of the others; the weight of each is its share in the softmax over the logits
            near it (https://arxiv.org/abs/2409.12136).
        normalized_field: Field that says whether the chosen weights are divided by their sum; "" for always,
            false for never.
        bias_field: Field that says whether experts are chosen by score plus a bias, the other tensor
            ``router_bias``; true for always.
        biased: Whether the logits have a bias, the other tensor ``router_bias``, and so have gate, up and
            down of each expert: ``gate_bias``, ``up_bias`` and ``down_bias``.
        clip_fields: Fields with the bound of gate and up, and the slope of the gate's sigmoid; empty in a
            family without.
        bias_row: Whether that tensor has the shape ``[1, experts]``.
        weighs_inputs: Whether the weight of a token's only expert multiplies its input, not its output.
        group_fields: Fields with the groups of experts, and those from which a token chooses; empty in a
            family without.
        group_method: Value of ``topk_method`` with which groups count; "" for always.
        scale_field: Field with a factor on the weights; "" in a family without.
        dense_field: Field with the width of the network in layers without experts.
        count_fields: Fields with the number of experts. The first that a configuration has counts; families
            give the last a default.
        chosen_field: Field with the number that a token chooses.
    """

    router: str
    members: Mapping[str, str]
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alternating: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inputs_first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    width_field: str = "intermediate_size"
    shared_field: str = ""
    shared_count_field: str = ""
    scoring: Scoring = "softmax"
    normalized_field: str | Literal[False] = ""
    bias_field: str | bool = False
    biased: bool = False
    clip_fields: tuple[str, ...] = ()
    bias_row: bool = False
    weighs_inputs: bool = False
    group_fields: tuple[str, ...] = ()
    group_method: str = ""
    scale_field: str = ""
    dense_field: str = "intermediate_size"
    count_fields: tuple[str, ...] = ("num_local_experts", "num_experts")
    chosen_field: str = "num_experts_per_tok"

    @property
    def fields(self) -> frozenset[str]:
        """The fields of ``config.json`` that it reads."""
        own = (
            *(*self.clip_fields, *self.group_fields, "topk_method" if self.group_method else ""),
            *(self.width_field, self.shared_field, self.shared_count_field, self.normalized_field),
            *(self.bias_field, self.scale_field, self.dense_field, self.chosen_field),
        )
        return frozenset({*self.count_fields, *(name for name in own if isinstance(name, str) and name)})


def alike(*stages: StageNames) -> LayerNames:
    """Return the layers of a family in which all have the same blocks."""
    return lambda _fields, _layer: stages


def perhaps_parallel(fields: JsonFields, _layer: int) -> tuple[StageNames, ...]:
    """Return a layer whose attention and network stand side by side if ``use_parallel_residual`` says so."""
    parallel = fields.flag("use_parallel_residual", False)
    return (("attention", "ffn"),) if parallel else (("attention",), ("ffn",))


def sparse_steps(mixer: StageNames, *, dense: StageNames, sparse: StageNames) -> LayerNames:
    """Return layers of which every ``decoder_sparse_step``-th is sparse, but none of ``mlp_only_layers``."""

    def stages(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
        listed = fields.get("mlp_only_layers") or []
        if not isinstance(listed, list) or any(type(one) is not int for one in listed):
            raise fields.fail("mlp_only_layers", "a list of numbers of layers")
        steps = (layer + 1) % fields.count("decoder_sparse_step", 1) == 0
        return mixer, sparse if steps and layer not in listed else dense

    return stages


def sparse_behind(layers: LayerNames, field: str, *, sparse: StageNames = ("mixture",)) -> LayerNames:
    """Return layers whose networks become sparse ones behind the first layers, which a field counts."""

    def stages(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
        found = layers(fields, layer)
        if layer < fields.count(field, minimum=0):
            return found
        return tuple(sparse if names == ("ffn",) else names for names in found)

    return stages


def by_type(kinds: Mapping[str, tuple[StageNames, ...]]) -> LayerNames:
    """Return the layers of a family whose ``layer_types`` names one of these kinds for each."""

    def stages(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
        listed = fields.get("layer_types")
        if not isinstance(listed, list) or layer >= len(listed) or listed[layer] not in kinds:
            raise fields.fail("layer_types", f"{', '.join(kinds)} for each layer")
        return kinds[listed[layer]]

    return stages


SECTION_COUNTS: Final = "that of the section counts, else max_position_embeddings"
DENSE: Final = alike(("attention",), ("ffn",))


def gated_network(module: str) -> Mapping[Group, Mapping[str, str]]:
    """Return the names of a network with a gate, a tensor for each linear."""
    rows = {member: f"{module}.{member}_proj" for member in ("gate", "up")}
    return {"gate_up": rows, "down": {"down": f"{module}.down_proj"}}


SEPARATE: Final[Mapping[Group, Mapping[str, str]]] = {
    "qkv": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    "o": {"o": "self_attn.o_proj"},
    **gated_network("mlp"),
}
NORMS: Final[Mapping[Norm, str]] = {
    "attention": "input_layernorm",
    "feed_forward": "post_attention_layernorm",
}
LLAMA_NAMES: Final = TensorNames(SEPARATE, NORMS)


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of a model type.

    Args:
        name: Display name.
        covers: Well-known models of the family.
        architecture: The class in transformers.
        tensors: Tensor names, by default Llama's; attention has norms of heads, and outputs have norms, if
            they list them.
        layers: The blocks of each layer.
        kinds: Kinds of layers in ``layer_types`` beside full and sliding attention.
        defaults: Default values of ``config.json`` that differ from Llama's.
        renamed: The family's own names of common fields, by the common name.
        derived: Returns common fields that follow from the family's own ones; None in a family without any.
        adapts: Returns a block of a layer with the sizes of that layer; None where all are alike.
        ignores: Fields that change other families and not this one, each with the reason.
        layered_rope: Whether layers with a window have a RoPE of their own.
        rope_needs_window: Whether layers without a window have no RoPE in a model with windows.
        activation_aliases: Other names of activations.
        interleaved_rope: Whether RoPE rotates neighbouring elements of a head. The rows of q and k are
            reordered as weights are read, so that elements half a head apart give the same scores.
        grouped_heads: Whether the tensor of q, k and v has the queries of a key head, that head and its value
            head, and then the next.
        follows: Supported optional fields; other families refuse one that changes the result.
        biases: Parts of the model that may have biases, each with the field that says so; true for always.
        slides: Whether a layer has the sliding window if ``layer_types`` is missing; None in a family
            without windows.
        rope_aliases: Other names of RoPE types.
        norm_offset: Added to the stored weight of every norm.
        plain_final_norm: Whether that before the head has no such offset.
        norms_embedding: Whether the embedding has a norm without weights.
        gates_heads: Whether a gate of attention has one row for each head.
        scales_embedding: Whether the embedding is multiplied by the square root of its width.
        first_position: Row of the first position in the table of learned ones.
        without_rope: Whether no layer has positions.
        mixture: The experts of its layers; None in a family without them.
        centered_norms: Whether norms subtract the mean (LayerNorm).
        norm_biases: Whether norms that do have a bias.
        joint_head_norms: Whether the norm of q, and that of k, spans all heads.
        norms_last: Whether the norms of heads come behind RoPE.
        linear_factors: Returns factors on the outputs of linears by group and member; None without.
        published_code: The classes in ``auto_map`` of official checkpoints that predate the family's support
            in transformers, or have none; any other code is refused. A class may also stand for the
            architecture.
        bos_ids: Default of ``bos_token_id``.
        eos_ids: Default of ``eos_token_id``.
    """

    name: str
    covers: str
    architecture: str
    tensors: TensorNames = LLAMA_NAMES
    layers: LayerNames = DENSE
    kinds: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[JsonFields], Mapping[str, object]] | None = None
    adapts: Callable[[JsonFields, int, Block], Block] | None = None
    ignores: Mapping[str, str] = field(default_factory=dict)
    layered_rope: bool = False
    rope_needs_window: bool = False
    activation_aliases: Mapping[str, str] = field(default_factory=dict)
    interleaved_rope: bool = False
    grouped_heads: bool = False
    follows: frozenset[str] = frozenset()
    biases: Mapping[BiasedPart, str | Literal[True]] = field(default_factory=dict)
    slides: Callable[[JsonFields, int], bool] | None = None
    rope_aliases: Mapping[str, RopeKind] = field(default_factory=dict)
    norm_offset: float = 0.0
    plain_final_norm: bool = False
    norms_embedding: bool = False
    gates_heads: bool = False
    scales_embedding: bool = False
    first_position: int = 0
    without_rope: bool = False
    mixture: Mixture | None = None
    centered_norms: bool = False
    norm_biases: bool = True
    joint_head_norms: bool = False
    norms_last: bool = False
    linear_factors: Callable[[JsonFields], tuple[tuple[Group, str, float], ...]] | None = None
    published_code: tuple[str, ...] = ()
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()

    @property
    def fields(self) -> TypeFields:
        """The optional fields of ``config.json`` that it reads, and its names of common ones."""
        windows = frozenset() if self.slides is None else frozenset({"sliding_window"})
        experts = frozenset() if self.mixture is None else self.mixture.fields
        biases = frozenset(name for name in self.biases.values() if isinstance(name, str))
        return TypeFields(self.follows | windows | experts | biases, self.renamed, self.ignores)


FUSED_NETWORK: Final[Mapping[Group, Mapping[str, str]]] = {
    **SEPARATE,
    "gate_up": dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
}
ATTENTION_BIASES: Final[Mapping[BiasedPart, str]] = {"qkv": "attention_bias", "o": "attention_bias"}
BIASES: Final[Mapping[BiasedPart, str]] = {**ATTENTION_BIASES, "ffn": "mlp_bias"}
OUTPUT_NORMS: Final[Mapping[Norm, str]] = {
    "attention_output": "post_attention_layernorm",
    "feed_forward_output": "post_feedforward_layernorm",
}
HEAD_NORMS: Final[Mapping[Norm, str]] = {"query_head": "self_attn.q_norm", "key_head": "self_attn.k_norm"}


def no_layer(_fields: JsonFields, _layer: int) -> bool:
    """Return false."""
    return False


def every_layer(_fields: JsonFields, _layer: int) -> bool:
    """Return true."""
    return True


def after_full_layers(fields: JsonFields, layer: int) -> bool:
    """Return whether a layer follows the first ``max_window_layers``, which have full attention."""
    return layer >= fields.count("max_window_layers", minimum=0)


def all_but_every_nth(fields: JsonFields, layer: int) -> bool:
    """Return false for every ``sliding_window_pattern``-th layer, which has full attention."""
    return (layer + 1) % fields.count("sliding_window_pattern") != 0


def all_but_every_fourth(_fields: JsonFields, layer: int) -> bool:
    """Return false for the first and every fourth layer from there, which has full attention."""
    return layer % 4 != 0
