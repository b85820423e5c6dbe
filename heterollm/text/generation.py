"""The options, steps and result of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from heterollm.base import OptionError
from heterollm.text.sampling import TopTokens
from heterollm.text.sampling_options import SamplingOptions
from heterollm.text.speculation import SpeculationResult

LEAST_PREFILL_TOKENS: Final = 32
LEAST_DECODE_TOKENS: Final = 8
"""Fewer tokens have no rate."""

StopReason = Literal["eos", "complete", "stop", "length", "context", "cancelled"]
"""The reason for an answer's end: an end token, the end of its schema or grammar, a stop string, the
requested length, a full context, the caller.

Only an answer that ends as ``complete`` has all of its JSON or grammar; every other end cuts it."""


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
        marks: Ids of tokens that have no text, whatever the tokenizer says, and before which no text waits.

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
    marks: tuple[int, ...] = ()

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
        if not isinstance(self.marks, tuple) or not all(type(one) is int and one >= 0 for one in self.marks):
            raise OptionError(f"marks is {self.marks!r:.80}, but must be a tuple of token ids.")
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
        reasoning: Reasoning before the answer to a dialogue, which is no part of ``text``.
    """

    text: str
    token_id: int
    log_probability: float | None = None
    top_log_probabilities: TopTokens | None = None
    reasoning: str = ""


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
        reasoning: Reasoning before the answer to a dialogue, which is no part of ``text``.
        raw_text: The text with the reasoning and all its marks, as the tokens spell it; None where the model
            does not reason, so that it is ``text``.
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
    reasoning: str = ""
    raw_text: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def prefill_rate(tokens: int, seconds: float) -> float | None:
    """Return a prompt's tokens per second; None for so few that they take the time of one pass."""
    return tokens / seconds if tokens >= LEAST_PREFILL_TOKENS and seconds > 0 else None


def decode_rate(tokens: int, seconds: float) -> float | None:
    """Return the tokens per second of an answer; None for too few to be a rate."""
    return tokens / seconds if tokens >= LEAST_DECODE_TOKENS and seconds > 0 else None
