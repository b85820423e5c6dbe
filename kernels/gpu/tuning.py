"""The tuned kernel parameters of a device, and the quarantined ones that must not be tried again.

Each device has one JSON file, ``tuning/<device key>.json`` in the cache folder. A change reads, edits and
rewrites the whole file under its lock, so that concurrent processes keep each other's changes. A file that is
damaged, or of another driver or other kernel sources, is refused with a reason; the kernels then run with
default parameters, and the next change replaces the file.
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
    decode,
    decode_json,
    locked,
    missing_field,
    own_folder,
)
from heterollm.kernels.gpu.attention_tuning import AttentionClass, TunedAttention
from heterollm.kernels.gpu.parameters import KernelParameters, KernelStyle, ShapeClass
from heterollm.kernels.gpu.sources import kernel_source_hash
from heterollm.kernels.ops import WeightFormat

logger = logging.getLogger(__name__)

SCHEMA: Final = 1

IGNORE_VARIABLE: Final = "HETEROLLM_TUNING"
"""Environment variable: ``off`` runs the kernels with their default parameters, as benches want."""

LARGEST_FILE_BYTES: Final = 4 * 2**20
LONGEST_REASON: Final = 300

Text = Annotated[str, Meta(max_length=4096)]
Time = Annotated[float, Meta(gt=0, lt=1e12)]


class DeviceIdentity(Struct, frozen=True, forbid_unknown_fields=True):
    """Key of tuned parameters beside the shape class.

    Args:
        device: Name of the device.
        platform: Name of its OpenCL platform.
        compute_units: Compute units; on a CPU its threads.
        max_work_group: Most work-items of a work-group.
        local_bytes: Local memory of a work-group.
        driver: Version of the driver.
        subgroups: 1 if work-items of a subgroup can pass values to each other.
        images: 1 if kernels can read a buffer as an image. How large a one is not part of the key: on a CPU
            that follows the memory that the machine has at the time.
        kernel_source_hash: Hash of the sources in use (:func:`heterollm.kernels.gpu.kernel_source_hash`).
    """

    device: str
    platform: str
    compute_units: int
    max_work_group: int
    local_bytes: int
    driver: str
    subgroups: int = 0
    images: int = 0
    kernel_source_hash: str = msgspec.field(default_factory=kernel_source_hash)

    @property
    def key(self) -> str:
        """Name of the device's file. It does not depend on the driver: a new driver refuses the old file."""
        parts = [self.device, self.platform, self.compute_units]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """Path of the device's file."""
        return own_folder("tuning") / f"{self.key}.json"

    def can_run(self, parameters: KernelParameters) -> bool:
        """Return whether a work-group of these parameters is within the device's limits and features."""
        fits = parameters.work_group() <= self.max_work_group and parameters.local_bytes() <= self.local_bytes
        return fits and parameters.subgroup <= self.subgroups and parameters.image <= self.images


class Tuned(Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a search for a shape class.

    Args:
        parameters: The fastest parameters, possibly the default.
        tuned_us: Their median time in microseconds.
        default_us: Median time of the default parameters, measured in alternation.
    """

    parameters: KernelParameters
    tuned_us: Time
    default_us: Time


class Quarantined(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that fail with a driver and kernel sources, and are not tried again with them.

    Args:
        shape: Shape class.
        parameters: The failing parameters.
        reason: The failure.
        driver: Version of the driver.
        kernel_source_hash: Hash of the kernel sources.
    """

    shape: ShapeClass
    parameters: KernelParameters
    reason: Text
    driver: Text
    kernel_source_hash: Text


class TunedShape(Tuned, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a search in the file.

    Args:
        shape: Shape class.
    """

    shape: ShapeClass


class TuningFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a tuning file."""

    schema: Literal[1]
    identity: dict[str, str | int]
    tuned: tuple[TunedShape, ...]
    quarantined: tuple[Quarantined, ...]
    attention: tuple[TunedAttention, ...] = ()


@dataclass(slots=True)
class TuningTable:
    """The tuned and the quarantined parameters of one device.

    Args:
        identity: The device.
        tuned: Results of searches by shape class.
        quarantined: Parameters that must not be tried.
        attention: Kernel styles of attention by class.
    """

    identity: DeviceIdentity
    tuned: dict[ShapeClass, Tuned] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)
    attention: dict[AttentionClass, TunedAttention] = field(default_factory=dict)

    def is_quarantined(self, shape: ShapeClass, parameters: KernelParameters) -> bool:
        """Return whether these parameters must not be tried for this shape class."""
        return any(
            (bad.shape, bad.parameters, bad.driver, bad.kernel_source_hash)
            == (shape, parameters, self.identity.driver, self.identity.kernel_source_hash)
            for bad in self.quarantined
        )

    def keep(self, shape: ShapeClass, tuned: Tuned) -> None:
        """Use these parameters for a shape class, unless they are quarantined.

        Raises:
            OptionError: The parameters are not legal for the shape class or the device.
        """
        tuned.parameters.check_for(shape)
        if not self.identity.can_run(tuned.parameters):
            raise OptionError(f"{self.identity.device!r} cannot run {tuned.parameters}.")
        if not self.is_quarantined(shape, tuned.parameters):
            self.tuned[shape] = tuned

    def quarantine(self, shape: ShapeClass, parameters: KernelParameters, reason: str) -> None:
        """Quarantine parameters for a shape class."""
        self.release(shape, parameters)
        own = self.identity.driver, self.identity.kernel_source_hash
        self.quarantined.append(Quarantined(shape, parameters, reason[:LONGEST_REASON], *own))
        if shape in self.tuned and self.tuned[shape].parameters == parameters:
            del self.tuned[shape]

    def release(self, shape: ShapeClass, parameters: KernelParameters) -> None:
        """Take parameters out of quarantine."""
        self.quarantined = [
            bad for bad in self.quarantined if (bad.shape, bad.parameters) != (shape, parameters)
        ]

    def to_json(self) -> str:
        """Return the text of the file, identical for identical content."""
        tuned = [
            {"shape": shape, **msgspec.structs.asdict(chosen)}
            for shape, chosen in sorted(self.tuned.items(), key=lambda item: str(item[0]))
        ]
        content = {
            "schema": SCHEMA,
            "identity": self.identity,
            "tuned": tuned,
            "quarantined": self.quarantined,
            "attention": sorted(self.attention.values(), key=lambda chosen: str(chosen.shape)),
        }
        return json.dumps(msgspec.to_builtins(content), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, identity: DeviceIdentity) -> TuningTable:
        """Decode the text of a file.

        Raises:
            OptionError: The text is damaged, or of another device, driver, schema or kernel source.
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
        table.attention = {chosen.shape: chosen for chosen in file.attention}
        return table


class DeviceTuning:
    """The tuned parameters of an opened device; the first access reads the file.

    Args:
        identity: The device.
        enabled: Whether to use the table; by default unless ``$HETEROLLM_TUNING`` is ``off``.
    """

    def __init__(self, identity: DeviceIdentity, *, enabled: bool | None = None) -> None:
        self.identity = identity
        self.enabled = os.environ.get(IGNORE_VARIABLE) != "off" if enabled is None else enabled
        self._table: TuningTable | None = None
        self._taken = False

    @property
    def table(self) -> TuningTable:
        """The content of the file; empty if it is missing, or refused with a log message."""
        if self._table is None:
            try:
                self._table = read_table(self.identity)
            except CacheError as error:
                logger.warning("%s The kernels run with their default parameters.", error.message)
                self._table = TuningTable(self.identity)
        return self._table

    def take(self, text: bytes) -> str:
        """Use the parameters of a file from elsewhere; quarantined ones of this device stay quarantined.

        Returns:
            The reason why they are not used, such as another driver; else empty.
        """
        try:
            table = TuningTable.from_json(text, self.identity)
        except OptionError as error:
            return error.message
        table.quarantined += self.table.quarantined
        table.tuned = {
            shape: tuned
            for shape, tuned in table.tuned.items()
            if not table.is_quarantined(shape, tuned.parameters)
        }
        self._table, self._taken = table, True
        return ""

    def parameters(self, shape: ShapeClass) -> KernelParameters | None:
        """Return the tuned parameters of a shape class, or None."""
        if not self.enabled:
            return None
        tuned = self.table.tuned.get(shape)
        return None if tuned is None else tuned.parameters

    def attention_style(self, shape: AttentionClass) -> KernelStyle | None:
        """Return the tuned kernel style of a class of attention, or None."""
        chosen = self.table.attention.get(shape) if self.enabled else None
        return None if chosen is None else chosen.style

    def quarantine(self, shape: ShapeClass, parameters: KernelParameters, reason: str) -> None:
        """Quarantine parameters in this process and, if the cache is writable, in the file."""
        self.change(lambda table: table.quarantine(shape, parameters, reason))

    def change(self, change: Callable[[TuningTable], object]) -> None:
        """Change the table and its file; log a warning if the file cannot be written."""
        try:
            table = change_table(self.identity, change)
        except CacheError as error:
            logger.warning("What tuning found is not kept: %s", error.message)
            table = None
        if table is None or self._taken:
            change(self.table)
        else:
            self._table = table


def read_table(identity: DeviceIdentity) -> TuningTable:
    """Return the table of a device from its file; an empty one if the file is missing.

    Raises:
        CacheError: The file cannot be read or used; the message gives the reason.
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
    """Read, change and write the table of a device under its lock; return the new table.

    Args:
        identity: The device.
        change: Function that edits the table; it gets an empty table if the file cannot be used.

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
