"""Keeps decode passes of several sessions, and the sessions' memory that is bound to them.

The linears and networks of such a pass compute a row of each session, as those of several tokens of one
session. Kernels that read or write a session's state are launched for each row, as in a pass of one token. So
the pass consists of the steps that all rows share, which depend on their number alone, and of each row's own,
which depend on its place and on the bucket of its context. Both are compiled once and combined for each
combination of buckets.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from heterollm.engine.builder import Gap
from heterollm.engine.compiler import Compiler
from heterollm.engine.passes import CompiledPass, SharedSteps
from heterollm.engine.slots import SHORT_PASS
from heterollm.kernels.gpu import GpuRuntime, KvMemory, rows_alike
from heterollm.kernels.ops import OpSpec
from heterollm.solver import Plan

KEPT_BATCHES: Final = 32


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Sessions that may share a decode pass.

    Args:
        most: Sessions at most.
        exact: Those of a pass in which each row has the bits of its session alone; 1 if others change them.
    """

    most: int
    exact: int

    @classmethod
    def of(cls, plan: Plan, specs: Sequence[OpSpec], runtime: GpuRuntime) -> RowLimits:
        """Return the limits of a plan.

        The CPU's linears of few tokens add in the same order whatever their number, those for a matrix unit
        always. Those of a GPU do not, the NPU does not promise it, and a plan may place more rows elsewhere.
        """

        def on_gpu(rows: int) -> bool:
            placed = plan.operators("decode", rows, specs, rows=rows)
            return not any(placement.npu_lengths for _, placement in placed)

        most, traits = min(SHORT_PASS, plan.chunk_length), runtime.traits
        unit = {"is_cpu": traits.is_cpu, "has_matrix": traits.has_matrix}
        alike = min((rows_alike(spec.weight, **unit) for spec in specs), default=1)
        few = itertools.takewhile(on_gpu, range(1, min(most, alike) + 1))
        return cls(most, max(1, len(list(few))))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A decode pass of several sessions.

    Args:
        compiled: The pass.
        shared: The steps that all rows have in common.
        rows: Each row's own steps, for one gap after the other.
    """

    compiled: CompiledPass
    shared: SharedSteps
    rows: tuple[tuple[CompiledPass, ...], ...]


class KeptBatches:
    """Decode passes of several sessions, of which the latest are kept.

    Args:
        compiler: Compiles missing steps.
        prepare: Takes a pass before it runs for the first time.
    """

    def __init__(self, compiler: Compiler, prepare: Callable[[CompiledPass], CompiledPass]) -> None:
        self._compiler = compiler
        self._prepare = prepare
        self._batches: OrderedDict[tuple[int, ...], Batch] = OrderedDict()
        # Held by the passes that have them.
        self._shared: weakref.WeakValueDictionary[int, SharedSteps] = weakref.WeakValueDictionary()
        self._own: weakref.WeakValueDictionary[tuple[Hashable, int, int], CompiledPass]
        self._own = weakref.WeakValueDictionary()

    def parts(self) -> Iterator[CompiledPass]:
        """Yield all steps that are bound to a session's memory."""
        yield from self._own.values()

    def clear(self) -> None:
        """Drop all passes."""
        self._batches.clear()

    def find(self, buckets: tuple[int, ...], caches: Sequence[KvMemory]) -> CompiledPass | None:
        """Return a pass of sessions with these buckets, bound to their memory; None if it is not compiled."""
        batch = self._batches.get(buckets)
        if batch is None:
            return None
        self._batches.move_to_end(buckets)
        for parts, cache in zip(batch.rows, caches, strict=True):
            for part in parts:
                part.bind_cache(cache)
        return batch.compiled

    def compile(self, buckets: tuple[int, ...], caches: Sequence[KvMemory]) -> CompiledPass:
        """Compile a pass of sessions with these buckets, and bind it to their memory."""
        count = len(buckets)
        shared = self._shared.get(count)
        if shared is None:
            shared = self._shared[count] = self._compiler.compile_shared(count)
        rows = tuple(
            self._row(shared.gaps, row, *own) for row, own in enumerate(zip(buckets, caches, strict=True))
        )
        compiled = self._prepare(self._compiler.join_rows(shared, rows))
        self._batches[buckets] = Batch(compiled, shared, rows)
        if len(self._batches) > KEPT_BATCHES:
            self._batches.popitem(last=False)
        return compiled

    def _row(self, gaps: Sequence[Gap], row: int, bucket: int, cache: KvMemory) -> tuple[CompiledPass, ...]:
        """Return the steps of a row for all gaps, bound to a session's memory."""
        found = {gap.key: part for gap in gaps if (part := self._own.get((gap.key, row, bucket))) is not None}
        for part in found.values():
            part.bind_cache(cache)
        missing = [gap for gap in gaps if gap.key not in found]
        for gap, part in zip(missing, self._compiler.compile_row(missing, row, bucket, cache), strict=True):
            found[gap.key] = self._own[gap.key, row, bucket] = part
        return tuple(found[gap.key] for gap in gaps)
