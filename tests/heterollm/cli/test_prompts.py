"""The prompts of ``generate``, and the forms of its answers."""

import io
import json
import sys

import pytest
from chat_models import CHATML, HERMES, chat_folder

from heterollm.base import InputError
from heterollm.cli.prompts import prompt_lines, single_prompt
from heterollm.llm import LLM

FEW = ("--device", "host", "--plan", "gpu", "--max-new-tokens", "4")
TRUTH = '{"type": "boolean"}'


@pytest.fixture
def piped(monkeypatch):
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_words_files_and_stdin_make_one_prompt(tmp_path, piped):
    (tmp_path / "a.txt").write_text("first\n", "utf-8-sig")
    (tmp_path / "b.txt").write_text("second\n\n", "utf-8")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert single_prompt("Read:", files, None).text == "Read:\n\nfirst\n\nsecond\n"
    for words in (None, "-"):
        piped("import os\n")
        assert single_prompt(words, [], None).text == "import os"
    piped("never read")
    dialogue = single_prompt("Hi", [], "Be brief.").messages
    assert [message["content"] for message in dialogue] == ["Be brief.", "Hi"]
    assert [message["role"] for message in single_prompt("Hi", [], "").messages] == ["user"]


@pytest.mark.parametrize("name", ["missing.txt", "", "\0"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(InputError, match="cannot be read"):
        single_prompt(None, [tmp_path / name], None)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="utf-8"):
        single_prompt(None, [tmp_path / "latin"], None)


@pytest.mark.parametrize(("typed", "terminal"), [("typed", True), ("", False)])
def test_no_prompt_is_wrong_usage(run, bundled_model, monkeypatch, typed, terminal):
    stdin = io.StringIO(typed)
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)
    code, _, err = run("generate", bundled_model)
    assert code == 2
    assert "The prompt is missing" in err
    assert stdin.read() == typed


def test_lines_of_json_name_their_own_errors(tmp_path):
    file = tmp_path / "many.jsonl"
    lines = [
        {"prompt": "a", "id": 7},
        {"prompt": "b", "system": "S"},
        {"messages": [{"role": "user", "content": "c"}]},
        {"promt": "d"},
        {"prompt": 3},
        {"prompt": ""},
        {"prompt": "x", "system": 1},
        {"messages": [{"role": "user"}]},
        {"messages": [], "system": "S"},
        [],
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\nnope\r\n", "utf-8")
    found = dict(prompt_lines(file, "D"))
    assert list(found) == [*range(1, 20, 2), 20]
    assert (found[1].key, found[1].messages[0]["content"]) == (7, "D")
    assert found[3].messages[0]["content"] == "S"
    assert [message["content"] for message in found[5].messages] == ["c"]
    assert all(isinstance(found[number], InputError) for number in range(7, 21) if number in found)


def test_many_prompts_and_an_error_in_one(run, bundled_model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os", "id": "a"}\n{"prompt": ""}\n{"prompt": "x = "}\n', "utf-8")
    code, out, err = run("generate", bundled_model, "--prompts", file, *FEW, "--json-schema", TRUTH)
    assert code == 1
    assert "1 of 3 prompts failed" in err
    first, second, third = map(json.loads, out.splitlines())
    assert (first["line"], first["id"], first["prompt"]) == (1, "a", "import os")
    assert second == {
        "line": 2,
        "error": {"message": "The prompt is empty.", "fix": "Give at least one word."},
    }
    assert {first["text"], third["text"]} <= {"true", "false"}
    assert third["stop_reason"] == "complete"
    plain = tmp_path / "prompts.txt"
    plain.write_text("import os\n\n{x = \n", "utf-8")
    code, out, _ = run("generate", bundled_model, "--prompts", plain, *FEW)
    assert code == 0
    assert [json.loads(line)["line"] for line in out.splitlines()] == [1, 3]
    code, out, err = run("generate", bundled_model, "x", "--prompts", plain)
    assert (code, out) == (2, "")
    assert "--prompts excludes PROMPT" in err


def test_a_schema_of_a_file_and_the_likeliest_tokens(run, bundled_model, tmp_path, piped):
    (tmp_path / "schema.json").write_text(TRUTH, "utf-8")
    (tmp_path / "answer.lark").write_text('start: "yes"', "utf-8")
    piped("import os\n")
    schema = ("--json-schema", tmp_path / "schema.json")
    code, out, _ = run("generate", bundled_model, *schema, *FEW, "--json", "--top-logprobs", "2")
    assert code == 0
    answer = json.loads(out)
    assert json.loads(answer["text"]) in (True, False)
    assert [len(top) for top in answer["top_log_probabilities"]] == [2] * answer["generated_tokens"]
    assert set(answer["top_log_probabilities"][0][0]) == {"token_id", "text", "log_probability"}
    grammar = ("--grammar", tmp_path / "answer.lark", "--system", "Be brief.")
    code, out, err = run("generate", bundled_model, "Well?", *grammar, *FEW, "--top-logprobs", "2")
    assert (code, out) == (0, "yes\n")
    assert "likeliest" in err
    for bad in ("{", '{"type": "bool"}', tmp_path / "missing"):
        code, out, err = run("generate", bundled_model, "x", "--json-schema", bad)
        assert (code, out) == (1, "")
        assert "device" not in err  # before the model is loaded


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that a model gets: texts, and lists of messages."""
    seen = []
    for name in ("stream", "stream_chat"):
        method = getattr(LLM, name)
        monkeypatch.setattr(
            LLM,
            name,
            lambda self, given, method=method, **more: [seen.append(given), method(self, given, **more)][1],
        )
    return seen


def test_a_model_with_a_chat_template_gets_a_message(run, bundled_model, tmp_path, prompts):
    folder = chat_folder(tmp_path / "chat", HERMES, CHATML)
    (tmp_path / "many.jsonl").write_text('{"prompt": "b"}\n{"prompt": "c", "system": "S"}\n', "utf-8")
    message = {"role": "user", "content": "import os"}
    code, _, err = run("generate", folder, "import os", *FEW)
    assert (code, prompts.pop(0)) == (0, ({**message},))
    assert "a message in the model's chat template; see --raw" in err
    prompts.clear()  # a dialogue is rendered to a text
    code, _, err = run("generate", folder, "import os", "--raw", *FEW)
    assert (code, prompts) == (0, ["import os"])
    assert "template" not in err
    prompts.clear()
    code, _, err = run("generate", bundled_model, "import os", *FEW)
    assert (code, prompts) == (0, ["import os"])
    assert "template" not in err
    prompts.clear()
    assert run("generate", folder, "--prompts", tmp_path / "many.jsonl", *FEW)[0] == 0
    dialogues = [given for given in prompts if isinstance(given, tuple)]
    assert [[one["content"] for one in given] for given in dialogues] == [["b"], ["S", "c"]]
    prompts.clear()
    assert run("generate", folder, "--prompts", tmp_path / "many.jsonl", "--raw", *FEW)[0] == 0
    assert prompts[0] == "b"
    code, out, err = run("generate", folder, "x", "--raw", "--system", "S")
    assert (code, out) == (2, "")
    assert "--raw excludes --system" in err
