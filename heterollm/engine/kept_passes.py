"""Keeps compiled passes, and the sessions' memory that is bound to them."""

from __future__ import annotations

import bisect
import contextlib
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from heterollm.engine.compiler import Compiler
from heterollm.engine.kept_batches import KeptBatches
from heterollm.engine.observer import Observer, during
from heterollm.engine.passes import CompiledPass, compiling
from heterollm.engine.state import BatchRow, SessionState
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import KvMemory
from heterollm.kernels.ops import Join, Phase
from heterollm.solver import Plan

KEPT_PASSES: Final = 32
SMALLEST_BUCKET: Final = 256

PassLength: TypeAlias = "int | tuple[int, ...]"
"""Tokens of a pass, or of each of several chunks at once."""

PassKey: TypeAlias = tuple[Phase, PassLength, int]
"""Phase, tokens and context bucket of a pass."""


class KeptPasses:
    """Compiled passes, of which the latest are kept.

    Args:
        device: The device.
        compiler: Compiles missing passes.
        plan: The plan.
        context: Positions of every session.
        observer: Replaces the calls of steps.

    Attributes:
        key_borders: Numbers of keys between which passes of prefill are alike, ascending; none if keys do not
            matter.
        compiled: The passes through the layers, the latest last.
        prepared_s: Time that compiling passes has taken.
    """

    def __init__(
        self,
        device: Device,
        compiler: Compiler,
        plan: Plan,
        context: int,
        observer: Observer | None,
    ) -> None:
        self.compiled: OrderedDict[PassKey, CompiledPass] = OrderedDict()
        self.prepared_s = 0.0
        self._heads: dict[tuple[Phase, int, tuple[int, ...], Join, int, bool, bool], CompiledPass] = {}
        self._batches = KeptBatches(compiler, self._observable)
        self._device = device
        self._compiler = compiler
        self._context = context
        self._observer = observer
        borders = (record.borders(context) for record in plan.techniques)
        self.key_borders = tuple(sorted(set().union(*borders)))
        self._caches: weakref.WeakSet[SessionState] = weakref.WeakSet()
        self._no_cache: KvMemory | None = None

    def new_cache(self) -> SessionState:
        """Return the state of an empty session; the memory of dropped sessions is freed first."""
        live = {id(cache.memory) for cache in self._caches}
        for compiled in (*self.compiled.values(), *self._batches.parts()):
            if id(compiled.bound_cache) not in live:
                assert self._no_cache is not None  # a pass was compiled for a cache
                compiled.bind_cache(self._no_cache)
        cache = SessionState(self._device, self._compiler.kv_groups, self._compiler.recurrent)
        if self._no_cache is None:
            self._no_cache = cache.stand_in()
        self._caches.add(cache)
        return cache

    def find(self, phase: Phase, length: PassLength, position: int, cache: SessionState) -> CompiledPass:
        """Return a pass of a length, or of several chunks at once, bound to a session's memory."""
        with during(self._observer, "bind"):
            tokens = length if isinstance(length, int) else sum(length)
            bucket = self.bucket(phase, position + tokens)
            key = (phase, length, bucket)
            compiled = self.compiled.get(key)
            if compiled is None:
                with self._preparing(), compiling(phase, tokens):
                    if isinstance(length, int):
                        compiled = self._compiler.compile_pass(phase, length, bucket, cache.memory)
                    else:
                        compiled = self._compiler.compile_flight(length, position, bucket, cache.memory)
                self.compiled[key] = self._observable(compiled)
                if len(self.compiled) > KEPT_PASSES:
                    self.compiled.popitem(last=False)
            else:
                self.compiled.move_to_end(key)
            compiled.bind_cache(cache.memory)
        return compiled

    def find_batch(self, rows: Sequence[BatchRow]) -> CompiledPass:
        """Return a decode pass of several sessions, bound to their memory."""
        with during(self._observer, "bind"):
            buckets = tuple(self.bucket("decode", row.position + 1) for row in rows)
            memories = [row.state.memory for row in rows]
            compiled = self._batches.find(buckets, memories)
            if compiled is None:
                with self._preparing(), compiling("decode", len(buckets)):
                    compiled = self._batches.compile(buckets, memories)
        return compiled

    def head(self, compiled: CompiledPass, phase: Phase, rows: int, *, logits: bool = True) -> CompiledPass:
        """Return the head behind a pass, for some positions; without logits its norm alone."""
        assert compiled.output is not None
        output = compiled.output.segments
        key = (phase, rows, output.splits, output.join, compiled.lane, compiled.uses_npu, logits)
        head = self._heads.get(key)
        if head is None:
            with self._preparing(), compiling(phase, rows):
                compiler = self._compiler
                head = (compiler.compile_head if logits else compiler.compile_states)(phase, rows, compiled)
            self._heads[key] = self._observable(head)
        return head

    def clear(self) -> None:
        """Drop all passes."""
        self.compiled.clear()
        self._batches.clear()
        self._heads.clear()

    def bucket(self, phase: Phase, positions: int) -> int:
        """Return the positions that a pass is compiled for: at least these, and within the context.

        They are the next border of the keys of sparse attention, or else the next power of two from 256 on.
        """
        if phase == "prefill" and self.key_borders:
            return self.key_borders[bisect.bisect_left(self.key_borders, positions)]
        bucket = SMALLEST_BUCKET
        while bucket < positions:
            bucket *= 2
        return min(bucket, self._context)

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        with during(self._observer, "build"):
            yield
        self.prepared_s += time.perf_counter() - begin_s

    def _observable(self, compiled: CompiledPass) -> CompiledPass:
        """Replace the calls of the steps by those of the observer, if there is one."""
        if self._observer is not None:
            compiled.calls = tuple(map(self._observer.call_of, compiled.steps))
        return compiled
