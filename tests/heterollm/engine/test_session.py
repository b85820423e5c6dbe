"""Sessions: appending, cutting back, sharing one engine, and staying sound after whatever goes wrong."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB

from heterollm.base import EngineError, GraphError, InputError, KernelError
from heterollm.engine import Session
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu import OpenClError
from heterollm.llm import LLM

VOCAB = 256
CONTEXT = 1300
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": VOCAB}


def make_ids(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Whether logits agree by the gate; kernels for other lengths sum in another order."""
    return actual.shape == expected.shape and sqnr_db(actual, expected) >= LOGITS_SQNR_DB["fp32"]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", **SHAPE)


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[Callable[..., LLM]]:
    """Return a function that loads the model once for each set of options."""
    loaded: dict[str, LLM] = {}

    def get(**options: Any) -> LLM:
        options = {"device": "host", "plan": "layer", "context": CONTEXT, "kv_bits": 32, **options}
        key = str(sorted(options.items()))
        if key not in loaded:
            loaded[key] = LLM.load(folder, **options)
        return loaded[key]

    yield get
    for llm in loaded.values():
        llm.close()


@pytest.fixture
def llm(models: Callable[..., LLM]) -> LLM:
    return models()


# -- appending ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["gpu", "npu", "layer"])
@pytest.mark.parametrize("splits", [(1,), (31,), (33,), (129,), (1, 2, 64), (63, 65, 66), (7, 77, 107)])
def test_a_prompt_in_pieces_is_the_prompt(
    models: Callable[..., LLM], plan: str, splits: tuple[int, ...]
) -> None:
    llm, ids = models(plan=plan), make_ids(130)
    whole, pieces = llm.session(), llm.session()
    expected = whole.prefill(ids, all_logits=True)
    rows = [
        pieces.prefill(ids[start:stop], all_logits=True)
        for start, stop in zip((0, *splits), (*splits, len(ids)), strict=True)
    ]
    assert same(np.concatenate(rows), expected)
    assert pieces.position == whole.position == 130
    assert pieces.ids.tolist() == whole.ids.tolist() == ids
    assert same(pieces.decode(5), whole.decode(5))


@pytest.mark.parametrize("plan", ["gpu", "layer"])
def test_a_prompt_longer_than_a_pass(models: Callable[..., LLM], plan: str) -> None:
    llm, ids = models(plan=plan), make_ids(1201)
    assert llm.plan.chunk_length == (512 if plan == "gpu" else 1024)
    whole, pieces = llm.session(), llm.session()
    every = whole.prefill(ids, all_logits=True)
    assert every.shape == (1201, VOCAB)
    pieces.prefill(ids[:1])
    pieces.prefill(ids[1:650])
    assert same(pieces.prefill(ids[650:]), every[-1])
    assert same(llm.session().prefill(ids), every[-1])
    assert same(pieces.decode(9), whole.decode(9))


@pytest.mark.parametrize("count", [1, 2, 5, 33, 70])
@pytest.mark.parametrize("plan", ["npu", "layer"])
def test_decoding_several_is_decoding_each(models: Callable[..., LLM], plan: str, count: int) -> None:
    llm, ids = models(plan=plan), make_ids(17 + count)
    once, each = llm.session(), llm.session()
    once.prefill(ids[:17])
    each.prefill(ids[:17])
    rows = once.decode(ids[17:])
    assert rows.shape == (count, VOCAB)
    assert same(rows, np.stack([each.decode(token) for token in ids[17:]]))
    assert once.position == each.position == 17 + count


def test_the_last_row_of_all_logits_is_the_row(llm: LLM) -> None:
    for length in (1, 31, 32, 33, 65):
        ids = make_ids(length)
        last, every = llm.session().prefill(ids), llm.session().prefill(ids, all_logits=True)
        assert (last.shape, last.dtype) == ((VOCAB,), np.float32)
        assert (every.shape, every.dtype) == ((length, VOCAB), np.float32)
        assert same(every[-1], last)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint8)])
def test_ids_of_any_whole_number_type(llm: LLM, kind: Callable[[list[int]], Any]) -> None:
    ids = make_ids(9)
    assert np.array_equal(llm.session().prefill(kind(ids)), llm.session().prefill(ids))
    session = llm.session()
    session.prefill(ids)
    assert session.decode(np.int64(7)).shape == (VOCAB,)


# -- refusing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        (np.empty(0, np.int32), "no tokens"),
        ([VOCAB], f"{VOCAB} is outside the vocabulary of {VOCAB}"),
        ([3, -1], "-1 is outside"),
        ([1 << 40], "outside"),
        ([1 << 80], "whole numbers"),
        ([1.0, 2.0], "whole numbers"),
        ([float("nan")], "whole numbers"),
        (np.ones((2, 2), np.int32), "in one row"),
        ([[1, 2], [3]], "nested"),
        ([True, False], "whole numbers"),
        (np.array([True]), "whole numbers"),
        (["1"], "whole numbers"),
        ("12", "whole numbers"),
        (None, "whole numbers"),
        ([None], "whole numbers"),
    ],
    ids=str,
)
def test_what_is_no_row_of_token_ids(llm: LLM, ids: Any, message: str) -> None:
    session = llm.session()
    session.prefill([1, 2])
    for call in (session.prefill, session.decode):
        with pytest.raises(InputError, match=message):
            call(ids)
    assert session.ids.tolist() == [1, 2]
    fresh = llm.session()
    fresh.prefill([1, 2])
    assert np.array_equal(session.decode(3), fresh.decode(3))


@pytest.mark.parametrize("token", [True, 1.0, -1, VOCAB, 1 << 70, np.float32(1), np.bool_(True), None])
def test_what_is_no_token_id(llm: LLM, token: Any) -> None:
    session = llm.session()
    with pytest.raises(InputError):
        session.decode(token)
    assert session.position == 0


def test_the_context_may_be_filled_exactly(models: Callable[..., LLM]) -> None:
    llm, ids = models(context=40), make_ids(41)
    assert llm.context == 40
    session = llm.session()
    assert session.context == 40
    with pytest.raises(InputError, match="41 tokens at position 0 exceed the context of 40"):
        session.prefill(ids)
    assert session.position == 0
    expected = session.prefill(ids[:40], all_logits=True)
    assert session.position == 40
    for call in (
        session.decode,
        lambda token: session.prefill([token]),
        lambda token: session.decode([token]),
    ):
        with pytest.raises(InputError, match="1 tokens at position 40 exceed the context of 40"):
            call(ids[40])
    assert session.ids.tolist() == ids[:40]
    session.truncate(38)
    with pytest.raises(InputError, match="3 tokens at position 38"):
        session.decode(ids[38:])
    assert same(session.decode(ids[38:40]), expected[38:])
    session.truncate(39)
    assert same(session.decode(ids[39]), expected[39])
    assert session.position == 40


# -- cutting back and copying -------------------------------------------------------------------------


def test_reset_begins_anew(llm: LLM) -> None:
    ids, session = make_ids(50), llm.session()
    expected = session.prefill(ids)
    session.decode(4)
    session.reset()
    assert session.position == 0
    assert session.ids.size == 0
    assert np.array_equal(session.prefill(ids), expected)


@pytest.mark.parametrize(
    ("ids", "kept"), [([5, 6, 7, 8], 3), ([5, 6, 9], 2), ([5], 1), ([1, 6, 7], 0), ([], 0), ([5, 6, 7], 3)]
)
def test_a_session_keeps_the_beginning_of_a_prompt(llm: LLM, ids: list[int], kept: int) -> None:
    session = llm.session()
    session.prefill([5, 6, 7])
    session.keep_common(np.array(ids, np.int32))
    assert session.ids.tolist() == ids[:kept] == [5, 6, 7][:kept]


@pytest.mark.parametrize("position", [0, 1, 32, 99, 100])
def test_after_a_truncation_the_rest_is_forgotten(llm: LLM, position: int) -> None:
    ids, other = make_ids(100), make_ids(40, seed=8)
    session, fresh = llm.session(), llm.session()
    session.prefill(ids)
    session.truncate(position)
    assert session.ids.tolist() == ids[:position]
    expected = fresh.prefill(ids[:position] + other, all_logits=True)[position:]
    assert same(session.prefill(other, all_logits=True), expected)


@pytest.mark.parametrize("position", [-1, 11, True, 2.0, "3", None])
def test_truncating_to_nowhere(llm: LLM, position: Any) -> None:
    session = llm.session()
    session.prefill(make_ids(10))
    with pytest.raises(InputError):
        session.truncate(position)
    assert session.position == 10


def test_a_fork_and_its_parent_go_their_own_ways(llm: LLM) -> None:
    ids = make_ids(60)
    parent = llm.session()
    parent.prefill(ids)
    child = parent.fork()
    assert child.ids.tolist() == ids
    left, right = make_ids(20, seed=1), make_ids(20, seed=2)
    # In turns, so that a shared cache or position would show.
    rows: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for one, other in zip(left, right, strict=True):
        rows[0].append(parent.decode(one))
        rows[1].append(child.decode(other))
    for tail, actual in ((left, rows[0]), (right, rows[1])):
        fresh = llm.session()
        fresh.prefill(ids)
        assert same(np.stack(actual), fresh.decode(tail))
    parent.reset()
    parent.prefill(make_ids(100, seed=5))
    assert child.ids.tolist() == ids + right
    fresh = llm.session()
    fresh.prefill(ids + right)
    assert same(child.decode(1), fresh.decode(1))


def test_a_fork_of_nothing_is_empty(llm: LLM) -> None:
    child = llm.session().fork()
    assert child.position == 0
    assert np.array_equal(child.prefill([5, 6]), llm.session().prefill([5, 6]))


def test_sessions_in_turns_do_not_mix(llm: LLM) -> None:
    prompts = [make_ids(length, seed=length) for length in (3, 40, 300)]
    alone = []
    for prompt in prompts:
        session = llm.session()
        session.prefill(prompt)
        alone.append([session.decode(token) for token in prompt[:3]])
    sessions = [llm.session() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.prefill(prompt)
    for step in range(3):
        for index, (session, prompt) in enumerate(zip(sessions, prompts, strict=True)):
            assert np.array_equal(session.decode(prompt[step]), alone[index][step])


def test_what_is_returned_is_the_callers_own(llm: LLM) -> None:
    session = llm.session()
    rows = [
        session.prefill([1, 2, 3]),
        session.prefill([4, 5], all_logits=True),
        session.decode(6),
        session.decode([7, 8]),
        session.ids,
    ]
    copies = [row.copy() for row in rows]
    session.decode(9)
    session.reset()
    session.prefill(make_ids(40))
    for row, copy in zip(rows, copies, strict=True):
        assert np.array_equal(row, copy)
        row[...] = 0
    fresh = llm.session()
    fresh.prefill(make_ids(40))
    assert session.ids.tolist() == make_ids(40)
    assert np.array_equal(session.decode(1), fresh.decode(1))


# -- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KernelError("a kernel failed"), KernelError),
        (OpenClError("out of resources"), KernelError),
        (GraphError("a graph failed"), GraphError),
    ],
    ids=["kernel", "opencl", "graph"],
)
@pytest.mark.parametrize("phase", ["prefill", "decode", "second chunk", "stream"])
def test_a_failure_inside_a_pass_leaves_the_session_as_it_was(
    models: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    error: Exception,
    raised: type[Exception],
) -> None:
    llm = models(plan="npu")
    held, more = make_ids(20), make_ids(1100 if phase == "second chunk" else 12, seed=4)
    fresh, session = llm.session(), llm.session()
    fresh.prefill(held)
    expected = fresh.prefill(more)
    session.prefill(held)
    other = session.fork()
    calls = {
        "prefill": lambda: session.prefill(more),
        "second chunk": lambda: session.prefill(more),
        "decode": lambda: session.decode(more[0]),
        "stream": lambda: llm.generate(held + more, session=session, max_new_tokens=4),
    }
    original = type(llm._engine)._call
    passes = []

    def fail(self: Any, listed: list[Callable[[], Any]]) -> None:
        passes.append(len(listed))
        if len(passes) == (2 if phase == "second chunk" else 1):
            assert len(listed) > 10
            listed = [*listed[: len(listed) // 2], lambda: (_ for _ in ()).throw(error)]
        original(self, listed)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm._engine), "_call", fail)
        with pytest.raises(raised):
            calls[phase]()
    assert session.ids.tolist() == held
    assert np.array_equal(session.prefill(more), expected)
    assert np.array_equal(other.prefill(more), expected)


def test_after_a_failure_the_queue_is_run_out(
    models: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that a failed pass has enqueued would read the step of the next one."""
    llm = models(plan="npu")
    session = llm.session()
    session.prefill([1, 2])
    order: list[str] = []
    finish = llm.device.gpu.finish
    monkeypatch.setattr(llm.device.gpu, "finish", lambda: (order.append("finish"), finish()))
    with pytest.raises(ZeroDivisionError):
        llm._thread.run(lambda: llm._engine._call([lambda: order.append("kernel"), lambda: 1 // 0]))
    assert order == ["kernel", "finish"]


def test_a_closed_model_refuses_its_sessions(folder: Path) -> None:
    llm = LLM.load(folder, device="host")
    session = llm.session()
    session.prefill([1, 2, 3])
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: session.prefill([1]),
        lambda: session.decode(1),
        lambda: session.truncate(1),
        session.reset,
        session.fork,
        llm.session,
    ]
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            call()
    assert session.ids.tolist() == [1, 2, 3]


# -- threads ------------------------------------------------------------------------------------------


def test_eight_threads_with_a_session_each(llm: LLM) -> None:
    prompts = [make_ids(5 + 13 * index, seed=index) for index in range(8)]

    def work(prompt: list[int]) -> np.ndarray:
        session = llm.session()
        session.prefill(prompt)
        rows = [session.decode(token) for token in prompt[:5]]
        session.truncate(len(prompt) // 2)
        return np.stack([*rows, session.decode(1)])

    serial = [work(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for actual, expected in zip(pool.map(work, prompts), serial, strict=True):
                assert np.array_equal(actual, expected)


def test_threads_that_share_a_session_never_overfill_it(models: Callable[..., LLM]) -> None:
    session = models(context=40).session()
    refused = []

    def work(token: int) -> None:
        try:
            session.decode(token) if token % 2 else session.decode([token])
        except InputError:
            refused.append(token)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(100)))
    assert session.position == 40
    assert len(refused) == 60
    assert len(set(session.ids.tolist()) | set(refused)) == 100


def test_a_session_inside_the_loop_of_a_stream(llm: LLM) -> None:
    ids, results = make_ids(8), []

    def work() -> None:
        session = llm.session()
        for step in llm.stream(ids, max_new_tokens=12, ignore_eos=True):
            results.append(session.prefill([step.token_id]))
            inner = llm.generate(ids, max_new_tokens=2, ignore_eos=True, session=llm.session())
            assert inner.generated_tokens == 2

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(600)
    assert not thread.is_alive()
    assert len(results) == 12


def test_a_forgotten_session_gives_its_memory_back(models: Callable[..., LLM]) -> None:
    llm = models(plan="gpu")
    gc.collect()

    def held() -> list[int]:
        return llm.on_engine_thread(lambda: [pool.held for pool in llm._engine._compiler.states.pools])

    def use(session: Session, length: int = 30) -> None:
        session.prefill(make_ids(length))
        session.decode(1)

    before = held()
    for length in (41, 42, 83):
        use(llm.session(), length)
    session = llm.session()
    use(session)
    gc.collect()
    assert held() == [count + 1 for count in before]
    expected = llm.session()
    expected.prefill([*make_ids(30), 1])
    assert same(session.decode(2), expected.decode(2))
