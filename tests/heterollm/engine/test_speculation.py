"""Speculative decoding on the host device: answers, their distribution, and the sessions behind them."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from scipy import stats

from heterollm.base import DeviceError, OptionError
from heterollm.engine import MemoryNeed, Session, check_memory
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.text import (
    GenerationOptions,
    GenerationResult,
    GuessPace,
    Sampler,
    SamplingOptions,
    TokenSequence,
    drive,
)

CODE = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def "


@pytest.fixture(scope="module", params=["gpu", "npu"])
def llm(request: pytest.FixtureRequest, bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan=request.param, speculative="lookup") as model:
        yield model


class Guesser:
    """Guesses what a test says, drawn from one distribution or not at all."""

    def __init__(self, guess: Callable[[int], int], count: int, drawn: np.ndarray | None = None) -> None:
        self._guess, self._drawn = guess, drawn
        self.pace = GuessPace([1.0] * 16, (0.5,), fixed=count)

    was_behind = runs_passes = False

    def kind(self, _history: np.ndarray, _end: int, /) -> int:
        return 0

    def propose(self, history: np.ndarray, end: int, count: int, /) -> int:
        history[end : end + count] = [self._guess(end + index) for index in range(count)]
        return count

    def drawn_from(self, _: int, /) -> np.ndarray | None:
        return self._drawn

    def learn(self, tried: int, right: int, /) -> None:
        pass


def asked(
    llm: LLM, session: Session, prompt: list[int], guesser: Guesser | None, options: GenerationOptions
) -> TokenSequence:
    return TokenSequence(
        *(llm.tokenizer, prompt, options),
        context=session.context,
        speculator=None if guesser is None else lambda *_: guesser,
        clock=llm.device.now_s,
    )


def result_of(sequence: TokenSequence) -> GenerationResult:
    assert sequence.result is not None
    return sequence.result


def answer(
    llm: LLM, session: Session, prompt: list[int], guesser: Guesser | None, options: GenerationOptions
) -> GenerationResult:
    sequence = asked(llm, session, prompt, guesser, options)
    assert llm.on_engine_thread(lambda: list(drive(sequence, session)))
    return result_of(sequence)


def cache_bytes(llm: LLM, session: Session, positions: int) -> bytes:
    """Return the keys and values of the first positions of all heads."""

    def read() -> bytes:
        return b"".join(values.tobytes() for own in session._state.states for values in own.read(positions))

    return llm.on_engine_thread(read)


@pytest.mark.parametrize(("length", "count"), [(1, 15), (7, 1), (33, 4), (61, 9)])
def test_wrong_guesses_leave_no_trace(
    llm: LLM, token_ids: Callable[[int], list[int]], length: int, count: int
):
    """After a rollback the session has the bits of one that never guessed."""
    ids = token_ids(length)
    plain, guessed = llm.session(), llm.session()
    assert np.array_equal(plain.prefill(ids), guessed.prefill(ids))
    for _ in range(2):
        guessed.decode(np.arange(7, 8 + count))
        guessed.truncate(length)
    assert guessed.position == plain.position == length
    assert guessed.ids.tolist() == ids
    assert cache_bytes(llm, guessed, length) == cache_bytes(llm, plain, length)
    for token in (3, 4, 5):
        assert np.array_equal(guessed.decode(token), plain.decode(token))
    # The tokens before a wrong guess, too: they do not depend on the guesses behind them.
    one, other = llm.session(), llm.session()
    for session, wrong in ((one, 9), (other, 1000)):
        session.prefill(ids)
        rows = session.decode([5, 6, *[wrong] * count])
        session.truncate(length + 2)
        session.last = rows[:2]  # type: ignore[attr-defined]
    assert np.array_equal(one.last, other.last)  # type: ignore[attr-defined]
    assert cache_bytes(llm, one, length + 2) == cache_bytes(llm, other, length + 2)
    assert np.array_equal(one.decode(8), other.decode(8))


def test_rows_in_place_are_those_of_a_copy(llm: LLM, token_ids: Callable[[int], list[int]]) -> None:
    one, other = llm.session(), llm.session()
    for session in (one, other):
        session.prefill(token_ids(20))
    ids = np.arange(30, 41, dtype=np.int32)
    rows = llm.on_engine_thread(lambda: one.decode_in_place(ids).copy())
    assert np.array_equal(rows, other.decode(ids))
    assert one.ids.tolist() == other.ids.tolist()
    last = llm.on_engine_thread(lambda: one.append_in_place(ids).copy())
    assert sqnr_db(last, other.decode(ids)[-1]) >= LOGITS_SQNR_DB["fp32"]


@pytest.mark.parametrize("llm", ["gpu"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "seed": 7, "top_p": 0.95},
        {"temperature": 1.0, "seed": 8, "repetition_penalty": 1.1},
        {"stop": ["\n\n"]},
        {"log_probabilities": True},
    ],
    ids=str,
)
def test_lookup_gives_the_answers_of_plain_decoding(llm: LLM, options: dict[str, Any]) -> None:
    wanted = {"max_new_tokens": 90, "ignore_eos": True, **options}
    plain = llm.generate(CODE, speculate=False, **wanted)
    stream = llm.stream(CODE, **wanted)
    steps = list(stream)
    result = stream.result
    assert result.token_ids == plain.token_ids == tuple(step.token_id for step in steps)
    assert (result.text, result.stop_reason) == (plain.text, plain.stop_reason)
    if result.log_probabilities is not None:
        assert result.log_probabilities == pytest.approx(plain.log_probabilities, abs=1e-3)
    assert plain.speculation is None
    counts = result.speculation
    assert counts is not None
    assert counts.passes + counts.accepted >= result.generated_tokens - 1


def test_a_fixed_number_of_guesses_and_most_of_a_repetition_are_right(bundled_model: Path) -> None:
    with LLM.load(bundled_model, device="host", plan="gpu", speculative="lookup", guesses=3) as llm:
        text = "x = [1, 2, 3, 4]\ny = [1, 2, 3, 4]\n" * 6
        found = llm.generate(text, max_new_tokens=40, ignore_eos=True)
        assert (
            found.token_ids
            == llm.generate(text, max_new_tokens=40, ignore_eos=True, speculate=False).token_ids
        )
        assert found.speculation is not None
        assert found.speculation.passes < 20
        assert found.speculation.guesses <= 3 * found.speculation.passes


def test_a_full_context_and_a_second_turn(bundled_model: Path) -> None:
    """A context that ends inside a run of guesses, and a session that goes on after one."""
    with LLM.load(bundled_model, device="host", plan="gpu", context=77, speculative="lookup") as llm:
        prompt = llm.tokenizer.encode(CODE)
        results = [llm.generate(prompt, ignore_eos=True, speculate=on) for on in (True, False)]
        assert results[0].token_ids == results[1].token_ids
        assert {result.stop_reason for result in results} == {"context"}
        assert results[0].generated_tokens == 77 - len(prompt)
        turns: list[list[int]] = []
        for on in (True, False):
            session, said = llm.session(), prompt[:20]
            for _ in range(3):
                result = llm.generate(said, session=session, max_new_tokens=9, ignore_eos=True, speculate=on)
                assert session.ids.tolist() == [*said, *result.token_ids[:-1]]
                said = [*said, *result.token_ids, 5]
            turns.append(said)
        assert turns[0] == turns[1]


def test_every_proposer_gives_the_greedy_answer(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(CODE)
    options = GenerationOptions(max_new_tokens=40, ignore_eos=True)
    plain = answer(llm, llm.session(), prompt, None, options)
    whole = [*prompt, *plain.token_ids, *[1] * 20]
    for count in (1, 9):
        for guess in (
            lambda place: whole[place],
            lambda place: (whole[place] + 1) % 2048,
            lambda place: whole[place] if place % 3 else 77,
        ):
            session = llm.session()
            found = answer(llm, session, prompt, Guesser(guess, count), options)
            assert found.token_ids == plain.token_ids
            assert session.ids.tolist() == whole[: len(prompt) + 39]


@pytest.mark.parametrize("llm", ["gpu"], indirect=True)
def test_sampled_answers_have_the_distribution_of_the_model(llm: LLM) -> None:
    """Three tokens with guesses drawn from another distribution, against their exact probabilities."""
    prompt, count = llm.tokenizer.encode("import "), 300
    sampling = SamplingOptions(temperature=0.9, top_k=3, top_p=0.98, min_p=0.02, repetition_penalty=1.1)
    sampler = Sampler(sampling, 2048)
    session = llm.session()
    session.prefill(prompt)

    def spread(known: list[int], share: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(known) == len(prompt) + 3:
            yield tuple(known[len(prompt) :]), share
            return
        session.truncate(len(prompt) - 1)
        logits = (
            session.decode(known[len(prompt) - 1 :])[-1]
            if len(known) > len(prompt)
            else session.decode(known[-1])
        )
        found = sampler.distribution(logits, np.array(known))
        for token in np.flatnonzero(found):
            yield from spread([*known, int(token)], share * found[token])

    exact = dict(spread(prompt, 1.0))
    assert sum(exact.values()) == pytest.approx(1)
    likely = {token for answer_ids in exact for token in answer_ids}
    drawn = np.zeros(2048)
    drawn[list(likely)] = np.random.default_rng(5).random(len(likely)) + 0.1
    drawn[7] = 0.2  # never an answer
    drawn /= drawn.sum()
    draws = np.random.default_rng(6)
    seen = dict.fromkeys(exact, 0)
    accepted = 0

    def guess(_: int) -> int:
        return int(draws.choice(2048, p=drawn))

    for seed in range(count):
        options = GenerationOptions(
            max_new_tokens=3,
            ignore_eos=True,
            sampling=dataclasses.replace(sampling, seed=seed),
        )
        session.reset()
        result = answer(llm, session, prompt, Guesser(guess, 2, drawn), options)
        seen[result.token_ids] += 1
        assert result.speculation is not None
        accepted += result.speculation.accepted
    assert accepted > 12
    rows = sorted(exact, key=lambda ids: exact[ids])
    small = [ids for ids in rows if exact[ids] * count < 8]
    groups = [small, *([ids] for ids in rows[len(small) :])]
    expected = [count * sum(exact[ids] for ids in group) for group in groups if group]
    found = [sum(seen[ids] for ids in group) for group in groups if group]
    assert stats.chisquare(found, expected).pvalue > 1e-3


def test_answers_in_turns_do_not_mix(llm: LLM) -> None:
    """Passes of another answer between two tokens of a run of right guesses, as the server runs them."""
    prompts = [llm.tokenizer.encode(text) for text in ("import os\n", CODE)]
    options = GenerationOptions(max_new_tokens=24, ignore_eos=True)
    plain = [answer(llm, llm.session(), prompt, None, options).token_ids for prompt in prompts]

    def in_turns() -> list[GenerationResult]:
        running = []
        for prompt, tokens in zip(prompts, plain, strict=True):
            session, whole = llm.session(), [*prompt, *tokens]
            guesser = Guesser(lambda place, whole=whole: whole[place], 5)  # type: ignore[misc]
            sequence = asked(llm, session, prompt, guesser, options)
            running.append((sequence, drive(sequence, session)))
        while any(sequence.result is None for sequence, _ in running):
            for _, steps in running:
                next(steps)
        return [result_of(sequence) for sequence, _ in running]

    found = llm.on_engine_thread(in_turns)
    assert [one.token_ids for one in found] == plain
    assert [one.speculation.accepted for one in found if one.speculation is not None] == [19, 19]


def test_an_answer_that_is_cancelled_keeps_its_session(llm: LLM) -> None:
    prompt, session = llm.tokenizer.encode(CODE), llm.session()
    stream = llm.stream(prompt, session=session, max_new_tokens=200, ignore_eos=True)
    seen = [next(stream).token_id for _ in range(5)]
    stream.close()
    result = stream.result
    assert result.token_ids[:5] == tuple(seen)
    held = session.ids.tolist()
    assert held == [*prompt, *result.token_ids][: len(held)]
    assert len(held) == len(prompt) + result.generated_tokens - 1


# Draft models


@pytest.fixture(scope="module")
def other_draft(checkpoint: Callable[..., Path]) -> Path:
    """A random model with the bundled one's tokenizer, fewer positions, and a padded vocabulary."""
    return checkpoint("llama", vocab_size=2112, max_position_embeddings=128)


@pytest.mark.parametrize("draft", ["same", "other"])
def test_a_draft_changes_no_answer(bundled_model: Path, other_draft: Path, draft: str) -> None:
    """A draft that is always right, and one that is wrong, knows more tokens, and holds fewer."""
    folder = bundled_model if draft == "same" else other_draft
    with LLM.load(bundled_model, device="host", plan="gpu", speculative=folder, guesses=3) as llm:
        assert any("draft model" in note for note in llm.notes)
        prompt, session = llm.tokenizer.encode(CODE), llm.session()
        for turn in range(2):
            results = [
                llm.generate(
                    prompt,
                    session=session if on else None,
                    max_new_tokens=70,
                    ignore_eos=True,
                    speculate=on,
                )
                for on in (True, False)
            ]
            assert results[0].token_ids == results[1].token_ids
            counts = results[0].speculation
            assert counts is not None
            if draft == "same":
                assert counts.accepted == counts.guesses >= 50
                assert counts.passes == 18
            else:
                assert counts.passes + counts.accepted == 69
                assert counts.accepted < counts.guesses / 2
            prompt = [*prompt, *results[0].token_ids, 5 + turn]
            if draft == "other":
                # Past the draft's 128 positions nothing is guessed.
                assert len(prompt) < 128 or counts.guesses < 3 * counts.passes


def test_a_sampling_draft_has_the_distribution_of_the_model(bundled_model: Path, other_draft: Path) -> None:
    """First guessed tokens of many answers, against the exact distribution; a seed repeats an answer."""
    sampling = {"temperature": 1.0, "top_k": 4, "repetition_penalty": 1.2}
    with LLM.load(bundled_model, device="host", plan="gpu", speculative=other_draft, guesses=2) as llm:
        prompt, session, count = llm.tokenizer.encode("import "), llm.session(), 250
        sampler = Sampler(SamplingOptions(**sampling), llm.config.vocab_size)
        exact: dict[tuple[int, int], float] = {}
        first = sampler.distribution(session.prefill(prompt), np.array(prompt))
        for token in np.flatnonzero(first).tolist():
            then = sampler.distribution(session.decode(token), np.array([*prompt, token]))
            session.truncate(len(prompt))
            exact |= {(token, int(after)): first[token] * then[after] for after in np.flatnonzero(then)}
        seen = dict.fromkeys(exact, 0)
        for seed in range(count):
            found = llm.generate(prompt, max_new_tokens=2, ignore_eos=True, seed=seed, **sampling)
            seen[found.token_ids] += 1
        rows = sorted(exact, key=lambda ids: exact[ids])
        small = [ids for ids in rows if exact[ids] * count < 8]
        groups = [small, *([ids] for ids in rows[len(small) :])]
        expected = [count * sum(exact[ids] for ids in group) for group in groups if group]
        counts = [sum(seen[ids] for ids in group) for group in groups if group]
        assert stats.chisquare(counts, expected).pvalue > 1e-3
        same = [llm.generate(prompt, max_new_tokens=30, seed=3, **sampling).token_ids for _ in range(2)]
        assert same[0] == same[1]


def test_a_draft_that_cannot_guess_is_refused(bundled_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(bundled_model, bare, ignore=shutil.ignore_patterns("*token*"))
    other = tmp_path / "other"
    shutil.copytree(bundled_model, other)
    named = json.loads((other / "tokenizer.json").read_text("utf-8"))
    words = named["model"]["vocab"]
    one, two = list(words)[700:702]
    words[one], words[two] = words[two], words[one]
    (other / "tokenizer.json").write_text(json.dumps(named), "utf-8")
    for folder, message in ((bare, "has no tokenizer"), (other, "has another tokenizer.* 4 differ")):
        with pytest.raises(OptionError, match=message):
            LLM.load(bundled_model, device="host", plan="gpu", speculative=folder)
    for options, words in (
        ({"speculative": ""}, "speculative is ''"),
        ({"speculative": "lookup", "guesses": 16}, "16 guesses"),
        ({"speculative": "lookup", "guesses": 0}, "0 guesses"),
        ({"guesses": 4}, "--guesses 4 changes nothing: nothing guesses tokens"),
    ):
        with pytest.raises(OptionError, match=words):
            LLM.load(bundled_model, device="host", **options)


def test_both_models_count_in_the_memory(bundled_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[MemoryNeed] = []

    def too_much(need: MemoryNeed) -> None:
        needs.append(need)
        check_memory(need, need.total - 1)

    monkeypatch.setattr("heterollm.drafting.check_memory", too_much)
    for draft in ("lookup", bundled_model):
        with pytest.raises(DeviceError, match="draft model" if draft != "lookup" else "KV cache"):
            LLM.load(bundled_model, device="host", plan="gpu", context=256, speculative=draft)
    alone, both = needs
    assert (alone.draft, both.draft) == (0, alone.total)
    assert both.total == 2 * alone.total


def test_a_schema_with_guesses(bundled_model: Path) -> None:
    """A guess that the schema excludes is wrong, and an answer that is complete within a run ends there."""
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 6, "maxItems": 6}
    with LLM.load(bundled_model, device="host", plan="gpu", speculative="lookup", guesses=4) as llm:
        results = [
            llm.generate(
                "x = [1, 22, 333, 1, 22, 333]\n", max_new_tokens=60, json_schema=schema, speculate=on
            )
            for on in (True, False)
        ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].stop_reason == results[1].stop_reason == "complete"
    assert results[0].speculation is not None
    assert results[0].speculation.guesses > 0


# Commands


def test_the_command_counts_passes_and_guesses(bundled_model: Path, run: Callable[..., Any]) -> None:
    options = (bundled_model, CODE * 2, "--device", "host", "--plan", "gpu", "--max-new-tokens", "24")
    code, plain, _ = run("generate", *options)
    assert code == 0
    code, guessed, told = run("generate", *options, "--speculative", "lookup", "--guesses", "4")
    assert (code, guessed) == (0, plain)
    counts = re.search(r"speculative: (\d+) passes, (\d+) of (\d+) guesses right", told.replace("\n", " "))
    assert counts is not None
    passes, right, guesses = map(int, counts.groups())
    assert passes + right == 23
    assert right <= guesses <= 4 * passes
    code, out, told = run("generate", *options, "--guesses", "4")
    assert (code, out) == (1, "")
    assert "--guesses 4 changes nothing: nothing guesses tokens" in told
