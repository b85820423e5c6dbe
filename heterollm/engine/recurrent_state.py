"""A session's state of layers that depends on all tokens before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.state_pool import StatePool
from heterollm.kernels.gpu import STEP_STATE_READ, STEP_STATE_WRITTEN

EMPTY: Final = -1
"""Position of a slot without a state."""


class RecurrentState:
    """A session's state of layers that depends on all tokens before.

    A slot holds the state behind one position. A pass reads the slot of its own position and writes another,
    which counts once the pass has run: failed passes and refused guesses leave the state as it was. The other
    slots hold earlier positions, to which a session can go back. Sessions share what none of them writes.

    Args:
        pool: The states, each a block.
        layers: The layers.
        slots: States that a session keeps.
    """

    def __init__(self, pool: StatePool, layers: Sequence[int], slots: int) -> None:
        self._pool, self._layers = pool, layers
        self._positions = [EMPTY] * slots
        self._blocks = [EMPTY] * slots
        self._read, self._written, self._spare = 0, 0, [0, 0]

    def __del__(self) -> None:
        self._pool.drop_later(self._held())

    def reserve(self, position: int, _tokens: int) -> None:
        """Choose the slots of a pass; the states behind its position are forgotten."""
        self.truncate(position)
        self._read = self._positions.index(position) if position in self._positions else 0
        held = sorted((own, slot) for slot, own in enumerate(self._positions) if EMPTY < own < position)
        ends = [0, *(own for own, _ in held), position]
        # The tokens to read again without a state, summed over the positions that it serves best.
        losses = sorted(
            ((own - before) * (behind - own), slot)
            for before, (own, slot), behind in zip(ends, held, ends[2:], strict=False)
        )
        empty = [slot for slot, own in enumerate(self._positions) if own == EMPTY]
        self._spare = [*empty, *(slot for _, slot in losses)][:2]

    def bind(self, words: NDArray[np.int32], lane: int) -> None:
        """Write the slots of a lane, whose chunk begins with the state behind that of the lane before."""
        self._written = written = self._spare[lane % 2]
        self._positions[written] = EMPTY
        block = self._blocks[written]
        self._blocks[written] = self._pool.take() if block == EMPTY else self._pool.own(block, copied=False)
        words[STEP_STATE_READ] = max(0, self._blocks[self._spare[(lane - 1) % 2] if lane else self._read])
        words[STEP_STATE_WRITTEN] = self._blocks[written]

    def commit(self, position: int) -> None:
        """Note that the passes before a position have run."""
        self._positions[self._written] = position

    def latest(self, position: int) -> int:
        """Return the last position up to this one whose state is there; 0 at worst."""
        return max((own for own in self._positions if EMPTY < own <= position), default=0)

    def truncate(self, position: int) -> None:
        """Give back the blocks of the tokens from a position on."""
        for slot, own in enumerate(self._positions):
            if own > position:
                self._pool.drop([self._blocks[slot]])
                self._positions[slot] = self._blocks[slot] = EMPTY

    def share(self, other: RecurrentState, position: int) -> None:
        """Hold the blocks of another state behind its tokens before a position, which is a latest one."""
        self._drop_all()
        for slot, own in enumerate(other._positions):
            if EMPTY < own <= position:
                self._positions[slot], self._blocks[slot] = own, other._blocks[slot]
        self._pool.share(self._held())

    def read(self, position: int) -> Iterator[NDArray[np.uint8]]:
        """Yield all that a pass at a position needs, which is a latest one: the blocks of each layer."""
        block = self._blocks[self._positions.index(position)]
        return (self._pool.read(layer, [block]) for layer in self._layers)

    def shapes(self, _position: int) -> Iterator[tuple[int, int]]:
        """Yield the shapes of what :meth:`read` yields."""
        return (self._pool.shape(layer, 1) for layer in self._layers)

    def fill(self, position: int, values: Sequence[NDArray[np.uint8]]) -> None:
        """Hold what :meth:`read` has yielded, and nothing else."""
        self._drop_all()
        self._positions[0], self._blocks[0] = position, self._pool.take()
        for layer, own in zip(self._layers, values, strict=True):
            self._pool.write(layer, self._blocks[:1], own)

    def _held(self) -> list[int]:
        return [block for block in self._blocks if block != EMPTY]

    def _drop_all(self) -> None:
        self._pool.drop(self._held())
        self._positions, self._blocks = ([EMPTY] * len(self._positions) for _ in range(2))
