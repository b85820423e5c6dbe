"""Random bad option values on the command line: an error panel or a usage message, never a traceback."""

import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heterollm.base import DeviceError, write
from heterollm.cli import main
from heterollm.llm import LLM

VALUES = (
    *("", " ", "0", "-1", "1", "7", "1.5", "-0.0", "nan", "inf", "-inf", "1e999", "9" * 400, "0x10", "1_0"),
    *(
        "\u0661",
        "True",
        "None",
        "null",
        "[]",
        "{}",
        "a" * 5000,
        "\x00",
        "\ud800",
        "é/è",
        "~nobody",
        "..",
        ".",
    ),
    *(
        "/",
        "/dev/null",
        "/proc/self/mem",
        "-",
        "--",
        "--help=",
        "auto",
        "host",
        "gpu",
        "layer",
        "w4a16",
        "1,2",
    ),
)
LOADING = ("--device", "--plan", "--precision", "--group-size", "--context", "--gpu-threads", "--npu-threads")
SAMPLING = (
    "--max-new-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--seed",
)
COMPILING = ("--soc", "--plan", "--precision", "--group-size", "--prompt", "--decode", "--context")
FLAGS = ("--json", "--asymmetric", "--allow-slow", "--debug", "--version", "--nothing", "-h", "-x")


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs one command line and checks how it ended."""

    def call(words: list[str]) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("\x00 a \ud800"))
        sys.stderr.reconfigure(errors="backslashreplace")  # as Python opens it
        code = main(words)
        shown = capsys.readouterr()
        told = f"{words}: {code}\n{shown.err}"
        assert code in (0, 1, 2), told
        assert "Unexpected error" not in shown.err, told
        assert "Traceback" not in shown.err or "--debug" in words, told
        assert code == 0 or shown.err.strip(), told
        return code

    return call


def random_words(rng: random.Random, options: tuple[str, ...], count: int) -> list[str]:
    words = []
    for _ in range(rng.randint(1, count)):
        option, value = rng.choice(options), rng.choice(VALUES)
        words += [f"{option}={value}"] if rng.random() < 0.7 else [option, value]
    if rng.random() < 0.1:
        words.append(rng.choice(FLAGS))
    return words


def test_options_of_loading(run, monkeypatch, bundled_model: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DeviceError("No device in this test.", fix="None.")

    monkeypatch.setattr("heterollm.loading.open_device", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    codes = set()
    for seed in range(80):
        rng = random.Random(seed)
        model = str(bundled_model) if rng.random() < 0.7 else rng.choice(VALUES)
        command = rng.choice(("generate", "generate", "chat"))
        words = [command, *random_words(rng, LOADING, 3), model]
        codes.add(run([*words, rng.choice(VALUES)] if command == "generate" else words))
    assert {1, 2} <= codes
    for value in VALUES:
        run(["generate", "--", value, "hello"])
        run(["generate", f"--plan={value}", str(bundled_model), "hello"])
        run(["generate", f"--device={value}", str(bundled_model), value])


def test_options_of_sampling(run, monkeypatch, shared: LLM) -> None:
    monkeypatch.setattr("heterollm.llm.LLM.load", lambda *_, **__: shared)
    monkeypatch.setattr(shared, "close", lambda: None)
    codes = set()
    for seed in range(80):
        rng = random.Random(seed)
        codes.add(run(["generate", *random_words(rng, SAMPLING, 3), "--max-new-tokens=2", "folder", "hello"]))
    assert codes == {0, 1, 2}


@pytest.fixture(scope="module")
def shared(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", context=64) as llm:
        yield llm


def test_options_of_compiling(run, monkeypatch, bundled_model: Path) -> None:
    # Nothing is compiled: every build would be a second.
    monkeypatch.setattr("heterollm.planning.ahead._check_disk", lambda *_: _full())
    for seed in range(50):
        rng = random.Random(seed)
        soc = [] if rng.random() < 0.3 else ["--soc=57"]
        run(["compile", *soc, *random_words(rng, COMPILING, 2), str(bundled_model)])


def _full() -> None:
    raise DeviceError("No disk in this test.", fix="None.")


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"a ? ?"), ("utf-8", "a é ?".encode())])
def test_a_terminal_that_cannot_show_everything(monkeypatch, encoding: str, shown: bytes) -> None:
    memory = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(memory, encoding))
    write("a é \ud800")
    assert memory.getvalue() == shown


def test_other_commands(run) -> None:
    commands = (
        ["devices"],
        ["cache"],
        ["cache", "list"],
        ["cache", "clear"],
        ["cache", "path"],
        ["nothing"],
        [],
    )
    for seed in range(60):
        rng = random.Random(seed)
        words = rng.choice(commands)
        extra = [rng.choice((*VALUES, *FLAGS))] if rng.random() < 0.8 else []
        run([*words, *extra])
