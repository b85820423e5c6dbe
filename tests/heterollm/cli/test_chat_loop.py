import contextlib
import io
import os
import select
import sys

import pytest

from heterollm.base import InputError
from heterollm.cli.chat_loop import ChatLoop
from heterollm.cli.line_input import history_path
from heterollm.cli.options import TokenOptions
from heterollm.text import GenerationResult, GenerationStep


class Tokenizer:
    has_chat_template = True

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return [1] * len(messages)


class Session:
    resets = 0
    position = 3

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
        self.seeds = []

    def session(self):
        return self.one_session

    def stream_chat(self, messages, *, session, max_new_tokens, temperature, seed, **options):
        assert session is self.one_session
        assert (max_new_tokens, temperature) == (4, 0.5)
        self.prompts.append([(message["role"], message["content"]) for message in messages])
        self.seeds.append(seed)
        return Stream(["so", " be", " it"], self.errors.get(len(self.prompts)))


@pytest.fixture
def talk(monkeypatch, capsys):
    def run(text, model=None, system=None):
        model = model or Model()
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        ChatLoop(model, system=system, max_new_tokens=4, choice=TokenOptions(temperature=0.5, seed=7)).run()
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
    assert model.prompts[2] == [("user", "first"), ("assistant", "so be it"), ("user", "third")]


def test_any_other_error_is_not_swallowed(talk):
    model = Model()
    model.errors[1] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        talk("first\n", model)


def test_the_oldest_turns_leave_a_full_context_and_the_instructions_stay(talk):
    model = Model()
    model.context = 8  # of which an answer may take 2: the fourth question would be one message too many
    model, _, err = talk("a\nb\nc\nd\n", model, system="Be brief.")
    assert len(model.prompts[2]) == 6
    assert model.prompts[3] == [
        ("system", "Be brief."),
        ("user", "c"),
        ("assistant", "so be it"),
        ("user", "d"),
    ]
    assert "its oldest 2 turns" in err


def test_instructions_change_within_a_dialogue(talk):
    model, _, err = talk("/system\na\n/system Be  kind.\nb\n/system -\nc\n")
    assert [prompt[0] for prompt in model.prompts] == [("user", "a"), ("system", "Be  kind."), ("user", "a")]
    assert "no instructions" in err
    assert "Instructions: Be  kind." in err


def test_an_answer_again_replaces_the_last_and_takes_another_seed(talk):
    model, out, _ = talk("/regen\na\nb\n/regen\n/regen\nc\n")
    assert out == "so be it\n" * 5
    assert model.prompts[1] == model.prompts[2] == model.prompts[3]
    assert model.seeds == [7, 7, 8, 9, 7]
    assert len(model.prompts[4]) == 5


def test_a_dialogue_goes_on_from_its_file(talk, tmp_path):
    path = tmp_path / "a dialogue.json"
    talk(f"a\n/save {path}\n", system="Be brief.")
    model, _, err = talk(f"/load {path}\n/regen\nb\n/save {path}\n")
    assert model.prompts[0] == [("system", "Be brief."), ("user", "a")]
    assert model.prompts[1][2:] == [("assistant", "so be it"), ("user", "b")]
    assert "Wrote 5 messages" in err
    other = tmp_path / "precious.json"
    other.write_text('{"messages": [{"role": "user", "content": "a"}], "more": 1}', "utf-8")
    model, _, err = talk(f"/load {other}\n/save {other}\n/load {tmp_path}\n/save\na\n")
    assert "more" in other.read_text("utf-8")
    assert err.count("is no dialogue") == 2
    assert "Type /save FILE" in err
    assert model.prompts == [[("user", "a")]]


def test_a_message_without_an_answer_is_forgotten(talk):
    class Silent(Stream):
        def __iter__(self):
            raise KeyboardInterrupt
            yield

        @property
        def result(self):
            assert self.stopped
            return GenerationResult("", (), 1, 0, "cancelled", None, None, None)

    model = Model()
    answer = model.stream_chat
    model.stream_chat = lambda _, **options: model.__dict__.pop("stream_chat") and Silent([], None)
    talk("a\nb\n", model)
    assert model.stream_chat == answer
    assert model.prompts == [[("user", "b")]]


def test_reasoning_goes_to_stderr_and_not_into_the_dialogue(talk):
    class Answer(Stream):
        def __iter__(self):
            for reasoning, text in (("So", ""), (".", ""), ("", "Hel"), ("", "lo"), ("", "")):
                yield GenerationStep(text, 1, reasoning=reasoning)

    model = Model()
    plain = model.stream_chat
    model.stream_chat = lambda messages, **options: plain(messages, **options) and Answer([], None)
    _, out, err = talk("a\nb\n", model)
    assert (out, err) == ("Hello\nHello\n", "So.\n\nSo.\n\n")
    assert model.prompts[1] == [("user", "a"), ("assistant", "Hello"), ("user", "b")]


READY = "\x1b[?2004h"
"""What a terminal is told when a line may be typed: it marks pasted text from now on."""


class Typist:
    """A person at the pseudo-terminal of a command."""

    def __init__(self, command, folder, env):
        import pty

        self.child, self.terminal = pty.fork()
        if not self.child:
            os.chdir(folder)
            os.execve(command[0], command, env)
        self.seen = ""

    def wait(self, *texts):
        """Wait until each text has appeared after the one before."""
        for text in texts:
            while text not in self.seen:
                assert select.select([self.terminal], [], [], 60)[0], f"{text!r} is missing in {self.seen!r}"
                self.seen += os.read(self.terminal, 4096).decode("utf-8", "replace")
            self.seen = self.seen.partition(text)[2]

    def type(self, text):
        self.wait(READY)
        self.write(text)

    def write(self, text):
        os.write(self.terminal, text.encode())

    def exit_code(self):
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            while os.read(self.terminal, 4096):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


@pytest.mark.skipif(sys.platform == "win32", reason="Python has no pseudo-terminals there")
def test_a_terminal_edits_lines_and_keeps_its_history(tmp_path, bundled_model, monkeypatch):
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    env = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "heterollm", "chat", str(bundled_model), "--device", "host"]
    command += ["--plan", "gpu", "--max-new-tokens", "4"]
    history = history_path()
    history.parent.mkdir(parents=True, exist_ok=True)
    history.write_text("\n# earlier\n+mport os\n", "utf-8")
    person = Typist(command, tmp_path, env)
    person.type("\x1b[A\x01i\r")  # up to the earlier line, then to its beginning
    person.wait("import os", "4 tokens", "ended by length")
    person.type("dropped\x03")
    person.type("/sta\t")
    person.wait("ts")
    person.write("\r")
    person.wait("1 turn,", "tokens of the context", "The last answer")
    person.type("\x04")
    assert person.exit_code() == 0
    kept = [line for line in history.read_text("utf-8").splitlines() if line[:1] == "+"]
    assert kept == ["+mport os", "+import os", "+/stats"]
