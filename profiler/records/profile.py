"""The profile: everything measured on one device, in one readable file (design, section 8).

A file belongs to one device fingerprint: processors, drivers, SDK build and thread split. It is JSON with one
record per line in a fixed order, so that files differ where measurements do. Writers merge under a lock.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from msgspec import Struct

from heterollm.base import (
    Count,
    Number,
    ProfileError,
    atomic_path,
    cache_name,
    decode,
    decode_json,
    locked,
    missing_field,
    own_folder,
    read_file,
)
from heterollm.kernels.device import NPU_MEMORY, Device, fingerprint_of
from heterollm.kernels.ops import GraphMemory
from heterollm.kernels.sim import name_in_words
from heterollm.profiler.records.record_json import KIND_NAMES, RecordLine, record_line
from heterollm.profiler.records.records import KINDS, Key, LinearKey, LinearPoint, Processor, Record

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 2
DEMO: Final = "demo"
"""Purpose of profiles that no other command reads: the demo's, of a few seconds and half of the cores."""

FIX: Final = "Run `heterollm profile` again."

K = TypeVar("K", bound=Key)


class Description(Struct, frozen=True):
    """Entries of a device's description that the profile itself reads; there are others."""

    device: str
    time: str
    cache_bytes: Count
    npu_copies_by_length: bool
    npu_io_by_graph: bool = False
    npu_reuses_io: bool = False
    npu_unrolls_blocks: bool = False
    maps_beside_kernels: bool = False
    npu_graphs_by_length: bool | None = None
    npu_addressable_bytes: Count | None = None
    npu_memory_bytes: Count | None = None
    activation_dtype: str = ""


class RunEntry(Struct, frozen=True):
    """Entries of a run of the profiler that every run has; there are others."""

    started_s: Number
    since_s: Number
    finished: bool


class ProfileFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A profile as its file has it."""

    schema_version: Literal[2]
    fingerprint: str
    description: Description
    runs: dict[str, RunEntry]
    records: tuple[RecordLine, ...]


@dataclass(slots=True)
class Profile:
    """Everything measured on one device.

    Args:
        description: The result of :meth:`heterollm.kernels.device.Device.description`.
        records: The measurements by key.
        runs: One entry for each run of the profiler: start, duration, options, skipped points, clocks.
    """

    description: Mapping[str, Any]
    records: dict[Key, Record] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, device: Device) -> Profile:
        """Return an empty profile of a device."""
        return cls(device.description())

    @property
    def fingerprint(self) -> str:
        """Short hash of the description."""
        return fingerprint_of(self.description)

    @property
    def device(self) -> str:
        """Name of the device."""
        return str(self.description["device"])

    @property
    def graph_memory(self) -> GraphMemory:
        """The way in which the memory of the NPU's graphs counts."""
        found, item_bytes = self.description, 0
        if found.get("npu_io_by_graph", False):
            item_bytes = 4 if found.get("activation_dtype") == "float32" else 2
        return GraphMemory(
            copies_by_length=bool(found["npu_copies_by_length"]),
            activation_bytes=item_bytes,
            reuses_io=bool(found.get("npu_reuses_io", False)),
            unrolls_blocks=bool(found.get("npu_unrolls_blocks", False)),
        )

    @property
    def graphs_by_length(self) -> bool:
        """Whether each standard length of a slice is a graph of its own, which takes time to build."""
        return bool(self.description.get("npu_graphs_by_length", self.graph_memory.copies_by_length))

    @property
    def addressable_bytes(self) -> int | None:
        """Most bytes that the NPU's graphs can take together; None without a limit."""
        found = self.description.get(NPU_MEMORY)
        return self.domain_bytes if found is None else int(found)

    @property
    def domain_bytes(self) -> int | None:
        """Most bytes that they can take in one process domain; None without a limit."""
        found = self.description.get("npu_addressable_bytes")
        return None if found is None else int(found)

    @property
    def time_kind(self) -> str:
        """Whether times are real, emulated or simulated."""
        return str(self.description["time"])

    @property
    def cache_bytes(self) -> int:
        """Size of the device's last cache before memory."""
        return int(self.description["cache_bytes"])

    def add(self, record: Record) -> None:
        """Add a record: a sound one replaces a failed one, else the later replaces the earlier."""
        held = self.records.get(record.key)
        if held is None or (held.failed, record.taken_s) >= (record.failed, held.taken_s):
            self.records[record.key] = record

    def merge(self, other: Profile) -> None:
        """Add the records and runs of another profile of the same device.

        Raises:
            ProfileError: It belongs to another device.
        """
        if other.fingerprint != self.fingerprint:
            raise ProfileError(_difference(self.description, other.description), fix=FIX)
        for key, record in other.records.items():
            held = self.records.get(key)
            if held is None or held.taken_s != record.taken_s:  # marks of ours stay
                self.add(record)
        self.runs = {**other.runs, **self.runs}

    def of_kind(self, kind: type[K]) -> Iterator[tuple[K, Record]]:
        """Yield the sound records with keys of one kind, in order."""
        found = [(key, record) for key, record in self.records.items() if isinstance(key, kind)]
        for key, record in sorted(found, key=lambda item: item[0]):
            if not record.failed:
                yield key, record

    def disturbed(self) -> list[Record]:
        """Return the records that lie far off their neighbours; no plan counts on them."""
        return [record for record in self.records.values() if record.disturbed]

    def failures(self) -> list[Record]:
        """Return the failed records."""
        return [record for record in self.records.values() if record.failed]

    def linear(self, processor: Processor, point: LinearPoint, code: str) -> Record | None:
        """Return the sound record of a linear shard, if there is one."""
        record = self.records.get(LinearKey(processor, point, code))
        return None if record is None or record.failed else record

    # -- files ---------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the profile as JSON text, a record a line."""
        order = {name: place for place, name in enumerate(KINDS)}

        def place(record: Record) -> tuple[int, Any]:
            return order[KIND_NAMES[type(record.key)]], record.key

        head = {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "description": dict(self.description),
            "runs": dict(sorted(self.runs.items())),
        }
        text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
        lines = ",\n".join(record_line(record) for record in sorted(self.records.values(), key=place))
        return f'{text},\n "records": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "the profile") -> Profile:
        """Read a profile.

        Raises:
            ProfileError: The text is not a whole profile of this schema version.
        """
        data = decode_json(text, source=source, error=ProfileError, fix=FIX)
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ProfileError(
                f"{source} has schema version {version!r:.40}, and this version of heterollm reads "
                f"{SCHEMA_VERSION}.",
                fix=FIX,
            )
        file = decode(data, ProfileFile, source=f"{source} is not a profile", error=ProfileError, fix=FIX)
        description, runs = data["description"], data["runs"]
        try:
            json.dumps([description, runs], allow_nan=False)
        except ValueError as error:
            raise ProfileError(f"{source} holds a number that JSON has not: {error}.", fix=FIX) from error
        profile = cls(description, runs=runs)
        if file.fingerprint != profile.fingerprint:
            raise ProfileError(f"{source} was edited: description and fingerprint do not match.", fix=FIX)
        for number, (line, stated) in enumerate(zip(file.records, data["records"], strict=True)):
            point = stated["key"].get("point")
            if point is not None and (missing := missing_field(point, LinearPoint)):
                raise ProfileError(
                    f"{source} is not a profile: records[{number}].key.point.{missing} is missing.", fix=FIX
                )
            profile.add(line.record())
        return profile

    @classmethod
    def load(cls, path: Path, *, expected: Mapping[str, Any] | None = None) -> Profile:
        """Read a profile from a file.

        Args:
            path: The file.
            expected: Description of the device that it must belong to; None takes any.

        Raises:
            ProfileError: The file cannot be read, is damaged, or belongs to another device.
        """
        try:
            text = read_file(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ProfileError(f"Cannot read the profile {str(path)!r:.200}: {reason}.", fix=FIX) from error
        profile = cls.from_json(text, source=str(path))
        if expected is not None:
            profile.check_device(expected, path)
            profile.description = expected  # what the NPU holds may have been found since
        return profile

    def check_device(self, expected: Mapping[str, Any], path: Path) -> None:
        """Refuse a profile, read from ``path``, of another device than the one described.

        Raises:
            ProfileError: It belongs to another device; the message says where they differ.
        """
        if fingerprint_of(expected) != self.fingerprint:
            raise ProfileError(f"{path}: {_difference(expected, self.description)}", fix=FIX)

    def save(self, path: Path) -> None:
        """Merge into the file, which another process may have written meanwhile.

        A damaged file is renamed, with a warning.

        Raises:
            CacheError: The folder cannot be written.
            ProfileError: The file belongs to another device.
        """
        with locked(path):
            if path.exists():
                try:
                    held = self.load(path)
                except ProfileError as error:
                    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
                    path.replace(aside)
                    logger.warning("%s It is kept as %s.", error.message, aside)
                else:
                    self.merge(held)
            with atomic_path(path) as temporary:
                temporary.write_text(self.to_json(), "utf-8")


def profile_path(device: str, fingerprint: str, purpose: str = "") -> Path:
    """Return the path of a device's profile; the name says whether the device is simulated.

    Args:
        device: Name of the device.
        fingerprint: Its fingerprint.
        purpose: :data:`DEMO`, or empty for the profile that all commands read.
    """
    name = f"{cache_name(name_in_words(device), fingerprint)}.json"
    return own_folder("profiles") / (f"{purpose}-{name}" if purpose else name)


def stored_profiles() -> list[Path]:
    """Return the profile files of the cache that all commands read, in order of their names."""
    found = (own_folder("profiles")).glob("*.json")
    return sorted(path for path in found if not path.name.startswith(f"{DEMO}-"))


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return the entries in which two descriptions differ, as a message."""
    names: Iterable[str] = dict.fromkeys([*ours, *theirs])
    differences = [
        f"{name} is {theirs.get(name)!r:.80} there and {ours.get(name)!r:.80} here"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    return f"The profile belongs to another device: {'; '.join(differences)}."
