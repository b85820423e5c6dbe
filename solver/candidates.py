"""Every way to place one group in one pass: whole, or cut along rows, along the sequence, or both.

The names are the paper's (HeteroLLM, section 4.2). A row cut gives the NPU the leading rows of each member at
a standard length, a hybrid cut does so at a padded one; a sequence cut gives it whole standard lengths from
the first token on, one or several, and the GPU the tokens that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from heterollm.kernels.ops import OpSpec
from heterollm.profiler.workload import cut_rows
from heterollm.solver.plan import GPU_ONLY, Placement

__all__ = ["NpuLimits", "aligned_cuts", "candidates", "npu_lengths_for"]

MAX_CUTS = 24
"""Row cuts of a group that are tried: more positions than this differ by less than the profile's error."""


@dataclass(frozen=True, slots=True)
class NpuLimits:
    """What a device's NPU can be given.

    Args:
        standard_lengths: Lengths of its graphs, ascending.
        row_alignment: Multiple that row cuts lie on.
        forms: Legal forms of a group at a length, best first; none where the NPU cannot compute it.
    """

    standard_lengths: tuple[int, ...]
    row_alignment: int
    forms: Callable[[OpSpec, int], tuple[str, ...]]


def aligned_cuts(spec: OpSpec, alignment: int) -> list[tuple[int, ...]]:
    """Return the legal row cuts of a group in ascending order: the NPU's rows of each member.

    All members are cut at the same fraction, so that row ``i`` of the gate stays with row ``i`` of up.
    """
    longest = max(spec.member_rows)
    steps = longest // alignment
    taken = range(1, steps + 1)
    if steps > MAX_CUTS:
        taken = range(steps // MAX_CUTS, steps + 1, max(1, steps // MAX_CUTS))
    found = (cut_rows(spec.member_rows, step * alignment / longest, alignment) for step in taken)
    return sorted({rows for rows in found if any(rows) and rows != spec.member_rows})


def npu_lengths_for(tokens: int, standard_lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to cover a pass with standard lengths: padding to one, and the pipe of several.

    The pipe is the paper's NPU-pipe: the largest lengths that fit, one after the other, the margin padded.
    """
    padded = next((length for length in standard_lengths if length >= tokens), None)
    if padded is not None:
        yield (padded,)
    pipe = _descending(tokens, standard_lengths)
    left = tokens - sum(pipe)
    if left:
        pipe = (*pipe, next(length for length in standard_lengths if length >= left))
    if pipe != (padded,):
        yield pipe


def candidates(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    *,
    cuts: Iterable[tuple[int, ...]] | None = None,
) -> Iterator[Placement]:
    """Yield every placement of a group in a pass, each legal.

    Args:
        spec: The group.
        tokens: Tokens of the pass.
        limits: The NPU; None where there is none.
        cuts: The NPU's rows that may be used, whole groups included; default every legal cut.
    """
    yield GPU_ONLY
    if limits is None:
        return
    whole = spec.member_rows
    allowed = [*aligned_cuts(spec, limits.row_alignment), whole] if cuts is None else list(cuts)
    covers = list(npu_lengths_for(tokens, limits.standard_lengths))
    for rows in allowed:
        for lengths in covers:
            yield from _in_each_form(spec, rows, lengths, limits)
    if whole in allowed:
        # Leading parts of the pipe; what is left goes to the GPU.
        pipe = _descending(tokens, limits.standard_lengths)
        for count in range(1, len(pipe) + 1):
            if sum(pipe[:count]) < tokens:
                yield from _in_each_form(spec, whole, pipe[:count], limits)


def _descending(tokens: int, standard_lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the largest lengths that fit one after the other; lengths of one token are left to others."""
    pipe = []
    for length in reversed([length for length in standard_lengths if length > 1]):
        count, tokens = divmod(tokens, length)
        pipe += [length] * count
    return tuple(pipe)


def _in_each_form(
    spec: OpSpec, rows: tuple[int, ...], lengths: tuple[int, ...], limits: NpuLimits
) -> Iterator[Placement]:
    offered = [limits.forms(spec, length) for length in dict.fromkeys(lengths)]
    for form in offered[0]:
        if all(form in forms for forms in offered):
            yield Placement(npu_rows=rows, npu_lengths=lengths, form=form)
