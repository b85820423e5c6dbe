"""The run of a profile: budget, resumption, failures, drift."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from heterollm.base import CacheError, DeviceError, OptionError
from heterollm.profiler.measure import Task
from heterollm.profiler.records import (
    BandwidthKey,
    DriftKey,
    GraphKey,
    LinearKey,
    LinearPoint,
    Processor,
    Profile,
    Record,
)
from heterollm.profiler.runner import ProfileOptions, RunSummary, run_tasks

DESCRIPTION = {"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """Numbered tasks that take a second of the clock each and note their numbers."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.done: list[int] = []

    def task(self, number: int, *, essential: bool = False, error: Exception | None = None) -> Task:
        def run() -> Iterable[Record]:
            self.clock.now_s += 1.0
            self.done.append(number)
            if error is not None:
                raise error
            return [Record(key, (float(number),))]

        key = BandwidthKey("gpu", number, False)
        return Task("counting", (key,), run, 1.0, essential)


def test_everything_is_measured_and_noted() -> None:
    work, profile = Work(), Profile(DESCRIPTION)
    summary = run_tasks(
        profile,
        [work.task(1), work.task(2)],
        ProfileOptions(),
        clock=work.clock,
        details={"note": "x"},
        skipped=lambda: {"alignment": 3},
    )
    assert work.done == [1, 2]
    assert (summary.measured, summary.failed, summary.finished) == (2, 0, True)
    [run] = profile.runs.values()
    assert (run["note"], run["skipped"], run["finished"]) == ("x", {"alignment": 3}, True)


def test_the_budget_spares_what_is_essential_and_what_is_worth_most() -> None:
    work, profile = Work(), Profile(DESCRIPTION)

    def highest_first(_: Profile, tasks: Sequence[Task]) -> list[Task]:
        return sorted(tasks, key=lambda task: task.keys, reverse=True)

    tasks = [work.task(1), work.task(2, essential=True)]
    ranked = [work.task(number) for number in range(10, 20)]
    summary = run_tasks(
        profile, tasks, ProfileOptions(4.0), ranked=ranked, ranking=highest_first, clock=work.clock
    )
    assert work.done == [1, 2, 19, 18]
    assert summary.left == 8
    work.done.clear()
    run_tasks(Profile(DESCRIPTION), [work.task(3), work.task(4, essential=True)], ProfileOptions(0.5))
    assert 4 in work.done


class Building(Work):
    """Tasks of a second of which each also builds a graph, which takes longer than the prior says."""

    def __init__(self, build_s: float) -> None:
        super().__init__()
        self.build_s = build_s

    def building(self, tokens: int, *, essential: bool = False) -> Task:
        point = LinearPoint("o", (64,), 64, tokens, 4, 32, form="matmul_nbits")

        def run() -> Iterable[Record]:
            self.clock.now_s += 1.0 + self.build_s
            self.done.append(tokens)
            return [
                Record(LinearKey("npu", point, "graph"), (5.0,)),
                Record(GraphKey(point, "graph"), (1.0,), values={"build_us": self.build_s * 1e6}),
            ]

        keys = (LinearKey("npu", point, "graph"),)
        return Task("Linear layers", keys, run, 1.0, essential, graphs=1, build_s=2.0)


def test_the_budget_counts_builds_as_they_turn_out_to_be() -> None:
    work = Building(build_s=9.0)
    tasks = [work.building(1, essential=True), *(work.building(tokens) for tokens in (32, 64))]
    ranked = [work.building(128), work.task(7)]
    # By the prior of 3 s a task all would fit into 24 s; by the first build each takes 10 s.
    totals_ms: list[int] = []
    summary = run_tasks(
        Profile(DESCRIPTION),
        tasks,
        ProfileOptions(24.0),
        ranked=ranked,
        clock=work.clock,
        progress=lambda _stage, _done, total: totals_ms.append(total),
    )
    assert work.done == [1, 32, 7]
    assert work.clock.now_s <= 24.0
    assert (summary.left, summary.left_out) == (2, {"o on the NPU": 2})
    assert (summary.graphs, summary.build_seconds, summary.over_seconds) == (2, 18.0, 0.0)
    assert totals_ms[0] == 13_000  # three tasks of 3 s and their builds, and the ranked ones
    assert totals_ms[1] == 24_000  # what the budget allows, now that a build takes 9 s


def test_essential_builds_run_past_the_budget_and_that_is_noted() -> None:
    work = Building(build_s=9.0)
    tasks = [work.building(tokens, essential=True) for tokens in (1, 32)]
    summary = run_tasks(Profile(DESCRIPTION), tasks, ProfileOptions(12.0), clock=work.clock)
    assert work.done == [1, 32]
    assert summary.over_seconds == 8.0


def test_a_failure_is_a_record_and_not_the_end() -> None:
    work, profile = Work(), Profile(DESCRIPTION)
    failing = [
        work.task(1, error=DeviceError("The NPU has gone.", fix="Restart it.")),
        work.task(2, error=ZeroDivisionError("why")),
        work.task(3),
    ]
    summary = run_tasks(profile, failing, ProfileOptions(), clock=work.clock)
    assert (summary.measured, summary.failed) == (3, 2)
    errors = {record.key: record.error for record in profile.failures()}
    assert errors == {
        BandwidthKey("gpu", 1, False): "The NPU has gone.",
        BandwidthKey("gpu", 2, False): "ZeroDivisionError: why",
    }


def test_an_interrupted_run_is_resumed_and_a_finished_one_repeated(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    work = Work()
    tasks = [work.task(1), work.task(2, error=KeyboardInterrupt()), work.task(3)]
    with pytest.raises(KeyboardInterrupt):
        run_tasks(Profile(DESCRIPTION), tasks, ProfileOptions(), path=path, clock=work.clock)
    held = Profile.load(path)
    assert len(held.records) == 1

    work.done.clear()
    time.sleep(0.002)  # runs are told apart by the time of their start
    again = [work.task(number) for number in (1, 2, 3)]
    assert run_tasks(held, again, ProfileOptions(), path=path, clock=work.clock).known == 1
    assert work.done == [2, 3]

    work.done.clear()
    time.sleep(0.002)
    run_tasks(Profile.load(path), again, ProfileOptions(update=True), path=path, clock=work.clock)
    assert work.done == []
    time.sleep(0.002)
    run_tasks(Profile.load(path), again, ProfileOptions(), path=path, clock=work.clock)
    assert work.done == [1, 2, 3]


SCRIPT = """
import sys
from pathlib import Path
from heterollm.profiler import runner
from heterollm.profiler.records.profile import Profile
from heterollm.profiler.records import BandwidthKey, Record
from heterollm.profiler.measure.task import Task

runner.SAVE_EVERY_S = 0.0

def task(number):
    def run():
        print(number, flush=True)
        return [Record(BandwidthKey("gpu", number, False), (1.0,))]
    return Task("counting", (BandwidthKey("gpu", number, False),), run, 1.0)

path = Path(sys.argv[1])
new = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
profile = Profile.load(path) if path.exists() else new
runner.run_tasks(profile, [task(number) for number in range(40)], runner.ProfileOptions(), path=path)
"""


def test_a_run_killed_at_random_moments_is_resumed_without_loss(tmp_path: Path) -> None:
    path, generator = tmp_path / "profile.json", random.Random(1)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    counts = [0]
    for _ in range(4):
        process = subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        # With the line of a task the ones before it are kept; how far the next one came is left to chance.
        for _ in range(generator.randint(2, 9)):
            process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
        counts.append(len(Profile.load(path).records))
    assert counts == sorted(set(counts))
    subprocess.run([sys.executable, str(script), str(path)], check=True, stdout=subprocess.DEVNULL)
    profile = Profile.load(path)
    assert len(profile.records) == 40
    assert max(profile.runs.values(), key=lambda run: run["started_s"])["finished"]


class Slowing:
    processors: tuple[Processor, ...] = ("gpu",)

    def __init__(self) -> None:
        self.time_us = 100.0

    def measure(self, part: Processor) -> tuple[float, ...]:
        assert part == "gpu"
        self.time_us += 10.0
        return (self.time_us,)


def test_drift_is_measured_through_the_run() -> None:
    work, profile = Work(), Profile(DESCRIPTION)
    tasks = [work.task(number) for number in range(45)]
    summary = run_tasks(profile, tasks, ProfileOptions(), reference=Slowing(), clock=work.clock)
    found = [record.median_us for _, record in profile.of_kind(DriftKey)]
    assert found == [110.0, 120.0, 130.0, 140.0]  # at the start, every 20 s, and at the end
    assert summary.drift_fraction == {"gpu": pytest.approx(140 / 110 - 1, abs=1e-4)}


def test_an_unwritable_profile_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    work = Work()
    with pytest.raises(CacheError):
        run_tasks(Profile(DESCRIPTION), [work.task(1)], ProfileOptions(), path=tmp_path / "file" / "x.json")
    assert work.done == []


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_is_a_time(budget_s: float) -> None:
    with pytest.raises(OptionError, match="budget"):
        ProfileOptions(budget_s)


def test_progress_reaches_its_end() -> None:
    work, seen = Work(), []
    run_tasks(
        Profile(DESCRIPTION),
        [work.task(1), work.task(2)],
        ProfileOptions(),
        clock=work.clock,
        progress=lambda stage, done, total: seen.append((stage, done, total)),
    )
    assert seen == [("counting", 0, 2000), ("counting", 1000, 2000)]


class Linears:
    """Tasks of one linear layer each, whose first and later measurements may be disturbed."""

    def __init__(self, factors: dict[int, list[float]]) -> None:
        self.clock = Clock()
        self.factors = factors
        self.done: list[int] = []

    def task(self, tokens: int) -> Task:
        key = LinearKey("gpu", LinearPoint("o", (64,), 64, tokens, 4, 32), "code")

        def run() -> Iterable[Record]:
            self.clock.now_s += 1.0
            self.done.append(tokens)
            left = self.factors.get(tokens, [])
            factor = left.pop(0) if left else 1.0
            return [Record(key, (10.0 * tokens * factor,) * 5)]

        return Task("Linear layers", (key,), run, 1.0, essential=tokens == 1)

    def run(self, profile: Profile, path: Path, *, update: bool = False, **more: object) -> RunSummary:
        tasks = [self.task(tokens) for tokens in (1, 32, 64, 128)]
        ranked = [self.task(256)]
        options = ProfileOptions(update=update)
        return run_tasks(profile, tasks, options, path=path, ranked=ranked, clock=self.clock, **more)


def test_a_point_far_off_is_measured_again_at_once(tmp_path: Path) -> None:
    work, profile = Linears({64: [50.0]}), Profile(DESCRIPTION)
    summary = work.run(profile, tmp_path / "profile.json")
    assert work.done == [1, 32, 64, 64, 128, 256]
    assert (summary.measured, summary.again, summary.disturbed) == (5, 1, 0)
    assert {record.median_us for _, record in profile.of_kind(LinearKey)} == {10, 320, 640, 1280, 2560}


def test_a_point_that_stays_far_off_is_marked_and_measured_first_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    work = Linears({256: [50.0, 60.0]})
    summary = work.run(Profile(DESCRIPTION), path)
    assert work.done == [1, 32, 64, 128, 256, 256]
    assert (summary.again, summary.disturbed) == (1, 1)
    [record] = Profile.load(path).disturbed()
    assert record.median_us == 2560 * 50
    assert record.expected_us == pytest.approx(2560)
    for update, first in ((True, [256]), (False, [256, 1, 32, 64, 128])):
        again = Linears({})
        found = Profile.load(path)
        summary = again.run(found, tmp_path / f"{update}.json", update=update)
        assert again.done == first
        assert (summary.disturbed, found.disturbed()) == (0, [])


def test_a_profile_of_an_earlier_version_is_checked_before_an_update(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    Linears({256: [50.0, 60.0]}).run(Profile(DESCRIPTION), path)
    path.write_text(re.sub(r', "expected_us": [0-9.]+', "", path.read_text()))
    again = Linears({})
    again.run(Profile.load(path), path, update=True)
    assert again.done == [256]


def test_a_clock_that_was_set_back_keeps_no_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    Linears({tokens: [1.2] for tokens in (1, 32, 64, 128, 256)}).run(Profile(DESCRIPTION), path)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s - 1e6)
    again = Linears({})
    summary = again.run(Profile.load(path), path)
    assert (again.done, summary.finished) == ([1, 32, 64, 128, 256], True)
    found = Profile.load(path)
    assert {record.median_us for _, record in found.of_kind(LinearKey)} == {10, 320, 640, 1280, 2560}
    assert max(found.runs.values(), key=lambda run: run["started_s"])["measured"] == 5


class Loaded:
    """A reference operator that takes the times given, one after the other."""

    processors: tuple[Processor, ...] = ("gpu",)

    def __init__(self, *times_us: float) -> None:
        self.times_us = list(times_us)

    def measure(self, part: Processor) -> tuple[float, ...]:
        return (self.times_us.pop(0),)


def test_drift_is_corrected_by_the_reference_operator(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    slow = 1.3
    loaded = Linears({tokens: [slow] for tokens in (1, 32, 64, 128, 256)})
    # The machine was busy through the first run, which nothing shows: it is its own quietest one.
    loaded.run(Profile(DESCRIPTION), path, reference=Loaded(100.0 * slow, 100.0 * slow))
    found = Profile.load(path)
    assert {record.median_us for _, record in found.of_kind(LinearKey)} == {13, 416, 832, 1664, 3328}
    # A later run meets it idle, and corrects what the first one left.
    Linears({}).run(found, path, update=True, reference=Loaded(100.0))
    for profile in (found, Profile.load(path)):
        times_us = sorted(record.median_us for _, record in profile.of_kind(LinearKey))
        assert times_us == pytest.approx([10, 320, 640, 1280, 2560], rel=1e-3)
        for _, record in profile.of_kind(LinearKey):
            assert record.values["slowdown_corrected"] == pytest.approx(slow)
            assert not record.disturbed
    # Noise of the reference operator corrects nothing more.
    Linears({}).run(found, path, update=True, reference=Loaded(95.0))
    times_us = sorted(record.median_us for _, record in found.of_kind(LinearKey))
    assert times_us == pytest.approx([1000 / 105 * one for one in (1.05, 33.6, 67.2, 134.4, 268.8)], rel=0.06)


def test_a_profile_of_a_busy_machine_is_measured_again_by_an_update_on_an_idle_one(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    busy = Linears({tokens: [2.0] for tokens in (1, 32, 64, 128, 256)})
    busy.run(Profile(DESCRIPTION), path, reference=Loaded(200.0, 200.0))
    assert Profile.load(path).disturbed() == []
    idle = Linears({})
    found = Profile.load(path)
    summary = idle.run(found, path, update=True, reference=Loaded(100.0, 100.0))
    assert idle.done == [1, 32, 64, 128, 256]
    assert summary.disturbed == 0
    assert {record.median_us for _, record in found.of_kind(LinearKey)} == {10, 320, 640, 1280, 2560}


def test_a_burst_at_one_reference_measurement_corrects_nothing(tmp_path: Path) -> None:
    profile = Profile(DESCRIPTION)
    Linears({}).run(profile, tmp_path / "profile.json", reference=Loaded(100.0, 300.0))
    assert {record.median_us for _, record in profile.of_kind(LinearKey)} == {10, 320, 640, 1280, 2560}
