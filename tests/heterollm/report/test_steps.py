"""``heterollm plan --steps``: passes as tables that show layers once, and as JSON with every step."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heterollm.cli.steps import show_steps
from heterollm.engine.step import Buffer, Step, Wait
from heterollm.planning import LoadOptions
from heterollm.report import console
from heterollm.report.steps import PassSteps, steps_json, steps_report
from heterollm.simulate import SimulationRequest, simulate

PASSES: tuple[tuple[Any, int], ...] = (("prefill", 40), ("decode", 1))


def step(operator: Any, layer: int | None, reads: str, writes: str, **fields: Any) -> Step:
    name = operator if layer is None else f"{layer}.{operator}"
    return Step(
        **{
            "operator": operator,
            "layer": layer,
            "tokens": 40,
            "processor": "gpu",
            "action": "kernel",
            "label": name,
            "reads": tuple(map(Buffer, reads.split())),
            "writes": tuple(map(Buffer, writes.split())),
            "run": lambda: None,
            **fields,
        }
    )


def made(layers: int, odd: int | None = None) -> tuple[Step, ...]:
    """Return a pass of some layers, of which one may have another cut."""
    steps = [step("embedding", None, "tokens", "residual")]
    for layer in range(layers):
        reads = "residual npu_output" if layer else "residual"
        steps += [
            step("norm", layer, reads, "linear_input"),
            step(
                "qkv",
                layer,
                "",
                "",
                processor="host",
                action="wait",
                wait=Wait("linear_input", "event"),
            ),
        ]
        shard = f"{layer}.qkv q[0:{128 if layer == odd else 64}]"
        npu = {"processor": "npu", "action": "graph", "label": shard}
        steps.append(step("qkv", layer, "linear_input", "npu_output", **npu))
    return (*steps, step("head", None, "head_input", "logits"))


def lines(steps: tuple[Step, ...]) -> list[list[str]]:
    shown = console.render(steps_report([PassSteps("prefill", 40, steps)], "a device"))
    return [" ".join(line.split()).split(" ", 20) for line in shown.splitlines() if line.strip()]


def text(steps: tuple[Step, ...]) -> list[str]:
    return [" ".join(words) for words in lines(steps)]


def test_layers_that_are_alike_are_shown_once() -> None:
    assert text(made(4))[4:] == [
        "GPU embedding tokens residual",
        "0 GPU norm residual linear_input",
        "host wait by event linear_input",
        "NPU qkv q[0:64] linear_input npu_output",
        "1 to 3 as layer 0, but",
        "GPU norm residual, npu_output linear_input",
        "head GPU head head_input logits",
    ]


def test_a_layer_that_is_cut_otherwise_is_told() -> None:
    assert text(made(5, odd=3))[8:] == [
        "1 to 2 as layer 0, but",
        "GPU norm residual, npu_output linear_input",
        "3 as layer 0, but",
        "GPU norm residual, npu_output linear_input",
        "NPU qkv q[0:128] linear_input npu_output",
        "4 as layer 0, but",
        "GPU norm residual, npu_output linear_input",
        "head GPU head head_input logits",
    ]


def test_a_layer_with_other_steps_is_shown_whole() -> None:
    steps = tuple(one for one in made(3) if not (one.layer == 2 and one.wait))
    assert text(steps)[8:] == [
        "1 as layer 0, but",
        "GPU norm residual, npu_output linear_input",
        "2 GPU norm residual, npu_output linear_input",
        "NPU qkv q[0:64] linear_input npu_output",
        "head GPU head head_input logits",
    ]


def test_the_kernels_of_a_merged_launch_are_bracketed() -> None:
    first, second, *rest = made(1)
    third = step("qkv", 0, "linear_input", "gpu_output")
    merged = replace(first, operator="merged", merged=(first, second, third))
    told = text((merged, *rest))
    assert told[4:7] == [
        "┌ GPU embedding tokens residual",
        "0 │ GPU norm residual linear_input",
        "└ GPU qkv linear_input gpu_output",
    ]
    assert "one launch" in told[-1]


def test_the_json_has_every_step() -> None:
    steps = made(4)
    (one,) = json.loads(json.dumps(steps_json([PassSteps("decode", 1, steps)])))
    assert (one["phase"], one["tokens"], len(one["steps"])) == ("decode", 1, len(steps))
    assert one["steps"][2] == {
        "operator": "qkv",
        "layer": 0,
        "tokens": 40,
        "processor": "host",
        "action": "wait",
        "reads": [],
        "writes": [],
        "label": "0.qkv",
        "wait": {"buffer": "linear_input", "strategy": "event"},
        "merged": [],
    }


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a simulated device, kept in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        simulate(SimulationRequest("tinyllama-1.1b", prompt=32, decode=0, level="layer"))
        from heterollm.base import cache_root

        (found,) = (cache_root() / "profiles" / "simulated").glob("*.json")
        return found


def test_the_command_needs_no_weights_on_a_simulated_device(profile: Path, run: Callable[..., Any]) -> None:
    arguments = ("plan", "tinyllama-1.1b", "--profile", profile, "--group-size", "128", "--prompt", "300")
    code, out, _ = run(*arguments, "--steps")
    assert code == 0
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert "prefill of 300 tokens" in shown
    assert "decode of 1 token" in shown
    assert sum(line.startswith("1 to 21 as layer 0") for line in shown) == 2
    code, out, _ = run(*arguments, "--steps", "--json")
    assert code == 0
    prefill, decode = json.loads(out)
    assert (prefill["tokens"], decode["tokens"]) == (300, 1)
    assert {one["layer"] for one in prefill["steps"]} == {None, *range(22)}


def test_on_another_device_the_model_is_loaded(
    bundled_model: Path, host_llm: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = host_llm(bundled_model, plan="npu")
    solved: Any = SimpleNamespace(plan=llm.plan)
    options = LoadOptions(context=llm.context)
    show_steps(str(bundled_model), solved, (40,), options, decode=True, as_json=True)
    passes = [PassSteps(phase, tokens, llm.steps(phase, tokens)) for phase, tokens in PASSES]
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(steps_json(passes)))
