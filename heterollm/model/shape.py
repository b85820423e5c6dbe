"""The shape of a model, which determines its time, from ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heterollm.base import CheckpointError
from heterollm.kernels.ops import OpSpec, Precision, Scales, ffn_specs
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import expert_specs
from heterollm.model.layout import HEAD_LAYER, op_specs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The operators and sizes that determine the time of a model.

    Args:
        name: Name in reports.
        layer: The groups of one decoder layer that a plan places, in order.
        head: The LM head.
        layers: Decoder layers.
        hidden_size: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        intermediate_size: Width of the feed-forward network; in a mixture that of the shared experts, 0 for
            none.
        vocab_size: Rows of the head.
        weight_bytes: Bytes of all weights, embedding included.
        experts: The experts of one layer; None without.
    """

    name: str
    layer: tuple[OpSpec, ...]
    head: OpSpec
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    weight_bytes: int
    experts: OpSpec | None = None

    @property
    def specs(self) -> tuple[OpSpec, ...]:
        """The groups of one layer and the head."""
        return (*self.layer, self.head)

    @property
    def blocks(self) -> tuple[OpSpec, ...]:
        """The feed-forward network of a layer as one ffn operator, if its linears can form one."""
        return ffn_specs(self.layer)

    def streamed(self, cache_bytes: int) -> bool:
        """Whether every pass reads the weights from memory, since the last-level cache cannot hold them."""
        layers = self.layers * _layer_bytes(self.layer, self.experts)
        return layers + self.head.weight_bytes() > cache_bytes


def read_config(folder: Path | str) -> ModelConfig:
    """Read the configuration in a checkpoint folder, which needs no weights.

    Raises:
        CheckpointError: The folder does not exist, or has no sound ``config.json``.
        UnsupportedModelError: The model is not supported.
    """
    try:
        path = Path(folder).expanduser()
        found = path.is_dir()
    except (OSError, RuntimeError):  # too long, or the home of an unknown user
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
    scales: Scales = "free",
) -> ModelShape:
    """Return the shape of a model under a name for reports; see :func:`op_specs` for the other arguments.

    Raises:
        OptionError: No legal block divides the inputs of some group.
    """
    specs = op_specs(config, precision, group_size, symmetric, float_bits=float_bits, scales=scales)
    return shape_of_specs(config, specs, name)


def shape_of_specs(config: ModelConfig, specs: Sequence[OpSpec], name: str) -> ModelShape:
    """Return the shape of a model from all its groups, under a name for reports."""
    # All layers have the same shape.
    layer = tuple(spec for spec in specs if spec.layer == 0)
    head = next(spec for spec in specs if spec.layer == HEAD_LAYER)
    tables = 1 if config.tie_word_embeddings else 2
    experts = next(iter(expert_specs(config, specs)), None)
    layers_bytes = config.layers * _layer_bytes(layer, experts)
    return ModelShape(
        name=name,
        layer=layer,
        head=head,
        layers=config.layers,
        hidden_size=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        weight_bytes=layers_bytes + tables * head.weight_bytes(),
        experts=experts,
    )


def _layer_bytes(layer: Sequence[OpSpec], experts: OpSpec | None) -> int:
    return sum(spec.weight_bytes() for spec in (*layer, *([experts] if experts else [])))
