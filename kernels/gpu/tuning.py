"""The parameters that a search found best on a device, and those that must never be tried on it again.

One JSON file a device, ``tuning/<device key>.json`` in the cache folder. Every change reads the file, changes
what it holds and writes it whole, under the file's lock, so that two processes lose nothing of each other.
What does not fit (damaged, another driver, other kernel sources) is refused with a reason; the kernels then
run with their default parameters, and the next change starts the file anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from heterollm.base import (
    CacheError,
    HeteroLLMError,
    OptionError,
    atomic_path,
    cache_error,
    cache_root,
    locked,
    parse_json,
)
from heterollm.kernels.gpu.parameters import KernelParameters, ShapeClass
from heterollm.kernels.gpu.sources import kernel_source_hash

__all__ = [
    "IGNORE_VARIABLE",
    "DeviceIdentity",
    "DeviceTuning",
    "Quarantined",
    "Tuned",
    "TuningTable",
    "change_table",
    "read_table",
]

logger = logging.getLogger(__name__)

SCHEMA: Final = 1

IGNORE_VARIABLE: Final = "HETEROLLM_TUNING"
"""Environment variable: ``off`` runs the kernels with their default parameters, as benches want."""

LARGEST_FILE_BYTES: Final = 4 * 2**20
LONGEST_REASON: Final = 300
LONGEST_TEXT: Final = 4096
LONGEST_TIME_US: Final = 1e12


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """What tuned parameters depend on besides the shape class.

    Args:
        device: Name that the device reports.
        platform: Name of its OpenCL platform.
        compute_units: Its compute units: the threads of a CPU.
        max_work_group: Work-items that a work-group may have.
        local_bytes: Local memory of a work-group.
        driver: Version of the driver.
        kernel_source_hash: Of the sources in use (:func:`heterollm.kernels.gpu.kernel_source_hash`).
    """

    device: str
    platform: str
    compute_units: int
    max_work_group: int
    local_bytes: int
    driver: str
    kernel_source_hash: str = field(default_factory=kernel_source_hash)

    @property
    def key(self) -> str:
        """Name of the device's file: a new driver finds what the old one left, and refuses it."""
        parts = [self.device, self.platform, self.compute_units]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """Where the table lies."""
        return cache_root() / "tuning" / f"{self.key}.json"

    def can_run(self, parameters: KernelParameters) -> bool:
        """Whether a work-group of these parameters is within the device's limits."""
        fits = parameters.work_group() <= self.max_work_group
        return fits and parameters.local_bytes() <= self.local_bytes


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search chose for a shape class.

    Args:
        parameters: The winner, which may be the default.
        tuned_us: Its median time in microseconds.
        default_us: That of the default parameters, measured in turns with it.
    """

    parameters: KernelParameters
    tuned_us: float
    default_us: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Parameters that fail on a driver: never tried again with it and these kernel sources.

    Args:
        shape: Where they fail.
        parameters: What fails.
        reason: How.
        driver: Version of the driver.
        kernel_source_hash: Of the sources that failed.
    """

    shape: ShapeClass
    parameters: KernelParameters
    reason: str
    driver: str
    kernel_source_hash: str


@dataclass(slots=True)
class TuningTable:
    """What is known about one device.

    Args:
        identity: The device.
        tuned: What a search chose, by shape class.
        quarantined: What must not be tried.
    """

    identity: DeviceIdentity
    tuned: dict[ShapeClass, Tuned] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)

    def is_quarantined(self, shape: ShapeClass, parameters: KernelParameters) -> bool:
        """Whether these parameters must not be tried for this shape class."""
        return any(
            (bad.shape, bad.parameters, bad.driver, bad.kernel_source_hash)
            == (shape, parameters, self.identity.driver, self.identity.kernel_source_hash)
            for bad in self.quarantined
        )

    def keep(self, shape: ShapeClass, tuned: Tuned) -> None:
        """Use these parameters for a shape class, unless they are in quarantine.

        Raises:
            OptionError: They are not legal for the shape class or the device.
        """
        tuned.parameters.check_for(shape)
        if not self.identity.can_run(tuned.parameters):
            raise OptionError(f"{self.identity.device!r} cannot run {tuned.parameters}.")
        if not self.is_quarantined(shape, tuned.parameters):
            self.tuned[shape] = tuned

    def quarantine(self, shape: ShapeClass, parameters: KernelParameters, reason: str) -> Quarantined:
        """Never use these parameters for a shape class again; returns the record."""
        self.release(shape, parameters)
        own = self.identity.driver, self.identity.kernel_source_hash
        record = Quarantined(shape, parameters, reason[:LONGEST_REASON], *own)
        self.quarantined.append(record)
        if shape in self.tuned and self.tuned[shape].parameters == parameters:
            del self.tuned[shape]
        return record

    def release(self, shape: ShapeClass, parameters: KernelParameters) -> None:
        """Take parameters out of quarantine."""
        self.quarantined = [
            bad for bad in self.quarantined if (bad.shape, bad.parameters) != (shape, parameters)
        ]

    def to_json(self) -> str:
        """Return the text of the file, the same for the same content."""
        tuned = [
            {
                "shape": shape.to_dict(),
                "parameters": chosen.parameters.to_dict(),
                "tuned_us": chosen.tuned_us,
                "default_us": chosen.default_us,
            }
            for shape, chosen in sorted(self.tuned.items(), key=lambda item: str(item[0]))
        ]
        quarantined = [asdict(bad) for bad in self.quarantined]
        content = {
            "schema": SCHEMA,
            "identity": asdict(self.identity),
            "tuned": tuned,
            "quarantined": quarantined,
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, identity: DeviceIdentity) -> TuningTable:
        """Return the table of a file's text.

        Raises:
            OptionError: It is damaged, or of another device, driver, schema or kernel source.
        """
        try:
            content = parse_json(text)
        except ValueError as error:
            raise OptionError(f"It is not JSON: {error}.") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise OptionError(f"It has another schema than {SCHEMA}.")
        content = _fields(content, {"schema", "identity", "tuned", "quarantined"})
        own, theirs = asdict(identity), _fields(content["identity"], {name.name for name in fields(identity)})
        for name, value in own.items():
            if theirs[name] != value:
                raise OptionError(f"Its {name} is {theirs[name]!r:.80}, not {value!r}.")
        table = cls(identity)
        table.quarantined = [_quarantined(record) for record in _list(content["quarantined"])]
        for entry in _list(content["tuned"]):
            record = _fields(entry, {"shape", "parameters", "tuned_us", "default_us"})
            shape = ShapeClass.from_dict(record["shape"])
            if shape in table.tuned:
                raise OptionError(f"It names {shape} twice.")
            parameters = KernelParameters.from_dict(record["parameters"])
            times = _time_us(record["tuned_us"]), _time_us(record["default_us"])
            table.keep(shape, Tuned(parameters, *times))
        return table


class DeviceTuning:
    """The tuned parameters of one opened device; the file is read at the first question.

    Args:
        identity: The device.
        enabled: Whether the table is used; by default unless ``$HETEROLLM_TUNING`` is ``off``.
    """

    def __init__(self, identity: DeviceIdentity, *, enabled: bool | None = None) -> None:
        self.identity = identity
        self.enabled = os.environ.get(IGNORE_VARIABLE) != "off" if enabled is None else enabled
        self._table: TuningTable | None = None

    @property
    def table(self) -> TuningTable:
        """What the file held; empty where it is missing or refused, which the log tells."""
        if self._table is None:
            try:
                self._table = read_table(self.identity)
            except CacheError as error:
                logger.warning("%s The kernels run with their default parameters.", error.message)
                self._table = TuningTable(self.identity)
        return self._table

    def reload(self) -> None:
        """Read the file again at the next question."""
        self._table = None

    def parameters(self, shape: ShapeClass) -> KernelParameters | None:
        """Return the tuned parameters of a shape class; None where the default serves."""
        if not self.enabled:
            return None
        tuned = self.table.tuned.get(shape)
        return None if tuned is None else tuned.parameters

    def quarantine(self, shape: ShapeClass, parameters: KernelParameters, reason: str) -> None:
        """Stop using parameters here and, if the cache can be written, everywhere on this device."""
        self.change(lambda table: table.quarantine(shape, parameters, reason))

    def change(self, change: Callable[[TuningTable], object]) -> None:
        """Change the table here and in its file; where that cannot be written, a line in the log says so."""
        try:
            self._table = change_table(self.identity, change)
        except CacheError as error:
            logger.warning("What tuning found is not kept: %s", error.message)
            change(self.table)


def read_table(identity: DeviceIdentity) -> TuningTable:
    """Return the table of a device from its file; an empty one where there is none.

    Raises:
        CacheError: The file cannot be read or used; the message says why.
    """
    path = identity.path
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise OptionError(f"It exceeds {LARGEST_FILE_BYTES} bytes.")
        return TuningTable.from_json(path.read_bytes(), identity)
    except FileNotFoundError:
        return TuningTable(identity)
    except OSError as error:
        raise cache_error(path, error) from error
    except HeteroLLMError as error:
        raise CacheError(
            f"The tuned kernel parameters in {path} cannot be used. {error.message}",
            fix="Tune again with `heterollm profile`.",
        ) from error


def change_table(identity: DeviceIdentity, change: Callable[[TuningTable], object]) -> TuningTable:
    """Read the table of a device, change it and write it, all under its lock.

    Args:
        identity: The device.
        change: What to do with the table; an empty one where the file cannot be used.

    Returns:
        The table as written.

    Raises:
        CacheError: The file cannot be written or locked.
    """
    path = identity.path
    with locked(path):
        try:
            table = read_table(identity)
        except CacheError as error:
            logger.warning("%s It is replaced.", error.message)
            table = TuningTable(identity)
        change(table)
        with atomic_path(path) as temporary:
            temporary.write_text(table.to_json(), encoding="utf-8")
    return table


def _quarantined(value: object) -> Quarantined:
    record = _fields(value, {name.name for name in fields(Quarantined)})
    texts = record["reason"], record["driver"], record["kernel_source_hash"]
    if not all(isinstance(text, str) and len(text) <= LONGEST_TEXT for text in texts):
        raise OptionError("A quarantine record has a reason, driver or source hash that is no short text.")
    shape = ShapeClass.from_dict(record["shape"])
    return Quarantined(shape, KernelParameters.from_dict(record["parameters"]), *texts)


def _fields(value: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        raise OptionError(f"A record with the fields {sorted(names)} is something else.")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise OptionError("A list of records is something else.")
    return value


def _time_us(value: Any) -> float:  # noqa: ANN401 - any JSON value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < LONGEST_TIME_US:
        raise OptionError(f"{value!r:.80} is no time in microseconds.")
    return float(value)
