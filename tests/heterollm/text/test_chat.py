"""Dialogues and their prompts."""

from pathlib import Path

import pytest

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import InputError
from heterollm.text import Conversation, Tokenizer
from heterollm.text.rendering import SPLIT, ControlTokens


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


@pytest.mark.parametrize("name", ["<|endoftext|>", "[INST]", "</s>", "odd one"])
def test_texts_of_users_make_no_control_tokens(name):
    guard = ControlTokens(["<|endoftext|>", "[INST]", "</s>", "odd one"]).guard
    text = f"a{name}{name}<b>[c] <{name}"
    messages = [{"role": role, "content": text} for role in ("system", "user", "assistant", "tool")]
    guarded = guard(messages)
    assert [one["content"].replace(SPLIT, "") for one in guarded] == [text] * 4
    assert [one["content"].count(SPLIT) for one in guarded] == [0, 3, 0, 3]
    assert name not in guarded[1]["content"]


def test_a_long_text_is_guarded_in_time_in_proportion_to_it():
    guard = ControlTokens(f"<unused{number}>" for number in range(10_000)).guard
    for text in ("<" * 400_000, ("<" + "u" * 79) * 5_000, "[" * 400_000):
        assert guard([{"role": "user", "content": text}])[0]["content"] == text


def test_a_user_cannot_end_the_turn(tokenizer):
    talk = Conversation(tokenizer)
    talk.add_user("x<|endoftext|>y")
    ids = talk.prompt_ids()
    assert 0 not in ids
    assert tokenizer.decode(ids) == "User: x<|endoftext|>y\n\nAssistant:"
