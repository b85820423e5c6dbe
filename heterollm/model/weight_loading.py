"""Makes a model's weights: quantised, from the cache, from an exported model, or with shapes alone."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import CheckpointError, own_folder
from heterollm.kernels.formats import (
    QUANTIZER_VERSION,
    STEPPED_VERSION,
    TENSOR_VERSION,
    LinearWeight,
    shape_only_array,
    shape_only_weight,
)
from heterollm.kernels.ops import OpSpec, Precision, Scales, WeightFormat
from heterollm.model.checkpoint import Checkpoint
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import expert_rows, expert_specs
from heterollm.model.exported_checkpoint import ExportedCheckpoint
from heterollm.model.file_notes import file_notes
from heterollm.model.layout import (
    HEAD_LAYER,
    embedding_name,
    expected_tensors,
    layer_input_names,
    linear_names,
    mapped_tensors,
    matrix_shape,
    row_factors,
    stream_names,
)
from heterollm.model.operators import kept_formats, op_specs, shortened_blocks
from heterollm.model.stored import STORED_VERSION
from heterollm.model.stored_notes import stored_notes
from heterollm.model.tensor_file import TensorFile
from heterollm.model.weight_cache import ByteProgress, Recipe, cached_tensors, quantized_view, stored_errors
from heterollm.model.weight_views import FloatLinears
from heterollm.model.weights import WEIGHTS_FOLDER, ModelWeights

logger = logging.getLogger(__name__)

LoadedTensors: TypeAlias = tuple[Mapping[str, LinearWeight], Mapping[str, NDArray[np.float32]]]
"""The linears, and the norms and biases, by tensor name."""


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
        precision: ``w4a16`` or ``w4a8`` (4 bits, embedding and head 8), ``w8a8`` (8 bits) or ``fp16``.
        group_size: Inputs that share one scale, except at ``fp16``.
        symmetric: Whether 4-bit weights have no zero points.
        scales: Scales of the 4-bit weights.
        float_dtype: Type of the weights at ``fp16``: float16, or float32 if the device computes in it.
        progress: Called with the bytes done and the total while it hashes and quantises what the cache lacks.
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
    are_kept = kept_formats(config, precision, scales) is not None
    notes = checkpoint.notes + (() if are_kept else _block_notes(config, specs, group_size))
    for note in notes:
        logger.warning("%s", note)
    formats = _formats(config, specs)
    integers = tuple(name for name in formats if precision != "fp16" and checkpoint.kind(name) is not None)
    variant = f"{dtype}" if precision == "fp16" else _quantizer(precision, group_size, symmetric, scales)
    variant += _stored_variant(specs) if integers else ""
    notes += (*file_notes(checkpoint.folder), *_adapter_notes(checkpoint))
    start_bytes, quantized = checkpoint.file_bytes, formats if precision != "fp16" else ()
    total_bytes = start_bytes + sum(map(checkpoint.size_bytes, quantized))
    content_key = _content_key(checkpoint, precision, variant, _shifted(progress, 0, total_bytes))
    recipe = Recipe(content_key, formats, _float_names(config, formats), integers)
    if precision == "fp16":
        file, (linears, floats) = None, _read_tensors(checkpoint, recipe, dtype)
    else:
        path = (folder or own_folder(WEIGHTS_FOLDER)) / f"{recipe.key[:32]}.safetensors"
        shifted = _shifted(progress, start_bytes, total_bytes)
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


def _block_notes(config: ModelConfig, specs: Sequence[OpSpec], group_size: int) -> tuple[str, ...]:
    experts = expert_specs(config, specs)
    every = (*specs, *experts, *(own.then for own in experts if own.then))
    return tuple(shortened_blocks(every, group_size))


def _adapter_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    own = checkpoint.adapter
    if own is None:
        return ()
    return (*own.notes, f"{own.folder} is merged into {len(own.factors)} linears.")


def _content_key(
    checkpoint: Checkpoint, precision: Precision, variant: str, progress: ByteProgress | None
) -> str:
    """Return the hash of all that determines the values; it reads the checkpoint."""
    stored = "w4a16" if precision == "w4a8" else precision
    return hashlib.sha256(f"{checkpoint.content_hash(progress)} {stored} {variant}".encode()).hexdigest()


def _quantizer(precision: Precision, group_size: int, symmetric: bool, scales: Scales) -> str:
    """Return what determines quantised values beside the checkpoint, for the key of the cache."""
    kind = "" if scales == "free" else f" {scales} {STEPPED_VERSION}"
    if precision == "w8a8":
        kind = f" tensor {TENSOR_VERSION}"
    return f"{group_size} {symmetric} {QUANTIZER_VERSION}{kind}"


def _stored_variant(specs: Sequence[OpSpec]) -> str:
    """Return the same of integers that the checkpoint stores."""
    held = dict.fromkeys(f"{spec.group} {spec.weight}" for spec in specs)
    return f" {STORED_VERSION} {' '.join(held)}"


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
