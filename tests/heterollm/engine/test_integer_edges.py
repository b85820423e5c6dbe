"""Plans with integer graphs of every cut: the GPU writes and reads the codes at their edges."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from heterollm.calibration import load_calibration
from heterollm.calibration.range_records import (
    OCTAVES,
    STEPS_PER_OCTAVE,
    FfnCalibration,
    LinearCalibration,
    RangeErrors,
)
from heterollm.calibration.records import Calibration
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.llm import LLM
from heterollm.solver import Plan, model_shape
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry

EXACT = RangeErrors(0.0, 0.0, 0.0)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
CHUNK = 160
CASES = {
    1: "row",
    5: "npu",
    31: "npu",
    33: "row",
    64: "ffn",
    70: "pipe",
    97: "sequence",
    130: "sequence",
}
"""The cut of every operator in a pass of so many tokens."""

RANGE_DB = 55
"""What wide ranges leave of the logits."""


def calibration(llm: LLM, path: Path, magnitude: float = 1.0) -> Path:
    """Write wide ranges, for weights of any text; those of linears times ``magnitude``."""
    specs = [spec for spec in llm._weights.specs if spec.group != "head"]
    histogram = (0,) * (OCTAVES * STEPS_PER_OCTAVE)
    linears = []
    for spec in specs:
        wide = (16.0,) * len(spec.members)
        relative = (4.0 * magnitude,) * len(spec.members)
        one = LinearCalibration(spec.layer, spec.group, 16.0, wide, relative, histogram, 1.0, (), EXACT)
        linears.append(one)
    ffns = tuple(FfnCalibration(spec.layer, 16.0, errors=EXACT) for spec in specs if spec.group == "down")
    key = llm._weights.content_key
    Calibration(key, "wide", "none", 1, 1, 1, 1, tuple(linears), ffns).save(path)
    return path


def placed(spec: OpSpec, kind: str, tokens: int) -> RowsPlacement:
    whole, half = spec.member_rows, tuple(rows // 2 // 64 * 64 for rows in spec.member_rows)
    padded = -(-tokens // 32) * 32
    padded = next(length for length in (32, 64, 128, 256) if length >= padded)
    return {
        "npu": RowsPlacement(whole, (padded,), "integer"),
        "row": RowsPlacement(half, (padded,), "integer"),
        "pipe": RowsPlacement(whole, (64, 32), "integer"),
        "sequence": RowsPlacement(whole, (64, 32) if tokens > 128 else (64,), "integer"),
    }[kind]


def integer_plan(llm: LLM) -> Plan:
    """Return a plan with the cuts of :data:`CASES`; the head and other lengths run on the GPU."""
    specs, entries = llm._weights.specs, []
    layers = (0, llm.config.layers - 1)
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for tokens, kind in CASES.items():
        for phase in phases:
            if kind == "ffn":
                ffn = FfnPlacement(SHAPE["intermediate_size"], (64,), "ffn_integer")
                entries.append(PlanEntry(phase, (tokens, tokens), layers, "ffn", ffn))
            own = ("qkv", "o") if kind == "ffn" else ("qkv", "o", "gate_up", "down")
            for spec in specs:
                if spec.layer == 0 and spec.group in own:
                    at = placed(spec, "npu" if kind == "ffn" else kind, tokens)
                    entries.append(PlanEntry(phase, (tokens, tokens), layers, spec.group, at))
    for phase in phases:
        entries += [
            PlanEntry(phase, (1, CHUNK), (spec.layer, spec.layer), spec.group, GPU_ONLY) for spec in specs
        ]
    return Plan("integers", "host", "w4a16", model_shape(specs), CHUNK, tuple(entries))


def logits(llm: LLM) -> np.ndarray:
    """Return logits of passes of every length, of decoded tokens, and of a chunk after another."""
    ids = np.random.default_rng(7).integers(1, 250, 2 * CHUNK).tolist()
    session, rows = llm.session(), []
    for tokens in CASES:
        session.reset()
        rows += [*session.prefill(ids[:tokens], all_logits=True), session.decode(ids[tokens])]
    session.reset()
    rows += [session.prefill(ids[: CHUNK + 33]), *session.decode(ids[-5:])]
    return np.stack(rows)


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", **SHAPE)


@pytest.fixture
def load(host_llm: Callable[..., LLM], folder: Path, tmp_path: Path) -> Callable[..., LLM]:
    """Return a function that loads the model with integer graphs on wide ranges."""

    def loaded(magnitude: float = 1.0, **options: Any) -> LLM:
        with LLM.load(folder, device="host", plan="gpu", scales="stepped") as plain:
            plan, file = integer_plan(plain), calibration(plain, tmp_path / "wide.json", magnitude)
        plan = structs.replace(plan, calibration=load_calibration(file).key)
        return host_llm(folder, plan=plan, scales="stepped", calibration=file, **options)

    return loaded


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("svm", "event"),
        ("mapped", "event"),
        *(
            pytest.param(kind, sync, marks=pytest.mark.slow)
            for kind, sync in (("host", "event"), ("svm", "flag"), ("mapped", "finish"), ("host", "operator"))
        ),
    ],
)
def test_every_cut_gives_the_logits_of_the_gpu(
    kind: str,
    sync: str,
    load: Callable[..., LLM],
    host_llm: Callable[..., LLM],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of buffers is proven on the way, and the same passes give the same bits again."""
    expected = logits(host_llm(folder, plan="gpu", scales="stepped"))
    monkeypatch.setenv("HETEROLLM_SHARED_MEMORY", kind)
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    llm = load(sync=sync)
    got = logits(llm)
    assert RANGE_DB < sqnr_db(got, expected) < 100  # integers did run
    np.testing.assert_array_equal(logits(llm), got)
    assert not [note for note in llm.notes if "ranges" in note]


def test_the_gpu_writes_and_reads_the_codes(load: Callable[..., LLM]) -> None:
    """Norms write codes themselves; other inputs, and all outputs, have a kernel."""
    llm = load()
    layers = llm.config.layers
    for tokens, outputs in ((33, 4), (64, 3)):
        steps = llm.steps("prefill", tokens)
        count = Counter(step.operator for step in steps if step.action == "kernel")
        assert count["rounding of inputs"] == (2 if tokens == 33 else 1) * layers
        assert count["reading of codes"] == outputs * layers
        for step in steps:
            if step.action == "graph":
                assert [buffer.name for buffer in (*step.reads, *step.writes)] == [
                    "npu_codes_in",
                    "npu_codes_out",
                ]
            if step.operator == "norm":
                assert "npu_codes_in" in {buffer.name for buffer in step.writes}


def test_values_outside_their_range_are_counted(load: Callable[..., LLM]) -> None:
    """By operator and over all tokens, until the model runs elsewhere."""
    llm = load(magnitude=1 / 64)
    assert not [note for note in llm.notes if "left" in note]  # warming up does not count
    llm.session().prefill(list(range(1, 34)))
    [note] = [note for note in llm.notes if "left" in note]
    assert note.startswith(f"Values at {4 * llm.config.layers} operators left their calibrated ranges")
    saturated, values = map(int, re.search(r"(\d+) of (\d+) at", note).groups())
    assert 0 < saturated < values
    # A cut leaves the NPU half of the rows of each member, at 33 tokens.
    assert values in {33 * sum(rows // 2 for rows in spec.member_rows) for spec in llm._weights.specs}
