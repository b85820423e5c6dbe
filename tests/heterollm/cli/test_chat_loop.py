import io
import sys

import pytest

from heterollm.base import InputError
from heterollm.cli.chat_loop import ChatLoop
from heterollm.cli.options import TokenOptions
from heterollm.text import GenerationResult, GenerationStep


class Tokenizer:
    has_chat_template = True
    chat_stop_strings = ()

    def apply_chat_template(self, messages, add_generation_prompt=True):
        self.rendered = [(message["role"], message["content"]) for message in messages]
        return [1] * len(messages)


class Session:
    resets = 0

    def reset(self):
        self.resets += 1


class Stream:
    """Answers with words, or raises in place of the second."""

    def __init__(self, words, error):
        self.words, self.error, self.sent, self.stopped = words, error, [], False

    def __iter__(self):
        for index, word in enumerate(self.words):
            if index == 1 and self.error is not None:
                raise self.error
            self.sent.append(word)
            yield GenerationStep(word, 1)

    @property
    def result(self):
        reason = "cancelled" if self.stopped else "eos"
        return GenerationResult("".join(self.sent), (1,), 1, 1, reason, 0.1, 1.0, None)

    def close(self):
        self.stopped = True


class Model:
    context = 64
    failures = ()

    def __init__(self):
        self.tokenizer = Tokenizer()
        self.one_session = Session()
        self.errors = {}
        self.prompts = []

    def session(self):
        return self.one_session

    def stream(self, ids, *, session, stop, max_new_tokens, temperature, **options):
        assert session is self.one_session
        assert (max_new_tokens, temperature) == (4, 0.5)
        self.prompts.append(self.tokenizer.rendered)
        return Stream(["so", " be", " it"], self.errors.get(len(self.prompts)))


@pytest.fixture
def talk(monkeypatch, capsys):
    def run(text, model=None, system=None):
        model = model or Model()
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        ChatLoop(model, system=system, max_new_tokens=4, choice=TokenOptions(temperature=0.5)).run()
        captured = capsys.readouterr()
        return model, captured.out, captured.err

    return run


def test_history_grows_and_stdout_holds_answers_only(talk):
    model, out, err = talk("first\nsecond\n")
    assert out == "so be it\nso be it\n"
    assert err == ""
    assert model.prompts == [
        [("user", "first")],
        [("user", "first"), ("assistant", "so be it"), ("user", "second")],
    ]


def test_reset_forgets_all_but_the_instructions(talk):
    model, _, err = talk("first\n/reset\nsecond\n", system="Be brief.")
    assert model.prompts[1] == [("system", "Be brief."), ("user", "second")]
    assert model.one_session.resets == 1
    assert "forgotten" in err


def test_exit_empty_lines_and_unknown_commands(talk):
    model, out, err = talk("\n  \n/bogus now\n/exit\nnever\n")
    assert (model.prompts, out) == ([], "")
    assert "There is no /bogus" in err


def test_ctrl_c_stops_the_answer_and_not_the_program(talk):
    model = Model()
    model.errors[1] = KeyboardInterrupt()
    model, out, _ = talk("first\nsecond\n", model)
    assert out == "so\nso be it\n"
    assert model.prompts[1] == [("user", "first"), ("assistant", "so"), ("user", "second")]


def test_an_error_takes_the_message_back_and_goes_on(talk):
    model = Model()
    model.errors[2] = InputError("The prompt has 99 tokens.", fix="Shorten it.")
    model, out, err = talk("first\nsecond\nthird\n", model)
    assert out == "so be it\nsoso be it\n"
    assert "99 tokens" in err
    assert "/reset" in err
    assert model.prompts[2] == [("user", "first"), ("assistant", "so be it"), ("user", "third")]


def test_any_other_error_is_not_swallowed(talk):
    model = Model()
    model.errors[1] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        talk("first\n", model)
