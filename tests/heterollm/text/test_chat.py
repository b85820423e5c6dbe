"""Dialogues and what a session can keep of them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import InputError
from heterollm.text import Conversation, Generation, GenerationOptions, Tokenizer, reusable_prefix
from heterollm.text.chat import common_prefix


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(Path(tiny.__file__).parent)


def test_the_history_is_rendered_in_order(tokenizer):
    talk = Conversation(tokenizer, system="Be brief")
    talk.add_user("Hello")
    first = talk.prompt_ids()
    assert tokenizer.decode(first) == "System: Be brief\n\nUser: Hello\n\nAssistant:"
    talk.add_assistant(" Hi")
    talk.add_user("More")
    text = "System: Be brief\n\nUser: Hello\n\nAssistant: Hi\n\nUser: More\n\nAssistant:"
    assert tokenizer.decode(talk.prompt_ids()) == text
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user"]


def test_reset_keeps_the_instructions_only(tokenizer):
    talk = Conversation(tokenizer, system="Be brief")
    talk.add_user("Hello")
    talk.reset()
    assert talk.messages == ({"role": "system", "content": "Be brief"},)
    bare = Conversation(tokenizer)
    bare.add_user("Hello")
    bare.reset()
    assert bare.messages == ()


def test_there_must_be_a_question(tokenizer):
    talk = Conversation(tokenizer, system="Be brief")
    with pytest.raises(InputError, match="nothing to answer"):
        talk.prompt_ids()
    talk.add_user("Hello")
    talk.add_assistant("Hi")
    with pytest.raises(InputError, match="nothing to answer"):
        talk.prompt_ids()
    with pytest.raises(InputError, match="nothing to answer"):
        Conversation(tokenizer).prompt_ids()


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_common_prefix_is_the_longest(left, right):
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length in (len(left), len(right)) or left[length] != right[length]
    kept = reusable_prefix(left, right)
    assert kept == (0 if not right else min(length, len(right) - 1))


def test_a_second_turn_prefills_only_what_is_new(tokenizer):
    class Session:
        """Holds ids, answers with a fixed text."""

        def __init__(self):
            self.ids = []
            self.context = 256
            self.answer = []
            self.prefilled = 0

        @property
        def position(self):
            return len(self.ids)

        def truncate(self, length):
            del self.ids[length:]

        def prefill(self, ids, /):
            self.ids += ids
            self.prefilled = len(ids)
            return self._logits()

        def decode(self, token_id, /):
            self.ids.append(token_id)
            return self._logits()

        def _logits(self):
            logits = np.zeros(2048, np.float32)
            logits[self.answer.pop(0) if self.answer else 0] = 1
            return logits

    session = Session()
    talk = Conversation(tokenizer)
    for question, answer in (("import os", " yes"), ("def f", " no"), ("def f", " no")):
        talk.add_user(question)
        prompt = talk.prompt_ids()
        kept = reusable_prefix(session.ids, prompt)
        session.truncate(kept)
        session.answer = tokenizer.encode(answer, add_bos=False)
        result = Generation(
            session, tokenizer, prompt, GenerationOptions(stop=tokenizer.chat_stop_strings), reused=kept
        ).run()
        assert result.text == answer
        assert session.ids[: len(prompt)] == prompt
        talk.add_assistant(result.text)
        held = len(prompt)
    assert session.prefilled < held / 2
    assert result.prompt_tokens == held
