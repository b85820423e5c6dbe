"""The file of defaults."""

import json
import os
from pathlib import Path

import platformdirs
import pytest

from heterollm.cli.config_file import config_path

QUICK = ("cache", "path")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return a function that writes the file of defaults."""
    path = tmp_path / "my defaults.toml"
    monkeypatch.setenv("HETEROLLM_CONFIG", str(path))

    def write(text):
        path.write_text(text, "utf-8")
        return path

    return write


def test_the_command_line_wins_over_its_table_and_that_over_all(run, config, bundled_model):
    def refused(*words):
        code, out, err = run("generate", bundled_model, "x", *words)
        assert (code, out) == (1, "")
        return err.partition(" is ")[2].partition(",")[0]

    config("[defaults]\ntemperature = -1\n")
    assert refused() == "-1.0"
    config("[defaults]\ntemperature = -1\n[generate]\ntemperature = -2\n[chat]\ntemperature = -3\n")
    assert refused() == "-2.0"
    assert refused("--temperature", "-4") == "-4.0"
    assert refused("--no-config", "--temperature", "1", "--top-p", "7") == "7.0"
    config("[bench]\nprompt = [32, 64]\ndecode = 16\n[cache.list]\njson = true\n")
    assert json.loads(run("cache", "list")[1])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[generate\n", ["line 1"]),
        ('device = "host"', ["device is in no table", "[defaults]"]),
        ("[generat]", ["[generat]", "Close to it: generate"]),
        ("[profile.shw]", ["[profile] shw", "Close to it: show"]),
        ("[generate]\ntemprature = 1", ["[generate] temprature", "Close to it: temperature"]),
        ("[defaults]\nnonsense = 1", ["[defaults] nonsense"]),
        ("[defaults]\nseed = 1.5", ["[defaults] seed is 1.5"]),
        ('[generate]\nmodel = "x"', ["[generate] model"]),
        ('[generate]\ntemperature = "hot"', ["[generate] temperature is 'hot'", "a number"]),
        ("[chat]\nmax-new-tokens = true", ["is True", "a whole number"]),
        ("[defaults]\nallow-slow = 1", ["[defaults] allow-slow is 1", "true or false"]),
        ('[generate]\nstop = "x"', ["an array"]),
        ('[generate]\nprecision = "int3"', ["'int3'", "'w4a16'"]),
        ('[bench]\nprompt = [1, "x"]', ["[bench] prompt", "whole number"]),
    ],
)
def test_a_wrong_line_is_one_error_with_its_key(run, config, text, parts):
    path = config(text)
    for words in (QUICK, ("config", "show")):
        code, out, err = run(*words)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert all(part in err for part in parts), err
    assert run("config", "path") == (0, f"{path}\n", "")
    assert run(*QUICK, "--no-config")[0] == run("--help")[0] == 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("#" * (1 << 19), "more than"),
        ("[generate]\nstop = " + "[" * 100_000, "nested"),
        ("[" + ".".join(["a"] * 50_000) + "]", "dots"),
        ("[" + ".".join(["a"] * 900) + "]", "no such command"),
        ('[defaults]\n"\\u001b[31mred\\u0007" = 1', "\\x1b[31mred\\x07"),
        ('["\\u001b[2J"]', "\\x1b[2J"),
        ('[generate]\nsystem = {a = "b"}', "must be text"),
        ("[generate.plan]\nx = 1", "[generate] plan"),
        ("generate = [{a = 1}]", "in no table"),
        ("[defaults.generate]\nx = 1", "[defaults] generate"),
        ("[generate]\nseed = 1979-05-27", "a whole number"),
        ("[generate]\ntop-p = nan", "top-p"),
        ("[generate]\nseed = " + "9" * 5000, "cannot be read"),
        ("\x00", "cannot be read"),
        ("[generate]\n" + "\n".join(f"k{n} = 1" for n in range(9000)), "[generate] k0"),
        ("[generate]\n" + "k" * 100_000 + " = 1", "no such option"),
    ],
)
def test_a_hostile_file_is_one_short_line_and_the_help_is_shown(run, config, text, part):
    config(text)
    code, out, err = run("cache", "path")
    if part == "top-p":  # a number that the command itself refuses
        assert code == 0
        return
    assert (code, out) == (1, "")
    assert part in err
    assert "bug" not in err
    assert len(err) < 1000
    assert not set(err) & {"\x1b", "\x07"}
    code, out, err = run("generate", "--help")
    assert code == 0
    assert "--max-new-tokens" in out
    assert part in err


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "loop", "bytes"])
def test_a_file_that_is_none_is_refused_at_once(run, tmp_path, monkeypatch, kind):
    path = tmp_path / "heterollm.toml"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(b"\xff\xfe")
    monkeypatch.setenv("HETEROLLM_CONFIG", str(path))
    code, out, err = run("cache", "path")
    assert (code, out) == (1, "")
    assert "cannot be read" in err
    assert run("--help")[0] == 0


def test_the_example_of_the_documents_is_legal(run, config):
    page = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
    config(page.read_text("utf-8").partition("```toml\n")[2].partition("```")[0])
    code, out, err = run("config", "show", "--json")
    assert code == 0, err
    assert set(json.loads(out)["tables"]) == {"defaults", "chat", "generate", "profile"}


def test_the_commands_on_the_file(run, config, monkeypatch):
    path = config('[defaults]\ndevice = "host"\n[profile.show]\nall = true\n')
    code, out, _ = run("config", "show")
    assert code == 0
    assert [line.split() for line in out.splitlines() if "defaults " in line or "profile.show" in line] == [
        ["defaults", "device", '"host"'],
        ["profile.show", "all", "true"],
    ]
    tables = {"defaults": {"device": "host"}, "profile": {"show": {"all": True}}}
    assert json.loads(run("config", "show", "--json")[1]) == {"path": str(path), "tables": tables}
    path.unlink()
    code, _, err = run("config", "show")
    assert code == 1
    assert "HETEROLLM_CONFIG" in err
    monkeypatch.delenv("HETEROLLM_CONFIG")
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *names, **more: path.parent / "none")
    assert config_path() == path.parent / "none" / "heterollm.toml"
    assert "sets nothing" in run("config", "show")[1]
