"""The public API: loads a model, plans and compiles it for a device, and generates answers.

Start reading the code here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from heterollm.base import (
    ContextError,
    EngineError,
    HeteroLLMError,
    InputError,
    OptionError,
    Progress,
    UnsupportedModelError,
    check_keywords,
    parse_json,
    silent,
)
from heterollm.drafting import planned_draft, speculator_of
from heterollm.engine import (
    AnswerKeywords,
    DividedAnswer,
    EngineThread,
    PooledStates,
    Session,
    Stream,
    check_dimensions,
    check_ids,
)
from heterollm.loaded import LoadedModel
from heterollm.loading import PlannedModel, SourceModel, open_for
from heterollm.model import Pooling
from heterollm.planning import CoreSplit, LoadKeywords, choose_context
from heterollm.text import GenerationOptions, GenerationResult, Message, SamplingOptions, TokenSequence
from heterollm.tools import ChatRequest, ReplyForm, chat_prompt


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise EngineError(
            f"The memory ran out while the model was loaded. {error}".strip(),
            fix="Close other programs, use a smaller context, or choose the plan level gpu.",
        ) from error


def _whole(stream: Stream) -> GenerationResult:
    try:
        return stream.result
    except BaseException:
        stream.close()
        raise


class LLM(LoadedModel):
    """A loaded model on an opened device, made by :meth:`load`: use it as a context manager, or close it."""

    @classmethod
    @_enough_memory()
    def load(
        cls, model: str | Path, *, progress: Progress | None = None, **options: Unpack[LoadKeywords]
    ) -> Self:
        """Load a checkpoint and prepare it for answers.

        Args:
            model: A local folder, a GGUF file or a hub name; or the folder of an exported model, which has a
                device, a plan and formats of its own.
            progress: Called with the name of a stage, the steps done and the total number of steps.
            options: The fields of :class:`heterollm.planning.LoadOptions`: ``device``, ``plan``, ``request``,
                ``precision``, ``group_size``, ``symmetric``, ``scales``, ``calibration``, ``context``,
                ``gpu_threads``, ``npu_threads``, ``power``, ``allow_slow``, ``sync``, ``length_policy``,
                ``kv_bits``, ``allow_fallback``, ``trace``, ``experts_gib``, ``lora``, ``speculative`` and
                ``guesses``.

        Raises:
            HeteroLLMError: The checkpoint, device, plan or an option is unusable.
        """
        stopped = threading.Event()

        def report(stage: str, done: int, total: int) -> None:
            if stopped.is_set():
                raise EngineError("Loading was stopped.")
            (progress or silent)(stage, done, total)

        check_keywords(options, LoadKeywords.__annotations__)
        source, asked = SourceModel.find(model, options, report)
        context = choose_context(source.config, asked.context)
        thread = EngineThread()
        try:
            cores = CoreSplit(asked, source.config, context)
            report("Opening the device", 0, 1)
            opened = thread.run(lambda: open_for(asked, cores))
            report("Opening the device", 1, 1)
            if opened.power != "default" and opened.power_switch is not None:
                thread.rest_when_idle(opened.power_switch)
            # Before weights are read: quantising a model that cannot run would waste time.
            report("Planning", 0, 1)
            planned = PlannedModel.of(
                source, asked, opened, thread, context, cores.reason_for(opened), report
            )
            drafting = planned_draft(planned, thread)
            report("Planning", 1, 1)
            weights, engine = planned.start(thread, report)
            draft = None if drafting is None else drafting.start(thread, report)[1]
            speculator = thread.run(lambda: speculator_of(planned, engine, draft, thread, report))
        except BaseException:
            # Ctrl-C interrupts this thread; the engine thread ends at its next report of progress.
            stopped.set()
            thread.close()
            raise
        notes = planned.notes if drafting is None else (*planned.notes, *drafting.draft_notes)
        made = cls(source.config, source.tokenizer, weights, engine, thread, notes)
        made._speculator, made._draft = speculator, draft
        return made

    # -- answers -------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], **options: Unpack[AnswerKeywords]) -> GenerationResult:
        """Return the whole answer to a prompt; options and errors are those of :meth:`stream`."""
        return _whole(self.stream(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[AnswerKeywords]) -> GenerationResult:
        """Return the whole answer to a dialogue; options and errors are those of :meth:`stream_chat`."""
        return _whole(self.stream_chat(messages, **options))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[AnswerKeywords]) -> Stream:
        """Start the answer to a dialogue, rendered with the model's chat template.

        The text of steps and result is the answer; reasoning before it, if the model reasons, stands apart in
        ``reasoning``. A result's ``raw_text`` has all of it.

        Args:
            messages: Role and content of each message, oldest first: ``{"role": "user", "content": "Hi"}``.
            options: Those of :meth:`stream`. The session reuses the part of the dialogue that it holds.

        Raises:
            OptionError: An option is illegal.
            InputError: A message is malformed, the dialogue is empty or too long, or the template refuses it.
            CheckpointError: The checkpoint has no tokenizer, or its template is damaged.
        """
        if not isinstance(messages, Iterable):
            raise InputError(f"{messages!r:.80} is no dialogue.", fix="Give a list of messages.")
        messages = tuple(messages)  # an iterator gives them once
        for message in messages:
            sound = isinstance(message, Mapping) and set(message) == {"role", "content"}
            if not sound or not all(isinstance(text, str) for text in message.values()):
                raise InputError(
                    f"{message!r:.80} is no message.", fix="Give dictionaries of two texts, role and content."
                )
        check_keywords(options, AnswerKeywords.__annotations__)
        request = ChatRequest(dialogue=messages, final=_schema(options))
        prompt = chat_prompt(self.tokenizer, request, self.context)
        given, form = prompt.answer_options(options)
        given["stop"] = (*_stop_strings(options.get("stop", ())), *self.tokenizer.chat_stop_strings)
        return self._stream(prompt.ids, form, cast("AnswerKeywords", given))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[AnswerKeywords]) -> Stream:
        """Start an answer and return an iterator of its steps.

        Args:
            prompt: Text or token ids. Text, here and in ``stop``, needs the checkpoint's tokenizer; without
                one the text of an answer is empty.
            session: The session of the prompt, by default one of the model's own. It reuses the tokens that
                it shares with the prompt, and forgets its others.
            max_new_tokens: Upper limit; None for as many as the context holds.
            temperature: 0 takes the likeliest token every time.
            top_k: Sample among this many of the likeliest tokens; 0 among all.
            top_p: Sample among the fewest likeliest tokens that reach this probability.
            min_p: Exclude tokens less likely than this fraction of the likeliest.
            repetition_penalty: Above 1 makes earlier tokens less likely.
            presence_penalty: Above 0 makes the answer's earlier tokens less likely.
            frequency_penalty: The same for each time that the answer has a token.
            logit_bias: Added to the logits of tokens, by id.
            seed: Makes sampling repeatable.
            stop: Texts that end the answer; the spelling of a special token matches the token, too.
            ignore_eos: Continue after end tokens.
            log_probabilities: Report every token's log-probability.
            top_log_probabilities: Report this many of the likeliest tokens at the place of each token, with
                their log-probabilities; includes ``log_probabilities``.
            json_schema: JSON Schema that the answer follows, as text or as an object.
            json_object: The answer is a JSON object.
            grammar: Lark grammar that the answer follows, in llguidance's dialect. These three exclude one
                another and need the extra ``grammar``; the answer has all of its text if its
                ``stop_reason`` is ``complete``.
            marks: Ids of tokens without text, such as those around calls of tools: no text waits before them.
            speculate: Whether to guess tokens, if the model was loaded with ``speculative``.
            progress: Called on the engine's thread with the name of a stage, tokens read and tokens in all,
                while a prompt of 128 tokens or more is read; not on a simulated device.

        Raises:
            OptionError: An option is illegal.
            InputError: The prompt is empty, longer than the context, or not token ids of this model; or the
                schema or grammar is illegal.
            CheckpointError: The call has text, and the checkpoint has no tokenizer.
        """
        return self._stream(prompt, None, options)

    def _stream(self, prompt: str | Sequence[int], form: ReplyForm | None, options: AnswerKeywords) -> Stream:
        """Start an answer that is divided in a form, if there is one."""
        answer = self.prepare(prompt, **options)
        target = options.get("session")
        if target is None:
            target = self._own_session = self._own_session or self.session()
        if not isinstance(target, Session):
            raise OptionError(f"session is {target!r:.80}.", fix="Use this model's session().")
        if not target.belongs_to(self._engine):
            raise OptionError("The session was made by another model.", fix="Use this model's session().")

        # Looking at the progress would take simulated time.
        progress = None if self.device.time_kind == "simulated" else options.get("progress")
        divided = None if form is None else DividedAnswer(form, self.tokenizer, answer)
        return Stream(self._thread, answer, target, progress, divided)

    def prepare(self, prompt: str | Sequence[int], **options: Unpack[AnswerKeywords]) -> TokenSequence:
        """Check a prompt and the options of its answer, for a task of a scheduler.

        Arguments and errors are those of :meth:`stream`; ``session`` and ``progress`` are not read.
        """
        asked = _generation_options(options)
        speculate = options.get("speculate", True)
        if not isinstance(speculate, bool):
            raise OptionError(f"speculate is {speculate!r:.80}, but must be True or False.")
        # Stop strings need text.
        tokenizer = self.tokenizer if asked.stop else self._tokenizer
        given = self.tokenizer.encode(prompt, most_tokens=self.context) if isinstance(prompt, str) else prompt
        ids = check_ids(given, self.config.vocab_size)
        if any(token >= self.config.vocab_size for token in asked.sampling.logit_bias):
            raise OptionError(
                f"logit_bias names token {max(asked.sampling.logit_bias)}, but the model's last one is "
                f"{self.config.vocab_size - 1}."
            )
        constraint = self._grammar_tokens.constraint(asked) if asked.is_structured else None
        return TokenSequence(
            *(tokenizer, ids, asked),
            context=self.context,
            constraint=constraint,
            speculator=self._speculator if speculate else None,
            clock=self.device.now_s,
        )

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """Return the embeddings of texts, by the pooling that the checkpoint declares.

        Args:
            texts: Texts, or token ids with all that belongs around a text.
            dimensions: Leading elements to keep, as some models allow; the result has the length 1 again.

        Returns:
            float32 ``[n, hidden]``, or ``[n, dimensions]``.

        Raises:
            InputError: A text has no token or too many.
            OptionError: An embedding has fewer elements.
            UnsupportedModelError: The checkpoint declares no pooling, or another than last token or mean.
        """
        check_dimensions(dimensions, self.config.hidden_size)
        prepared = [self.embedding_ids(text) for text in texts]
        return np.stack([self.embedding(ids, dimensions=dimensions) for ids in prepared])

    def embedding_ids(self, text: str | Sequence[int], *, cut: bool = False) -> NDArray[np.int32]:
        """Return the tokens of a text whose embedding is wanted; errors as for :meth:`embed`.

        Args:
            text: The text, or its token ids.
            cut: Whether to leave out the end of a text that is too long.
        """
        pooling = self._needed_pooling()
        most = min(self.context, pooling.most_tokens or self.context)
        if isinstance(text, str):
            text = self.tokenizer.encode_whole(pooling.prompt + text, most_tokens=most, cut=cut)
        ids = check_ids(text, self.config.vocab_size)
        if len(ids) > most and not cut:
            raise ContextError(f"The text has {len(ids)} tokens, but the model takes {most}.")
        return ids[:most]

    def embedding(
        self,
        ids: NDArray[np.int32],
        *,
        dimensions: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> NDArray[np.float32]:
        """Return the embedding of tokens, float32 ``[hidden]``; other calls may run between their chunks.

        Args:
            ids: Those that :meth:`embedding_ids` returned.
            dimensions: As for :meth:`embed`.
            stopped: Called after each chunk; True ends the call with an error.

        Raises:
            EngineError: The call was stopped, or a processor failed.
        """
        with self._embedding_lock:
            session = self._embedding_session = self._embedding_session or self.session()
            while True:
                failures, pooled = len(self.failures), PooledStates(self._needed_pooling())
                try:
                    for rows in session.states(ids):
                        pooled.add(rows)
                        if stopped():
                            raise EngineError("The embedding was stopped.")
                except HeteroLLMError:
                    # The GPU continues alone, with the whole text.
                    if len(self.failures) == failures:
                        raise
                else:
                    return pooled.embedding(dimensions)

    def _needed_pooling(self) -> Pooling:
        if self.pooling is None:
            raise UnsupportedModelError(
                "The checkpoint declares no pooling (modules.json of sentence-transformers).",
                fix="Use a model made for embeddings, such as Qwen3-Embedding.",
            )
        return self.pooling


_NO_LIMITS: Final = ("session", "speculate", "progress")
"""Options of an answer that are no limits, stop conditions or sampling parameters."""


def _generation_options(options: AnswerKeywords) -> GenerationOptions:
    check_keywords(options, AnswerKeywords.__annotations__)
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in _NO_LIMITS}
    sampling = {name: given.pop(name) for name in SamplingOptions.__annotations__ if name in given}
    stop = _stop_strings(given.pop("stop", ()))
    return GenerationOptions(sampling=SamplingOptions(**sampling), stop=stop, **given)


def _schema(options: AnswerKeywords) -> Mapping[str, Any] | None:
    """Return the schema of an answer, if it has one and no grammar; wrong options have their error later."""
    if options.get("grammar") is not None:
        return None
    schema = {"type": "object"} if options.get("json_object") else options.get("json_schema")
    if isinstance(schema, str):
        with contextlib.suppress(ValueError, RecursionError):
            schema = parse_json(schema)
    return schema if isinstance(schema, Mapping) else None


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,) if stop else ()
    if not isinstance(stop, list | tuple):
        raise OptionError(f"stop is {stop!r}, but must be a text or a list of texts.")
    return tuple(stop)
