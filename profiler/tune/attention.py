"""Compares the kernel styles of attention on a GPU, and keeps the faster one for every later run on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import KernelError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import (
    AttentionClass,
    BuildError,
    GlueKernels,
    GpuRuntime,
    HeadShape,
    KernelStyle,
    OpenClError,
    TunedAttention,
    suits_coalesced,
)
from heterollm.kernels.operators import AttentionCase, Data, run_launches
from heterollm.profiler.measure import Timer
from heterollm.profiler.tune.search import LOST, search

CONTEXT: Final = 1024
TOKENS: Final = (1, 128)
"""Tokens of the two classes, the last of the context."""

BUDGET_S: Final = 5.0
"""Seconds for a class, of which a pass takes a millisecond."""


def tune_attention(
    runtime: GpuRuntime,
    heads: Iterable[tuple[int, int, int]],
    *,
    activation_dtype: DTypeLike,
    kv_dtype: DTypeLike,
    timer: Timer = time.perf_counter_ns,
) -> tuple[TunedAttention, ...]:
    """Compare the styles for each class of attention, and put the results into the device's table.

    Nothing is compared on a CPU, whose style is another one. A style that failed once with the same driver
    and kernels is not tried again.

    Args:
        runtime: The device.
        heads: Query heads, key heads and elements of a head of each model.
        activation_dtype: Type of the output.
        kv_dtype: Type of the KV cache.
        timer: The clock.
    """
    found: dict[AttentionClass, TunedAttention] = {}
    layers = GlueKernels(runtime, activation_dtype, kv_dtype)
    for sizes in () if runtime.traits.is_cpu else heads:
        shape = HeadShape(*sizes, CONTEXT)
        for tokens in TOKENS:
            kind = AttentionClass.of(shape.head_dim, shape.group, kv_dtype, tokens)
            if kind in found or not suits_coalesced(kind):
                continue
            known = runtime.tuning.table.attention.get(kind)
            if known is None or not known.failure:
                known = _tuned(layers, shape, kind, tokens, timer)
            found[kind] = known
    return tuple(found.values())


def _tuned(
    kernels: GlueKernels, shape: HeadShape, kind: AttentionClass, tokens: int, timer: Timer
) -> TunedAttention:
    """Compare the styles and keep the result; a driver that takes the process down leaves a failure."""
    tuning, lost = kernels.runtime.tuning, TunedAttention(kind, "simt", failure=LOST)
    tuning.change(lambda table: table.attention.update({kind: lost}))
    try:
        chosen = _compared(kernels, shape, kind, tokens, timer)
    except BaseException:
        # Not its fault: an interruption, or no memory.
        tuning.change(lambda table: table.attention.pop(kind, None))
        raise
    tuning.change(lambda table: table.attention.update({kind: chosen}))
    return chosen


def _compared(
    kernels: GlueKernels, shape: HeadShape, kind: AttentionClass, tokens: int, timer: Timer
) -> TunedAttention:
    """Return the faster style, if both give the same numbers."""

    def made(style: KernelStyle) -> tuple[Data, Callable[[], None]]:
        data = Data(kernels, np.random.default_rng(0))
        launches = AttentionCase(tokens, CONTEXT - tokens, shape, style=style).launches(kernels, data)
        return data, partial(run_launches, kernels.runtime, launches)

    def output(style: KernelStyle) -> NDArray[np.float64]:
        data, run = made(style)
        run()
        return data.read("attended").astype(np.float64)

    right = output("simt")

    def trial(style: KernelStyle) -> Callable[[], object]:
        if style != "simt":
            errors = linear_errors(output(style), right)
            if not errors.within("fp16" if kind.half else "fp32"):
                raise BuildError(f"it computes wrong numbers (NMSE {errors.nmse:.1e}).")
        return made(style)[1]

    styles: tuple[KernelStyle, KernelStyle] = "simt", "coalesced"
    try:
        result = search(styles[0], styles[1:], trial, budget_s=BUDGET_S, timer=timer)
    except (BuildError, KernelError, OpenClError) as error:
        return TunedAttention(kind, "simt", failure=str(error).splitlines()[0][:300])
    failure = result.failures.get("coalesced", "").split("\n")[0][:300]
    own_us = 0.0 if result.best is None else result.best_us
    return TunedAttention(kind, result.winner, result.default_us, own_us, failure)
