"""Linear layers that compute the operators around them, in decode passes of a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import OpenClRuntime, programs, runtime
from heterollm.kernels.gpu.sources import read_sources
from heterollm.llm import LLM
from heterollm.model import model_shape
from heterollm.profiler.measure import layer_tasks
from heterollm.profiler.records import Profile
from heterollm.solver import ProfileCosts
from heterollm.solver.submissions import LayerGroup, kernels_before_us

FIVE = ["qkv", "attention", "o", "gate_up", "down"]
HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
WIDE = HEADS | {"head_dim": 64, "hidden_size": 512}

Load = Callable[..., LLM]


@pytest.fixture
def load(
    taken_for_gpu: None,
    checkpoint: Callable[..., Path],
    host_llm: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> Load:
    """Return a function that loads a random model on a GPU, of any number of units, with checked passes."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")

    def open_llm(family: str, overrides: dict[str, Any], units: int = 0, **options: Any) -> LLM:
        if units:
            take_units(monkeypatch, units)
        folder = checkpoint(family, **overrides)
        return host_llm(folder, **{"device": "opencl", "plan": "gpu", "context": 64, **options})

    return open_llm


def kernels(llm: LLM, layer: int) -> list[str]:
    """Return the operators of the kernels of a layer in a decode pass."""
    steps = llm.steps("decode", 1)
    return [
        step.operator
        for step in steps
        if step.action == "kernel" and step.layer == layer and step.operator != "late write"
    ]


def take_units(patch: pytest.MonkeyPatch, units: int) -> None:
    """Give a GPU so many compute units."""
    traits = runtime.device_traits
    many = {"compute_units": units}
    patch.setattr(runtime, "device_traits", lambda *own, **named: replace(traits(*own, **named), **many))


@pytest.mark.parametrize(
    ("family", "overrides", "options", "expected"),
    [
        ("llama", HEADS | {"head_dim": 32}, {}, FIVE),
        ("llama", HEADS | {"head_dim": 128}, {"precision": "w4a8"}, FIVE),
        ("llama", HEADS | {"head_dim": 64}, {"precision": "fp16", "kv_bits": 8}, FIVE),
        ("qwen2", {"num_hidden_layers": 3}, {}, FIVE),
        ("qwen3", HEADS | {"head_dim": 64}, {"kv_bits": 8}, FIVE),
        ("qwen3", HEADS | {"head_dim": 128}, {"precision": "w4a8"}, FIVE),
        # Parts of a longer context are joined.
        ("llama", HEADS, {"context": 256}, [*FIVE[:2], "attention join", *FIVE[2:]]),
        # RoPE would leave a large GPU without work.
        ("qwen3", WIDE, {"units": 132}, [*FIVE[:1], "rope", *FIVE[1:]]),
        # Codes of the activation take whole blocks of rows.
        (
            *("llama", WIDE, {"units": 132, "precision": "w4a8"}),
            [*FIVE[:1], "rope", *FIVE[1:4], "activation", *FIVE[4:]],
        ),
        ("gemma", HEADS, {}, [*FIVE[:1], "rope", *FIVE[1:]]),
        ("qwen3", HEADS, {}, [*FIVE[:1], "rope", *FIVE[1:]]),
    ],
)
def test_a_layer_has_five_kernels(
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    expected: list[str],
    load: Load,
    checkpoint: Callable[..., Path],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its logits are as near to exact ones as those of a kernel for each operator.

    Heads that lie in no whole tiles of 64 rows keep RoPE's launch.
    """
    llm = load(family, overrides, **options)
    assert kernels(llm, 1) == expected
    ids = np.random.default_rng(0).integers(1, 200, 30).tolist()
    exact = reference(llm, checkpoint(family, **overrides), ids)[10:]
    monkeypatch.setattr(OpenClRuntime, "has_endings", False)
    alone = load(family, overrides, **options)
    assert len(kernels(alone, 1)) == 9 + ("attention join" in expected)
    errors = []
    for one in (llm, alone):
        session = one.session()
        session.prefill(ids[:10])
        errors.append(np.square(np.stack([*map(session.decode, ids[10:])]) - exact).mean())
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize(
    ("family", "overrides", "options", "expected"),
    [
        ("llama", HEADS | {"head_dim": 32}, {}, [0, 2, 0, 0]),
        ("qwen3", HEADS | {"head_dim": 128}, {"precision": "w4a8"}, [0, 2, 0, 0]),
        # Heads of 16 elements; norms behind attention and network; gates of attention.
        ("gemma", HEADS, {}, [0, 3, 0, 0]),
        ("gemma2", HEADS | {"head_dim": 64}, {}, [1, 2, 1, 0]),
        # RoPE would leave a large GPU without work.
        ("qwen3", WIDE | {"intermediate_size": 2112}, {"units": 132}, [0, 3, 0, 0]),
        # The NPU has all linear layers.
        ("llama", HEADS | {"head_dim": 32}, {"plan": "npu"}, [1, 3, 1, 1]),
    ],
)
def test_predictions_count_the_kernels_that_run(
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    expected: list[int],
    load: Load,
    sample_profile: Callable[..., Profile],
) -> None:
    """Before each group of linear layers, in the middle of a decode pass."""
    # So long a context is attended to in parts, as at the longest of a profile.
    llm = load(family, overrides, context=256, **options)
    shape = model_shape(llm.config, "random", precision=llm.plan.precision, float_bits=32)
    profile, device = sample_profile(npu=None), open_device("opencl", npu_threads=0)
    for task in layer_tasks(device, [shape], quick=True):
        if task.keys[0].tokens == 1 and task.keys[0].operator.startswith(("rms", "rope", "gated", "att")):
            for record in task.run():
                profile.add(record)
    device.close()
    costs = ProfileCosts(profile, shape)
    placed = [*llm.plan.operators("decode", 1, shape.layer, rows=1)]
    groups = [LayerGroup.of(spec, (), costs) for spec, _ in placed]
    found = kernels_before_us(groups, [placement for _, placement in placed], costs.overheads)
    assert [len(own) for own in found] == expected
    runs = [step for step in llm.steps("decode", 1) if step.layer == 1 and step.action in ("kernel", "graph")]
    at = [number for number, step in enumerate(runs) if step.operator in ("qkv", "o", "gate_up", "down")]
    assert [later - own - 1 for own, later in pairwise([-1, *at])] == expected


def test_a_broken_ending_leaves_the_operators_to_their_own_kernels(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Opening a GPU of an untested driver finds it out, and the model says so."""

    def broken(files: Sequence[str]) -> str:
        return read_sources(files).replace("sum_of(values);", "2.0f * sum_of(values);")

    untested = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(OpenClRuntime, "tests_kernels", untested, raising=False)
    ids, found = [5, 6, 7], []
    for reads in (read_sources, broken):
        monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / reads.__name__))
        monkeypatch.setattr(programs, "read_sources", reads)
        llm = load("llama", HEADS | {"head_dim": 32})
        session = llm.session()
        session.prefill(ids)
        found.append(session.decode(8))
        assert len(kernels(llm, 1)) == (9 if reads is broken else 5)
        notes = [note for note in llm.notes if "launches operators behind linear layers singly" in note]
        assert len(notes) == (reads is broken)
    assert np.abs(found[0] - found[1]).max() < 1e-4
