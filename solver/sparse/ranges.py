"""Ranges of lengths and keys for which attention is planned, and entries of neighbouring ones as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from msgspec import structs

from heterollm.solver.sparse.attention import AttentionEntry, NpuAttention, SparseAttention
from heterollm.solver.standard_lengths import LEAST_SCORE_TOKENS

LENGTH_PARTS: Final = 4
"""Ranges of lengths for each size of graphs."""

_Placed: TypeAlias = SparseAttention | NpuAttention
_Cell: TypeAlias = tuple[tuple[int, int], _Placed]
_Row: TypeAlias = tuple[_Cell, ...]


def length_tops(chunk_length: int) -> list[int]:
    """Return the longest passes of ranges of lengths: graphs' sizes and whole chunks, and lengths between.

    Passes are padded to powers of two, so that of lengths with one graph the longest gain most.
    """
    tops = {LEAST_SCORE_TOKENS, chunk_length - 1, chunk_length}
    graph = LEAST_SCORE_TOKENS
    while graph < chunk_length:
        tops |= {graph + graph * part // LENGTH_PARTS for part in range(1, LENGTH_PARTS + 1)}
        graph *= 2
    return sorted(top for top in tops if LEAST_SCORE_TOKENS <= top <= chunk_length) or [chunk_length]


def key_tops(standard: Sequence[int]) -> list[int]:
    """Return the most keys of ranges of keys: those of graphs, and the middle between two of them."""
    middles = {(low + high) // 2 for low, high in itertools.pairwise(standard)}
    return sorted({*standard, *middles})


def ranges_to(tops: Sequence[int], least: int) -> Iterator[tuple[int, int]]:
    """Yield ranges that end at each of some numbers, from ``least`` on."""
    for top in tops:
        if top >= least:
            yield least, top
            least = top + 1


def joined(row: Sequence[tuple[tuple[int, int], _Placed | None]]) -> Iterator[_Cell]:
    """Yield neighbouring ranges of keys with one placement as one, with the prediction of the last."""
    for _, run in itertools.groupby(row, lambda cell: None if cell[1] is None else _bare(cell[1])):
        own = list(run)
        if (placement := own[-1][1]) is not None:
            yield (own[0][0][0], own[-1][0][1]), placement


def joined_rows(rows: Sequence[tuple[tuple[int, int], _Row]]) -> Iterator[tuple[tuple[int, int], _Row]]:
    """Yield neighbouring ranges of lengths with the same ranges of keys and placements as one."""
    for _, run in itertools.groupby(rows, lambda row: [(keys, _bare(own)) for keys, own in row[1]]):
        own = list(run)
        yield (own[0][0][0], own[-1][0][1]), own[-1][1]


def joined_layers(entries: Sequence[AttentionEntry]) -> Iterator[AttentionEntry]:
    """Yield entries of neighbouring layers that differ in nothing else as one."""
    opened: dict[tuple[object, ...], AttentionEntry] = {}
    for entry in entries:
        key = entry.lengths, entry.keys, entry.placement
        held = opened.get(key)
        if held is not None and held.layers[1] == entry.layers[0] - 1:
            opened[key] = structs.replace(held, layers=(held.layers[0], entry.layers[1]))
            continue
        if held is not None:
            yield held
        opened[key] = entry
    yield from opened.values()


def _bare(placement: _Placed) -> _Placed:
    return structs.replace(placement, predicted_us=None)
