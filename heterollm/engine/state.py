"""The state of a session between passes in the GPU's memory: keys and values, and recurrent state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.step import Buffer
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    PAGE_POSITIONS,
    STEP_STATE_READ,
    STEP_STATE_WRITTEN,
    STEP_WORDS,
    DeviceMemory,
    KvLayer,
    KvMemory,
    RecurrentLayer,
    head_stride,
    pages_of,
    position_bytes,
    scales_start,
)
from heterollm.model import AttentionBlock, KvSpec, ModelConfig, RecurrentSpec

KV_CACHE: Final = "kv_cache"
"""Name of the buffer of keys and values; those of a window have its positions behind a dot."""

RECURRENT: Final = "recurrent"
"""Name of the buffer of recurrent state."""

EMPTY: Final = -1
"""Position of a slot without a state."""


def is_state(buffer: Buffer) -> bool:
    """Return whether a buffer holds the state of a session."""
    return buffer.name.partition(".")[0] in (KV_CACHE, RECURRENT)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Some bytes of each row of a memory.

    Args:
        memory: The memory.
        stride_bytes: Bytes of a row.
        row_bytes: Those of them that count.
        start_bytes: The first of them in a row.
    """

    memory: DeviceMemory
    stride_bytes: int
    row_bytes: int
    start_bytes: int = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.memory.size_bytes // self.stride_bytes


class LayerState(Protocol):
    """The state of a session for layers that need the same.

    A pass at a position forgets the tokens from that position on.
    """

    @property
    def memories(self) -> dict[DeviceMemory, str]:
        """Its memory, with the names of buffers in steps."""

    def reserve(self, position: int, tokens: int) -> None:
        """Make room for the tokens of a pass."""

    def bind(self, words: NDArray[np.int32], lane: int) -> None:
        """Write the words of a lane's step buffer from which kernels read where it lies."""

    def commit(self, position: int) -> None:
        """Note that the passes before a position have run."""

    def latest(self, position: int) -> int:
        """Return the last position up to this one at which it holds all that a pass needs; 0 at worst."""

    def rows(self, position: int) -> Iterator[StateRows]:
        """Yield where the state of the tokens before a position lies, which is a latest one."""

    def note(self, position: int) -> tuple[int, ...]:
        """Return what else there is to know of it, as many numbers for each position."""

    def hold(self, note: tuple[int, ...]) -> None:
        """Take a note on the rows of another state, which have been copied."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose keys and values lie in the same memory.

    Args:
        spec: Their sizes.
        layers: Their numbers.
        readers: The layer whose keys and values each layer reads that has none.
        positions: Positions of a session.
        places: Positions in memory; as many, unless a window needs fewer.
        table: First word of their pages in the step buffer.
    """

    spec: KvSpec
    layers: tuple[int, ...]
    readers: Mapping[int, int]
    positions: int
    places: int
    table: int

    @property
    def is_paged(self) -> bool:
        """Whether positions have no fixed places."""
        return self.places < self.positions


def kv_groups(config: ModelConfig, context: int, longest: int) -> tuple[KvGroup, ...]:
    """Return the memories of a session's keys and values; without a shorter window one for all layers.

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
        table += pages_of(context) if groups[-1].is_paged else 0
    return tuple(groups)


class KvState:
    """Keys and values ``[layer][k|v][kv_head][place][head_dim]`` of the device's cache type.

    Each head begins on a page of memory. In 8 bits the scales of a head's places lie behind its codes. Layers
    that exceed the GPU's largest buffer together are in several memories.

    A token's place is its position, unless layers with a sliding window keep fewer: there the page of later
    positions takes the place of one that the window has left.
    """

    def __init__(self, device: Device, group: KvGroup) -> None:
        self._group, self._gpu, spec, dtype = group, device.gpu, group.spec, device.cache_dtype
        code_bytes = spec.head_dim * dtype.itemsize
        # Where the parts of a head's places begin, and their bytes: elements, and scales of codes.
        self._parts = [(0, code_bytes)]
        if scale_bytes := position_bytes(spec.head_dim, dtype) - code_bytes:
            self._parts.append((scales_start(group.places, spec.head_dim), scale_bytes))
        self._stride_bytes = head_stride(group.places, spec.head_dim, dtype) * dtype.itemsize
        layer_bytes, count = spec.bytes(group.places, dtype), len(group.layers)
        each = min(count, max(1, self._gpu.traits.max_buffer_bytes // layer_bytes))
        sizes = [min(each, count - first) * layer_bytes for first in range(0, count, each)]
        memories = [DeviceMemory(self._gpu.scratch(size), size) for size in sizes]
        name = f"{KV_CACHE}.{spec.window}" if group.is_paged else KV_CACHE
        self.memories = dict.fromkeys(memories, name)
        places = group.places if group.is_paged else 0
        self.layers = {
            layer: KvLayer(memories[at // each], at % each, places, group.table)
            for at, layer in enumerate(group.layers)
        }
        self.layers |= {layer: self.layers[source] for layer, source in group.readers.items()}
        pages = np.arange(pages_of(group.positions), dtype=np.int32)
        self._pages = pages % pages_of(group.places)
        # The pages that are held, ascending and without a gap, and the position behind the last pass.
        self._first = self._stop = self._end = 0

    def reserve(self, position: int, tokens: int) -> None:
        """Make room for the tokens of a pass."""
        first, stop = self._first_seen(position), pages_of(position + tokens)
        if not self._first <= first <= self._stop:
            self._first = first
        self._first, self._stop = max(self._first, stop - pages_of(self._group.places)), stop
        self._end = min(self._end, position)

    def bind(self, words: NDArray[np.int32], _lane: int) -> None:
        """Write the words of a lane's step buffer from which kernels read where it lies."""
        if self._group.is_paged:
            words[self._group.table : self._group.table + len(self._pages)] = self._pages

    def commit(self, position: int) -> None:
        """Note that the passes before a position have run."""
        self._end = position

    def latest(self, position: int) -> int:
        """Return the last position up to this one at which it holds all that a pass needs; 0 at worst."""
        return position if position <= self._end and self._first <= self._first_seen(position) else 0

    def rows(self, position: int) -> Iterator[StateRows]:
        """Yield where the state of the tokens before a position lies, which is a latest one."""
        places = min(position, self._group.places)
        for memory in self.memories:
            for start_bytes, each_bytes in self._parts:
                yield StateRows(memory, self._stride_bytes, places * each_bytes, start_bytes)

    def note(self, position: int) -> tuple[int, ...]:
        """Return the first page, the page behind the last one, and the position."""
        return self._first, pages_of(position), position

    def hold(self, note: tuple[int, ...]) -> None:
        """Take a note on the rows of another state, which have been copied."""
        self._first, self._stop, self._end = note

    def _first_seen(self, position: int) -> int:
        """Return the first page that a token at a position attends to."""
        window = self._group.spec.window
        return max(0, position - window + 1) // PAGE_POSITIONS if window else 0


class RecurrentState:
    """State of layers that depends on all tokens before, float32 ``[layer][slot][values]`` in one memory.

    A slot holds the state behind one position. A pass reads the slot of its own position and writes another,
    which counts once the pass has run: failed passes and refused guesses leave the state as it was. The other
    slots hold earlier positions, to which a session can go back.

    Args:
        device: The device.
        specs: The sizes by layer.
    """

    def __init__(self, device: Device, specs: Mapping[int, RecurrentSpec]) -> None:
        self._gpu = device.gpu
        slots = min(spec.kept(0, 0) for spec in specs.values())
        ends = list(itertools.accumulate(slots * spec.values for spec in specs.values()))
        self._memory = DeviceMemory(self._gpu.scratch(4 * ends[-1]), 4 * ends[-1])
        self.memories = {self._memory: RECURRENT}
        self.layers = {
            layer: RecurrentLayer(self._memory, start, spec.values)
            for (layer, spec), start in zip(specs.items(), [0, *ends], strict=False)
        }
        self._positions = [EMPTY] * slots
        self._read, self._written, self._spare = 0, 0, [0, 0]

    def reserve(self, position: int, _tokens: int) -> None:
        """Choose the slots of a pass; the states behind its position are forgotten."""
        self._positions = [own if own <= position else EMPTY for own in self._positions]
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
        self._written = self._spare[lane % 2]
        self._positions[self._written] = EMPTY
        words[STEP_STATE_READ] = self._spare[(lane - 1) % 2] if lane else self._read
        words[STEP_STATE_WRITTEN] = self._written

    def commit(self, position: int) -> None:
        """Note that the passes before a position have run."""
        self._positions[self._written] = position

    def latest(self, position: int) -> int:
        """Return the last position up to this one whose state is there; 0 at worst."""
        return max((own for own in self._positions if EMPTY < own <= position), default=0)

    def rows(self, _position: int) -> Iterator[StateRows]:
        """Yield the one row, all states."""
        yield StateRows(self._memory, self._memory.size_bytes, self._memory.size_bytes)

    def note(self, position: int) -> tuple[int, ...]:
        """Return the position of each state, those up to a position."""
        return tuple(own if own <= position else EMPTY for own in self._positions)

    def hold(self, note: tuple[int, ...]) -> None:
        """Take a note on the rows of another state, which have been copied."""
        self._positions = list(note)


class SessionState:
    """The state of all layers of a session.

    Args:
        device: The device.
        groups: The memories of its keys and values.
        recurrent: The sizes of recurrent state by layer.
    """

    __slots__ = ("__weakref__", "_gpu", "memory", "states")

    def __init__(
        self, device: Device, groups: Sequence[KvGroup], recurrent: Mapping[int, RecurrentSpec]
    ) -> None:
        self._gpu = device.gpu
        kept = [KvState(device, group) for group in groups]
        own = [RecurrentState(device, recurrent)] if recurrent else []
        self.states: tuple[LayerState, ...] = (*kept, *own)
        memories = {memory: name for state in self.states for memory, name in state.memories.items()}
        layers = {layer: place for state in kept for layer, place in state.layers.items()}
        self.memory = KvMemory(memories, layers, own[0].layers if own else {})

    @property
    def size_bytes(self) -> int:
        """Size of all memories."""
        return sum(memory.size_bytes for memory in self.memory.memories)

    def stand_in(self) -> KvMemory:
        """Return memory of no use, to bind to kernels in place of this session's."""
        memories = self.memory.memories.values()
        return KvMemory({DeviceMemory(self._gpu.scratch(1), 1): name for name in memories}, {}, {})

    def reserve(self, position: int, tokens: int) -> None:
        """Make room for the tokens of a pass at a position; tokens from there on are forgotten."""
        for state in self.states:
            state.reserve(position, tokens)

    def bind(self, words: NDArray[np.int32], lane: int) -> None:
        """Write the words of a lane's step buffer from which kernels read where all lies."""
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

    def copy_from(self, other: SessionState, position: int) -> None:
        """Copy the state of the tokens before a position, which is a latest one of the other."""
        for target, source in zip(self.states, other.states, strict=True):
            for to, own in zip(target.rows(position), source.rows(position), strict=True):
                self._gpu.copy_rows(
                    *(to.memory, own.memory),
                    rows=to.count,
                    row_bytes=to.row_bytes,
                    stride_bytes=to.stride_bytes,
                    start_bytes=to.start_bytes,
                )
            target.hold(source.note(position))

    def read(self, rows: StateRows) -> NDArray[np.uint8]:
        """Return the bytes ``[count, row_bytes]`` of rows."""
        found = np.empty((rows.count, rows.row_bytes), np.uint8)
        for number, row in enumerate(found):
            place = number * rows.stride_bytes + rows.start_bytes
            self._gpu.copy(row, rows.memory.buffer, offset_bytes=place)
        return found

    def write(self, rows: StateRows, values: NDArray[np.uint8]) -> None:
        """Replace the bytes of rows."""
        for number, row in enumerate(values):
            place = number * rows.stride_bytes + rows.start_bytes
            self._gpu.copy(rows.memory.buffer, row, offset_bytes=place)


class BatchRow(NamedTuple):
    """A session's row in a decode pass of several: its state, and a token with its position."""

    state: SessionState
    position: int
    token: int
