"""An NPU that dies inside a technique: a clear error or the GPU's answers, and never a damaged session.

`test_fallback.py` does the same for plain splits.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.base import GraphError
from heterollm.calibration import Policy, calibrate, load_calibration
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu.session import _BoundGraph
from heterollm.llm import LLM
from heterollm.planning import calibrated_scales
from heterollm.solver import (
    ChunkSchedule,
    ExpertGroup,
    ExpertsEntry,
    ExpertsPlacement,
    GroupTimes,
    Plan,
    PlannedAttention,
    PlannedExperts,
    SparseAttention,
    model_shape,
    with_shadows,
)
from heterollm.solver.placements import GPU_ONLY, RowsPlacement
from heterollm.solver.plan_records import PlanEntry
from heterollm.solver.sparse.attention import AttentionEntry

CHUNK = 64
CONTEXT = 320
PROMPT = 3 * CHUNK + 5
LAST = 4
"""Tokens that are decoded behind the prompt."""
LINEAR = "graph of (qkv|o|gate_up|down) of layer [0-3]"


class Npu:
    """The sessions of ONNX Runtime: raises as the runtime does, from one run on, until it is mended."""

    def __init__(self) -> None:
        self.runs = 0
        self.dies_at: int | None = None

    def die_after(self, runs: int) -> None:
        self.dies_at = self.runs + runs

    def mend(self) -> None:
        self.dies_at = None

    def run(self) -> None:
        self.runs += 1
        if self.dies_at is not None and self.runs >= self.dies_at:
            raise RuntimeError("the DSP restarted")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    state, opened = Npu(), _BoundGraph._open

    def open_to_break(graph: _BoundGraph) -> None:
        opened(graph)
        run = graph.run

        def run_or_die() -> None:
            state.run()
            run()

        graph.run = run_or_die

    monkeypatch.setattr(_BoundGraph, "_open", open_to_break)
    return state


class Technique(NamedTuple):
    """A model whose plan has a technique.

    Args:
        folder: Its checkpoint.
        plan: Its plan.
        options: Other options of loading.
        operator: Pattern of its operators in errors.
        exact: Whether the NPU computes what the GPU does, but for rounding.
        decodes: Whether decoded tokens run graphs.
    """

    folder: Path
    plan: Plan
    options: dict[str, Any]
    operator: str
    exact: bool
    decodes: bool = False

    def load(self, **options: Any) -> LLM:
        # Keys and values that are rounded to 16 bits differ by more than the gate of floats where sums do.
        given = {"device": "host", "plan": self.plan, "context": CONTEXT, "kv_bits": 32}
        given |= self.options | options
        return LLM.load(self.folder, **given)


def integer_splits(llm: LLM, key: str | None) -> Plan:
    """Return a plan with every linear of the layers in 8 bits on the NPU, in both phases."""
    specs, layers = llm._weights.specs, (0, llm.config.layers - 1)
    entries = []
    for phase in ("prefill", "decode"):
        for spec in specs:
            here = spec.group != "head"
            at = RowsPlacement(spec.member_rows, (CHUNK,), "static_int8") if here else GPU_ONLY
            where = layers if here else (spec.layer, spec.layer)
            entry = PlanEntry(phase, (1, CHUNK), where, spec.group, at)  # type: ignore[arg-type]
            if entry not in entries:
                entries.append(entry)
    return Plan("edited", "host", "w8a8", model_shape(specs), CHUNK, tuple(entries), calibration=key)


@pytest.fixture(scope="module")
def shadows(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Technique:
    path = tmp_path_factory.mktemp("int8") / "calibration.json"
    policy = Policy(pruned=0.0)
    found = calibrate(bundled_model, output=path, precision="w8a8", windows=2, gpu_threads=1, policy=policy)
    with LLM.load(bundled_model, device="host", plan="gpu", precision="w8a8") as llm:
        plan = integer_splits(llm, load_calibration(path).key)
    shadowed = {(one.layer, one.group) for one in found.linears if one.int8.activations == "shadow"}
    assert shadowed
    options = {"precision": "w8a8", "calibration": path}
    return Technique(bundled_model, with_shadows(plan, shadowed), options, LINEAR, exact=False, decodes=True)


@pytest.fixture(scope="module")
def flights(shadows: Technique) -> Technique:
    """llm.npu's order of chunks: several of them in flight."""
    times = tuple(GroupTimes(group, 10.0, 0.0, 100.0, 100.0) for group in ("qkv", "o", "gate_up", "down"))
    plan = structs.replace(shadows.plan, schedule=ChunkSchedule("out_of_order", 2, times))
    return shadows._replace(plan=plan)


@pytest.fixture(scope="module")
def sparse(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Technique:
    path = tmp_path_factory.mktemp("heads") / "calibration.json"
    calibrate(bundled_model, output=path, windows=2, gpu_threads=1)
    options: dict[str, Any] = {"scales": "stepped", "calibration": path}
    with LLM.load(bundled_model, device="host", plan="gpu", scales="stepped", context=CONTEXT) as llm:
        entries = []
        for layer, scales in calibrated_scales(path, 1).items():
            units = tuple((head,) for head in range(len(scales)))
            exponents = tuple(one.exponent for one in scales)
            keep = (0.25,) * llm.config.attention.heads
            placement = SparseAttention(keep, units, exponents, "npu", buckets=1)
            entries.append(AttentionEntry((1, CHUNK), (1, CONTEXT), (layer, layer), placement))
        key = load_calibration(path).key
        plan = llm.plan.with_technique(PlannedAttention(tuple(entries)))
        plan = structs.replace(plan, chunk_length=CHUNK, calibration=key)
    return Technique(bundled_model, plan, options, "graph of scores of 1 head", exact=False)


def mixture(folder: Path, overflow: str) -> Technique:
    groups = tuple(ExpertGroup(*group) for group in (((7, 2, 0), 32), ((4,), 1), ((9, 11), 64)))
    placement = ExpertsPlacement(groups, overflow=overflow)  # type: ignore[arg-type]
    with LLM.load(folder, device="host", plan="gpu", context=CONTEXT) as llm:
        entry = ExpertsEntry((1, CHUNK), (0, llm.config.layers - 1), placement)
        plan = llm.plan.with_technique(PlannedExperts((entry,)))
        plan = structs.replace(plan, chunk_length=CHUNK)
    return Technique(folder, plan, {}, "experts .*of layer [01]", exact=overflow == "gpu")


@pytest.fixture(scope="module")
def experts(checkpoint: Callable[..., Path]) -> Technique:
    return mixture(checkpoint("qwen3_moe"), "gpu")


@pytest.fixture(scope="module")
def dropping(checkpoint: Callable[..., Path]) -> Technique:
    return mixture(checkpoint("qwen3_moe"), "drop")


@pytest.fixture(params=["shadows", "flights", "sparse", "experts", "dropping"])
def technique(request: pytest.FixtureRequest) -> Technique:
    return request.getfixturevalue(request.param)


@pytest.fixture
def opened() -> Iterator[Callable[[LLM], LLM]]:
    """Return a function that closes a model after the test."""
    models: list[LLM] = []

    def keep(llm: LLM) -> LLM:
        models.append(llm)
        return llm

    yield keep
    for llm in models:
        llm.close()


@pytest.fixture
def ids() -> list[int]:
    return np.random.default_rng(3).integers(3, 2048, PROMPT + LAST).tolist()


def answer(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the logits of a prompt of four chunks, and of tokens behind it."""
    session = llm.session()
    rows = [session.prefill(ids[:PROMPT]).copy()]
    return np.stack(rows + [session.decode(token).copy() for token in ids[PROMPT:]])


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    return sqnr_db(actual, expected) >= LOGITS_SQNR_DB["fp32"]


def places(npu: Npu, llm: LLM, ids: list[int]) -> tuple[int, int]:
    """Return the graph runs of the prompt and of a token."""
    session, before = llm.session(), npu.runs
    session.prefill(ids[:PROMPT])
    prompt = npu.runs - before
    session.decode(ids[PROMPT])
    return prompt, npu.runs - before - prompt


def test_without_leave_it_is_an_error_and_the_session_stays_usable(
    technique: Technique, npu: Npu, opened: Callable[[LLM], LLM], ids: list[int]
) -> None:
    llm = opened(technique.load())
    expected = answer(llm, ids)
    prompt, token = places(npu, llm, ids)
    assert prompt > 8
    assert bool(token) is technique.decodes
    session = llm.session()
    for run in (1, 3, prompt // 2, prompt):
        for _ in range(2):
            npu.die_after(run)
            with pytest.raises(GraphError, match="failed while running: the DSP restarted") as caught:
                session.prefill(ids[:PROMPT])
            assert re.search(technique.operator, caught.value.message)
            assert session.position == 0
            npu.mend()
        np.testing.assert_array_equal(session.prefill(ids[:PROMPT]), expected[0])
        session.reset()
    session.prefill(ids[:PROMPT])
    for run in {1, token // 2, token} if token else ():
        for _ in range(2):
            npu.die_after(run)
            with pytest.raises(GraphError, match=technique.operator):
                session.decode(ids[PROMPT])
            assert session.position == PROMPT
            npu.mend()
    rows = np.stack([session.decode(one).copy() for one in ids[PROMPT:]])
    np.testing.assert_array_equal(rows, expected[1:])
    np.testing.assert_array_equal(answer(llm, ids), expected)
    assert llm.failures == ()


@pytest.mark.parametrize(
    "when", ["middle", *(pytest.param(when, marks=pytest.mark.slow) for when in ("first", "last", "token"))]
)
def test_with_leave_the_gpu_answers(
    when: str, technique: Technique, npu: Npu, opened: Callable[[LLM], LLM], ids: list[int]
) -> None:
    expected = answer(opened(technique.load(plan="gpu", calibration=None)), ids)
    llm = opened(technique.load(allow_fallback=True))
    prompt, token = places(npu, llm, ids)
    if when == "token" and not token:
        pytest.skip("decoded tokens run no graph")
    of_npu = answer(llm, ids)
    npu.die_after(
        {"first": 1, "middle": prompt // 2, "last": prompt, "token": prompt + max(1, token // 2)}[when]
    )
    found = answer(llm, ids)
    (note,) = llm.failures
    assert "the DSP restarted" in note
    assert re.search(technique.operator, note)
    # What the NPU has left in the cache stays, unless its chunks are computed again.
    computed_again = when == "first" or technique.plan.changes_values
    if technique.exact or computed_again:
        assert same(found, expected)
    else:
        assert sqnr_db(found, expected) > sqnr_db(of_npu, expected)
    # Nothing asks the NPU again, be it back or not.
    runs = npu.runs
    for _ in range(2):
        assert same(answer(llm, ids), expected)
        npu.mend()
    assert npu.runs == runs
    assert llm.failures == (note,)
    # Another model of this process has its NPU.
    again = opened(technique.load())
    np.testing.assert_array_equal(answer(again, ids), of_npu)
    assert npu.runs > runs
