"""The token loop, independent of devices: prefill, then sample and decode until a stop condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Protocol, Self

import numpy as np

from heterollm.base import ContextError, EngineError, InputError, OptionError
from heterollm.text.sampling import Logits, LogProbabilities, Sampler, TokenIds, TopTokens
from heterollm.text.sampling_options import SamplingOptions
from heterollm.text.speculation import Speculation, SpeculationResult

LEAST_PREFILL_TOKENS: Final = 32
LEAST_DECODE_TOKENS: Final = 8
"""Fewer tokens have no rate."""

StopReason = Literal["eos", "complete", "stop", "length", "context", "cancelled"]
"""The reason for an answer's end: an end token, the end of its schema or grammar, a stop string, the
requested length, a full context, the caller.

Only an answer that ends as ``complete`` has all of its JSON or grammar; every other end cuts it."""


class TokenSource(Protocol):
    """Computes logits, as a session of the engine does: float32 ``[vocab]``, valid until the next call."""

    @property
    def position(self) -> int:
        """Tokens that the source holds."""

    @property
    def context(self) -> int:
        """Tokens that the source can hold."""

    def prefill(self, ids: Sequence[int], /) -> Logits:
        """Append tokens and return the logits after the last one; a cancelled answer does not read them."""

    def decode(self, token_id: int, /) -> Logits:
        """Append one token and return the logits after it."""


class TokenConstraint(Protocol):
    """The tokens that an answer may consist of."""

    def allowed(self, logits: Logits, /) -> Logits:
        """Return the logits with −∞ for each token that may not come next, valid until the next call."""

    def accept(self, token_id: int, /) -> bool:
        """Take the next token; return whether the answer is complete with it."""


class TextDecoder(Protocol):
    """Decodes ids that arrive one at a time."""

    def push(self, token_id: int, /) -> str:
        """Take one id and return the text that is complete with it."""

    def flush(self) -> str:
        """Return the text that is held back, if it consists of whole characters."""

    def finish(self) -> str:
        """Return the text that was held back."""


class StreamingTokenizer(Protocol):
    """The part of a tokenizer that the loop needs."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The spelling of each id without text."""

    def stream_decoder(self) -> TextDecoder:
        """Return a new decoder."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The limits, sampling and stop conditions of an answer.

    Args:
        max_new_tokens: Upper limit; None for as many as the context holds.
        sampling: The choice of tokens.
        stop: Texts that end the answer and are not part of it.
        ignore_eos: Continue after end tokens.
        log_probabilities: Report the model's log-probability of every token.
        top_log_probabilities: Report, for every token, this many of the likeliest ones with their
            log-probabilities; includes ``log_probabilities``.
        json_schema: JSON Schema that the answer follows, as text or as an object.
        json_object: The answer is a JSON object.
        grammar: Lark grammar that the answer follows, in llguidance's dialect.

    Raises:
        OptionError: A value is illegal.
    """

    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    log_probabilities: bool = False
    top_log_probabilities: int = 0
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    grammar: str | None = None

    def __post_init__(self) -> None:
        limit = self.max_new_tokens
        if limit is not None and (type(limit) is not int or limit < 0):
            raise OptionError(f"max_new_tokens is {limit!r}, but must be a whole number of at least 0.")
        if not isinstance(self.stop, tuple) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise OptionError(f"stop is {self.stop!r}, but must be a tuple of texts, none empty.")
        for stop in self.stop:
            if any(0xD800 <= ord(character) <= 0xDFFF for character in stop):
                raise OptionError(
                    f"stop is {stop!r:.80}, which no text holds.", fix="Remove lone surrogates."
                )
        top = self.top_log_probabilities
        if type(top) is not int or top < 0:
            raise OptionError(f"top_log_probabilities is {top!r}, but must be a whole number of at least 0.")
        for name, kinds, wanted in _STRUCTURES:
            if not isinstance(getattr(self, name), kinds):
                raise OptionError(f"{name} is {getattr(self, name)!r:.80}, but must be {wanted}.")
        given = [name for name, *_ in _STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} are both given.", fix="Give one of them.")
        if given and self.ignore_eos:
            raise OptionError(
                f"ignore_eos and {given[0]} are both given, but a complete answer ends.", fix="Leave out one."
            )

    @property
    def is_structured(self) -> bool:
        """Whether the answer follows a schema or grammar."""
        return self.json_object or self.json_schema is not None or self.grammar is not None

    @property
    def wants_log_probabilities(self) -> bool:
        """Whether the steps have log-probabilities."""
        return self.log_probabilities or self.top_log_probabilities > 0


_STRUCTURES: Final = (
    ("json_schema", str | Mapping | None, "JSON text or an object"),
    ("json_object", bool, "True or False"),
    ("grammar", str | None, "the text of a Lark grammar"),
)


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One token of an answer.

    Args:
        text: Text that is complete with this token, possibly none: it may wait for the rest of a character
            or of a possible stop string. Empty if the checkpoint has no tokenizer.
        token_id: The token, end tokens included.
        log_probability: Natural logarithm of the model's probability of the token, if requested; before a
            constraint and the filters of sampling.
        top_log_probabilities: The likeliest tokens at this place with their log-probabilities, if requested.
    """

    text: str
    token_id: int
    log_probability: float | None = None
    top_log_probabilities: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished answer; a rate without a measurement is None.

    Args:
        text: The texts of all steps, joined; empty if the checkpoint has no tokenizer.
        token_ids: All generated tokens, including an end token or those of a stop string.
        prompt_tokens: Length of the whole prompt.
        generated_tokens: Length of ``token_ids``.
        stop_reason: The reason for the end.
        ttft_s: Seconds from the start to the first token.
        prefill_tokens_per_s: Rate of the tokens that were prefilled, without reused ones. There is none of a
            pass that was compiled for this prompt, nor of fewer than 32 tokens.
        decode_tokens_per_s: Rate of those tokens for which no pass was compiled, if they are at least eight.
        log_probabilities: One value for each token, if requested.
        top_log_probabilities: The likeliest tokens at the place of each token, if requested.
        speculation: The guesses, if there were any to make.
        prepared_s: Seconds in which passes were compiled.
        decode_s: Seconds of the tokens after the first, without the caller's time between them.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    generated_tokens: int
    stop_reason: StopReason
    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    log_probabilities: tuple[float, ...] | None = None
    top_log_probabilities: tuple[TopTokens, ...] | None = None
    speculation: SpeculationResult | None = None
    prepared_s: float = 0.0
    decode_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


class StopStrings:
    """Finds non-empty stop strings in text that arrives in pieces.

    The stop string that completes first ends the text, and the longest of those that complete at the same
    character. The division into pieces does not matter.

    Args:
        stops: The stop strings.
    """

    __slots__ = ("_held", "_hidden", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        # Whether each character of it is of a special token, which has no text.
        self._hidden: list[bool] = []

    def push(self, piece: str, *, hidden: bool = False) -> tuple[str, bool]:
        """Return the text that cannot belong to a stop string, and whether one is complete.

        Args:
            piece: The next piece of the text.
            hidden: Whether it is the spelling of a special token, which is never returned.
        """
        text = self._held + piece
        self._hidden += [hidden] * len(piece)
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            shown = self._shown(text, min(found)[1])
            self._held, self._hidden = "", []
            return shown, True
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return self._shown(text, len(text) - length), False
        return self._shown(text, len(text)), False

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._shown(self._held, len(self._held))

    def _shown(self, text: str, count: int) -> str:
        """Return the visible ones of the first characters, and hold the others back."""
        shown = "".join(text[i] for i in range(count) if not self._hidden[i])
        self._held = text[count:]
        del self._hidden[:count]
        return shown


class Generation:
    """An iterator of the tokens of one answer; :attr:`result` holds the answer after the last token.

    Prompt and answer together fill at most the context. An error of the source ends the iteration.

    Args:
        source: Holds the first ``reused`` tokens of the prompt and no others.
        tokenizer: Decodes tokens and names the end tokens.
        prompt_ids: The whole prompt.
        options: Limits, sampling and stop conditions.
        reused: Number of leading prompt tokens in the source, fewer than the prompt has.
        constraint: Allows the tokens of the options' schema or grammar, and no others.
        speculation: Decodes with guesses, in the same source; None to decode one token at a time.
        cancel: Ends the answer before the next token, the first one too, when any thread sets it. Text that
            is held back is lost.
        clock: Returns seconds from any fixed moment; the host's clock by default.

    Raises:
        InputError: The prompt is empty, longer than the context, does not continue the source's tokens, or
            holds something other than token ids.
    """

    def __init__(
        self,
        source: TokenSource,
        tokenizer: StreamingTokenizer,
        prompt_ids: Sequence[int],
        options: GenerationOptions,
        *,
        reused: int = 0,
        constraint: TokenConstraint | None = None,
        speculation: Speculation | None = None,
        cancel: threading.Event | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        _check_prompt(source, prompt_ids, reused)
        self._source = source
        self._clock = clock or time.perf_counter
        self._options = options
        self._prompt_ids = prompt_ids
        self._reused = reused
        self._constraint = constraint
        self._speculation = speculation
        self._cancel = cancel or threading.Event()
        self._eos_ids = frozenset() if options.ignore_eos else tokenizer.eos_ids
        self._decoder = tokenizer.stream_decoder()
        self._stops = StopStrings(options.stop)
        special = tokenizer.special_tokens if options.stop else {}
        self._stop_names = {
            token: name for token, name in special.items() if any(name in stop for stop in options.stop)
        }
        self._sampler: Sampler | None = None
        self._probabilities: LogProbabilities | None = None
        self._logits: Logits | None = None
        room = source.context - len(prompt_ids)
        wanted = options.max_new_tokens
        self._at_limit: StopReason = "length" if wanted is not None and wanted <= room else "context"
        self._limit = room if wanted is None else min(wanted, room)
        # Prompt and answer, allocated once.
        self._history: TokenIds = np.empty(len(prompt_ids) + self._limit, np.int64)
        self._history[: len(prompt_ids)] = prompt_ids
        self._log_probabilities = np.empty(self._limit if options.wants_log_probabilities else 0)
        self._top_log_probabilities: list[TopTokens] = []
        self._count = 0
        self._texts: list[str] = []
        self._prefill_s = self._ttft_s = self._decode_s = self._prepared_s = 0.0
        self._rate_s, self._rate_tokens, self._prefill_prepared = 0.0, 0, False
        self._result: GenerationResult | None = None
        self._closed = False

    def __iter__(self) -> Iterator[GenerationStep]:
        return self

    def __next__(self) -> GenerationStep:
        if self._closed:
            raise StopIteration
        if self._cancel.is_set():
            self._finish("cancelled")
            raise StopIteration
        if self._count == self._limit:
            self._finish(self._at_limit)
            raise StopIteration
        try:
            step = self._step()
        except BaseException:
            self._closed = True
            self._forget_guesses()
            raise
        if step is None:
            self._finish("cancelled")
            raise StopIteration
        return step

    @property
    def finished(self) -> bool:
        """Whether no further token follows."""
        return self._closed

    @property
    def result(self) -> GenerationResult:
        """The finished answer.

        Raises:
            EngineError: The answer is unfinished, or an error ended it.
        """
        if self._result is None:
            raise EngineError(
                "The answer is not finished.", fix="Iterate to the end, or call run() or close() first."
            )
        return self._result

    def run(self) -> GenerationResult:
        """Generate to the end and return the finished answer."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Cancel the answer; does nothing after its end."""
        if not self._closed:
            self._finish("cancelled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _step(self) -> GenerationStep | None:
        """Return the next step; None if the answer was cancelled while the source read the prompt."""
        begin, prepared_s = self._clock(), _prepared_s(self._source)
        if self._logits is None or self._sampler is None:
            self._logits = self._source.prefill(self._prompt_ids[self._reused :])
            if self._cancel.is_set():
                return None
            self._prefill_s = self._clock() - begin
            self._sampler = Sampler(
                self._options.sampling, len(self._logits), prompt_tokens=len(self._prompt_ids)
            )
            if self._options.wants_log_probabilities:
                most = self._options.top_log_probabilities
                self._probabilities = LogProbabilities(len(self._logits), most)
        else:
            end = len(self._prompt_ids) + self._count
            if self._speculation is None:
                self._logits = self._source.decode(int(self._history[end - 1]))
            else:
                most = self._limit - self._count - 1
                self._logits = self._speculation.decode(self._history, end, most)
        new_s = _prepared_s(self._source) - prepared_s
        return self._accept(self._sampler, self._logits, begin, new_s)

    def _accept(self, sampler: Sampler, logits: Logits, begin: float, new_s: float) -> GenerationStep:
        """Return the step of a token sampled from logits: when it began, and how long it compiled."""
        end = len(self._prompt_ids) + self._count
        history = self._history[:end] if sampler.uses_history else self._history
        constraint, speculation = self._constraint, self._speculation
        allowed = logits if constraint is None else constraint.allowed(logits)
        if speculation is None:
            token = sampler.sample(allowed, history)
        else:
            token = speculation.sample(sampler, allowed, history)
        log_probability = top = None
        if self._probabilities is not None:
            self._probabilities.read(logits)
            log_probability = self._log_probabilities[self._count] = self._probabilities.of(token)
            if self._options.top_log_probabilities:
                top = self._probabilities.likeliest()
                self._top_log_probabilities.append(top)
        self._history[end] = token
        self._count += 1
        reason: StopReason | None = None
        text, stopped = self._stops.push(self._decoder.push(token))
        if not stopped and (name := self._stop_names.get(token)) is not None:
            text, stopped = self._push_special(text, name)
        if stopped:
            reason = "stop"
        elif constraint is not None and constraint.accept(token):
            reason = "complete"
        elif token in self._eos_ids:
            reason = "eos"
        elif self._count == self._limit:
            reason = self._at_limit
        if reason is not None and not stopped:
            rest, stopped = self._stops.push(self._decoder.finish())
            text += rest + self._stops.finish()
            reason = "stop" if stopped else reason
        self._texts.append(text)
        self._prepared_s += new_s
        if self._count == 1:
            self._ttft_s, self._prefill_prepared = self._clock() - begin, new_s > 0
        else:
            took_s = self._clock() - begin
            self._decode_s += took_s
            if not new_s:
                self._rate_s, self._rate_tokens = self._rate_s + took_s, self._rate_tokens + 1
        if reason is not None:
            self._finish(reason)
        return GenerationStep(text, token, log_probability, top)

    def _push_special(self, text: str, name: str) -> tuple[str, bool]:
        """Return the text behind a special token that stop strings name, and whether one is complete."""
        rest, stopped = self._stops.push(self._decoder.flush())
        text += rest
        if not stopped:
            rest, stopped = self._stops.push(name, hidden=True)
            text += rest
        return text, stopped

    def _forget_guesses(self) -> None:
        """Leave in the source what plain decoding leaves: all tokens but the last one."""
        if self._speculation is not None and self._count:
            self._speculation.forget(len(self._prompt_ids) + self._count - 1)

    def _finish(self, reason: StopReason) -> None:
        self._closed = True
        self._forget_guesses()
        prompt = len(self._prompt_ids)
        prefilled = prompt - self._reused
        wanted = self._options
        values = self._log_probabilities[: self._count]
        tops = tuple(self._top_log_probabilities)
        self._result = GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(self._history[prompt : prompt + self._count].tolist()),
            prompt_tokens=prompt,
            generated_tokens=self._count,
            stop_reason=reason,
            ttft_s=self._ttft_s if self._count else None,
            prefill_tokens_per_s=None if self._prefill_prepared else prefill_rate(prefilled, self._prefill_s),
            decode_tokens_per_s=decode_rate(self._rate_tokens, self._rate_s),
            log_probabilities=tuple(values.tolist()) if wanted.wants_log_probabilities else None,
            top_log_probabilities=tops if wanted.top_log_probabilities else None,
            speculation=None if self._speculation is None else self._speculation.result,
            prepared_s=self._prepared_s,
            decode_s=self._decode_s,
        )


def prefill_rate(tokens: int, seconds: float) -> float | None:
    """Return a prompt's tokens per second; None for so few that they take the time of one pass."""
    return tokens / seconds if tokens >= LEAST_PREFILL_TOKENS and seconds > 0 else None


def decode_rate(tokens: int, seconds: float) -> float | None:
    """Return the tokens per second of an answer; None for too few to be a rate."""
    return tokens / seconds if tokens >= LEAST_DECODE_TOKENS and seconds > 0 else None


def _prepared_s(source: TokenSource) -> float:
    """Return the time in which a source's engine has compiled passes, if it has an engine."""
    seconds: float = getattr(source, "prepared_s", 0.0)
    return seconds


def _check_prompt(source: TokenSource, prompt_ids: Sequence[int], reused: int) -> None:
    if len(prompt_ids) == 0:
        raise InputError("The prompt has no tokens.", fix="Give at least one word.")
    if len(prompt_ids) > source.context:
        raise ContextError(
            f"The prompt has {len(prompt_ids)} tokens, but the context holds {source.context}.",
            fix="Shorten the prompt or load the model with a larger context.",
        )
    if source.position != reused or not 0 <= reused < len(prompt_ids):
        raise InputError(
            f"The session holds {source.position} tokens, of which {reused} are to begin a prompt of"
            f" {len(prompt_ids)}.",
            fix="Truncate the session to the shared beginning, which must leave one token to prefill.",
        )
    if not all(isinstance(index, int | np.integer) and 0 <= index < 1 << 31 for index in prompt_ids):
        raise InputError("The prompt holds something that is not a token id.", fix="Encode the text first.")
