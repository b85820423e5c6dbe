"""The state of sessions between passes: keys and values, and recurrent state, in pools of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.kv_state import KV_CACHE, KvGroup, KvState
from heterollm.engine.recurrent_state import RecurrentState
from heterollm.engine.state_pool import StatePool
from heterollm.engine.step import Buffer
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import PAGE_POSITIONS, STEP_WORDS, KvLayer, KvMemory, RecurrentLayer, pages_of
from heterollm.model import AttentionBlock, KvSpec, ModelConfig, RecurrentSpec

RECURRENT: Final = "recurrent"
"""Name of the buffers of recurrent state."""

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
