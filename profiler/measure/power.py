"""Power, where the system exposes it: RAPL counters of the processor, or the battery's gauge.

Both are read from files of Linux's sysfs. Where there are none the profile has no power, and says so; nothing
is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from heterollm.base import DeviceError
from heterollm.profiler.measure.bandwidth import SharedLoad
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import PowerKey, Record

STAGE: Final = "Power"
POWERCAP: Final = Path("/sys/class/powercap")
POWER_SUPPLY: Final = Path("/sys/class/power_supply")
READ_S: Final = 1.0
LOADS: Final = ("idle", "gpu", "npu", "both")
GAUGE_EVERY_S: Final = 0.1


class PowerSource(Protocol):
    """A source of the average power during repeated work."""

    @property
    def name(self) -> str:
        """The name of the source."""
        ...

    def average_watts(self, work: Callable[[], None], seconds: float) -> float:
        """Return the average power while ``work`` is repeated for that long.

        Raises:
            DeviceError: It cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class RaplCounter:
    """An energy counter of the processor package (Intel and AMD; linux/Documentation/power/powercap).

    Args:
        folder: Its folder in sysfs.
    """

    folder: Path

    @property
    def name(self) -> str:
        """The name of the source."""
        return f"rapl {(self.folder / 'name').read_text('ascii').strip()}"

    def average_watts(self, work: Callable[[], None], seconds: float) -> float:
        """Return the average power; see :class:`PowerSource`."""
        before, begin = self.energy_uj(), time.perf_counter()
        _repeat(work, seconds)
        spent_uj, elapsed_s = self.spent_uj(before), time.perf_counter() - begin
        return spent_uj / 1e6 / elapsed_s

    def energy_uj(self) -> float:
        """Return the reading of the counter.

        Raises:
            DeviceError: It cannot be read.
        """
        return _number(self.folder / "energy_uj")

    def spent_uj(self, before_uj: float) -> float:
        """Return the energy since the counter showed ``before_uj``.

        Raises:
            DeviceError: It cannot be read.
        """
        spent = self.energy_uj() - before_uj
        # A counter that ran over starts again from zero.
        return spent if spent >= 0 else spent + _number(self.folder / "max_energy_range_uj")


@dataclass(frozen=True, slots=True)
class BatteryGauge:
    """The gauge of a battery that is discharging: the power of the whole device.

    Args:
        folder: Its folder in sysfs.
    """

    folder: Path

    @property
    def name(self) -> str:
        """The name of the source."""
        return f"battery {self.folder.name}"

    def average_watts(self, work: Callable[[], None], seconds: float) -> float:
        """Return the average power; see :class:`PowerSource`."""
        samples: list[float] = []
        last_s = [0.0]

        def sampled() -> None:
            work()
            if time.perf_counter() - last_s[0] >= GAUGE_EVERY_S:
                samples.append(self._watts())
                last_s[0] = time.perf_counter()

        _repeat(sampled, seconds)
        return sum(samples) / len(samples)

    def _watts(self) -> float:
        if (self.folder / "power_now").exists():
            return abs(_number(self.folder / "power_now")) / 1e6
        return abs(_number(self.folder / "current_now") * _number(self.folder / "voltage_now")) / 1e12


def power_sources(powercap: Path = POWERCAP, power_supply: Path = POWER_SUPPLY) -> list[PowerSource]:
    """Return the sources that this system lets its user read; often none."""
    found: list[PowerSource] = []
    for folder in sorted(powercap.glob("intel-rapl:?")):
        counter = RaplCounter(folder)
        if _readable(folder / "energy_uj") and _readable(folder / "name"):
            found.append(counter)
    for folder in sorted(power_supply.glob("*")):
        fields = ("power_now",) if (folder / "power_now").exists() else ("current_now", "voltage_now")
        if _text(folder / "status") == "Discharging" and all(_readable(folder / field) for field in fields):
            found.append(BatteryGauge(folder))
    return found


def power_tasks(load: SharedLoad, sources: Sequence[PowerSource] | None = None) -> list[Task]:
    """Return the work of measuring power at rest and under load; none where nothing can be read."""
    sources = power_sources() if sources is None else sources
    if not sources:
        return []
    names = LOADS if "npu" in load.processors else LOADS[:2]
    return [
        Task(STAGE, (PowerKey(source.name, name),), partial(_measure, source, name, load), 1.2 * READ_S)
        for source in sources
        for name in names
    ]


def _measure(source: PowerSource, name: str, load: SharedLoad) -> Iterator[Record]:
    works: dict[str, Callable[[], object]] = {
        "idle": partial(load.rest, 0.02),
        "gpu": partial(load.run_once, "gpu"),
        "npu": partial(load.run_once, "npu"),
        "both": partial(load.together_us, "compute", "compute"),
    }
    work = works[name]
    work()  # what is made or compiled at first must not count
    watts = source.average_watts(lambda: (work(), None)[1], READ_S)
    yield Record(PowerKey(source.name, name), values={"watts": round(watts, 4)})


def _repeat(work: Callable[[], None], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while True:
        work()
        if time.perf_counter() >= end:
            return


def _number(path: Path) -> float:
    try:
        return float(path.read_text("ascii"))
    except (OSError, ValueError) as error:
        raise DeviceError(f"Cannot read {path}: {error}.") from error


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _readable(path: Path) -> bool:
    return bool(_text(path))
