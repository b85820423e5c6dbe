"""The choice of the chunk length of long prompts, and of the slices that the NPU holds for it.

The slices were chosen for the longest chunk. For a shorter one the search chooses again, without knowing long
prompts: it may use the memory of longer graphs better, or serve chunks worse. Whole plans with either slices
are compared. Slices of their own for every chunk length would take a search each; for Llama-3-8B on a
simulated SoC, within 0.5 to 4 GiB, no shorter chunk with slices of its own makes prompts as fast as the
longest chunk, since a pass may run in several short graphs anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from heterollm.base import OptionError
from heterollm.solver.candidates import Splits
from heterollm.solver.costs import CachedCosts, Costs
from heterollm.solver.flights.plan import shortened
from heterollm.solver.plan import Plan
from heterollm.solver.predict import predict_pass
from heterollm.solver.prompts import relative_time
from heterollm.solver.slices import Slices
from heterollm.solver.solve import Solver

GAIN_FRACTION: Final = 0.1
"""A shorter chunk must be this much faster, as predictions of different lengths have different errors."""


def plan_chunks(
    solver: Solver,
    plan: Plan,
    slices: Slices,
    prompts: Mapping[int, float],
    costs_at: Callable[[int], Costs],
    weights: Mapping[int, float] | None = None,
) -> tuple[Plan, Slices]:
    """Return the plan with the best chunk length and its slices: the given one, or one with shorter chunks.

    Args:
        solver: The solver, with the longest chunk length.
        plan: Its plan.
        slices: The resident slices of the plan.
        prompts: Weights of prompts by length.
        costs_at: Returns costs of passes that begin at a position, on which attention depends.
        weights: As for :meth:`heterollm.solver.solve.Solver.slices`.

    Raises:
        OptionError: A prompt has no tokens.
        PlanError: No processor can compute a group.
    """
    chunk = best_chunk(solver, prompts, costs_at, slices)
    if chunk == solver.chunk_length:
        return plan, slices
    own, own_slices = replace(solver, chunk_length=chunk).solve(
        device=plan.device, precision=plan.precision, weights=weights
    )

    def prompt_us(one: Plan, prompt: int) -> float:
        passes = (
            predict_pass(one, solver.specs, costs_at(first), "prefill", tokens, logits=False)
            for first, tokens in one.chunks(prompt)
        )
        return sum(math.inf if found is None else found.time_us for found in passes)

    whole_us = {prompt: prompt_us(plan, prompt) for prompt in prompts}

    def loss(found: tuple[Plan, Slices]) -> float:
        return relative_time(prompts, whole_us, lambda prompt: prompt_us(found[0], prompt))

    shorter = min(((own, own_slices), (shortened(plan, chunk), slices)), key=loss)
    return shorter if loss(shorter) < 1.0 - GAIN_FRACTION else (plan, slices)


def best_chunk(
    solver: Solver,
    prompts: Mapping[int, float],
    costs_at: Callable[[int], Costs],
    slices: Mapping[str, Splits] | None = None,
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
        more_us = sum(
            kind.count
            * sum(
                later.between_us(spec, tokens) - begin.costs.between_us(spec, tokens) for spec in kind.specs
            )
            for kind in solver.kinds
        )
        return solved_us[tokens] + more_us

    def prompt_us(prompt: int, chunk: int) -> float:
        count, left = divmod(prompt, chunk)
        # Attention is linear in the position, so full chunks count at their mean position.
        full_us = count * pass_us(chunk, (count - 1) * chunk // 2) if count else 0.0
        return full_us + (pass_us(left, count * chunk) if left else 0.0)

    whole_us = {prompt: prompt_us(prompt, solver.chunk_length) for prompt in prompts}
    shorter = sorted(length for length in offered if 1 < length < solver.chunk_length)
    losses = [relative_time(prompts, whole_us, partial(prompt_us, chunk=chunk)) for chunk in shorter]
    least = min(losses, default=1.0)
    return shorter[losses.index(least)] if least < 1.0 - GAIN_FRACTION else solver.chunk_length
