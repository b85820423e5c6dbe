"""Sizes and lists of a pass through a layer with experts.

A *pair* is a token and an expert that it chose. The lists give the pairs the order of the experts, in which
the rows of one expert are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from heterollm.base import KernelError
from heterollm.kernels.gpu.memory import DeviceMemory
from heterollm.kernels.gpu.parameters import FEW_TOKEN_STEPS, SIMT_TILES
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.ops import Routing

STEPS: Final = (*FEW_TOKEN_STEPS, *SIMT_TILES)
"""Rows of one expert that a work-group takes."""

COUNTED_PAIRS: Final = 4
"""Counts of a layer: all pairs, those that another processor takes, those beyond its rows that the GPU
computes, and dropped ones."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a pass through a layer with experts.

    Args:
        routing: The choice of experts.
        tokens: Tokens of the pass.

    Raises:
        KernelError: There are no tokens.
    """

    routing: Routing
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise KernelError(f"A pass of {self.tokens} tokens has no experts to compute.")

    @property
    def pairs(self) -> int:
        """Rows of all experts together."""
        return self.tokens * self.routing.chosen

    @property
    def step(self) -> int:
        """Rows of one expert that a work-group takes: the least step that holds an expert's mean rows."""
        # No expert has more rows than there are tokens, however the mean is rounded.
        mean = min(self.tokens, self.pairs / self.routing.touched(self.tokens))
        return next((step for step in STEPS if mean <= step), STEPS[-1])

    @property
    def places(self) -> int:
        """Steps of rows of all experts, at most.

        No expert has more rows than there are tokens. Each expert that has rows has one step, and any
        ``step`` further rows of it are another.
        """
        most = min(self.routing.experts, self.pairs)
        return most + min((self.pairs - most) // self.step, most * ((self.tokens - 1) // self.step))


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The rows of a layer that another processor takes: some of those of each of its experts.

    They are the first ones, or with a saliency those of the tokens of the largest.

    Args:
        table: int32 ``[experts, 2]``: for each expert the most rows that it takes, and the place of the first
            of them among its rows.
        rows: The rows of all its experts together.
        counts: uint32, the counts of all layers, to which each pass adds (:data:`COUNTED_PAIRS`).
        place: First count of the layer.
        saliency: float32 ``[tokens]``, a saliency of each token of at least 0. Then nobody computes further
            rows of its experts; without it the GPU does.
    """

    table: DeviceMemory
    rows: int
    counts: DeviceMemory
    place: int = 0
    saliency: DeviceMemory | None = None

    def require(self, shape: ExpertShape) -> None:
        """Refuse memory that is too small.

        Raises:
            KernelError: The table, the counts or the saliencies are too small.
        """
        self.table.require(8 * shape.routing.experts, "rows that another processor takes")
        self.counts.require(4 * (self.place + COUNTED_PAIRS), "counts of pairs")
        if self.saliency is not None:
            self.saliency.require(4 * shape.tokens, "saliency of tokens")


@dataclass(frozen=True, slots=True)
class ExpertLists:
    """Choices of one pass at a time, and the order of its rows; layers share them.

    Args:
        chosen: int32 ``[tokens, chosen]``: experts of each token, those of the largest scores first.
        weights: float32 ``[tokens, chosen]``.
        source: int32 ``[pairs]``: token of each position; below 0 of one that the GPU does not compute.
        position: int32 ``[pairs]``: position of each pair, counted over tokens, then choices. A pair that
            another processor takes has ``-1 - row`` instead, its row among that processor's; a dropped one
            has the least int32.
        places: int32 ``[places, 4]``: expert, first position and number of positions of each step of rows;
            idle steps have the expert -1.
        counted: Returns the experts in ``places``, and their rows, on a simulated device, which has no lists;
            None if tokens choose all experts evenly.
    """

    chosen: DeviceMemory
    weights: DeviceMemory
    source: DeviceMemory
    position: DeviceMemory
    places: DeviceMemory
    counted: Callable[[], tuple[int, int]] | None = None

    @staticmethod
    def sizes(shape: ExpertShape) -> dict[str, int]:
        """Return the size in bytes of each list."""
        pairs = dict.fromkeys(("chosen", "weights", "source", "position"), 4 * shape.pairs)
        return pairs | {"places": 16 * shape.places}

    @classmethod
    def allocate(cls, runtime: GpuRuntime, shape: ExpertShape) -> ExpertLists:
        """Return memory for passes of ``shape``."""
        sizes = cls.sizes(shape)
        return cls(
            **{name: DeviceMemory(runtime.scratch(size), size) for name, size in sizes.items()}, counted=None
        )

    def require(self, shape: ExpertShape) -> None:
        """Refuse memory that is too small for passes of ``shape``.

        Raises:
            KernelError: A list is too small.
        """
        for name, size in self.sizes(shape).items():
            getattr(self, name).require(size, f"experts' {name}")
