"""A loaded model on an opened device: its sessions, its properties, and its end."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from heterollm.engine import USUAL_GAPS, EngineThread, Scheduler, Session
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import kernel_source_hash
from heterollm.kernels.ops import Phase
from heterollm.model import (
    Checkpoint,
    ModelConfig,
    ModelWeights,
    Pooling,
    SamplingDefaults,
    read_pooling,
    read_sampling_defaults,
)
from heterollm.solver import Plan
from heterollm.text import GrammarTokens, NoTokenizer, Speculator, Tokenizer, TokenSequence
from heterollm.trace import take_trace

if TYPE_CHECKING:
    from heterollm.engine import Engine, ExpertReads, Step
    from heterollm.trace import Trace

T = TypeVar("T")


class LoadedModel:
    """A model that an engine runs: use it as a context manager, or close it."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | NoTokenizer,
        weights: ModelWeights,
        engine: Engine,
        thread: EngineThread,
        plan_notes: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._weights = weights
        self._engine = engine
        self._thread = thread
        self._plan_notes = tuple(plan_notes)
        self._speculator: Speculator | None = None
        self._draft: Engine | None = None
        self._own_session: Session | None = None
        self._embedding_session: Session | None = None
        self._embedding_lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"LLM({self.config.family} on {self.device.name}, plan {self.plan.level}, {self.plan.precision})"
        )

    @cached_property
    def _grammar_tokens(self) -> GrammarTokens:
        return GrammarTokens(self.tokenizer, self.config.vocab_size)

    def session(self) -> Session:
        """Return a new, empty session."""
        return Session(self._engine, self._thread, self.config.vocab_size)

    def limit_sessions(self, count: int | None) -> None:
        """Bound the memory of all sessions to that of so many with a full context; None for no such bound.

        A session that then finds no room raises an error, and the others stay as they are.
        """
        for engine in filter(None, (self._engine, self._draft)):
            self._thread.run(partial(engine.limit_sessions, count))

    def sessions_taken(self, answers: Sequence[TokenSequence]) -> float:
        """Return how many sessions with a full context have room for prepared answers to one prompt.

        The first counts as one; the others share the whole pages of its prompt, except in a draft model.
        """
        prompt, tokens = len(answers[0].prompt_ids), max(answer.longest for answer in answers)
        own = self._engine.sessions_taken(prompt, tokens, len(answers))
        return own if self._draft is None else max(own, len(answers))

    @property
    def state_key(self) -> str:
        """Hash of all that determines the state behind a token: weights, plan, device and program."""
        engine, tuning = self._engine, self.device.gpu.tuning
        parts = (
            *(version("heterollm"), kernel_source_hash(), engine.context, str(self.device.cache_dtype)),
            *(self._weights.content_key, self.plan.to_json(), self.device.description()),
            *(tuning.enabled, tuning.table.to_json()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def scheduler(self, *, gaps: float = USUAL_GAPS) -> Scheduler:
        """Return a scheduler of prepared answers, which runs between other calls until it is closed.

        Args:
            gaps: Usual times between two of its tokens for which prompts may keep an answer waiting.
        """
        return Scheduler(self._thread, self.device.now_s, self._engine.rows, gaps=gaps, gpu=self.device.gpu)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; each access looks again for missing files.

        Raises:
            CheckpointError: The files are missing; the message has the name of one.
        """
        if isinstance(self._tokenizer, NoTokenizer):
            self._tokenizer = Tokenizer.from_folder(self._tokenizer.folder, self.config.eos_ids)
        return self._tokenizer

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._engine.plan

    @property
    def device(self) -> Device:
        """The opened device."""
        return self._engine.device

    @property
    def context(self) -> int:
        """Number of positions of a session."""
        return self._engine.context

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint; None if the weights were made without one."""
        return self._weights.checkpoint

    @cached_property
    def pooling(self) -> Pooling | None:
        """The pooling that the checkpoint declares; None if it declares none.

        Raises:
            CheckpointError: A file of it is damaged.
            UnsupportedModelError: It is another than last token or mean.
        """
        return None if self.checkpoint is None else read_pooling(self.checkpoint.folder)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling that the checkpoint recommends.

        Raises:
            CheckpointError: The checkpoint's file is damaged.
        """
        checkpoint = self.checkpoint
        return SamplingDefaults() if checkpoint is None else read_sampling_defaults(checkpoint.folder)

    @property
    def session_bytes(self) -> int:
        """Memory of a session, and of the draft's session that belongs to it."""
        engines = (self._engine,) if self._draft is None else (self._engine, self._draft)
        return sum(engine.state_bytes for engine in engines)

    @property
    def notes(self) -> tuple[str, ...]:
        """Deviations from the request, the reason for the choice of device ``auto``, and :attr:`failures`."""
        reason = self.device.reason
        chosen = (f"device auto chose {self.device.name}: {reason}",) if reason else ()
        every = (
            *(*chosen, *self._plan_notes, *self._weights.notes),
            *(*self.device.gpu.variants.notes, *self.pass_notes),
        )
        return tuple(dict.fromkeys(every))

    @property
    def plan_notes(self) -> tuple[str, ...]:
        """Differences of the plan from the request, with the reason."""
        return self._plan_notes

    @property
    def pass_notes(self) -> tuple[str, ...]:
        """Notes on the passes so far: saturated values, experts on the NPU, and :attr:`failures`."""
        engine, thread = self._engine, self._thread
        passes = () if thread.closed else thread.run(lambda: engine.pass_notes)
        return (*passes, *self.failures)

    @property
    def failures(self) -> tuple[str, ...]:
        """Failures of the NPU after which the GPU continued alone, if ``allow_fallback`` allows it."""
        draft = () if self._draft is None else self._draft.notes
        return (*self._engine.notes, *(f"Draft model: {note}" for note in draft))

    @property
    def expert_reads(self) -> ExpertReads | None:
        """Counts of the experts that were in memory and of those that were read, since the load.

        None if ``experts_gib`` does not limit the memory of experts.
        """
        return self._thread.run(lambda: self._engine.expert_reads)

    def reference_state_dict(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the runtime's tensors, as float32, by their Hugging Face names.

        One tensor at a time, so that a comparison with transformers needs no memory for two models.
        """
        return self._weights.reference_state_dict()

    def on_engine_thread(self, call: Callable[[], T]) -> T:
        """Run a call on the engine thread, which the in-place methods of sessions need.

        Raises:
            EngineError: The model is closed.
        """
        return self._thread.run(call)

    def steps(self, phase: Phase, tokens: int) -> tuple[Step, ...]:
        """Return the steps of a pass and its head in an empty session.

        Equal passes have equal steps, so that the work of two plans can be compared.

        Args:
            phase: ``prefill`` computes the logits of the last token, ``decode`` those of every token.
            tokens: Tokens of the pass.

        Raises:
            OptionError: No pass has this number of tokens.
        """
        return self._thread.run(lambda: self._engine.steps(phase, tokens))

    def take_trace(self) -> Trace:
        """Return the trace since the model was loaded or since the last call, and forget it.

        Raises:
            OptionError: The model was not loaded with ``trace=True``.
        """
        return self._thread.run(lambda: take_trace(self._engine))

    def close(self) -> None:
        """Finish the queued calls and free the model; later calls raise. May be called twice."""
        self._thread.close(self._close)

    def _close(self) -> None:
        if self._draft is not None:
            self._draft.release()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
