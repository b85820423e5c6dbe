"""The profile file: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import CacheError, ProfileError
from heterollm.profiler.records import (
    BandwidthKey,
    DriftKey,
    FenceKey,
    GraphKey,
    Key,
    LayerKey,
    LinearKey,
    LinearPoint,
    Profile,
    Record,
    profile_path,
)
from heterollm.profiler.records.profile import stored_profiles

DESCRIPTION = {
    "device": "host",
    "time": "real",
    "gpu": "a processor",
    "gpu_threads": 1,
    "npu_copies_by_length": False,
    "cache_bytes": 0,
}
POINT = LinearPoint("gate_up", (512, 512), 768, 32, 4, 32)
KEY = LinearKey("gpu", POINT, "abc")


def profile_of(*records: Record, **description: object) -> Profile:
    profile = Profile({**DESCRIPTION, **description})
    for record in records:
        profile.add(record)
    return profile


times = st.lists(st.floats(0.001, 1e9, allow_nan=False), min_size=1, max_size=5).map(tuple)
counts = st.integers(1, 2**40)
sizes = st.integers(1, 2**16)
points = st.builds(
    lambda group, rows, columns, tokens, weight, form: LinearPoint(
        group, rows, columns, tokens, *weight, form=form
    ),
    st.sampled_from(["qkv", "o", "gate_up", "down", "head"]),
    st.lists(st.integers(0, 2**14), min_size=1, max_size=3).filter(any).map(tuple),
    sizes,
    sizes,
    st.sampled_from([(4, 32), (8, 64, False), (4, 16, True, True), (16, 0), (32, 0)]),
    st.sampled_from(["", "weight_first"]),
)
keys: st.SearchStrategy[Key] = st.one_of(
    st.builds(LinearKey, st.sampled_from(["gpu", "npu"]), points, st.text(max_size=8)),
    st.builds(LayerKey, st.text(max_size=8), *[counts] * 6, st.text(max_size=8)),
    st.builds(BandwidthKey, st.sampled_from(["gpu", "npu"]), counts, st.booleans()),
    st.builds(FenceKey, st.text(max_size=8), counts),
    st.builds(GraphKey, points, st.text(max_size=8)),
)
records = st.one_of(
    st.builds(Record, keys, times, times, taken_s=st.floats(0, 2e9)),
    st.builds(Record, keys, values=st.just({"gbps": 1.5}), taken_s=st.floats(0, 2e9)),
    st.builds(Record, keys, error=st.text(min_size=1, max_size=40), taken_s=st.floats(0, 2e9)),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(records, max_size=6))
def test_what_is_written_is_read(items: list[Record]) -> None:
    text = profile_of(*items).to_json()
    read = Profile.from_json(text)
    assert read.to_json() == text
    assert set(read.records) == {item.key for item in items}


def test_order_of_measuring_does_not_change_the_file() -> None:
    one, other = Record(KEY, (1.0,), taken_s=1), Record(BandwidthKey("gpu", 4, False), (2.0,), taken_s=2)
    assert profile_of(one, other).to_json() == profile_of(other, one).to_json()


def test_each_record_is_a_line() -> None:
    text = profile_of(Record(KEY, (1.0, 2.0), taken_s=1)).to_json()
    [line] = [line for line in text.splitlines() if '"kind"' in line]
    assert json.loads(line)["median_us"] == 1.5


def test_a_sound_record_outlives_a_later_failure() -> None:
    profile = profile_of(Record(KEY, (1.0,), taken_s=1), Record(KEY, error="broken", taken_s=2))
    assert profile.records[KEY].samples_us == (1.0,)
    profile.add(Record(KEY, (3.0,), taken_s=3))
    assert profile.records[KEY].samples_us == (3.0,)
    profile.add(Record(KEY, (2.0,), taken_s=2))
    assert profile.records[KEY].samples_us == (3.0,)


def test_another_device_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile_of(Record(KEY, (1.0,)), gpu_threads=2).save(path)
    with pytest.raises(ProfileError, match="gpu_threads is 2 there and 1 here"):
        Profile.load(path, expected=DESCRIPTION)
    with pytest.raises(ProfileError, match="another device"):
        profile_of().merge(Profile.load(path))


def damaged() -> list[tuple[str, Any]]:
    """Return ways to spoil a profile: a name, and what to do to its JSON."""

    def line(**changes: object) -> Any:
        return lambda data: data["records"][0].update(changes)

    return [
        ("schema", lambda data: data.update(schema_version=99)),
        ("older schema", lambda data: data.update(schema_version=1)),
        ("no cache size", lambda data: data["description"].pop("cache_bytes")),
        ("negative cache size", lambda data: data["description"].update(cache_bytes=-1)),
        ("copies", lambda data: data["description"].pop("npu_copies_by_length")),
        ("fingerprint", lambda data: data["description"].update(gpu="another")),
        ("no records", lambda data: data.pop("records")),
        ("runs", lambda data: data.update(runs={"1": {"started_s": "soon"}})),
        ("kind", line(kind="luck")),
        ("field", line(extra=1)),
        ("negative time", line(samples_us=[-1.0])),
        ("no number", line(samples_us=["fast"])),
        ("true", line(samples_us=[True])),
        ("key", lambda data: data["records"][0]["key"].pop("part")),
        ("part", lambda data: data["records"][0]["key"].update(part="cpu")),
        ("rows", lambda data: data["records"][0]["key"]["point"].update(member_rows=[])),
        ("huge", lambda data: data["records"][0]["key"]["point"].update(columns=1e300)),
        ("nothing", line(samples_us=[])),
        ("infinite", lambda data: data["description"].update(gpu_threads=float("inf"))),
    ]


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in damaged()])
def test_nonsense_is_refused(spoil: Any) -> None:
    data = json.loads(profile_of(Record(KEY, (1.0,))).to_json())
    spoil(data)
    with pytest.raises(ProfileError):
        Profile.from_json(json.dumps(data))


def test_a_profile_cut_short_anywhere_is_refused() -> None:
    text = profile_of(Record(KEY, (1.0,)), Record(DriftKey("npu", "1", 0), (2.0,))).to_json()
    for length in range(len(text.rstrip())):
        with pytest.raises(ProfileError):
            Profile.from_json(text[:length])


def test_a_damaged_file_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{")
    profile_of(Record(KEY, (1.0,))).save(path)
    [aside] = tmp_path.glob("profile.json.damaged-*")
    assert aside.read_text() == "{"
    assert str(aside) in caplog.text
    assert KEY in Profile.load(path).records


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        profile_of().save(tmp_path / "file" / "profile.json")


WRITER = """
import sys
from pathlib import Path
from heterollm.profiler.records.profile import Profile
from heterollm.profiler.records import BandwidthKey, Record

for number in range(int(sys.argv[2]), int(sys.argv[2]) + 20):
    profile = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
    profile.add(Record(BandwidthKey("gpu", number, False), (1.0,)))
    profile.save(Path(sys.argv[1]))
"""


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    script, path = tmp_path / "writer.py", tmp_path / "profile.json"
    script.write_text(WRITER)
    writers = [subprocess.Popen([sys.executable, str(script), str(path), str(n)]) for n in (100, 200)]
    assert [writer.wait() for writer in writers] == [0, 0]
    sizes = {key.size_bytes for key, _ in Profile.load(path).of_kind(BandwidthKey)}
    assert sizes == {*range(100, 120), *range(200, 220)}


def test_profiles_of_the_cache_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    profile = profile_of()
    path = profile_path(profile.device, profile.fingerprint)
    profile.save(path)
    assert stored_profiles() == [path]
