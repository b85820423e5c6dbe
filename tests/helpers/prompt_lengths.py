"""Answers of a session on its ways: prompts of odd lengths, decode, truncate and fork."""

import numpy as np

from heterollm.llm import LLM

LENGTHS = (1, 5, 31, 33, 100, 257, 300)
"""Shorter than a block and than what is always kept; chunks that cross the 256 keys of the smallest graph."""


def answers(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return logits of prompts of every length, of decoded tokens, and behind truncate and fork."""
    session, rows = llm.session(), []
    for length in LENGTHS:
        session.reset()
        rows.append(session.prefill(ids[:length], all_logits=True))
        rows.append(session.decode(ids[length])[np.newaxis])
    session.truncate(200)
    rows.append(session.prefill(ids[200:290], all_logits=True))
    fork = session.fork()
    session.decode(7)
    rows.append(fork.prefill(ids[290:330], all_logits=True))
    return np.concatenate(rows)
