"""Commands, options and names of llama.cpp, Ollama and vLLM: taken, or answered with heterollm's word."""

import io

import pytest

from heterollm.base import CheckpointError, OptionError
from heterollm.cli.command_line import _program
from heterollm.cli.other_words import (
    COMMANDS,
    OPTIONS,
    POSITIONAL,
    UNLIKE_COMMANDS,
    UNLIKE_OPTIONS,
    own_words,
)
from heterollm.model import KNOWN_MODELS
from heterollm.model.checkpoint_folder import checkpoint_folder
from heterollm.model.hub_names import HubName, is_hub_name, parse_hub_name
from heterollm.model.known_names import known_repository


def own(line):
    return own_words(line.split(), _program())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ls", "list"),
        ("server -m x -c 4096 --port 1", "serve x --context 4096 --port 1"),
        ("run x", "chat x"),
        ("run x hello", "generate x hello"),
        ("tiny-python-lm", "chat tiny-python-lm"),
        ("Llama-3.2-1B --context 64", "chat Llama-3.2-1B --context 64"),
        ("--debug qwen3-0.6b hello -n 5", "--debug generate qwen3-0.6b hello --max-new-tokens 5"),
        ("o/m-GGUF:Q4_K_M", "chat o/m-GGUF:Q4_K_M"),
        ("hf.co/o/m:Q4_K_M hello", "generate hf.co/o/m:Q4_K_M hello"),
        ("./missing", "chat ./missing"),
        ("missing.gguf", "chat missing.gguf"),
        ("llama3.2:1b", "chat llama3.2:1b"),  # refused with Ollama's name
        ("--debug ls --json", "--debug list --json"),
        ("generate -m x -p hello -n 5 --temp 0", "generate x --max-new-tokens 5 --temperature 0 -- hello"),
        ("generate -hf o/m:Q4_K_M -p hello", "generate o/m:Q4_K_M -- hello"),
        ("generate x hello --n-predict=5", "generate x hello --max-new-tokens=5"),
        ("generate x hello --system -n", "generate x hello --system -n"),  # a value of an own option
        ("generate x -- -n 5", "generate x -- -n 5"),
        ("chat x --ctx-size 64 -s 3", "chat x --context 64 --seed 3"),
        ("serve x --served-model-name y --max-model-len 64", "serve x --name y --context 64"),
        ("rm x", "rm x"),
        ("plan x --pass npumoe", "plan x --technique npumoe"),
        ("serve x --max-tokens 3", "serve x --max-tokens 3"),
        ("simulate x --prompt 64", "simulate x --prompt 64"),
        ("profile list", "profile list"),
        ("nothing x", "nothing x"),
        ("nul\0 x", "nul\0 x"),
    ],
)
def test_words_that_mean_the_same_are_taken(theirs, ours):
    found = own(theirs)
    assert [word for word in found if word] == ours.split()


def test_folders_and_files_of_models_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "plan").mkdir()  # a command's name stays one
    (tmp_path / "plan" / "config.json").write_text("{}")
    (tmp_path / "a.txt").write_text("")
    assert own("model") == ["chat", "model"]
    for word in ("notes", "a.txt", "plan"):
        assert own(word) == [word]


def test_a_model_in_place_of_a_command_talks(run, bundled_model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    code, out, err = run(bundled_model, "--device", "host", "--plan", "gpu", "--max-new-tokens", "3")
    assert code == 0, err
    assert out.strip()
    code, out, err = run("genrate", "x")
    assert (code, out) == (2, "")
    assert "Did you mean 'generate'?" in err
    code, out, err = run()
    assert (code, out) == (2, "")
    assert all(words in err for words in ("heterollm demo", "heterollm simulate", "`heterollm -h`"))


@pytest.mark.parametrize("name", UNLIKE_COMMANDS)
def test_other_commands_are_answered(name, run):
    code, out, err = run(name, "x")
    assert (code, out) == (2, "")
    assert f"no command {name!r}. {UNLIKE_COMMANDS[name]}." in err


@pytest.mark.parametrize("name", UNLIKE_OPTIONS)
def test_other_options_are_answered(name):
    with pytest.raises(OptionError, match=rf"no option {name}\.") as caught:
        own(f"generate x hello {name} 3")
    assert UNLIKE_OPTIONS[name] in caught.value.fix


def test_the_tables_name_what_there_is_and_hide_nothing_of_ours():
    program = _program()
    options = {name for command in program.commands.values() for one in command.params for name in one.opts}
    assert set(COMMANDS.values()) <= set(program.commands)
    assert not (set(COMMANDS) | set(UNLIKE_COMMANDS)) & set(program.commands)
    assert set(OPTIONS.values()) <= options
    for name in ("generate", "chat"):  # serve has a --max-tokens of its own, which comes first
        own_names = {one for parameter in program.commands[name].params for one in parameter.opts}
        assert not (set(OPTIONS) | set(UNLIKE_OPTIONS) | set(POSITIONAL)) & own_names


@pytest.mark.parametrize(
    ("text", "name", "gguf"),
    [
        ("o/m", "o/m", None),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B", None),
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", None),
        ("gemma-3-1b", "google/gemma-3-1b-it", None),
        ("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", None),
        ("o/m:latest", "o/m", None),
        ("https://huggingface.co/o/m", "o/m", None),
        ("https://huggingface.co/o/m/", "o/m", None),
        ("https://huggingface.co/o/m/tree/main", "o/m", None),
        ("https://huggingface.co/o/m/blob/main/m.Q4_0.gguf", "o/m", "m.Q4_0.gguf"),
        ("https://hf.co/o/m/resolve/main/sub/m.gguf?download=true", "o/m", "sub/m.gguf"),
        ("hf://o/m", "o/m", None),
    ],
)
def test_names_and_addresses_of_the_hub_are_taken(text, name, gguf):
    assert parse_hub_name(text) == HubName(name, gguf)


@pytest.mark.parametrize(
    "text", ["o/m-GGUF:Q4_K_M", "hf.co/o/m-GGUF:Q4_K_M", "https://hf.co/o/m-GGUF:Q4_K_M"]
)
def test_a_tag_is_a_quantisation(text):
    assert parse_hub_name(text) == HubName("o/m-GGUF", quant="Q4_K_M")


def test_every_known_name_means_a_repository():
    for name, model in KNOWN_MODELS.items():
        assert is_hub_name(known_repository(name)), name
        assert known_repository(name).split("/")[0] == model.source.split("/")[0]
    assert known_repository("nothing") is None


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "../x", "o/../x", "http://elsewhere.org/o/m", "llama3.2:1b", "o/m:", "hf.co/m", "/o/m"],
)
def test_other_texts_are_no_names_of_the_hub(text):
    assert parse_hub_name(text) is None


@pytest.mark.parametrize("name", ["llama3.2:1b", "qwen3:0.6b-q4_K_M", "smollm2:latest"])
def test_names_of_ollamas_library_are_answered(name):
    with pytest.raises(CheckpointError, match="Ollama's library"):
        checkpoint_folder(name)
