"""A disk that is full within a command: one error, no half file, and a cache that works afterwards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

resource = pytest.importorskip("resource", reason="this system has no limit of file sizes")

# A limit of file sizes fails each write beyond it, as a full disk does, and leaves the short files.
SCRIPT = """
import json, os, resource, signal, sys
from heterollm.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(json.loads(sys.argv[1])))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    return tmp_path


def run(words, limit=0):
    command = [sys.executable, "-P", "-c", SCRIPT, json.dumps(list(map(str, words))), str(limit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def files(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (("convert", "tiny-python-lm", "-o", "MODEL"), 5_000),
        (("convert", "tiny-python-lm", "-o", "MODEL"), 1_000_000),
        (("simulate", "qwen2-0.5b", "--prompt", "64", "--decode", "1", "--timeline", "time.json"), 300),
    ],
)
def test_a_full_disk_is_one_error(place, words, limit):
    words = [str(place / "out" / word) if word in {"MODEL", "time.json"} else word for word in words]
    full = run(words, limit)
    assert full.returncode == 1, full.stdout + full.stderr
    assert full.stderr.count("Error: ") == 1, full.stderr
    assert "Traceback" not in full.stderr
    assert "bug in heterollm" not in full.stderr
    assert not list((place / "out").iterdir())
    assert not [name for name in files(place) if name.endswith(".partial")]
    again = run(words)
    assert again.returncode == 0, again.stderr
    assert list((place / "out").iterdir())
