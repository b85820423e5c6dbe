"""Lists the tensors and the operators of a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu import DeltaShape
from heterollm.kernels.ops import Group, Member
from heterollm.model.attention_blocks import AttentionBlock, LatentAttentionBlock
from heterollm.model.block import GroupShape, Norm
from heterollm.model.blocks import DeltaNetBlock, MambaBlock, MixtureBlock
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import expert_tensors
from heterollm.model.families import FAMILIES
from heterollm.model.family import TensorNames
from heterollm.model.tensor_rows import HeadOrder, TensorRows

HEAD_LAYER = -1
"""Layer number of the LM head."""


def group_shapes(config: ModelConfig, layer: int) -> tuple[GroupShape, ...]:
    """Return the groups of linears of a layer that a plan places, in order, or that of ``HEAD_LAYER``."""
    hidden = config.hidden_size
    if layer == HEAD_LAYER:
        members = (Member("head", config.vocab_size),)
        ends = ("final_norm",), "join_logits"
        return (GroupShape("head", members, hidden, "head_input", "logits", *ends, config.head_bias),)
    return tuple(shape for stage in config.per_layer[layer].stages for shape in stage.groups(hidden))


def linear_names(config: ModelConfig, layer: int) -> dict[Group, dict[str, str]]:
    """Return the weight name of each member of each group of a layer, or of ``HEAD_LAYER``.

    A tied head has the embedding's name; members that are stacked in one tensor share its name.
    """
    names = _tensors(config)
    if layer == HEAD_LAYER:
        return {"head": {"head": embedding_name(config) if config.tie_word_embeddings else head_name(config)}}
    prefix = names.layer.format(layer=layer)
    sparse = config.per_layer[layer].find(MixtureBlock) is not None
    modules = {**names.modules, **names.shared} if sparse else names.modules
    return {
        shape.group: {
            member.name: f"{prefix}{modules[shape.group][member.name]}.weight" for member in shape.members
        }
        for shape in group_shapes(config, layer)
    }


def linear_rows(config: ModelConfig, layer: int) -> dict[Group, dict[str, TensorRows]]:
    """Return the weight's tensor and rows for each member of each group, as :func:`linear_names`."""
    found: dict[Group, dict[str, TensorRows]] = {}
    names = linear_names(config, layer)
    for shape in group_shapes(config, layer):
        used: dict[str, int] = {}
        found[shape.group] = {}
        orders = _head_orders(config, layer, shape.group)
        for member in shape.members:
            name, order = names[shape.group][member.name], orders.get(member.name)
            if order is not None:
                rows = TensorRows(name, 0, order.groups * order.stride, order)
            else:
                start = used.get(name, 0)
                used[name] = start + member.rows
                rows = TensorRows(name, start, used[name])
            found[shape.group][member.name] = rows
    return found


def row_factors(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Return the factors on rows of linears by name, of those that have some."""
    found: dict[str, NDArray[np.float32]] = {}
    for layer in range(config.layers if config.linear_factors else 0):
        names = linear_rows(config, layer)
        for group, member, factor in config.linear_factors:
            if group in names and factor != 1.0:
                rows = names[group][member]
                stop = max(own.stop for own in names[group].values() if own.name == rows.name)
                factors = found.setdefault(rows.name, np.ones(stop, np.float32))
                for first, last in rows.ranges:
                    factors[first:last] *= np.float32(factor)
    return found


def _head_orders(config: ModelConfig, layer: int, group: Group) -> dict[str, HeadOrder]:
    """Return the order of rows of each member of a group that a checkpoint has in another one."""
    family = FAMILIES[config.model_type]
    names = family.tensors.modules.get(group, {})
    if group == "delta_in" and names["q"] == names["z"]:
        net = config.per_layer[layer].find(DeltaNetBlock)
        assert net is not None  # the layer has the group
        return {
            name: order
            for own in (("q", "k", "v", "z"), ("b", "a"))
            for name, order in _in_turns(net.shape, own, net.shape.key_heads).items()
        }
    if group == "mamba_in":
        space = config.per_layer[layer].find(MambaBlock)
        assert space is not None  # the layer has the group
        return _in_turns(space.shape, ("z", "v", "k", "q", "a"))
    latent = config.per_layer[layer].find(LatentAttentionBlock)
    if latent is not None and group in ("latent_in", "latent_query"):
        return _latent_orders(latent, group)
    if group != "qkv":
        return {}
    block = config.per_layer[layer].find(AttentionBlock)
    assert block is not None  # the layer has the group
    dim = block.head_dim
    if block.gated and names["gate"] == names["q"]:
        return {
            name: HeadOrder(block.heads, 2 * dim, first, 1, dim) for name, first in (("q", 0), ("gate", dim))
        }
    if family.grouped_heads:
        queries = block.heads // block.kv_heads
        heads = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}
        stride = (queries + 2) * dim
        return {
            name: HeadOrder(block.kv_heads, stride, first * dim, count, dim)
            for name, (first, count) in heads.items()
        }
    if family.interleaved_rope and block.rope is not None:
        counts = {"q": block.heads, "k": block.kv_heads}
        return {
            name: HeadOrder(1, count * dim, 0, count, dim, block.rotary_dim) for name, count in counts.items()
        }
    return {}


def _latent_orders(block: LatentAttentionBlock, group: Group) -> dict[str, HeadOrder]:
    """Return the order of the parts of queries, head by head, and of the rotated key."""
    plain, turned = block.plain_dim, block.rotary_dim
    stride, paired = plain + turned, turned if block.interleaved else 0
    key = {"r": HeadOrder(1, block.head_dim, block.latent_dim, 1, turned, paired)}
    queries = {
        "q": HeadOrder(block.heads, stride, 0, 1, plain),
        "p": HeadOrder(block.heads, stride, plain, 1, turned, paired),
    }
    if group == "latent_query":
        return queries
    return key if block.query_rank else {**queries, **key}


def _in_turns(shape: DeltaShape, names: Sequence[str], turns: int = 1) -> dict[str, HeadOrder]:
    """Return the order of members of a delta net that a tensor has in this order, once or by key heads."""
    rows = {name: shape.members[name] // turns for name in names}
    starts = itertools.accumulate(rows.values(), initial=0)
    return {
        name: HeadOrder(turns, sum(rows.values()), start, 1, own)
        for (name, own), start in zip(rows.items(), starts, strict=False)
    }


def bias_names(config: ModelConfig, layer: int) -> dict[Group, dict[str, str]]:
    """Return the bias name of each member of each group that has biases, as :func:`linear_names`."""
    names = linear_names(config, layer)
    if layer == HEAD_LAYER:
        # Also the bias of a tied head has a name of its own.
        names = {"head": {"head": head_name(config)}}
    return {
        shape.group: {member: _bias_name(name) for member, name in names[shape.group].items()}
        for shape in group_shapes(config, layer)
        if shape.biased
    }


def layer_norms(config: ModelConfig, layer: int) -> dict[Norm, int]:
    """Return the width of each norm that a layer has, in the order of the family's declaration."""
    found: dict[Norm, int] = {}
    for stage in config.per_layer[layer].stages:
        found |= dict.fromkeys(stage.norms, config.hidden_size)
        for block in stage.blocks:
            found |= block.norms()
    return {norm: found[norm] for norm in _tensors(config).norms if norm in found}


def norm_name(config: ModelConfig, layer: int, norm: Norm) -> str:
    """Return the tensor name of one norm of a layer; "" of one without weights."""
    names = _tensors(config)
    module = names.norms[norm]
    return f"{names.layer.format(layer=layer)}{module}.weight" if module else ""


def other_name(config: ModelConfig, layer: int, role: str) -> str:
    """Return the tensor name of another tensor of a layer's blocks by its role."""
    names = _tensors(config)
    return f"{names.layer.format(layer=layer)}{names.others[role]}"


def final_norm_name(config: ModelConfig) -> str:
    """Return the tensor name of the norm before the head; "" of one without weights."""
    module = _tensors(config).final_norm
    return f"{module}.weight" if module else ""


def norm_bias_name(config: ModelConfig, layer: int, norm: Norm) -> str:
    """Return the tensor name of the bias of one norm of a layer."""
    return _bias_name(norm_name(config, layer, norm))


def final_norm_bias_name(config: ModelConfig) -> str:
    """Return the tensor name of the bias of the norm before the head."""
    return _bias_name(final_norm_name(config))


def embedding_name(config: ModelConfig) -> str:
    """Return the tensor name of the token embedding."""
    return f"{_tensors(config).embedding}.weight"


def positions_name(config: ModelConfig) -> str:
    """Return the tensor name of the table of learned positions."""
    return f"{_tensors(config).positions}.weight"


def layer_input_names(config: ModelConfig) -> tuple[str, str, str]:
    """Return the tensor names of the table of layers' embeddings, its linear, and the norm of that."""
    names = _tensors(config)
    modules = names.layer_inputs, names.layer_projection, names.layer_norm
    return f"{modules[0]}.weight", f"{modules[1]}.weight", f"{modules[2]}.weight"


def stream_names(config: ModelConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tensor names of the linears that open streams, and of those that close them.

    There is one of each for every stream but the first.
    """
    names, streams = _tensors(config), range(config.streams - 1)
    opens, closes = (
        tuple(f"{module.format(stream=stream)}.weight" for stream in streams)
        for module in (names.stream_openings, names.stream_closings)
    )
    return opens, closes


def mapped_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of tensors of which a pass reads some rows from the checkpoint's file."""
    return layer_input_names(config)[:1] if config.layer_vocabulary else ()


def first_position(config: ModelConfig) -> int:
    """Return the row of the first position in that table."""
    return FAMILIES[config.model_type].first_position


def head_name(config: ModelConfig) -> str:
    """Return the tensor name of an untied LM head."""
    return f"{_tensors(config).head}.weight"


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a weight; those of a stack of matrices are rows of one."""
    return math.prod(shape[:-1]), shape[-1]


def layer_of(config: ModelConfig, name: str) -> int | None:
    """Return the number of the decoder layer that a tensor belongs to; None outside the layers."""
    prefix = _tensors(config).layer.partition("{layer}")[0]
    number = name.removeprefix(prefix).partition(".")[0]
    return int(number) if name.startswith(prefix) and number.isdecimal() else None


def unread_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the beginnings of names of tensors that the model does not compute with.

    Checkpoints may have keys and values of layers that read another's.
    """
    names = _tensors(config)
    modules = [names.modules["qkv"][member] for member in "kv" if "qkv" in names.modules]
    modules += [names.norms["key_head"]] if "key_head" in names.norms else []
    unused = (
        f"{names.layer.format(layer=layer)}{module}."
        for layer, block in config.blocks(AttentionBlock).items()
        for module in modules
        if block.kv_layer is not None
    )
    unread = dict.fromkeys(
        beginning.format(layer=layer, layers=config.layers)
        for layer in range(config.layers)
        for beginning in names.unread
    )
    return (*unread, *unused)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the model computes with, by name."""
    shapes: dict[str, tuple[int, ...]] = {embedding_name(config): (config.vocab_size, config.hidden_size)}
    if name := final_norm_name(config):
        shapes[name] = (config.hidden_size,)
    if config.norm_biases:
        shapes[final_norm_bias_name(config)] = (config.hidden_size,)
    if config.learned_positions:
        last = first_position(config) + config.max_positions
        shapes[positions_name(config)] = (last, config.hidden_size)
    if config.layer_vocabulary:
        columns, (table, projection, norm) = config.layer_input_columns, layer_input_names(config)
        shapes[table] = config.layer_vocabulary, columns
        shapes[projection] = columns, config.hidden_size
        shapes[norm] = (config.layer_input_width,)
    for names_of in stream_names(config):
        shapes |= dict.fromkeys(names_of, (config.hidden_size, config.hidden_size))
    for layer in (*range(config.layers), HEAD_LAYER):
        biases, names = bias_names(config, layer), linear_rows(config, layer)
        for group in group_shapes(config, layer):
            for member, rows in names[group.group].items():
                # The last member in a shared tensor determines its number of rows.
                shapes[rows.name] = (rows.stop, group.columns)
                if group.biased:
                    shapes[biases[group.group][member]] = (rows.stop,)
    for layer, own in enumerate(config.per_layer):
        for norm, width in layer_norms(config, layer).items():
            if name := norm_name(config, layer, norm):
                shapes[name] = (width,)
            if config.norm_biases:
                shapes[norm_bias_name(config, layer, norm)] = (width,)
        for role, shape in own.tensors(config.hidden_size).items():
            shapes[other_name(config, layer, role)] = shape
        mixture = own.find(MixtureBlock)
        if mixture is not None:
            shapes |= expert_tensors(config, layer, mixture)
    return shapes


def _tensors(config: ModelConfig) -> TensorNames:
    return FAMILIES[config.model_type].tensors


def _bias_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.bias"
