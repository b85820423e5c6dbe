"""Plan levels that need no profile: one rule for every operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, get_args

from heterollm.errors import OptionError
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.solver.plan import GPU_ONLY, Placement, Plan, PlanEntry, model_shape

__all__ = ["LEVELS", "PlanLevel", "level_plan"]

PlanLevel = Literal["gpu", "npu", "layer"]
LEVELS: Final[tuple[PlanLevel, ...]] = get_args(PlanLevel)
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


def level_plan(
    level: PlanLevel,
    specs: Sequence[OpSpec],
    *,
    device: str,
    precision: str,
    standard_lengths: Sequence[int],
    chunk_length: int,
) -> Plan:
    """Return the plan of one level.

    ``gpu`` places everything on the GPU; ``npu`` every linear, the head included, on the NPU in both
    phases; ``layer`` is HeteroLLM's layer level: the linears of prefill on the NPU, decode and the head on
    the GPU (section 4 of the paper, "layer-level heterogeneous execution").

    Args:
        level: Which rule.
        specs: Every group of the model.
        device: Name of the device.
        precision: Precision of the linears.
        standard_lengths: Lengths for which NPU graphs exist, ascending; empty without an NPU.
        chunk_length: Longest pass.

    Raises:
        OptionError: The level needs an NPU and there is none.
    """
    if level != "gpu" and not standard_lengths:
        raise OptionError(
            f"Plan level {level!r} needs an NPU part, and device {device!r} was opened without one.",
            fix="Use plan level 'gpu', or give the NPU part at least one thread.",
        )
    entries: list[PlanEntry] = []
    for spec, layers in _distinct(specs):
        for phase in PHASES:
            on_npu = level == "npu" or (level == "layer" and phase == "prefill" and spec.group != "head")
            if not on_npu:
                entries.append(PlanEntry(phase, (1, chunk_length), layers, spec.group, GPU_ONLY))
                continue
            for lengths, npu_lengths in _padded(standard_lengths, chunk_length):
                placement = Placement(npu_rows=spec.member_rows, npu_lengths=npu_lengths)
                entries.append(PlanEntry(phase, lengths, layers, spec.group, placement))
    return Plan(level, device, precision, model_shape(specs), chunk_length, tuple(entries))


def _distinct(specs: Sequence[OpSpec]) -> Iterator[tuple[OpSpec, tuple[int, int]]]:
    """Yield one spec of each group with the range of layers that have it."""
    for group in dict.fromkeys(spec.group for spec in specs):
        members = [spec for spec in specs if spec.group == group]
        layers = [spec.layer for spec in members]
        yield members[0], (min(layers), max(layers))


def _padded(
    standard_lengths: Sequence[int], chunk_length: int
) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """Yield ranges of lengths with the one standard length that each is padded to."""
    first = 1
    for length in standard_lengths:
        last = min(length, chunk_length)
        if first <= last:
            yield (first, last), (length,)
        first = length + 1
    largest = standard_lengths[-1]
    if first <= chunk_length:
        # A pass longer than the largest graph runs it several times (NPU-pipe).
        for count in range(2, -(-chunk_length // largest) + 1):
            yield ((count - 1) * largest + 1, min(count * largest, chunk_length)), (largest,) * count
