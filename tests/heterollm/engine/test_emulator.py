"""Whole models on the HTP emulator of Qualcomm against transformers, by the gates of float16."""

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import qnn_available
from heterollm.kernels.ops import OpSpec, ffn_specs
from heterollm.llm import LLM
from heterollm.solver import LEVELS, Placement, Plan, model_shape
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry

USABLE, REASON, _ = qnn_available(emulator=True)
pytestmark = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]

LENGTHS = (1, 31, 32, 33, 70)
LONG_LENGTHS = (1, 31, 32, 33, 257, 1030)
"""The last is a chunk of the largest standard length and six tokens."""
# Every family, format of weights and level that has graphs; the other pairs are slow.
CASES = (("llama", "w4a16", "npu"), ("qwen2", "fp16", "layer"))
DECODED = 5
Reference = Callable[[LLM, Path, list[int]], np.ndarray]
OPTIONS: dict[str, dict[str, Any]] = {
    "w4a16": {},
    "asymmetric 128": {"symmetric": False, "group_size": 128},
    "fp16": {"precision": "fp16"},
}
WIDTHS: dict[str, Any] = {"vocab_size": 512}


@pytest.fixture
def emulator_llm() -> Iterator[Callable[..., LLM]]:
    loaded: list[LLM] = []

    def load(folder: Path, **options: Any) -> LLM:
        loaded.append(LLM.load(folder, **{"device": "emulator", "context": 1100, **options}))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.close()


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Callable[[LLM, Path, list[int], str], np.ndarray]:
    """Return transformers' logits, computed once for all levels: they do not change the weights."""
    made: dict[str, np.ndarray] = {}

    def logits(llm: LLM, folder: Path, ids: list[int], key: str) -> np.ndarray:
        if key not in made:
            made[key] = reference(llm, folder, ids)
        return made[key]

    return logits


def hold_to_gates(actual: np.ndarray, expected: np.ndarray) -> float:
    overall = sqnr_db(actual, expected)
    gate = LOGITS_SQNR_DB["fp16"]
    assert overall >= gate
    error, power = np.square(actual - expected), np.square(expected)
    for axis in (0, 1):
        worst = 10 * np.log10((power.sum(axis) / np.maximum(error.sum(axis), 1e-300)).min())
        assert worst >= gate - LOGITS_WORST_DROP_DB
    return overall


def hold_to_decided(actual: np.ndarray, expected: np.ndarray, tokens: np.ndarray) -> float:
    """Compare tokens with the reference's wherever its margin exceeds twice the largest error."""
    best = np.sort(expected, axis=1)
    decided = best[:, -1] - best[:, -2] > 2 * np.abs(actual - expected).max()
    assert decided.mean() >= 0.8
    assert (tokens == expected.argmax(axis=1))[decided].all()
    return float(decided.mean())


def compare(
    llm: LLM,
    expected: np.ndarray,
    ids: list[int],
    lengths: tuple[int, ...],
    record_property: Callable[[str, object], None],
) -> None:
    session = llm.session()
    last = []
    for length in lengths:
        session.reset()
        last.append(session.prefill(ids[:length]))
    positions = np.array(lengths) - 1
    record_property("sqnr_lengths_db", float(hold_to_gates(np.stack(last), expected[positions])))
    session.reset()
    prompt = session.prefill(ids[:70], all_logits=True)
    decoded = [session.decode(token) for token in ids[70 : 70 + DECODED]]
    everything = np.stack([*prompt, *decoded])
    record_property("sqnr_positions_db", float(hold_to_gates(everything, expected[: 70 + DECODED])))


@pytest.mark.parametrize(
    ("family", "options", "level"),
    [
        pytest.param(*case, marks=[] if case in CASES else pytest.mark.slow)
        for case in itertools.product(("llama", "qwen2"), OPTIONS, LEVELS)
    ],
)
def test_logits(
    family: str,
    options: str,
    level: str,
    checkpoint: Callable[..., Path],
    emulator_llm: Callable[..., LLM],
    expected: Callable[..., np.ndarray],
    token_ids: Callable[[int], list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    folder = checkpoint(family, **WIDTHS)
    llm = emulator_llm(folder, plan=level, **OPTIONS[options])
    ids = [index % 512 for index in token_ids(1030)]
    # The longest graphs take longest to emulate, and the other cases of the default run have their kinds.
    short = (family, options, level) in CASES[1:]
    lengths = LENGTHS if short else LONG_LENGTHS
    compare(llm, expected(llm, folder, ids, f"{family} {options}"), ids, lengths, record_property)
    npu = llm.device.npu
    assert npu is not None
    assert (npu.compiled_count + npu.loaded_count > 0) == (level != "gpu")


@pytest.mark.parametrize(
    "kind", ["all", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("rows", "sequence", "blocks"))]
)
def test_cuts(
    kind: str,
    checkpoint: Callable[..., Path],
    emulator_llm: Callable[..., LLM],
    reference: Reference,
    token_ids: Callable[[int], list[int]],
) -> None:
    """Half of every member on HTP at its alignment of 256, the first tokens of groups, or half a block.

    All: rows of the first layer and of the head, the first tokens of the second's attention, its block.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    folder = checkpoint("llama", **WIDTHS, **heads, hidden_size=512, intermediate_size=800)
    specs = emulator_llm(folder)._weights.specs

    def kind_of(spec: OpSpec) -> str:
        if kind != "all":
            return kind
        if spec.layer != 1:
            return "rows"
        return "sequence" if spec.group in ("qkv", "o") else "blocks"

    def place(spec: OpSpec, tokens: int) -> Placement:
        if spec.group == "ffn":
            return FfnPlacement(512, (1 if tokens == 1 else 64,))
        if kind_of(spec) == "blocks":
            return GPU_ONLY
        if kind_of(spec) == "rows":
            rows = tuple(256 if rows < 800 else 512 for rows in spec.member_rows)
            return RowsPlacement(rows, (1 if tokens == 1 else 64,))
        return GPU_ONLY if tokens <= 32 else RowsPlacement(spec.member_rows, (32,))

    entries = tuple(
        PlanEntry(phase, (tokens, tokens), (spec.layer, spec.layer), spec.group, place(spec, tokens))
        for spec in (*specs, *(block for block in ffn_specs(specs) if kind_of(block) == "blocks"))
        for phase in ("prefill", "decode")
        for tokens in range(1, 65)
    )
    plan = Plan(kind, "emulator", "w4a16", model_shape(specs), 64, entries)
    llm = emulator_llm(folder, plan=plan)
    ids = [index % 512 for index in token_ids(75)]
    session = llm.session()
    actual = [*session.prefill(ids[:50], all_logits=True), *map(session.decode, ids[50:54])]
    hold_to_gates(np.stack([*actual, *session.decode(ids[54:])]), reference(llm, folder, ids))


def test_the_trained_model_with_every_linear_on_the_npu(
    bundled_model: Path,
    emulator_llm: Callable[..., LLM],
    reference: Reference,
    record_property: Callable[[str, object], None],
) -> None:
    llm = emulator_llm(bundled_model, plan="npu")
    text = (bundled_model / "held_out.txt").read_text("utf-8")
    ids = llm.tokenizer.encode(text[:2000])[:130]
    session = llm.session()
    actual = np.concatenate(
        [session.prefill(ids[:120], all_logits=True), *[session.decode(token)[None] for token in ids[120:]]]
    )
    expected = reference(llm, bundled_model, ids)
    record_property("sqnr_db", float(hold_to_gates(actual, expected)))
    record_property("counted_fraction", hold_to_decided(actual, expected, actual.argmax(axis=1)))


@pytest.mark.parametrize("level", ["gpu", pytest.param("npu", marks=pytest.mark.slow)])
def test_greedy_answers_with_guesses_where_the_reference_decides(
    level: str, bundled_model: Path, emulator_llm: Callable[..., LLM], reference: Reference
) -> None:
    """Passes of one and of several tokens round differently, so that near ties may fall either way."""
    llm = emulator_llm(bundled_model, plan=level, speculative="lookup", guesses=4)
    prompt = llm.tokenizer.encode(
        "class A:\n    def get(self):\n        return self.x\n\nclass B:\n    def get("
    )
    answers = [
        llm.generate(prompt, max_new_tokens=18, ignore_eos=True, speculate=speculate)
        for speculate in (True, False)
    ]
    counts = answers[0].speculation
    assert counts is not None
    assert 0 < counts.accepted < counts.guesses
    for number, answer in enumerate(answers):
        ids = [*prompt, *answer.token_ids[:-1]]
        if number == 0 or answer.token_ids != answers[0].token_ids:
            expected = reference(llm, bundled_model, ids)[len(prompt) - 1 :]
        session = llm.session()
        first, rest = session.prefill(prompt), ids[len(prompt) :]
        size = 1 if number else 5
        parts = [session.decode(rest[at : at + size]) for at in range(0, len(rest), size)]
        hold_to_decided(np.concatenate([first[None], *parts]), expected, np.array(answer.token_ids))


CHILD = """
import json, sys
from heterollm import LLM

folder, ids = sys.argv[1], json.loads(sys.argv[2])
with LLM.load(folder, device="emulator", plan="npu") as llm:
    tokens = llm.generate(ids, max_new_tokens=2, ignore_eos=True).token_ids
    npu = llm.device.npu
    print(json.dumps([npu.compiled_count, npu.loaded_count, list(tokens)]))
"""


def test_a_second_process_compiles_nothing(
    checkpoint: Callable[..., Path], token_ids: Callable[[int], list[int]], tmp_path: Path
) -> None:
    folder = checkpoint("llama", **WIDTHS, num_hidden_layers=1)
    ids = [index % 512 for index in token_ids(40)]
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def run() -> tuple[int, int, list[int]]:
        command = [sys.executable, "-P", str(script), str(folder), json.dumps(ids)]
        child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert child.returncode == 0, child.stderr
        compiled, loaded, tokens = json.loads(child.stdout.splitlines()[-1])
        return compiled, loaded, tokens

    compiled, loaded, tokens = run()
    again = run()
    assert compiled + loaded > 0
    assert again == (0, compiled + loaded, tokens)


def test_damaged_context_binaries_are_built_again(
    checkpoint: Callable[..., Path],
    emulator_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    folder = checkpoint("llama", **WIDTHS, num_hidden_layers=1)
    ids = [index % 512 for index in token_ids(20)]
    first = emulator_llm(folder, plan="layer")
    expected = first.session().prefill(ids)
    assert first.device.npu is not None
    assert (first.device.npu.compiled_count, first.device.npu.loaded_count) == (4, 0)
    first.close()
    binaries = sorted((tmp_path / "graphs").glob("*_qnn.bin"))
    assert len(binaries) == 4
    content = bytearray(binaries[0].read_bytes())
    content[len(content) // 2] ^= 0x10
    binaries[0].write_bytes(content)
    binaries[1].write_bytes(binaries[1].read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        second = emulator_llm(folder, plan="layer")
    assert sum("building it again" in record.message for record in caplog.records) == 2
    assert second.device.npu is not None
    assert (second.device.npu.compiled_count, second.device.npu.loaded_count) == (2, 2)
    np.testing.assert_array_equal(second.session().prefill(ids), expected)
