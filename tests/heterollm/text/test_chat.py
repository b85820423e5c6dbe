"""Dialogues and their prompts."""

from pathlib import Path

import pytest

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import InputError
from heterollm.text import Conversation, Tokenizer


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
