"""Feed-forward blocks cut along their intermediate width: the answers of the GPU alone, whatever the cut."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import STANDARD_LENGTHS, FfnShape
from heterollm.kernels.ops import OpSpec, ffn_specs
from heterollm.llm import LLM
from heterollm.solver import NpuLimits, Placement, Plan, model_shape
from heterollm.solver.candidates import candidates
from heterollm.solver.placements import GPU_ONLY, FfnPlacement
from heterollm.solver.plan_records import PlanEntry

# Each small number of tokens has kernels of its own, so that the same one is prefilled and decoded.
DECODED = 3
LENGTHS = (1, DECODED, 32, 33, 70, 96)
CHUNK = 128
GROUPS = ("qkv", "o", "gate_up", "down", "head")
SEEDS = (0, 1)
# Gated by SiLU, by GELU with norms behind the block, with biases on gate, up and down, and without a gate.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"intermediate_size": 320},
    "smollm3": {"intermediate_size": 320},
    "phi": {"intermediate_size": 320},
}
BETWEEN_PARTS_DB = 40.0
"""At w4a8, where the last bit of a float decides between two codes (test_w4a8.py)."""


def block_candidates(llm: LLM, block: OpSpec, tokens: int) -> list[Placement]:
    """Return what the solver would choose from: every width, padded or piped, in every form."""
    npu = llm.device.npu
    assert npu is not None

    def forms(part: OpSpec, length: int) -> tuple[str, ...]:
        return npu.forms(FfnShape.of(part, part.member_rows[0], llm.config.activation), length)

    return list(candidates(block, tokens, NpuLimits(npu.standard_lengths, npu.row_alignment, forms)))


def padded(block: OpSpec, tokens: int) -> Placement:
    """Return the cut that leaves the NPU 128 of the width, padded to one length."""
    length = min(length for length in STANDARD_LENGTHS if length >= tokens)
    return FfnPlacement.of((128,) * len(block.members), (length,), None)


def block_plan(llm: LLM, choose: Callable[[OpSpec, int], Placement | None]) -> Plan:
    """Return a plan in which blocks are placed as chosen, and all else is on the GPU."""
    specs = llm._weights.specs
    entries = [
        PlanEntry(phase, (tokens, tokens), (block.layer, block.layer), "ffn", placement)
        for block in ffn_specs(specs)
        for phase in ("prefill", "decode")
        for tokens in (*LENGTHS, DECODED)
        if (placement := choose(block, tokens)) is not None
    ]
    layers = max(spec.layer for spec in specs)
    rest = [
        PlanEntry(phase, (1, CHUNK), (-1, layers), group, GPU_ONLY)
        for phase in ("prefill", "decode")
        for group in GROUPS
    ]
    precision = llm.plan.precision
    return Plan("by hand", "host", precision, model_shape(specs), CHUNK, (*entries, *rest))


def drawing(
    llm: LLM, seed: int, seen: dict[str, set[Placement]] | None = None
) -> Callable[..., Placement | None]:
    random = np.random.default_rng(seed)

    def draw(block: OpSpec, tokens: int) -> Placement | None:
        if random.random() < 0.1:
            return None
        kinds = defaultdict(list)
        for placement in block_candidates(llm, block, tokens):
            whole = "whole" if placement.npu_rows == block.member_rows else "cut"
            kinds[f"{whole} {'pipe' if len(placement.npu_lengths) > 1 else 'padded'}"].append(placement)
        kind = random.choice(sorted(kinds))
        placement = kinds[kind][random.integers(len(kinds[kind]))]
        if seen is not None:
            seen[kind].add(placement)
        return placement

    return draw


def answers(llm: LLM, ids: list[int]) -> np.ndarray:
    session, rows = llm.session(), []
    for length in LENGTHS:
        session.reset()
        rows.append(session.prefill(ids[:length], all_logits=True))
        rows.append(session.decode(ids[length])[np.newaxis])
        rows.append(session.decode(ids[length + 1 : length + 1 + DECODED]))
    return np.concatenate(rows)


def check(actual: np.ndarray, expected: np.ndarray) -> None:
    gate = LOGITS_SQNR_DB["fp32"]
    assert sqnr_db(actual, expected) >= gate
    error, power = np.square(actual - expected), np.square(expected)
    for axis in (0, 1):
        worst = 10 * np.log10((power.sum(axis) / np.maximum(error.sum(axis), 1e-300)).min())
        assert worst >= gate - LOGITS_WORST_DROP_DB


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(request.param, **MODELS[request.param])


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(5).integers(1, 2048, 120).tolist()


@pytest.fixture(scope="module")
def gpu_only(folder: Path) -> Iterator[LLM]:
    with LLM.load(folder, device="host", plan="gpu", kv_bits=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(gpu_only: LLM, ids: list[int]) -> np.ndarray:
    return answers(gpu_only, ids).astype(np.float64)


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_drawn_cuts_give_the_gpu_s_logits(
    seed: int, folder: Path, gpu_only: LLM, alone: np.ndarray, ids: list[int], host_llm: Callable[..., LLM]
) -> None:
    llm = host_llm(folder, plan=block_plan(gpu_only, drawing(gpu_only, seed)))
    check(answers(llm, ids), alone)


def test_cuts_and_whole_blocks_are_drawn(gpu_only: LLM) -> None:
    seen: dict[str, set[Placement]] = defaultdict(set)
    for seed in SEEDS:
        block_plan(gpu_only, drawing(gpu_only, seed, seen))
    assert set(seen) == {"cut padded", "cut pipe", "whole padded", "whole pipe"}
    assert len(seen["cut padded"]) >= 4


@pytest.mark.parametrize("sync", ["operator", "finish", "flag"])
def test_every_way_to_wait_gives_the_same_logits(
    sync: str, checkpoint: Callable[..., Path], ids: list[int], host_llm: Callable[..., LLM]
) -> None:
    folder = checkpoint("llama")
    plain = host_llm(folder, plan="gpu")
    plan = block_plan(plain, padded)
    check(answers(host_llm(folder, plan=plan, sync=sync), ids), answers(plain, ids).astype(np.float64))


@pytest.mark.parametrize("precision", ["w4a8", "fp16"])
def test_other_precisions(
    precision: str, checkpoint: Callable[..., Path], ids: list[int], host_llm: Callable[..., LLM]
) -> None:
    folder = checkpoint("llama")
    plain = host_llm(folder, plan="gpu", precision=precision)
    llm = host_llm(folder, plan=block_plan(plain, drawing(plain, 1)), precision=precision)
    expected = answers(plain, ids).astype(np.float64)
    if precision == "fp16":
        check(answers(llm, ids), expected)
    else:
        assert sqnr_db(answers(llm, ids), expected) >= BETWEEN_PARTS_DB


def test_slots_are_shown_to_be_safe_under_delays(
    checkpoint: Callable[..., Path],
    ids: list[int],
    host_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint("llama")
    plain = host_llm(folder, plan="gpu")
    expected = answers(plain, ids).astype(np.float64)
    monkeypatch.setenv("HETEROLLM_CHECK_SLOTS", "5")
    llm = host_llm(folder, plan=block_plan(plain, drawing(plain, 1)))
    for _ in range(2):
        check(answers(llm, ids), expected)


def test_memory_counts_the_copies_of_blocks(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]
) -> None:
    from heterollm.engine.memory import memory_need

    plain = host_llm(checkpoint("llama"), plan="gpu")
    specs = plain._weights.specs
    block = ffn_specs(specs)[0]
    plan = block_plan(plain, padded)
    need = memory_need(plain.config, specs, plan, 256, {}, np.dtype(np.float32))
    own = block.weight.weight_bytes(2 * 128, block.columns) + block.weight.weight_bytes(block.columns, 128)
    assert need.npu_graphs == plain.config.layers * own
