"""Sessions in random use: whatever came before, the next logits are those of a fresh session."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from heterollm.base import InputError
from heterollm.engine import Session
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM

VOCAB = 256
CONTEXT = 72
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": VOCAB}
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    # Prefill on the NPU part and decode on the GPU part, in chunks of at most the context.
    with LLM.load(
        checkpoint("llama", **SHAPE), device="host", plan="layer", context=CONTEXT, kv_bits=32
    ) as loaded:
        yield loaded


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert sqnr_db(actual, expected) >= LOGITS_SQNR_DB["fp32"]


def fresh(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the logits of every position that a new session gives."""
    return llm.session().prefill(ids, all_logits=True)


class Known:
    """A session and what it should hold."""

    def __init__(self, llm: LLM, session: Session, ids: list[int]) -> None:
        self.llm, self.session, self.ids = llm, session, ids

    def fits(self, count: int) -> bool:
        return len(self.ids) + count <= CONTEXT

    def append(self, ids: list[int], call: Callable[[], np.ndarray], rows: int) -> None:
        """Append by a call that returns the logits of the last ``rows`` positions; 0 for a bare row."""
        if not self.fits(len(ids)):
            with pytest.raises(InputError, match="exceed the context"):
                call()
            return
        logits = call()
        self.ids = [*self.ids, *ids]
        expected = fresh(self.llm, self.ids)
        assert_same(logits, expected[-rows:] if rows else expected[-1])

    def stream(self, prompt: list[int], steps: int) -> None:
        """Begin an answer, take some steps of it and cancel it."""
        stream = self.llm.stream(prompt, session=self.session, max_new_tokens=12, ignore_eos=True)
        taken = [next(stream).token_id for _ in range(min(steps, CONTEXT - len(prompt), 12))]
        stream.close()
        result = stream.result
        assert list(result.token_ids[: len(taken)]) == taken
        self.ids = self.session.ids.tolist()
        made = self.ids[len(prompt) :]
        # An answer that is cancelled at once may not even have seen its prompt.
        assert self.ids[: len(prompt)] == prompt[: len(self.ids)]
        assert made == list(result.token_ids[: len(made)])
        # Each token is the likeliest of a fresh session, or as good as that.
        logits = fresh(self.llm, [*prompt, *result.token_ids][:CONTEXT])
        for at, token in enumerate(result.token_ids):
            row = logits[len(prompt) + at - 1]
            assert row[token] >= row.max() - 1e-3 * np.abs(row).max()


class Machine(RuleBasedStateMachine):
    """One model, several sessions."""

    llm: LLM
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Known] = []

    def keep(self, known: Known) -> Known:
        self.known.append(known)
        return known

    @initialize(target=sessions)
    def begin(self) -> Known:
        return self.keep(Known(self.llm, self.llm.session(), []))

    @rule(target=sessions)
    def another(self) -> Known:
        return self.keep(Known(self.llm, self.llm.session(), []))

    @rule(target=sessions, known=sessions)
    def fork(self, known: Known) -> Known:
        return self.keep(Known(self.llm, known.session.fork(), list(known.ids)))

    @rule(known=sessions, ids=TOKENS, every=st.booleans())
    def prefill(self, known: Known, ids: list[int], every: bool) -> None:
        known.append(ids, lambda: known.session.prefill(ids, all_logits=every), len(ids) if every else 0)

    @rule(known=sessions, token=st.integers(0, VOCAB - 1))
    def decode(self, known: Known, token: int) -> None:
        known.append([token], lambda: known.session.decode(token), 0)

    @rule(known=sessions, ids=TOKENS.filter(lambda ids: len(ids) <= 9))
    def decode_several(self, known: Known, ids: list[int]) -> None:
        known.append(ids, lambda: known.session.decode(ids), len(ids))

    @rule(known=sessions, fraction=st.floats(0, 1))
    def truncate(self, known: Known, fraction: float) -> None:
        position = round(fraction * len(known.ids))
        known.session.truncate(position)
        known.ids = known.ids[:position]

    @rule(known=sessions)
    def reset(self, known: Known) -> None:
        known.session.reset()
        known.ids = []

    @rule(known=sessions, ids=TOKENS, reused=st.floats(0, 1), steps=st.integers(0, 5))
    def cancel_an_answer(self, known: Known, ids: list[int], reused: float, steps: int) -> None:
        prompt = [*known.ids[: round(reused * len(known.ids))], *ids][: CONTEXT - 1]
        known.stream(prompt, steps)

    @rule(known=sessions, bad=st.sampled_from([[], [VOCAB], [-1], [0.5], [[1]]]))
    def refuse(self, known: Known, bad: list) -> None:
        with pytest.raises(InputError):
            known.session.prefill(bad)
        with pytest.raises(InputError):
            known.session.truncate(len(known.ids) + 1)

    @invariant()
    def sessions_hold_what_they_were_given(self) -> None:
        for known in self.known:
            assert known.session.ids.tolist() == known.ids
            assert known.session.position == len(known.ids)


def test_random_use_of_several_sessions(llm: LLM) -> None:
    class OnThisModel(Machine):
        pass

    OnThisModel.llm = llm
    run_state_machine_as_test(
        OnThisModel,
        settings=settings(
            max_examples=12,
            stateful_step_count=20,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_use_from_several_threads(llm: LLM) -> None:
    """Each thread has sessions of its own; afterwards every result is compared with a fresh session's."""
    seen: list[tuple[list[int], np.ndarray]] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        session = llm.session()
        try:
            for _ in range(12):
                ids = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 1, 3, 8, 20)))]
                match rng.randrange(5):
                    case 0:
                        session = session.fork()
                    case 1:
                        session.truncate(rng.randrange(session.position + 1))
                    case 2:
                        prompt = [*session.ids.tolist()[:30], *ids]
                        stream = llm.stream(prompt, session=session, max_new_tokens=8, ignore_eos=True)
                        next(stream)
                        stream.close()
                        assert stream.result.generated_tokens >= 1
                        assert session.ids.tolist()[: len(prompt)] == prompt
                if session.position + len(ids) > CONTEXT:
                    session.reset()
                call = session.prefill if rng.random() < 0.5 else session.decode
                logits = call(ids)
                seen.append((session.ids.tolist(), logits if logits.ndim == 1 else logits[-1]))
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not errors, errors
    assert len(seen) == 48
    for ids, logits in seen:
        assert_same(logits, fresh(llm, ids)[-1])
