"""Compares the kernel styles of attention on a GPU, and keeps the faster one for every later run on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from heterollm.base import KernelError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import (
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    AttentionClass,
    BuildError,
    DeviceTuning,
    GpuGlue,
    GpuRuntime,
    HeadShape,
    KernelStyle,
    KvLayer,
    OpenClError,
    Scores,
    SharedArray,
    TunedAttention,
    suits_coalesced,
)
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
    layers = GpuGlue(runtime, activation_dtype, kv_dtype)
    out_dtype = np.dtype(activation_dtype)
    for sizes in () if runtime.traits.is_cpu else heads:
        shape = HeadShape(*sizes, CONTEXT)
        for tokens in TOKENS:
            kind = AttentionClass.of(shape.head_dim, shape.group, kv_dtype, tokens)
            if kind in found or not suits_coalesced(kind):
                continue
            known = runtime.tuning.table.attention.get(kind)
            if known is None or not known.failure:
                case = _Case(runtime, layers, shape, kind, tokens, out_dtype)
                known = _tuned(runtime.tuning, case, kind, timer)
            found[kind] = known
    return tuple(found.values())


def _tuned(tuning: DeviceTuning, case: _Case, kind: AttentionClass, timer: Timer) -> TunedAttention:
    """Compare the styles and keep the result; a driver that takes the process down leaves a failure."""
    lost = TunedAttention(kind, "simt", failure=LOST)
    tuning.change(lambda table: table.attention.update({kind: lost}))
    try:
        chosen = _compared(case, kind, timer)
    except BaseException:
        # Not its fault: an interruption, or no memory.
        tuning.change(lambda table: table.attention.pop(kind, None))
        raise
    tuning.change(lambda table: table.attention.update({kind: chosen}))
    return chosen


def _compared(case: _Case, kind: AttentionClass, timer: Timer) -> TunedAttention:
    """Return the faster style, if both give the same numbers."""
    right = case.output("simt")

    def trial(style: KernelStyle) -> Callable[[], object]:
        if style != "simt":
            errors = linear_errors(case.output(style), right)
            if not errors.within("fp16" if kind.half else "fp32"):
                raise BuildError(f"it computes wrong numbers (NMSE {errors.nmse:.1e}).")
        return case.call(style)

    styles: tuple[KernelStyle, KernelStyle] = "simt", "coalesced"
    try:
        result = search(styles[0], styles[1:], trial, budget_s=BUDGET_S, timer=timer)
    except (BuildError, KernelError, OpenClError) as error:
        return TunedAttention(kind, "simt", failure=str(error).splitlines()[0][:300])
    failure = result.failures.get("coalesced", "").split("\n")[0][:300]
    own_us = 0.0 if result.best is None else result.best_us
    return TunedAttention(kind, result.winner, result.default_us, own_us, failure)


class _Case:
    """The memory of one pass's attention over random keys and values."""

    def __init__(
        self,
        runtime: GpuRuntime,
        layers: GpuGlue,
        shape: HeadShape,
        kind: AttentionClass,
        tokens: int,
        out_dtype: np.dtype[Any],
    ) -> None:
        self._runtime, self._layers, self._shape, self._tokens = runtime, layers, shape, tokens
        kv_dtype = np.float16 if kind.half else np.float32
        *_, end = shape.layer_offsets(0, kv_dtype)
        self._cache, self._step = self._filled((end,), kv_dtype), runtime.shared((STEP_WORDS,), np.int32)
        self._q = self._filled((tokens, shape.query_columns), np.float32)
        self._out = runtime.shared((tokens, shape.query_columns), out_dtype)
        self._step.acquire()
        self._step.array[STEP_POSITION], self._step.array[STEP_LENGTH] = CONTEXT - tokens, tokens
        self._step.release()

    def _filled(self, sizes: tuple[int, ...], dtype: DTypeLike) -> SharedArray:
        memory = self._runtime.shared(sizes, dtype)
        memory.acquire()
        memory.array[...] = np.random.default_rng(0).standard_normal(sizes)
        memory.release()
        return memory

    def call(self, style: KernelStyle) -> Callable[[], object]:
        """Return the call that runs a style's launches and waits."""
        sizes: dict[str, Any] = {"shape": self._shape, "tokens": self._tokens, "bucket": CONTEXT}
        launches = self._layers.attention(
            self._q,
            KvLayer(self._cache, 0),
            self._out,
            self._step,
            scores=Scores(self._shape.head_dim**-0.5),
            style=style,
            **sizes,
        )

        def run() -> None:
            for launch in launches:
                launch()
            self._runtime.finish()

        return run

    def output(self, style: KernelStyle) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the output of a style."""
        self.call(style)()
        self._out.acquire()
        found = self._out.array.astype(np.float64)
        self._out.release()
        return found
