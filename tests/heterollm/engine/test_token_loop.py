"""Nothing is made in the token loop, nothing grows over many answers, and a new length builds nothing."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import heterollm.kernels
import heterollm.profiler
import heterollm.solver
from heterollm.engine import SYNC_OPTIONS, Sync
from heterollm.engine.kept_passes import KEPT_PASSES
from heterollm.kernels.gpu import OpenClRuntime
from heterollm.kernels.npu import HostNpu
from heterollm.llm import LLM
from heterollm.solver import Plan

PACKAGES = (heterollm, heterollm.kernels, heterollm.solver, heterollm.profiler)
LEVELS = ("gpu", "npu", "layer")
SYNCS = [sync for sync in SYNC_OPTIONS if sync != "auto"]
ROUNDS, STEPS = 3, 30
LARGEST_GROWTH_BYTES = 24 * ROUNDS * STEPS - 1
"""Less than one number for each step."""
ANSWERS = 40
PAGES = Path("/proc/self/statm")


@pytest.fixture(scope="module", params=LEVELS)
def llm(request: pytest.FixtureRequest, bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan=request.param) as model:
        yield model


def test_decode_steps_make_no_lasting_object(llm: LLM) -> None:
    check_decode_steps(llm)


# The others are these without sleep, or with it.
@pytest.mark.parametrize(
    "sync",
    [
        pytest.param(sync, marks=pytest.mark.slow if sync in ("operator", "poll", "sleep_flag") else ())
        for sync in SYNCS
    ],
)
def test_no_strategy_makes_a_lasting_object(
    sync: Sync,
    bundled_model: Path,
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[..., Plan],
) -> None:
    plan = half_rows_plan(host_llm(bundled_model, plan="gpu"))
    check_decode_steps(host_llm(bundled_model, plan=plan, sync=sync))


def check_decode_steps(llm: LLM) -> None:
    session = llm.session()
    # From here to the last step one bucket of the context serves, so that no pass is compiled.
    session.prefill(list(range(260)))

    def decode(count: int) -> None:
        for token in range(count):
            session.decode_in_place(token)

    llm._thread.run(lambda: decode(20))
    gc.collect()
    ours = [tracemalloc.Filter(True, str(Path(package.__file__).parent / "*")) for package in PACKAGES]
    tracemalloc.start(1)
    try:
        before = tracemalloc.take_snapshot().filter_traces(ours)
        rises = []
        for _ in range(ROUNDS):
            tracemalloc.reset_peak()
            start, _ = tracemalloc.get_traced_memory()
            llm._thread.run(lambda: decode(STEPS))
            rises.append(tracemalloc.get_traced_memory()[1] - start)
        after = tracemalloc.take_snapshot().filter_traces(ours)
    finally:
        tracemalloc.stop()
    grown = sum(difference.size_diff for difference in after.compare_to(before, "lineno"))
    assert grown <= LARGEST_GROWTH_BYTES
    # Not even for a moment: a single copy of the logits has 8 KB. What each step makes shows in every round;
    # memory is counted over all threads, and another one's, or the interpreter's own, shows once in a while.
    assert min(rises) < 6 * 1024
    assert session.position == 280 + ROUNDS * STEPS


@pytest.mark.skipif(not PAGES.exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "llm",
    ["npu", *(pytest.param(level, marks=pytest.mark.slow) for level in ("gpu", "layer"))],
    indirect=True,
)
def test_many_answers_take_no_more_memory(llm: LLM) -> None:
    generator = np.random.default_rng(0)

    def answer(length: int) -> None:
        prompt = generator.integers(1, 2048, length).tolist()
        llm.generate(prompt, max_new_tokens=2, ignore_eos=True)

    def resident_bytes() -> int:
        gc.collect()
        return int(PAGES.read_text().split()[1]) * 4096

    growth = []
    for window in range(4):
        begin = resident_bytes()
        for length in range(ANSWERS * window, ANSWERS * window + ANSWERS):
            answer(1 + length * 37 % 100)
        growth.append(resident_bytes() - begin)
    assert len(llm._engine.kept_passes) == KEPT_PASSES
    # What leaks does so in every window; compilers and allocators take memory once in a while and keep it.
    assert min(growth[1:]) < ANSWERS * 28 * 1024


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled or opened from now on."""
    seen: list[str] = []
    for kind, name in ((OpenClRuntime, "_build"), (HostNpu, "_open")):
        original = getattr(kind, name)

        def spy(
            self: object, *arguments: object, _original: Callable = original, _name: str = name
        ) -> object:
            seen.append(_name)
            return _original(self, *arguments)

        monkeypatch.setattr(kind, name, spy)
    return seen


def test_a_new_length_builds_nothing(llm: LLM, built: list[str]) -> None:
    # Longer than the prompts of other tests of this model.
    llm.session().prefill(list(range(120)))
    before = {tokens for _, tokens, _ in llm._engine.kept_passes}
    built.clear()
    for length in (119, 110, 103):
        llm.session().prefill(list(range(length)))
        assert length not in before
        assert length in {tokens for _, tokens, _ in llm._engine.kept_passes}
    assert built == []


def test_a_second_model_builds_its_own(bundled_model: Path, built: list[str]) -> None:
    """The spies of the test above do see what is built."""
    with LLM.load(bundled_model, device="host", plan="npu"):
        pass
    assert {"_build", "_open"} == set(built)


def test_the_kept_passes_are_the_latest(llm: LLM) -> None:
    session = llm.session()
    for length in range(1, KEPT_PASSES + 20):
        session.reset()
        session.prefill([1] * length)
    lengths = [tokens for _, tokens, _ in llm._engine.kept_passes]
    assert lengths == list(range(20, KEPT_PASSES + 20))
    session.reset()
    session.prefill([1] * 25)
    assert llm._engine.kept_passes[-1][1] == 25
    assert session.decode(1).shape == (2048,)
