"""What the time of a model depends on, from its ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from heterollm.base import CheckpointError
from heterollm.kernels.ops import OpSpec, Precision
from heterollm.model.config import ModelConfig
from heterollm.model.layout import HEAD_LAYER, op_specs
from heterollm.profiler.work import ModelShape

__all__ = ["model_shape", "read_config", "shape_of_specs"]


def read_config(folder: Path | str) -> ModelConfig:
    """Read the configuration of a checkpoint's folder; its weights need not be there.

    Raises:
        CheckpointError: It is no folder, or has no sound ``config.json``.
        UnsupportedModelError: The model is not of a supported kind.
    """
    try:
        path = Path(folder).expanduser()
        found = path.is_dir()
    except (OSError, RuntimeError):  # too long, or the home of nobody
        found = False
    if not found:
        raise CheckpointError(
            f"There is no folder {str(folder)!r:.200}.", fix="Name the folder that holds config.json."
        )
    return ModelConfig.from_folder(path)


def model_shape(
    config: ModelConfig,
    name: str,
    *,
    precision: Precision = "w4a16",
    group_size: int = 32,
    symmetric: bool = True,
    float_bits: Literal[16, 32] = 16,
) -> ModelShape:
    """Return the shape of a model, for the profiler.

    Args:
        config: The model.
        name: What to call it in reports.
        precision: Of weights and activations.
        group_size: Inputs that share one scale.
        symmetric: Whether 4-bit weights have no zero points.
        float_bits: Of the weights at precision ``fp16``: 32 where the device computes in float32.

    Raises:
        OptionError: No legal block divides the inputs of some group.
    """
    specs = op_specs(config, precision, group_size, symmetric, float_bits=float_bits)
    return shape_of_specs(config, specs, name)


def shape_of_specs(config: ModelConfig, specs: Sequence[OpSpec], name: str) -> ModelShape:
    """Return the shape of a model whose groups are known.

    Args:
        config: The model.
        specs: All its groups.
        name: What to call it in reports.
    """
    # All layers have the same shape.
    layer = tuple(spec for spec in specs if spec.layer == 0)
    head = next(spec for spec in specs if spec.layer == HEAD_LAYER)
    tables = 1 if config.tie_word_embeddings else 2
    layers_bytes = config.layers * sum(spec.weight_bytes() for spec in layer)
    return ModelShape(
        name,
        layer,
        head,
        config.layers,
        config.hidden_size,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        layers_bytes + tables * head.weight_bytes(),
    )
