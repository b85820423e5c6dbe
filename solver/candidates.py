"""Candidates: all legal placements of one group in one pass.

Splits are the paper's (HeteroLLM, section 4.2). A row split gives the NPU the leading rows of each member at
a standard length, a hybrid split at a padded length. A sequence split gives it one or several standard
lengths from the first token on, and the GPU the other tokens. An ffn is split along its intermediate width,
or runs on the NPU alone; on the GPU alone it is two groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import OpSpec
from heterollm.profiler.work import split_rows
from heterollm.solver.ffn import ffn_shard, split_alignment
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, Placement, RowsPlacement

Rows: TypeAlias = tuple[int, ...]
"""Rows of each member on the NPU; empty where the GPU computes all."""

Splits: TypeAlias = Iterable[Rows] | Mapping[Rows, Sequence[int]]
"""Rows that candidates may use, whole groups included: at all standard lengths, or with lengths of each."""

MAX_SPLITS: Final = 24
"""Row splits of a group in the first search; later searches try positions near the chosen ones."""

MAX_GRAPHS: Final = 32
"""Sequence splits use no graph shorter than the pass divided by this, to bound the search."""


@dataclass(frozen=True, slots=True)
class NpuLimits:
    """Shapes that a device's NPU can run.

    Args:
        standard_lengths: Lengths of its graphs, ascending.
        row_alignment: Multiple of rows at which groups can be split.
        forms: Returns the legal graph forms of a group at a length, best first; empty where the NPU cannot
            compute it. For an ffn, its argument is the shard.
        left_out: Places of groups that it need not compute.
        covering: Places of groups that it computes for all tokens of a pass or none.
    """

    standard_lengths: tuple[int, ...]
    row_alignment: int
    forms: Callable[[OpSpec, int], tuple[str, ...]]
    left_out: frozenset[str] = frozenset()
    covering: frozenset[str] = frozenset()

    def slice_forms(self, spec: OpSpec, rows: Rows) -> dict[int, tuple[str, ...]]:
        """Return the legal forms of some rows of each member of a group at every length."""
        return _slice_forms(self, spec, rows if spec.then is not None else spec.member_rows)

    def runs(self, spec: OpSpec) -> bool:
        """Return whether the NPU can compute a group, or some shard of it, at any length."""
        splits = [*aligned_splits(spec, self.row_alignment), spec.member_rows]
        return any(any(self.slice_forms(spec, rows).values()) for rows in splits)


@lru_cache(maxsize=1024)
def _slice_forms(limits: NpuLimits, spec: OpSpec, rows: Rows) -> dict[int, tuple[str, ...]]:
    shard = spec if spec.then is None else ffn_shard(spec, rows[0])
    if spec.place in limits.left_out:
        return {}
    return {length: limits.forms(shard, length) for length in limits.standard_lengths}


def aligned_splits(spec: OpSpec, alignment: int) -> list[Rows]:
    """Return the legal row splits of a group in ascending order, at most :data:`MAX_SPLITS`, evenly spaced.

    All members are split at the same fraction, so that row ``i`` of gate stays with row ``i`` of up.
    """
    alignment, stride = split_alignment(spec, alignment), split_stride(spec, alignment)
    return _splits_at(spec, alignment, range(stride, max(spec.member_rows) // alignment + 1, stride))


def split_stride(spec: OpSpec, alignment: int) -> int:
    """Return the distance between the splits of :func:`aligned_splits`, in multiples of the alignment."""
    steps = max(spec.member_rows) // split_alignment(spec, alignment)
    return max(1, -(-steps // MAX_SPLITS))


def splits_near(
    spec: OpSpec, alignment: int, held: Iterable[Rows], stride: int, *, ends: bool = True
) -> list[Rows]:
    """Return splits of a group and their neighbours at a distance, in ascending order.

    Args:
        spec: The group.
        alignment: Row alignment of the NPU.
        held: The splits.
        stride: Distance in multiples of the alignment.
        ends: Whether to include the neighbours of an empty and of a full NPU shard.
    """
    alignment, longest = split_alignment(spec, alignment), max(spec.member_rows)
    place = spec.member_rows.index(longest)
    steps = {
        *((0, longest // alignment) if ends else ()),
        *(rows[place] // alignment for rows in held if rows),
    }
    return _splits_at(spec, alignment, {step + side for step in steps for side in (-stride, 0, stride)})


def _splits_at(spec: OpSpec, alignment: int, steps: Iterable[int]) -> list[Rows]:
    longest = max(spec.member_rows)
    found = (
        split_rows(spec.member_rows, step * alignment / longest, alignment)
        for step in steps
        if 0 < step <= longest // alignment
    )
    return sorted({rows for rows in found if any(rows) and rows != spec.member_rows})


def npu_lengths_for(tokens: int, standard_lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield sequences of standard lengths that cover a pass: one padded length, and pipes of several.

    The full pipe is the paper's NPU-pipe: the largest lengths that fit, then the remainder padded. A pipe
    with fewer graphs and more padding comes where it runs fewer tokens than pipes with still fewer graphs.
    """
    pipe = _descending(tokens, standard_lengths)
    covers: dict[tuple[int, ...], int] = {}
    for count in range(len(pipe) + 1):
        left = tokens - sum(pipe[:count])
        last = [length for length in standard_lengths if length >= left][:1] if left else []
        if last or not left:
            cover = (*pipe[:count], *last)
            covers[cover] = sum(cover)
    full = next(reversed(covers), None)
    fewest = math.inf
    for cover, total in covers.items():
        if total < fewest or cover == full:
            fewest = total
            yield cover


def sequence_lengths_for(
    tokens: int, standard_lengths: Sequence[int], shortest: int
) -> Iterator[tuple[int, ...]]:
    """Yield sequences of standard lengths for a sequence split; the GPU computes the last tokens.

    Each sum of lengths below ``tokens`` comes once, as the sequence with the largest lengths first.

    Args:
        tokens: Tokens of the pass.
        standard_lengths: Lengths of the NPU's graphs, ascending.
        shortest: Tokens of the shortest pass that uses the lengths: every graph must have a token there.
    """
    useful = [length for length in standard_lengths if length > 1 and length * MAX_GRAPHS >= tokens]
    for lengths in _sums(tokens - 1, useful):
        if lengths and sum(lengths[:-1]) < shortest:
            yield lengths


def candidates(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    *,
    splits: Splits | None = None,
    shortest: int | None = None,
) -> Iterator[Placement]:
    """Yield all legal placements of a group in a pass.

    Args:
        spec: The group or ffn.
        tokens: Tokens of the pass.
        limits: Limits of the NPU; None without an NPU.
        splits: Rows that the NPU may compute; default all aligned splits.
        shortest: Tokens of the shortest pass that must also be legal; default ``tokens``.
    """
    if spec.then is None:
        yield GPU_ONLY
    if limits is None:
        return
    whole, low = spec.member_rows, tokens if shortest is None else shortest
    held: Mapping[Rows, Sequence[int]]
    if isinstance(splits, Mapping):
        held = splits
    else:
        allowed = [*aligned_splits(spec, limits.row_alignment), whole] if splits is None else splits
        held = dict.fromkeys(allowed, limits.standard_lengths)
    covers: dict[tuple[tuple[int, tuple[str, ...]], ...], list[tuple[tuple[int, ...], str]]] = {}
    same_forms = None if spec.then is not None else limits.slice_forms(spec, whole)
    for rows, lengths in held.items():
        if not any(rows):
            continue
        forms = same_forms or limits.slice_forms(spec, rows)
        usable = tuple(length for length in lengths if forms.get(length))
        key = tuple((length, forms[length]) for length in usable)
        if key not in covers:
            found = [cover for cover in npu_lengths_for(tokens, usable) if sum(cover[:-1]) < low]
            covers[key] = [*_in_each_form(found, forms), *_integer_covers(tokens, usable, forms, low)]
        pairs = covers[key]
        if rows == whole and spec.then is None and spec.place not in limits.covering:
            leading = sequence_lengths_for(tokens, usable, low)
            pairs = [*pairs, *_in_each_form(leading, forms)]
        for cover, form in pairs:
            if spec.then is None:
                yield RowsPlacement(rows, cover, form)
            else:
                yield FfnPlacement.of(rows, cover, form)


def few_lengths_for(tokens: int, standard_lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield sequences that cover a pass with few standard lengths, for a choice of the lengths to build.

    They are one length throughout, padded at the end, or as often as it fits and then a shorter one; and
    those of :func:`npu_lengths_for`. A graph of one token serves passes of one token only.
    """
    useful = [length for length in standard_lengths if length > 1 or tokens == 1]
    found: dict[tuple[int, ...], None] = {}
    for length in useful:
        full, left = divmod(tokens, length)
        if full < MAX_GRAPHS:
            found[(length,) * (full + bool(left))] = None
        for shorter in useful:
            rest = -(-left // shorter)
            if full and left and shorter < length and 0 < rest * shorter < length and rest < MAX_GRAPHS:
                found[(length,) * full + (shorter,) * rest] = None
    found.update(dict.fromkeys(npu_lengths_for(tokens, useful)))
    yield from (cover for cover in found if cover)


def few_leading_lengths_for(tokens: int, standard_lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield sequences of one standard length for a sequence split, as often as it fits."""
    for length in standard_lengths:
        if 1 < length < tokens <= length * MAX_GRAPHS:
            yield (length,) * ((tokens - 1) // length)


def placements_of_built(
    spec: OpSpec, tokens: int, limits: NpuLimits, splits: Iterable[Rows]
) -> Iterator[Placement]:
    """Yield the placements of a group among which the lengths to build are chosen.

    Args:
        spec: The group or ffn.
        tokens: Tokens of the pass.
        limits: Limits of the NPU.
        splits: Rows that the NPU may compute, whole groups included.
    """
    if spec.then is None:
        yield GPU_ONLY
    for rows in splits:
        forms = limits.slice_forms(spec, rows)
        usable = [length for length in limits.standard_lengths if forms.get(length)]
        covers = list(few_lengths_for(tokens, usable))
        if rows == spec.member_rows and spec.then is None and spec.place not in limits.covering:
            covers += few_leading_lengths_for(tokens, usable)
        for cover, form in _in_each_form(covers, forms):
            if spec.then is None:
                yield RowsPlacement(rows, cover, form)
            else:
                yield FfnPlacement.of(rows, cover, form)


def _integer_covers(
    tokens: int, usable: Sequence[int], forms: Mapping[int, tuple[str, ...]], low: int
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield sequences of the lengths of integer forms that other forms do not need.

    Integer forms lack a length of 1: a decoded token is padded to their shortest graph.
    """
    for form in sorted(INTEGER_FORMS):
        lengths = [length for length in usable if form in forms[length]]
        if lengths and len(lengths) < len(usable):
            others = set(npu_lengths_for(tokens, usable))
            for cover in npu_lengths_for(tokens, lengths):
                if cover not in others and sum(cover[:-1]) < low:
                    yield cover, form


def _descending(tokens: int, standard_lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the pipe of the largest lengths above 1 that fit, without the remainder."""
    pipe: list[int] = []
    for length in reversed([length for length in standard_lengths if length > 1]):
        count, tokens = divmod(tokens, length)
        pipe += [length] * count
    return tuple(pipe)


def _sums(most: int, lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield each pipe of :func:`_descending` of at most ``most`` tokens once."""
    if not lengths:
        yield ()
        return
    largest, smaller = lengths[-1], lengths[:-1]
    for count in range(most // largest + 1):
        for rest in _sums(min(most - count * largest, largest - 1), smaller):
            yield (largest,) * count + rest


def _in_each_form(
    covers: Iterable[tuple[int, ...]], forms: Mapping[int, tuple[str, ...]]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield sequences of lengths with each form that is legal at all their lengths."""
    for cover in covers:
        others = set(cover[1:])
        for form in forms[cover[0]]:
            if all(form in forms[length] for length in others):
                yield cover, form
