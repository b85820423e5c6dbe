"""NPUMoE's rules for experts, each on top of the one before; the product has :mod:`heterollm.solver.experts`.

Capacities come from the mean loads of a calibration (section 4.1), groups from popularity (section 4.2). The
paper's base capacity is the tokens of a chunk over the number of experts. Here it is the mean load of an
expert, which counts a token once for each expert that it goes to.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from heterollm.base import PlanError
from heterollm.solver.experts.placements import ExpertGroup, ExpertsPlacement, Overflow
from heterollm.solver.experts.prices import ExpertPrices
from heterollm.solver.slice_sets import Ints

ExpertPolicy: TypeAlias = Literal["each", "tiers", "groups"]
"""All experts on the NPU, in a graph each at one capacity; each at that of its tier; in groups of a tier."""


def imbalance(loads: Ints) -> float:
    """Return the largest load of an expert over the mean one, of loads ``[chunks, experts]``; 1 if empty."""
    totals = loads.sum(axis=0)
    return float(totals.max() / totals.mean()) if totals.any() else 1.0


def capacity_tiers(loads: Ints, capacities: tuple[int, ...]) -> tuple[int, ...]:
    """Return at most three capacities, descending.

    They hold the busiest expert's mean load, that of all experts, and that one over the imbalance.

    Args:
        loads: ``[chunks, experts]``, tokens of each expert in calibrated chunks.
        capacities: Capacities of graphs, ascending.
    """
    mean, ratio = float(loads.mean()), imbalance(loads)
    tiers = {_holding(load, capacities) for load in (ratio * mean, mean, mean / ratio)}
    return tuple(sorted(tiers, reverse=True))


def experts_by_policy(
    loads: Ints, prices: ExpertPrices, policy: ExpertPolicy, overflow: Overflow = "gpu"
) -> ExpertsPlacement:
    """Return the placement of a layer's experts by one of the rules.

    Args:
        loads: ``[chunks, experts]``, tokens of each expert in calibrated chunks.
        prices: Times and sizes.
        policy: The rule. Its placement may exceed the NPU's address space.
        overflow: Fate of tokens beyond a capacity.

    Raises:
        PlanError: One expert exceeds the limit of a graph.
    """
    most = prices.most_experts(loads.shape[1])
    if not most:
        raise PlanError(
            f"An expert of {prices.expert_bytes} bytes exceeds a graph of {prices.most_weight_bytes}.",
            fix="Keep the experts on the GPU.",
        )
    tiers, means = capacity_tiers(loads, prices.capacities), loads.mean(axis=0)
    needs = means if overflow != "pad" else loads.max(axis=0)
    tiers = tuple(sorted({*tiers, _holding(needs.max(), prices.capacities)}, reverse=True))
    held: dict[int, list[int]] = {tier: [] for tier in tiers}
    for expert in np.argsort(-means, kind="stable"):
        wanted = needs[expert] if policy != "each" else needs.max()
        held[_holding(wanted, tiers[::-1])].append(int(expert))
    size = most if policy == "groups" else 1
    groups = [
        ExpertGroup(tuple(own[first : first + size]), capacity)
        for capacity, own in held.items()
        for first in range(0, len(own), size)
    ]
    return ExpertsPlacement(tuple(groups), overflow, prices.form)


def _holding(load: float, capacities: tuple[int, ...]) -> int:
    """Return the smallest of ascending capacities that holds a load, else the largest."""
    return next((own for own in capacities if own >= load), capacities[-1])
