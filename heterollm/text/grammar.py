"""Structured answers: llguidance, an extra, says which tokens keep an answer within its schema or grammar."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np

from heterollm.base import CheckpointError, GrammarError, OptionError, parse_json
from heterollm.text.generation import GenerationOptions
from heterollm.text.grammar_compiler import compiled, error_of, on_stack
from heterollm.text.grammar_trial import is_plain, refusal_of
from heterollm.text.grammar_vocabulary import GrammarVocabulary
from heterollm.text.sampling import Logits
from heterollm.text.stream_decoder import LIBRARY
from heterollm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

WORD_BITS: Final = 32
BIT_VALUES: Final = 1 << np.arange(8, dtype=np.uint8)
WHITESPACE: Final = r"( |\r?\n[ \t]{0,32})?"
"""Between JSON's symbols: a space, or a new line and its indentation. A weak model would never end more."""


KEPT: Final = 4
"""Compiled grammars that stay in memory: all answers to a request have the same one, and an agent's turns."""


def check_structure(options: GenerationOptions) -> None:
    """Check an answer's schema or grammar, if it has one, without a tokenizer.

    Raises:
        OptionError: llguidance is not installed.
        GrammarError: The schema or grammar is illegal, too large or too complex, or uses a part that
            llguidance does not know.
    """
    if options.is_structured:
        matcher, grammar = _library().LLMatcher, _tried_grammar(options)
        wrong, messages = on_stack(lambda: matcher.validate_grammar_with_warnings(grammar))
        if wrong:
            raise _refusal(messages[0])


class GrammarTokens:
    """A tokenizer's vocabulary as bytes, prepared once for the constraints of many answers.

    Args:
        tokenizer: The checkpoint's tokenizer.
        vocab_size: Length of the model's logits.

    Raises:
        OptionError: llguidance is not installed.
        CheckpointError: llguidance cannot use the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        library = _library()
        self._vocab_size = vocab_size
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._vocabulary = GrammarVocabulary(tokenizer, max(vocab_size, tokenizer.vocab_size))
        eos_ids = sorted(tokenizer.eos_ids)
        try:
            with LIBRARY:
                self._tokens = library.LLTokenizer(
                    library.TokenizerWrapper(self._vocabulary), eos_token=eos_ids or None
                )
        except ValueError as error:
            raise CheckpointError(
                f"llguidance cannot use the checkpoint's tokenizer: {error}.",
                fix="Leave out the schema or grammar.",
            ) from error

    def constraint(self, options: GenerationOptions) -> Constraint | None:
        """Return the constraint of an answer's schema or grammar; None without one.

        Raises:
            GrammarError: The schema or grammar is illegal, too large or too complex, or uses a part that
                llguidance does not know.
        """
        if not options.is_structured:
            return None
        matcher = self._matcher(_tried_grammar(options)).deep_copy()
        return Constraint(matcher, self._tokens.vocab_size, self._vocab_size)

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Return the kept matcher of a grammar, which has taken no token."""
        matcher = self._kept.pop(grammar, None)
        if matcher is None:
            matcher = on_stack(lambda: compiled(self._tokens, grammar))
            _check(matcher)
        self._kept[grammar] = matcher
        # Readers of requests share the matchers.
        for old in list(self._kept)[:-KEPT]:
            self._kept.pop(old, None)
        return matcher


class Constraint:
    """The tokens of one answer that its schema or grammar allows; not thread-safe.

    Args:
        matcher: llguidance's state of the answer.
        token_count: Tokens of the matcher's mask.
        vocab_size: Length of the model's logits.
    """

    def __init__(self, matcher: llguidance.LLMatcher, token_count: int, vocab_size: int) -> None:
        self._matcher = matcher
        bits = np.zeros(math.ceil(token_count / WORD_BITS), np.int32)
        self._bits_address, self._bits_bytes = bits.ctypes.data, bits.nbytes
        self._bytes = bits.view(np.uint8)[:, np.newaxis]
        self._bits = np.empty((bits.nbytes, len(BIT_VALUES)), np.uint8)
        self._allowed = np.empty(self._bits.shape, np.bool_)
        self._allowed_tokens = self._allowed.reshape(-1)[:vocab_size]
        self._scores = np.empty(vocab_size, np.float32)

    def allowed(self, logits: Logits, /) -> Logits:
        """Return the logits with −∞ for each token that may not come next, valid until the next call.

        Raises:
            GrammarError: The grammar is too complex for llguidance at this place.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits_address, self._bits_bytes)
        _check(self._matcher)
        np.bitwise_and(self._bytes, BIT_VALUES, out=self._bits)
        np.not_equal(self._bits, 0, out=self._allowed)
        self._scores.fill(-np.inf)
        np.copyto(self._scores, logits, where=self._allowed_tokens)
        return self._scores

    def accept(self, token_id: int, /) -> bool:
        """Take the next token; return whether the answer is complete with it.

        Raises:
            GrammarError: The grammar is too complex for llguidance at this place.
        """
        self._matcher.consume_token(token_id)
        _check(self._matcher)
        return self._matcher.is_stopped()


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            "A JSON Schema or grammar needs llguidance, which is not installed.",
            fix="Run `pip install 'heterollm[grammar]'`.",
        ) from error
    return llguidance


def _check(matcher: llguidance.LLMatcher) -> None:
    error = error_of(matcher)
    if error is not None:
        raise _refusal(error)


def _refusal(message: str) -> GrammarError:
    return GrammarError(
        f"The schema or grammar cannot be used: {message.strip().rstrip('.'):.300}.",
        fix="Leave that part out, or write it in another way.",
    )


def _tried_grammar(options: GenerationOptions) -> str:
    """Return llguidance's form of a schema or grammar that compiles in bounded time, memory and stack.

    Raises:
        GrammarError: It does not, or the schema is not a JSON object.
    """
    matcher = _library().LLMatcher
    if options.grammar is not None:
        grammar, plain = str(matcher.grammar_from_lark(options.grammar)), False
    else:
        given = {"type": "object"} if options.json_schema is None else options.json_schema
        try:
            # The text of a mapping is read again: it may have values or keys that JSON does not have.
            text = given if isinstance(given, str) else json.dumps(dict(given), allow_nan=False)
            schema = parse_json(text)
            if not isinstance(schema, dict):
                raise GrammarError(
                    f"The JSON Schema is {text:.80}, not an object.", fix='Begin with {"type": …}.'
                )
            defaults = {"whitespace_pattern": WHITESPACE}
            grammar = str(matcher.grammar_from_json_schema(text, defaults=defaults))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"The JSON Schema is not JSON, or nested too deeply: {error}.") from error
        plain = is_plain(schema, text)
    refusal = None if plain else refusal_of(grammar)
    if refusal is not None:
        raise _refusal(refusal)
    return grammar
