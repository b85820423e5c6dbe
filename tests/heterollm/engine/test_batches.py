"""Decode passes of several sessions: each row has the numbers of its session alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.engine import Session
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu import glue_kernels, linear, tiled_weights
from heterollm.kernels.gpu.variants import variants_for
from heterollm.llm import LLM
from heterollm.solver import Plan

CONTEXT = 1088
LENGTHS = (1, 300, 64, 17, 255, 780, 2, 256)
"""Of the sessions' prompts, in three buckets of contexts; two sessions reach the next one. The longest prompt
leaves a window's first pages behind."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "gemma3n_text": {"precision": "w4a8"},
    "gemma4_text": {},
    "gpt_oss": {},
    "lfm2": {},
    "qwen3_5_text": {},
    "granitemoehybrid with state spaces": {},
    "nemotron_h": {"precision": "w4a8"},
    "falcon_h1": {"kv_bits": 8},
    "deepseek_v2": {"precision": "w4a8"},
    "glm4_moe_lite": {},
    "qwen3_moe": {},
    "phi": {"kv_bits": 8},
    "gemma3_text": {"kv_bits": 8},
    "qwen3_next": {"precision": "w4a8"},
    "lfm2_moe": {"precision": "w4a8", "kv_bits": 8},
    "bitnet": {"precision": "w4a8"},
    "gpt_neox": {},
    "lfm3": {},
}
# The others have each kind of block, precision and cache.
SLOW = (
    *("lfm3", "bitnet", "gpt_neox", "gemma3n_text", "gemma4_text", "gpt_oss", "gemma3_text", "lfm2_moe"),
    *("qwen3_next", "glm4_moe_lite", "granitemoehybrid with state spaces"),
)

Load = Callable[..., LLM]


def in_chunks(load: Load, folder: Path, **options: Any) -> LLM:
    """Return a model with short chunks, so that sessions need not keep all keys of a window."""
    plan = load(folder, plan="gpu", context=CONTEXT, **options).plan
    return load(folder, plan=structs.replace(plan, chunk_length=64), context=CONTEXT, **options)


def together(llm: LLM, sessions: Sequence[Session], ids: Sequence[int]) -> np.ndarray:
    """Return the logits of a pass of several sessions."""
    return llm.on_engine_thread(lambda: np.array(Session.decode_together(sessions, ids)))


def begun(llm: LLM, lengths: Sequence[int] = LENGTHS) -> list[Session]:
    """Return sessions with prompts of these lengths."""
    generator = np.random.default_rng(5)
    sessions = [llm.session() for _ in lengths]
    for session, length in zip(sessions, lengths, strict=True):
        session.prefill(generator.integers(1, 2048, length))
    return sessions


def drawn(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 2048, count)]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES]
)
def test_a_row_has_the_bits_of_its_session_alone(family: str, checkpoint: Any, host_llm: Load) -> None:
    """Whatever sessions join, leave and change places between two passes."""
    llm = in_chunks(host_llm, checkpoint(family), **FAMILIES[family])
    alone, shared = begun(llm), begun(llm)
    everybody = list(range(len(LENGTHS)))
    for turn, members in enumerate((everybody, everybody, [3, 1], [7, 0, 5], everybody[::-1], [4])):
        ids = drawn(len(members), turn)
        found = together(llm, [shared[one] for one in members], ids)
        expected = [alone[one].decode(token) for one, token in zip(members, ids, strict=True)]
        assert np.array_equal(found, expected), (turn, members)
    assert [session.ids.tolist() for session in shared] == [session.ids.tolist() for session in alone]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_kernels_of_gpus(
    family: str, checkpoint: Any, host_llm: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They divide attention into parts, which another kernel joins, and compute two rows as they do one."""

    def gpu_variants(*, is_cpu: bool, style: Any = None) -> Any:
        return variants_for(is_cpu=False, style=style)

    for module in (glue_kernels, linear, tiled_weights):
        monkeypatch.setattr(module, "variants_for", gpu_variants)
    llm = host_llm(checkpoint(family), plan="gpu", context=CONTEXT)
    alone, shared = begun(llm, (300, 70)), begun(llm, (300, 70))
    for turn in range(2):
        expected = [one.decode(token) for one, token in zip(alone, drawn(2, turn), strict=True)]
        assert np.array_equal(together(llm, shared, drawn(2, turn)), expected)
    steps = llm.on_engine_thread(lambda: llm._engine.batch_steps(2))
    assert "attention join" in {step.operator for step in steps}


@pytest.mark.parametrize("count", [2, 9, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_passes_on_both_processors(
    family: str, count: int, checkpoint: Any, host_llm: Load, half_rows_plan: Callable[..., Plan]
) -> None:
    """The plan may place more rows elsewhere, and the kernels of more than eight round differently."""
    folder = checkpoint(family)
    plan = half_rows_plan(host_llm(folder, plan="gpu", context=CONTEXT))
    llm = host_llm(folder, plan=plan, context=CONTEXT)
    lengths = [1 + 37 * number for number in range(count)]
    alone, shared = begun(llm, lengths), begun(llm, lengths)
    for turn in range(2):
        ids = drawn(count, turn)
        expected = np.array([one.decode(token) for one, token in zip(alone, ids, strict=True)])
        assert sqnr_db(together(llm, shared, ids), expected) > LOGITS_SQNR_DB["fp32"]
    if count > 2 and llm._engine.rows.takes_guesses:
        runs = [np.array(drawn(5, 7), np.int32), 8, np.array(drawn(3, 8), np.int32)]
        found = llm.on_engine_thread(lambda: np.vstack(Session.decode_together(shared[:3], runs)))
        pairs = [(own, int(token)) for own, run in zip(alone, runs, strict=False) for token in np.ravel(run)]
        expected = np.array([own.decode(token) for own, token in pairs])
        assert sqnr_db(found, expected) > LOGITS_SQNR_DB["fp32"]


def test_sessions_that_have_gone_back_share_passes(checkpoint: Any, host_llm: Load) -> None:
    """Forks, and sessions whose state is lost, go on as others with their tokens."""
    llm = host_llm(checkpoint("lfm2"), plan="gpu", context=CONTEXT)
    assert not llm._engine.rows.takes_guesses
    first, second = begun(llm, (40, 90))
    fork = first.fork()
    first.decode(drawn(6, 1))
    first.truncate(42)  # recurrent state of this position is gone
    again = llm.session()
    again.prefill(first.ids)
    other = llm.session()
    other.prefill(fork.ids)
    copy = second.fork()
    found = together(llm, [first, fork, second], [5, 6, 7])
    expected = np.array([again.decode(5), other.decode(6), copy.decode(7)])
    assert sqnr_db(found, expected) > LOGITS_SQNR_DB["fp32"]
    assert (first.position, fork.position, second.position) == (43, 41, 91)


def test_a_kernel_is_launched_once_for_all_rows(
    checkpoint: Any, host_llm: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    for family in ("gemma2", "lfm2", "qwen3_5_text"):
        llm = in_chunks(host_llm, checkpoint(family))

        def work(steps: Sequence[Any]) -> list[tuple[str, int]]:
            return [(step.label, step.tokens) for step in steps if step.operator != "late write"]

        shared = llm.on_engine_thread(lambda llm=llm: llm._engine.batch_steps(3))
        assert work(shared) == work(llm.steps("decode", 3))
        alone, together_ = begun(llm, (3, 70)), begun(llm, (3, 70))
        expected = [one.decode(9) for one in alone]
        assert np.array_equal(together(llm, together_, [9, 9]), expected)


def test_the_gpu_goes_on_with_all_rows(
    bundled_model: Path, host_llm: Load, half_rows_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    from heterollm.base import GraphError
    from heterollm.kernels.npu.session import SessionGraph

    gpu = host_llm(bundled_model, plan="gpu")
    llm = host_llm(bundled_model, plan=half_rows_plan(gpu), allow_fallback=True)
    bind, fails = SessionGraph.bind, [False]

    def bind_to_break(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            if fails[0]:
                raise GraphError("the device is gone")
            call()

        return run

    monkeypatch.setattr(SessionGraph, "bind", bind_to_break)
    sessions, alone = begun(llm, (3, 70, 300)), begun(gpu, (3, 70, 300))
    for turn in range(4):
        fails[0] = turn == 2
        found = together(llm, sessions, drawn(3, turn))
        expected = np.array([one.decode(token) for one, token in zip(alone, drawn(3, turn), strict=True)])
        assert sqnr_db(found, expected) > LOGITS_SQNR_DB["fp32"]
    assert len(llm.failures) == 1
    assert [one.position for one in sessions] == [7, 74, 304]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in ("llama", "gemma2", "phi", "deepseek_v2", "qwen3_moe", "gpt_oss", "gemma3_text")
    ],
)
def test_guesses_have_the_bits_of_tokens_alone(family: str, checkpoint: Any, host_llm: Load) -> None:
    """Whatever is guessed behind right ones, and wherever wrong ones are forgotten, also across pages."""
    llm = in_chunks(host_llm, checkpoint(family), **FAMILIES[family])
    assert llm._engine.rows.takes_guesses
    lengths = (1, 300, 63, 766, 255, 121)
    alone, shared = begun(llm, lengths), begun(llm, lengths)
    generator = np.random.default_rng(7)
    for turn in range(8):
        members = generator.permutation(len(lengths))[: generator.integers(1, 5)].tolist()
        counts = np.ones(len(members), int)
        counts += generator.multinomial(8 - len(members), np.full(len(members), 1 / len(members)))
        ids = [generator.integers(1, 2048, count).astype(np.int32) for count in counts]
        ids[0] = int(ids[0][0]) if turn % 2 else ids[0]  # type: ignore[call-overload]
        found = llm.on_engine_thread(
            lambda members=members, ids=ids: [
                own.copy() for own in Session.decode_together([shared[one] for one in members], ids)
            ]
        )
        for one, own, logits in zip(members, ids, found, strict=True):
            kept = np.ravel(own)[: generator.integers(1, np.size(own) + 1)]
            expected = [alone[one].decode(int(token)) for token in kept]
            assert np.array_equal(logits.reshape(-1, logits.shape[-1])[: len(kept)], expected), (turn, one)
            shared[one].truncate(alone[one].position)
            assert shared[one].reusable(shared[one].position) == shared[one].position
    assert [session.ids.tolist() for session in shared] == [session.ids.tolist() for session in alone]
    everybody = drawn(len(lengths), 9)
    expected = [one.decode(token) for one, token in zip(alone, everybody, strict=True)]
    assert np.array_equal(together(llm, shared, everybody), expected)
