"""What a user sees of the program, held in ``tests/golden/``: its help, keys, files, exit codes and plans.

A change that was meant rewrites them with ``HETEROLLM_GOLDEN=write pytest -n0 -m "" tests/test_outside.py``.
They hold names, types, and placements on a simulated device: nothing that differs between machines.
"""

import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import resources
from itertools import groupby
from pathlib import Path

import pytest
import typer

from heterollm.cli import main

# All that is taken from inside; where it lies is no part of what is held.
from heterollm.cli.command_line import app
from heterollm.doctor import checks as doctor_checks
from heterollm.kernels.devices import open_device
from heterollm.loading import plan_for
from heterollm.model import KNOWN_MODELS
from heterollm.model.known_sizes import DEVICE_ROWS
from heterollm.planning import LoadOptions, PlanInputs, make_plan
from heterollm.solver import PlanRequest

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
WRITE = os.environ.get("HETEROLLM_GOLDEN") == "write"
AGAIN = 'If this was meant, run `HETEROLLM_GOLDEN=write pytest -n0 -m "" tests/test_outside.py`.'

SIMULATED = "sim:snapdragon-8gen3"
PAPER = "sim:snapdragon-8gen3-paper"


def hold(name, lines):
    """Fail with the difference where lines are not those of a golden file."""
    path = GOLDEN / f"{name}.txt"
    text = "".join(f"{line}\n" for line in lines)
    if WRITE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    held = path.read_text("utf-8") if path.exists() else ""
    if text != held:
        old, new = held.splitlines(), text.splitlines()
        difference = difflib.unified_diff(old, new, f"golden/{name}.txt", "now", n=1, lineterm="")
        pytest.fail("\n".join([*difference, AGAIN]), pytrace=False)


def call(line):
    """Run a command line, in which MODEL is the bundled model and ROOT the checkout."""
    named = {"MODEL": str(resources.files("heterollm") / "data" / "tiny_python_lm")}
    words = [named.get(word, word.replace("ROOT", str(ROOT))) for word in shlex.split(line)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def empty_folder(factory, name):
    """Work in a new folder with a cache of its own."""
    folder = factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(folder / "cache"))
        (folder / "work").mkdir()
        patch.chdir(folder / "work")
        yield folder


# -- help --------------------------------------------------------------------------------------------


def commands(command, words=()):
    """Yield the words and the command of a group and of everything under it."""
    yield " ".join(words), command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = []
    for name in COMMANDS:
        code, out, err = call(f"{name} --help")
        assert (code, err) == (0, "")
        lines += ["=" * 80, *out.splitlines()]
        if "--help-all" in out:
            lines += ["=" * 80, *call(f"{name} --help-all")[1].splitlines()]
    hold("help", lines)


# -- JSON, and the files that commands write ---------------------------------------------------------


RUNS = {
    "devices": "devices --json",
    "profile": f"profile MODEL --device {SIMULATED} --json",
    "profile list": "profile list --json",
    "profile show": "profile show --json",
    "profile export": "profile export profile.json",
    "profile compare": "profile compare profile.simulated.json profile.simulated.json --json",
    "plan": f"plan MODEL --device {SIMULATED} -o plan.json --json",
    "generate": f"generate MODEL 'import os' --device {SIMULATED} --plan tensor --max-new-tokens 3 "
    "--trace trace.json --json",
    "trace": "trace trace.simulated.json --json",
    "simulate": "simulate MODEL --plan tensor --prompt 64 --decode 2 --json",
    "simulate rows": "simulate MODEL --plan tensor --prompt 64 --decode 2 -o sweep.jsonl --format json",
    "demo": f"demo --device {SIMULATED} --max-new-tokens 2 --json",
    "bench": f"bench MODEL --device {SIMULATED} --plan tensor -p 33 -n 1 -r 1 -o bench.jsonl --json",
    "doctor": "doctor --device host --json",
    "convert": "convert MODEL -o ../converted --json",
    "export": "export MODEL --device host --plan layer --context 64 -o ../exported --json",
    "eval": "eval MODEL --text ../converted/config.json --window 32 --windows 1 --device host --plan gpu"
    " --json",
    "cache list": "cache list --json",
    "config show": "config show --json",
}
"""Commands by the name of what they print, in the order in which they need each other."""

PRINTING = {
    name: f"json/{name.replace(' ', '_')}"
    for name, line in RUNS.items()
    if line.endswith(("--json", " json"))
}
"""The goldens of those that print JSON."""

FILES = (
    "profile.simulated.json",
    "plan.json",
    "trace.simulated.json",
    "sweep.simulated.jsonl",
    "bench.simulated.jsonl",
)

NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
DATA = (
    r"(^|\.)(critical_us|differences|engine_us|facts|hand_over_ms|npu_versions|reasons|skipped|versions|what_if)|"
    r"\.cuts\.(prefill|decode)|^runs"
)
"""Objects whose keys are data: categories of time, libraries, operators, moments."""

OF_THE_MACHINE = re.compile(r"disturbed_fraction|samples_disturbed\[\]")
"""Null where the system does not say. Whether there are notes differs, too."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each command returned and printed, by its name, and the folder that they worked in."""
    with empty_folder(tmp_path_factory, "outside") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_checks, "LITMUS_ROUNDS", 300)
        return {name: call(line) for name, line in RUNS.items()}, folder


def printed(outputs, name):
    """Return the JSON value that a command printed."""
    code, out, err = outputs[0][name]
    assert code == 0, err
    return json.loads(out)


def key_lines(value):
    """Return every path of a JSON value with its types."""
    found = {}
    walk(value, "", found)
    for path, types in found.items():
        if len(types) > 1:
            types.discard("null")
        if OF_THE_MACHINE.search(path):
            types.clear()
    return [f"{path or '.'} {'|'.join(sorted(types)) or 'any'}" for path, types in sorted(found.items())]


def walk(value, path, found):
    found.setdefault(path, set()).add(NAMES.get(type(value), "number"))
    if isinstance(value, dict):
        keys_are_data = re.search(f"({DATA})$", path)
        for key, item in value.items():
            walk(item, f"{path}.{'*' if keys_are_data else key}".lstrip("."), found)
    elif isinstance(value, list) and not path.endswith("notes"):
        for item in value:
            # Records of a profile differ by their kind, events of a trace by their category.
            kind = item.get("kind", item.get("cat", "")) if path in ("records", "traceEvents") else ""
            walk(item, f"{path}[{kind}]", found)


@pytest.mark.parametrize("name", PRINTING)
def test_keys_of_json(outputs, name):
    hold(PRINTING[name], key_lines(printed(outputs, name)))


@pytest.mark.parametrize("name", FILES)
def test_fields_of_files(outputs, name):
    text = (outputs[1] / "work" / name).read_text("utf-8")
    rows = name.endswith(".jsonl")
    hold(
        f"files/{name}",
        key_lines([json.loads(line) for line in text.splitlines()] if rows else json.loads(text)),
    )


def test_files_are_those_that_are_held(outputs):
    assert {path.name for path in (outputs[1] / "work").iterdir()} == set(FILES)


def test_every_command_that_prints_json_is_held():
    printing = {
        name for name, command in COMMANDS.items() if any("--json" in param.opts for param in command.params)
    }
    assert len(printing) > 10
    # tests/heterollm/calibration has the keys of calibrate, tests/heterollm/model/test_hub.py those of list.
    assert printing <= {*PRINTING, "compile", "calibrate", "list"}


def test_keys_of_compiled_graphs(outputs, tmp_path_factory):
    devices = {device["name"]: device for device in printed(outputs, "devices")}
    if not devices["emulator"]["usable"]:
        pytest.skip(devices["emulator"]["reason"])
    with empty_folder(tmp_path_factory, "compiled") as folder:
        code, out, err = call("compile MODEL --soc 57 --prompt 0 --json")
        assert code == 0, err
    hold("json/compile", key_lines(json.loads(out)))
    hold("cache/compile", layout(folder / "cache"))


# -- the cache ---------------------------------------------------------------------------------------


def layout(cache):
    """Return the paths below a cache folder, with placeholders for hashes, each once.

    What OpenCL runtimes keep there is theirs.
    """
    paths = (path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())
    own = (path for path in paths if not path.startswith("opencl/"))
    return sorted({re.sub(r"[0-9a-f]{16,}", lambda found: f"<{len(found[0])} hex>", path) for path in own})


def test_layout_of_the_cache(outputs):
    kinds = [f"{kind['name']}/ {kind['content']}" for kind in printed(outputs, "cache list")]
    hold("cache/simulated", [*kinds, "", *layout(outputs[1] / "cache")])


@pytest.mark.slow
def test_demo_of_a_real_device(tmp_path_factory):
    """It takes a minute, and also leaves what only a real device's profile does."""
    with empty_folder(tmp_path_factory, "host") as folder:
        code, out, err = call("demo --device host --max-new-tokens 2 --json")
        assert code == 0, err
    result = json.loads(out)
    hold("json/demo_host", key_lines(result))
    hold("cache/host", layout(folder / "cache"))


# -- exit codes --------------------------------------------------------------------------------------


CALLS = (
    "",
    "--version",
    "--no-such-option",
    "genrate",
    "bench",
    "bench --from missing.jsonl",
    "cache",
    "cache clear",
    "cache clear nonsense",
    "cache list",
    "cache path",
    "chat",
    "chat ./missing",
    "compile MODEL",
    "compile MODEL --soc 57 --plan tensor",
    "demo --device nonsense",
    "devices",
    "doctor --device nonsense",
    "generate",
    "generate MODEL",
    "generate MODEL hello --max-new-tokens many",
    "generate MODEL hello --plan nonsense",
    "generate MODEL hello --precision int3",
    "generate MODEL hello --device nonsense",
    "generate ./missing hello",
    "plan",
    "plan ./missing",
    f"plan MODEL --device {SIMULATED}",
    "plan MODEL --profile missing.json",
    "profile --budget soon",
    "profile compare missing.json missing.json",
    "profile import missing.json",
    "profile list",
    "profile show",
    "simulate nonsense",
    "simulate --plan nonsense",
    "simulate --prompt none",
    "simulate --soc nonsense",
    "trace",
    "trace missing.json",
)


class Interrupting(io.StringIO):
    def read(self, *_arguments):
        raise KeyboardInterrupt


def test_exit_codes(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with empty_folder(tmp_path_factory, "codes"):
        lines = [f"{call(line)[0]} heterollm {line}".rstrip() for line in CALLS]
        monkeypatch.setattr(sys, "stdin", Interrupting())
        lines.append(f"{call('generate MODEL -')[0]} heterollm generate MODEL - (Ctrl-C)")
        if os.name == "posix":
            read, write = os.pipe()
            os.close(read)
            command = [sys.executable, "-m", "heterollm", "cache", "list"]
            done = subprocess.run(command, stdout=write, stderr=subprocess.DEVNULL, check=False)
            os.close(write)
            lines.append(f"{done.returncode} heterollm cache list (nobody reads)")
    hold("exit_codes", lines)


# -- simulated plans ---------------------------------------------------------------------------------


QUICK = ("llama-3-8b", "qwen2-0.5b")
# Level block refuses mixtures of experts without shared ones; tests of simulations hold their plans.
# Of the models of DEVICE_ROWS, those with kinds of layers have plans here; others have shapes like these.
KINDS = ("gemma-3-1b", "lfm2-1.2b", "qwen3.5-0.8b")
ALIKE = {name for name, *_ in DEVICE_ROWS} - {*KINDS}
DENSE = [name for name, model in KNOWN_MODELS.items() if not model.size.experts and name not in ALIKE]
MODELS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DENSE]
LEVELS = ("gpu", "npu", "layer", "tensor", "block")

PROMPTS = (1, 2, 3, 5, 10, 31, 32, 33, 64, 70, 135, 256, 300, 525, 600, 1000, 1024, 1100)
DECODE = range(1, 17)
"""Passes as they are really run: a prompt in its chunks, and decode of so many tokens."""

PLANNED = sorted({*range(1, 34), *range(32, 1101, 32), *range(33, 1101, 32), *PROMPTS})
"""Passes that a saved plan is asked for."""


def placement_text(spec, placement):
    if not placement.npu_lengths:
        return f"{spec.group} gpu"
    rows = "all" if placement.npu_rows == spec.member_rows else "+".join(map(str, placement.npu_rows))
    form = f" {placement.form}" if placement.form else ""
    return f"{spec.group} {rows}@{'+'.join(map(str, placement.npu_lengths))}{form}"


def pass_text(plan, specs, phase, tokens):
    """Return who computes what in a pass of so many tokens: rows@lengths of the NPU, or the GPU.

    First and last layer are asked, and are one text if they agree, as the head is.
    """
    # The head sees one token of a prompt.
    rows = tokens if phase == "decode" else 1
    ends = (0, max(spec.layer for spec in specs))
    texts = {}
    for layer in (*ends, -1):
        own = [spec for spec in specs if spec.layer == layer]
        parts = [placement_text(*found) for found in plan.operators(phase, tokens, own, rows=rows)]
        texts["; ".join(parts)] = None
    return "; ".join(texts)


def range_lines(asked, specs, phase, lengths):
    """Yield lines of neighbouring lengths that are placed alike."""
    for text, alike in groupby(lengths, lambda tokens: pass_text(asked, specs, phase, tokens)):
        first, *others = alike
        yield f"{phase} {first}{f'-{others[-1]}' if others else ''}: {text}"


def plan_lines(solved, level):
    """Return what a level does to a model, and a hash of what it does at many lengths."""
    model = solved["tensor"].model
    plan = (
        solved[level].plan
        if level in solved
        else make_plan(
            PlanInputs(
                *(model.config, model.specs, model.precision, PAPER, level),
                PlanRequest(context=model.config.max_positions),
                open_device(PAPER).standard_lengths,
            )
        ).plan
    )
    passes = sorted({length for prompt in PROMPTS for _, length in plan.chunks(prompt)})
    yield f"[{level}, chunks of {plan.chunk_length}]"
    yield from range_lines(plan, model.specs, "prefill", passes)
    yield from range_lines(plan, model.specs, "decode", DECODE)
    planned = [tokens for tokens in PLANNED if tokens <= plan.chunk_length]
    every = [*range_lines(plan, model.specs, "prefill", planned)]
    every += range_lines(plan, model.specs, "decode", DECODE)
    yield f"all: {hashlib.sha256(chr(10).join(every).encode()).hexdigest()[:16]}"


@pytest.mark.parametrize("model", MODELS)
def test_simulated_plans(tmp_path_factory, model):
    with empty_folder(tmp_path_factory, "plans"):
        code, _, err = call(f"profile {model} --device {PAPER}")
        assert code == 0, err
        solved = {
            level: plan_for(model, LoadOptions(device=PAPER, plan=level)) for level in ("tensor", "block")
        }
        hold(f"plans/{model}", [line for level in LEVELS for line in plan_lines(solved, level)])


# -- the goldens -------------------------------------------------------------------------------------


def test_no_golden_is_left_over():
    """A file that no test writes would be held by nothing."""
    names = {"help", "exit_codes", "cache/simulated", "cache/compile", "cache/host", "json/compile"}
    names |= {"json/demo_host", *PRINTING.values()}
    names |= {*(f"files/{name}" for name in FILES), *(f"plans/{model}" for model in DENSE)}
    assert {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.txt")} == {
        f"{name}.txt" for name in names
    }
