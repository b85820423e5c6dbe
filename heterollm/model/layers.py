"""The layers of a decoder as data: stages, each of which adds the outputs of its blocks to the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from heterollm.model.block import (
    LAYER_SCALE,
    STREAM_CORRECTION,
    STREAM_MIXING,
    STREAM_PREDICTION,
    STREAM_ROUTER,
    STREAM_ROUTER_NORM,
    STREAM_SCALE,
    Block,
    GroupShape,
    Norm,
)

AnyBlock = TypeVar("AnyBlock", bound=Block)


class BlockNorms(NamedTuple):
    """The norms of one of several blocks of a stage.

    Args:
        norm: The norm before; None where the block reads the stream itself.
        output_norm: The norm of its output alone; None without.
    """

    norm: Norm | None
    output_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class LayerStage:
    """Blocks that read norms of the residual stream, or the stream, to which their outputs are added.

    Args:
        norm: The norm before; None where the blocks read the stream itself.
        blocks: The blocks: one, or a mixture and the network beside it.
        output_norm: The norm of the sum of outputs; None without.
        own_norms: Norms of blocks that have their own, by name of the block.
        gain: Factor on the residual stream behind the stage.
        streams: What happens to several streams before; empty for nothing.
    """

    norm: Norm | None
    blocks: tuple[Block, ...]
    output_norm: Norm | None = None
    own_norms: Mapping[str, BlockNorms] = field(default_factory=dict)
    gain: float = 1.0
    streams: Literal["", "predicted", "corrected"] = ""

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears of its blocks."""
        found = tuple(shape for block in self.blocks for shape in block.groups(hidden))
        branches = (block.NAME for block in self.blocks if not block.GROUPS)
        own = *((STREAM_MIXING,) if self.streams else ()), *branches
        if not own or not found:
            return found
        first, *rest = found
        return replace(first, before=(*own, *first.before)), *rest

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms around the blocks, each once."""
        inner = (norm for block in self.blocks for norm in self.norms_of(block))
        return tuple(
            dict.fromkeys(norm for norm in (self.norm, *inner, self.output_norm) if norm is not None)
        )

    def norms_of(self, block: Block) -> BlockNorms:
        """Return the norm that a block reads, and that of its output alone."""
        return self.own_norms.get(block.NAME, BlockNorms(self.norm))


@dataclass(frozen=True, slots=True)
class LayerStreams:
    """Several residual streams (AltUp): a layer computes the first, and predicts and corrects the others.

    Args:
        count: Number of streams.
        scaled: Whether what meets the layer's own embedding has factors.
    """

    count: int
    scaled: bool = True

    def tensors(self, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that mix them, by role."""
        return {
            STREAM_ROUTER: (self.count, hidden),
            STREAM_ROUTER_NORM: (hidden,),
            STREAM_PREDICTION: (self.count**2, self.count),
            STREAM_CORRECTION: (self.count, self.count),
            STREAM_SCALE: (hidden,),
        }


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer.

    Args:
        stages: Its parts in order.
        is_scaled: Whether the residual stream is multiplied by a number of the layer at its end.
        streams: The streams, if there are several; None for one.
    """

    stages: tuple[LayerStage, ...]
    is_scaled: bool = False
    streams: LayerStreams | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all stages."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    def tensors(self, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of tensors beside linears and norms, by role."""
        own: dict[str, tuple[int, ...]] = {LAYER_SCALE: (1,)} if self.is_scaled else {}
        own |= self.streams.tensors(hidden) if self.streams else {}
        for block in self.blocks:
            own |= block.tensors(hidden)
        return own

    def find(self, kind: type[AnyBlock]) -> AnyBlock | None:
        """Return the layer's block of a kind; None without."""
        return next((block for block in self.blocks if isinstance(block, kind)), None)


def kind_names(layers: Sequence[LayerConfig]) -> tuple[str, ...]:
    """Return the name of each layer's kind: none if all are alike, else ``attention+ffn`` and such.

    Layers are alike if operators of equal sizes follow each other in the same order.
    """
    seen: dict[tuple[Block, ...], str] = {}
    found = []
    for layer in layers:
        timed = tuple(block.timed() for block in layer.blocks)
        if timed not in seen:
            name = "+".join(block.NAME for block in timed)
            others = sum(other.partition("#")[0] == name for other in seen.values())
            seen[timed] = f"{name}#{others + 1}" if others else name
        found.append(seen[timed])
    return tuple(found) if len(seen) > 1 else ("",) * len(found)
