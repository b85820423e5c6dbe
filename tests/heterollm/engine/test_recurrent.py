"""Recurrent state: transformers' numbers in any pieces, and the same bits after a session has gone back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import RecurrentSpec
from heterollm.serve.sessions import SessionCache
from heterollm.solver import Plan

CHUNK, CONTEXT = 64, 1088

Load = Callable[..., LLM]


@pytest.fixture(
    params=["lfm2", "qwen3_5_text", "granitemoehybrid with state spaces", "nemotron_h", "falcon_h1"]
)
def family(request: pytest.FixtureRequest) -> str:
    """Return a model type with recurrent state."""
    return str(request.param)


@pytest.fixture
def load(
    family: str, checkpoint: Callable[..., Path], host_llm: Load, half_rows_plan: Callable[..., Plan]
) -> Load:
    def made(level: str = "gpu", **options: Any) -> LLM:
        options = {"context": CONTEXT, **options}
        folder = checkpoint(family)
        first = host_llm(folder, plan="gpu" if level == "rows" else level, **options)
        if level == "rows":
            return host_llm(folder, plan=half_rows_plan(first, CHUNK), **options)
        return host_llm(folder, plan=structs.replace(first.plan, chunk_length=CHUNK), **options)

    return made


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(3).integers(1, 2048, CONTEXT).tolist()


def states(llm: LLM, session: Any) -> np.ndarray:
    """Return the recurrent state of all layers at the position of a session."""

    def read() -> np.ndarray:
        parts = session._state.states[-1].read(session.position)
        return np.concatenate([values.view(np.float32).ravel() for values in parts])

    return llm.on_engine_thread(read)


@pytest.mark.parametrize("level", ["rows", "gpu"])
def test_logits_are_those_of_transformers_in_any_pieces(
    level: str,
    family: str,
    checkpoint: Callable[..., Path],
    load: Load,
    reference: Callable[..., np.ndarray],
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "5")
    llm = load(level)
    expected = reference(llm, checkpoint(family), ids[:73])
    kept = []
    for pieces in ((64,), (33, 1, 30), (1, 1, 62)):
        session, rows, first = llm.session(), [], 0
        for piece in pieces:
            rows.append(session.prefill(ids[first : first + piece], all_logits=True))
            first += piece
        rows += [session.decode(token)[None] for token in ids[first : first + 6]]
        rows.append(session.decode(ids[first + 6 : first + 9]))
        assert sqnr_db(np.concatenate(rows), expected) >= LOGITS_SQNR_DB["fp32"]
        kept.append(states(llm, session))
    for one in kept[1:]:
        assert sqnr_db(one, kept[0]) >= LOGITS_SQNR_DB["fp32"]


def test_a_split_of_linears_changes_no_state(load: Load, ids: list[int]) -> None:
    found = []
    for level in ("gpu", "rows", "layer"):
        llm = load(level)
        session = llm.session()
        session.prefill(ids[:150])
        session.decode(7)
        found.append(states(llm, session))
    assert all(sqnr_db(one, found[0]) >= LOGITS_SQNR_DB["fp32"] for one in found[1:])


def test_refused_guesses_leave_the_bits_of_the_state(load: Load, ids: list[int]) -> None:
    llm = load()
    session, other = llm.session(), llm.session()
    for one in (session, other):
        one.prefill(ids[:70])
    before = states(llm, session)
    session.decode(ids[70:75])
    session.truncate(72)
    # The two right tokens run again with the next one.
    found = session.decode(9)
    assert np.array_equal(found, other.decode([*ids[70:72], 9])[-1])
    assert np.array_equal(states(llm, session), states(llm, other))
    session.truncate(70)
    assert np.array_equal(states(llm, session), before)
    # Refused again and again, until they are too many for a pass.
    for _ in range(12):
        session.decode(ids[200:205])
        session.truncate(session.position - 2)
    assert session.position == 106
    assert np.array_equal(session.ids[70:], np.tile(ids[200:203], 12))
    other.truncate(70)
    other.prefill(session.ids[70:])
    assert sqnr_db(session.decode(8), other.decode(8)) >= LOGITS_SQNR_DB["fp32"]


def test_going_back_and_copies_give_the_bits_of_never_having_gone_on(load: Load, ids: list[int]) -> None:
    llm = load()
    session, other = llm.session(), llm.session()
    for one in (session, other):
        one.prefill(ids[: 2 * CHUNK])
    fork = session.fork()
    session.prefill(ids[500:900])
    for token in ids[:40]:
        session.decode(token)
    session.truncate(2 * CHUNK)
    for one in (session, fork):
        assert one.reusable(2 * CHUNK) == 2 * CHUNK
    expected = other.prefill(ids[300:350], all_logits=True)
    for one in (session, fork):
        assert np.array_equal(one.prefill(ids[300:350], all_logits=True), expected)
    # Between kept positions tokens are read again, from the last one before.
    session.truncate(100)
    assert session.reusable(100) == CHUNK
    other.truncate(CHUNK)
    other.prefill(ids[CHUNK:100])
    assert np.array_equal(session.decode(5), other.decode(5))
    session.reset()
    assert np.array_equal(session.prefill(ids[:9]), llm.session().prefill(ids[:9]))


def test_a_failed_pass_leaves_the_state_before_it(
    load: Load, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load()
    session, other = llm.session(), llm.session()
    for one in (session, other):
        one.prefill(ids[:70])
    with monkeypatch.context() as patch:
        patch.setattr(type(session._state), "commit", lambda *_: (_ for _ in ()).throw(RuntimeError("gone")))
        with pytest.raises(RuntimeError, match="gone"):
            session.prefill(ids[70:90])
    assert session.position == 70
    assert np.array_equal(session.decode(8), other.decode(8))


def test_the_servers_cache_reuses_kept_states(load: Load, ids: list[int]) -> None:
    llm = load()
    cache = SessionCache(llm.session, most=2, chunk=CHUNK, failures=lambda: ())
    prompt = np.array(ids[:400], np.int32)

    def answer(tokens: np.ndarray) -> int:
        held = cache.take(tokens, reproducible=False)
        begin = held.session.position
        held.session.prefill_in_place(tokens[begin:])
        cache.give_back(held)
        return begin

    other = np.concatenate([prompt[:200], prompt[:30]])
    assert llm.on_engine_thread(lambda: [answer(prompt), answer(other), answer(prompt)]) == [0, 192, 384]


def test_guesses_give_the_tokens_of_plain_decoding(load: Load) -> None:
    llm = load()
    prompt = [7, 8, 9, 10, 11] * 30
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    plain = llm.generate(prompt, session=llm.session(), **options)
    guessed = llm.generate(prompt, session=llm.session(), speculate=True, **options)
    assert guessed.token_ids == plain.token_ids


@pytest.mark.parametrize("family", ["lfm2"])
def test_memory_is_bounded_and_counted(load: Load, ids: list[int]) -> None:
    llm = load()
    config, dtype = llm.config, np.dtype(np.float32)
    (_, spec), (_, attention), _ = config.states
    assert isinstance(spec, RecurrentSpec)
    assert spec.kept(CONTEXT, CHUNK) == 16
    assert spec.bytes(16, dtype) == 16 * 2 * 128 * 4
    session = llm.session()
    assert session.memory_bytes == config.state_bytes(CONTEXT, CHUNK, dtype)
    assert session.memory_bytes == 2 * spec.bytes(16, dtype) + attention.bytes(CONTEXT, dtype)
    # The delta rule's 2 MiB a layer are kept four times.
    assert RecurrentSpec(2**19).kept(CONTEXT, CHUNK) == 4
    names = {buffer.name for step in llm.steps("decode", 1) for buffer in (*step.reads, *step.writes)}
    assert {"recurrent", "kv_cache"} < names


@pytest.mark.slow
def test_errors_do_not_grow_over_2048_tokens(
    family: str, checkpoint: Callable[..., Path], host_llm: Load, reference: Callable[..., np.ndarray]
) -> None:
    folder, ids = checkpoint(family), np.random.default_rng(4).integers(1, 2048, 2048).tolist()
    for precision in ("w4a16", "fp16"):
        llm = host_llm(folder, plan="gpu", context=2048, precision=precision)
        expected = reference(llm, folder, ids)
        rows = llm.session().prefill(ids, all_logits=True)
        early, late = (sqnr_db(rows[at : at + 64], expected[at : at + 64]) for at in (0, 1984))
        assert late >= early - 6.0
