"""Runs compiled passes on the engine thread: writes the step buffer, calls the steps, leaves the logits.

The plan makes all decisions. Running a compiled pass allocates nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import (
    EngineError,
    FenceError,
    GraphError,
    HeteroLLMError,
    KernelError,
    OptionError,
    Progress,
)
from heterollm.engine.beside import Beside, PassBeside
from heterollm.engine.blocks.mixture import ALL_IN_MEMORY, MixtureOptions
from heterollm.engine.compiler import Compiler
from heterollm.engine.experts.residency import ExpertReads
from heterollm.engine.experts.shares import ExpertPairs
from heterollm.engine.kept_passes import KeptPasses, PassKey, PassLength
from heterollm.engine.lanes import Lane
from heterollm.engine.memory import NO_VALUES
from heterollm.engine.observer import UNOBSERVED, Observer, during
from heterollm.engine.passes import CompiledPass, PassError, StalePassError
from heterollm.engine.pauses import Pause, set_aside
from heterollm.engine.row_limits import RowLimits
from heterollm.engine.slots import HEAD_ROWS
from heterollm.engine.splits import NO_RANGES
from heterollm.engine.state import BatchRun, SessionState
from heterollm.engine.step import Call, Step
from heterollm.engine.waits import Fences
from heterollm.engine.windows import Spare, Window
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    STEP_HEAD_ROW,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    DeviceMemory,
    OpenClError,
)
from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.ops import Group, Phase
from heterollm.kernels.sync import Pool, WaitLimits, prepare_fence, resynchronise
from heterollm.model import ModelWeights
from heterollm.solver import Plan

logger = logging.getLogger(__name__)

DRAIN_LIMITS: Final = WaitLimits(spin_us=0.0, timeout_s=30.0, compiling_s=270.0)
"""Limits of the wait for the queue after a failed pass, whose kernels may still be compiled."""

NPU_FAILURES: Final = (GraphError, FenceError, PassError, StalePassError)
"""Errors after which the GPU may continue alone: without graphs, fences, and their memory."""


def _never(_part: float) -> bool:
    return False


def _asked(wanted: Callable[[float], bool], beside: Beside, part: float) -> bool:
    """Return whether to pause; a pass beside the prompt ends before."""
    pauses = wanted(part)
    if pauses:
        beside.finish()
    return pauses


def _within(wanted: Callable[[float], bool], first: int, length: int, tokens: int) -> Callable[[float], bool]:
    """Return ``wanted`` for the parts of one chunk of a prompt."""
    return lambda part: wanted((first + length * part) / tokens)


class Engine:
    """A model compiled for a device.

    Args:
        device: The opened device; :meth:`close` closes it.
        weights: The model's weights.
        plan: The plan.
        context: Positions of every session.
        progress: Called while weights are packed.
        allow_fallback: Whether the GPU continues alone, with the same KV cache, after a failure of the NPU.
        observer: Follows the engine, for example to trace it.
        ranges: Calibrated ranges by layer and group, which integer NPU graphs need; other operators that the
            plan places in such graphs compute with float activations.
        techniques: Calibrated values by technique: ``attention`` has scales of key heads
            (:data:`heterollm.engine.sparse.steps.ScoreScales`).
        mixture: Options of a mixture of experts.

    Attributes:
        notes: The failure and the position since which the GPU computes alone.
        rows: Rows that a decode pass of several sessions may have.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        context: int,
        progress: Progress,
        *,
        allow_fallback: bool = False,
        observer: Observer | None = None,
        ranges: Mapping[tuple[int, Group], StaticRanges] = NO_RANGES,
        techniques: Mapping[str, Any] = NO_VALUES,
        mixture: MixtureOptions = ALL_IN_MEMORY,
    ) -> None:
        self.device = device
        self.plan = plan
        self.context = context
        self._config = weights.config
        self.notes: tuple[str, ...] = ()
        self.fences = Fences(device, plan.sync)
        self.observer = observer
        if observer is not None:
            self.fences.watch(observer.watch)
        self.rows = RowLimits.of(plan, weights.specs, device.gpu, weights.config)
        self._may_fall_back = allow_fallback and plan.uses_npu
        self._lost = ""
        self._compiler = Compiler(
            *(device, weights, plan, context, progress, self.fences),
            *(ranges, techniques, mixture),
        )
        self._passes = KeptPasses(self._compiler, plan, context, observer)
        self._lanes = self._compiler.lanes
        self._spares: dict[tuple[str, int], Spare] = {}
        # With a wait after every operator, or without the NPU, chunks at once would gain nothing.
        self._flies = plan.schedule is not None and not self.fences.after_every_operator
        logits = self._compiler.pool["logits"]
        self._logits_slot = logits
        self._logits: NDArray[np.float32] = logits.view(np.float32, (HEAD_ROWS, self._config.vocab_size))
        self.last_logits: NDArray[np.float32] = self._logits[0]

    @property
    def pool(self) -> Pool:
        """The slots that both processors share."""
        return self._compiler.pool

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._config.vocab_size

    @property
    def state_bytes(self) -> int:
        """Memory of a session."""
        return self._config.state_bytes(self.context, self.plan.longest_flight, self.device.cache_dtype)

    @property
    def private(self) -> Mapping[str, DeviceMemory]:
        """The slots that only kernels read and write."""
        return self._compiler.private

    @property
    def pass_notes(self) -> tuple[str, ...]:
        """Integer graphs without suitable ranges, saturated values, and shares of experts on the NPU, so far.

        Only the engine thread may read them.
        """
        return () if self._lost else self._compiler.notes

    @property
    def expert_pairs(self) -> tuple[ExpertPairs, ...]:
        """The processors of chosen experts in prompts so far, by layer.

        Only the engine thread may read them.
        """
        return () if self._lost else self._compiler.techniques.experts.counts.read()

    @property
    def expert_reads(self) -> ExpertReads | None:
        """Counts of the budget of experts; None without one. Only the engine thread may read them."""
        residency = self._compiler.residency
        return None if residency is None else residency.reads

    def fill_experts(self, progress: Progress) -> None:
        """Read the first residents of a budget of experts; nothing without one."""
        if self._compiler.residency is not None:
            self._compiler.residency.fill(progress)

    def reset_counts(self) -> None:
        """Count saturated values, choices of experts and their reads from 0 again."""
        self._compiler.reset_counts()

    @property
    def prepared_s(self) -> float:
        """Time in which passes were compiled."""
        return self._passes.prepared_s

    @property
    def kept_passes(self) -> tuple[PassKey, ...]:
        """Phase, tokens (of each chunk in flight) and keys of the passes in memory, the latest last."""
        return tuple(self._passes.compiled)

    @property
    def is_lost(self) -> bool:
        """Whether the GPU's queue hangs and cannot be used any more."""
        return bool(self._lost)

    def new_cache(self) -> SessionState:
        """Return the state of an empty session."""
        return self._compiler.states.session()

    def limit_sessions(self, count: int | None) -> None:
        """Bound the memory of all sessions to that of so many, or by the GPU's largest buffer alone."""
        self._compiler.states.limit(count)

    def sessions_taken(self, prompt: int, tokens: int, count: int) -> float:
        """Return how many sessions have room for answers; see :meth:`StateMemory.sessions_taken`."""
        return self._compiler.states.sessions_taken(prompt, tokens, count)

    def prefill(
        self,
        cache: SessionState,
        position: int,
        ids: NDArray[np.int32],
        phase: Phase,
        target: NDArray[Any] | None,
    ) -> None:
        """Run tokens through the model, in the plan's chunks.

        Where the GPU continues alone, and attention becomes dense or no token of an expert is dropped any
        more, all chunks of this call are computed again: the logits are those of the GPU behind what the
        cache held before. Keys of earlier calls stay, also those that the NPU's part has changed, and so do
        those of this call's chunks if a sliding window has left its beginning.

        Args:
            cache: The state of the session; written from ``position`` on.
            position: Position of the first token.
            ids: int32 ``[m]``.
            phase: Phase whose placements to use.
            target: float32 ``[m, vocab]`` for the logits of every position; None leaves those of the last
                position in :attr:`last_logits`.

        Raises:
            HeteroLLMError: A kernel, a graph or a fence failed. Earlier positions stay valid.
        """
        for _ in self.prefill_in_turns(cache, position, ids, phase, target):
            raise AssertionError("a prompt paused that nobody asked to")

    def prefill_in_turns(
        self,
        cache: SessionState,
        position: int,
        ids: NDArray[np.int32],
        phase: Phase,
        target: NDArray[Any] | None,
        wanted: Callable[[float], bool] = _never,
        beside: Beside | None = None,
    ) -> Iterator[None]:
        """Run tokens through the model as :meth:`prefill` does, and yield whenever others want the engine.

        The engine may run other passes before it is asked to go on, or never. It pauses between chunks, and
        between the layers of a chunk that runs alone and without an observer.

        Args:
            cache: The state of the session.
            position: Position of the first token.
            ids: int32 ``[m]``.
            phase: Phase whose placements to use.
            target: Where the logits go, as for :meth:`prefill`.
            wanted: Called at each place where a pause is possible, with the part of the prompt before it, 0
                to 1, whose kernels are enqueued; returns whether to pause.
            beside: Decode passes that run beside the chunks; none runs during a pause, or afterwards.
        """
        if target is not None or phase == "decode" or self.observer is not None:
            beside = None
        if beside is not None:
            wanted = partial(_asked, wanted, beside)
        for flight in self.plan.flights(len(ids)):
            if flight[0][0] and wanted(flight[0][0] / len(ids)):
                could_fall_back = self._may_fall_back
                yield
                lost = self._may_fall_back != could_fall_back and self.plan.changes_values
                if lost and cache.can_truncate(position):
                    yield from self.prefill_in_turns(cache, position, ids, phase, target, wanted)
                    return
            if len(flight) > 1 and self._flies and target is None and phase == "prefill":
                try:
                    self._flight(cache, position, ids, flight, beside)
                    continue
                except NPU_FAILURES as error:
                    if self._begins_again(cache, position, flight[0][0], error):
                        yield from self.prefill_in_turns(cache, position, ids, phase, target, wanted)
                        return
            for first, length in flight:
                tokens = ids[first : first + length]
                rows = None if target is None else target[first : first + length]
                last = int(first + length == len(ids))
                within = wanted if wanted is _never else _within(wanted, first, length, len(ids))
                try:
                    yield from self._chunk(cache, position + first, tokens, phase, rows, last, within, beside)
                except NPU_FAILURES as error:
                    if self._begins_again(cache, position, first if phase == "prefill" else 0, error):
                        yield from self.prefill_in_turns(cache, position, ids, phase, target, wanted)
                        return
                    yield from self._chunk(cache, position + first, tokens, phase, rows, last, within)

    def _begins_again(self, cache: SessionState, position: int, first: int, error: HeteroLLMError) -> bool:
        """Leave the NPU at token ``first`` of a prompt, and return whether the GPU computes all again."""
        again = first > 0 and self.plan.changes_values and cache.can_truncate(position)
        self._fall_back(error, position if again else position + first)
        return again

    def decode(self, cache: SessionState, position: int, token: int) -> None:
        """Run one token and leave its logits in :attr:`last_logits`; errors as for :meth:`prefill`."""
        try:
            self._one_token(cache, position, token)
        except NPU_FAILURES as error:
            self._fall_back(error, position)
            self._one_token(cache, position, token)

    def decode_several(
        self, cache: SessionState, position: int, ids: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Run up to :data:`HEAD_ROWS` tokens in one pass; errors as for :meth:`prefill`.

        Returns:
            Their logits ``[n, vocab]``, which the next pass overwrites.
        """
        try:
            self._several(cache, position, ids)
        except NPU_FAILURES as error:
            self._fall_back(error, position)
            self._several(cache, position, ids)
        return self._logits[: len(ids)]

    def decode_batch(self, runs: Sequence[BatchRun]) -> NDArray[np.float32]:
        """Run tokens of several sessions in one pass, a row for each; errors as for :meth:`prefill`.

        The plan's placements are those of as many tokens. Kernels of attention and recurrent state add as in
        a pass of one token, so that these do not depend on the other rows.

        Args:
            runs: Those of different sessions; a session with recurrent state has one token.

        Returns:
            The logits ``[n, vocab]`` of all rows, at most :attr:`RowLimits.most`; the next pass overwrites
            them.
        """
        try:
            self._batch(runs)
        except NPU_FAILURES as error:
            self._fall_back(error, min(run.position for run in runs))
            self._batch(runs)
        return self._logits[: _row_count(runs)]

    def states_in_turns(
        self, cache: SessionState, ids: NDArray[np.int32], take: Callable[[NDArray[np.float32]], None]
    ) -> Iterator[None]:
        """Run a prompt in an empty session, and yield between its chunks, where others may use the engine.

        Args:
            cache: The state of the session.
            ids: int32 ``[m]``.
            take: Takes the normed states of the next positions, float32 ``[n, hidden]``.

        Raises:
            HeteroLLMError: A kernel, a graph or a fence failed. After a failure of the NPU that
                ``allow_fallback`` covers, another call computes on the GPU alone.
        """
        slot, hidden = self._compiler.pool["head_input"], self._config.hidden_size
        dtype = self.device.activation_dtype
        for first, length in (chunk for flight in self.plan.flights(len(ids)) for chunk in flight):
            if first:
                yield
            tokens = ids[first : first + length]
            try:
                with self._observed_pass("prefill", length, first):
                    compiled = self._pass("prefill", length, first, cache)
                    self._write_inputs(self._lanes[0], cache, tokens, first, 0)
                    self._call(compiled.calls)
                    for _, rows in self._head_rows_of(length):
                        self._call(self._passes.head(compiled, "prefill", rows, logits=False).calls)
                        slot.acquire_to_read(rows * hidden * dtype.itemsize)
                        take(slot.view(dtype, (rows, hidden)).astype(np.float32))
                        slot.release()
                    cache.commit(first + length)
            except NPU_FAILURES as error:
                self._fall_back(error, first)
                raise

    def compile_ahead(
        self,
        cache: SessionState,
        chunks: Iterable[tuple[int, int]],
        progress: Progress,
        *,
        decode: Iterable[int] = (1,),
    ) -> None:
        """Compile decode and passes of prefill, building or loading their NPU graphs.

        Args:
            cache: The state of a session to bind first.
            chunks: Position and length of each pass of prefill.
            progress: Called with a stage's name, steps done and steps in all.
            decode: Tokens of each pass of decode.
        """
        passes: list[tuple[Phase, int, int]] = [("decode", 0, tokens) for tokens in decode]
        passes += [("prefill", *chunk) for chunk in chunks]
        for done, (phase, position, length) in enumerate(passes):
            progress("Preparing graphs and kernels", done, len(passes))
            try:
                self._compile(phase, position, length, cache)
            except NPU_FAILURES as error:
                self._fall_back(error, 0)
                self._compile(phase, position, length, cache)
        progress("Preparing graphs and kernels", len(passes), len(passes))

    def steps(self, phase: Phase, tokens: int) -> tuple[Step, ...]:
        """Return the steps of a pass, or of several chunks at once, and the head in an empty session.

        Args:
            phase: Prefill computes the logits of the last token, decode those of every token.
            tokens: Tokens of the pass, or of all its chunks.

        Raises:
            OptionError: No pass has this number of tokens.
        """
        lanes = len(self._lanes) if phase == "prefill" and self._flies else 1
        longest = min(lanes * self.plan.chunk_length, self.context)
        if not 1 <= tokens <= longest:
            raise OptionError(
                f"No pass has {tokens} tokens.",
                fix=f"Ask for 1 to {longest}; longer prompts run in chunks of {self.plan.chunk_length}.",
            )
        compiled = self._pass(phase, self._lengths(phase, tokens), 0, self.new_cache())
        return compiled.steps + self._passes.head(compiled, phase, _head_rows(phase, tokens)).steps

    def batch_steps(self, rows: int) -> tuple[Step, ...]:
        """Return the steps of a decode pass of several sessions by its rows."""
        compiled = self._passes.find_batch(rows)
        return compiled.steps + self._passes.head(compiled, "decode", rows).steps

    def planned_steps(self, phase: Phase, tokens: int) -> tuple[Step, ...]:
        """Return the steps as :meth:`steps` does, without building graphs; the steps cannot run."""
        keys = self._passes.keys(phase, tokens)
        compiled = self._compiler.compile_pass(phase, tokens, keys, builds_graphs=False)
        rows = _head_rows(phase, tokens)
        head = self._compiler.compile_head(phase, rows, compiled, builds_graphs=False)
        return compiled.steps + head.steps

    def release(self) -> None:
        """Drop all compiled passes and packed weights."""
        self._passes.clear()
        self._compiler.close()

    def close(self) -> None:
        """Drop all compiled passes and packed weights, and close the device."""
        self.release()
        self.device.close()

    # -- helpers -------------------------------------------------------------------------------------

    def _chunk(
        self,
        cache: SessionState,
        position: int,
        tokens: NDArray[np.int32],
        phase: Phase,
        target: NDArray[np.float32] | None,
        last: int,
        wanted: Callable[[float], bool],
        beside: Beside | None = None,
    ) -> Iterator[None]:
        """Run a pass; without a target the logits of so many last tokens, or none, stay in their slot."""
        with self._observed_pass(phase, len(tokens), position), beside or UNOBSERVED:
            compiled = self._pass(phase, len(tokens), position, cache)
            head_row = len(tokens) - (last or 1) if target is None else 0
            self._write_inputs(self._lanes[0], cache, tokens, position, head_row)
            pauses: tuple[Pause, ...] = ()
            if wanted is not _never and self.observer is None:
                sizes = partial(self._compiler.chunk_sizes, len(tokens))
                pauses = compiled.find_pauses(sizes)
            windows = self._windows(compiled, beside, last=bool(last))
            begin = done = 0
            stops: Sequence[Pause | Window] = sorted((*pauses, *windows), key=attrgetter("index"))
            for stop in stops:
                self._call(compiled.calls[begin : stop.index])
                begin = stop.index
                if isinstance(stop, Window):
                    begin = self._beside_graphs(stop, beside)
                    continue
                done += 1
                if wanted(done / (len(pauses) + 1)):
                    yield from self._paused(stop)
                    self._write_inputs(self._lanes[0], cache, tokens, position, head_row)
                    if beside is not None:
                        beside.begin_chunk([own for own in windows if own.index >= begin], last=bool(last))
            self._call(compiled.calls[begin:] if begin else compiled.calls)
            if target is not None:
                self._all_logits(compiled, phase, target)
            else:
                self._end_chunk(compiled, phase, last, beside)
            cache.commit(position + len(tokens))

    def _windows(self, compiled: CompiledPass, beside: Beside | None, *, last: bool) -> tuple[Window, ...]:
        """Return the windows of a chunk in which decode passes may run; none without any."""
        if beside is None:
            return ()
        windows = compiled.find_windows(self._spares)
        beside.begin_chunk(windows, last=last)
        return windows

    def _beside_graphs(self, window: Window, beside: Beside | None) -> int:
        """Run graphs with kernels of decode passes beside them, and return the index of the next step."""
        assert beside is not None  # without it there are no windows
        beside.fill()
        self._call(window.begins)
        begin_s = self.device.now_s()
        self._call(window.graphs)
        beside.learn(self.device.now_s() - begin_s)
        return window.behind

    def _end_chunk(
        self, compiled: CompiledPass, phase: Phase, rows: int, beside: Beside | None = None
    ) -> None:
        """Compute the logits of so many rows, or wait for the queue."""
        if not rows:
            self.device.gpu.finish()
            return
        if beside is not None:
            beside.finish()  # the head's slots are those of its passes
        self._head(compiled, phase, rows)

    def _several(self, cache: SessionState, position: int, ids: NDArray[np.int32]) -> None:
        for _ in self._chunk(cache, position, ids, "decode", None, len(ids), _never):
            raise AssertionError("a pass paused that nobody asked to")

    def _paused(self, pause: Pause) -> Generator[None, None, None]:
        """Yield to other passes, and leave the slots of a pass as they were."""
        could_fall_back = self._may_fall_back
        self.device.gpu.finish()
        write_back = set_aside(self.device.gpu, pause.memories)
        yield
        self._check_alive()
        if self._may_fall_back != could_fall_back:
            raise StalePassError("The NPU failed in another pass.")
        write_back()

    def _flight(
        self,
        cache: SessionState,
        position: int,
        ids: NDArray[np.int32],
        chunks: Sequence[tuple[int, int]],
        beside: Beside | None,
    ) -> None:
        """Run several chunks of a prompt at once; each is the index of its first token, and its length."""
        lengths = tuple(length for _, length in chunks)
        begin, last = position + chunks[0][0], int(sum(chunks[-1]) == len(ids))
        with self._observed_pass("prefill", sum(lengths), begin), beside or UNOBSERVED:
            compiled = self._pass("prefill", lengths, begin, cache)
            for lane, (first, length) in zip(self._lanes, chunks, strict=False):
                self._write_inputs(lane, cache, ids[first : first + length], position + first, length - 1)
            at = 0
            for window in self._windows(compiled, beside, last=bool(last)):
                self._call(compiled.calls[at : window.index])
                at = self._beside_graphs(window, beside)
            self._call(compiled.calls[at:] if at else compiled.calls)
            self._end_chunk(compiled, "prefill", last, beside)
            cache.commit(begin + sum(lengths))

    def _one_token(self, cache: SessionState, position: int, token: int) -> None:
        with self._observed_pass("decode", 1, position):
            compiled = self._pass("decode", 1, position, cache)
            self._write_inputs(self._lanes[0], cache, token, position, 0)
            self._call(compiled.calls)
            self._head(compiled, "decode", 1)
            cache.commit(position + 1)

    def _batch(self, runs: Sequence[BatchRun]) -> None:
        rows = _row_count(runs)
        with self._observed_pass("decode", rows, runs[0].position):
            compiled = self._find_batch(runs, rows)
            self._write_batch(runs, rows)
            self._call(compiled.calls)
            self._head(compiled, "decode", rows)
            self._commit_batch(runs)

    def begin_beside(self, runs: Sequence[BatchRun]) -> PassBeside | None:
        """Return the pass of :meth:`decode_batch` to run beside a prompt; None if it needs a turn.

        It does where it waits for the NPU or for the host. Where preparing it fails, a turn may fall back.
        """
        rows = _row_count(runs)
        try:
            compiled = self._find_batch(runs, rows)
            pieces = compiled.find_pieces(self._passes.head(compiled, "decode", rows))
        except NPU_FAILURES:
            return None
        if not pieces:
            return None
        self._write_batch(runs, rows)

        def run(calls: Sequence[Call]) -> None:
            self._check_alive()
            self._call(calls)

        def logits() -> NDArray[np.float32]:
            self._logits_slot.acquire(rows * self.last_logits.nbytes)
            self._commit_batch(runs)
            return self._logits[:rows]

        return PassBeside(pieces, run, logits, self._logits_slot.release)

    def _find_batch(self, runs: Sequence[BatchRun], rows: int) -> CompiledPass:
        """Return a pass of several sessions, which have room for it."""
        self._check_alive()
        # Each row reads the recurrent state behind the passes before, not behind the row before.
        assert rows == len(runs) or self.rows.takes_guesses
        for state, position, tokens in runs:
            state.reserve(position, len(tokens))
        return self._passes.find_batch(rows)

    def _write_batch(self, runs: Sequence[BatchRun], rows: int) -> None:
        with during(self.observer, "step"):
            lane = self._compiler.batch_lane
            self._write_tokens(lane, np.concatenate([run.tokens for run in runs]))
            places = [(state, first + row) for state, first, own in runs for row in range(len(own))]
            self._write_step(lane, places, rows)

    @staticmethod
    def _commit_batch(runs: Sequence[BatchRun]) -> None:
        for state, position, tokens in runs:
            state.commit(position + len(tokens))

    def _observed_pass(self, phase: Phase, tokens: int, position: int) -> AbstractContextManager[object]:
        observer = self.observer
        return UNOBSERVED if observer is None else observer.during_pass(phase, tokens, position)

    def _head(self, compiled: CompiledPass, phase: Phase, rows: int) -> None:
        self._call(self._passes.head(compiled, phase, rows).calls)
        self._logits_slot.acquire(rows * self.last_logits.nbytes)

    def _all_logits(self, compiled: CompiledPass, phase: Phase, target: NDArray[np.float32]) -> None:
        for row, rows in self._head_rows_of(len(target)):
            self._head(compiled, phase, rows)
            target[row : row + rows] = self._logits[:rows]

    def _head_rows_of(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield first row and number of rows of each head of a pass, and write the first row for it."""
        step = self._lanes[0].step
        for row in range(0, tokens, HEAD_ROWS):
            if row:
                # The head's last call waits for the queue, so that the step buffer is free.
                self._logits_slot.release()
                step.acquire(4 * STEP_WORDS)
                step.array[STEP_HEAD_ROW] = row
                step.release()
            yield row, min(HEAD_ROWS, tokens - row)

    def _compile(self, phase: Phase, position: int, tokens: int, cache: SessionState) -> None:
        compiled = self._pass(phase, self._lengths(phase, tokens), position, cache)
        self._passes.head(compiled, phase, _head_rows(phase, tokens))

    def _lengths(self, phase: Phase, tokens: int) -> PassLength:
        """Return the tokens of a pass, or of each chunk of several at once."""
        if phase == "decode" or tokens <= self.plan.chunk_length:
            return tokens
        return tuple(length for _, length in next(self.plan.flights(tokens)))

    def _pass(self, phase: Phase, length: PassLength, position: int, cache: SessionState) -> CompiledPass:
        self._check_alive()
        cache.reserve(position, length if isinstance(length, int) else sum(length))
        return self._passes.find(phase, length, position)

    def _check_alive(self) -> None:
        if self._lost:
            raise EngineError(self._lost, fix="Load the model again.")

    def _write_inputs(
        self,
        lane: Lane,
        cache: SessionState,
        tokens: NDArray[np.int32] | int,
        position: int,
        head_row: int,
    ) -> None:
        """Write the tokens and the step buffer of a lane, for a pass that has room in a session."""
        with during(self.observer, "step"):
            self._write_tokens(lane, tokens)
            length = 1 if isinstance(tokens, int) else len(tokens)
            self._write_step(lane, ((cache, position),), length, head_row, chunk=lane.number)

    def _write_tokens(self, lane: Lane, tokens: NDArray[np.int32] | int) -> None:
        self._logits_slot.release()
        length = 1 if isinstance(tokens, int) else len(tokens)
        lane.tokens.acquire()
        lane.tokens.array[:length] = tokens
        try:
            self._compiler.layer_inputs.write(lane, length)
        finally:
            lane.tokens.release()

    def _write_step(
        self,
        lane: Lane,
        rows: Sequence[tuple[SessionState, int]],
        length: int,
        head_row: int = 0,
        *,
        chunk: int = 0,
    ) -> None:
        """Write the words of a pass: state and position of its session, or of each row's in turn."""
        words = self._compiler.states.row_words
        lane.step.acquire(4 * words * len(rows))
        try:
            for number, (state, position) in enumerate(rows):
                step = lane.step.array[number * words : (number + 1) * words]
                step[STEP_POSITION] = position
                step[STEP_LENGTH] = length
                step[STEP_HEAD_ROW] = head_row
                state.bind(step, chunk)
        finally:
            lane.step.release()

    def _call(self, calls: Sequence[Call]) -> None:
        try:
            for call in calls:
                call()
        except BaseException as error:
            self._drain()
            if isinstance(error, OpenClError):
                raise KernelError(f"An OpenCL call failed: {error}.") from error
            raise

    def _drain(self) -> None:
        """Wait for the kernels of a failed pass, which must not read the next pass's step buffer."""
        gpu = self.device.gpu
        try:
            prepare_fence(gpu, "poll", "a failed pass", limits=DRAIN_LIMITS)()
            gpu.finish()
            resynchronise(gpu)
            self._compiler.pool.release()
        except FenceError as error:
            self._lost = f"The GPU does not finish. {error.message}"
            logger.warning("After a failed pass: %s", error)
        except (KernelError, OpenClError) as error:
            logger.warning("After a failed pass: %s", error)

    def _fall_back(self, error: HeteroLLMError, position: int) -> None:
        """Compute on the GPU alone from now on, or raise the error if that is not allowed or impossible."""
        if isinstance(error, StalePassError):
            return  # the pass in between has fallen back
        if not self._may_fall_back or self._lost:
            raise error
        self._may_fall_back = self._flies = False
        self._passes.clear()
        self._compiler.leave_npu()
        note = f"The GPU computes alone since token {position}, as the NPU failed: {error.message}"
        self.notes = (*self.notes, note)
        logger.warning("%s", note)


def _row_count(runs: Sequence[BatchRun]) -> int:
    """Return the number of rows of a pass of several sessions."""
    return sum(len(run.tokens) for run in runs)


def _head_rows(phase: Phase, tokens: int) -> int:
    """Return the number of positions with logits in the head of a pass."""
    return min(tokens, HEAD_ROWS) if phase == "decode" else 1
