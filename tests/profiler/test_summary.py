"""What a profile says in short, and how two of them are compared."""

import json
import os
from dataclasses import replace

import pytest
from msgspec import structs

from heterollm.base import OptionError, ProfileError
from heterollm.profiler import RecordTimes, compare, held_out, summarize
from heterollm.profiler.comparison import describe
from heterollm.profiler.records import (
    BandwidthKey,
    ContentionKey,
    LaunchKey,
    LinearKey,
    LinearPoint,
    PowerKey,
    Profile,
    Record,
    find_profile,
    import_profile,
    list_profiles,
    profile_path,
)
from heterollm.report.console import render
from heterollm.report.profile import profile_report


def test_times_are_quartiles_and_a_tail():
    times = RecordTimes.of(Record(LaunchKey("idle"), tuple(float(n) for n in range(1, 12))))
    assert (times.median_us, times.low_us, times.high_us, times.high_tail_us) == (6.0, 3.5, 8.5, 10.0)
    assert times.spread_fraction == pytest.approx(5 / 6)
    assert RecordTimes.of(Record(LaunchKey("idle"), error="x")) is None


def test_a_summary_holds_every_kind_and_is_json(sample_profile):
    profile = sample_profile()
    profile.add(Record(PowerKey("rapl package-0", "gpu"), values={"watts": 12.5}))
    summary = summarize(profile)
    data = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    for name in ("linear", "layers", "bandwidth", "contention", "launches", "hand_overs", "copies", "graphs"):
        assert data[name], name
    assert data["power"] == [{"source": "rapl package-0", "load": "gpu", "watts": 12.5}]
    assert data["failures"] == [{"kind": "linear", "error": "The graph is too large.", "count": 1}]
    assert data["runs"][0]["left"] == 3
    whole = LinearPoint("down", (512,), 1408, 64, 4, 32)
    row = next(row for row in summary.linear if row.processor == "gpu" and row.point == whole)
    assert row.gflops == pytest.approx(whole.flops / row.times.median_us / 1e3)


def test_cuts_are_told_from_whole_groups(sample_profile):
    rows = summarize(sample_profile(), accuracy=False).linear
    assert {row.point.member_rows for row in rows if row.whole} == {(512, 128, 128), (512,)}
    assert {row.point.member_rows for row in rows if not row.whole} == {(256, 64, 64), (256,)}


def test_of_two_versions_of_a_kernel_the_later_one_counts(sample_profile):
    profile = sample_profile()
    key, record = next((key, record) for key, record in profile.of_kind(LinearKey) if key.processor == "gpu")
    count = len(summarize(profile, accuracy=False).linear)
    for code, taken_s, factor in (("newer", 2e9, 5.0), ("older", 1e8, 9.0)):
        samples = tuple(factor * sample for sample in record.samples_us)
        profile.add(Record(structs.replace(key, code=code), samples, taken_s=taken_s))
    found = summarize(profile, accuracy=False).linear
    assert len(found) == count
    times = next(row.times for row in found if (row.processor, row.point) == ("gpu", key.point))
    assert times.median_us == pytest.approx(5 * record.median_us)


def test_figures_far_off_are_flagged(sample_profile):
    profile = sample_profile()
    assert " !" not in render(profile_report(summarize(profile, accuracy=False)))
    keys = [key for key, _ in profile.of_kind(LinearKey) if key.point.member_rows == (512,)]
    wide, far = keys[:2]
    profile.records[wide] = Record(wide, (2.0, 8.6, 25.2))
    profile.records[far] = Record(far, (139000.0,) * 5, expected_us=4912.0)
    times = {row.times.median_us: row.times for row in summarize(profile, accuracy=False).linear}
    assert [times[us].doubtful for us in (8.6, 139000.0)] == [True, True]
    assert [times[us].expected_us for us in (8.6, 139000.0)] == [0.0, 4912.0]
    assert sum(own.doubtful for own in times.values()) == 2
    shown = render(profile_report(summarize(profile, accuracy=False)))
    assert "8.6 us ±67% !" in shown
    assert "139 ms ±0% !" in shown
    assert "2 of" in shown
    assert "--update" in shown


def test_without_a_name_the_file_with_the_npu_is_shown(cache, sample_profile):
    """A run on ``host`` ends with the GPU alone on all cores, whose file is the newer one."""
    both = sample_profile()
    both.description = {**both.description, "npu": "an NPU"}
    alone = Profile({**both.description, "npu": None, "npu_threads": 0}, dict(both.records), both.runs)
    for age, profile in ((20, both), (10, alone)):
        path = profile_path("host", profile.fingerprint)
        profile.save(path)
        os.utime(path, (2e9 - age, 2e9 - age))
    assert find_profile()[0].fingerprint == both.fingerprint
    assert find_profile(alone.fingerprint)[0].fingerprint == alone.fingerprint
    profile_path("host", both.fingerprint).unlink()
    assert find_profile()[0].fingerprint == alone.fingerprint


def test_accuracy_has_the_models_and_the_one_in_use(sample_profile):
    summary = summarize(sample_profile())
    for part in ("gpu", "npu"):
        rows = [row for row in summary.accuracy if row.score.processor == part]
        assert sum(row.used for row in rows) == 1
        models = {"gpu": {"interpolation", "roofline"}, "npu": {"stage_linear", "tree"}}
        assert {row.score.model for row in rows} == models[part]
    points = held_out(summary)
    assert {point.processor for point in points} == {"gpu", "npu"}
    assert all(point.predicted_us > 0 for point in points)
    assert all(point.known for point in points if point.processor == "gpu")


def test_a_shape_far_from_the_others_is_outside_of_what_is_known(sample_profile):
    profile = sample_profile()
    far = LinearPoint("down", (64000,), 64000, 64, 4, 32)
    profile.add(Record(LinearKey("gpu", far, "kernels"), (1e6,) * 5, taken_s=1e9))
    points = held_out(summarize(profile))
    assert [point.point for point in points if point.processor == "gpu" and not point.known] == [far]


def test_without_linear_layers_the_reason_is_said():
    profile = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
    profile.add(Record(BandwidthKey("gpu", 1024, False), (1.0,), values={"gbps": 1.0}))
    summary = summarize(profile)
    assert summary.accuracy == ()
    assert "no measured linear layer" in summary.accuracy_reason
    assert held_out(summary) == []


def test_what_an_edited_run_holds_instead_of_numbers_counts_as_nothing(sample_profile):
    profile = sample_profile()
    nonsense = {
        "seconds": "long",
        "measured": None,
        "drift_fraction": [1],
        "skipped": {"x": "y"},
        "models": 3,
    }
    profile.runs["1000000000.000"].update(nonsense)
    [run] = summarize(profile, accuracy=False).runs
    assert (run.seconds, run.measured, run.drift_fraction, run.models) == (0.0, 0, {}, ())


# -- comparison --------------------------------------------------------------------------------------


def test_a_profile_does_not_differ_from_itself(sample_profile):
    comparison = compare(sample_profile(), sample_profile())
    assert {pair.verdict for pair in comparison.pairs} == {"no change", "failed"}
    assert all(kind.ratio in (None, pytest.approx(1.0)) for kind in comparison.kinds)
    assert comparison.differences == {}


def test_overlapping_quartiles_are_no_change_and_others_are(sample_profile):
    noisy = compare(sample_profile(noise=0.1), sample_profile(1.1, noise=0.1))
    assert {pair.verdict for pair in noisy.pairs} == {"no change", "failed"}
    quiet = compare(sample_profile(), sample_profile(1.1, gpu_threads=4))
    assert {pair.verdict for pair in quiet.pairs} == {"slower", "failed"}
    assert quiet.differences == {"gpu_threads": (None, 4)}
    linear = next(kind for kind in quiet.kinds if kind.kind == "linear")
    assert linear.ratio == pytest.approx(1.1)
    assert (linear.slower, linear.faster, linear.failed) == (linear.both, 0, 1)
    back = compare(sample_profile(1.1), sample_profile())
    assert {pair.verdict for pair in back.pairs} == {"faster", "failed"}


def test_what_only_one_has_is_said_and_versions_are_left_aside(sample_profile):
    ours, theirs = sample_profile(), sample_profile()
    del theirs.records[LaunchKey("chained")]
    for key in [key for key in theirs.records if isinstance(key, LinearKey)]:
        record = theirs.records.pop(key)
        theirs.add(replace(record, key=structs.replace(key, code="another version")))
    comparison = compare(ours, theirs)
    assert [pair.label for pair in comparison.pairs if pair.verdict == "only in A"] == ["chained"]
    assert not any(pair.verdict == "only in B" for pair in comparison.pairs)
    assert json.dumps(comparison.to_dict(), allow_nan=False)


def test_real_and_emulated_times_are_not_compared(sample_profile):
    with pytest.raises(ProfileError, match="real time and the other emulated time"):
        compare(sample_profile(), sample_profile(time="emulated"))


def test_keys_in_words():
    point = LinearPoint("qkv", (64, 32), 128, 8, 4, 32, integer_inputs=True, form="conv", streamed=False)
    words = describe(LinearKey("npu", point, "x"))
    assert words == "npu, qkv, 64+32 x 128, 8 tokens, int4 block 32, conv, int8 inputs, cached"
    assert describe(ContentionKey("gpu", "memory", "compute")) == "gpu, memory, beside compute"
    assert describe(BandwidthKey("npu", 4096, True)) == "npu, size bytes 4096, together"


# -- files -------------------------------------------------------------------------------------------


def stored(cache, profile):
    path = cache / "profiles" / f"{profile.device}-{profile.fingerprint}.json"
    profile.save(path)
    return path


def test_a_profile_is_found_by_file_by_fingerprint_and_as_the_newest(cache, sample_profile):
    with pytest.raises(OptionError, match="no profile yet"):
        find_profile()
    first, second = sample_profile(), sample_profile(gpu_threads=2)
    path = stored(cache, first)
    assert find_profile()[1] == path
    other = stored(cache, second)
    assert find_profile(first.fingerprint[:6])[1] == path
    assert find_profile(str(other))[1] == other
    with pytest.raises(OptionError, match="neither a profile file nor a fingerprint"):
        find_profile("nothing like it")
    with pytest.raises(OptionError, match="neither"):
        find_profile("")


def test_an_imported_profile_is_merged_under_its_own_fingerprint(cache, tmp_path, sample_profile):
    ours, theirs = sample_profile(), sample_profile(gpu_threads=2)
    path, file = stored(cache, ours), tmp_path / "theirs.json"
    before = path.read_bytes()
    file.write_text(theirs.to_json())
    imported = import_profile(file)
    assert imported.path != path
    assert path.read_bytes() == before
    assert imported.new == len(theirs.records)
    assert import_profile(file).new == 0
    extra = BandwidthKey("gpu", 1, False)
    theirs.add(Record(extra, (1.0,), values={"gbps": 1.0}))
    file.write_text(theirs.to_json())
    assert import_profile(file).new == 1


def test_a_file_that_took_another_device_s_name_is_not_overwritten(cache, tmp_path, sample_profile):
    ours, theirs = sample_profile(), sample_profile(gpu_threads=2)
    path = cache / "profiles" / f"{theirs.device}-{theirs.fingerprint}.json"
    ours.save(path)
    file = tmp_path / "theirs.json"
    file.write_text(theirs.to_json())
    with pytest.raises(ProfileError, match="another device"):
        import_profile(file)
    assert Profile.load(path).fingerprint == ours.fingerprint


@pytest.mark.parametrize("name", ["../../escaped", "a/b", "", "x" * 100, "host\n", "sim:../x"])
def test_a_device_that_would_name_another_folder_is_refused(cache, tmp_path, sample_profile, name):
    file = tmp_path / "theirs.json"
    file.write_text(sample_profile(device=name).to_json())
    with pytest.raises(ProfileError, match="no device's name"):
        import_profile(file)
    assert not cache.exists()


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 0}, {"columns": 0}, {"member_rows": (0,)}, {"bits": 7}, {"block": 0}, {"columns": 2**50}],
)
def test_impossible_slices_are_refused(tmp_path, sample_profile, changes):
    profile = sample_profile()
    point = structs.replace(LinearPoint("o", (512,), 512, 1, 4, 32), **changes)
    profile.add(Record(LinearKey("gpu", point, "kernels"), (1.0,)))
    file = tmp_path / "profile.json"
    file.write_text(profile.to_json())
    with pytest.raises(ProfileError, match=r"records\[\d+\]"):
        Profile.load(file)


def test_damaged_files_are_listed_with_the_reason(cache, sample_profile):
    path = stored(cache, sample_profile())
    (path.parent / "host-0123456789abcdef.json").write_text("{")
    damaged, sound = list_profiles()
    assert "not JSON" in damaged.problem
    assert (sound.device, sound.failed, sound.runs, sound.newest_s) == ("host", 1, 1, 1e9)
    assert sound.records == len(sample_profile().records)
