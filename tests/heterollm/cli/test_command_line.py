import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer
from rich.console import Console

import heterollm.llm
from heterollm import __version__
from heterollm.base import KINDS, DeviceError, make_own_folder
from heterollm.cli.command_line import app
from heterollm.engine import Sync
from heterollm.kernels.ops import Precision
from heterollm.report import console
from heterollm.simulate.request import SimulatedLengthPolicy
from heterollm.text import GenerationResult, GenerationStep

TEXT = "one two three"


class FakeStream:
    def __init__(self, fail_at=None, error=None):
        self.steps = iter([GenerationStep(word, 1) for word in ("one ", "two ", "three")])
        self.count = 0
        self.fail_at, self.error = fail_at, error
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.count == self.fail_at:
            raise self.error
        self.count += 1
        return next(self.steps)

    @property
    def result(self):
        for _ in self:
            pass
        return GenerationResult(TEXT, (1, 1, 1), 2, 3, "length", 0.5, 4.0, 20.0)

    def close(self):
        self.closed = True


class Named:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class FakeModel:
    """Stands for a loaded model: the command line's own work shows without a device."""

    def __init__(self):
        self.device = Named(name="host", time_kind="real", reason="because")
        self.plan = Named(level="gpu", precision="w4a16", technique=lambda kind: kind())
        self.notes = ("a note",)
        self.plan_notes = ("a note on the plan",)
        self.failures = self.pass_notes = ("The NPU part failed.",)
        self.tokenizer = Named(has_chat_template=False)
        self.closed = False
        self.expert_reads = None

    @classmethod
    def load(cls, model, **options):
        cls.loads.append((model, options))
        options["progress"]("Stage", 0, 1)
        options["progress"]("Stage", 1, 1)
        cls.last = cls()
        return cls.last

    def stream(self, prompt, **options):
        FakeModel.prompt = prompt
        FakeModel.options = options
        stream = FakeStream(**FakeModel.stream_arguments)
        FakeModel.streams.append(stream)
        return stream

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(heterollm.llm, "LLM", FakeModel)
    for name, value in {"loads": [], "streams": [], "stream_arguments": {}}.items():
        monkeypatch.setattr(FakeModel, name, value, raising=False)
    return FakeModel


def process(*arguments, cwd, **options):
    command = [sys.executable, "-m", "heterollm", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=600, **options
    )


# -- with a model that computes nothing --------------------------------------------------------------


def test_text_goes_to_stdout_and_statistics_to_stderr(run, fake):
    code, out, err = run("generate", "folder", "hello")
    assert (code, out) == (0, TEXT + "\n")
    for part in ("2 prompt tokens", "3 new tokens", "500 ms", "20.0 tokens/s", "real time", "plan gpu"):
        assert part in err
    assert "device auto chose host: because" in err
    assert "a note on the plan" in err
    assert "The NPU part failed." in err
    assert fake.last.closed
    assert fake.streams[0].closed


def test_options_reach_the_model(run, fake):
    words = "--device host --plan npu --precision w4a16 --group-size 64 --asymmetric --context 99"
    words += " --gpu-threads 1 --npu-threads 2 --max-new-tokens 7 --temperature 0.5 --top-k 3"
    words += " --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --seed 5 --stop END --stop ;"
    words += " --presence-penalty 0.5 --frequency-penalty -0.5"
    words += " --sync poll --allow-fallback --experts-gib 1.5 --kv-bits 8"
    words += " --speculative lookup --guesses 3"
    assert run("generate", "folder", "hello", *words.split())[0] == 0
    model, loaded = fake.loads[0]
    loaded.pop("progress")
    assert model == "folder"
    assert loaded == {
        "device": "host",
        "plan": "npu",
        "precision": "w4a16",
        "group_size": 64,
        "symmetric": False,
        "context": 99,
        "gpu_threads": 1,
        "npu_threads": 2,
        "sync": "poll",
        "allow_fallback": True,
        "experts_gib": 1.5,
        "kv_bits": 8,
        "speculative": "lookup",
        "guesses": 3,
        "defaults": frozenset(),
    }
    assert fake.prompt == "hello"
    assert callable(fake.options.pop("progress"))
    assert fake.options == {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 5,
        "stop": ("END", ";"),
        "json_schema": None,
        "grammar": None,
        "top_log_probabilities": 0,
    }
    for words, wanted in (
        ("--device emulator --precision fp16 --allow-slow", {"precision": "fp16", "allow_slow": True}),
        ("--scales stepped", {"scales": "stepped"}),
    ):
        assert run("generate", "folder", "hello", *words.split())[0] == 0
        assert fake.loads[-1][1].items() >= wanted.items()


def test_json_is_all_that_stdout_gets(run, fake):
    code, out, _ = run("generate", "folder", "hello", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["text"] == TEXT
    assert (data["model"], data["device"], data["time_kind"], data["plan"]) == (
        "folder",
        "host",
        "real",
        "gpu",
    )
    assert data["notes"] == ["a note"]


def test_a_dash_reads_the_prompt_from_stdin(run, fake, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert run("generate", "folder", "-")[0] == 0
    assert fake.prompt == "two\nlines"


def test_a_prompt_may_look_like_an_option_after_two_dashes(run, fake):
    assert run("generate", "folder", "--", "--debug")[0] == 0
    assert fake.prompt == "--debug"


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback(run, fake, before):
    fake.stream_arguments = {"fail_at": 1, "error": ZeroDivisionError("oops")}
    arguments = ["generate", "folder", "hello"]
    code, _, err = run(*(["--debug", *arguments] if before else [*arguments, "--debug"]))
    assert code == 1
    assert "Traceback" in err
    assert "ZeroDivisionError: oops" in err


def test_an_unexpected_error_is_one_panel_that_names_a_bug(run, fake):
    fake.stream_arguments = {"fail_at": 1, "error": ZeroDivisionError("oops")}
    code, out, err = run("generate", "folder", "hello")
    assert (code, out) == (1, "one ")
    assert "Traceback" not in err
    assert "ZeroDivisionError: oops" in err
    assert "bug" in err
    assert "--debug" in err


def test_ctrl_c_ends_the_answer_with_one_line(run, fake):
    fake.stream_arguments = {"fail_at": 2, "error": KeyboardInterrupt()}
    code, out, err = run("generate", "folder", "hello")
    assert (code, out) == (130, "one two ")
    assert err.splitlines()[-1] == "Interrupted."
    assert "Error" not in err
    assert fake.streams[0].closed


@pytest.mark.parametrize("arguments", [("bogus",), ("generate",), ("generate", "m", "p", "--seed", "x")])
def test_wrong_usage_exits_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_version(run):
    assert run("--version") == (0, f"heterollm {__version__}\n", "")


# -- errors of the real thing that need no device ----------------------------------------------------


def error_of(err):
    """Return the words of the one error in what went to stderr."""
    assert err.count("Error: ") == 1
    assert "Traceback" not in err
    return err.partition("Error: ")[2]


def test_an_empty_prompt_is_refused_before_loading(run, fake):
    code, out, err = run("generate", "folder", "")
    assert (code, out, fake.loads) == (1, "", [])
    assert "prompt is empty" in error_of(err)


def test_a_missing_model(run, tmp_path):
    code, out, err = run("generate", tmp_path / "none", "hello")
    assert (code, out) == (1, "")
    assert "none" in error_of(err)


def test_an_unknown_architecture_is_refused_by_name(run, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    code, out, err = run("generate", tmp_path, "hello")
    assert (code, out) == (1, "")
    assert "mamba" in error_of(err).lower()


def test_an_unknown_device_and_an_unknown_precision(run, bundled_model):
    code, _, err = run("generate", bundled_model, "hello", "--device", "toaster")
    assert code == 1
    assert "toaster" in error_of(err)
    code, _, err = run("generate", bundled_model, "hello", "--precision", "w2a2")
    assert code == 2
    assert "'w2a2' is not one of 'w4a16', 'w4a8', 'w8a8', 'fp16'" in error_of(err)


def test_an_unknown_plan(run, bundled_model):
    code, out, err = run("generate", bundled_model, "hello", "--device", "host", "--plan", "fast")
    assert (code, out) == (1, "")
    assert "'fast'" in error_of(err)
    assert "gpu, npu, layer" in error_of(err)


def test_errors_leave_json_output_empty(run, tmp_path):
    code, out, _ = run("generate", tmp_path / "none", "hello", "--json")
    assert (code, out) == (1, "")


# -- devices and cache -------------------------------------------------------------------------------


def test_devices_where_nothing_is_installed(run, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec

    def no_runtime(*_asking):
        raise DeviceError("No OpenCL runtime was found.", fix="Run `pip install 'heterollm[host]'`.")

    monkeypatch.setattr("heterollm.kernels.gpu.list_opencl_devices", no_runtime)
    missing = {"onnxruntime", "onnxruntime_qnn"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in missing else real(name, *rest)
    )
    code, out, _ = run("devices", "--json")
    assert code == 0
    statuses = {status["name"]: status for status in json.loads(out)}
    simulated = {name for name in statuses if name.startswith("sim:")}
    assert {"sim:snapdragon-8gen3", "sim:snapdragon-8elite"} <= simulated
    for name in simulated:
        status = statuses.pop(name)
        assert status["usable"]  # they need nothing
        assert status["time"] == "simulated"
    assert set(statuses) == {"snapdragon", "opencl", "intel", "host", "emulator", "intel:cpu"}
    for status in statuses.values():
        assert not status["usable"]
        assert status["reason"]
        assert "pip install" in status["fix"]
    code, out, _ = run("devices")
    assert code == 0
    assert all(name in out for name in ("snapdragon", "host", "emulator", "OpenCL"))
    assert "yes" not in out


def test_cache_list_clear_and_path(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    assert run("cache", "path") == (0, f"{tmp_path}\n", "")
    weights = make_own_folder("weights") / f"{'a' * 32}.safetensors"
    weights.write_bytes(b"x" * 2048)
    kinds = {kind["name"]: kind for kind in json.loads(run("cache", "list", "--json")[1])}
    assert (kinds["weights"]["files"], kinds["weights"]["size_bytes"]) == (1, 2048)
    assert "2.0 KiB" in run("cache", "list")[1]
    assert run("cache", "clear", "graphs", "--yes")[0] == 0
    assert weights.exists()
    code, out, _ = run("cache", "clear", "--yes")
    assert (code, out) == (0, "Deleted 1 files, 2.0 KiB.\n")
    assert not weights.exists()


def test_clearing_asks_first(run, tmp_path, monkeypatch):
    import io

    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    weights = make_own_folder("weights") / f"{'a' * 32}.safetensors"
    weights.write_bytes(b"x")
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert run("cache", "clear")[0] == 1
    assert weights.exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert run("cache", "clear")[0] == 0
    assert not weights.exists()


def test_clearing_an_unknown_kind_is_refused(run):
    code, out, err = run("cache", "clear", "everything")
    assert (code, out) == (2, "")
    assert "'everything' is not one of 'weights', 'gguf'" in error_of(err)


# -- real processes ----------------------------------------------------------------------------------


def test_help_loads_nothing_heavy(tmp_path):
    script = (
        "import sys; from heterollm.cli.command_line import main; main(['--help']); "
        "heavy = {'numpy', 'pyopencl', 'onnxruntime', 'transformers', 'rich', 'huggingface_hub', "
        "'joblib', 'scipy', 'sklearn'}; "
        "sys.stderr.write(str(sorted(heavy & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == "[]"
    for command in ("generate", "chat", "demo", "devices", "doctor", "cache"):
        assert command in done.stdout


def test_the_bundled_model_answers(bundled_model, tmp_path):
    arguments = ("generate", bundled_model, "import os", "--device", "host", "--max-new-tokens", 12)
    streamed = process(*arguments, cwd=tmp_path)
    assert streamed.returncode == 0, streamed.stderr
    assert "12 new tokens" in streamed.stderr
    # The choice of the plan and the statistics, and not a word of any library.
    assert streamed.stderr.startswith("auto: gpu, since host has no profile")
    assert streamed.stderr.count("\n") == 3
    assert "\x1b" not in streamed.stdout + streamed.stderr
    whole = process(*arguments, "--json", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    data = json.loads(whole.stdout)
    assert data["text"] + "\n" == streamed.stdout
    assert whole.stderr == streamed.stderr.splitlines(keepends=True)[0]
    assert data["generated_tokens"] == 12
    assert data["device"] == "host"


def test_chat_over_a_pipe(bundled_model, tmp_path):
    lines = "def add(a, b):\n/what\n\n/reset\ndef add(a, b):\n/exit\nnever read\n"
    done = process(
        *("chat", bundled_model, "--device", "host", "--max-new-tokens", 6), cwd=tmp_path, input=lines
    )
    assert done.returncode == 0, done.stderr
    assert "There is no /what" in done.stderr
    assert "forgotten" in done.stderr
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:] != ""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_ctrl_c_while_generating(bundled_model, tmp_path):
    options = ("--device", "host", "--max-new-tokens", "2000", "--temperature", "1", "--seed", "1")
    running = subprocess.Popen(
        [sys.executable, "-m", "heterollm", "generate", str(bundled_model), "import os", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=4096,  # less than the answer: it cannot end before it is read
    )
    try:
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=600)
    finally:
        running.kill()
    assert running.returncode == 130
    assert err.splitlines()[-1] == b"Interrupted."
    assert b"Traceback" not in err
    assert b"Error" not in err


@pytest.mark.skipif(os.name == "nt", reason="pipes end differently on Windows")
def test_a_reader_that_goes_away_is_no_error(bundled_model, tmp_path):
    command = [sys.executable, "-m", "heterollm", "generate", str(bundled_model), "import os"]
    running = subprocess.Popen(
        [*command, "--device", "host", "--max-new-tokens", "2000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=4096,  # less than the answer: it cannot end before it is read
    )
    try:
        assert running.stdout.read(1)
        running.stdout.close()
        err = running.stderr.read()
        assert running.wait(timeout=600) == 141
    finally:
        running.kill()
    assert b"Traceback" not in err
    assert b"Exception" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_result_is_an_error(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "heterollm", "--version"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "No space left" in error_of(done.stderr)
    assert "ignored" not in done.stderr


def test_native_prints_do_not_reach_the_result(tmp_path):
    script = (
        "import os, sys\n"
        "from heterollm.base.terminal import private_stdout, write\n"
        "with private_stdout():\n"
        "    os.write(1, b'noise of a native library')\n"
        "    write('result')\n"
        "os.write(1, b' afterwards')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "result afterwards", "")


# -- one word for one option -------------------------------------------------------------------------


def options_of(*words):
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return {name: param for param in command.params for name in param.opts}


def test_one_option_has_one_word_in_every_command():
    """A plan is --plan, a file -o, its form --format or --json, lengths --prompt and --decode."""
    asked = {
        "plan": ("generate", "chat", "compile", "plan", "bench", "simulate"),
        "prompt": ("plan", "compile", "bench", "simulate"),
        "decode": ("plan", "compile", "bench", "simulate"),
        "format": ("bench", "simulate"),
        "json": ("generate", "compile", "plan", "bench", "simulate", "profile", "trace", "demo", "devices"),
    }
    for option, commands in asked.items():
        assert all(f"--{option}" in options_of(command) for command in commands), option
    for command in ("plan", "bench", "simulate"):
        assert options_of(command)["-o"].metavar == "FILE"
    for command in typer.main.get_command(app).commands:
        assert not {"--plan-level", "--level", "--model", "--length", "--lengths", "--out"} & set(
            options_of(command)
        ), command
    assert {"-p", "-n", "-d"} <= set(options_of("bench"))


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "MODEL", "--format", "xml"],
        ["bench", "MODEL", "--json", "--format", "csv"],
        ["simulate", "--json", "--format", "md"],
        ["plan", "MODEL", "--plan", "npu"],
        ["plan", "MODEL", "--decode", "-1"],
        ["profile", "--quick", "show"],
        ["profile", "--precision", "w4a4"],
        ["generate", "MODEL", "hello", "--sync", "often"],
        ["generate", "MODEL", "hello", "--group-size", "48"],
        ["plan", "MODEL", "--forbid", "npu,cpu"],
        ["plan", "MODEL", "--prompt", "64,many"],
        ["simulate", "--plan", "tensor,auto"],
        ["simulate", "--length-policy", "none"],
        ["simulate", "--gpu-load", "60fps"],
        ["simulate", "--what-if", "npu.execute_us"],
        ["bench", "MODEL", "-p", "x"],
        ["bench", "MODEL", "-pg", "5"],
        ["bench", "MODEL", "--sync", "event,often"],
        ["bench", "MODEL", "--precision", ""],
    ],
)
def test_a_value_that_no_option_takes_is_wrong_usage(run, words):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "Usage:" in err
    assert f"heterollm {words[0]} -h" in error_of(err)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["generate", "m", "p", "--sync", "x"], get_args(Sync)),
        (["generate", "m", "p", "--precision", "x"], get_args(Precision)),
        (["bench", "m", "--sync", "event,x"], get_args(Sync)),
        (["simulate", "--length-policy", "x"], get_args(SimulatedLengthPolicy)),
        (["cache", "clear", "x"], KINDS),
    ],
)
def test_a_refused_value_lists_the_choices(run, words, names):
    err = error_of(run(*words)[2])
    assert "'x' is not one of" in err
    assert all(f"'{name}'" in err for name in names)


def test_a_hub_name_gives_shapes_without_weights(run, monkeypatch, bundled_model):
    asked = []

    def download(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(bundled_model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    code, out, err = run(
        "simulate", "some/model", "--prompt", "8", "--decode", "0", "--plan", "gpu", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["setup"]["model_filename"] == "some/model"
    assert asked
    assert all(files == ["config.json", "generation_config.json"] for _, files in asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stop", ""], "--stop is empty"),
        (["--top-p", "2"], "top_p"),
        (["--temperature", "nan"], "temperature"),
        (["--max-new-tokens", "-1"], "max_new_tokens"),
    ],
)
def test_options_of_an_answer_are_refused_before_loading(run, monkeypatch, options, words):
    def load(*_, **__):
        raise AssertionError("The model was loaded.")

    monkeypatch.setattr(heterollm.llm.LLM, "load", load)
    code, out, err = run("generate", "folder", "hello", *options)
    assert (code, out) == (1, "")
    assert words in error_of(err)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_notes_wrap_between_words_on_a_terminal(monkeypatch, width):
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, no_color=True, width=width)
    monkeypatch.setattr(console, "stderr_console", lambda: terminal)
    words = [f"word{number:03}" for number in range(60)]
    console.show(console.note(" ".join(words)))
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown.getvalue().splitlines()]
    assert len(lines) > 1
    assert all(len(line) <= width for line in lines)
    assert [word for line in lines for word in line.split()] == words


def test_a_demo_of_no_tokens_is_refused(run):
    code, out, err = run("demo", "--max-new-tokens", "0")
    assert (code, out) == (1, "")
    assert "--max-new-tokens is 0" in error_of(err)
