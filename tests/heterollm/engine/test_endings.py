"""Linear layers that compute the operators around them, in decode passes of a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.gpu import OpenClRuntime, runtime
from heterollm.kernels.gpu.sources import read_sources
from heterollm.llm import LLM

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
    """Return a function that loads a random model on a GPU, with checked passes."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")

    def open_llm(family: str, overrides: dict[str, Any], **options: Any) -> LLM:
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
    options = dict(options)
    if units := options.pop("units", 0):
        traits = runtime._traits
        many = {"compute_units": units}
        monkeypatch.setattr(runtime, "_traits", lambda *own, **named: replace(traits(*own, **named), **many))
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
        monkeypatch.setattr(runtime, "read_sources", reads)
        llm = load("llama", HEADS | {"head_dim": 32})
        session = llm.session()
        session.prefill(ids)
        found.append(session.decode(8))
        assert len(kernels(llm, 1)) == (9 if reads is broken else 5)
        notes = [note for note in llm.notes if "launches operators behind linear layers singly" in note]
        assert len(notes) == (reads is broken)
    assert np.abs(found[0] - found[1]).max() < 1e-4
