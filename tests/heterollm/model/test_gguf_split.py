"""GGUF files in several parts: opened by the first, mapped, and refused by name if they do not fit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import CheckpointError
from heterollm.llm import LLM
from heterollm.model import Checkpoint, find_model
from heterollm.model.hub import needed_files
from heterollm.model.stored.gguf_file import GgufFile

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
from gguf_writer import PLAIN, add_value, write_gguf  # noqa: E402

F32 = gguf.GGMLQuantizationType.F32
PARTS = 3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


def split(source: Path, folder: Path, changes: dict[int, dict[str, Any]] | None = None) -> list[Path]:
    """Write a file in parts, as llama-gguf-split does; ``changes`` are metadata of parts, by number."""
    file, paths = GgufFile.open(source), []
    folder.mkdir(exist_ok=True)
    stated = str(file.metadata["general.architecture"])
    for number, names in enumerate(np.array_split(sorted(file.entries), PARTS)):
        path = folder / f"model-{number + 1:05}-of-{PARTS:05}.gguf"
        writer = gguf.GGUFWriter(path, stated)
        if number:
            writer.kv_data[0].clear()
        own = {"split.no": number, "split.count": PARTS, "split.tensors.count": len(file.entries)}
        own |= {name: value for name, value in file.metadata.items() if number == 0}
        for name, value in {**own, **(changes or {}).get(number, {})}.items():
            if name != "general.architecture" or number:
                add_value(writer, name, value)
        for name in names.tolist():
            values = file.bits(name).view("<f4").reshape(file.entries[name].shape)
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def source(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(checkpoint("qwen2", **PLAIN), tmp_path_factory.mktemp("whole") / "whole.gguf", F32, F32)


def test_parts_are_one_model(
    source: Path, host_llm: Callable[..., LLM], token_ids: Callable[[int], list[int]], tmp_path: Path
) -> None:
    first, *_ = split(source, tmp_path / "parts")
    assert find_model(first).name == "model"
    whole, parts = Checkpoint(source), Checkpoint(first)
    assert sorted(parts.names) == sorted(whole.names)
    for name in whole.names:
        assert np.array_equal(parts.read(name), whole.read(name))
    file = GgufFile.open(first)
    assert len({entry.part for entry in file.entries.values()}) == PARTS
    assert all(isinstance(part.data, np.memmap) for part in file.parts)
    ids = token_ids(20)
    found, wanted = (
        np.array(host_llm(path, plan="gpu", precision="w4a16", context=64).session().prefill(ids))
        for path in (first, source)
    )
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("number", range(PARTS))
def test_every_part_belongs_to_the_key_of_the_weights(number: int, source: Path, tmp_path: Path) -> None:
    paths = split(source, tmp_path / "parts")
    before = Checkpoint(paths[0]).content_hash()
    data = bytearray(paths[number].read_bytes())
    data[-1] ^= 1
    paths[number].write_bytes(data)
    assert Checkpoint(paths[0]).content_hash() != before


def test_links_of_the_hub_have_the_names_of_parts(source: Path, tmp_path: Path) -> None:
    links = tmp_path / "snapshot"
    links.mkdir()
    for number, path in enumerate(split(source, tmp_path / "parts")):
        (links / path.name).symlink_to(path.rename(tmp_path / f"blob{number}"))
    first = links / f"model-00001-of-{PARTS:05}.gguf"
    assert len(Checkpoint(first).names) == len(Checkpoint(source).names)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({1: {"split.no": 2}}, r"00002-of-00003\.gguf is not part 2 of .*split\.no is 2, not 1"),
        ({2: {"split.count": 4}}, r"is not part 3 of .*split\.count is 4, not 3"),
        ({2: {"split.tensors.count": 7}}, r"is not part 3 of .*split\.tensors\.count is 7"),
        ({1: {"general.architecture": "llama"}}, r"general\.architecture is 'llama', not 'qwen2'"),
        ({number: {"split.tensors.count": 99} for number in range(PARTS)}, "and not the 99"),
        ({0: {"split.no": 1}}, r"is part 2 of 3 \(split\.no\), and its name says another"),
        ({0: {"split.count": 2}}, "is one of 2 parts"),
        ({0: {"split.count": 2**31}}, "is one of 2147483648 parts"),
        ({0: {"split.no": 9}}, "is one of 3 parts"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    changes: dict[int, dict[str, Any]], said: str, source: Path, tmp_path: Path
) -> None:
    paths = split(source, tmp_path / "parts", changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        Checkpoint(paths[0])
    assert caught.value.fix


def test_missing_and_repeated_parts_are_named(source: Path, tmp_path: Path) -> None:
    first, second, third = split(source, tmp_path / "parts")
    with pytest.raises(CheckpointError, match="is part 2 of 3") as caught:
        Checkpoint(second)
    assert str(first) in caught.value.fix
    kept = third.read_bytes()
    shutil.copy(second, third)
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf is not part 3 .*split\.no is 1, not 2"):
        Checkpoint(first)
    third.unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.gguf is missing"):
        Checkpoint(first)
    third.write_bytes(kept[:-1])
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf is no sound GGUF file"):
        Checkpoint(first)
    whole = first.rename(first.with_name("whole.gguf"))
    with pytest.raises(CheckpointError, match="its name is none of"):
        Checkpoint(whole)


def test_a_tensor_in_two_parts_is_named(source: Path, tmp_path: Path) -> None:
    paths = split(source, tmp_path / "parts")
    others = split(source, tmp_path / "others", {1: {"split.no": 0}, 0: {"split.no": 1}})
    shutil.copy(others[0], paths[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf has tensor .*, and so has model-00001"):
        Checkpoint(paths[0])


def test_the_hub_gives_all_parts() -> None:
    parts = [f"Q4_K_M/big-Q4_K_M-{number:05}-of-00002.gguf" for number in (1, 2)]
    files = ["README.md", "small-Q8_0.gguf", *reversed(parts)]
    for pattern in ("*Q4_K_M*", parts[0], parts[1]):
        assert needed_files("owner/name", files, pattern) == parts
    assert needed_files("owner/name", files, "*Q8_0*") == ["small-Q8_0.gguf"]
