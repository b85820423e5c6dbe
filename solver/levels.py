"""Plan levels, and the plans of the levels that need no profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Literal, TypeAlias, get_args

from heterollm.base import OptionError
from heterollm.kernels.npu import TILE_OF_INTEGERS, GraphForm
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.solver.candidates import npu_lengths_for
from heterollm.solver.placements import GPU_ONLY, RowsPlacement
from heterollm.solver.plan import Plan, model_shape
from heterollm.solver.plan_records import PlanEntry

PlanLevel = Literal["gpu", "npu", "layer"]
LEVELS: Final[tuple[PlanLevel, ...]] = get_args(PlanLevel)

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

LengthPolicy: TypeAlias = Literal["padding", "pipe", "auto"]
"""Policy for whole groups on the NPU at lengths without a graph: ``padding`` to the next standard length;
``pipe``, the paper's NPU-pipe of consecutive standard lengths with the least padding; ``auto``, the fastest
prediction for each group."""

LENGTH_POLICIES: Final[tuple[LengthPolicy, ...]] = get_args(LengthPolicy)

LengthCosts: TypeAlias = Callable[[OpSpec, tuple[int, ...]], float]
"""Predicted time of a whole group on the NPU in consecutive graphs of some lengths."""


def level_plan(
    level: PlanLevel,
    specs: Sequence[OpSpec],
    *,
    device: str,
    precision: str,
    standard_lengths: Sequence[int],
    chunk_length: int,
    length_policy: LengthPolicy = "padding",
    length_costs: LengthCosts | None = None,
) -> Plan:
    """Return the plan of one level.

    ``gpu`` places everything on the GPU; ``npu`` every linear, the head included, on the NPU in both
    phases; ``layer`` is HeteroLLM's layer level: the linears of prefill on the NPU, decode and the head on
    the GPU (section 4 of the paper, "layer-level heterogeneous execution"). Weights with one scale for a
    tensor are computed in the form ``static_int8``.

    Args:
        level: The level.
        specs: Every group of the model.
        device: Name of the device.
        precision: Precision of the linears.
        standard_lengths: Lengths for which NPU graphs exist, ascending; empty without an NPU.
        chunk_length: Longest pass.
        length_policy: Policy for lengths without an NPU graph.
        length_costs: Predicted times for the policy ``auto``.

    Raises:
        OptionError: The level needs an NPU and there is none, or the policy needs costs.
    """
    if level != "gpu" and not standard_lengths:
        raise OptionError(
            f"Plan level {level!r} needs an NPU, and device {device!r} was opened without one.",
            fix="Use plan level 'gpu', or give the NPU at least one thread.",
        )
    if length_policy == "auto" and length_costs is None:
        raise OptionError(
            "Length policy 'auto' chooses by predicted times, and there are none.",
            fix="Profile the device, or choose padding or pipe.",
        )
    entries: list[PlanEntry] = []
    for spec, layers, kind in _distinct(specs):
        entry = partial(PlanEntry, layers=layers, group=spec.group, kind=kind)
        for phase in PHASES:
            on_npu = level == "npu" or (level == "layer" and phase == "prefill" and spec.group != "head")
            if not on_npu:
                entries.append(entry(phase, (1, chunk_length), placement=GPU_ONLY))
                continue
            cost = partial(length_costs, spec) if length_policy == "auto" and length_costs else None
            form: GraphForm | None = None
            usable = standard_lengths
            if spec.weight.scales == "tensor":
                form = "static_int8"
                usable = [one for one in standard_lengths if one % TILE_OF_INTEGERS[form] == 0]
            for lengths, npu_lengths in _covered(usable, chunk_length, length_policy, cost):
                placement = RowsPlacement(spec.member_rows, npu_lengths, form)
                entries.append(entry(phase, lengths, placement=placement))
    return Plan(level, device, precision, model_shape(specs), chunk_length, tuple(entries))


def _distinct(specs: Sequence[OpSpec]) -> Iterator[tuple[OpSpec, tuple[int, int], str]]:
    """Yield one spec of each group with the range of layers that have it, and the kind of these layers.

    A group with as many rows in all layers is one; else that of each kind is one.
    """
    for group in dict.fromkeys(spec.group for spec in specs):
        own = [spec for spec in specs if spec.group == group]
        alike = len({spec.member_rows for spec in own}) == 1
        for kind in ("",) if alike else dict.fromkeys(spec.kind for spec in own):
            members = [spec for spec in own if kind in ("", spec.kind)]
            layers = [spec.layer for spec in members]
            yield members[0], (min(layers), max(layers)), kind


def _covered(
    standard_lengths: Sequence[int],
    chunk_length: int,
    policy: LengthPolicy,
    cost: Callable[[tuple[int, ...]], float] | None,
) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """Yield ranges of lengths with the standard lengths that each runs in."""
    first, held = 1, _cover(1, standard_lengths, policy, cost)
    for tokens in range(2, chunk_length + 1):
        found = _cover(tokens, standard_lengths, policy, cost)
        if found != held:
            yield (first, tokens - 1), held
            first, held = tokens, found
    yield (first, chunk_length), held


def _cover(
    tokens: int,
    standard_lengths: Sequence[int],
    policy: LengthPolicy,
    cost: Callable[[tuple[int, ...]], float] | None,
) -> tuple[int, ...]:
    """Return the standard lengths of a pass, the last one padded."""
    if policy == "padding":
        largest = standard_lengths[-1]
        # A pass longer than the largest graph runs it several times.
        count = -(-tokens // largest)
        return (largest,) * count if count > 1 else (_next_length(tokens, standard_lengths),)
    covers = list(npu_lengths_for(tokens, standard_lengths))
    if cost is not None:
        return min(covers, key=lambda cover: (cost(cover), len(cover)))
    return min(covers, key=lambda cover: (sum(cover), len(cover)))


def _next_length(tokens: int, standard_lengths: Sequence[int]) -> int:
    return next(length for length in standard_lengths if length >= tokens)
