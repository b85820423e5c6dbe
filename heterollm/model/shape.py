"""The shape of a model, which determines its time, from ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from heterollm.base import CheckpointError
from heterollm.kernels.ops import OpSpec, Precision, Scales, ffn_specs
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.blocks import FfnBlock
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import expert_specs
from heterollm.model.layers import LayerStage
from heterollm.model.layout import HEAD_LAYER
from heterollm.model.operators import op_specs


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that a plan treats alike.

    Args:
        name: Name in plans; empty if all layers of the model are alike.
        layers: Their numbers, ascending.
        specs: The groups of the first of them that a plan places, in order.
        experts: The experts of the first of them; None without.
    """

    name: str
    layers: tuple[int, ...]
    specs: tuple[OpSpec, ...]
    experts: OpSpec | None = None

    @property
    def count(self) -> int:
        """Number of the layers."""
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all these layers."""
        every = (*self.specs, *([] if self.experts is None else [self.experts]))
        return self.count * sum(spec.weight_bytes() for spec in every)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The operators and sizes that determine the time of a model.

    Args:
        name: Name in reports.
        kinds: The kinds of layers, in the order of their first layers.
        head: The LM head.
        hidden_size: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        vocab_size: Rows of the head.
        weight_bytes: Bytes of all weights, embedding included.
        other_heads: Query heads, key heads and their width of kinds of layers that have others.
        endings: Operators that a GPU's linear layers of one token can compute.
    """

    name: str
    kinds: tuple[LayerKind, ...]
    head: OpSpec
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    weight_bytes: int
    other_heads: tuple[tuple[str, tuple[int, int, int]], ...] = ()
    endings: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> ModelShape:
        """Return the shape with the heads of a kind of layers."""
        heads, kv_heads, head_dim = dict(self.other_heads).get(kind, (0, 0, 0))
        return replace(self, heads=heads, kv_heads=kv_heads, head_dim=head_dim) if heads else self

    @property
    def by_heads(self) -> tuple[ModelShape, ...]:
        """The shape with each of its heads."""
        return tuple(dict.fromkeys((self, *(self.of_kind(kind) for kind, _ in self.other_heads))))

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return sum(kind.count for kind in self.kinds)

    @property
    def layer(self) -> tuple[OpSpec, ...]:
        """The distinct groups of layers that a plan places."""
        return _distinct(spec for kind in self.kinds for spec in kind.specs)

    @property
    def specs(self) -> tuple[OpSpec, ...]:
        """The distinct groups of a layer, and the head."""
        return (*self.layer, self.head)

    @property
    def blocks(self) -> tuple[OpSpec, ...]:
        """The distinct feed-forward networks as one ffn operator, of linears that can form one."""
        return _distinct(ffn for kind in self.kinds for ffn in ffn_specs(kind.specs))

    @property
    def experts(self) -> OpSpec | None:
        """The experts of a layer, equal in all that have some; None without."""
        return next((kind.experts for kind in self.kinds if kind.experts is not None), None)

    def streamed(self, cache_bytes: int) -> bool:
        """Whether every pass reads the weights from memory, since the last-level cache cannot hold them."""
        layers_bytes = sum(kind.weight_bytes for kind in self.kinds)
        return layers_bytes + self.head.weight_bytes() > cache_bytes


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
    head = next(spec for spec in specs if spec.layer == HEAD_LAYER)
    kinds = kinds_of(config, specs)
    first = config.attention
    blocks = ((kind.name, config.per_layer[kind.layers[0]].find(AttentionBlock)) for kind in kinds)
    heads = {name: (own.heads, own.kv_heads, own.head_dim) for name, own in blocks if own is not None}
    usual = first.heads, first.kv_heads, first.head_dim
    tables = 1 if config.tie_word_embeddings else 2
    return ModelShape(
        name=name,
        kinds=kinds,
        head=head,
        hidden_size=config.hidden_size,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        vocab_size=config.vocab_size,
        weight_bytes=sum(kind.weight_bytes for kind in kinds) + tables * head.weight_bytes(),
        other_heads=tuple((name, own) for name, own in heads.items() if own != usual),
        endings=tuple(_endings(config)),
    )


def _endings(config: ModelConfig) -> Iterator[str]:
    """Yield the operators that lie between two linear layers in their plain form, in all layers."""
    stages = [stage for layer in config.per_layer for stage in layer.stages]
    blocks = [block for stage in stages for block in stage.blocks]
    attention = [block for block in blocks if isinstance(block, AttentionBlock)]
    networks = [block for block in blocks if isinstance(block, FfnBlock)]
    if len(blocks) > len(attention) + len(networks):
        return
    is_scaled = config.centered_norms or any(layer.is_scaled for layer in config.per_layer)
    plain = (stage.norm and stage == LayerStage(stage.norm, stage.blocks[:1]) for stage in stages)
    if not is_scaled and all(plain):
        yield "rms_norm"
    if all(block.turns_plainly for block in attention):
        yield "rope_and_store"
    if not any(block.sparsity or block.activation == "xielu" for block in networks):
        yield "gated_activation"


def kinds_of(config: ModelConfig, specs: Sequence[OpSpec]) -> tuple[LayerKind, ...]:
    """Return the kinds of layers that all groups of a model have, in the order of their first layers."""
    return kinds_of_specs((*specs, *expert_specs(config, specs)))


def kinds_of_specs(specs: Iterable[OpSpec]) -> tuple[LayerKind, ...]:
    """Return the kinds of layers that groups have, the experts of a mixture among them."""
    kinds: dict[str, dict[int, list[OpSpec]]] = {}
    for spec in specs:
        if spec.layer != HEAD_LAYER:
            kinds.setdefault(spec.kind, {}).setdefault(spec.layer, []).append(spec)
    found = []
    for name, layers in kinds.items():
        first = layers[min(layers)]
        own = tuple(spec for spec in first if spec.experts is None)
        experts = next((spec for spec in first if spec.experts is not None), None)
        found.append(LayerKind(name, tuple(sorted(layers)), own, experts))
    return tuple(sorted(found, key=lambda kind: kind.layers))


def _distinct(specs: Iterable[OpSpec]) -> tuple[OpSpec, ...]:
    """Return the first of specifications that are alike."""
    found: dict[OpSpec, OpSpec] = {}
    for spec in specs:
        found.setdefault(spec.anywhere, spec)
    return tuple(found.values())
