"""Every way to place one group in one pass: whole, or cut along rows, along the sequence, or both.

The names are the paper's (HeteroLLM, section 4.2). A row cut gives the NPU the leading rows of each member at
a standard length, a hybrid cut does so at a padded one; a sequence cut gives it whole standard lengths from
the first token on, one or several, and the GPU the tokens that are left. A block is cut along its
intermediate width only, or is the NPU's as a whole: what the GPU computes alone is no block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from heterollm.kernels.ops import OpSpec
from heterollm.profiler.work import cut_rows
from heterollm.solver.blocks import cut_alignment, narrowed
from heterollm.solver.placements import GPU_ONLY, BlockPlacement, Placement, RowsPlacement

__all__ = [
    "Cuts",
    "NpuLimits",
    "Rows",
    "aligned_cuts",
    "candidates",
    "cut_stride",
    "cuts_near",
    "npu_lengths_for",
    "sequence_lengths_for",
]

Rows: TypeAlias = tuple[int, ...]
"""The NPU's rows of each member; empty where the GPU computes all."""

Cuts: TypeAlias = Iterable[Rows] | Mapping[Rows, Sequence[int]]
"""Rows that the NPU may use, whole groups included: at every standard length, or each at its own lengths."""

MAX_CUTS: Final = 24
"""Row cuts of a group that are tried first; of more positions, those beside what is chosen come later."""

MAX_PIECES: Final = 32
"""Graphs of less than this fraction of a pass are left out of sequence cuts, for the same reason."""


@dataclass(frozen=True, slots=True)
class NpuLimits:
    """What a device's NPU can be given.

    Args:
        standard_lengths: Lengths of its graphs, ascending.
        row_alignment: Multiple that row cuts lie on.
        forms: Legal forms of a group at a length, best first; none where the NPU cannot compute it. A block
            is given as the slice that it is asked for, whose width decides.
    """

    standard_lengths: tuple[int, ...]
    row_alignment: int
    forms: Callable[[OpSpec, int], tuple[str, ...]]

    def slice_forms(self, spec: OpSpec, rows: Rows) -> dict[int, tuple[str, ...]]:
        """Return the legal forms of some rows of each member of a group at every length."""
        part = spec if spec.then is None else narrowed(spec, rows[0])
        return {length: self.forms(part, length) for length in self.standard_lengths}

    def runs(self, spec: OpSpec) -> bool:
        """Whether the NPU can compute a group, or some cut of it, at any length."""
        cuts = [*aligned_cuts(spec, self.row_alignment), spec.member_rows]
        return any(any(self.slice_forms(spec, rows).values()) for rows in cuts)


def aligned_cuts(spec: OpSpec, alignment: int) -> list[Rows]:
    """Return the legal row cuts of a group in ascending order: the NPU's rows of each member.

    All members are cut at the same fraction, so that row ``i`` of the gate stays with row ``i`` of up. Of
    many positions at most :data:`MAX_CUTS` are returned, evenly spaced: see :func:`cuts_near`.
    """
    alignment, stride = cut_alignment(spec, alignment), cut_stride(spec, alignment)
    return _cuts_at(spec, alignment, range(stride, max(spec.member_rows) // alignment + 1, stride))


def cut_stride(spec: OpSpec, alignment: int) -> int:
    """Return how many of a group's positions lie from one cut of :func:`aligned_cuts` to the next."""
    steps = max(spec.member_rows) // cut_alignment(spec, alignment)
    return max(1, -(-steps // MAX_CUTS))


def cuts_near(spec: OpSpec, alignment: int, held: Iterable[Rows], stride: int) -> list[Rows]:
    """Return some cuts of a group with those so many positions to either side, in ascending order.

    Args:
        spec: The group.
        alignment: The NPU's multiple.
        held: The cuts. All and nothing, which are none, have cuts on one side as well.
        stride: How many positions.
    """
    alignment, longest = cut_alignment(spec, alignment), max(spec.member_rows)
    place = spec.member_rows.index(longest)
    steps = {0, longest // alignment, *(rows[place] // alignment for rows in held if rows)}
    return _cuts_at(spec, alignment, {step + side for step in steps for side in (-stride, 0, stride)})


def _cuts_at(spec: OpSpec, alignment: int, steps: Iterable[int]) -> list[Rows]:
    longest = max(spec.member_rows)
    found = (
        cut_rows(spec.member_rows, step * alignment / longest, alignment)
        for step in steps
        if 0 < step <= longest // alignment
    )
    return sorted({rows for rows in found if any(rows) and rows != spec.member_rows})


def npu_lengths_for(tokens: int, standard_lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to cover a pass with standard lengths: padding to one, and the pipe of several.

    The pipe is the paper's NPU-pipe: the largest lengths that fit, one after the other, the margin padded. A
    pipe that is broken off earlier, with more padding and fewer graphs, is tried where it runs fewer tokens
    than any with still fewer graphs.
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
    """Yield the standard lengths that may lead a pass whose last tokens are left to the GPU.

    Every sum of lengths below ``tokens`` is yielded once, by the fewest graphs that the largest lengths give.

    Args:
        tokens: Tokens of the pass.
        standard_lengths: Lengths of the NPU's graphs, ascending.
        shortest: Tokens of the shortest pass that the lengths are used for: no graph may be without a token.
    """
    useful = [length for length in standard_lengths if length > 1 and length * MAX_PIECES >= tokens]
    for lengths in _sums(tokens - 1, useful):
        if lengths and sum(lengths[:-1]) < shortest:
            yield lengths


def candidates(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    *,
    cuts: Cuts | None = None,
    shortest: int | None = None,
) -> Iterator[Placement]:
    """Yield every placement of a group in a pass, each legal.

    Args:
        spec: The group.
        tokens: Tokens of the pass.
        limits: The NPU; None where there is none.
        cuts: What the NPU may use; default every legal cut.
        shortest: Tokens of the shortest pass that each must be legal for as well; default ``tokens``.
    """
    if spec.then is None:
        yield GPU_ONLY
    if limits is None:
        return
    whole, low = spec.member_rows, tokens if shortest is None else shortest
    held: Mapping[Rows, Sequence[int]]
    if isinstance(cuts, Mapping):
        held = cuts
    else:
        allowed = [*aligned_cuts(spec, limits.row_alignment), whole] if cuts is None else cuts
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
            covers[key] = list(_in_each_form(found, forms))
        pairs = covers[key]
        if rows == whole and spec.then is None:
            leading = sequence_lengths_for(tokens, usable, low)
            pairs = [*pairs, *_in_each_form(leading, forms)]
        for cover, form in pairs:
            if spec.then is None:
                yield RowsPlacement(rows, cover, form)
            else:
                yield BlockPlacement(rows[0], cover, form)


def _descending(tokens: int, standard_lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the largest lengths that fit one after the other; lengths of one token are left to others."""
    pipe: list[int] = []
    for length in reversed([length for length in standard_lengths if length > 1]):
        count, tokens = divmod(tokens, length)
        pipe += [length] * count
    return tuple(pipe)


def _sums(most: int, lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every :func:`_descending` of at most ``most`` tokens, each once."""
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
    """Yield lengths with every form that is legal at each of them."""
    for cover in covers:
        others = set(cover[1:])
        for form in forms[cover[0]]:
            if all(form in forms[length] for length in others):
                yield cover, form
