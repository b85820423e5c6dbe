"""A model's weights in the runtime's formats, by layer and group."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import CheckpointError, own_folder
from heterollm.kernels.formats import (
    QUANTIZER_VERSION,
    STEPPED_VERSION,
    TENSOR_VERSION,
    LinearWeight,
    QuantizedTensor,
    shape_only_array,
    shape_only_weight,
    take_rows,
)
from heterollm.kernels.ops import SLOPES, Group, OpSpec, Precision, Scales, Slopes, WeightFormat
from heterollm.model.block import SLOPE_SHAPES, Norm
from heterollm.model.blocks import MixtureBlock
from heterollm.model.channel_file import ChannelFile, channel_file
from heterollm.model.checkpoint import Checkpoint
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import expert_rows, expert_specs, router_name
from heterollm.model.exported_checkpoint import ExportedCheckpoint
from heterollm.model.file_notes import file_notes
from heterollm.model.layout import (
    HEAD_LAYER,
    bias_names,
    embedding_name,
    expected_tensors,
    final_norm_bias_name,
    final_norm_name,
    first_position,
    kept_formats,
    layer_input_names,
    layer_norms,
    linear_names,
    linear_rows,
    mapped_tensors,
    matrix_shape,
    norm_bias_name,
    norm_name,
    op_specs,
    other_name,
    positions_name,
    row_factors,
    shortened_blocks,
    stream_names,
)
from heterollm.model.stored import STORED_VERSION
from heterollm.model.stored_notes import stored_notes
from heterollm.model.tensor_file import TensorFile
from heterollm.model.weight_cache import ByteProgress, Recipe, cached_tensors, quantized_view, stored_errors
from heterollm.model.weight_views import FloatLinears, Members, TokenRows

logger = logging.getLogger(__name__)

WEIGHTS_FOLDER = "weights"
"""Subfolder of the cache for quantised weights, and for float weights by input channel."""

LoadedTensors: TypeAlias = tuple[Mapping[str, LinearWeight], Mapping[str, NDArray[np.float32]]]
"""The linears, and the norms and biases, by tensor name."""


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


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    precision: Precision = "w4a16",
    group_size: int = 32,
    symmetric: bool = True,
    scales: Scales = "free",
    float_dtype: DTypeLike = np.float16,
    progress: ByteProgress | None = None,
    cancelled: threading.Event | None = None,
    folder: Path | None = None,
) -> ModelWeights:
    """Load a model's weights; quantise them, or take them from the cache, except at ``fp16``.

    Args:
        checkpoint: The tensors.
        config: The model; its tensors are checked against the checkpoint's.
        precision: ``w4a16`` or ``w4a8`` (4 bits, embedding and head 8; the same weights), ``w8a8`` (8 bits)
            or ``fp16``.
        group_size: Inputs that share one scale, except at ``fp16``.
        symmetric: Whether 4-bit weights have no zero points.
        scales: Scales of the 4-bit weights.
        float_dtype: Type of the weights at ``fp16``: float16, or float32 if the device computes in it.
        progress: Called with the bytes done and the total while the checkpoint is hashed and then quantised,
            if the cache does not have the result.
        cancelled: Stops quantising when set.
        folder: Folder of the files of weights; None for that of the cache.

    Raises:
        CheckpointError: The checkpoint does not fit the configuration, or has an unusable value.
        OptionError: ``group_size`` is not possible.
        CacheError: The quantised weights cannot be stored.
        EngineError: ``cancelled`` was set.
    """
    checkpoint.validate(config)
    checkpoint.factors = row_factors(config)
    dtype = np.dtype(float_dtype)
    float_bits: Literal[16, 32] = 32 if dtype == np.float32 else 16
    specs = op_specs(config, precision, group_size, symmetric, float_bits=float_bits, scales=scales)
    notes = checkpoint.notes
    if kept_formats(config, precision, scales) is None:
        experts = expert_specs(config, specs)
        notes += tuple(
            shortened_blocks((*specs, *experts, *(own.then for own in experts if own.then)), group_size)
        )
    for note in notes:
        logger.warning("%s", note)
    formats = _formats(config, specs)
    integers = tuple(name for name in formats if precision != "fp16" and checkpoint.kind(name) is not None)
    variant = f"{dtype}"
    if precision != "fp16":
        kind = "" if scales == "free" else f" {scales} {STEPPED_VERSION}"
        if precision == "w8a8":
            kind = f" tensor {TENSOR_VERSION}"
        variant = f"{group_size} {symmetric} {QUANTIZER_VERSION}{kind}"
    if integers:
        held = dict.fromkeys(f"{spec.group} {spec.weight}" for spec in specs)
        variant += f" {STORED_VERSION} {' '.join(held)}"

    notes += file_notes(checkpoint.folder)
    if checkpoint.adapter is not None:
        notes += checkpoint.adapter.notes
        notes += (f"{checkpoint.adapter.folder} is merged into {len(checkpoint.adapter.factors)} linears.",)
    hashed_bytes = checkpoint.file_bytes
    work_bytes = sum(checkpoint.size_bytes(name) for name in formats) if precision != "fp16" else 0
    content = checkpoint.content_hash(_shifted(progress, 0, hashed_bytes + work_bytes))
    stored = "w4a16" if precision == "w4a8" else precision
    content_key = hashlib.sha256(f"{content} {stored} {variant}".encode()).hexdigest()
    recipe = Recipe(content_key, formats, _float_names(config, formats), integers)
    file = None
    if precision == "fp16":
        linears, floats = _read_tensors(checkpoint, recipe, dtype)
    else:
        shifted = _shifted(progress, hashed_bytes, hashed_bytes + work_bytes)
        path = (folder or own_folder(WEIGHTS_FOLDER)) / f"{recipe.key[:32]}.safetensors"
        file = cached_tensors(path, checkpoint, recipe, shifted, cancelled)
        linears, floats, errors = _quantized_tensors(file, recipe)
        notes += stored_notes(checkpoint, formats, errors)
    return _model_weights(config, specs, content_key, notes, linears, floats, checkpoint, file, folder)


def exported_weights(
    checkpoint: ExportedCheckpoint,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    content_key: str,
    notes: tuple[str, ...],
    quantized: Path | None,
    folder: Path,
    float_dtype: DTypeLike,
) -> ModelWeights:
    """Return the weights of an exported model, whose files were checked.

    Args:
        checkpoint: Its float tensors.
        config: The model.
        specs: All its groups, the head last.
        content_key: Hash of everything that determines the values.
        notes: Those of the weights when they were exported.
        quantized: File of the quantised weights; None at precision ``fp16``.
        folder: Folder of the files of weights by channel.
        float_dtype: Type of the weights at ``fp16``.

    Raises:
        CheckpointError: The file is of other weights.
    """
    formats = _formats(config, specs)
    recipe = Recipe(content_key, formats, _float_names(config, formats))
    file = None if quantized is None else TensorFile.open(quantized)
    if file is None:
        linears, floats = _read_tensors(checkpoint, recipe, np.dtype(float_dtype))
    elif file.metadata.get("key") != content_key:
        raise CheckpointError(f"{quantized} is a file of other weights.", fix="Export the model again.")
    else:
        linears, floats, _ = _quantized_tensors(file, recipe)
    return _model_weights(config, specs, content_key, notes, linears, floats, checkpoint, file, folder)


def read_floats(config: ModelConfig, precision: Precision) -> tuple[str, ...]:
    """Return the tensors that a run reads from the checkpoint, beside the file of quantised weights."""
    return tuple(expected_tensors(config) if precision == "fp16" else mapped_tensors(config))


def shape_only_weights(config: ModelConfig, specs: Sequence[OpSpec]) -> ModelWeights:
    """Return weights with shapes and formats for a device that computes nothing; all values are one zero.

    Args:
        config: The model.
        specs: All its groups, the head last.
    """
    shapes, formats = expected_tensors(config), _formats(config, specs)
    linears = {
        name: shape_only_weight(*matrix_shape(shapes[name]), weight) for name, weight in formats.items()
    }
    floats = {name: shape_only_array(shapes[name], np.float32) for name in _float_names(config, formats)}
    return _model_weights(config, specs, "shapes alone", (), linears, floats)


def _formats(config: ModelConfig, specs: Sequence[OpSpec]) -> dict[str, WeightFormat]:
    """Return the number format of the embedding and of every linear by tensor name."""
    formats = {embedding_name(config): specs[-1].weight}
    if config.layer_vocabulary:
        formats[layer_input_names(config)[1]] = specs[-1].weight
    formats |= dict.fromkeys(itertools.chain(*stream_names(config)), specs[-1].weight)
    for spec in specs:
        formats.update(dict.fromkeys(linear_names(config, spec.layer)[spec.group].values(), spec.weight))
    for experts in expert_specs(config, specs):
        assert experts.experts is not None  # by expert_specs
        for spec in filter(None, (experts, experts.then)):
            for expert in range(experts.experts.experts):
                rows = expert_rows(config, spec.layer, expert)
                formats.update({rows[member.name].name: spec.weight for member in spec.members})
    return formats


def _float_names(config: ModelConfig, formats: Mapping[str, WeightFormat]) -> tuple[str, ...]:
    """Return the norms, biases and the like, which a model holds as float32."""
    kept = {*formats, *mapped_tensors(config)}
    return tuple(name for name in expected_tensors(config) if name not in kept)


def _model_weights(
    config: ModelConfig,
    specs: Sequence[OpSpec],
    content_key: str,
    notes: tuple[str, ...],
    linears: Mapping[str, LinearWeight],
    floats: Mapping[str, NDArray[np.float32]],
    checkpoint: Checkpoint | None = None,
    quantized: TensorFile | None = None,
    folder: Path | None = None,
) -> ModelWeights:
    shapes = expected_tensors(config)
    formats = _formats(config, specs)
    sizes = [weight.weight_bytes(*matrix_shape(shapes[name])) for name, weight in formats.items()]
    embedding = linears[embedding_name(config)]
    head_name = linear_names(config, HEAD_LAYER)["head"]["head"]
    return ModelWeights(
        config=config,
        specs=tuple(specs),
        experts=expert_specs(config, specs),
        content_key=content_key,
        notes=notes,
        size_bytes=sum(sizes) + sum(values.nbytes for values in floats.values()),
        embedding=embedding,
        head=embedding if config.tie_word_embeddings else linears[head_name],
        linears=linears,
        floats=floats,
        checkpoint=checkpoint,
        quantized=quantized,
        folder=folder,
    )


def _read_tensors(checkpoint: Checkpoint, recipe: Recipe, dtype: np.dtype[np.generic]) -> LoadedTensors:
    """Return unquantised weights, and norms and biases, from the checkpoint."""
    floats = {name: checkpoint.read(name) for name in recipe.floats}
    return FloatLinears(checkpoint, tuple(recipe.formats), dtype), floats


def _quantized_tensors(
    file: TensorFile, recipe: Recipe
) -> tuple[Mapping[str, LinearWeight], Mapping[str, NDArray[np.float32]], Mapping[str, float]]:
    """Return quantised weights, norms and biases, and errors, from the cache."""
    floats = {name: file.bits(name) for name in recipe.floats}
    linears = {name: quantized_view(file, name, weight) for name, weight in recipe.formats.items()}
    return linears, floats, stored_errors(file, recipe)


def _shifted(progress: ByteProgress | None, start_bytes: int, total_bytes: int) -> ByteProgress | None:
    """Return ``progress`` for one stage of the work, which begins with ``start_bytes`` done."""
    if progress is None:
        return None
    return lambda done_bytes, _: progress(start_bytes + done_bytes, total_bytes)


def _as_float32(weight: LinearWeight) -> NDArray[np.float32]:
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize()
    return weight.astype(np.float32, copy=False)
