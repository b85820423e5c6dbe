"""Measures how well a model predicts a text, beside the same model with float weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Unpack

import numpy as np
from numpy.typing import NDArray

from heterollm.base import InputError, OptionError, Progress, read_text, silent
from heterollm.llm import LLM
from heterollm.planning import LoadKeywords
from heterollm.text import Tokenizer, divergences, perplexity, surprises, top_1_agreement

SHORTEST_WINDOW: Final = 2
STAGE: Final = "Reading the text"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The likelihood of a text, and the nearness to float weights.

    Args:
        device: The device.
        plan: Level of the plan.
        precision: Precision of weights and activations.
        windows: Windows of text, each from an empty session.
        window_tokens: Tokens of a window.
        perplexity: The model's.
        float_perplexity: That with float weights (a checkpoint's own values, where it stores integers); None
            if they were not measured, as the next two.
        top_1_agreement: Share of positions at which both have the same likeliest token.
        divergence: Mean Kullback-Leibler divergence from the float weights' probabilities, in nats.
        notes: The model's notes.
    """

    device: str
    plan: str
    precision: str
    windows: int
    window_tokens: int
    perplexity: float
    float_perplexity: float | None
    top_1_agreement: float | None
    divergence: float | None
    notes: tuple[str, ...]


def evaluate(
    model: str | Path,
    texts: Sequence[Path],
    *,
    windows: int = 8,
    window_tokens: int = 512,
    compare: bool = True,
    progress: Progress = silent,
    **options: Unpack[LoadKeywords],
) -> Evaluation:
    """Run windows of text through a model, and before that through one with float weights on the GPU.

    The latter's KV cache has floats, too. One model is in memory at a time; the logits of the first are in a
    temporary file meanwhile.

    Args:
        model: A local folder, a GGUF file or a hub name.
        texts: Files of plain text, one after the other.
        windows: Windows at most.
        window_tokens: Tokens of a window, at most those of the model's context.
        compare: Whether to compare with float weights.
        progress: Called with a stage's name, steps done and steps in all.
        options: Those of :meth:`heterollm.llm.LLM.load`.

    Raises:
        OptionError: A number is not legal.
        InputError: A text cannot be read, or is too short.
        HeteroLLMError: The checkpoint or the device is not usable.
    """
    if windows < 1 or window_tokens < SHORTEST_WINDOW:
        raise OptionError(
            f"There cannot be {windows} windows of {window_tokens} tokens.",
            fix=f"Choose at least one, of at least {SHORTEST_WINDOW} tokens.",
        )
    text = "".join(map(read_text, texts))
    exact: NDArray[np.float32] | None = None
    with tempfile.TemporaryFile() as file:
        if compare and options.get("precision") != "fp16":
            own: LoadKeywords = {"precision": "fp16", "plan": "gpu", "scales": "free", "calibration": None}
            floats: LoadKeywords = {**options, **own, "request": None, "kv_bits": 32}
            with LLM.load(model, progress=progress, **floats) as llm:
                ids = _windows(llm.tokenizer, text, windows, min(window_tokens, llm.context))
                shape = (*ids.shape, llm.config.vocab_size)
                file.truncate(4 * math.prod(shape))
                exact = np.memmap(file, np.float32, "r+", shape=shape)
                for window, logits in enumerate(_logits(llm, ids, progress)):
                    exact[window] = logits
        with LLM.load(model, progress=progress, **options) as llm:
            ids = _windows(llm.tokenizer, text, windows, min(window_tokens, llm.context))
            found, floats_found, agreed, diverged = [], [], [], []
            for window, logits in enumerate(_logits(llm, ids, progress)):
                found.append(surprises(logits, ids[window]))
                if exact is not None:
                    floats_found.append(surprises(exact[window], ids[window]))
                    agreed.append(top_1_agreement(logits, exact[window]))
                    diverged.append(divergences(logits, exact[window]).mean())
            return Evaluation(
                device=llm.device.name,
                plan=llm.plan.level,
                precision=llm.plan.precision,
                windows=ids.shape[0],
                window_tokens=ids.shape[1],
                perplexity=perplexity(found),
                float_perplexity=perplexity(floats_found) if floats_found else None,
                top_1_agreement=float(np.mean(agreed)) if agreed else None,
                divergence=float(np.mean(diverged)) if diverged else None,
                notes=llm.notes,
            )


def _logits(llm: LLM, ids: NDArray[np.int32], progress: Progress) -> Iterator[NDArray[np.float32]]:
    session = llm.session()
    for done, window in enumerate(ids):
        progress(STAGE, done, len(ids))
        session.reset()
        yield session.prefill(window, all_logits=True)
    progress(STAGE, len(ids), len(ids))


def _windows(tokenizer: Tokenizer, text: str, count: int, tokens: int) -> NDArray[np.int32]:
    """Return at most so many windows of token ids, each with the model's first token."""
    start = tokenizer.encode("")
    ids = tokenizer.encode(text, add_bos=False)
    own = tokens - len(start)
    count = min(count, len(ids) // own) if own > 0 else 0
    if not count:
        raise InputError(
            f"The text has {len(ids)} tokens, fewer than a window of {tokens}.",
            fix="Give more text, or a smaller --window.",
        )
    parts = np.array(ids[: count * own], np.int32).reshape(count, own)
    return np.concatenate([np.full((count, len(start)), start, np.int32), parts], axis=1)
