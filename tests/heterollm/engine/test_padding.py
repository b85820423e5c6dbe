"""Rows past the prompt are never read, whatever they hold (design, section 5: padding)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from heterollm.engine import Engine
from heterollm.kernels.ops import OpSpec
from heterollm.llm import LLM
from heterollm.solver import Placement, Plan, model_shape
from heterollm.solver.placements import GPU_ONLY, RowsPlacement
from heterollm.solver.plan_records import PlanEntry

LENGTHS = (1, 31, 33, 70)
PLANS = ("npu", "layer", "rows", "pipe", "sequence")
HEAD_SLOTS = ("head_input", "head_npu_output", "head_gpu_output")


def padded_placement(name: str, spec: OpSpec, tokens: int) -> Placement:
    """Return a cut whose graphs run past the last token wherever the name allows it."""
    rows = tuple(rows // 2 // 64 * 64 for rows in spec.member_rows)
    padded = next(length for length in (1, 32, 64, 128) if length >= tokens)
    if name == "rows":
        return RowsPlacement(rows, (padded,)) if any(rows) else RowsPlacement(spec.member_rows, (padded,))
    if name == "pipe":
        count = tokens // 32
        return RowsPlacement(spec.member_rows, (32,) * count + ((64,) if tokens % 32 else ()))
    return RowsPlacement(spec.member_rows, (32,)) if tokens > 32 else GPU_ONLY


def make_plan(name: str, llm: LLM) -> Plan:
    specs = llm._weights.specs
    entries = [
        PlanEntry(
            phase,
            (tokens, tokens),
            (spec.layer, spec.layer),
            spec.group,
            padded_placement(name, spec, tokens),
        )
        for spec in specs
        for phase in ("prefill", "decode")
        for tokens in range(1, 129)
    ]
    return Plan(name, "host", "w4a16", model_shape(specs), 128, tuple(entries))


@pytest.fixture(scope="module", params=PLANS)
def llm(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    folder = checkpoint("llama")
    plan = request.param
    if plan not in ("npu", "layer"):
        with LLM.load(folder, device="host", plan="gpu") as plain:
            plan = make_plan(plan, plain)
    with LLM.load(folder, device="host", plan=plan, kv_bits=32) as opened:
        yield opened


def fill_with_nan(engine: Engine, names: list[str]) -> None:
    engine.device.gpu.finish()
    for name in names:
        slot = engine.pool[name].array
        # Four bytes of ones are a NaN in float32, and two NaNs in float16.
        slot.fill(0xFF)
        assert np.isnan(slot[: slot.nbytes // 4 * 4].view(np.float32)).all()


def fill_private_with_nan(engine: Engine, names: list[str]) -> None:
    for name in names:
        slot = engine.private[name]
        engine.device.gpu.copy(slot.buffer, np.full(slot.size_bytes, 0xFF, np.uint8))


@pytest.fixture
def poisoned(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function from whose call on every pass finds NaN in all slots, and every head in its own."""

    def poison() -> None:
        start, head = Engine._write_inputs, Engine._head

        def start_on_nan(engine, *arguments):
            fill_with_nan(engine, list(engine.pool))
            fill_private_with_nan(engine, list(engine.private))
            start(engine, *arguments)

        def head_on_nan(engine, *arguments):
            pool = engine.pool
            fill_with_nan(engine, ["logits", *(name for name in HEAD_SLOTS if name in set(pool))])
            fill_private_with_nan(engine, [name for name in HEAD_SLOTS if name in engine.private])
            head(engine, *arguments)

        monkeypatch.setattr(Engine, "_write_inputs", start_on_nan)
        monkeypatch.setattr(Engine, "_head", head_on_nan)

    return poison


def logits(llm: LLM, ids: list[int], length: int) -> np.ndarray:
    session = llm.session()
    last = session.prefill(ids[:length])
    session.reset()
    prompt = session.prefill(ids[:length], all_logits=True)
    decoded = [session.decode(token) for token in ids[length : length + 2]]
    return np.stack([last, *prompt, *decoded, *session.decode(ids[length + 2 : length + 7])])


@pytest.mark.parametrize("length", LENGTHS)
def test_nan_in_the_padding_changes_no_logit(
    length: int, llm: LLM, poisoned: Callable[[], None], token_ids: Callable[[int], list[int]]
) -> None:
    ids = token_ids(length + 7)
    clean = logits(llm, ids, length)
    assert np.isfinite(clean).all()
    poisoned()
    np.testing.assert_array_equal(logits(llm, ids, length), clean)


def test_the_padding_was_there(
    llm: LLM, poisoned: Callable[[], None], token_ids: Callable[[int], list[int]]
) -> None:
    """What the test above rests on: graphs did run over rows of NaN, and left NaN behind them."""
    poisoned()
    llm.session().prefill(token_ids(33))
    pool, spec = llm._engine.pool, llm._weights.specs[3]
    assert spec.group == "down"
    placement = llm.plan.placement("prefill", 33, spec)
    padded = sum(placement.npu_lengths)
    assert padded > 33 or llm.plan.level == "sequence"
    for slot, columns in (("activated", spec.columns), ("npu_output", sum(placement.npu_rows))):
        values = pool[slot].view(np.float32, (max(33, padded), columns))
        assert np.isfinite(values[:33]).all()
        assert np.isnan(values[33:]).all()


def test_a_longer_prompt_before_changes_no_logit(llm: LLM, token_ids: Callable[[int], list[int]]) -> None:
    ids = token_ids(128)
    clean = {length: logits(llm, ids[:-7], length) for length in (1, 31, 33)}
    for length, expected in clean.items():
        session = llm.session()
        session.prefill(ids[::-1])
        session.reset()
        last = session.prefill(ids[:length])
        np.testing.assert_array_equal(last, expected[0])
        np.testing.assert_array_equal(session.decode(ids[length]), expected[1 + length])


@pytest.mark.parametrize("length", LENGTHS)
def test_padding_is_not_written_to_the_cache(
    length: int, llm: LLM, token_ids: Callable[[int], list[int]]
) -> None:
    session = llm.session()
    memories, gpu = llm._engine._compiler.states.memory.memories, llm.device.gpu
    for memory in memories:
        gpu.copy(memory.buffer, np.full(memory.size_bytes, 0xFF, np.uint8))
    session.prefill(token_ids(length))
    pages = session._state.states[0]._held()
    for memory in memories:
        content = np.empty(memory.size_bytes // 4, np.float32)
        gpu.copy(content, memory.buffer)
        blocks = content.reshape(-1, 2, llm.config.attention.kv_heads, 64, llm.config.attention.head_dim)
        written = np.concatenate(list(blocks[pages]), axis=2)
        assert np.isfinite(written[:, :, :length]).all()
        assert np.isfinite(blocks).sum() == np.isfinite(written[:, :, :length]).sum()
