"""Keeps compiled passes."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, TypeAlias

from heterollm.engine.compiler import Compiler
from heterollm.engine.observer import Observer, during
from heterollm.engine.passes import CompiledPass, compiling
from heterollm.kernels.gpu import DeviceMemory
from heterollm.kernels.ops import Join, Phase
from heterollm.solver import Plan

KEPT_PASSES: Final = 32

PassLength: TypeAlias = "int | tuple[int, ...]"
"""Tokens of a pass, or of each of several chunks at once."""

PassKey: TypeAlias = tuple[Phase, PassLength, PassLength]
"""Phase, tokens and keys of a pass."""

HeadKey: TypeAlias = tuple[Phase, int, tuple[DeviceMemory, tuple[int, ...], Join], int, bool, bool]
"""Phase, rows, memory and form of the input, lane, and whether it uses the NPU and ends in logits."""


class KeptPasses:
    """Compiled passes, of which the latest are kept.

    Args:
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

    def __init__(self, compiler: Compiler, plan: Plan, context: int, observer: Observer | None) -> None:
        self.compiled: OrderedDict[PassKey, CompiledPass] = OrderedDict()
        self.prepared_s = 0.0
        self._heads: dict[HeadKey, CompiledPass] = {}
        self._batches: dict[int, CompiledPass] = {}
        self._compiler = compiler
        self._observer = observer
        borders = (record.borders(context) for record in plan.techniques)
        self.key_borders = tuple(sorted(set().union(*borders)))

    def find(self, phase: Phase, length: PassLength, position: int) -> CompiledPass:
        """Return a pass of a length, or of several chunks at once."""
        with during(self._observer, "bind"):
            keys = self._keys_of(phase, length, position)
            key = (phase, length, keys)
            compiled = self.compiled.get(key)
            if compiled is None:
                tokens = length if isinstance(length, int) else sum(length)
                with self._preparing(), compiling(phase, tokens):
                    if isinstance(length, int):
                        assert isinstance(keys, int)
                        compiled = self._compiler.compile_pass(phase, length, keys)
                    else:
                        assert isinstance(keys, tuple)
                        compiled = self._compiler.compile_flight(length, position, keys)
                self.compiled[key] = self._taken(compiled)
                if len(self.compiled) > KEPT_PASSES:
                    self.compiled.popitem(last=False)
            else:
                self.compiled.move_to_end(key)
        return compiled

    def find_batch(self, rows: int) -> CompiledPass:
        """Return a decode pass of several sessions by its rows."""
        with during(self._observer, "bind"):
            compiled = self._batches.get(rows)
            if compiled is None:
                with self._preparing(), compiling("decode", rows):
                    compiled = self._compiler.compile_pass("decode", rows, 0, shared=True)
                self._batches[rows] = self._taken(compiled)
        return compiled

    def head(self, compiled: CompiledPass, phase: Phase, rows: int, *, logits: bool = True) -> CompiledPass:
        """Return the head behind a pass, for some positions; without logits its norm alone."""
        assert compiled.output is not None
        output = compiled.output.segments
        place = output.a, output.splits, output.join
        key = (phase, rows, place, compiled.lane, compiled.uses_npu, logits)
        head = self._heads.get(key)
        if head is None:
            with self._preparing(), compiling(phase, rows):
                compiler = self._compiler
                head = (compiler.compile_head if logits else compiler.compile_states)(phase, rows, compiled)
            self._heads[key] = self._taken(head)
        return head

    def clear(self) -> None:
        """Drop all passes."""
        self.compiled.clear()
        self._batches.clear()
        self._heads.clear()

    def _keys_of(self, phase: Phase, length: PassLength, position: int) -> PassLength:
        """Return the keys of a pass, or of each chunk of several; decode makes no object here."""
        if isinstance(length, int):
            return self.keys(phase, position + length)
        ends = itertools.accumulate(length, initial=position)
        return tuple(self.keys(phase, end) for end in itertools.islice(ends, 1, None))

    def keys(self, phase: Phase, positions: int) -> int:
        """Return the next border of the keys of sparse attention; 0 where a pass serves any position."""
        if phase != "prefill" or not self.key_borders:
            return 0
        return self.key_borders[bisect.bisect_left(self.key_borders, positions)]

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        with during(self._observer, "build"):
            yield
        self.prepared_s += time.perf_counter() - begin_s

    def _taken(self, compiled: CompiledPass) -> CompiledPass:
        """Let a pass follow the memory of state, and its observer, if there is one, call its steps."""
        self._compiler.states.passes.add(compiled)
        if self._observer is not None:
            compiled.calls = tuple(map(self._observer.call_of, compiled.steps))
        return compiled
