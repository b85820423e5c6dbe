"""Compares the kernel styles of attention on a GPU, and keeps the faster one for every later run on it."""

from __future__ import annotations

import functools
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
    GpuGlue,
    GpuRuntime,
    HeadShape,
    KernelStyle,
    KvLayer,
    OpenClError,
    Scores,
    SharedArray,
    TunedAttention,
    TuningTable,
    suits_coalesced,
)
from heterollm.profiler.measure import Timer, measure_interleaved
from heterollm.profiler.tune.search import DUEL_REPEATS, MARGIN_FRACTION, is_faster

CONTEXT: Final = 1024
TOKENS: Final = (1, 128)
"""Tokens of the two classes, the last of the context."""

LOST: Final = "the process ended while it was tried"


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
                # A driver that takes the process down leaves this behind.
                _keep(runtime, TunedAttention(kind, "simt", failure=LOST))
                try:
                    known = _compared(_Case(runtime, layers, shape, kind, tokens, out_dtype), kind, timer)
                except BaseException:
                    # Not its fault: an interruption, or no memory.
                    runtime.tuning.change(functools.partial(_forget, kind))
                    raise
                _keep(runtime, known)
            found[kind] = known
    return tuple(found.values())


def _forget(kind: AttentionClass, table: TuningTable) -> None:
    table.attention.pop(kind, None)


def _keep(runtime: GpuRuntime, chosen: TunedAttention) -> None:
    runtime.tuning.change(lambda table: table.attention.update({chosen.shape: chosen}))


def _compared(case: _Case, kind: AttentionClass, timer: Timer) -> TunedAttention:
    """Return the faster style, if both give the same numbers."""
    calls: dict[str, Callable[[], object]] = {"simt": case.call("simt")}
    right = case.output(calls["simt"])
    try:
        calls["coalesced"] = case.call("coalesced")
        errors = linear_errors(case.output(calls["coalesced"]), right)
        if not errors.within("fp16" if kind.half else "fp32"):
            raise BuildError(f"it computes wrong numbers (NMSE {errors.nmse:.1e}).")
        times = measure_interleaved(calls, warmup=1, repeats=DUEL_REPEATS, timer=timer)
    except (BuildError, KernelError, OpenClError) as error:
        return TunedAttention(kind, "simt", failure=str(error).splitlines()[0][:300])
    faster = is_faster(times["coalesced"], times["simt"], MARGIN_FRACTION)
    style: KernelStyle = "coalesced" if faster else "simt"
    return TunedAttention(kind, style, times["simt"].median_us, times["coalesced"].median_us)


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

    def output(self, call: Callable[[], object]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return what a call leaves in the output."""
        call()
        self._out.acquire()
        found = self._out.array.astype(np.float64)
        self._out.release()
        return found
