"""How long the chunks are that long prompts run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from heterollm.base import OptionError
from heterollm.kernels.ops import Group
from heterollm.solver.candidates import Cuts
from heterollm.solver.costs import Costs, RememberedCosts
from heterollm.solver.solve import Solver

__all__ = ["best_chunk"]

GAIN_FRACTION: Final = 0.1
"""A shorter chunk must make prompts this much faster: predictions of different lengths err differently."""


def best_chunk(
    solver: Solver,
    prompts: Mapping[int, float],
    costs_at: Callable[[int], Costs],
    slices: Mapping[Group, Cuts] | None = None,
) -> int:
    """Return the chunk length that long prompts are predicted to run fastest in.

    The solver's chunk length and the standard lengths below it are tried. A shorter one must make the prompts
    faster by :data:`GAIN_FRACTION`, each counted by what it takes in the longest chunks, so that long ones do
    not drown short ones.

    Args:
        solver: Knows the longest chunk.
        prompts: How often prompts of each length come.
        costs_at: Returns costs of passes that begin at a position, which attention depends on.
        slices: What the NPU holds, as of :meth:`heterollm.solver.solve.Solver.length`.

    Raises:
        OptionError: There are no tokens in a prompt.
        PlanError: A group can be computed by nobody.
    """
    if any(tokens < 1 for tokens in prompts):
        raise OptionError(f"Prompts of {sorted(prompts)} tokens cannot be planned.", fix="Give at least 1.")
    offered = solver.limits.standard_lengths if solver.limits else ()

    begin = replace(solver, costs=RememberedCosts(costs_at(0)))
    solved_us: dict[int, float] = {}

    def pass_us(tokens: int, first: int) -> float:
        if tokens not in solved_us:
            solved_us[tokens] = begin.length(tokens, slices).time_us
        # Where a pass begins changes what lies between the groups, and no choice.
        later = costs_at(first)
        more = (later.between_us(spec, tokens) - begin.costs.between_us(spec, tokens) for spec in layer)
        return solved_us[tokens] + solver.layers * sum(more)

    def prompt_us(prompt: int, chunk: int) -> float:
        count, left = divmod(prompt, chunk)
        # Attention is linear in the position, so full chunks are priced at their mean one.
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
