"""Compiles a grammar in a child process, which may crash."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from heterollm.text.grammar_compiler import STACK_BYTES, compiled, error_of, on_stack

if TYPE_CHECKING:
    import llguidance

STEP_STACK_BYTES: Final = 256 << 10
"""Stack for the steps of an answer: half of the smallest that an engine thread has (macOS)."""

STEPS: Final = 4

NAME: Final = re.compile(r"<[^\s<>\[\]\"\\\\]+>")
NUMBER: Final = re.compile(r"\d{1,6}")


class _Vocabulary:
    """A tokenizer of single bytes: compiling depends little on the vocabulary.

    It has a special token for each name in the grammar that may be one, and as many ids as the grammar names;
    the parent checks them against the checkpoint's own.
    """

    bos_token_id = None

    def __init__(self, grammar: str) -> None:
        names = sorted({"<end>", *NAME.findall(grammar)})
        most = max(map(int, NUMBER.findall(grammar)), default=0) if "<[" in grammar else 0
        self.tokens = [*(bytes([value]) for value in range(256)), *(name.encode() for name in names)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256 + names.index("<end>")
        self.tokens += [b""] * (most + 1 - len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def refusal(grammar: str) -> str | None:
    """Return the reason to refuse a grammar in llguidance's form; None if an answer can follow it."""
    import llguidance

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(grammar)))
    # Half of the stack that the parent gives: a grammar that passes here has room there.
    matcher = on_stack(lambda: compiled(tokens, grammar), STACK_BYTES // 2)
    error = error_of(matcher)
    if error is None:
        on_stack(lambda: _step(matcher), STEP_STACK_BYTES)
    return error


def _step(matcher: llguidance.LLMatcher) -> None:
    """Take a few tokens, as an answer does."""
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        allowed = [value for value in range(256) if mask[value >> 3] >> (value & 7) & 1]
        if matcher.is_error() or not allowed or not matcher.consume_token(allowed[len(allowed) // 2]):
            return
