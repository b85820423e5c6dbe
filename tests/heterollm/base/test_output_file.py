"""Names of files that a user asks for: those of simulated times say so, whichever command writes them."""

import dataclasses
import sys
from pathlib import Path

import pytest

from heterollm.base import OptionError, check_folder, check_target, labelled
from heterollm.benchmarks import RowFile, read_rows
from heterollm.cli import generate as cli_generate
from heterollm.trace import load_trace, save_trace

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
MODEL = ("llama-3.2-1b", "--prompt", "32", "--plan", "gpu")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("named", "written"),
    [
        ("a/game.json", "a/game.simulated.json"),
        ("a b/é.tar.gz", "a b/é.tar.simulated.gz"),
        ("rows", "rows.simulated"),
        ("Simulated rows.jsonl", "Simulated rows.jsonl"),
        ("simulated/rows.jsonl", "simulated/rows.simulated.jsonl"),
        ("..", ".."),
        (".", "."),
        ("x\0y", "x\0y.simulated"),
        ("x" * 300, f"{'x' * 300}.simulated"),
    ],
)
def test_names_of_files_of_simulated_times_say_so(named, written):
    assert labelled(Path(named)) == Path(written)
    assert labelled(labelled(Path(named))) == Path(written)
    assert labelled(Path(named), simulated=False) == Path(named)


@pytest.mark.parametrize("check", [check_target, check_folder])
@pytest.mark.parametrize("path", ["", "/dev/null", "/proc/x.html", "x" * 300, "é" * 200, "x\0y", "file/x"])
def test_what_cannot_be_written_is_refused_before_the_work(here, check, path):
    (here / "file").write_text("")
    with pytest.raises(OptionError):
        check(here / path, "page")
    assert names(here) == ["file"]


def test_a_file_can_be_written_where_none_is_and_in_place_of_one(here):
    for path in (here / "new", here / "old"):
        (here / "old").write_text("before")
        check_target(path)
        check_folder(path, "page")
        assert names(here) == ["old"]
        assert (here / "old").read_text() == "before"


def test_simulate_names_its_files(run, here):
    code, _, err = run("simulate", *MODEL, "--decode", 0, "--timeline", "game.json")
    assert code == 0, err
    assert names(here) == ["game.simulated.json", "game.simulated.json.png"]
    assert "game.simulated.json" in err
    assert (here / "game.simulated.json.png").read_bytes().startswith(b"\x89PNG")
    assert run("trace", "game.simulated.json", "--png", "game.png")[0] == 0
    trace = load_trace(here / "game.simulated.json")
    save_trace(dataclasses.replace(trace, time_kind="real"), here / "real.json")
    assert run("trace", "real.json", "--png", "real.png")[0] == 0
    assert {"game.simulated.png", "real.png"} < set(names(here))
    assert not (here / "game.png").exists()
    code, _, err = run("simulate", *MODEL, "--decode", "0", "-o", "rows.jsonl")
    assert code == 0, err
    assert "Wrote 1 simulated rows to rows.simulated.jsonl." in err
    assert len(read_rows(here / "rows.simulated.jsonl")) == 1


def test_without_matplotlib_a_timeline_has_no_picture(run, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("simulate", *MODEL, "--decode", 0, "--timeline", "game.json")
    assert code == 0, err
    assert "simulated" in out
    assert "The timeline gets no picture." in err
    assert names(here) == ["game.simulated.json"]


@pytest.mark.parametrize("name", ["", "taken"])
def test_a_timeline_that_cannot_be_written_is_refused_first(run, here, name):
    (here / "taken.simulated.json.png").mkdir()
    code, out, err = run("simulate", *MODEL, "--timeline", here / name if not name else "taken.json")
    assert (code, out) == (1, "")
    assert "is a folder" in err
    assert names(here) == ["taken.simulated.json.png"]


def test_profiles_are_named(run, here, sample_profile):
    sample_profile(time="simulated").save(here / "profile.json")
    code, _, err = run("profile", "show", "profile.json", "--html", "page.html", "--plots", "plots")
    assert code == 0, err
    assert all(name.endswith(".simulated.png") for name in names(here / "plots"))
    assert "page.simulated.html" in err
    code, out, err = run("profile", "export", "copy.json", "profile.json")
    assert code == 0, err
    assert "copy.simulated.json" in out
    assert {"page.simulated.html", "copy.simulated.json"} <= set(names(here))


def test_saved_rows_of_a_bench_are_named(run, here):
    row = next(row for row in read_rows(RESULTS / "ablation.jsonl") if row.usable)
    for kind, label in (("real", ""), ("simulated", ".simulated")):
        RowFile(here / f"{kind}.jsonl").add(type(row).from_dict({**row.to_dict(), "time_kind": kind}))
        page, picture = here / f"page{label}.html", here / f"picture{label}.svg"
        code, _, err = run(
            "bench", "--from", f"{kind}.jsonl", "--html", "page.html", "--picture", "picture.svg"
        )
        assert code == 0, err
        page.unlink()
        picture.unlink()


@pytest.mark.parametrize(
    ("device", "written"), [("sim:snapdragon-8gen3", "run.simulated.json"), ("host", "run.json")]
)
def test_traces_of_generate_are_named(run, here, monkeypatch, device, written):
    def load(*_, **options):
        raise OptionError("Enough.")

    checked = []
    monkeypatch.setattr("heterollm.base.check_target", checked.append)
    monkeypatch.setattr(cli_generate, "load_model", load)
    assert run("generate", "model", "x", "--device", device, "--trace", "run.json")[0] == 1
    assert checked == [Path(written)]
