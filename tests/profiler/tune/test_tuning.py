import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from heterollm.base import KernelError, OptionError
from heterollm.kernels.gpu import (
    BuildError,
    DeviceTuning,
    GpuLinear,
    OpenClRuntime,
    ShapeClass,
    all_parameters,
    default_parameters,
    differences,
    is_cpu,
    list_opencl_devices,
    programs,
)
from heterollm.kernels.gpu.tuning import read_table
from heterollm.kernels.ops import WeightFormat
from heterollm.profiler.tune import default_jobs, tune
from heterollm.profiler.tune.search import search
from heterollm.profiler.tune.trial import Checker, TuningJob, TuningWorkload, wait
from heterollm.profiler.tune.tuning import _joined, candidates_for

INT4 = WeightFormat(4, 32)
MANY = ShapeClass(INT4, False, False, "many")
DEFAULT = default_parameters("vector", MANY)
JOB = TuningJob(MANY, rows=128, columns=128, tokens=(70,))


class Clock:
    """A clock that only trials and calls move."""

    def __init__(self, cost_us, build_s=0.0, seed=0, noise=0.02):
        self.now_ns = 0
        self.calls = {}
        self.tried = []
        self._cost_us = cost_us
        self._build_ns = int(build_s * 1e9)
        self._noise = np.random.default_rng(seed)
        self._stretch = 1.0 + noise

    def __call__(self):
        return self.now_ns

    def trial(self, parameters):
        self.now_ns += self._build_ns
        self.tried.append(parameters)
        cost_us = self._cost_us(parameters)
        if cost_us is None:
            raise BuildError("it computes wrong numbers.")

        def call():
            self.calls[parameters] = self.calls.get(parameters, 0) + 1
            self.now_ns += int(cost_us * 1e3 * self._noise.uniform(1.0, self._stretch))

        return call


def singles():
    return [other for other in all_parameters("vector", MANY) if len(differences(other, DEFAULT)) == 1]


def run(clock, candidates=None, **options):
    candidates = singles() if candidates is None else candidates
    options = {"budget_s": 1000.0, "joined": lambda times_us: _joined(DEFAULT, times_us), **options}
    return search(DEFAULT, candidates, clock.trial, timer=clock, **options)


# ---- the search -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fastest", singles()[::4], ids=str)
def test_the_fastest_wins(fastest):
    clock = Clock(lambda parameters: 700.0 if parameters == fastest else 1000.0)
    result = run(clock)
    assert result.winner == fastest
    assert result.winner_us == pytest.approx(707.0, rel=0.01)
    assert result.default_us == pytest.approx(1010.0, rel=0.01)
    assert (result.failures, result.left_out) == ({}, 0)


def test_changes_that_help_alone_are_tried_together():
    def cost_us(parameters):
        return 1000.0 - 200.0 * (parameters.items == 1) - 100.0 * (parameters.depth_inputs == 256)

    result = run(Clock(cost_us))
    assert differences(result.winner, DEFAULT) == {"items": 1, "depth_inputs": 256}


def test_the_default_stays_unless_beaten_by_the_margin():
    other = singles()[3]
    clock = Clock(lambda parameters: 980.0 if parameters == other else 1000.0)
    result = run(clock, [other])
    assert (result.winner, result.best) == (DEFAULT, other)
    assert result.winner_us == result.default_us
    assert run(Clock(lambda p: 980.0 if p == other else 1000.0), [other], margin_fraction=0.0).winner == other


def test_noise_alone_changes_nothing():
    for seed in range(20):
        assert run(Clock(lambda _: 1000.0, seed=seed)).winner == DEFAULT


def test_a_busy_machine_does_not_choose():
    """Samples that others stretch up to threefold, at random: equals win by chance, and seldom."""
    others = singles()[:4]
    won = 0
    for seed in range(40):
        clock = Clock(lambda _: 1000.0, seed=seed, noise=2.0)
        won += run(clock, others).winner != DEFAULT
    assert won <= 4


def test_a_real_gain_is_seen_on_a_busy_machine():
    better = singles()[1]
    won = 0
    for seed in range(20):
        clock = Clock(lambda parameters: 500.0 if parameters == better else 1000.0, seed=seed, noise=0.5)
        won += run(clock, [better]).winner == better
    assert won >= 18


def test_poor_candidates_are_dropped_early():
    hopeless, slow = singles()[:2]

    def cost_us(parameters):
        return {hopeless: 2500.0, slow: 1900.0}.get(parameters, 1000.0)

    clock = Clock(cost_us)
    run(clock)
    assert clock.calls[hopeless] == 2
    assert clock.calls[slow] < clock.calls[DEFAULT] / 2


def test_a_wrong_candidate_is_never_chosen_or_timed():
    wrong = singles()[2]
    clock = Clock(lambda parameters: None if parameters == wrong else 1000.0)
    result = run(clock)
    assert list(result.failures) == [wrong]
    assert wrong not in clock.calls
    assert result.winner != wrong


def test_a_wrong_default_is_an_error():
    with pytest.raises(BuildError):
        run(Clock(lambda parameters: None if parameters == DEFAULT else 1.0))


@pytest.mark.parametrize("budget_s", [0.5, 3.0, 10.0])
def test_the_budget_is_kept(budget_s):
    clock = Clock(lambda parameters: 1000.0 - parameters.items, build_s=0.5)
    seen = []
    result = run(clock, budget_s=budget_s, progress=seen.append)
    assert clock.now_ns / 1e9 <= budget_s + 1.2
    assert result.left_out > 0
    # Joined candidates are no part of the list.
    assert len(singles()) + 1 <= result.tried + result.left_out <= len(singles()) + 3
    assert seen == sorted(seen)
    assert 0.0 <= seen[0] <= seen[-1] <= 1.0


@pytest.mark.parametrize("options", [{"budget_s": 0.0}, {"budget_s": float("nan")}, {"margin_fraction": 1.0}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(OptionError):
        run(Clock(lambda _: 1.0), **options)


# ---- on a device ----------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A newly opened CPU with an empty table of its own, as one without a matrix unit."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    for _, device in list_opencl_devices():
        if is_cpu(device):
            opened = OpenClRuntime(device)
            opened.tuning = DeviceTuning(opened.tuning.identity, enabled=True)
            opened.traits = dataclasses.replace(opened.traits, has_matrix=False)
            return opened
    pytest.skip("needs an OpenCL runtime that serves the CPU")


ONE_ITEM = replace(DEFAULT, items=1)
SHORT_STRIP = replace(DEFAULT, item_tokens=4)


@pytest.fixture
def few_candidates(monkeypatch):
    """Two candidates instead of all."""
    few = [DEFAULT, ONE_ITEM, SHORT_STRIP]
    monkeypatch.setattr("heterollm.profiler.tune.tuning.all_parameters", lambda *_: few)


@pytest.mark.usefixtures("few_candidates")
def test_a_search_on_a_device_is_kept_and_used(runtime):
    seen = []
    (outcome,) = tune(runtime, [JOB], budget_s=900.0, progress=lambda done, what: seen.append((done, what)))
    assert outcome.result is not None
    assert outcome.result.tried >= 3
    assert outcome.result.failures == {}
    assert 0 < outcome.result.winner_us <= outcome.result.default_us
    kept = read_table(runtime.tuning.identity)
    assert kept.quarantined == []
    assert kept.tuned[MANY].parameters == outcome.result.winner == runtime.tuning.parameters(MANY)
    assert seen[-1] == (1.0, str(MANY))
    assert json.loads(json.dumps(outcome.to_dict()))["tried"] == outcome.result.tried


FACTOR = """
#if defined(STRIP) && STRIP == 4
#define FACTOR 1.01f
#else
#define FACTOR 1.0f
#endif
"""
ERROR = """
#if defined(STRIP) && STRIP == 4
#error this driver has its day
#endif
#define FACTOR 1.0f
"""


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize(
    ("prelude", "reason"), [(FACTOR, "wrongly"), (ERROR, "refuses the program")], ids=["wrong", "no build"]
)
def test_a_broken_candidate_is_quarantined_and_never_chosen(runtime, monkeypatch, prelude, reason):
    product = "(wide_float)STRIP_INPUT(r, k)"
    sources = programs.read_sources

    def broken_sources(files):
        text = sources(files)
        assert text.count(product) == 1
        return prelude + text.replace(product, f"FACTOR * {product}")

    with monkeypatch.context() as broken:
        broken.setattr(programs, "read_sources", broken_sources)
        # Even where it would be the fastest by far.
        (outcome,) = tune(runtime, [JOB], budget_s=900.0)
    (record,) = read_table(runtime.tuning.identity).quarantined
    assert record.parameters == SHORT_STRIP
    assert reason in record.reason
    assert outcome.result is not None
    assert list(outcome.result.failures) == [SHORT_STRIP]
    assert outcome.result.winner != SHORT_STRIP
    (note,) = runtime.variants.notes
    assert str(SHORT_STRIP) in note
    # Not tried again by who opens the device next, although it would pass now.
    runtime.tuning = DeviceTuning(runtime.tuning.identity, enabled=True)
    assert candidates_for(runtime, MANY, "vector") == [ONE_ITEM]
    (again,) = tune(runtime, [JOB], budget_s=900.0)
    assert again.result is not None
    assert again.result.failures == {}


@pytest.mark.usefixtures("few_candidates")
def test_a_candidate_is_in_quarantine_while_it_is_tried(runtime, monkeypatch):
    check = Checker.check
    seen = []

    def look(self, parameters, *, winner=False):
        seen.append([bad.parameters for bad in read_table(runtime.tuning.identity).quarantined])
        if parameters == SHORT_STRIP:
            raise KeyboardInterrupt
        check(self, parameters, winner=winner)

    monkeypatch.setattr(Checker, "check", look)
    with pytest.raises(KeyboardInterrupt):
        tune(runtime, [JOB], budget_s=900.0)
    # The default is never there, the others are while they are tried; an interruption is no failure.
    assert seen == [[], [ONE_ITEM], [SHORT_STRIP]] or seen == [[], [SHORT_STRIP]]
    assert read_table(runtime.tuning.identity).quarantined == []


class Event:
    def __init__(self, status):
        self.command_execution_status = status


def test_a_launch_that_does_not_end_is_a_failure(runtime):
    with pytest.raises(BuildError, match="did not finish within 0 s"):
        wait(runtime, Event(1), limit_s=0.01)
    with pytest.raises(BuildError, match="error -5"):
        wait(runtime, Event(-5))
    wait(runtime, Event(0))


def test_a_write_outside_of_the_output_is_seen(runtime, monkeypatch):
    launch = GpuLinear.launch

    def one_more(self, x, y, *, tokens, **options):
        return launch(self, x, y, tokens=tokens, **{**options, "first_token": 0})

    monkeypatch.setattr(GpuLinear, "launch", one_more)
    with pytest.raises(BuildError):
        Checker(runtime, MANY).check(DEFAULT)


def test_candidates_differ_in_one_number_and_come_in_turns(runtime):
    for shape in (
        MANY,
        ShapeClass(INT4, True, False, "one"),
        ShapeClass(WeightFormat(16), False, False, "many"),
    ):
        for style in ("vector", "simt"):
            default = default_parameters(style, shape)
            changed = [differences(other, default) for other in candidates_for(runtime, shape, style)]
            assert changed
            assert all(len(change) == 1 for change in changed)
            names = [name for change in changed for name in change]
            count = len(set(names))
            assert len(set(names[:count])) == count
            assert shape.weight.quantized or "prefetch_bytes" not in names


def test_the_default_jobs_are_what_a_model_needs():
    kinds = [(job.shape.tokens, job.shape.integer_inputs) for job in default_jobs(half=False)]
    assert kinds == [("one", False), ("few", False), ("many", False), ("many", True)]
    for job in default_jobs(half=True, integer_inputs=[True], rows=64, columns=128):
        assert job.shape.half
        assert job.shape.integer_inputs
        assert (job.rows, job.columns) == (64, 128)
        for tokens in job.tokens:
            shape = ShapeClass.of(INT4, integer_inputs=True, half=True, tokens=tokens)
            assert shape == job.shape


def test_nothing_to_tune_is_refused(runtime):
    with pytest.raises(OptionError):
        tune(runtime, [])
    with pytest.raises(OptionError):
        tune(runtime, [JOB], budget_s=0.0)


@pytest.mark.usefixtures("few_candidates")
def test_a_candidate_that_fails_on_the_real_layer_is_quarantined(runtime, monkeypatch):
    prepare = TuningWorkload.call

    def call(self, parameters):
        run = prepare(self, parameters)

        def fail():
            raise KernelError("A kernel failed: OUT_OF_RESOURCES.")

        def broken():
            with monkeypatch.context() as patch:
                patch.setattr(OpenClRuntime, "finish", lambda _: fail())
                run()

        return broken if parameters == ONE_ITEM else run

    monkeypatch.setattr(TuningWorkload, "call", call)
    (outcome,) = tune(runtime, [JOB], budget_s=900.0)
    runtime.finish()
    (record,) = read_table(runtime.tuning.identity).quarantined
    assert record.parameters == ONE_ITEM
    assert "OUT_OF_RESOURCES" in record.reason
    assert outcome.result is not None
    assert list(outcome.result.failures) == [ONE_ITEM]
    assert outcome.result.winner != ONE_ITEM


KILLED = """
import os, runpy, sys
from heterollm.kernels.gpu import OpenClRuntime, is_cpu, list_opencl_devices
from heterollm.kernels.gpu.parameters import ShapeClass
from heterollm.kernels.ops import WeightFormat
from heterollm.profiler.tune.tuning import tune
from heterollm.profiler.tune.trial import Checker, TuningJob

if sys.argv[1:]:
    runpy.run_path(sys.argv[1])["forget_processor"]()
runtime = OpenClRuntime(next(device for _, device in list_opencl_devices() if is_cpu(device)))
check, seen = Checker.check, []

def die_at_the_second(self, parameters, *, winner=False):
    if seen:
        os._exit(3)
    seen.append(parameters)

Checker.check = die_at_the_second
shape = ShapeClass(WeightFormat(4, 32), False, False, "many")
tune(runtime, [TuningJob(shape, rows=128, columns=128, tokens=(70,))], budget_s=900.0)
"""


def test_what_takes_the_process_down_stays_in_quarantine(runtime, pytestconfig, tmp_path):
    """Also on a processor that PoCL does not know: both processes must take the device for the same."""
    unknown = pytestconfig.getoption("--processor") == "unknown"
    script = Path(__file__).parents[2] / "kernels" / "gpu" / "two_runtimes.py"
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, *([str(script)] if unknown else [])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    (record,) = read_table(runtime.tuning.identity).quarantined
    assert record.reason == "the process ended while it was tried"
    assert record.parameters not in candidates_for(runtime, MANY, "vector")
    assert record.parameters != DEFAULT
