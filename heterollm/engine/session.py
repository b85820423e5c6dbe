"""A session: tokens and state of one conversation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import InputError
from heterollm.engine.prefix_file import Prefix, fill_state
from heterollm.engine.slots import HEAD_ROWS, SHORT_PASS
from heterollm.engine.state import BatchRun
from heterollm.engine.thread import EngineThread
from heterollm.kernels.ops import Phase

if TYPE_CHECKING:
    from heterollm.engine.beside import Beside, PassBeside
    from heterollm.engine.runner import Engine
    from heterollm.model import TensorFile


def check_ids(ids: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[np.int32]:
    """Return token ids as int32 ``[m]``.

    Raises:
        InputError: There is no id, they are not whole numbers, or one is outside the vocabulary.
    """
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise InputError("Token ids must be whole numbers in one row, not nested ones.") from error
    if array.size == 0:
        raise InputError("The prompt has no tokens.", fix="Give at least one token id.")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"Token ids must be whole numbers in one row, not {array.dtype} {array.shape}.")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InputError(f"Token id {wrong} is outside the vocabulary of {vocab_size}.")
    return array.astype(np.int32)


class Session:
    """The tokens of one conversation and their KV cache; made by :meth:`heterollm.LLM.session`.

    Layers with a sliding window keep the last keys alone, and layers with recurrent state keep it at some
    positions. After a truncation to a position whose state is gone, the next call reads tokens before it
    again.

    Sessions of one model share its engine: calls from several threads run one after the other.
    """

    def __init__(self, engine: Engine, thread: EngineThread, vocab_size: int) -> None:
        self._engine = engine
        self._thread = thread
        self._vocab_size = vocab_size
        self._state = thread.run(engine.new_cache)
        self._position = 0
        self._ids = np.empty(engine.context, np.int32)

    def __repr__(self) -> str:
        return f"Session({self._position} of {self.context} tokens)"

    @property
    def ids(self) -> NDArray[np.int32]:
        """A copy of the tokens so far."""
        return self._ids[: self._position].copy()

    @property
    def position(self) -> int:
        """Number of tokens so far, which is the position of the next one."""
        return self._position

    @property
    def prepared_s(self) -> float:
        """Time in which the engine has compiled passes."""
        return self._engine.prepared_s

    @property
    def context(self) -> int:
        """Number of positions."""
        return self._engine.context

    @property
    def memory_bytes(self) -> int:
        """Most bytes that keys and values and recurrent state take."""
        return self._engine.state_bytes

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._vocab_size

    def prefill(self, ids: Sequence[int] | NDArray[Any], all_logits: bool = False) -> NDArray[np.float32]:
        """Append tokens and return their logits.

        Args:
            ids: Token ids, at least one.
            all_logits: Whether to return the logits of every position or only of the last one.

        Returns:
            float32 ``[vocab]``, or ``[m, vocab]`` with ``all_logits``.

        Raises:
            InputError: There is no id, an id is outside the vocabulary, or the context is too small.
        """
        checked = self._check(ids)
        return self._thread.run(lambda: self._run(checked, "prefill", all_logits))

    def decode(self, ids: int | Sequence[int] | NDArray[Any]) -> NDArray[np.float32]:
        """Append one token, or several in one pass, with the plan's decode placements.

        Returns:
            float32 ``[vocab]`` for one id, ``[n, vocab]`` for a sequence of n.

        Raises:
            InputError: As for :meth:`prefill`.
        """
        if isinstance(ids, int | np.integer):
            # In an array, so that True is refused instead of becoming 1.
            token = int(self._check(np.array([ids]))[0])
            return self._thread.run(lambda: self._run_one(token))
        several = self._check(ids)
        return self._thread.run(lambda: self._run(several, "decode", True))

    def reset(self) -> None:
        """Forget all tokens."""
        self.truncate(0)

    def truncate(self, position: int) -> None:
        """Forget the tokens from ``position`` on.

        Raises:
            InputError: The position has not been reached.
        """
        if not isinstance(position, int | np.integer) or isinstance(position, bool):
            raise InputError(f"A position is a whole number, not {position!r}.")

        def cut() -> None:
            if not 0 <= position <= self._position:
                raise InputError(
                    f"Cannot truncate to position {position}: {self._position} have been reached."
                )
            self._position = int(position)
            self._state.truncate(self._position)

        self._thread.run(cut)

    def reusable(self, position: int) -> int:
        """Return how many of the tokens before a position need not be read again after a truncation to it.

        For the engine thread.
        """
        return self._state.latest(min(position, self._position))

    def restore(self) -> None:
        """Read the tokens again whose state is lost, as the next call would; for the engine thread."""
        if (begin := self._state.latest(self._position)) < self._position:
            self._engine.prefill(self._state, begin, self._ids[begin : self._position], "prefill", None)

    def belongs_to(self, engine: Engine) -> bool:
        """Whether the session's cache is one of this engine's."""
        return self._engine is engine

    def fork(self) -> Session:
        """Return a second session with the same tokens, whose state both share until they differ."""
        other = Session(self._engine, self._thread, self._vocab_size)

        def share() -> None:
            other._state.share(self._state, self._state.latest(self._position))
            other._ids[: self._position] = self.ids
            other._position = self._position

        self._thread.run(share)
        return other

    def copy_prefix(self, length: int) -> Prefix:
        """Return a copy of the first tokens and of the state behind them; for the engine thread.

        Raises:
            InputError: The state behind so many tokens is not there.
        """
        if self.reusable(length) != length:
            raise InputError(f"The state behind {length} tokens is not there.")
        return Prefix.of(self._state, self._ids[:length])

    def load_prefix(self, file: TensorFile) -> None:
        """Take tokens and state from a file of :meth:`copy_prefix`; for the engine thread.

        Raises:
            CacheError: The file is damaged, or belongs to another model; the session is empty then.
        """
        self._position = 0
        ids = fill_state(self._state, file, self.context)
        self._ids[: len(ids)] = ids
        self._position = len(ids)

    def prefill_in_place(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Prefill on the engine thread; the next call overwrites the returned row."""
        self.restore()
        self._engine.prefill(self._state, self._position, ids, "prefill", None)
        self._append(ids)
        return self._engine.last_logits

    def prefill_in_turns(
        self, ids: NDArray[np.int32], wanted: Callable[[float], bool], beside: Beside | None = None
    ) -> Generator[None, None, None]:
        """Prefill on the engine thread, and yield whenever others want the engine.

        Other sessions may run meanwhile, this one may not. The tokens belong to the session at the end; an
        iterator that is dropped before adds none.

        Args:
            ids: int32 ``[m]``.
            wanted: Called between chunks and layers with the part of the prompt, 0 to 1, whose kernels are
                enqueued; returns whether to pause.
            beside: Decode passes of other sessions that run beside the prompt, between two pauses.
        """
        begin = self._state.latest(self._position)
        unread = np.concatenate([self._ids[begin : self._position], ids])
        yield from self._engine.prefill_in_turns(self._state, begin, unread, "prefill", None, wanted, beside)
        self._append(ids)

    def states(self, ids: Sequence[int] | NDArray[Any]) -> Iterator[NDArray[np.float32]]:
        """Forget all tokens, run others, and yield their normed states behind the last layer.

        Other calls may run between two chunks. The session has no tokens afterwards.

        Args:
            ids: Token ids, at least one.

        Yields:
            float32 ``[n, hidden]`` of the next tokens.

        Raises:
            InputError: As for :meth:`prefill`.
        """
        self.reset()
        rows: list[NDArray[np.float32]] = []
        turns = self._engine.states_in_turns(self._state, self._check(ids), rows.append)
        going = True
        while going:
            going = self._thread.run(lambda: next(turns, self) is None)
            yield from rows
            rows.clear()

    def finish_kernels(self) -> None:
        """Wait for the kernels that are enqueued; for the engine thread."""
        self._engine.device.gpu.finish()

    @property
    def last_logits(self) -> NDArray[np.float32]:
        """The logits of the engine's last pass, which the next one overwrites; for the engine thread."""
        return self._engine.last_logits

    def decode_in_place(self, ids: int | NDArray[Any]) -> NDArray[np.float32]:
        """Decode a token, or up to 32 in one pass, on the engine thread.

        Returns:
            float32 ``[vocab]`` for one id, ``[n, vocab]`` for an array of n; the next call overwrites them.
        """
        count = 1 if isinstance(ids, int) else len(ids)
        begin = self._state.latest(self._position)
        if self._position - begin + count > HEAD_ROWS:
            self.restore()
            begin = self._position
        if begin < self._position or not isinstance(ids, int):
            # Tokens behind a state that refused guesses have left run again with the new ones.
            several = np.array(ids, np.int32, ndmin=1)
            fed = np.concatenate([self._ids[begin : self._position], several])
            rows = self._engine.decode_several(self._state, begin, fed)
            self._append(several)
            return rows[-1] if isinstance(ids, int) else rows[-count:]
        self._engine.decode(self._state, self._position, ids)
        self._ids[self._position] = ids
        self._position += 1
        return self._engine.last_logits

    @staticmethod
    def decode_together(
        sessions: Sequence[Session], ids: Sequence[int | NDArray[Any]]
    ) -> list[NDArray[np.float32]]:
        """Decode tokens of several sessions in one pass, on their engine thread.

        Args:
            sessions: Different sessions of one engine with room for the tokens.
            ids: A token of each, or several where :attr:`RowLimits.takes_guesses` allows them.

        Returns:
            The logits of each session, as :meth:`decode_in_place` returns them.
        """
        first: Session = sessions[0]
        runs = [Session._run_of(session, own) for session, own in zip(sessions, ids, strict=True)]
        return Session.append_beside(sessions, ids, first._engine.decode_batch(runs))

    @staticmethod
    def begin_beside(sessions: Sequence[Session], ids: Sequence[int | NDArray[Any]]) -> PassBeside | None:
        """Return the pass of :meth:`decode_together` to run beside a prompt; None if it cannot.

        The tokens belong to the sessions when :meth:`append_beside` has been called.
        """
        first: Session = sessions[0]
        if any(session.reusable(session.position) < session.position for session in sessions):
            return None  # tokens would have to be read again
        runs = [Session._run_of(session, own) for session, own in zip(sessions, ids, strict=True)]
        return first._engine.begin_beside(runs)

    @staticmethod
    def append_beside(
        sessions: Sequence[Session], ids: Sequence[int | NDArray[Any]], logits: NDArray[np.float32]
    ) -> list[NDArray[np.float32]]:
        """Take the tokens of a pass of :meth:`begin_beside` that has run; return each session's logits."""
        found, row = [], 0
        for session, own in zip(sessions, ids, strict=True):
            tokens = np.array(own, np.int32, ndmin=1)
            Session._append(session, tokens)
            found.append(logits[row] if isinstance(own, int) else logits[row : row + len(tokens)])
            row += len(tokens)
        return found

    def append_in_place(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Append tokens on the engine thread, few of them as decode does; return the last one's row."""
        self.restore()
        phase: Phase = "decode" if len(ids) <= SHORT_PASS else "prefill"
        self._engine.prefill(self._state, self._position, ids, phase, None)
        self._append(ids)
        return self._engine.last_logits

    def keep_common(self, ids: NDArray[Any]) -> None:
        """Forget the tokens behind the beginning that these ids share."""
        length = min(self._position, len(ids))
        other = np.flatnonzero(self._ids[:length] != ids[:length])
        self.truncate(int(other[0]) if len(other) else length)

    def _run_one(self, token: int) -> NDArray[np.float32]:
        self._check_room(1)
        return self.decode_in_place(token).copy()

    def _run(self, ids: NDArray[np.int32], phase: Phase, all_logits: bool) -> NDArray[np.float32]:
        # A call from another thread may have changed the position since the check.
        self._check_room(len(ids))
        target = np.empty((len(ids), self._vocab_size), np.float32) if all_logits else None
        self.restore()
        self._engine.prefill(self._state, self._position, ids, phase, target)
        self._append(ids)
        return self._engine.last_logits.copy() if target is None else target

    def _run_of(self, ids: int | NDArray[Any]) -> BatchRun:
        self.restore()
        return BatchRun(self._state, self._position, np.array(ids, np.int32, ndmin=1))

    def _append(self, ids: NDArray[np.int32]) -> None:
        self._ids[self._position : self._position + len(ids)] = ids
        self._position += len(ids)

    def _check(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int32]:
        checked = check_ids(ids, self._vocab_size)
        self._check_room(len(checked))
        return checked

    def _check_room(self, count: int) -> None:
        if self._position + count > self.context:
            raise InputError(
                f"{count} tokens at position {self._position} exceed the context of {self.context}.",
                fix="Shorten the prompt, reset the session, or load the model with a larger context.",
            )
