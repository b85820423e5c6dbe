"""Whatever is wrong outside: one clear error or a clean rebuild, and a cache in which the next load works."""

import builtins
import errno
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heterollm.base import (
    CacheError,
    CheckpointError,
    DeviceError,
    GraphError,
    HeteroLLMError,
    UnsupportedModelError,
)
from heterollm.llm import LLM

WEIGHTS = "model.safetensors"
IDS = [7, 80, 3, 250, 9]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 256}
DOWN = "model.layers.1.mlp.down_proj.weight"


def answer(folder: Path | str, **options: Any) -> np.ndarray:
    with LLM.load(folder, **{"device": "host", "context": 64, **options}) as llm:
        return llm.session().prefill(IDS)


@pytest.fixture(scope="module")
def good(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", **SHAPE)


@pytest.fixture(scope="module")
def expected(good: Path) -> np.ndarray:
    return answer(good)


@pytest.fixture(autouse=True)
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: Path, expected: np.ndarray
) -> Iterator[Path]:
    """An empty cache for each test, in which the sound model loads afterwards and gives its answer."""
    folder = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(folder))
        yield folder
        assert np.array_equal(answer(good), expected)
        assert not list(folder.rglob("*.partial"))


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(values | changes), "utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = {name: value.copy() for name, value in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors[name].__setitem__(place, value)


# -- the checkpoint -----------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no folder .*nowhere") as caught:
        answer(tmp_path / "nowhere")
    assert caught.value.fix


def test_a_file_and_an_empty_folder(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file"):
        answer(copy / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has neither"):
        answer(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(DOWN), f"lacks tensors .*{DOWN}"),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN].astype(np.int32)}), rf"{DOWN} \(I32\)"),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN].astype(np.float64)}), rf"{DOWN} \(F64\)"),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN].T.copy()}), rf"{DOWN} \[96, 64\]"),
        (put(DOWN, (3, 5), np.nan), f"{DOWN} holds NaN"),
        (put(DOWN, (3, 5), np.inf), f"{DOWN} holds NaN or infinite"),
        (put("model.norm.weight", (3,), np.nan), r"model\.norm\.weight holds NaN"),
        (put("lm_head.weight", (255, 63), np.nan), r"lm_head\.weight holds NaN"),
        (lambda tensors: tensors.update(more=np.ones(3, np.float32)), "no place for: more"),
    ],
    ids=["missing", "integers", "doubles", "shape", "nan", "inf", "nan norm", "nan head", "extra"],
)
def test_a_tensor_that_is_wrong(
    copy: Path, change: Callable[[dict[str, np.ndarray]], Any], message: str
) -> None:
    edit_tensors(copy, change)
    for precision in ("w4a16", "fp16"):
        with pytest.raises(CheckpointError, match=message):
            answer(copy, precision=precision)


def test_weights_beyond_the_range_of_their_scales(copy: Path) -> None:
    edit_tensors(copy, put(DOWN, (3, 5), 3e38))
    with pytest.raises(CheckpointError, match=DOWN):
        answer(copy)


@pytest.mark.parametrize("kept", [0, 7, 100, 0.5, -1])
def test_a_truncated_file(copy: Path, kept: float) -> None:
    content = (copy / WEIGHTS).read_bytes()
    size = int(len(content) * kept) if 0 < kept < 1 else int(kept) % len(content)
    (copy / WEIGHTS).write_bytes(content[:size])
    with pytest.raises(CheckpointError, match="model.safetensors" if size else "safetensors"):
        answer(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "lacks tensors"),
        ({"num_hidden_layers": 1}, "no place for"),
        ({"intermediate_size": 128}, "another shape"),
        ({"vocab_size": 300}, "another shape"),
        ({"num_attention_heads": 4}, "another shape"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3 key heads"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 0.5}}, "rope_theta"),
    ],
    ids=str,
)
def test_a_configuration_that_is_wrong(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(copy / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        answer(copy)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_beyond_the_vocabulary(copy: Path, name: str) -> None:
    if name == "config.json":  # which counts where the other file has none
        (copy / "generation_config.json").unlink()
    edit_json(copy / name, eos_token_id=256)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        answer(copy)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            "quantization_config: quant_method = 'hqq'",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map"),
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "mrope"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(copy: Path, changes: dict[str, Any], named: str) -> None:
    (copy / "modeling.py").write_text("raise SystemExit('remote code ran')", "utf-8")
    edit_json(copy / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        answer(copy)
    for word in ("GPTQ",) if "hqq" in named else ("llama", "qwen2"):
        assert word in caught.value.fix


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_damaged_text_file(copy: Path, name: str) -> None:
    for content in (b"", b"{", b"\xff\xfe\x00", b"[]"):
        (copy / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            answer(copy)


def test_a_missing_configuration(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        answer(copy)
    assert caught.value.fix


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_file_that_may_not_be_read(copy: Path, name: str) -> None:
    (copy / name).chmod(0)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        answer(copy)


# -- the cache ----------------------------------------------------------------------------------------


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 0x40


def flip_last(content: bytearray) -> None:
    content[-1] ^= 1


def halve(content: bytearray) -> None:
    del content[len(content) // 2 :]


@pytest.mark.parametrize(
    "damage", [flip, flip_last, halve, bytearray.clear, lambda content: content.extend(b"x")]
)
def test_damaged_quantised_weights_are_made_again(
    good: Path,
    cache: Path,
    expected: np.ndarray,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytearray], None],
) -> None:
    answer(good)
    (path,) = (cache / "weights").glob("*.safetensors")
    sound = path.read_bytes()
    content = bytearray(sound)
    damage(content)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(answer(good), expected)
    assert f"{path} are damaged and are made again" in caplog.text
    assert path.read_bytes() == sound
    caplog.clear()
    answer(good)
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 5000, b'{"x": 1}', b"[]"], ids=range(5))
def test_a_damaged_index_of_digests_is_made_again(
    good: Path, cache: Path, expected: np.ndarray, content: bytes
) -> None:
    answer(good)
    (cache / "digests.json").write_bytes(content)
    assert np.array_equal(answer(good), expected)


@pytest.mark.parametrize(
    "place", ["heterollm.model.tensor_file.write_header", "heterollm.model.tensor_file.os.fsync"]
)
def test_a_full_disk_while_quantising(
    good: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(CacheError, match="the disk is full") as caught:
            answer(good)
    assert "HETEROLLM_CACHE" in caught.value.fix
    assert not list((cache / "weights").glob("*.safetensors"))


def test_a_full_disk_while_graphs_are_written(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("heterollm.kernels.npu.host.write_graph", full)
        with pytest.raises(GraphError, match="No space left"):
            answer(good, plan="npu")


def test_a_cache_that_cannot_be_made(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with monkeypatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(HeteroLLMError, match="HETEROLLM_CACHE"):
            answer(good)


def test_a_cache_that_cannot_be_made_in_a_fresh_process(good: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    surroundings = os.environ | {"HETEROLLM_CACHE": str(tmp_path / "file" / "cache")}
    surroundings.pop("POCL_CACHE_DIR")
    done = run_script(
        "from heterollm.base.errors import CacheError\n"
        "try:\n"
        "    LLM.load(model, device='host')\n"
        "except CacheError as error:\n"
        "    print(error)\n",
        good,
        surroundings,
    )
    assert "HETEROLLM_CACHE" in done.stdout


# -- paths --------------------------------------------------------------------------------------------


def test_names_with_spaces_and_letters_of_all_kinds(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray
) -> None:
    odd = tmp_path / "modèle à moi 模型 'x' %41 №1"
    folder = Path(shutil.copytree(good, odd / "the model"))
    (odd / "temporary").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(odd / "cache"))
        patch.setattr(tempfile, "tempdir", str(odd / "temporary"))
        assert np.array_equal(answer(folder), expected)
        assert np.array_equal(answer(str(folder)), expected)
        answer(folder, plan="npu")
        patch.chdir(odd)
        assert np.array_equal(answer("the model"), expected)
    assert list((odd / "cache" / "weights").glob("*.safetensors"))
    assert list((odd / "temporary").iterdir()) == []


# -- the device ---------------------------------------------------------------------------------------


def without(package: str) -> Callable[..., Any]:
    original = importlib.util.find_spec
    return lambda name, *rest: None if name == package else original(name, *rest)


def no_devices(*_asking: object) -> list[Any]:
    return []


def no_runtime(*_asking: object) -> list[Any]:
    raise DeviceError("No OpenCL runtime was found (PLATFORM_NOT_FOUND_KHR).", fix="Install one.")


@pytest.mark.parametrize(
    ("target", "replacement", "message"),
    [
        ("importlib.util.find_spec", without("onnxruntime"), "onnxruntime is not installed.*pip install"),
        ("heterollm.kernels.gpu.list_opencl_devices", no_devices, "No OpenCL runtime.*nstall"),
        ("heterollm.kernels.gpu.list_opencl_devices", no_runtime, "No OpenCL runtime.*nstall"),
    ],
    ids=["no onnxruntime", "no device", "no runtime"],
)
@pytest.mark.parametrize("device", ["host", "auto"])
def test_a_part_that_is_missing(
    good: Path, monkeypatch: pytest.MonkeyPatch, device: str, target: str, replacement: Any, message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, replacement)
        with pytest.raises(DeviceError, match=message):
            answer(good, device=device)


def test_a_library_that_does_not_load(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def broken(name: str, *arguments: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError("a shared library is missing")
        return original(name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", broken)
        with pytest.raises(DeviceError, match=r"cannot be imported: a shared library .*Reinstall"):
            answer(good)


def test_no_emulator_without_its_package(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", without("onnxruntime_qnn"))
        patch.setattr("platform.system", lambda: "Linux")
        patch.setattr("platform.machine", lambda: "x86_64")
        with pytest.raises(
            DeviceError, match=r"onnxruntime-qnn is not installed.*pip install 'heterollm\[emulator\]'"
        ):
            answer(good, device="emulator")


def test_no_emulator_on_another_platform(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "riscv64")
        with pytest.raises(DeviceError, match="exists for x86-64 Linux only"):
            answer(good, device="emulator")


# -- Ctrl-C -------------------------------------------------------------------------------------------


def run_script(body: str, model: Path, surroundings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = f"import sys\nfrom heterollm import LLM\nmodel = sys.argv[1]\n{body}"
    return subprocess.run(
        [sys.executable, "-c", script, str(model)],
        capture_output=True,
        text=True,
        cwd=model.parent,
        env=surroundings,
        timeout=600,
        check=True,
    )


INTERRUPTED = """
import signal, sys, threading
from heterollm import LLM

model, wanted = sys.argv[1:]
told, interrupted = threading.Event(), threading.Event()

def interrupt(*_):
    interrupted.set()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)

def progress(stage, done, total):
    if stage == wanted and not told.is_set() and (done or wanted != "Quantising weights"):
        told.set()
        print("there", flush=True)
        interrupted.wait(600)

try:
    # The step goes on once the signal has come.
    LLM.load(model, device="host", plan="npu", progress=progress)
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGINT")
@pytest.mark.parametrize(
    "stage", ["Quantising weights", "Packing weights for the GPU", "Preparing graphs and kernels"]
)
def test_ctrl_c_during_load(
    good: Path, cache: Path, expected: np.ndarray, stage: str, tmp_path: Path
) -> None:
    # The fixture then loads the model in the cache that this leaves behind.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(good), stage],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=good.parent,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert out == "interrupted 1\n", err
    assert process.returncode == 0
    assert not list(cache.rglob("*.partial"))
    assert list(temporary.glob("heterollm-*")) == []
