"""The default chunk length: the longest pass of prompts, before a search finds that a shorter one pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

CHUNK_LENGTH: Final = 512
"""Longest pass where no NPU graph says otherwise: enough that the weights are read rarely."""


def default_chunk_length(standard_lengths: Sequence[int], context: int) -> int:
    """Return the longest pass of prompts.

    Args:
        standard_lengths: Lengths of the NPU graphs that prompts may run in; empty without.
        context: Positions of a session.
    """
    return min(context, max(standard_lengths, default=CHUNK_LENGTH))
