"""Layers with a sliding window keep its keys alone: the bits of sessions that keep all, in less memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import KvSpec, ModelConfig
from heterollm.serve.sessions import SessionCache
from heterollm.solver import Plan

CHUNK, CONTEXT = 64, 1088
KEPT = 704
"""Positions of windows of 20 and passes of 64, and 512 to go back: eleven pages."""
PROMPT = 980
"""Longer than these."""

Load = Callable[..., LLM]


@pytest.fixture
def load(checkpoint: Callable[..., Path], host_llm: Load, half_rows_plan: Callable[..., Plan]) -> Load:
    def made(family: str = "gemma2", level: str = "gpu", **options: Any) -> LLM:
        options = {"context": CONTEXT, **options}
        first = host_llm(checkpoint(family), plan="gpu" if level == "rows" else level, **options)
        plan = (
            half_rows_plan(first, CHUNK)
            if level == "rows"
            else structs.replace(first.plan, chunk_length=CHUNK)
        )
        return host_llm(checkpoint(family), plan=plan, **options)

    return made


@contextmanager
def keeping_all() -> Iterator[None]:
    """Let sessions of models that are loaded now keep every position."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvSpec, "kept", lambda _spec, context, _longest: context)
        yield


def conversation(llm: LLM) -> np.ndarray:
    """Return logits of long prompts, tokens, guesses that are dropped, and forks, far behind a window."""
    ids = np.random.default_rng(2).integers(1, 2048, CONTEXT).tolist()
    session = llm.session()
    rows = [session.prefill(ids[:7], all_logits=True), session.prefill(ids[7:900])[None]]
    rows += [session.decode(token)[None] for token in ids[900:906]]
    for length, kept in ((5, 1), (32, 9), (2, 0)):
        position = session.position
        rows.append(session.decode(ids[position : position + length]))
        session.truncate(position + kept)
    fork = session.fork()
    for one in (session, fork):
        rows += [one.decode(3)[None], one.prefill(ids[300:401], all_logits=True), one.decode([4, 5, 6])]
    session.truncate(session.position - 500)
    rows.append(session.prefill(ids[:300])[None])
    session.reset()
    rows.append(session.prefill(ids[:90])[None])
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("family", "level", "options"),
    [
        ("gemma2", "gpu", {}),
        ("gemma2", "gpu", {"kv_bits": 8}),
        ("gemma3_text", "layer", {}),
        ("mistral", "rows", {}),
        ("mixtral", "gpu", {"kv_bits": 8}),
        ("phi3", "npu", {}),
    ],
)
def test_bits_are_those_of_sessions_that_keep_all(
    load: Load, family: str, level: str, options: dict[str, Any]
) -> None:
    llm = load(family, level, **options)
    found, size = conversation(llm), llm.session().memory_bytes
    with keeping_all():
        whole = load(family, level, **options)
        assert np.array_equal(conversation(whole), found)
        assert size < whole.session().memory_bytes


def test_a_position_before_the_window_is_read_again(load: Load) -> None:
    llm = load()
    ids = np.random.default_rng(3).integers(1, 2048, PROMPT).tolist()
    session = llm.session()
    session.prefill(ids)
    near, far = PROMPT - CHUNK - 512, 200
    assert llm.on_engine_thread(lambda: [session.reusable(at) for at in (near, far)]) == [near, 0]
    session.truncate(far)
    fork = session.fork()
    expected = llm.session()
    expected.prefill(ids[:far])
    own = expected.prefill([5, 6, 7])
    assert np.array_equal(session.prefill([5, 6, 7]), own)
    assert fork.ids.tolist() == ids[:far]
    assert sqnr_db(fork.decode([5, 6, 7])[-1], own) >= LOGITS_SQNR_DB["fp32"]
    session.truncate(0)
    np.testing.assert_array_equal(session.prefill(ids[:9]), llm.session().prefill(ids[:9]))


def test_pauses_and_dropped_prompts(load: Load) -> None:
    llm = load()
    ids = np.random.default_rng(5).integers(1, 2048, PROMPT).astype(np.int32)
    alone = llm.session()
    alone.prefill(ids[:50])
    expected = alone.prefill(ids[50:])
    session, pauses = llm.session(), 0
    session.prefill(ids[:50])

    def prefill() -> np.ndarray:
        nonlocal pauses
        for _ in session.prefill_in_turns(ids[50:], lambda _: True):
            pauses += 1
            llm.session().prefill(ids[:60])
        return session.last_logits.copy()

    assert np.array_equal(llm.on_engine_thread(prefill), expected)
    assert pauses > 5
    # A prompt that is dropped late has overwritten the window before it.
    dropped = llm.session()
    dropped.prefill(ids[:50])

    def drop() -> None:
        turns = dropped.prefill_in_turns(ids[50:], lambda part: part > 0.9)
        next(turns)
        turns.close()
        assert dropped.reusable(50) == 0

    llm.on_engine_thread(drop)
    assert dropped.position == 50
    other = llm.session()
    other.prefill(ids[:50])
    assert np.array_equal(dropped.decode(8), other.decode(8))


def test_a_prompt_that_fails_late_is_read_again(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    ids = np.random.default_rng(6).integers(1, 2048, PROMPT).tolist()
    session, other = llm.session(), llm.session()
    for one in (session, other):
        one.prefill(ids[:70])
    passes = iter(range(20))
    release = llm.device.gpu.finish

    def fail() -> None:
        if next(passes) == 12:
            raise RuntimeError("gone")
        release()

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.device.gpu), "finish", lambda _: fail())
        with pytest.raises(RuntimeError, match="gone"):
            session.prefill(ids[70:])
    assert session.position == 70
    assert np.array_equal(session.decode(8), other.decode(8))


def test_the_servers_cache_reuses_what_windows_still_serve(load: Load) -> None:
    llm = load()
    cache = SessionCache(llm.session, most=2, chunk=CHUNK, failures=lambda: ())
    prompt = np.random.default_rng(7).integers(1, 2048, PROMPT).astype(np.int32)

    def answer(ids: np.ndarray) -> int:
        held = cache.take(ids, reproducible=False)
        begin = held.session.position
        held.session.prefill_in_place(ids[begin:])
        cache.give_back(held)
        return begin

    def answers() -> list[int]:
        near, far = (np.concatenate([prompt[:shared], prompt[:5]]) for shared in (960, 90))
        return [answer(prompt), answer(near), answer(near[:500]), answer(far), answer(far)]

    # One token is always computed, since its logits are needed.
    assert llm.on_engine_thread(answers) == [0, 960, 499, 0, 94]


def test_guesses_give_the_tokens_of_plain_decoding(load: Load) -> None:
    llm = load("mistral")
    prompt = [7, 8, 9, 10, 11] * 160
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    plain = llm.generate(prompt, session=llm.session(), **options)
    guessed = llm.generate(prompt, session=llm.session(), speculate=True, **options)
    assert guessed.token_ids == plain.token_ids


def test_memory_is_that_of_the_windows(load: Load) -> None:
    llm = load()
    (_, spec), (_, whole) = llm.config.states[:2]
    assert isinstance(spec, KvSpec)
    assert (spec.window, spec.kept(CONTEXT, CHUNK), whole.kept(CONTEXT, CHUNK)) == (20, KEPT, CONTEXT)
    dtype = np.dtype(np.float32)
    assert llm.session().memory_bytes == spec.bytes(KEPT, dtype) + whole.bytes(CONTEXT, dtype)
    # A context that is no longer than that keeps all, in one memory.
    short = load(context=KEPT)
    assert short.session().memory_bytes == 2 * spec.bytes(KEPT, dtype)
    buffers = {
        buffer.name for step in llm.steps("prefill", 9) for buffer in step.reads if step.layer is not None
    }
    assert {"kv_cache.20", "kv_cache"} < buffers


def test_a_model_of_five_windows_to_one_takes_a_fifth_of_the_memory() -> None:
    """The shape of Gemma 3 with 4 billion weights, in FP16 at 32,768 positions."""
    config = ModelConfig.from_dict(
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
            "eos_token_id": 1,
            "bos_token_id": 2,
        }
    )
    context, longest, half = 32768, 512, np.dtype(np.float16)
    whole = sum(spec.bytes(context, half) for _, spec in config.states)
    assert whole == 34 * 2 * 4 * 256 * 2 * context
    assert 0.2 < config.state_bytes(context, longest, half) / whole < 0.21
