import os

import pytest

from heterollm.base import (
    KINDS,
    CacheError,
    OptionError,
    cache_root,
    clear_cache,
    list_cache,
    make_own_folder,
)

DIGEST = "0123456789abcdef" * 2


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HETEROLLM_CACHE", str(folder))
    return folder


def put(path, size=10, *, tagged=True):
    kind = path.relative_to(cache_root()).parts[0] if path.is_relative_to(cache_root()) else ""
    if tagged and kind in KINDS:
        make_own_folder(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_a_cache_that_is_not_there_is_empty(root):
    assert [(kind.name, kind.files, kind.size_bytes) for kind in list_cache()] == [
        (name, 0, 0) for name in KINDS
    ]
    clear_cache()
    assert not root.exists()


def test_every_name_that_is_made_is_counted_and_cleared(root):
    made = [
        put(root / "weights" / f"{DIGEST}.safetensors", 100),
        put(root / "weights" / f"{DIGEST}.safetensors.lock", 0),
        put(root / "weights" / f".{DIGEST}.safetensors.0123456789abcdef.partial", 7),
        put(root / "graphs" / f"{DIGEST}.onnx"),
        put(root / "graphs" / f"{DIGEST}_qnn.bin"),
        put(root / "graphs" / f".{DIGEST}.building" / "graph.onnx"),
        put(root / "opencl" / f"{DIGEST}{DIGEST}.bin"),
        put(root / "opencl" / "pocl-haswell" / "AB" / "program.bc", 5),
        put(root / "plans" / f"{DIGEST}.json"),
    ]
    kinds = {kind.name: kind for kind in list_cache()}
    assert (kinds["weights"].files, kinds["weights"].size_bytes) == (3, 107)
    assert (kinds["graphs"].files, kinds["graphs"].size_bytes) == (3, 30)
    assert (kinds["opencl"].files, kinds["opencl"].size_bytes) == (2, 15)
    assert sum(kind.files for kind in clear_cache()) == len(made)
    assert not any(path.exists() for path in made)
    assert all(kind.files == 0 for kind in list_cache())


def test_profiles_of_simulations_are_counted_and_cleared(root):
    made = [
        put(root / "profiles" / f"host-{DIGEST[:16]}.json"),
        put(root / "profiles" / "simulated" / f"llama-3-8b-simulated-phone-{DIGEST}.json"),
        put(root / "profiles" / "simulated" / f"llama-3-8b-simulated-phone-{DIGEST}.json.lock", 0),
    ]
    own = put(root / "profiles" / "simulated" / "mine.json")
    [kind] = clear_cache(["profiles"])
    assert (kind.files, kind.size_bytes) == (3, 20)
    assert not any(path.exists() for path in made)
    assert own.exists()


def test_only_the_named_kinds_are_cleared(root):
    weights, graph = put(root / "weights" / f"{DIGEST}.safetensors"), put(root / "graphs" / f"{DIGEST}.onnx")
    assert [kind.name for kind in clear_cache(["graphs"])] == ["graphs"]
    assert weights.exists()
    assert not graph.exists()


def test_what_heterollm_did_not_make_stays(root):
    foreign = [
        put(root / "thesis.txt"),
        put(root / "weights" / "my-model.safetensors"),
        put(root / "weights" / f"{DIGEST}0.safetensors"),
        put(root / "models" / f"{DIGEST}.safetensors"),
        put(root / "opencl" / "notes" / "a.txt"),
    ]
    clear_cache()
    assert all(path.exists() for path in foreign)
    assert all(kind.files == 0 for kind in list_cache())


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_symbolic_links_are_not_followed(root, tmp_path):
    outside = put(tmp_path / "outside" / f"{DIGEST}.safetensors")
    make_own_folder("opencl")
    (root / "weights").symlink_to(outside.parent)
    (root / "opencl" / "pocl-x").symlink_to(outside.parent)
    clear_cache()
    assert outside.exists()
    assert not (root / "opencl" / "pocl-x").is_symlink()


def test_an_unknown_kind_deletes_nothing(root):
    weights = put(root / "weights" / f"{DIGEST}.safetensors")
    for call in (clear_cache, list_cache):
        with pytest.raises(OptionError, match="everything"):
            call(["weights", "everything"])
    assert weights.exists()


def test_a_file_that_cannot_be_deleted_is_named(root, monkeypatch):
    weights = put(root / "weights" / f"{DIGEST}.safetensors")

    def refuse(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(weights), "unlink", refuse)
    with pytest.raises(CacheError, match="Permission denied"):
        clear_cache()


def test_profiles_are_cleared_only_by_name(root):
    profile = put(root / "profiles" / "host-0123456789abcdef.json")
    tuned = put(root / "tuning" / "0123456789abcdef.json")
    theirs = put(root / "profiles" / "notes.json")
    clear_cache()
    assert profile.exists()
    assert not tuned.exists()
    clear_cache(["profiles"])
    assert not profile.exists()
    assert theirs.exists()
