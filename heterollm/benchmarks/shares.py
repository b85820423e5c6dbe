"""Work of a plan in a test: the GPU's share, padded tokens, splits, and the predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.work import passes_of
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.solver import Placement, Plan

if TYPE_CHECKING:
    from heterollm.planning import ProfiledModel
    from heterollm.profiler.records import Processor


@dataclass(frozen=True, slots=True)
class Shares:
    """Work of a plan in one sample of a test.

    Args:
        gpu_share: Fraction of the linear layers' arithmetic on the GPU, without padding.
        padded_tokens: Padded rows of the NPU's graphs, in the group with most of them.
        processors: The processors that compute linear layers at the same time: both only with a split.
        split_groups: Groups that are split.
    """

    gpu_share: float
    padded_tokens: int
    processors: tuple[Processor, ...]
    split_groups: tuple[str, ...]


def shares_of(plan: Plan, specs: Sequence[OpSpec], case: Case, *, chunk: int) -> Shares:
    """Return the work of a plan in a test.

    Args:
        plan: The plan.
        specs: All groups of the model.
        case: The test.
        chunk: Longest pass.
    """
    total = on_gpu = 0.0
    padded = 0
    split: dict[str, None] = {}
    for (phase, tokens, logits), times in _counted(case, chunk).items():
        most = 0
        for spec, rows, placement in _placements(plan, specs, phase, tokens, logits):
            flops = spec.flops(rows)
            covered = min(rows, sum(placement.npu_lengths)) / rows
            npu = covered * sum(placement.npu_rows) / spec.rows
            total += times * flops
            on_gpu += times * flops * (1.0 - npu)
            if placement.npu_lengths:
                most = max(most, sum(placement.npu_lengths) - rows)
            if 0.0 < npu < 1.0:
                split[spec.group] = None
        padded += times * most
    share = on_gpu / total
    processors: tuple[Processor, ...] = ("gpu", "npu") if split else ("gpu",) if share > 0.5 else ("npu",)
    return Shares(share, padded, processors, tuple(split))


def predicted_us(model: ProfiledModel, plan: Plan, case: Case) -> float | None:
    """Return the time that the profile predicts for a sample; None if it lacks an operator.

    Attention depends on the position: decoded tokens count at their mean position.

    Args:
        model: The model on its profile.
        plan: The plan.
        case: The test.
    """
    total = 0.0
    if case.n_prompt:
        prompt = model.prompt(plan, case.n_prompt, position=case.n_depth)
        if prompt is None:
            return None
        total += prompt.time_us
    if case.n_gen:
        first = case.n_depth + case.n_prompt
        token = model.predict(plan, "decode", 1, position=first + (case.n_gen - 1) // 2)
        if token is None:
            return None
        total += case.n_gen * token.time_us
    return total


def _counted(case: Case, chunk: int) -> dict[tuple[Phase, int, bool], int]:
    """Return the kinds of passes of a test and the number of each."""
    counts: dict[tuple[Phase, int, bool], int] = {}
    for index, (tokens, _, logits) in enumerate(passes_of(case, chunk)):
        phase: Phase = "prefill" if index < -(-case.n_prompt // chunk) else "decode"
        key = phase, tokens, logits
        counts[key] = counts.get(key, 0) + 1
    return counts


def _placements(
    plan: Plan, specs: Sequence[OpSpec], phase: Phase, tokens: int, logits: bool
) -> Iterator[tuple[OpSpec, int, Placement]]:
    """Yield every operator of a pass with its tokens and its placement."""
    own = [spec for spec in specs if logits or spec.group != "head"]
    for spec, placement in plan.operators(phase, tokens, own):
        yield spec, 1 if spec.group == "head" else tokens, placement
