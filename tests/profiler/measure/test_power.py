"""Power: read where the system has it, absent where it has not."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from heterollm.base import DeviceError
from heterollm.profiler.measure import RaplCounter, power_sources
from heterollm.profiler.measure.power import BatteryGauge


def rapl(folder: Path, energy_uj: int) -> RaplCounter:
    own = folder / "intel-rapl:0"
    own.mkdir(parents=True)
    (own / "name").write_text("package-0\n")
    (own / "energy_uj").write_text(f"{energy_uj}\n")
    (own / "max_energy_range_uj").write_text("1000000\n")
    return RaplCounter(own)


def battery(folder: Path, **fields: object) -> BatteryGauge:
    own = folder / "BAT0"
    own.mkdir(parents=True)
    for name, value in fields.items():
        (own / name).write_text(f"{value}\n")
    return BatteryGauge(own)


def test_a_system_without_meters_has_none(tmp_path: Path) -> None:
    assert power_sources(tmp_path / "no", tmp_path / "nothing") == []


def test_meters_are_found(tmp_path: Path) -> None:
    rapl(tmp_path / "cap", 1)
    battery(tmp_path / "supply", status="Discharging", power_now=5_000_000)
    assert [source.name for source in power_sources(tmp_path / "cap", tmp_path / "supply")] == [
        "rapl package-0",
        "battery BAT0",
    ]


@pytest.mark.parametrize("status", ["Charging", "Full"])
def test_a_battery_on_the_mains_says_nothing(tmp_path: Path, status: str) -> None:
    battery(tmp_path, status=status, power_now=5_000_000)
    assert power_sources(tmp_path / "none", tmp_path) == []


def test_rapl_counts_energy_and_its_wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = rapl(tmp_path, 100_000)
    seconds = itertools.count(0.0, 0.5)
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))

    def work() -> None:
        (counter.folder / "energy_uj").write_text("3100000")

    assert counter.average_watts(work, 0.1) == pytest.approx(3.0 / 1.5)

    def wrap() -> None:
        (counter.folder / "energy_uj").write_text("50000")

    (counter.folder / "energy_uj").write_text("900000")
    assert counter.average_watts(wrap, 0.1) == pytest.approx(0.15 / 1.5)


def test_a_gauge_is_averaged(tmp_path: Path) -> None:
    gauge = battery(tmp_path, status="Discharging", current_now=-2_000_000, voltage_now=4_000_000)
    assert gauge.average_watts(lambda: None, 0.0) == pytest.approx(8.0)


def test_a_meter_that_goes_away_is_an_error(tmp_path: Path) -> None:
    counter = rapl(tmp_path, 1)
    (counter.folder / "energy_uj").unlink()
    with pytest.raises(DeviceError, match="energy_uj"):
        counter.average_watts(lambda: None, 0.0)
