"""Names the formats of models that heterollm does not read, by the first bytes and names of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from heterollm.base import CheckpointError, UnsupportedModelError


class ForeignFormat(NamedTuple):
    """A format by the marks of its files.

    Args:
        what: Its name.
        fix: The user's next step.
        endings: Ends of file names.
        magic: First bytes, from a position in the file.
        at: That position.
    """

    what: str
    fix: str
    endings: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()
    at: int = 0


HUGGING_FACE: Final = (
    "Take the Hugging Face checkpoint of the model (config.json and safetensors), or a GGUF file."
)
OLD_GGML: Final = "a GGML file (GGML, GGMF or GGJT), llama.cpp's format before GGUF"
SAVE: Final = "Convert it with transformers: from_pretrained, then save_pretrained."
WITH_LORA: Final = "Name the model, and the adapter's folder with --lora."

ZIP: Final = (b"PK\x03\x04",)
FORMATS: Final = (
    ForeignFormat(OLD_GGML, HUGGING_FACE, (".ggml", ".ggjt"), (b"lmgg", b"fmgg", b"tjgg")),
    ForeignFormat("a GGLA file, a LoRA adapter in llama.cpp's format before GGUF", WITH_LORA, (), (b"algg",)),
    ForeignFormat("a GGUF file, llama.cpp's format", "Name the file itself.", (), (b"GGUF",)),
    ForeignFormat(
        "part of a LoRA adapter",
        "Name the model, and the adapter with --lora.",
        ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
    ),
    ForeignFormat("a LiteRT-LM file, Google's format", HUGGING_FACE, (".litertlm",), (b"LITERTLM",)),
    ForeignFormat("a TensorFlow Lite (LiteRT) file", HUGGING_FACE, (".tflite",), (b"TFL3",), 4),
    ForeignFormat("a MediaPipe bundle, Google's format", HUGGING_FACE, (".task",)),
    ForeignFormat("an ExecuTorch program", HUGGING_FACE, (".pte",), (b"ET12",), 4),
    ForeignFormat("an MNN model", HUGGING_FACE, (".mnn", ".mnn.weight")),
    ForeignFormat("an ONNX model", HUGGING_FACE, (".onnx", ".onnx.data", ".onnx_data", "genai_config.json")),
    ForeignFormat("an OpenVINO model", HUGGING_FACE, ("openvino_model.xml", "openvino_model.bin")),
    ForeignFormat("a model of MLC LLM", HUGGING_FACE, ("mlc-chat-config.json", "params_shard_0.bin")),
    ForeignFormat("a Core ML model", HUGGING_FACE, (".mlmodel", ".mlpackage", ".mlmodelc")),
    ForeignFormat("a TensorRT engine", HUGGING_FACE, (".engine",)),
    ForeignFormat("a QNN context binary", HUGGING_FACE, (".dlc", ".serialized.bin")),
    ForeignFormat("a TensorFlow or Keras file", SAVE, (".h5", ".keras"), (b"\x89HDF\r\n\x1a\n",)),
    ForeignFormat("a Flax file", SAVE, (".msgpack",)),
    ForeignFormat("a NeMo archive", HUGGING_FACE, (".nemo",)),
    ForeignFormat("a checkpoint in Meta's own form", HUGGING_FACE, ("consolidated.00.pth",)),
    ForeignFormat("a checkpoint in Mistral's own form", HUGGING_FACE, ("consolidated.safetensors",)),
    ForeignFormat("a PyTorch file", SAVE, (".bin", ".pt", ".pth", ".ckpt", ".distcp")),
    ForeignFormat("a zip archive", HUGGING_FACE, (".zip",), ZIP),
)
"""Formats, the narrower ones first; first bytes count before endings."""

SAFETENSORS: Final = ForeignFormat(
    "a safetensors file, which holds no configuration",
    "Name the folder that holds it and config.json.",
    (".safetensors",),
)
"""The format of one file; a folder with it and its configuration is read."""

FOLDERS: Final = (".mlpackage", ".mlmodelc")
"""Endings of folders that are one model."""

HEAD_BYTES: Final = 16
LISTED_NAMES: Final = 4

OWN_FILES: Final[Mapping[str, str]] = {
    "quantize_config.json": "an AutoGPTQ that did not write quantization_config",
    "quant_config.json": "an AutoAWQ that did not write quantization_config",
    "hf_quant_config.json": "NVIDIA's ModelOpt (FP8 or NVFP4)",
    "mlc-chat-config.json": "MLC LLM",
}
"""Files of folders whose ``config.json`` does not say how their weights are stored."""
FLOATS: Final = "Take the checkpoint with floats, or one in GGUF, GPTQ, AWQ or compressed-tensors."


def foreign_format(path: Path) -> CheckpointError | None:
    """Return the error of a file or folder with a model in a format that is not read; None for any other."""
    if not path.is_dir() or path.suffix in FOLDERS:
        return _error(path, _format(path) or (SAFETENSORS if path.suffix == ".safetensors" else None))
    try:
        files = sorted(path.iterdir())
        models = [file for file in (*files, *sorted(path.glob("*/*"))) if file.suffix.lower() == ".gguf"]
    except OSError:
        return None
    if models:
        listed = ", ".join(str(file.relative_to(path)) for file in models[:LISTED_NAMES])
        more = f" and {len(models) - LISTED_NAMES} more" if len(models) > LISTED_NAMES else ""
        return CheckpointError(
            f"{path} holds GGUF files ({listed}{more}), no checkpoint of safetensors.",
            fix=f"Name the file itself, such as {models[0]}.",
        )
    return next((_error(file, found) for file in files if (found := _format(file)) is not None), None)


def _format(path: Path) -> ForeignFormat | None:
    """Return the format of a file by its first bytes, else by its name; an archive's by its name."""
    head = b""
    try:
        if path.is_file():  # no pipe, which would wait for a writer
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
    except OSError:
        pass
    named = next((one for one in FORMATS if path.name.lower().endswith(one.endings)), None)
    known = next((one for one in FORMATS if head[one.at :].startswith(one.magic)), named)
    return named if known is not None and known.magic == ZIP and named is not None else known


def _error(path: Path, found: ForeignFormat | None) -> CheckpointError | None:
    if found is None:
        return None
    return CheckpointError(f"{path} is {found.what}. Only safetensors and GGUF are read.", fix=found.fix)


def refuse_foreign_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights are stored in a way that heterollm does not read, by its name.

    Args:
        folder: The checkpoint.
        config: Content of its ``config.json``.

    Raises:
        UnsupportedModelError: The weights are stored so.
    """
    kind = None
    if isinstance(config.get("quantization"), dict):
        kind = "MLX (`quantization` in config.json)"
    elif config.get("quantization_config") is None:
        kind = next((own for name, own in OWN_FILES.items() if (folder / name).is_file()), None)
    if kind is not None:
        raise UnsupportedModelError(
            f"The weights in {folder} are quantised by {kind}, which heterollm does not read.", fix=FLOATS
        )
