import pytest

from heterollm.base import OptionError
from heterollm.profiler.measure import Measurement, measure_interleaved
from heterollm.profiler.measure.timing import collect_interleaved


class Clock:
    """A clock that only calls move."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.log: list[str] = []

    def __call__(self) -> int:
        return self.now_ns

    def call(self, name: str, *durations_us: float):
        remaining = list(durations_us)

        def run() -> None:
            self.log.append(name)
            self.now_ns += int((remaining.pop(0) if len(remaining) > 1 else remaining[0]) * 1e3)

        return run


def test_median_and_spread() -> None:
    measurement = Measurement((30.0, 10.0, 20.0, 50.0, 40.0))
    assert measurement.median_us == 30.0
    assert measurement.spread_fraction == pytest.approx(20.0 / 30.0)
    assert measurement.quartiles_us == (20.0, 40.0)
    assert Measurement((7.0,)).spread_fraction == 0.0
    assert Measurement((7.0,)).quartiles_us == (7.0, 7.0)
    assert Measurement((5.0, 5.0, 5.0)).spread_fraction == 0.0
    assert Measurement((0.0, 0.0)).spread_fraction == 0.0


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    calm = Measurement((10.0,) * 9)
    disturbed = Measurement((10.0,) * 8 + (10_000.0,))
    assert disturbed.median_us == calm.median_us
    assert disturbed.spread_fraction == calm.spread_fraction


def test_the_first_run_is_discarded() -> None:
    clock = Clock()
    calls = {"a": clock.call("a", 9000.0, 10.0)}
    measurement = measure_interleaved(calls, warmup=1, repeats=4, timer=clock)["a"]
    assert measurement.samples_us == (10.0,) * 4


def test_samples_keep_their_order() -> None:
    clock = Clock()
    calls = {"a": clock.call("a", 3.0, 1.0, 2.0)}
    measurement = measure_interleaved(calls, warmup=0, repeats=3, timer=clock)["a"]
    assert measurement.samples_us == (3.0, 1.0, 2.0)


def test_rounds_go_on_until_the_time_is_filled() -> None:
    clock = Clock()
    calls = {"a": clock.call("a", 100.0)}
    measurement = measure_interleaved(calls, warmup=0, repeats=2, min_time_s=0.001, timer=clock)["a"]
    assert len(measurement.samples_us) == 10


def test_interleaved_calls_take_turns() -> None:
    clock = Clock()
    seen: list[tuple[int, int]] = []
    measured = measure_interleaved(
        {"a": clock.call("a", 10.0), "b": clock.call("b", 20.0)},
        warmup=1,
        repeats=3,
        timer=clock,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert clock.log == ["a", "b"] * 4
    assert {name: entry.median_us for name, entry in measured.items()} == {"a": 10.0, "b": 20.0}
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_error_of_the_call_is_not_swallowed() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_interleaved({"a": fail})


@pytest.mark.parametrize(
    "options", [{"repeats": 0}, {"warmup": -1}, {"min_time_s": -1.0}, {"min_time_s": float("nan")}]
)
def test_wrong_numbers_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        measure_interleaved({"a": lambda: None}, **options)


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(OptionError):
        measure_interleaved({})


def test_collected_samples_are_taken_in_turns() -> None:
    log: list[str] = []

    def call(name: str):
        def run() -> int:
            log.append(name)
            return len(log)

        return run

    found = collect_interleaved({"a": call("a"), "b": call("b")}, warmup=1, repeats=2)
    assert log == ["a", "b"] * 3
    assert found == {"a": (3, 5), "b": (4, 6)}


@pytest.mark.parametrize("options", [{"warmup": -1}, {"repeats": 0}])
def test_impossible_collections_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="Cannot run 1 calls"):
        collect_interleaved({"a": lambda: 1}, **options)
    with pytest.raises(OptionError, match="Cannot run 0 calls"):
        collect_interleaved({})
