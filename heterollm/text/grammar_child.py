"""Compiles a grammar in a process of its own, which may crash: ``python -m heterollm.text.grammar_child``.

The grammar comes on stdin; the last line of stdout is its refusal in JSON, or null.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING, Final

from heterollm.text.grammar_compiler import STACK_BYTES, compiled, error_of, on_stack

if TYPE_CHECKING:
    import llguidance

__all__ = ["CPU_S", "MEMORY_BYTES"]

CPU_S: Final = 3
MEMORY_BYTES: Final = 640 << 20
"""Limits of the child. 200 tools in one schema take 0.2 s and 40 MiB; the interpreter takes 0.2 s."""

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


def main() -> None:
    """Try the grammar on stdin."""
    _limit_resources()
    grammar = sys.stdin.buffer.read().decode()
    import llguidance

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(grammar)))
    # Half of the stack that the parent gives: a grammar that passes here has room there.
    matcher = on_stack(lambda: compiled(tokens, grammar), STACK_BYTES // 2)
    refusal = error_of(matcher)
    if refusal is None:
        on_stack(lambda: _step(matcher), STEP_STACK_BYTES)
    sys.stdout.write(json.dumps(refusal))


def _step(matcher: llguidance.LLMatcher) -> None:
    """Take a few tokens, as an answer does."""
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        allowed = [value for value in range(256) if mask[value >> 3] >> (value & 7) & 1]
        if matcher.is_error() or not allowed or not matcher.consume_token(allowed[len(allowed) // 2]):
            return


def _limit_resources() -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent's limit of time holds
        return
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, MEMORY_BYTES),
    ):
        with contextlib.suppress(OSError, ValueError):  # macOS refuses some
            resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main()
