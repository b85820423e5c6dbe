"""Tokenizers of small chat models, and answers of random logits."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from chat_models import CHATS, chat_folder

from heterollm.text import GenerationOptions, GrammarTokens, SamplingOptions, Tokenizer, TokenSequence, drive
from heterollm.tools import AnswerPart, ChatPrompt, ReplyForm, joined, reader_of

ROWS = 2048


class Noise:
    """Random logits, which like some tokens more than others."""

    position = 0
    context = 4000
    prepared_s = 0.0

    def __init__(self, seed: int, liked: dict[int, float]) -> None:
        self._random = np.random.default_rng(seed)
        self._liked = liked

    def prefill_in_place(self, _ids, /):
        return self.decode_in_place(0)

    def decode_in_place(self, _token_id, /):
        logits = self._random.standard_normal(ROWS).astype(np.float32)
        for token, more in self._liked.items():
            logits[token] += more
        return logits


@dataclass
class Answer:
    """An answer's parts, joined, and its stop reason."""

    whole: AnswerPart
    pieces: list[AnswerPart]
    reason: str
    text: str


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @lru_cache
    def load(name: str) -> Tokenizer:
        folder: Path = chat_folder(tmp_path_factory.mktemp("chats") / name, *CHATS[name])
        return Tokenizer.from_folder(folder, [0])

    return load


def read(tokenizer: Tokenizer, form: ReplyForm, ids: Iterable[int]) -> list[AnswerPart]:
    """Return the parts of an answer of these tokens."""
    reader, decoder, parts = reader_of(form), tokenizer.stream_decoder(), []
    for token in ids:
        text = decoder.finish() if token in form.marks.values() else decoder.push(token)
        parts.append(reader.push(text, token))
    return [*parts, reader.finish()]


@pytest.fixture(scope="session")
def reading() -> Callable[[Tokenizer, ReplyForm, Iterable[int]], list[AnswerPart]]:
    return read


@pytest.fixture(scope="module")
def answered(tokenizer_of) -> Iterator[Callable[..., Answer]]:
    tokens = lru_cache(lambda name: GrammarTokens(tokenizer_of(name), ROWS))

    def run(name: str, prompt: ChatPrompt, seed: int, liked=(), limit=600, stop=()) -> Answer:
        tokenizer = tokenizer_of(name)
        marks = tuple(prompt.form.marks.values())
        options = GenerationOptions(
            grammar=prompt.grammar,
            marks=marks,
            max_new_tokens=limit,
            stop=stop,
            sampling=SamplingOptions(temperature=1.0, seed=seed),
        )
        # Marks and the end are likely, so that free texts end.
        source = Noise(seed, {**dict.fromkeys((0, *marks), 6.0), **dict(liked)})
        sequence = TokenSequence(
            tokenizer, [5, 6], options, context=source.context, constraint=tokens(name).constraint(options)
        )
        reader = reader_of(prompt.form)
        pieces = [reader.push(step.text, step.token_id) for step in drive(sequence, source)]
        pieces.append(reader.finish())
        assert sequence.result is not None
        return Answer(
            joined(pieces), pieces, sequence.result.stop_reason, tokenizer.decode(sequence.result.token_ids)
        )

    # The trial in a child has tests of its own, and takes most of the time of these.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterollm.text.grammar.refusal_of", lambda _grammar: None)
        yield run
