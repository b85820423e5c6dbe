"""Bytes and operations of a test, and the rates of a measured time with the device's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from heterollm.benchmarks.cases import Case
from heterollm.kernels.gpu import position_bytes
from heterollm.model import AttentionBlock, LatentAttentionBlock, RecurrentSpec, expert_specs
from heterollm.profiler.records import BandwidthKey, LinearKey, Processor

if TYPE_CHECKING:
    from heterollm.kernels.ops import OpSpec
    from heterollm.model import ModelConfig
    from heterollm.profiler.records import Profile

Rates: TypeAlias = dict[str, float | str]
"""Rates of a time, and its bound, by the names of an account's fields."""

Bound: TypeAlias = Literal["memory", "compute", "overhead"]

BOUND_FRACTION: Final = 0.5
"""A test below this fraction of both ceilings is bound by waits and launches."""

MANY_TOKENS: Final = 64
"""Least tokens at which a linear layer shows a processor's rate of arithmetic."""


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and operations of one sample of a test, equal for all engines.

    Args:
        read_bytes: Weights and the session's state, once for each pass.
        flops: Operations of linear layers and attention, two for a multiply-add, without padding.
    """

    read_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Highest rates of a configuration's processors in the device's profile.

    Args:
        gbps: Rate of reading memory, 10⁹ bytes a second.
        gflops: Rate of the fastest linear layer, 10⁹ operations a second.
    """

    gbps: float
    gflops: float


def passes_of(case: Case, chunk: int) -> list[tuple[int, int, bool]]:
    """Return the passes of a test: tokens, position of the first, and whether the pass computes logits."""
    firsts = range(0, case.n_prompt, chunk)
    found = [
        (min(chunk, case.n_prompt - first), case.n_depth + first, first + chunk >= case.n_prompt)
        for first in firsts
    ]
    begin = case.n_depth + case.n_prompt
    return found + [(1, begin + index, True) for index in range(case.n_gen)]


def work_of(
    config: ModelConfig,
    specs: Sequence[OpSpec],
    case: Case,
    *,
    chunk: int,
    cache_dtype: np.dtype[Any],
    weight_itemsize: float | None = None,
) -> Work:
    """Return the bytes that a sample reads and its operations.

    Args:
        config: The model.
        specs: Its groups; the experts of a mixture follow from them.
        case: The test.
        chunk: Longest pass of the engine.
        cache_dtype: Type of the KV cache.
        weight_itemsize: Bytes of a weight if the engine has another format than the specs.
    """
    layers = [*(spec for spec in specs if spec.group != "head"), *expert_specs(config, specs)]
    head = next(spec for spec in specs if spec.group == "head")

    def size(spec: OpSpec, tokens: int) -> float:
        if weight_itemsize is None:
            return spec.read_bytes(tokens)
        share = 1.0 if spec.experts is None else spec.experts.touched(tokens) / spec.experts.chosen
        return spec.flops(1) / 2 * share * weight_itemsize

    head_bytes = size(head, 1)
    attention = config.blocks(AttentionBlock).values()
    cached = sum(
        (1 if isinstance(own, LatentAttentionBlock) else 2)
        * own.kv_heads
        * position_bytes(own.head_dim, cache_dtype)
        for own in attention
    )
    states = (spec for _, spec in config.states if isinstance(spec, RecurrentSpec))
    recurrent = sum(spec.bytes(1, cache_dtype) for spec in states)
    read_bytes = flops = 0.0
    for tokens, position, logits in passes_of(case, chunk):
        layer_bytes = sum(size(spec, tokens) for spec in layers)
        read_bytes += layer_bytes + (head_bytes if logits else 0.0)
        read_bytes += (position + tokens) * cached + recurrent
        flops += sum(spec.flops(tokens) for spec in layers) + (head.flops(1) if logits else 0.0)
        seen = tokens * position + tokens * (tokens + 1) / 2
        # Scores and the sum of values: two multiply-adds for each head, position and element.
        flops += sum(4.0 * own.heads * own.head_dim * seen for own in attention)
    return Work(read_bytes, flops)


def ceilings_of(
    profile: Profile, processors: Sequence[Processor], *, integer_inputs: bool
) -> Ceilings | None:
    """Return the highest total rates of processors in a profile; None if it lacks one.

    Args:
        profile: The profile.
        processors: The processors that compute at the same time.
        integer_inputs: Whether inputs of linear layers are rounded to int8.
    """
    together = len(processors) > 1
    gbps = {
        key.processor: record.values.get("gbps", 0.0)
        for key, record in profile.of_kind(BandwidthKey)
        if key.together == together
    }
    gflops: dict[str, float] = {}
    for key, record in profile.of_kind(LinearKey):
        point = key.point
        if point.tokens >= MANY_TOKENS and point.integer_inputs == integer_inputs:
            rate = point.flops / record.median_us / 1e3
            gflops[key.processor] = max(gflops.get(key.processor, 0.0), rate)
    if not all(gbps.get(name) and gflops.get(name) for name in processors):
        return None
    return Ceilings(sum(gbps[name] for name in processors), sum(gflops[name] for name in processors))


def achieved(work: Work, time_us: float, ceilings: Ceilings | None) -> Rates:
    """Return the rates of a measured time, and its bound: fields of a row."""
    gbps, gflops = work.read_bytes / time_us / 1e3, work.flops / time_us / 1e3
    if ceilings is None:
        return {"achieved_gbps": gbps, "achieved_gflops": gflops}
    of_memory, of_compute = gbps / ceilings.gbps, gflops / ceilings.gflops
    bound: Bound = "memory" if of_memory >= of_compute else "compute"
    if max(of_memory, of_compute) < BOUND_FRACTION:
        bound = "overhead"
    return {
        "achieved_gbps": gbps,
        "achieved_gflops": gflops,
        "ceiling_gbps": ceilings.gbps,
        "ceiling_gflops": ceilings.gflops,
        "gbps_fraction": of_memory,
        "gflops_fraction": of_compute,
        "bound": bound,
    }
