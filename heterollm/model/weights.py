"""A model's weights in the runtime's formats, by layer and group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import own_folder
from heterollm.kernels.formats import LinearWeight, QuantizedTensor, take_rows
from heterollm.kernels.ops import SLOPES, Group, OpSpec, Slopes
from heterollm.model.block import SLOPE_SHAPES, Norm
from heterollm.model.blocks import MixtureBlock
from heterollm.model.channel_file import ChannelFile, channel_file
from heterollm.model.checkpoint import Checkpoint
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import expert_rows, router_name
from heterollm.model.layout import (
    HEAD_LAYER,
    bias_names,
    expected_tensors,
    final_norm_bias_name,
    final_norm_name,
    first_position,
    layer_input_names,
    layer_norms,
    linear_rows,
    mapped_tensors,
    norm_bias_name,
    norm_name,
    other_name,
    positions_name,
    row_factors,
    stream_names,
)
from heterollm.model.tensor_file import TensorFile
from heterollm.model.weight_views import Members, TokenRows

WEIGHTS_FOLDER = "weights"
"""Subfolder of the cache for quantised weights, and for float weights by input channel."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All weights of a model, in the formats of its operators.

    Args:
        config: The model.
        specs: Its groups of linears that a plan places, in order, the head last.
        experts: The experts of each layer.
        content_key: Hash of everything that determines the values.
        notes: Deviations from the request, a sentence each.
        size_bytes: Size of all weights.
        embedding: Token embedding ``[vocab, hidden]``.
        head: LM head ``[vocab, hidden]``; the same object as ``embedding`` when tied.
        linears: The linears of the layers by tensor name; unquantised ones are read on access.
        floats: Norms, biases, routers and learned positions, float32, by tensor name.
        checkpoint: Source of the float weights; None without values.
        quantized: File of the quantised weights; None without.
        folder: Folder of the files of weights by channel; None for that of the cache.
    """

    config: ModelConfig
    specs: tuple[OpSpec, ...]
    experts: tuple[OpSpec, ...]
    content_key: str
    notes: tuple[str, ...]
    size_bytes: int
    embedding: LinearWeight
    head: LinearWeight
    linears: Mapping[str, LinearWeight]
    floats: Mapping[str, NDArray[np.float32]]
    checkpoint: Checkpoint | None = None
    quantized: TensorFile | None = None
    folder: Path | None = None

    @property
    def final_norm(self) -> NDArray[np.float32]:
        """Weight of the norm before the head, ``[hidden]``."""
        name = final_norm_name(self.config)
        return self.floats[name] if name else np.ones(self.config.hidden_size, np.float32)

    def linear(self, layer: int, group: Group) -> tuple[LinearWeight, ...]:
        """Return the weights ``[n, k]`` of a group's members, in order; the head is layer -1.

        Raises:
            CheckpointError: At precision ``fp16``, a value cannot be represented.
        """
        if layer == HEAD_LAYER:
            return (self.head,)
        members = linear_rows(self.config, layer)[group].values()
        tensors = {name: self.linears[name] for name in dict.fromkeys(rows.name for rows in members)}
        return tuple(take_rows(tensors[rows.name], rows.ranges) for rows in members)

    def expert_members(self, layer: int, members: Sequence[str]) -> Sequence[LinearWeight]:
        """Return the weights of some members of every expert, one expert after the other, read on access.

        Args:
            layer: Decoder layer.
            members: Such as gate and up.

        Raises:
            CheckpointError: On access at precision ``fp16``: a value cannot be represented.
        """
        mixture = self.config.per_layer[layer].find(MixtureBlock)
        assert mixture is not None  # the layer has experts
        every = (expert_rows(self.config, layer, expert) for expert in range(mixture.routing.experts))
        return Members(self.linears, tuple(rows[member] for rows in every for member in members))

    def router(self, layer: int) -> NDArray[np.float32]:
        """Return the weight ``[experts, hidden]`` of a layer's router."""
        return self.floats[router_name(self.config, layer)]

    def channels(self, layer: int, group: Group, dtype: DTypeLike) -> ChannelFile | None:
        """Return the float weights of a group by input channel, from a file of theirs; None without values.

        Raises:
            CheckpointError: A value is beyond the range of the type.
            CacheError: The file cannot be written.
        """
        if self.checkpoint is None:
            return None
        name = f"{self.content_key[:32]}.{layer}.{group}.{np.dtype(dtype)}.safetensors"
        members = tuple(linear_rows(self.config, layer)[group].values())
        path = (self.folder or own_folder(WEIGHTS_FOLDER)) / name
        return channel_file(path, self.content_key, self.checkpoint, members, dtype)

    def bias(self, layer: int, group: Group) -> tuple[NDArray[np.float32], ...]:
        """Return the biases ``[n]`` of a group's members, in order; empty for a group without bias."""
        names = bias_names(self.config, layer).get(group, {})
        if layer == HEAD_LAYER or not names:
            return tuple(self.floats[name] for name in names.values())
        places = linear_rows(self.config, layer)[group]
        found = (take_rows(self.floats[name], places[member].ranges) for member, name in names.items())
        return cast("tuple[NDArray[np.float32], ...]", tuple(found))

    def norm(self, layer: int, norm: Norm) -> NDArray[np.float32]:
        """Return the stored weight of one norm of a layer: ``[hidden]``, or ``[head_dim]`` of a head's.

        With the offset of norms, the weight of a norm without is one.
        """
        name, one = norm_name(self.config, layer, norm), 1.0 - self.config.norm_offset
        return self.floats[name] if name else np.full(layer_norms(self.config, layer)[norm], one, np.float32)

    def norm_bias(self, layer: int, norm: Norm) -> NDArray[np.float32] | None:
        """Return the bias ``[hidden]`` of one norm of a layer; None in a model without."""
        return self.floats.get(norm_bias_name(self.config, layer, norm))

    def other(self, layer: int, role: str) -> NDArray[np.float32]:
        """Return another tensor of a layer's blocks by its role."""
        return self.floats[other_name(self.config, layer, role)]

    def slopes(self, layer: int) -> Slopes:
        """Return the numbers of xIELU of a layer; the initial ones where it has another activation."""
        if self.config.activation != "xielu":
            return SLOPES
        stored = {role: float(self.other(layer, role).item()) for role in SLOPE_SHAPES}
        rising, falling = (float(np.logaddexp(0.0, stored[role])) for role in ("rising", "falling"))
        return Slopes(rising, stored["linear"] + falling, stored["linear"], stored["largest"])

    @property
    def final_norm_bias(self) -> NDArray[np.float32] | None:
        """Bias ``[hidden]`` of the norm before the head; None in a model without."""
        return self.floats.get(final_norm_bias_name(self.config))

    @property
    def positions(self) -> NDArray[np.float32] | None:
        """Learned positions ``[max_positions, hidden]``; None in a model without."""
        if not self.config.learned_positions:
            return None
        return self.floats[positions_name(self.config)][first_position(self.config) :]

    @property
    def layer_projection(self) -> LinearWeight:
        """The linear ``[layers * width, hidden]`` of the embedding that adds to layers' embeddings."""
        return self.linears[layer_input_names(self.config)[1]]

    @property
    def streams(self) -> tuple[tuple[LinearWeight, ...], tuple[LinearWeight, ...]]:
        """The linears ``[hidden, hidden]`` that open all streams but the first, and those that close them."""
        opens, closes = stream_names(self.config)
        return tuple(self.linears[name] for name in opens), tuple(self.linears[name] for name in closes)

    @property
    def layer_norm(self) -> NDArray[np.float32]:
        """Weight ``[width]`` of the norm of its output for each layer."""
        return self.floats[layer_input_names(self.config)[2]]

    @property
    def layer_rows(self) -> TokenRows | None:
        """The table of layers' embeddings; None without one, or without values."""
        names = mapped_tensors(self.config)
        return TokenRows(self.checkpoint, names[0]) if names and self.checkpoint is not None else None

    def reference_state_dict(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the runtime's tensors one at a time, as float32, as the checkpoint names and shapes them."""
        shapes = expected_tensors(self.config)
        factors = row_factors(self.config)
        for name in self.linears:
            values = _as_float32(self.linears[name])
            yield name, (values / factors[name][:, None] if name in factors else values).reshape(shapes[name])
        yield from self.floats.items()
        if self.checkpoint is not None:
            yield from ((name, self.checkpoint.read(name)) for name in mapped_tensors(self.config))


def _as_float32(weight: LinearWeight) -> NDArray[np.float32]:
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize()
    return weight.astype(np.float32, copy=False)
