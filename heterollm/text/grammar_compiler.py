"""llguidance's calls for a grammar, with limits: the same here and in the child that tries a grammar."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")

STACK_BYTES: Final = 64 << 20
"""Stack of a thread that compiles. llguidance recurses over chains of rules and references: 60 objects
overflow the 512 KiB of a thread on macOS, 1000 the 8 MiB of Linux."""

LIMITS: Final[dict[str, Any]] = {
    "step_max_items": 30_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Below llguidance's own: the mask of one token occupies the engine thread, and a lexer state takes up to
2 kB. A schema of 200 optional properties needs half of the items."""

_changing = threading.Lock()


def compiled(tokens: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return the matcher of a grammar, which may be in error, with its first mask computed."""
    import llguidance

    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    if not matcher.is_error():
        # The first mask compiles the lexer further, and takes far longer than others.
        matcher.compute_bitmask()
    return matcher


def error_of(matcher: llguidance.LLMatcher) -> str | None:
    """Return the first line of a matcher's error; None if it has none."""
    if not matcher.is_error():
        return None
    line = str(matcher.get_error()).strip().partition("\n<")[0].strip()
    return "no text follows it" if line.startswith("NoExtension") else line


def on_stack(call: Callable[[], T], stack_bytes: int = STACK_BYTES) -> T:
    """Return the result of a call on a thread with a stack of its own size."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failed.append(error)

    with _changing:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="heterollm-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
