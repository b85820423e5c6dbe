"""The token loop: a sequence and a source of logits in turns, until the answer ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt

from heterollm.text.generation import GenerationStep
from heterollm.text.sampling import Logits
from heterollm.text.sequence import TokenSequence, TokenSource


def drive(
    sequence: TokenSequence,
    source: TokenSource,
    *,
    cancel: threading.Event | None = None,
    read: Callable[[npt.NDArray[Any]], Logits | None] | None = None,
) -> Iterator[GenerationStep]:
    """Compute an answer, and yield its steps; the sequence has the result in the end.

    Args:
        sequence: The answer.
        source: Holds a beginning of its prompt, which leaves a token to compute, and nothing else.
        cancel: Ends the answer before the next pass when any thread sets it.
        read: Computes the prompt; the source's ``prefill_in_place`` by default.

    Raises:
        HeteroLLMError: A pass failed.
    """
    sequence.begin(source)
    compute: Callable[[Any], Logits | None] = read or source.prefill_in_place
    while sequence.result is None:
        prepared_s, logits = source.prepared_s, None
        if cancel is None or not cancel.is_set():
            logits = compute(sequence.next_input())
        if logits is None:
            sequence.end("cancelled")
            return
        compute = source.decode_in_place
        try:
            steps = sequence.accept(logits, source.prepared_s - prepared_s)
        finally:
            if source.position > sequence.held:
                source.truncate(sequence.held)
        yield from steps
