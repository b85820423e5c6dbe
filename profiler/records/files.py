"""The profile files of the cache: listed, found by name, taken out and brought in."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heterollm.base import CacheError, OptionError, ProfileError, atomic_path
from heterollm.profiler.records.profile import Profile, profile_path, stored_profiles

DEVICE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]*(:[a-z0-9][a-z0-9_.-]*)?")
"""A device names its file, so that a foreign profile must not name a path."""

LONGEST_DEVICE_NAME: Final = 64
SHORTEST_PREFIX: Final = 4


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A file of the cache.

    Args:
        path: The file.
        size_bytes: Size of the file.
        device: Name of the device; empty if the file is damaged.
        time_kind: Whether its times are real, emulated or simulated.
        fingerprint: Fingerprint of the device.
        records: Number of records.
        failed: Number of records that are errors.
        runs: Number of runs of the profiler in it.
        newest_s: Time of the last record, in seconds since 1970; 0 without records.
        problem: Reason why it cannot be read; empty if it can.
    """

    path: Path
    size_bytes: int
    device: str = ""
    time_kind: str = ""
    fingerprint: str = ""
    records: int = 0
    failed: int = 0
    runs: int = 0
    newest_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """A profile that was brought into the cache.

    Args:
        profile: The profile, merged with that of the same device in the cache.
        path: Its file in the cache.
        new: Number of records that the cache did not have.
    """

    profile: Profile
    path: Path
    new: int


def list_profiles() -> list[StoredProfile]:
    """Return the files of the cache, damaged ones included."""
    found = []
    for path in stored_profiles():
        try:
            size = path.stat().st_size
        except OSError:
            continue  # removed meanwhile
        try:
            profile = Profile.load(path)
        except ProfileError as error:
            found.append(StoredProfile(path, size, problem=error.message))
            continue
        records = profile.records.values()
        found.append(
            StoredProfile(
                path=path,
                size_bytes=size,
                device=profile.device,
                time_kind=profile.time_kind,
                fingerprint=profile.fingerprint,
                records=len(records),
                failed=len(profile.failures()),
                runs=len(profile.runs),
                newest_s=max((record.taken_s for record in records), default=0.0),
            )
        )
    return found


def find_profile(name: str | None = None) -> tuple[Profile, Path]:
    """Return a profile and its file.

    Args:
        name: A file, or the fingerprint of one in the cache or its beginning; None for the one in the cache
            that was written last, or rather that of the same device with its NPU.

    Raises:
        OptionError: There is none, or several of that name.
        ProfileError: It is damaged.
    """
    stored = stored_profiles()
    if name is None:
        if not stored:
            raise OptionError("There is no profile yet.", fix="Run `heterollm profile`.")
        newest, *older = sorted(stored, key=lambda path: (path.stat().st_mtime, path.name), reverse=True)
        found = Profile.load(newest)
        if found.description.get("npu") is None:
            # On ``host`` a run ends with the GPU alone on all cores.
            for path in older:
                with contextlib.suppress(ProfileError):
                    other = Profile.load(path)
                    if other.device == found.device and other.description.get("npu") is not None:
                        return other, path
        return found, newest
    path = Path(name).expanduser()
    if _is_file(path):
        return Profile.load(path), path
    wanted = name.lower()
    matching = [
        path
        for path in stored
        if len(wanted) >= SHORTEST_PREFIX and path.stem.rpartition("-")[2].startswith(wanted)
    ]
    if len(matching) != 1:
        raise OptionError(
            _not_one(name, matching, stored), fix="`heterollm profile list` shows what there is."
        )
    return Profile.load(matching[0]), matching[0]


def export_profile(profile: Profile, target: Path) -> None:
    """Write a profile to a new file.

    Raises:
        OptionError: The file cannot be written, or is there already.
    """
    if target.exists():
        raise OptionError(f"{target} is there already.", fix="Name another file, or delete that one.")
    try:
        with atomic_path(target) as temporary:
            temporary.write_text(profile.to_json(), "utf-8")
    except CacheError as error:
        raise OptionError(error.message, fix="Name another file.") from error


def import_profile(source: Path) -> Imported:
    """Bring a profile into the cache, under its own fingerprint.

    Records of the same device in the cache stay; the newer of two records of one key counts.

    Args:
        source: The file.

    Raises:
        ProfileError: The file is damaged, or no device has such a name.
        CacheError: The cache cannot be written.
    """
    profile = Profile.load(source)
    if len(profile.device) > LONGEST_DEVICE_NAME or not DEVICE_NAME.fullmatch(profile.device):
        raise ProfileError(
            f"{source} is of a device called {profile.device!r:.80}, which is no device's name.",
            fix="Import a file that `heterollm profile export` wrote.",
        )
    path = profile_path(profile.device, profile.fingerprint)
    try:
        before = dict(Profile.load(path).records)
    except ProfileError:
        before = {}  # there is none, or a damaged one, which is kept aside
    profile.save(path)
    merged = Profile.load(path)
    new = sum(record != before.get(key) for key, record in merged.records.items())
    return Imported(merged, path, new)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _not_one(name: str, matching: Sequence[Path], stored: Sequence[Path]) -> str:
    if matching:
        return f"{len(matching)} profiles have fingerprints that begin with {name!r:.80}."
    here = ", ".join(path.stem for path in stored) or "none"
    return f"{name!r:.200} is neither a profile file nor a fingerprint of the cache, which has {here}."
