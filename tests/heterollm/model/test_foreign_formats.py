"""Files and folders of other formats, named with the next step."""

import itertools
import json
import os
import struct

import pytest

from heterollm.base import CheckpointError, HeteroLLMError, UnsupportedModelError
from heterollm.model import Checkpoint, ModelConfig, find_model

FILES = [
    ("adapter_model.safetensors", b"nothing", "LoRA adapter"),
    ("pytorch_model.bin", b"nothing", "PyTorch file"),
    ("model.pt", b"PK\x03\x04", "PyTorch file"),
    ("model.pth", b"\x80\x02", "PyTorch file"),
    ("model.ckpt", b"", "PyTorch file"),
    ("ggml-model-q4_0.bin", b"tjgg\x03\x00\x00\x00", "GGML"),
    ("old.ggml", b"lmgg", "GGML"),
    ("older.bin", b"fmgg", "GGML"),
    ("adapter.bin", b"algg", "GGLA"),
    ("model.onnx", b"\x08", "ONNX"),
    ("model.tflite", b"\x1c\x00\x00\x00TFL3", "TensorFlow Lite"),
    ("renamed", b"\x1c\x00\x00\x00TFL3", "TensorFlow Lite"),
    ("model.litertlm", b"LITERTLM\x01", "LiteRT-LM"),
    ("model.task", b"PK\x03\x04", "MediaPipe"),
    ("model.pte", b"\x10\x00\x00\x00ET12", "ExecuTorch"),
    ("llm.mnn", b"\x00", "MNN"),
    ("openvino_model.bin", b"\x00", "OpenVINO"),
    ("openvino_model.xml", b"<", "OpenVINO"),
    ("tf_model.h5", b"\x89HDF\r\n\x1a\n", "Keras"),
    ("flax_model.msgpack", b"\x81", "Flax"),
    ("rank0.engine", b"\x00", "TensorRT"),
    ("consolidated.00.pth", b"PK\x03\x04", "Meta's own form"),
    ("consolidated.safetensors", b"\x00", "Mistral's own form"),
    ("mlc-chat-config.json", b"{}", "MLC"),
    ("genai_config.json", b"{}", "ONNX"),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES, ids=[name for name, *_ in FILES])
def test_a_file_or_folder_of_another_format_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    for given, read in itertools.product((tmp_path, tmp_path / name), (Checkpoint, find_model)):
        with pytest.raises(CheckpointError, match=words) as caught:
            read(given)
        assert name in caught.value.message
        assert caught.value.fix


def test_a_single_safetensors_file_is_no_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(CheckpointError, match="safetensors file") as caught:
        Checkpoint(tmp_path / "model.safetensors")
    assert "folder" in str(caught.value.fix)


def test_a_folder_of_gguf_files_lists_them(tmp_path):
    for name in ("model-Q4_K_M.gguf", "model-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "BF16").mkdir()
    (tmp_path / "BF16" / "model.gguf").write_bytes(b"GGUF")
    for read in (Checkpoint, find_model):
        with pytest.raises(
            CheckpointError, match=r"model-Q4_K_M\.gguf, model-Q8_0\.gguf, BF16.model\.gguf"
        ) as caught:
            read(tmp_path)
        assert str(tmp_path / "model-Q4_K_M.gguf") in str(caught.value.fix)


@pytest.mark.parametrize(
    ("data", "words", "fix"),
    [
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian", "gguf-convert-endian"),
        (struct.pack(">4sIQQ", b"GGUF", 2, 0, 0), "big-endian", "gguf-convert-endian"),
        (struct.pack("<4sIII", b"GGUF", 1, 0, 0), "version 1", "newer file"),
        (struct.pack("<4sIQQ", b"GGUF", 4, 0, 0), "version is 4", ""),
        (b"tjgg\x03\x00\x00\x00", "GGJT", "GGUF"),
        (b"PK\x03\x04", "zip archive", ""),
        (b"<!DOCTYPE html>", "does not begin with GGUF", "again"),
    ],
)
def test_files_with_the_ending_of_gguf_are_named_by_their_content(tmp_path, data, words, fix):
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(HeteroLLMError, match=words) as caught:
        Checkpoint(tmp_path / "model.gguf")
    assert fix in str(caught.value.fix)
    if "again" not in fix:
        assert "Download it again" not in str(caught.value) or words == "version is 4"


@pytest.mark.parametrize(
    ("config", "file", "words"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, None, "MLX"),
        (
            {
                "quantization": {"group_size": 64, "bits": 4},
                "quantization_config": {"group_size": 64, "bits": 4},
            },
            None,
            "MLX",
        ),
        ({}, "quantize_config.json", "AutoGPTQ"),
        ({}, "quant_config.json", "AutoAWQ"),
        ({}, "hf_quant_config.json", "NVFP4"),
        ({}, "mlc-chat-config.json", "MLC"),
    ],
)
def test_weights_that_config_json_does_not_describe_are_named(tmp_path, config, file, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if file:
        (tmp_path / file).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(CheckpointError, match="PyTorch file"):
        Checkpoint(tmp_path / "pipe.bin")
