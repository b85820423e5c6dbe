"""What the command line teaches and promises: examples, exit codes, completion, colours, pipes, odd paths."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from typing import get_args

import pytest
import typer

from heterollm.base import EXIT_CODES
from heterollm.cli import complete as cli_complete
from heterollm.cli.command_line import app
from heterollm.cli.examples import EXAMPLES, SUMMARIES, command_names
from heterollm.cli.options import several
from heterollm.kernels.devices import DEVICE_NAMES
from heterollm.simulate.request import LENGTH_CHOICES, PLAN_LEVELS, SYNC_CHOICES

NAMES = [name for name, _ in command_names(app)]
ODD = "Modèle ünd 模型 x"


# -- help --------------------------------------------------------------------------------------------


def test_every_command_has_examples_and_a_summary():
    assert set(EXAMPLES) == {"", *NAMES}
    assert set(SUMMARIES) == {name for name in NAMES if " " not in name}
    assert all(len(text) <= 60 for text in SUMMARIES.values())


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_parse(line):
    """Words, options and values are taken by the command's own parser; nothing runs."""
    program, *words = shlex.split(line.partition(" < ")[0])
    assert program == "heterollm"
    command = typer.main.get_command(app)
    context = command.make_context("heterollm", words)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            break
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    assert not context.args


def test_an_example_that_is_wrong_would_not_parse():
    with pytest.raises(Exception, match="No such option"):
        test_examples_parse("heterollm generate MODEL hello --max-tokens 3")


@pytest.mark.parametrize("name", ["", *NAMES])
def test_help_shows_the_examples(run, name):
    code, out, err = run(*name.split(), "-h")
    assert (code, err) == (0, "")
    assert all(f"    {line}\n" in out for line in EXAMPLES[name])


def test_help_lists_every_command_in_a_line_and_every_exit_code(run):
    out = run("--help")[1]
    for name, text in SUMMARIES.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", out, re.MULTILINE), name
    for code, meaning in EXIT_CODES.items():
        assert re.search(rf"^ +{code}  {re.escape(meaning)}$", out, re.MULTILINE), code


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("generte", "generate"), ("benhc", "bench"), ("cache lst", "list")],
)
def test_an_unknown_command_suggests_one(run, typed, meant):
    code, out, err = run(*typed.split())
    assert (code, out) == (2, "")
    assert f"Did you mean '{meant}'?" in err


def test_a_mistyped_command_behind_profile_is_no_model(run):
    code, out, err = run("profile", "shows")
    assert (code, out) == (2, "")
    assert "There is no model 'shows'. Did you mean `heterollm profile show`?" in err


# -- completion --------------------------------------------------------------------------------------


SHELLS = {
    "bash": lambda words, last: {"COMP_WORDS": f"{words} {last}", "COMP_CWORD": str(len(words.split()))},
    "zsh": lambda words, last: {"_TYPER_COMPLETE_ARGS": f"{words} {last}"},
    "fish": lambda words, last: {
        "_TYPER_COMPLETE_ARGS": f"{words} {last}",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
    "powershell": lambda words, last: {
        "_TYPER_COMPLETE_ARGS": f"{words} {last}",
        "_TYPER_COMPLETE_WORD_TO_COMPLETE": last,
    },
}


@pytest.fixture
def complete(run, monkeypatch):
    def ask(shell, words, last=""):
        for name, value in SHELLS[shell](words, last).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("_HETEROLLM_COMPLETE", f"complete_{shell}")
        return run()[1]

    return ask


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_options_and_values(complete, run, monkeypatch, shell):
    assert "generate" in complete(shell, "heterollm", "gen")
    assert "--max-new-tokens" in complete(shell, "heterollm generate", "--max")
    # zsh asks for a backslash before a colon.
    assert "sim:snapdragon-8gen3" in complete(shell, "heterollm generate --device").replace("\\", "")
    assert "tensor" in complete(shell, "heterollm plan --plan")
    for option, names in (
        ("sync", SYNC_CHOICES),
        ("length-policy", LENGTH_CHOICES),
        ("plan", PLAN_LEVELS),
    ):
        offered = complete(shell, f"heterollm simulate --{option}")
        assert all(name in offered for name in names), (option, offered)
    monkeypatch.setenv("_HETEROLLM_COMPLETE", f"source_{shell}")
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "heterollm" in out


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_models(complete, shell, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--me--tiny").mkdir(parents=True)
    assert "me/tiny" in complete(shell, "heterollm chat", "me/")
    assert "qwen3-0.6b" in complete(shell, "heterollm chat", "qwen3")
    assert "qwen3-0.6b" in complete(shell, "heterollm", "qwen3")
    assert "tiny-python-lm" in complete(shell, "heterollm", "tiny-p")
    assert "qwen" not in complete(shell, "heterollm", "--")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_named_shell_s_script_is_shown(run, complete, shell):
    code, out, err = run("--show-completion", shell)
    assert (code, err) == (0, "")
    assert "heterollm" in out
    assert {"bash": "COMPREPLY", "zsh": "#compdef", "fish": "complete --command"}.get(shell, "") in out
    assert run("--version")[1].startswith("heterollm ")  # the answer to the next call is its own


def test_completion_imports_nothing_heavy():
    program = "import os, sys; from heterollm.cli import main; main(); print([*sys.modules], file=sys.stderr)"
    asked = SHELLS["bash"]("heterollm chat", "qwen3") | {"_HETEROLLM_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "qwen3-0.6b" in done.stdout
    heavy = ("numpy", "onnx", "onnxruntime", "huggingface_hub", "tokenizers", "jinja2", "rich")
    assert not [name for name in heavy if f"'{name}'" in done.stderr]


@pytest.fixture
def bash(run, monkeypatch, tmp_path):
    """Ask bash itself, with its words: it cuts lines at colons and equal signs."""
    if shutil.which("bash") is None or os.name == "nt":
        pytest.skip("no bash to try it with")
    monkeypatch.setenv("_HETEROLLM_COMPLETE", "source_bash")
    (tmp_path / "completion.bash").write_text(run()[1])
    program = tmp_path / "heterollm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m heterollm "$@"\n')
    program.chmod(0o755)

    def ask(*words):
        lines = f'source completion.bash; COMP_WORDS=("$@"); COMP_CWORD={len(words) - 1}; '
        lines += f'PATH="{tmp_path}:$PATH"; _heterollm_completion heterollm; echo "${{COMPREPLY[@]}}"'
        clean = {name: value for name, value in os.environ.items() if name != "_HETEROLLM_COMPLETE"}
        command = ["bash", "-c", lines, "bash", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean)
        return done.stdout.split()

    return ask


def test_bash_itself_completes(bash):
    assert bash("heterollm", "cac") == ["cache"]
    # It replaces the last of its words only.
    assert bash("heterollm", "profile", "--device", "sim", ":", "snapdragon-8gen3-") == [
        "snapdragon-8gen3-paper"
    ]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["profile", "--device", "sim:snapdragon-8e"], "sim:snapdragon-8elite"),  # a bash that cuts nothing
        (["profile", "--device", "sim", ":"], "snapdragon-8elite"),
        (["profile", "--device", "=", "sim", ":", "snap"], "snapdragon-8elite"),
        (["profile", "--device", "="], "sim:snapdragon-8elite"),
        (["profile", "--device", "=", "h"], "host"),
        (["profile", "--device", "sim", ":", "snapdragon-8gen3", "--qui"], "--quick"),
        (["simulate", "--what-if", "npu.execute_us", "=", "50", "--soc", ""], "snapdragon-8elite"),
    ],
)
def test_words_that_bash_has_cut_are_completed(run, monkeypatch, words, offered):
    monkeypatch.setenv("_HETEROLLM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["heterollm", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert offered in run()[1].split()


def test_the_last_of_several_words_is_completed():
    complete = several(help="", names=("layer", "tensor")).autocompletion
    assert complete("") == ["layer", "tensor"]
    assert complete("layer,t") == ["layer,tensor"]
    assert complete("layer,x") == []


def test_the_names_of_options_are_those_of_the_library():
    from heterollm.cli import plan, simulate
    from heterollm.solver.request import FORBIDDEN

    assert set(get_args(simulate.Lengths)) == set(LENGTH_CHOICES)
    assert set(get_args(simulate.Waits)) == set(SYNC_CHOICES)
    assert cli_complete.PLANS[1:] == PLAN_LEVELS
    assert set(plan.FORBIDDEN) == set(FORBIDDEN)


def test_what_is_offered_is_what_there_is(tmp_path, monkeypatch, bundled_model):
    assert set(DEVICE_NAMES) <= set(cli_complete.devices(""))
    assert "llama-3-8b" in cli_complete.known_models("llama-3-8b")
    assert str(bundled_model) in cli_complete.models(f"{bundled_model.parent}{os.sep}")
    assert cli_complete.models(f"{tmp_path}/none/x") == []
    (tmp_path / "models--some--model").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cli_complete.models("some/") == ["some/model"]
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "sim-phone-0123456789abcdef.json").touch()
    assert cli_complete.profiles("01") == ["0123456789abcdef"]


# -- streams -----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo terminals here")
@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals_that_want_them(variables, coloured, tmp_path):
    import pty

    ours, theirs = pty.openpty()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    command = [sys.executable, "-m", "heterollm", "cache", "clear", "nonsense"]
    subprocess.run(
        command,
        cwd=tmp_path,
        stderr=theirs,
        env=environment | {"TERM": "xterm-256color"} | variables,
        check=False,
    )
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "nonsense" in shown
    assert bool(re.search(r"\x1b\[[\d;]*3[0-7]", shown)) is coloured


@pytest.mark.skipif(os.name == "nt", reason="pipes end differently on Windows")
@pytest.mark.parametrize("words", ["--help", "cache list"])
def test_nobody_reads_to_the_end(words, tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "heterollm", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_before_anything_is_loaded(monkeypatch, capsys):
    from heterollm.__main__ import run as program

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("heterollm.cli.main", interrupt)
    assert program() == 130
    assert capsys.readouterr() == ("", "Interrupted.\n")


# -- odd paths ---------------------------------------------------------------------------------------


@pytest.fixture
def odd(tmp_path, monkeypatch, bundled_model, session_cache):
    """A folder with blanks and letters of three scripts: the model, the cache and all files lie in it."""
    folder = tmp_path / ODD
    shutil.copytree(bundled_model, folder / ODD)
    cache = folder / f"{ODD} cache"
    if (session_cache / "opencl").exists():  # what other tests compiled
        shutil.copytree(session_cache / "opencl", cache / "opencl")
    monkeypatch.setenv("HETEROLLM_CACHE", str(cache))
    monkeypatch.chdir(folder)
    return folder


def test_paths_with_blanks_and_other_letters(run, odd):
    simulated = ("--device", "sim:snapdragon-8gen3")
    code, out, err = run("profile", ODD, *simulated, "--quick", "--json")
    assert code == 0, err
    assert json.loads(out)["device"] == "sim:snapdragon-8gen3"
    code, _, err = run("profile", "export", f"{ODD}.json")
    assert code == 0, err
    code, out, err = run("plan", ODD, *simulated, "-o", f"{ODD} plan.json", "--json")
    assert code == 0, err
    words = ("--device", "host", "--max-new-tokens", 2, "--plan", "layer", "--trace", f"{ODD} trace.json")
    code, out, err = run("generate", ODD, "import é", *words)
    assert code == 0, err
    assert out.strip("\n")
    code, out, err = run("trace", f"{ODD} trace.json", "--json")
    assert code == 0, err
    assert unicodedata.normalize("NFC", json.loads(out)["path"]) == f"{ODD} trace.json"
    written = {f"{ODD}.simulated.json", f"{ODD} plan.json", f"{ODD} trace.json"}
    assert written <= {path.name for path in odd.iterdir()}
