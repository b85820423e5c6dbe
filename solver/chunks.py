"""The choice of the chunk length of long prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from heterollm.base import OptionError
from heterollm.kernels.ops import Group
from heterollm.solver.candidates import Splits
from heterollm.solver.costs import CachedCosts, Costs
from heterollm.solver.solve import Solver

__all__ = ["best_chunk"]

GAIN_FRACTION: Final = 0.1
"""A shorter chunk must be this much faster, as predictions of different lengths have different errors."""


def best_chunk(
    solver: Solver,
    prompts: Mapping[int, float],
    costs_at: Callable[[int], Costs],
    slices: Mapping[Group, Splits] | None = None,
) -> int:
    """Return the chunk length with the fastest predicted prompts.

    It tries the solver's chunk length and the standard lengths below it. A shorter chunk must be faster by
    :data:`GAIN_FRACTION`, in the mean of each prompt's time relative to that in the longest chunks.

    Args:
        solver: The solver, with the longest chunk length.
        prompts: Weights of prompts by length.
        costs_at: Returns costs of passes that begin at a position, on which attention depends.
        slices: Resident slices, as in :meth:`heterollm.solver.solve.Solver.length`.

    Raises:
        OptionError: A prompt has no tokens.
        PlanError: No processor can compute a group.
    """
    if any(tokens < 1 for tokens in prompts):
        raise OptionError(f"Prompts of {sorted(prompts)} tokens cannot be planned.", fix="Give at least 1.")
    offered = solver.limits.standard_lengths if solver.limits else ()

    begin = replace(solver, costs=CachedCosts(costs_at(0)))
    solved_us: dict[int, float] = {}

    def pass_us(tokens: int, first: int) -> float:
        if tokens not in solved_us:
            solved_us[tokens] = begin.length(tokens, slices).time_us
        # The position changes the glue operators and no choice.
        later = costs_at(first)
        more = (later.between_us(spec, tokens) - begin.costs.between_us(spec, tokens) for spec in layer)
        return solved_us[tokens] + solver.layers * sum(more)

    def prompt_us(prompt: int, chunk: int) -> float:
        count, left = divmod(prompt, chunk)
        # Attention is linear in the position, so full chunks count at their mean position.
        full_us = count * pass_us(chunk, (count - 1) * chunk // 2) if count else 0.0
        return full_us + (pass_us(left, count * chunk) if left else 0.0)

    layer = solver.layer
    weights = {prompt: weight / prompt_us(prompt, solver.chunk_length) for prompt, weight in prompts.items()}

    def total_us(chunk: int) -> float:
        return sum(weight * prompt_us(prompt, chunk) for prompt, weight in weights.items())

    best = solver.chunk_length
    best_us = (1.0 - GAIN_FRACTION) * sum(prompts.values())
    for chunk in sorted(length for length in offered if 1 < length < solver.chunk_length):
        chunk_us = total_us(chunk)
        if chunk_us < best_us:
            best, best_us = chunk, chunk_us
    return best
