"""The state of sessions between passes: keys and values, and recurrent state, in pools of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.state_pool import StatePool
from heterollm.engine.step import Buffer
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    PAGE_POSITIONS,
    STEP_STATE_READ,
    STEP_STATE_WRITTEN,
    STEP_WORDS,
    KvLayer,
    KvMemory,
    RecurrentLayer,
    pages_of,
)
from heterollm.model import AttentionBlock, KvSpec, ModelConfig, RecurrentSpec

KV_CACHE: Final = "kv_cache"
"""Name of the buffers of keys and values; those of a window have its positions behind a dot."""

RECURRENT: Final = "recurrent"
"""Name of the buffers of recurrent state."""

EMPTY: Final = -1
"""Position of a slot without a state."""

MOST_ELEMENTS: Final = 2**32
"""Elements of a layer's keys and values: kernels count them in 32 bits."""


def is_state(buffer: Buffer) -> bool:
    """Return whether a buffer holds the state of sessions."""
    return buffer.name.partition(".")[0] in (KV_CACHE, RECURRENT)


class LayerState(Protocol):
    """The state of a session for layers that need the same.

    A pass at a position forgets the tokens from that position on.
    """

    def reserve(self, position: int, tokens: int) -> None:
        """Make room for the tokens of a pass, in blocks that no other session holds."""

    def bind(self, words: NDArray[np.int32], lane: int) -> None:
        """Write the words of a step buffer from which kernels read where it lies."""

    def commit(self, position: int) -> None:
        """Note that the passes before a position have run."""

    def latest(self, position: int) -> int:
        """Return the last position up to this one at which it holds all that a pass needs; 0 at worst."""

    def truncate(self, position: int) -> None:
        """Give back the blocks of the tokens from a position on."""

    def share(self, other: Self, position: int) -> None:
        """Hold the blocks of another state behind its tokens before a position, which is a latest one."""

    def read(self, position: int) -> Iterator[NDArray[np.uint8]]:
        """Yield all that a pass at a position needs, which is a latest one: the blocks of each layer."""

    def shapes(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the shapes of what :meth:`read` yields."""

    def fill(self, position: int, values: Sequence[NDArray[np.uint8]]) -> None:
        """Hold what :meth:`read` has yielded, and nothing else."""


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


def kv_groups(config: ModelConfig, context: int, longest: int) -> tuple[KvGroup, ...]:
    """Return the groups of layers of a model; without a shorter window one of each size of heads.

    Args:
        config: The model.
        context: Positions of a session.
        longest: Most positions that a pass writes.
    """
    found: dict[tuple[KvSpec, int], list[int]] = {}
    for layer, spec in config.states:
        if not isinstance(spec, KvSpec):
            continue
        places = spec.kept(context, longest)
        whole = replace(spec, window=spec.window if places < context else 0)
        found.setdefault((whole, places), []).append(layer)
    groups, table = [], STEP_WORDS
    for (spec, places), layers in found.items():
        readers = {
            layer: block.kv_layer
            for layer, block in config.blocks(AttentionBlock).items()
            if block.kv_layer in layers
        }
        groups.append(KvGroup(spec, tuple(layers), readers, context, places, table))
        table += pages_of(context)
    return tuple(groups)


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


class StateUser(Protocol):
    """A pass whose kernels read and write state."""

    def rebind(self) -> None:
        """Use the buffers that the memories of state have now."""


class StateMemory:
    """The memory of the state of all sessions of an engine.

    Args:
        device: The device.
        groups: The layers with keys and values.
        recurrent: The sizes of recurrent state by layer.

    Attributes:
        memory: The memory by layer, for kernels.
        passes: Passes whose kernels use it.
        pools: The pools, one for each group, and one of recurrent states.
    """

    def __init__(
        self, device: Device, groups: Sequence[KvGroup], recurrent: Mapping[int, RecurrentSpec]
    ) -> None:
        self._groups, self._recurrent, self._dtype = groups, tuple(recurrent), device.cache_dtype
        self.passes: weakref.WeakSet[StateUser] = weakref.WeakSet()
        self._slots = min((spec.kept(0, 0) for spec in recurrent.values()), default=0)
        most_bytes = device.gpu.traits.max_buffer_bytes
        counted_bytes = MOST_ELEMENTS * self._dtype.itemsize
        pages = [
            StatePool(
                device.gpu,
                dict.fromkeys(group.layers, group.spec.bytes(PAGE_POSITIONS, self._dtype)),
                pages_of(group.places),
                min(most_bytes, counted_bytes),
                self._rebind,
            )
            for group in groups
        ]
        states = []
        if recurrent:
            sizes = {layer: 4 * spec.values for layer, spec in recurrent.items()}
            states = [StatePool(device.gpu, sizes, self._slots, most_bytes, self._rebind)]
        self.pools = (*pages, *states)
        names = {
            memory: group.name
            for group, pool in zip(groups, pages, strict=True)
            for memory in pool.memories.values()
        }
        names |= {memory: RECURRENT for pool in states for memory in pool.memories.values()}
        layers = {
            layer: KvLayer(memory, group.table)
            for group, pool in zip(groups, pages, strict=True)
            for layer, memory in pool.memories.items()
        }
        layers |= {layer: layers[source] for group in groups for layer, source in group.readers.items()}
        rest = {
            layer: RecurrentLayer(memory, recurrent[layer].values)
            for pool in states
            for layer, memory in pool.memories.items()
        }
        self.memory = KvMemory(names, layers, rest)

    @property
    def row_words(self) -> int:
        """Words of the step buffer for a session."""
        return STEP_WORDS + sum(pages_of(group.positions) for group in self._groups)

    def session(self) -> SessionState:
        """Return the state of an empty session."""
        pages, states = self.pools[: len(self._groups)], self.pools[len(self._groups) :]
        return SessionState(
            (
                *(KvState(*own, self._dtype) for own in zip(self._groups, pages, strict=True)),
                *(RecurrentState(pool, self._recurrent, self._slots) for pool in states),
            )
        )

    def limit(self, sessions: int | None) -> None:
        """Bound the memory to that of so many sessions, or by the largest buffer alone."""
        for pool in self.pools:
            pool.limit(sessions)

    def sessions_taken(self, prompt: int, tokens: int, count: int) -> float:
        """Return how many sessions have room for all that the answers to one prompt ever hold.

        The answers share the whole pages of their prompt. The states of recurrent layers they do not.

        Args:
            prompt: Tokens of the prompt.
            tokens: Tokens of the prompt and of the longest answer.
            count: Answers.
        """
        own = pages_of(tokens) - prompt // PAGE_POSITIONS
        parts = [min(1.0, own / pages_of(group.places)) for group in self._groups]
        return 1 + (count - 1) * (1.0 if self._recurrent else max(parts, default=0.0))

    def close(self) -> None:
        """Free the memory; no pass may run afterwards."""
        for memory in self.memory.memories:
            memory.buffer = None

    def _rebind(self) -> None:
        for one in self.passes:
            one.rebind()


class SessionState:
    """The state of all layers of a session.

    Args:
        states: That of layers that need the same.
    """

    __slots__ = ("states",)

    def __init__(self, states: tuple[LayerState, ...]) -> None:
        self.states = states

    def reserve(self, position: int, tokens: int) -> None:
        """Make room for the tokens of a pass at a position; tokens from there on are forgotten.

        Raises:
            KernelError: There is no room.
        """
        for state in self.states:
            state.reserve(position, tokens)

    def bind(self, words: NDArray[np.int32], lane: int) -> None:
        """Write the words of a step buffer from which kernels read where all lies."""
        for state in self.states:
            state.bind(words, lane)

    def commit(self, position: int) -> None:
        """Note that the passes before a position have run."""
        for state in self.states:
            state.commit(position)

    def latest(self, position: int) -> int:
        """Return the last position up to this one at which all that a pass needs is there; 0 at worst."""
        while True:
            found = position
            for state in self.states:
                found = state.latest(found)
            if found == position:
                return found
            position = found

    def can_truncate(self, position: int) -> bool:
        """Return whether all that a pass at a position needs is there."""
        return self.latest(position) == position

    def truncate(self, position: int) -> None:
        """Forget the tokens from a position on."""
        for state in self.states:
            state.truncate(position)

    def share(self, other: SessionState, position: int) -> None:
        """Hold the state of another session's tokens before a position, a latest one; this copies nothing."""
        for own, source in zip(self.states, other.states, strict=True):
            own.share(source, position)

    def keys(self) -> NDArray[np.uint8]:
        """Return the bytes ``[layer, kv_head, position, …]`` of all keys, where no window is shorter."""
        found: dict[int, NDArray[np.uint8]] = {}
        for state in self.states:
            if isinstance(state, KvState):
                found |= state.keys()
        return np.stack([found[layer] for layer in sorted(found)])


class BatchRun(NamedTuple):
    """A session's rows in a decode pass of several: its state, and int32 tokens from a position on."""

    state: SessionState
    position: int
    tokens: NDArray[np.int32]
