"""The model as a user holds it: answers, options, plans and the end."""

import gc
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace

from heterollm.base import CheckpointError, DeviceError, EngineError, InputError, OptionError, PlanError
from heterollm.llm import LLM
from heterollm.solver import Plan
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan_records import PlanEntry

PROMPT = "import os\n"
CODE = "def read(path):\n"
LONG = {"max_new_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(bundled_model: Path) -> Iterator[Callable[..., LLM]]:
    """Return a function that loads the bundled model once for each set of options."""
    loaded: dict[str, LLM] = {}

    def get(**options: Any) -> LLM:
        options = {"device": "host", **options}
        key = str(sorted(options.items()))
        if key not in loaded:
            loaded[key] = LLM.load(bundled_model, **options)
        return loaded[key]

    yield get
    for llm in loaded.values():
        llm.close()


@pytest.fixture
def llm(models: Callable[..., LLM]) -> LLM:
    return models()


def with_eos(folder: Path, source: Path, eos: list[int]) -> Path:
    """Copy a checkpoint and give it these end tokens."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", "*.txt"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), "utf-8")
    return folder


# -- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["gpu", "npu", "layer"])
@pytest.mark.parametrize("precision", ["w4a16", "fp16"])
def test_greedy_tokens_are_those_of_transformers(
    models: Callable[..., LLM],
    bundled_model: Path,
    reference: Callable[..., np.ndarray],
    plan: str,
    precision: str,
) -> None:
    """If every token is the likeliest after those before it, the whole answer is transformers' greedy one."""
    llm = models(plan=plan, precision=precision)
    for prompt in (PROMPT, CODE, "class Foo:\n    def __init__(self"):
        result = llm.generate(prompt, max_new_tokens=64, ignore_eos=True)
        ids = llm.tokenizer.encode(prompt)
        assert result.prompt_tokens == len(ids)
        assert (result.generated_tokens, result.stop_reason) == (64, "length")
        expected = reference(llm, bundled_model, [*ids, *result.token_ids])[len(ids) - 1 : -1]
        assert result.token_ids == tuple(expected.argmax(axis=1).tolist())


def test_generate_is_prefill_and_decode_by_hand(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CODE)
    session = llm.session()
    logits = session.prefill(ids)
    tokens = []
    for _ in range(40):
        tokens.append(int(logits.argmax()))
        logits = session.decode(tokens[-1])
    by_text = llm.generate(CODE, max_new_tokens=40, ignore_eos=True)
    by_ids = llm.generate(ids, max_new_tokens=40, ignore_eos=True, session=llm.session())
    assert by_text.token_ids == by_ids.token_ids == tuple(tokens)
    assert by_text.text == llm.tokenizer.decode(tokens)


def test_the_texts_of_a_stream_join_to_the_answer(llm: LLM) -> None:
    stream = llm.stream(CODE, max_new_tokens=50, temperature=1.3, seed=4, ignore_eos=True)
    steps = list(stream)
    assert "".join(step.text for step in steps) == stream.result.text
    assert tuple(step.token_id for step in steps) == stream.result.token_ids
    assert list(stream) == []
    assert stream.result.ttft_s > 0
    assert stream.result.decode_tokens_per_s > 0


def test_a_seed_makes_sampling_repeatable(llm: LLM) -> None:
    def sample(seed: int) -> tuple[int, ...]:
        options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "top_p": 0.95}
        return llm.generate(CODE, session=llm.session(), seed=seed, ignore_eos=True, **options).token_ids

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) == 4


def test_stop_strings_end_the_answer_before_them(llm: LLM) -> None:
    whole = llm.generate(CODE, max_new_tokens=60, ignore_eos=True).text
    for stop in ("return", "path.join(", ["nowhere in it", "os.path"]):
        first = min(whole.find(text) for text in ([stop] if isinstance(stop, str) else stop) if text in whole)
        assert first > 0
        result = llm.generate(CODE, max_new_tokens=60, ignore_eos=True, stop=stop)
        assert result.stop_reason == "stop"
        assert result.text == whole[:first]


def test_every_end_token_of_the_generation_config(
    models: Callable[..., LLM], bundled_model: Path, tmp_path: Path, host_llm: Callable[..., LLM]
) -> None:
    greedy = models().generate(CODE, max_new_tokens=30, ignore_eos=True).token_ids
    early, late = greedy[3], greedy[11]
    assert late not in greedy[:11]
    assert early not in greedy[:3]
    for name, eos, count in (("first", [2047, early, late], 4), ("second", [late, 2047], 12)):
        llm = host_llm(with_eos(tmp_path / name, bundled_model, eos))
        result = llm.generate(CODE, max_new_tokens=30)
        assert result.stop_reason == "eos"
        assert result.token_ids == greedy[:count]
        assert llm.generate(CODE, max_new_tokens=30, ignore_eos=True).token_ids == greedy


def test_an_answer_follows_a_schema_and_the_next_is_free(llm: LLM) -> None:
    members = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
    before = llm.generate(CODE, max_new_tokens=8)
    for sampling in ({}, {"temperature": 0.8, "repetition_penalty": 1.1, "top_k": 20, "seed": 4}):
        options: dict[str, Any] = {"json_schema": schema, "max_new_tokens": 200, **sampling}
        result = llm.chat([{"role": "user", "content": "Describe Anna."}], **options)
        assert result.stop_reason == "complete"
        jsonschema.validate(json.loads(result.text), schema)
    with pytest.raises(InputError, match="objekt"):
        llm.generate(CODE, json_schema={"type": "objekt"})
    assert llm.generate(CODE, max_new_tokens=8).token_ids == before.token_ids


def test_log_probabilities_are_those_of_the_logits(llm: LLM) -> None:
    result = llm.generate(CODE, max_new_tokens=20, temperature=1.0, seed=2, log_probabilities=True)
    ids = llm.tokenizer.encode(CODE)
    logits = llm.session().prefill([*ids, *result.token_ids[:-1]], all_logits=True)[len(ids) - 1 :]
    shifted = logits.astype(np.float64)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    picked = expected[np.arange(len(result.token_ids)), list(result.token_ids)]
    assert result.log_probabilities == pytest.approx(picked, abs=1e-3)
    assert max(result.log_probabilities) < 0
    assert llm.generate(CODE, max_new_tokens=1).log_probabilities is None


def test_what_a_session_holds_of_a_prompt_is_not_computed_again(llm: LLM) -> None:
    session = llm.session()
    first = llm.generate(CODE, max_new_tokens=8, session=session, ignore_eos=True)
    ids = llm.tokenizer.encode(CODE)
    # The last token was chosen and never fed.
    assert session.ids.tolist() == [*ids, *first.token_ids[:-1]]
    again = llm.generate(CODE, max_new_tokens=8, session=session, ignore_eos=True)
    assert again.token_ids == first.token_ids
    longer = [*ids, *first.token_ids]
    fresh = llm.generate(longer, max_new_tokens=8, session=llm.session(), ignore_eos=True)
    assert llm.generate(longer, max_new_tokens=8, session=session, ignore_eos=True).text == fresh.text


def test_threads_share_the_model(llm: LLM) -> None:
    prompts = [f"import {name}\n" for name in ("os", "re", "sys", "json", "time", "math")]
    alone = [llm.generate(prompt, max_new_tokens=12, session=llm.session()).token_ids for prompt in prompts]
    together: list[tuple[int, ...]] = [()] * len(prompts)

    def work(index: int) -> None:
        together[index] = llm.generate(prompts[index], max_new_tokens=12).token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert together == alone


# -- limits and options -------------------------------------------------------------------------------


def test_prompt_and_answer_fill_the_context_exactly(models: Callable[..., LLM]) -> None:
    llm = models(context=32)
    assert llm.context == 32
    for length, answer in ((1, 31), (30, 2), (31, 1), (32, 0)):
        result = llm.generate([5] * length, ignore_eos=True)
        assert (result.generated_tokens, result.stop_reason) == (answer, "context")
    assert llm.generate([5] * 30, max_new_tokens=2, ignore_eos=True).stop_reason == "length"
    with pytest.raises(InputError, match="33 tokens, but the context holds 32"):
        llm.stream([5] * 33)
    assert llm.generate([5], max_new_tokens=3, ignore_eos=True).generated_tokens == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [("max_tokens", "Did you mean max_new_tokens?"), ("temprature", "Did you mean temperature?")],
)
def test_an_unknown_option_names_the_nearest(llm: LLM, option: str, message: str) -> None:
    unknown: dict[str, Any] = {option: 1}
    for call in (llm.generate, llm.stream):
        with pytest.raises(OptionError, match=option) as caught:
            call(PROMPT, **unknown)
        assert message in caught.value.fix
    with pytest.raises(OptionError, match=option):
        llm.chat([{"role": "user", "content": "Hi"}], **unknown)
    with pytest.raises(OptionError, match="devise") as caught:
        LLM.load("nowhere", devise="host")  # type: ignore[call-arg]
    assert "device" in caught.value.fix


def test_a_dialogue_is_answered_by_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    answer = llm.chat(messages, max_new_tokens=5, ignore_eos=True)
    ids = llm.tokenizer.apply_chat_template(messages)
    assert answer.prompt_tokens == len(ids)
    by_hand = llm.generate(ids, max_new_tokens=5, ignore_eos=True, stop=llm.tokenizer.chat_stop_strings)
    assert answer.token_ids == by_hand.token_ids
    assert llm.chat(iter(messages), max_new_tokens=5, ignore_eos=True).token_ids == answer.token_ids
    for wrong in ([], iter([]), None, "Hi", ["Hi"], [{"role": "user"}], [{"role": "user", "content": 1}]):
        with pytest.raises(InputError):
            llm.chat(wrong)  # type: ignore[arg-type]


def test_what_is_shown_is_short(llm: LLM) -> None:
    session = llm.session()
    session.prefill([1, 2, 3])
    shown = [repr(llm), repr(session), repr(llm.plan)]
    assert all(len(text) < 100 for text in shown)
    assert "host" in shown[0]
    assert shown[1] == f"Session(3 of {llm.context} tokens)"
    assert llm.plan.level in shown[2]


def test_no_new_tokens(llm: LLM) -> None:
    result = llm.generate(CODE, max_new_tokens=0)
    assert (result.text, result.token_ids, result.stop_reason) == ("", (), "length")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [2048], [-1], [1.5], [True], [[1], [2]], None, 7, b"bytes", ["def"], "\ud800"],
    ids=repr,
)
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InputError):
        llm.stream(prompt, max_new_tokens=1)
    assert llm.generate(PROMPT, max_new_tokens=1).generated_tokens == 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"stop": 5},
        {"stop": [""]},
        {"stop": ["a", 3]},
        {"stop": "a\ud800"},
        {"session": "mine"},
    ],
    ids=str,
)
def test_what_is_no_way_to_answer(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        llm.generate(PROMPT, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "nowhere"}, "no device 'nowhere'"),
        ({"device": 3}, "no device 3"),
        ({"plan": "fast"}, "'fast' is neither a plan level nor a plan file"),
        ({"plan": 3}, "plan is 3"),
        ({"plan": None}, "plan is None"),
        ({"precision": "w2a2"}, "no precision 'w2a2'"),
        ({"precision": None}, "no precision None"),
        ({"group_size": 48}, "group_size is 48"),
        ({"group_size": 32.0}, "group_size is 32.0"),
        ({"group_size": True}, "group_size is True"),
        ({"symmetric": "no"}, "symmetric is 'no'"),
        ({"scales": "round"}, "no scales 'round'"),
        ({"scales": "stepped", "precision": "fp16"}, "fp16 have no scales"),
        ({"scales": "stepped", "symmetric": False}, "Stepped scales are for symmetric weights"),
        ({"context": 0}, "context of 0"),
        ({"context": 2049}, "context of 2049 is outside .* 1 to 2048"),
        ({"context": 16.0}, "context is 16.0"),
        ({"context": True}, "context is True"),
        ({"gpu_threads": 0}, "0 GPU"),
        ({"gpu_threads": -1}, "-1 GPU"),
        ({"npu_threads": -1}, "-1 NPU"),
        ({"gpu_threads": 10_000}, "10000 GPU"),
        ({"gpu_threads": 1.0}, "gpu_threads is 1.0"),
        ({"npu_threads": "2"}, "npu_threads is '2'"),
    ],
    ids=str,
)
def test_what_is_no_way_to_load(bundled_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LLM.load(bundled_model, **{"device": "host", **options})


@pytest.mark.parametrize("model", [None, 3, "", b"folder"])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises((OptionError, CheckpointError)):
        LLM.load(model, device="host")


def test_the_context_is_the_models_own_unless_told(models: Callable[..., LLM], llm: LLM) -> None:
    assert llm.context == 2048
    assert models(context=1).generate([7], ignore_eos=True).generated_tokens == 0
    assert models(context=1).session().prefill([7]).shape == (2048,)


def test_a_session_of_another_model_is_refused(models: Callable[..., LLM], llm: LLM) -> None:
    other = models(context=32).session()
    with pytest.raises(OptionError, match="another model"):
        llm.generate(PROMPT, session=other)


# -- the end ------------------------------------------------------------------------------------------


def test_closing_ends_everything_once(bundled_model: Path) -> None:
    with LLM.load(bundled_model, device="host", plan="npu") as llm:
        session = llm.session()
        assert llm.generate(PROMPT, max_new_tokens=2).generated_tokens == 2
    for call in (lambda: llm.generate(PROMPT), lambda: llm.stream(PROMPT), lambda: session.prefill([1])):
        with pytest.raises(EngineError, match="closed"):
            call()
    llm.close()
    llm.close()
    assert not [thread for thread in threading.enumerate() if thread is llm._thread._thread]


def test_with_closes_after_an_error(bundled_model: Path) -> None:
    with pytest.raises(ZeroDivisionError), LLM.load(bundled_model, device="host") as llm:
        _ = 1 // 0
    with pytest.raises(EngineError):
        llm.session()


def test_a_model_closed_while_it_answers_finishes_the_answer(bundled_model: Path) -> None:
    llm = LLM.load(bundled_model, device="host")
    stream = llm.stream(CODE, max_new_tokens=200, ignore_eos=True)
    first = next(stream)
    closers = [threading.Thread(target=llm.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(600)
    assert not any(closer.is_alive() for closer in closers)
    assert first.text + "".join(step.text for step in stream) == stream.result.text
    assert (stream.result.generated_tokens, stream.result.stop_reason) == (200, "length")


def test_a_dropped_model_ends_its_thread(bundled_model: Path) -> None:
    llm = LLM.load(bundled_model, device="host")
    session = llm.session()
    thread = llm._thread._thread
    del llm
    gc.collect()
    assert session.prefill([1, 2]).shape == (2048,)
    del session
    gc.collect()
    thread.join(600)
    assert not thread.is_alive()


def test_a_failed_load_ends_its_thread(bundled_model: Path) -> None:
    before = threading.active_count()
    for options in ({"plan": "nowhere"}, {"device": "nowhere"}, {"npu_threads": 0, "gpu_threads": 10_000}):
        with pytest.raises(OptionError):
            LLM.load(bundled_model, **{"device": "host", **options})
    assert threading.active_count() <= before


@pytest.mark.parametrize("place", ["heterollm.loading.Checkpoint", "heterollm.loading.load_weights"])
def test_memory_that_runs_out_while_loading_is_named(
    bundled_model: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def run_out(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(place, run_out)
    before = threading.active_count()
    with pytest.raises(EngineError, match="memory ran out while the model was loaded"):
        LLM.load(bundled_model, device="host", plan="gpu")
    assert threading.active_count() == before


def test_a_cancelled_stream_ends_soon(llm: LLM) -> None:
    stream = llm.stream(CODE, **LONG)
    for _ in range(3):
        next(stream)
    stream.close()
    assert stream.result.stop_reason == "cancelled"
    assert 3 <= stream.result.generated_tokens < 1500
    stream.close()
    assert llm.generate(CODE, max_new_tokens=3).generated_tokens == 3


def test_a_stream_cancelled_before_it_began(llm: LLM) -> None:
    first = llm.stream(CODE, **LONG)
    second = llm.stream(CODE, **LONG)
    second.close()
    first.close()
    assert second.result.stop_reason == "cancelled"
    assert second.result.token_ids == ()


def test_a_long_prompt_reports_its_progress_and_ends_where_it_is_cancelled(llm: LLM) -> None:
    prompt, session, told, opened = list(range(1, 201)), llm.session(), [], threading.Event()
    expected = llm.generate(prompt, max_new_tokens=3)

    def cancel(*report: Any) -> None:
        assert opened.wait(60)
        told.append(report)
        stream.close()

    stream = llm.stream(prompt, session=session, max_new_tokens=3, progress=cancel)
    opened.set()
    result = stream.result
    assert (result.stop_reason, result.token_ids, result.prefill_tokens_per_s) == ("cancelled", (), None)
    assert session.position == 0
    ((stage, done, total),) = told
    assert (stage, total) == ("Reading the prompt", 200)
    assert 0 < done < 200
    answer = llm.generate(
        prompt, session=session, max_new_tokens=3, progress=lambda *report: told.append(report)
    )
    assert len(told) > 1
    assert answer.token_ids == expected.token_ids


def test_a_dropped_stream_ends(llm: LLM) -> None:
    session = llm.session()
    stream = llm.stream(CODE, session=session, **LONG)
    next(stream)
    del stream
    gc.collect()
    for _ in llm.stream(CODE, **LONG):
        break
    gc.collect()
    # Comes after both on the engine thread.
    llm.session()
    assert session.position < 1500


def test_an_interrupted_generate_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session, seen = llm.session(), []

    def interrupted(self: Any) -> Any:
        seen.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("heterollm.engine.stream.Stream.__next__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(CODE, session=session, **LONG)
    assert seen[0].result.stop_reason == "cancelled"


def test_an_error_in_a_stream_is_raised_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "heterollm.engine.session.Session.decode_in_place",
        lambda self, token: (_ for _ in ()).throw(EngineError("lost")),
    )
    stream = llm.stream(CODE, max_new_tokens=5, ignore_eos=True)
    next(stream)
    for _ in range(2):
        with pytest.raises(EngineError, match="lost"):
            _ = stream.result
    assert list(stream) == []


# -- plans --------------------------------------------------------------------------------------------


def test_a_plan_goes_through_a_file(
    models: Callable[..., LLM], bundled_model: Path, tmp_path: Path, host_llm: Callable[..., LLM]
) -> None:
    for level in ("gpu", "layer"):
        llm = models(plan=level)
        path = tmp_path / "plans of mine" / f"{level}.json"
        llm.plan.save(path)
        ids = llm.tokenizer.encode(CODE * 6)
        expected = llm.session().prefill(ids)
        for given in (path, str(path), llm.plan):
            again = host_llm(bundled_model, plan=given, kv_bits=16)
            assert again.plan == llm.plan
            assert np.array_equal(again.session().prefill(ids), expected)


def test_a_plan_for_something_else(
    models: Callable[..., LLM], bundled_model: Path, checkpoint: Callable[..., Path]
) -> None:
    plan = models(plan="layer").plan
    cases: list[tuple[Path, dict[str, Any], Plan, str]] = [
        (checkpoint("llama"), {}, plan, "shape"),
        (bundled_model, {"precision": "fp16"}, plan, "precision"),
        (bundled_model, {}, replace(plan, device="snapdragon"), "device"),
        (bundled_model, {}, replace(plan, shape="layers=4"), "shape"),
    ]
    for folder, options, given, what in cases:
        with pytest.raises(PlanError, match=f"was made for {what}"):
            LLM.load(folder, device="host", plan=given, **options)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"schema_version": 1}',
        b'{"schema_version": 99}',
        b"[" * 100_000,
        b'{"schema_version": 1, "level": 3}',
        b'{"schema_version": 1, "level": "gpu", "level": "npu"}',
    ],
    ids=range(9),
)
def test_a_damaged_plan_file(bundled_model: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        LLM.load(bundled_model, device="host", plan=path)


def edit(plan: Plan, group: str, **changes: Any) -> Plan:
    """Change the placement of a group in prefill of 2 to 32 tokens, of all layers."""
    entries = [
        replace(entry, placement=replace(entry.placement, **changes))
        if (entry.group, entry.phase, entry.lengths) == (group, "prefill", (2, 32))
        else entry
        for entry in plan.entries
    ]
    assert entries != list(plan.entries)
    return replace(plan, entries=tuple(entries), slices=())


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("o", {"npu_rows": (64,), "npu_lengths": ()}),
        ("o", {"npu_rows": ()}),
        ("o", {"npu_rows": (512,)}),
        ("o", {"npu_rows": (0,)}),
        ("o", {"npu_rows": (65,)}),
        ("o", {"npu_rows": (64, 64)}),
        ("qkv", {"npu_rows": (256,)}),
        ("gate_up", {"npu_rows": (64, 100)}),
        ("o", {"npu_lengths": (48,)}),
        ("o", {"npu_lengths": (32, 32)}),
        ("o", {"npu_rows": (64,), "npu_lengths": (1,)}),
        ("down", {"form": "weight_first"}),
        ("down", {"form": "k_chunked"}),
        ("down", {"form": "sideways"}),
        ("head", {"npu_lengths": (33,)}),
    ],
    ids=str,
)
def test_an_illegal_placement_is_refused_at_load(
    models: Callable[..., LLM], bundled_model: Path, tmp_path: Path, group: str, changes: dict[str, Any]
) -> None:
    path = tmp_path / "plan.json"
    edit(models(plan="npu").plan, group, **changes).save(path)
    with pytest.raises(PlanError, match=group):
        LLM.load(bundled_model, device="host", plan=path)


def test_a_plan_with_a_gap_is_refused_at_load(models: Callable[..., LLM], bundled_model: Path) -> None:
    plan = models(plan="layer").plan
    for gone in (0, 3, len(plan.entries) - 1):
        entries = plan.entries[:gone] + plan.entries[gone + 1 :]
        with pytest.raises(PlanError, match="no entry"):
            LLM.load(bundled_model, device="host", plan=replace(plan, entries=entries, slices=()))
    with pytest.raises(PlanError, match="no entry"):
        LLM.load(bundled_model, device="host", plan=replace(plan, entries=(), slices=()))


@pytest.mark.parametrize("chunk_length", [0, 2049, 10**12])
def test_a_plan_with_passes_beyond_the_model(
    models: Callable[..., LLM], bundled_model: Path, chunk_length: int
) -> None:
    plan = models(plan="gpu").plan
    entries = tuple(replace(entry, lengths=(1, max(1, chunk_length))) for entry in plan.entries)
    with pytest.raises(PlanError, match="chunk_length"):
        LLM.load(
            bundled_model,
            device="host",
            plan=replace(plan, chunk_length=chunk_length, entries=entries, slices=()),
        )


def test_a_plan_that_needs_an_npu_on_a_device_without_one(
    models: Callable[..., LLM], bundled_model: Path
) -> None:
    gpu_threads = len(models().device.split.gpu_cores)
    for plan in ("npu", "layer", models(plan="layer").plan):
        with pytest.raises((PlanError, OptionError), match="NPU"):
            LLM.load(bundled_model, device="host", npu_threads=0, gpu_threads=gpu_threads, plan=plan)


def test_a_legal_plan_by_hand_runs(models: Callable[..., LLM], bundled_model: Path, host_llm: Any) -> None:
    base = models(plan="gpu", kv_bits=32)
    cut = PlanEntry("prefill", (2, 64), (0, 3), "down", RowsPlacement((128,), (64,)))
    llm = host_llm(
        bundled_model, plan=replace(base.plan, level="mine", entries=(cut, *base.plan.entries), slices=())
    )
    ids = llm.tokenizer.encode(CODE * 8)
    assert 32 < len(ids) <= 64
    np.testing.assert_allclose(llm.session().prefill(ids), base.session().prefill(ids), rtol=1e-3, atol=1e-3)


# -- what it says of itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_reference_has_transformers_names_and_shapes(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], family: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = checkpoint(family)
    llm = host_llm(folder)
    config = AutoConfig.from_pretrained(folder)
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    listed = list(llm.reference_state_dict())
    assert {name: value.shape for name, value in listed} == expected
    assert len(listed) == len(expected)
    assert {value.dtype for _, value in listed} == {np.dtype(np.float32)}
    assert all(np.isfinite(value).all() for _, value in listed)


def test_notes_say_what_was_decided(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], llm: LLM
) -> None:
    [choice] = llm.notes
    assert choice.startswith("auto: gpu, since host has no profile")
    notes = host_llm(checkpoint("qwen2"), group_size=128).notes
    assert any("down" in note and "16" in note for note in notes), notes
    assert not any("auto chose" in note for note in notes)


def test_auto_chooses_the_host_here_and_says_why(bundled_model: Path) -> None:
    try:
        LLM.load(bundled_model, device="snapdragon").close()
    except DeviceError:
        pass
    else:
        pytest.skip("this is a Snapdragon")
    with LLM.load(bundled_model) as llm:
        assert llm.device.name == "host"
        assert llm.plan.level == "gpu"
        assert any("auto chose host" in note and "no Snapdragon" in note for note in llm.notes)


def test_importing_loads_little(tmp_path: Path) -> None:
    """Few modules, and none of the large libraries, so that an import is quick on any machine."""
    script = "import sys; before = set(sys.modules); import heterollm; print(*set(sys.modules) - before)"
    command = [sys.executable, "-P", "-c", script]
    loaded = subprocess.run(command, capture_output=True, cwd=tmp_path, check=True, text=True).stdout.split()
    large = {"numpy", "scipy", "sklearn", "joblib", "onnxruntime", "pyopencl", "transformers", "torch"}
    assert not large & {name.partition(".")[0] for name in loaded}
    assert len(loaded) < 200


def test_progress_is_told_in_stages(bundled_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        told.setdefault(stage, []).append((done, total))

    LLM.load(bundled_model, device="host", progress=progress).close()
    assert list(told) == [
        "Opening the device",
        "Planning",
        "Quantising weights",
        "Packing weights for the GPU",
        "Preparing graphs and kernels",
    ]
    for steps in told.values():
        assert steps == sorted(steps)
        assert len({total for _, total in steps}) == 1
        assert steps[-1][0] == steps[-1][1]
