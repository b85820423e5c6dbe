"""Files that heterollm did not make stay as they are, whatever a folder, a link or a name says."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import heterollm
from heterollm.base import (
    KINDS,
    CacheError,
    atomic_path,
    clear_cache,
    delete,
    is_plain_name,
    make_own_folder,
    own_entries,
    own_folder,
    scratch_folder,
)
from heterollm.base.own_files import LIST, is_own_file

DIGEST = "0123456789abcdef" * 2
PACKAGE = Path(heterollm.__file__).parent
POSIX = pytest.mark.skipif(os.name != "posix", reason="owners, rights and links as POSIX has them")
ROOT = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files away")

DELETERS = {"unlink", "rmtree", "rmdir", "remove", "removedirs", "mkdtemp", "mkstemp", "TemporaryDirectory"}
OTHER = {"NamedTemporaryFile"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HETEROLLM_CACHE", str(folder))
    return folder


def put(path, content="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_every_deletion_of_the_package_is_in_one_module():
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "own_files.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Attribute) or node.attr not in DELETERS | OTHER:
                continue
            lists = node.attr == "remove" and not (isinstance(node.value, ast.Name) and node.value.id == "os")
            if not lists:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.attr}")
    assert not found


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_the_users_is_neither_written_nor_cleared(root, kind):
    own = put(root / kind / "holiday.jpg")
    alike = put(root / kind / f"{DIGEST}.json")
    with pytest.raises(CacheError, match=r"'holiday.jpg', which heterollm did not make"):
        make_own_folder(kind)
    assert own_entries(kind) == []
    clear_cache([kind])
    assert own.read_text() == alike.read_text() == "mine"
    with pytest.raises(CacheError, match="did not make it"):
        delete(alike)


def test_a_cache_of_an_earlier_version_is_taken_over(root):
    old = put(root / "plans" / f"{DIGEST}.json")
    assert own_entries("plans") == []
    with atomic_path(root / "plans" / f"{DIGEST[::-1]}.json") as temporary:
        temporary.write_text("new")
    assert len(own_entries("plans")) == 2
    delete(old)
    assert not old.exists()


@pytest.mark.parametrize(
    "name",
    [
        "my-model.safetensors",
        f"{DIGEST}0.safetensors",
        f"{DIGEST}.jpg",
        f"{DIGEST}.json.old",
        f"{DIGEST.upper()}.json",
        f"../{DIGEST}.json",
        f"a/../../plans/{DIGEST}.json",
        f".{DIGEST}.json",
        f"{DIGEST}.json\n",
    ],
)
def test_other_names_are_not_ours(root, name):
    folder = make_own_folder("plans")
    assert is_own_file(folder / f"{DIGEST}.json")
    assert not is_own_file(folder / name)


@POSIX
def test_links_are_deleted_and_never_followed(root, tmp_path):
    outside = put(tmp_path / "outside" / "thesis.txt")
    hard = put(tmp_path / "outside" / "hard.txt")
    weights = make_own_folder("weights")
    (weights / f"{DIGEST}.safetensors").symlink_to(outside)
    (weights / f"{DIGEST[::-1]}.safetensors").hardlink_to(hard)
    made = make_own_folder("gguf") / DIGEST
    made.mkdir()
    (made / "in").symlink_to(outside.parent)
    (make_own_folder("graphs") / f".{DIGEST}.building").symlink_to(outside.parent)
    clear_cache()
    assert not list(weights.iterdir())
    assert not made.exists()
    assert outside.read_text() == hard.read_text() == "mine"


@POSIX
def test_a_subfolder_that_is_a_link_is_refused(root, tmp_path):
    outside = put(tmp_path / "outside" / f"{DIGEST}.json")
    root.mkdir()
    (root / "plans").symlink_to(outside.parent)
    with pytest.raises(CacheError, match="is a link"):
        own_folder("plans")
    with pytest.raises(CacheError, match="is a link"), atomic_path(root / "plans" / f"{DIGEST}.json"):
        pass
    assert outside.read_text() == "mine"
    assert not is_own_file(root / "plans" / f"{DIGEST}.json")


@POSIX
def test_the_cache_itself_may_be_a_link(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "link"))
    own = put(make_own_folder("plans") / f"{DIGEST}.json")
    assert is_own_file(own)
    clear_cache()
    assert not own.exists()


@POSIX
@pytest.mark.parametrize(
    ("rights", "named"), [(0o777, "every user"), (0o775, "group 54321"), (0o1777, "every user")]
)
def test_a_folder_that_others_can_write_is_refused(root, rights, named):
    folder = make_own_folder("opencl")
    if os.geteuid() == 0:
        os.chown(folder, 0, 54321)
    elif "group" in named:
        pytest.skip("only root chooses a group")
    folder.chmod(rights)
    with pytest.raises(CacheError, match=f"not safe: .*{named}"):
        own_folder("opencl")
    folder.chmod(0o755)
    assert own_folder("opencl") == folder


@POSIX
def test_a_cache_below_a_folder_that_others_can_write_is_refused(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "open" / "cache"))
    with pytest.raises(CacheError, match="every user"):
        own_folder("plans")
    (tmp_path / "open").chmod(0o1777)  # as /tmp: each user has files of their own
    assert make_own_folder("plans").stat().st_mode & 0o777 == 0o700


@ROOT
def test_a_folder_of_another_user_is_refused(root):
    folder = make_own_folder("graphs")
    os.chown(folder, 12345, 12345)
    with pytest.raises(CacheError, match="belongs to another user"):
        own_folder("graphs")
    os.chown(folder, 0, 0)
    os.chown(root / LIST, 12345, 12345)
    assert not is_own_file(folder / f"{DIGEST}.onnx")


@pytest.mark.parametrize("place", ["home", "/"])
def test_a_cache_that_is_the_users_home_or_the_whole_disk_deletes_nothing(place, tmp_path, monkeypatch):
    home = tmp_path / "home"
    mine = [put(home / kind / "mine.txt") for kind in KINDS]
    mine += [put(home / "digests.json"), put(home / f"{DIGEST}.json")]
    monkeypatch.setenv("HETEROLLM_CACHE", str(home) if place == "home" else place)
    clear_cache(list(KINDS))
    for path in (Path("/etc/passwd"), Path("/usr/bin"), *mine):
        assert not is_own_file(path)
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize(
    "name", ["config.json", "model-00001-of-00002.safetensors", "a" * 40, ".gitattributes"]
)
def test_plain_names_name_one_file(name):
    assert is_plain_name(name)


FOREIGN = [
    "",
    ".",
    "..",
    "a/b",
    "/a",
    "a\\b",
    "C:a",
    "a\0",
    "a\nb",
    "nul",
    "COM1.json",
    "a.",
    "a ",
    " a",
    "a" * 256,
]


@pytest.mark.parametrize("name", [*FOREIGN, "\x1b[2J", "a?b", "\u202ea"])
def test_other_names_could_name_anything(name):
    assert not is_plain_name(name)


def test_scratch_files_vanish_whatever_happens(tmp_path):
    made = []

    def fail():
        with scratch_folder("heterollm-", tmp_path) as folder:
            made.append(put(folder / "deep" / "file"))
            assert is_own_file(folder / "deep")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())
    assert not is_own_file(made[0])


@POSIX
def test_a_link_in_the_place_of_an_output_is_replaced_not_followed(tmp_path):
    outside = put(tmp_path / "outside")
    (tmp_path / "out.json").symlink_to(outside)
    with atomic_path(tmp_path / "out.json") as temporary:
        temporary.write_text("new")
    assert outside.read_text() == "mine"
    assert (tmp_path / "out.json").read_text() == "new"


WATCHED = """
import json, os, sys
events = []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
def watch(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str) and flags is not None and flags & WRITES:
            events.append((event, os.path.abspath(path)))
    elif event in {"os.remove", "os.rmdir", "os.rename", "os.truncate", "os.chmod", "os.link", "os.symlink"}:
        for path in arguments[: 2 if event in {"os.rename", "os.link"} else 1]:
            if isinstance(path, str | os.PathLike) and (len(arguments) < 2 or arguments[-1] in (-1, None)):
                events.append((event, os.path.abspath(os.fspath(path))))
    elif event == "shutil.rmtree":
        events.append((event, os.path.abspath(os.fspath(arguments[0]))))
sys.addaudithook(watch)
from heterollm.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    codes.append((words, main(words)))
print(json.dumps([codes, events]), file=open(sys.argv[2], "w"))
"""


def test_no_command_touches_a_file_elsewhere(tmp_path):
    """Run commands beside a user's files with the cache's names; an audit hook sees each change."""
    home, out, scratch = (tmp_path / name for name in ("home", "out", "tmp"))
    for folder in (home, out, scratch):
        folder.mkdir()
    theirs = [put(home / name / f"{DIGEST}.json") for name in ("plans", "weights", "graphs")]
    cache = home / "cache"
    theirs += [put(cache / "notes" / f"{DIGEST}.json"), put(cache / "thesis.txt"), put(out / "theirs.txt")]
    model = str(out / "model")
    commands = [
        ["generate", "tiny-python-lm", "def f", "--max-new-tokens", "2", "--device", "host"],
        ["convert", "tiny-python-lm", "-o", model],
        ["eval", model, "--text", str(Path(__file__)), "--windows", "1", "--window", "32", "--alone"],
        ["simulate", "llama-3-8b", "--prompt", "64", "--decode", "2"],
        ["list"],
        ["rm", "tiny-python-lm", "--yes"],
        ["cache", "list"],
        ["cache", "clear", "--yes"],
        ["cache", "clear", "profiles", "--yes"],
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HETEROLLM_", "POCL_CACHE"))
    }
    environment |= {"HOME": str(home), "HETEROLLM_CACHE": str(cache), "TMPDIR": str(scratch)}
    environment |= {
        "XDG_CACHE_HOME": str(home / ".cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-P", "-c", WATCHED, json.dumps(commands), str(result)],
        env=environment,
        cwd=out,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    codes, events = json.loads(result.read_text())
    assert [words[0] for words, code in codes if code != 0] == [], done.stderr
    allowed = [
        *(cache / kind for kind in (*KINDS, LIST)),
        scratch,
        Path(model),
        out / ".model-",
        Path(os.devnull),
    ]
    strange = {
        (event, path)
        for event, path in events
        if not any(path.startswith(str(place)) for place in allowed)
        and not path.startswith(("/dev/", "/proc/"))
        and path != str(result)
    }
    assert not strange
    assert any(event in {"os.remove", "shutil.rmtree"} for event, _ in events)
    assert all(path.read_text() == "mine" for path in theirs)
    assert {path.name for kind in KINDS for path in (cache / kind).glob("*")} <= {
        "simulated",
        "digests.json",
        "tokenizers.json",
    }
    assert not list(scratch.iterdir())
