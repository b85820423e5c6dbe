"""A session's keys and values: the pages that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.state_pool import StatePool
from heterollm.kernels.gpu import PAGE_POSITIONS, pages_of
from heterollm.model import KvSpec

KV_CACHE: Final = "kv_cache"
"""Name of the buffers of keys and values; those of a window have its positions behind a dot."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose keys and values lie in the same pages.

    Args:
        spec: Their sizes.
        layers: Their numbers.
        readers: The layer whose keys and values each layer reads that has none.
        positions: Positions of a session.
        places: Positions that a session keeps; as many, unless a window needs fewer.
        table: First word of its pages in the step buffer.
    """

    spec: KvSpec
    layers: tuple[int, ...]
    readers: Mapping[int, int]
    positions: int
    places: int
    table: int

    @property
    def name(self) -> str:
        """Name of the buffers in steps."""
        return f"{KV_CACHE}.{self.spec.window}" if self.places < self.positions else KV_CACHE


class KvState:
    """A session's keys and values: the pages that hold them.

    Where a window is shorter than the context, pages are given back once it and some positions before have
    left them. A page that other sessions hold is copied before the session writes to it.

    Args:
        group: The layers.
        pool: Their pages.
        dtype: Type of the KV cache.
    """

    def __init__(self, group: KvGroup, pool: StatePool, dtype: np.dtype[np.generic]) -> None:
        self._group, self._pool, self._row_bytes = group, pool, group.spec.head_dim * dtype.itemsize
        self._pages = np.zeros(pages_of(group.positions), np.int32)
        # The pages that are held are these and those between, and the position behind the last pass.
        self._first = self._stop = self._end = 0

    def __del__(self) -> None:
        self._pool.drop_later(self._held())

    def reserve(self, position: int, tokens: int) -> None:
        """Make room for the tokens of a pass, in blocks that no other session holds."""
        self.truncate(position)
        first, stop = self._first_seen(position), pages_of(position + tokens)
        if not self._first <= first <= self._stop:
            self._pool.drop(self._held())
            self._first = self._stop = first
        kept = max(self._first, stop - pages_of(self._group.places))
        self._pool.drop(self._held(stop=kept))
        self._first, self._stop = kept, max(kept, self._stop)
        place = position // PAGE_POSITIONS
        if place < self._stop:
            self._pages[place] = self._pool.own(int(self._pages[place]), copied=True)
        self._take(stop)

    def bind(self, words: NDArray[np.int32], _lane: int) -> None:
        """Write the words of a step buffer from which kernels read where it lies."""
        table = self._group.table
        words[table : table + self._stop] = self._pages[: self._stop]

    def commit(self, position: int) -> None:
        """Note that the passes before a position have run."""
        self._end = position

    def latest(self, position: int) -> int:
        """Return the last position up to this one at which it holds all that a pass needs; 0 at worst."""
        return position if position <= self._end and self._first <= self._first_seen(position) else 0

    def truncate(self, position: int) -> None:
        """Give back the blocks of the tokens from a position on."""
        stop = pages_of(position)
        self._pool.drop(self._held(start=stop))
        self._stop = min(self._stop, stop)
        self._first, self._end = min(self._first, self._stop), min(self._end, position)

    def share(self, other: KvState, position: int) -> None:
        """Hold the blocks of another state behind its tokens before a position, which is a latest one."""
        self.truncate(0)
        self._pages[:] = other._pages
        self._stop, self._end = pages_of(position), position
        self._first = min(other._first, self._stop)
        self._pool.share(self._held())

    def read(self, position: int) -> Iterator[NDArray[np.uint8]]:
        """Yield all that a pass at a position needs, which is a latest one: the blocks of each layer."""
        used, rows_bytes = position % PAGE_POSITIONS, PAGE_POSITIONS * self._row_bytes
        pages = self._pages[self._first_seen(position) : pages_of(position)].tolist()
        for layer in self._group.layers:
            values = self._pool.read(layer, pages)
            if used:
                # What lies behind the position may be of another session: elements, and scales of codes.
                heads = values[-1].reshape(self._group.spec.page_heads, -1)
                heads[:, used * self._row_bytes : rows_bytes] = 0
                heads[:, rows_bytes + used * (heads.shape[1] - rows_bytes) // PAGE_POSITIONS :] = 0
            yield values

    def shapes(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the shapes of what :meth:`read` yields."""
        pages = pages_of(position) - self._first_seen(position)
        return (self._pool.shape(layer, pages) for layer in self._group.layers)

    def fill(self, position: int, values: Sequence[NDArray[np.uint8]]) -> None:
        """Hold what :meth:`read` has yielded, and nothing else."""
        self.truncate(0)
        self._first = self._stop = self._first_seen(position)
        self._take(pages_of(position))
        for layer, own in zip(self._group.layers, values, strict=True):
            self._pool.write(layer, self._held(), own)
        self._end = position

    def keys(self) -> dict[int, NDArray[np.uint8]]:
        """Return the bytes ``[kv_head, position, …]`` of the keys that are held, by layer."""
        found = {}
        for layer in self._group.layers:
            values = self._pool.read(layer, self._held())
            heads = values.reshape(len(values), 2, self._group.spec.kv_heads, -1)[:, 0]
            rows = heads[..., : PAGE_POSITIONS * self._row_bytes].swapaxes(0, 1)
            found[layer] = rows.reshape(len(rows), -1, self._row_bytes)
        return found

    def _held(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the pages that are held, of those in a range."""
        pages: list[int] = self._pages[
            max(start, self._first) : self._stop if stop is None else min(stop, self._stop)
        ].tolist()
        return pages

    def _take(self, stop: int) -> None:
        """Take pages up to one."""
        while self._stop < stop:
            self._pages[self._stop] = self._pool.take()
            self._stop += 1

    def _first_seen(self, position: int) -> int:
        """Return the first page that a token at a position attends to."""
        window = self._group.spec.window
        return max(0, position - window + 1) // PAGE_POSITIONS if window else 0
