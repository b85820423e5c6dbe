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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from heterollm.base import (
    CacheError,
    HeteroLLMError,
    OptionError,
    atomic_path,
    cache_error,
    cache_root,
    decode,
    decode_json,
    locked,
    missing_field,
)
from heterollm.kernels.gpu.parameters import KernelParameters, ShapeClass
from heterollm.kernels.gpu.sources import kernel_source_hash
from heterollm.kernels.ops import WeightFormat

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

Text = Annotated[str, Meta(max_length=4096)]
Time = Annotated[float, Meta(gt=0, lt=1e12)]


class DeviceIdentity(Struct, frozen=True, forbid_unknown_fields=True):
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
    kernel_source_hash: str = msgspec.field(default_factory=kernel_source_hash)

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


class Tuned(Struct, frozen=True, forbid_unknown_fields=True):
    """What a search chose for a shape class.

    Args:
        parameters: The winner, which may be the default.
        tuned_us: Its median time in microseconds.
        default_us: That of the default parameters, measured in turns with it.
    """

    parameters: KernelParameters
    tuned_us: Time
    default_us: Time


class Quarantined(Struct, frozen=True, forbid_unknown_fields=True):
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
    reason: Text
    driver: Text
    kernel_source_hash: Text


class TunedShape(Tuned, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a search chose, as the file has it.

    Args:
        shape: For which shape class.
    """

    shape: ShapeClass


class TuningFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A tuning table as its file has it."""

    schema: Literal[1]
    identity: dict[str, str | int]
    tuned: tuple[TunedShape, ...]
    quarantined: tuple[Quarantined, ...]


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
            {"shape": shape, **msgspec.structs.asdict(chosen)}
            for shape, chosen in sorted(self.tuned.items(), key=lambda item: str(item[0]))
        ]
        content = {
            "schema": SCHEMA,
            "identity": self.identity,
            "tuned": tuned,
            "quarantined": self.quarantined,
        }
        return json.dumps(msgspec.to_builtins(content), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, identity: DeviceIdentity) -> TuningTable:
        """Return the table of a file's text.

        Raises:
            OptionError: It is damaged, or of another device, driver, schema or kernel source.
        """
        content = decode_json(text, source="It", error=OptionError)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise OptionError(f"It has another schema than {SCHEMA}.")
        file = decode(content, TuningFile, source="It is damaged", error=OptionError)
        own: dict[str, Any] = msgspec.structs.asdict(identity)
        for name in (*own, *file.identity):
            if name not in own or file.identity.get(name) != own[name]:
                raise OptionError(
                    f"Its {name:.80} is {file.identity.get(name)!r:.80}, not {own.get(name)!r}."
                )
        for record in (*content["tuned"], *content["quarantined"]):
            stated = (record["shape"]["weight"], WeightFormat), (record["parameters"], KernelParameters)
            for data, kind in stated:
                if missing := missing_field(data, kind):
                    raise OptionError(f"It is damaged: {missing} is missing.")
        table = cls(identity, quarantined=list(file.quarantined))
        for bad in file.quarantined:
            bad.shape.check()
        for entry in file.tuned:
            entry.shape.check()
            if entry.shape in table.tuned:
                raise OptionError(f"It names {entry.shape} twice.")
            table.keep(entry.shape, Tuned(entry.parameters, entry.tuned_us, entry.default_us))
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
