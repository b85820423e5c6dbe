"""The run of a bench with stand-ins for the processes: order, memory, deaths, wrong answers."""

from __future__ import annotations

import itertools

import pytest

from heterollm.base import OptionError
from heterollm.benchmarks import BenchOptions, Configuration, TerminatedInterrupt, expand, run_bench
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.child import TimedRun
from heterollm.benchmarks.turns import EnergyMeter, UndisturbedSampler, schedule
from heterollm.data import bundled_model

CASES = (Case(16, 0), Case(0, 4))
HOST = Configuration(device="host")
LEVELS = expand(HOST, plan_level=["gpu", "npu", "layer"], threads=[(1, 1)])
GPU, NPU, LAYER = (one.label for one in LEVELS)


def run(fake_pool, configurations=LEVELS, cases=CASES, repetitions=3, on_row=None, **options):
    return run_bench(
        BenchOptions(bundled_model(), tuple(configurations), cases, repetitions=repetitions, **options),
        start=fake_pool.start,
        sampler=UndisturbedSampler(meter=EnergyMeter([])),
        on_row=on_row,
    )


def test_every_test_goes_round_all_configurations_and_the_order_is_reversed(fake_pool):
    run(fake_pool, repetitions=2)
    samples = fake_pool.asked("sample")
    first, second = samples[: len(samples) * 2 // 3], samples[len(samples) * 2 // 3 :]
    # In the first round everything runs twice: once to warm up.
    assert [one for one, _ in itertools.groupby(first)] == [
        (label, case) for case in ("pp16", "tg4") for label in (GPU, NPU, LAYER)
    ]
    assert second == [(label, case) for case in ("pp16", "tg4") for label in (LAYER, NPU, GPU)]


def test_each_configuration_has_a_process_that_stays(fake_pool):
    configurations = (*LEVELS, *expand(HOST, plan_level=["gpu"], threads=[(2, 0)]))
    result = run(fake_pool, configurations)
    labels = [one.label for one in configurations]
    assert [label for label, _ in fake_pool.asked("load")] == labels
    assert [label for label, _ in fake_pool.asked("trace")] == labels
    assert [label for (label,) in fake_pool.asked("start")] == labels
    assert all(worker.closed for worker in fake_pool.workers)
    assert [len(row.times.samples_ns) for row in result.rows] == [3] * 8


def test_models_that_do_not_fit_together_are_loaded_in_turns(fake_pool):
    fake_pool.need = 2**30
    result = run(fake_pool, memory_gib=2.5, repetitions=4, trace=False)
    # Never more than two at once, and everything was measured all the same.
    held = highest = 0
    for entry in fake_pool.log:
        held += {"load": 1, "close": -1}.get(entry[0], 0)
        highest = max(highest, held)
    assert highest == 2
    assert all(row.error is None and len(row.times.samples_ns) == 4 for row in result.rows)
    assert any("loaded again in turns" in note for note in result.notes)
    assert max(row.account.loads for row in result.rows) > 1
    # Where models come and go, a configuration runs all tests while it is there: few loads, each warmed up.
    assert len(fake_pool.asked("load")) <= 3 + 2 * 4
    assert len(fake_pool.asked("sample")) > 4 * 6


def test_a_death_costs_its_own_rows_only(fake_pool, died):
    fake_pool.trouble[("sample", NPU, "tg4")] = died()
    result = run(fake_pool)
    by_row = {(row.label, row.test): row for row in result.rows}
    dead = by_row.pop((NPU, "tg4"))
    assert dead.error.startswith(f"While {NPU} ran tg4: ")
    assert "signal 9" in dead.error
    assert not dead.usable
    for row in by_row.values():
        assert row.error is None
        assert len(row.times.samples_ns) == 3
    assert [label for label, _ in fake_pool.asked("load")] == [GPU, NPU, LAYER, NPU]


def test_a_second_death_ends_a_configuration(fake_pool, died):
    fake_pool.trouble[("sample", NPU, "tg4")] = died()
    fake_pool.trouble[("sample", NPU, "pp16")] = died()
    rows = {(row.label, row.test): row for row in run(fake_pool, cases=(*CASES, Case(8, 0))).rows}
    for case in ("pp16", "tg4", "pp8"):
        assert "signal 9" in rows[NPU, case].error
        assert len(rows[GPU, case].times.samples_ns) == len(rows[LAYER, case].times.samples_ns) == 3
    assert (NPU, "pp8") not in fake_pool.asked("sample")


def test_what_cannot_be_loaded_is_an_error_in_its_rows(fake_pool, failed):
    fake_pool.trouble[("load", LAYER)] = failed("Plan level 'layer' needs a profile.")
    result = run(fake_pool)
    errors = {row.label for row in result.rows if row.error}
    assert errors == {LAYER}
    assert "needs a profile. Do something else." in next(row.error for row in result.rows if row.error)
    assert (LAYER, "pp16") not in fake_pool.asked("sample")


def test_one_failing_test_leaves_the_other_tests_of_its_configuration(fake_pool, failed):
    fake_pool.trouble[("sample", GPU, "pp16")] = failed()
    rows = {(row.label, row.test): row for row in run(fake_pool).rows}
    assert rows[GPU, "pp16"].error
    assert rows[GPU, "tg4"].usable


def test_who_computes_something_else_does_not_count(fake_pool):
    fake_pool.noise[LAYER] = 0.5
    rows = run(fake_pool).rows
    for row in rows:
        assert row.quality.quality_passed is (row.label != LAYER)
        assert row.usable is (row.label != LAYER)
        assert row.quality.quality_reference == GPU


def test_everything_failing_still_gives_rows(fake_pool, failed):
    for label in (GPU, NPU, LAYER):
        fake_pool.trouble[("load", label)] = failed(f"{label} does not load.")
    rows = run(fake_pool).rows
    assert len(rows) == 6
    assert all(row.error and row.times.avg_ts is None for row in rows)


def test_traces_fill_their_fields_and_may_be_left_out(fake_pool):
    assert all(row.trace.overlap_fraction == 0.5 for row in run(fake_pool).rows)
    rows = run(fake_pool, trace=False).rows
    assert all(row.trace.overlap_fraction is None and row.reasons["overlap_fraction"] for row in rows)


def test_a_row_is_handed_on_as_soon_as_it_is_whole(fake_pool):
    seen = []
    result = run(fake_pool, on_row=lambda row: seen.append((row, fake_pool.taken)))
    assert sorted(row.label + row.test for row, _ in seen) == sorted(
        row.label + row.test for row in result.rows
    )
    for row, _ in seen:
        assert len(row.times.samples_ns) == 3
        assert row.trace.overlap_fraction == 0.5
        assert row.interrupted is None
    # 6 warm-ups and 12 samples of the first two rounds come first, then one row a sample.
    assert [taken for _, taken in seen] == list(range(19, 25))


@pytest.mark.parametrize(
    ("raised", "reason", "code"),
    [(KeyboardInterrupt(), "Ctrl-C", 130), (TerminatedInterrupt(15), "SIGTERM", 143)],
)
def test_an_interrupted_bench_keeps_what_it_has(fake_pool, raised, reason, code):
    # In the second round, behind twelve runs of the first: all have two samples of pp16, one of tg4.
    fake_pool.after[12 + 5] = raised
    seen = []
    result = run(fake_pool, on_row=seen.append)
    assert (result.stop.reason, result.stop.exit_code) == (reason, code)
    assert [(row.test, len(row.times.samples_ns)) for row in result.rows] == [("pp16", 2)] * 3 + [
        ("tg4", 1), ("tg4", 1), ("tg4", 2),
    ]  # fmt: skip
    assert all(row.interrupted == reason and row.error is None and row.usable for row in result.rows)
    assert all(row.asked.repetitions == 3 for row in result.rows)
    assert [row.to_dict() for row in seen] == [row.to_dict() for row in result.rows]
    assert all(worker.closed for worker in fake_pool.workers)
    assert "samples: interrupted by" in result.rows[0].notes[-1]
    assert any(f"Interrupted by {reason} after 10 samples" in note for note in result.notes)


def test_an_interrupt_before_any_sample_leaves_nothing(fake_pool):
    fake_pool.trouble[("logits", NPU)] = KeyboardInterrupt()
    result = run(fake_pool)
    assert result.rows == ()
    assert result.stop.exit_code == 130
    assert all(worker.closed for worker in fake_pool.workers)


def test_a_time_limit_ends_a_bench_as_ctrl_c_does(fake_pool, monkeypatch):
    from heterollm.benchmarks import run as run_module

    monkeypatch.setattr(run_module.time, "monotonic", lambda: float(fake_pool.taken))
    result = run(fake_pool, time_limit_s=10.0)
    assert (result.stop.reason, result.stop.exit_code) == ("the time limit of 10 s", 0)
    assert sum(len(row.times.samples_ns) for row in result.rows) == 5
    assert all(row.interrupted for row in result.rows)


@pytest.mark.parametrize(
    "options",
    [
        {"repetitions": 0},
        {"time_limit_s": 0.0},
        {"seed": -1},
        {"patience_s": float("nan")},
        {"memory_gib": 0.0},
        {"cases": (Case(5000, 0),)},
        {"configurations": ()},
    ],
)
def test_options_that_make_no_sense_are_refused(fake_pool, options):
    with pytest.raises(OptionError):
        run(fake_pool, **options)


def test_a_disturbed_sample_is_taken_again_while_patience_lasts(monkeypatch):
    from heterollm.benchmarks import turns

    clock, busy, asked = itertools.count(step=0.01), iter([0.0, 5.0, 5.0, 5.0]), []
    monkeypatch.setattr(turns, "busy_s", lambda: next(busy))
    monkeypatch.setattr(turns, "wait_until_idle", lambda give_up: None)
    monkeypatch.setattr(turns.time, "monotonic", lambda: next(clock))

    def ask():
        asked.append(1)
        return TimedRun(float(len(asked)), 0.0)

    sample, _ = UndisturbedSampler(60.0, EnergyMeter([])).take(ask)
    assert (sample.time_us, sample.disturbed) == (2.0, False)


def test_without_patience_a_disturbed_sample_is_kept_and_marked(monkeypatch):
    from heterollm.benchmarks import turns

    busy = iter([0.0, 5.0])
    monkeypatch.setattr(turns, "busy_s", lambda: next(busy))
    sample, _ = UndisturbedSampler(0.0, EnergyMeter([])).take(lambda: TimedRun(1.0, 0.0))
    assert sample.disturbed is True


def test_energy_is_read_around_a_sample(tmp_path):
    from heterollm.profiler.measure import RaplCounter

    (tmp_path / "energy_uj").write_text("1000000")
    (tmp_path / "max_energy_range_uj").write_text("3000000")

    def ask():
        (tmp_path / "energy_uj").write_text("500000")  # it ran over
        return TimedRun(1.0, 0.0)

    sample, _ = UndisturbedSampler(0.0, EnergyMeter([RaplCounter(tmp_path)])).take(ask)
    assert sample.energy_j == pytest.approx(2.5)


def test_modelled_energy_is_never_this_machines(fake_pool, monkeypatch):
    fake_pool.time_kind, fake_pool.modelled_j = "simulated", 0.25
    monkeypatch.setattr(EnergyMeter, "joules_since", lambda self, begin: 100.0)
    assert {(row.account.energy, row.account.energy_j) for row in run(fake_pool).rows} == {("modelled", 0.25)}
    fake_pool.time_kind = "real"
    assert {(row.account.energy, row.account.energy_j) for row in run(fake_pool).rows} == {
        ("measured", 100.0)
    }


def test_a_schedule_runs_everything_once_a_round():
    a, b = Configuration(plan_level="gpu"), Configuration(plan_level="npu")
    for turn, loaded in itertools.product(range(3), (True, False)):
        found = list(schedule([a, b], CASES, turn, all_loaded=loaded))
        assert len(set(found)) == len(found) == 4
