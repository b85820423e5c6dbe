"""The commands under ``profile``: no device and no long measurement, but the real files and errors."""

import functools
import json
import random
import time

import numpy as np
import pytest

import heterollm.planning.profiling
from heterollm.kernels.device import fingerprint_of
from heterollm.kernels.threads import allowed_cores
from heterollm.profiler.measure import Task
from heterollm.profiler.records import BandwidthKey, Profile, Record
from heterollm.profiler.runner import run_tasks
from heterollm.profiler.session import EssentialWork


class FakeDevice:
    """Has a name and nothing to measure."""

    name = "host"
    time_kind = "real"
    reason = "no snapdragon here"
    activation_dtype = np.dtype(np.float32)
    npu = None
    closed = False

    def description(self):
        return {
            "device": self.name,
            "time": self.time_kind,
            "gpu": "a processor",
            "npu_copies_by_length": False,
            "cache_bytes": 0,
        }

    def fingerprint(self):
        return fingerprint_of(self.description())

    def close(self):
        self.closed = True


class FakeProfiler:
    """Runs numbered tasks through the real runner: sound ones, failing ones, and Ctrl-C."""

    def __init__(self):
        self.device = FakeDevice()
        self.tasks = 5
        self.fails = set()
        self.interrupted_at = None
        self.calls = []
        self.opened = []
        self.commands = []
        self.essential = EssentialWork(30.0, 23, 20.0)

    def open_device(self, name, **threads):
        self.opened.append((name, threads))
        return self.device

    def essential_work(self, device, shapes, options):
        return self.essential

    def task(self, number):
        key = BandwidthKey("gpu", number + 1, False)

        def run():
            if number == self.interrupted_at:
                raise KeyboardInterrupt
            if number in self.fails:
                raise RuntimeError("It broke.")
            return [Record(key, (1.0 + number,), values={"gbps": 1.0})]

        return Task("Bandwidth", (key,), run, 0.1)

    def profile_device(self, device, shapes, options, *, path, progress):
        self.calls.append((shapes, options))
        profile = Profile.load(path) if path.exists() else Profile(device.description())
        profile.save(path)
        tasks = [self.task(number) for number in range(self.tasks)]
        summary = run_tasks(
            profile, tasks, options, path=path, skipped=lambda: {"stage": 7}, progress=progress
        )
        return profile, summary


@pytest.fixture
def fake(monkeypatch, cache):
    profiler = FakeProfiler()
    monkeypatch.setattr(heterollm.planning.profiling, "open_device", profiler.open_device)
    monkeypatch.setattr(heterollm.planning.profiling, "profile_device", profiler.profile_device)
    monkeypatch.setattr(heterollm.planning.profiling, "essential_work", profiler.essential_work)
    monkeypatch.setattr("heterollm.benchmarks.run_profile", profiler.commands.append)
    return profiler


@pytest.fixture
def run(run):
    return functools.partial(run, "profile")


@pytest.fixture
def stored(cache, sample_profile):
    profile = sample_profile()
    path = cache / "profiles" / f"host-{profile.fingerprint}.json"
    profile.save(path)
    return path


def error_of(err):
    """Return the words of the one error in what went to stderr."""
    assert err.count("Error: ") == 1
    assert "Traceback" not in err
    return err.partition("Error: ")[2]


# -- a run -------------------------------------------------------------------------------------------


def test_a_run_says_what_it_did_and_what_comes_next(run, fake, cache):
    fake.fails = {2}
    code, out, err = run("--budget", "30s")
    words = " ".join(out.split())
    assert code == 0
    for part in ("host, real time", "measured 5 in", "failed 1, kept with", "7 points (stage 7)"):
        assert part in words
    assert "known before 0" in words
    assert "left out by budget nothing" in words
    assert "heterollm profile show" in words
    [file] = (cache / "profiles").glob("*.json")
    assert str(file) in out.replace("\n", "").replace(" ", "") or file.name in out
    assert "Device host: no snapdragon here" in err
    assert "TinyLlama-1.1B w4a16, Qwen2.5-0.5B w4a16, Llama-3.2-3B w4a16" in err
    assert fake.device.closed


def test_options_reach_the_profiler(run, fake):
    words = "--device host --gpu-threads 1 --npu-threads 2 --precision fp16 --precision w4a16"
    assert run(*words.split(), "--budget", "2m30s", "--update", "--no-tune", "--characterise")[0] == 0
    assert fake.opened == [("host", {"gpu_threads": 1, "npu_threads": 2, "power": "burst"})]
    shapes, options = fake.calls[0]
    assert (options.budget_s, options.update, options.tune, options.quick) == (150.0, True, False, False)
    assert options.characterise
    assert not options.sparse_attention
    assert run("--technique", "shadowattn", "--quick")[0] == 0
    assert fake.calls[1][1].sparse_attention
    assert [shape.name for shape in shapes[::3]] == ["TinyLlama-1.1B fp16", "TinyLlama-1.1B w4a16"]
    # The device computes in float32, and float weights are what it computes in.
    assert {spec.weight.bits for shape in shapes[:3] for spec in shape.specs} == {32}


def test_a_quick_run_is_short_and_of_one_model(run, fake):
    assert run("--quick")[0] == 0
    shapes, options = fake.calls[0]
    assert [shape.name for shape in shapes] == ["TinyLlama-1.1B w4a16"]
    assert options.budget_s < 60
    assert options.quick
    assert not options.tune


def test_a_device_on_which_a_quick_run_takes_long_is_said_before(run, fake):
    assert "What plans need" not in run("--quick")[2]
    fake.essential = EssentialWork(150.0, 23, 100.0)
    err = " ".join(run("--quick")[2].split())
    assert (
        "What plans need takes about 2 min 30 s on this device; 1 min 40 s of it build 23 NPU graphs." in err
    )
    assert "although the budget is 34 s" in err
    assert "What plans need" not in run("--budget", "none")[2]


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="one core cannot be split")
def test_on_host_all_cores_for_the_gpu_are_measured_too_unless_a_split_is_named(run, fake):
    code, _, err = run("--precision", "w4a8", "--update")
    cores = str(len(allowed_cores()))
    assert code == 0
    assert fake.calls[0][1].budget_s == 180.0
    assert f"After it {cores}+0 cores, GPU first, in a process of its own, about 1 min of the budget" in err
    [words] = fake.commands
    assert " ".join(words) == (
        f"profile --device auto --gpu-threads {cores} --npu-threads 0 --budget 60s --group-size 32 "
        "--scales free --update --precision w4a8"
    )
    for named in (("--gpu-threads", "1"), ("--device", "emulator")):
        fake.commands.clear()
        assert run(*named)[0] == 0
        assert fake.commands == []
        assert fake.calls[-1][1].budget_s == 240.0


def test_no_budget_measures_all(run, fake):
    assert run("--budget", "none")[0] == 0
    assert fake.calls[0][1].budget_s is None


def test_an_emulator_measures_a_small_model_by_default(run, fake):
    fake.device.time_kind = "emulated"
    code, _, err = run("--device", "emulator")
    assert code == 0
    assert "the bundled model w4a16" in err
    assert len(fake.calls[0][0]) == 1
    assert fake.calls[0][0][0].hidden_size < 1024


def test_models_are_read_from_their_configuration_alone(run, fake, tmp_path, model_fields):
    for name, family in (("one", "llama"), ("two", "qwen2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(model_fields(family)))
    assert run(tmp_path / "one", tmp_path / "two", "--quick")[0] == 0
    shapes = fake.calls[0][0]
    assert [shape.name for shape in shapes] == ["one w4a16", "two w4a16"]
    assert [spec.group for spec in shapes[0].specs] == ["qkv", "o", "gate_up", "down", "head"]


def test_a_run_as_json(run, fake):
    code, out, _ = run("--json")
    data = json.loads(out)
    assert code == 0
    assert (data["device"], data["records"], data["run"]["measured"]) == ("host", 5, 5)
    assert data["run"]["finished"]


def test_ctrl_c_says_what_is_kept_and_the_next_run_goes_on(run, fake, cache):
    fake.interrupted_at = 3
    code, out, err = run()
    assert (code, out) == (130, "")
    assert "3 measurements of this run are kept" in err
    assert "The same command continues" in err
    assert "Error" not in err
    assert fake.device.closed
    fake.interrupted_at = None
    code, out, _ = run()
    assert code == 0
    assert "known before 3" in " ".join(out.split())


def test_ctrl_c_before_the_first_measurement(run, fake):
    fake.interrupted_at = 0
    code, _, err = run()
    assert code == 130
    assert "before anything was measured" in err
    # Nor does a later one claim what earlier runs measured.
    fake.interrupted_at = None
    assert run()[0] == 0
    fake.interrupted_at = 0
    assert "before anything was measured" in run()[2]


def test_a_run_in_which_everything_failed_is_no_success(run, fake):
    fake.fails = set(range(fake.tasks))
    code, out, _ = run()
    assert code == 1
    assert "failed 5" in " ".join(out.split())


def test_the_bar_tells_the_time_left(fake, monkeypatch):
    import io

    from rich.console import Console

    from heterollm.report import profile as report_profile

    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr("heterollm.report.console.stderr_console", lambda: console)
    with report_profile.time_bar() as progress:
        progress("Linear layers", 0, 90_000)
    assert "Linear layers" in console.file.getvalue()
    assert "1 min 30 s left" in console.file.getvalue()


def test_time_left_follows_the_pace():
    from heterollm.report.profile import Pace

    pace = Pace()
    assert pace.left_s(0, 60_000, 5.0) == 60.0
    assert pace.left_s(30_000, 60_000, 65.0) == 60.0
    assert pace.left_s(60_000, 60_000, 125.0) == 0.0
    assert Pace().left_s(0, 0, 1.0) == 0.0


def test_time_left_is_not_misled_by_what_was_known():
    from heterollm.report.profile import Pace

    pace = Pace()
    pace.left_s(0, 100_000, 0.0)
    assert pace.left_s(50_000, 100_000, 0.1) == 50.0
    assert pace.left_s(60_000, 100_000, 10.1) == 40.0
    # Other work begins.
    assert pace.left_s(0, 30_000, 11.0) == 30.0


# -- what a run refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", ["", "5", "soon", "-5m", "0s", "1e9s", "5m5m", "nan", "m", "9" * 50 + "h", "5 m", "\u0665m"]
)
def test_a_budget_that_is_no_time(run, fake, budget):
    code, out, err = run(f"--budget={budget}")
    assert (code, out, fake.opened) == (1, "", [])
    assert "--budget is" in error_of(err)
    assert "90s or 5m" in error_of(err)


def test_a_folder_that_is_no_checkpoint(run, fake, tmp_path):
    for model, words in ((tmp_path, "no config.json"), (tmp_path / "none", "There is no folder")):
        code, out, err = run(model)
        assert (code, out, fake.opened) == (1, "", [])
        assert words in error_of(err)


def test_a_damaged_configuration(run, fake, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", ')
    code, out, err = run(tmp_path)
    assert (code, out, fake.opened) == (1, "", [])
    assert "config.json" in error_of(err)


def test_an_unknown_precision_and_group_size(run, fake):
    assert "w2a2" in error_of(run("--precision", "w2a2")[2])
    assert "'33' is not one of '32', '64', '128'" in error_of(run("--group-size", "33")[2])
    assert fake.opened == []


def test_a_cache_that_cannot_be_written(run, fake, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "file"))
    code, out, err = run()
    assert (code, out) == (1, "")
    assert "cannot be used" in error_of(err)
    assert fake.device.closed


def test_help_says_what_it_is_for(run):
    assert "Measure a device once" in " ".join(run("--help")[1].split())


def test_options_before_a_command_are_not_dropped(run, cache):
    code, out, err = run("--json", "list")
    assert (code, out) == (2, "")
    assert "Options stand before 'list'" in err


# -- list and show -----------------------------------------------------------------------------------


def test_list(run, cache, stored):
    (stored.parent / "host-0000000000000000.json").write_text("{")
    code, out, _ = run("list")
    assert code == 0
    assert "damaged" in out
    assert "is not JSON" in " ".join(out.split())
    assert time.strftime("%Y-%m-%d", time.localtime(1e9)) in out
    damaged, sound = json.loads(run("list", "--json")[1])
    assert damaged["problem"]
    assert (sound["device"], sound["failed"], sound["path"]) == ("host", 1, str(stored))


def test_list_of_nothing(run, cache):
    code, out, _ = run("list")
    assert (code, out) == (0, "There is no profile yet. Run `heterollm profile`.\n")
    assert json.loads(run("list", "--json")[1]) == []


def test_show(run, stored, tmp_path):
    code, out, _ = run("show")
    assert code == 0
    for part in ("Memory bandwidth", "Contention", "sleep poll", "rms norm", "stopped", "in use"):
        assert (part in out) is (part != "stopped")
    assert "Not measured: this system shows neither" in out
    assert "The graph is too large." in out
    assert run("show", stored)[1] == out
    assert run("show", stored.stem.rpartition("-")[2][:5])[1] == out
    assert len(run("show", "--all")[1]) > len(out)


def test_show_as_json(run, stored):
    data = json.loads(run("show", "--json")[1])
    assert data["path"] == str(stored)
    assert data["failures"][0]["count"] == 1
    assert {row["score"]["model"] for row in data["accuracy"]} >= {"interpolation", "roofline"}


def test_plots_and_a_page(run, stored, tmp_path):
    code, _, err = run("show", "--plots", tmp_path / "plots", "--html", tmp_path / "page.html")
    assert code == 0
    files = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert files == ["accuracy.png", "bandwidth.png", "gpu.png", "order.png", "stages.png"]
    assert "Wrote 5 plots" in err
    assert (tmp_path / "page.html").read_text("utf-8").count("<svg") > 3


def test_what_cannot_be_drawn_is_said(run, cache, tmp_path):
    profile = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
    profile.add(Record(BandwidthKey("gpu", 1024, False), (1.0,), values={"gbps": 3.0}))
    profile.save(tmp_path / "profile.json")
    code, _, err = run("show", tmp_path / "profile.json", "--plots", tmp_path / "plots")
    assert code == 0
    assert err.count("No data for the picture") == 5
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["bandwidth.png"]


def test_plots_where_nothing_can_be_written(run, stored, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = run("show", "--plots", tmp_path / "file" / "plots")
    assert (code, out) == (1, "")
    assert "Name another place" in error_of(err)


def test_plots_without_matplotlib(run, stored, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("show", "--plots", tmp_path / "there")
    assert (code, out) == (1, "")
    assert "pip install 'heterollm[plots]'" in error_of(err)
    code, _, err = run("show", "--html", tmp_path / "page.html")
    assert code == 0
    assert "pip install" not in err
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<table>" in page
    assert "<svg" in page
    assert run("show")[0] == 0


@pytest.mark.parametrize("command", [("show",), ("compare", "x"), ("export", "x"), ("import",)])
def test_a_missing_file(run, cache, tmp_path, command):
    code, out, err = run(*command, tmp_path / "none.json")
    assert (code, out) == (1, "")
    assert "none.json" in error_of(err) or "'x'" in error_of(err)


def test_show_without_any(run, cache):
    code, out, err = run("show")
    assert (code, out) == (1, "")
    assert "no profile yet" in error_of(err)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 99}', "\0\0", '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("command", ["show", "import"])
def test_a_damaged_file(run, cache, tmp_path, command, content):
    file = tmp_path / "profile.json"
    file.write_text(content)
    code, out, err = run(command, file)
    assert (code, out) == (1, "")
    assert "profile.json" in error_of(err).replace(" ", "")
    assert not cache.exists()


def places(value, path=()):
    """Yield the path of every entry of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, held in items:
        yield (*path, name)
        yield from places(held, (*path, name))


NONSENSE = (0, -1, 1, 2**52, 1e308, 1e-308, "", "word", "\ud800", None, True, [], {}, [0], {"a": "b"})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_profile_edited_into_nonsense_is_shown_or_refused(run, cache, tmp_path, sample_profile, seed):
    rng = random.Random(seed)
    text = sample_profile().to_json()
    file = tmp_path / "profile.json"
    codes = set()
    for _ in range(30):
        data = json.loads(text)
        path = rng.choice(list(places(data)))
        entry = data
        for name in path[:-1]:
            entry = entry[name]
        entry[path[-1]] = rng.choice(NONSENSE)
        if isinstance(data.get("description"), dict):
            data["fingerprint"] = fingerprint_of(data["description"])
        file.write_text(json.dumps(data))
        for command in (("show", file), ("compare", file, file), ("import", file)):
            code, _, err = run(*command)
            codes.add(code)
            assert code in (0, 1)
            assert "Unexpected error" not in err, (path, err)
    assert codes == {0, 1}


# -- compare, export, import -------------------------------------------------------------------------


def test_compare(run, cache, stored, tmp_path, sample_profile):
    other = tmp_path / "other.json"
    sample_profile(1.5, gpu_threads=2).save(other)
    code, out, _ = run("compare", stored, other)
    assert code == 0
    words = " ".join(out.split())
    assert "gpu_threads: A None, B 2" in words
    assert "1.50" in words
    assert "slower" in words
    assert "did not change" in words
    data = json.loads(run("compare", stored, other, "--json")[1])
    assert {pair["verdict"] for pair in data["pairs"]} == {"slower", "failed"}


def test_compare_refuses_another_kind_of_time(run, cache, stored, tmp_path, sample_profile):
    other = tmp_path / "other.json"
    sample_profile(time="emulated").save(other)
    code, out, err = run("compare", stored, other)
    assert (code, out) == (1, "")
    assert "emulated time" in error_of(err)


def test_a_profile_goes_out_and_comes_in_again(run, cache, stored, tmp_path, monkeypatch):
    file = tmp_path / "out" / "profile.json"
    code, out, _ = run("export", file)
    assert code == 0
    assert str(file) in out
    assert Profile.load(file).to_json() == Profile.load(stored).to_json()
    code, _, err = run("export", file)
    assert code == 1
    assert "is there already" in error_of(err)
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "another"))
    code, out, _ = run("import", file)
    assert code == 0
    assert "are new in" in out
    assert (tmp_path / "another" / "profiles" / stored.name).read_bytes() == stored.read_bytes()


def test_export_where_nothing_can_be_written(run, cache, stored, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = run("export", tmp_path / "file" / "profile.json")
    assert (code, out) == (1, "")
    assert "Cannot write" in error_of(err)


def test_import_into_a_cache_that_cannot_be_written(run, stored, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "file"))
    code, out, err = run("import", stored)
    assert (code, out) == (1, "")
    assert "cannot be used" in error_of(err)
