"""Names and rights of cache files."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import CacheError, atomic_path, cache_name, cache_root
from heterollm.base.cache import LONGEST_WORDS
from heterollm.base.own_files import LONGEST_PREFIX
from heterollm.profiler.records import profile_path

RESERVED = {"con", "prn", "aux", "nul", *(f"{name}{digit}" for name in ("com", "lpt") for digit in range(10))}
KEYS = st.text("0123456789abcdef", min_size=16, max_size=64)
WORDS = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        ["CON", "nul.txt", "com1", "a.", "a ", " ", "..", "../..", "C:\\x", "sim:phone", "é" * 99]
    ),
)


def legal_on_windows(name):
    """The rules of Microsoft's page on naming files."""
    return (
        bool(name)
        and len(name) <= 255
        and not set(name) & set('<>:"/\\|?*')
        and min(map(ord, name)) >= 32
        and name[-1] not in ". "
        and name.split(".")[0].rstrip(" ").lower() not in RESERVED
    )


@given(WORDS, KEYS)
def test_names_are_legal_everywhere_and_told_apart_by_their_keys(words, key):
    name = cache_name(words, key)
    assert legal_on_windows(f"{name}.json")
    assert legal_on_windows(f".{name}.json.{'0' * 16}.partial")
    assert name == name.lower()
    assert name.isascii()
    assert name.endswith(key)
    assert len(name) <= LONGEST_WORDS + 1 + len(key)


@given(WORDS, WORDS, KEYS, KEYS)
def test_two_keys_are_two_files_even_where_capitals_do_not_count(first, second, one, other):
    if one != other and len(one) == len(other):
        assert cache_name(first, one).lower() != cache_name(second, other).lower()


def test_the_rules_of_the_test_would_refuse_what_windows_refuses():
    for name in ("CON", "con.json", "a:b", "a.", "a ", "", "a/b", "x" * 256, "a\x07", "Lpt1.txt"):
        assert not legal_on_windows(name), name
    assert legal_on_windows("console.json")


def test_a_name_can_be_read():
    assert cache_name("sim:snapdragon-8gen3", "0123456789abcdef") == "sim-snapdragon-8gen3-0123456789abcdef"
    assert cache_name("...", "0123456789abcdef") == "0123456789abcdef"


@pytest.mark.parametrize("key", ["", "a", "../..", "0123456789ABCDEF", "0" * 65])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ValueError, match="no key"):
        cache_name("host", key)


def test_a_device_of_any_name_has_its_profile_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    for device in ("sim:CON", "sim:../../x", "sim:/a/b.yaml", "host", "sim:" + "x" * 400):
        path = profile_path(device, "0123456789abcdef")
        assert path.parent == tmp_path / "profiles"
        assert legal_on_windows(path.name)


@pytest.mark.skipif(os.name == "nt", reason="rights are Unix's")
def test_the_profile_of_a_simulated_device_says_so_in_its_name():
    key = "0123456789abcdef"
    assert profile_path("sim:snapdragon-8gen3", key).name == f"simulated-snapdragon-8gen3-{key}.json"
    assert profile_path("host", key).name == f"host-{key}.json"


def test_files_have_the_rights_that_the_user_s_other_files_have(tmp_path):
    ordinary, target = tmp_path / "ordinary", tmp_path / "target"
    ordinary.touch()
    with atomic_path(target) as temporary:
        temporary.write_text("x")
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_only_plain_files_are_replaced(tmp_path):
    """Whoever may do anything would lose the system's /dev/null, say."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    for path in (Path("/dev/null"), tmp_path / "folder", Path()):
        before = path.stat()
        with pytest.raises(CacheError, match="plain file"), atomic_path(path) as temporary:
            temporary.write_text("x")
        assert path.stat().st_mode == before.st_mode
    with atomic_path(tmp_path / "link") as temporary:
        temporary.write_text("x")
    assert (tmp_path / "link").read_text() == "x"


def test_a_long_name_has_room_for_the_temporary_one(tmp_path):
    target = tmp_path / ("x" * 250)
    with atomic_path(target) as temporary:
        assert len(temporary.name) < LONGEST_PREFIX + 40
        temporary.write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.skipif(os.name == "nt", reason="Windows asks its registry")
def test_a_user_without_a_home_folder_names_a_cache(monkeypatch, tmp_path):
    """As in a container that runs with a user id of its own."""
    import pwd

    def unknown(*_):
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "HETEROLLM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheError, match=r"there is no home folder ~\. Point HETEROLLM_CACHE"):
        cache_root()
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "later" / "cache"))
    assert cache_root() == tmp_path / "later" / "cache"
    monkeypatch.delenv("HETEROLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "heterollm"
