"""Writes a quantised checkpoint: compressed-tensors' W4A16, which heterollm, vLLM and transformers read.

Format: ``pack-quantized`` of https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import OptionError, Progress, UnsupportedModelError, round_up, scratch_folder, silent
from heterollm.kernels.formats import QuantizedTensor, effective_block
from heterollm.model.blocks import FfnBlock, MixtureBlock
from heterollm.model.checkpoint import Checkpoint
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import expert_specs, expert_tensors, router_name
from heterollm.model.hub import CONFIG_FILES
from heterollm.model.hub_files import HUB_FILES
from heterollm.model.json_fields import read_json_object
from heterollm.model.layout import embedding_name, expected_tensors, head_name, other_name
from heterollm.model.operators import op_specs
from heterollm.model.tensor_file import layout_tensors, write_header
from heterollm.model.weight_loading import load_weights

BITS: Final = 4
WORD_CODES: Final = 32 // BITS
TINY: Final = float(np.finfo(np.float64).tiny)
OWN_FILES: Final = ("config.json", "gguf.json")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A written checkpoint.

    Args:
        folder: Its folder.
        size_bytes: Size of its weights.
        source_bytes: Size of the source's files of weights and settings.
        linears: Number of quantised linears.
        block: Weights that share a scale.
        symmetric: Whether they have no zero points.
        signal_db: Signal to error of all quantised weights against the source's.
        worst_db: That of the worst linear.
        worst: The name of that linear.
    """

    folder: Path
    size_bytes: int
    source_bytes: int
    linears: int
    block: int
    symmetric: bool
    signal_db: float
    worst_db: float
    worst: str


Writer = Callable[[], NDArray[Any]]
"""Returns the content of a tensor when it is written."""


def convert_model(
    model: str | Path,
    folder: Path,
    *,
    group_size: int = 32,
    symmetric: bool = True,
    lora: Path | None = None,
    progress: Progress = silent,
) -> Conversion:
    """Quantise the linears of a model's layers, and write a checkpoint that loads without quantising them.

    Embedding, head, norms and routers keep their values. The codes are those that a load of the source makes.

    Args:
        model: A local folder, a GGUF file of floats, or a hub name.
        folder: The new checkpoint; it must not exist.
        group_size: Weights that share a scale: 32, 64 or 128, or less where it does not divide some inputs.
        symmetric: Whether the weights have no zero points.
        lora: Folder of an adapter to merge first.
        progress: Called with a stage's name, bytes done and bytes in all.

    Raises:
        OptionError: The folder exists, or cannot be written; or the block is not legal.
        UnsupportedModelError: The model is quantised already, or stacks its experts in one tensor.
        CheckpointError: The source, or the adapter, is not usable.
    """
    if os.path.lexists(folder):  # a link to nothing, too
        raise OptionError(f"{folder} exists.", fix="Name a new folder.")
    with _scratch_folder(folder) as scratch:
        checkpoint = Checkpoint(model, lora, progress)
        config = ModelConfig.from_folder(checkpoint.folder)
        _check_convertible(model, config)
        block = _block(config, group_size, symmetric)
        weights = load_weights(
            checkpoint,
            config,
            group_size=block,
            symmetric=symmetric,
            progress=lambda done, total: progress("Quantising weights", done, total),
        )
        floats = {embedding_name(config), head_name(config)}
        linears = {
            name: own
            for name, own in weights.linears.items()
            if name not in floats and isinstance(own, QuantizedTensor)
        }
        errors = _errors(checkpoint, linears, progress)
        try:
            _write_settings(checkpoint.folder, scratch, config, block, symmetric=symmetric)
            size = _write_weights(scratch / "model.safetensors", checkpoint, config, linears)
            scratch.chmod(0o755)
            scratch.rename(folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
    worst = min(errors, key=lambda name: _decibels(*errors[name]))
    off, power = (sum(own[index] for own in errors.values()) for index in (0, 1))
    return Conversion(
        folder,
        size,
        checkpoint.file_bytes,
        len(linears),
        block,
        symmetric,
        _decibels(off, power),
        _decibels(*errors[worst]),
        worst,
    )


@contextlib.contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    """Make a folder beside a future one, before the work begins, and delete it afterwards unless renamed."""
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = stack.enter_context(scratch_folder(f".{folder.name}-", folder.parent))
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield scratch


def _check_convertible(model: str | Path, config: ModelConfig) -> None:
    if config.stored is not None:
        raise UnsupportedModelError(
            f"{model} is quantised already.",
            fix="It loads as it is; or convert the model that it was made from.",
        )
    if config.linear_factors:
        raise UnsupportedModelError(
            f"{model} has factors on its linears (mlp_multipliers and such), which weights would have twice.",
            fix="It loads as it is.",
        )
    experts = (expert_tensors(config, layer, block) for layer, block in config.blocks(MixtureBlock).items())
    if any(len(shape) > len(("rows", "columns")) for own in experts for shape in own.values()):
        raise UnsupportedModelError(
            f"{model} stacks its experts in one tensor, but compressed-tensors packs each linear by itself.",
            fix="It loads as it is.",
        )


def _block(config: ModelConfig, group_size: int, symmetric: bool) -> int:
    """Return the longest block that divides the inputs of all linears of the layers."""
    specs = op_specs(config, "w4a16", group_size, symmetric)
    layers = [spec for spec in (*specs, *expert_specs(config, specs)) if spec.group != "head"]
    linears = [*layers, *(spec.then for spec in layers if spec.then is not None)]
    return min(effective_block(spec.columns, group_size) for spec in linears)


def _unwritable(folder: Path, error: OSError) -> OptionError:
    return OptionError(f"{folder} cannot be written: {error.strerror}.", fix="Name another place.")


def _write_settings(source: Path, folder: Path, config: ModelConfig, block: int, *, symmetric: bool) -> None:
    """Copy tokenizer and settings, and state the format of the weights."""
    for pattern in (*HUB_FILES, *CONFIG_FILES):
        for path in source.glob(pattern):
            weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
            if path.is_file() and not weights and path.name not in OWN_FILES:
                shutil.copyfile(path, folder / path.name)
    linears = {
        "num_bits": BITS,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": block,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": linears, "input_activations": None, "output_activations": None}
    stated = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *_float_linears(config)],
    }
    settings = read_json_object(source / "config.json") | {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(settings, indent=2), "utf-8")


def _float_linears(config: ModelConfig) -> list[str]:
    """Return the modules of a mixture's routers, and of gates of whole tokens, which stay floats."""
    names = [router_name(config, layer) for layer in config.blocks(MixtureBlock)]
    gated = (layer for layer, block in config.blocks(FfnBlock).items() if block.token_gated)
    names += [other_name(config, layer, "token_gate") for layer in gated]
    return [name.removesuffix(".weight") for name in names]


def _write_weights(
    path: Path, checkpoint: Checkpoint, config: ModelConfig, linears: dict[str, QuantizedTensor]
) -> int:
    """Write all tensors one after the other; return the size of the file."""
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    writers: dict[str, Writer] = {}
    for name, (dtype, shape, writer) in _tensors(checkpoint, config, linears):
        described[name], writers[name] = (dtype, shape), writer
    entries = layout_tensors(described)
    with path.open("wb") as file:
        write_header(file, entries, {"format": "pt"})
        for name in entries:
            file.write(np.ascontiguousarray(writers[name]()).ravel().view(np.uint8).data)
        return file.tell()


def _tensors(
    checkpoint: Checkpoint, config: ModelConfig, linears: dict[str, QuantizedTensor]
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], Writer]]]:
    for name, shape in expected_tensors(config).items():
        own = linears.get(name)
        if own is None:
            # GGUF has no file of safetensors; its floats are read as float32.
            dtype = checkpoint.dtype(name)
            raw = dtype is not None and (checkpoint.adapter is None or name not in checkpoint.adapter.factors)
            read = checkpoint.file(name).bits if raw else checkpoint.read
            yield name, (dtype if raw and dtype else "F32", shape, functools.partial(read, name))
            continue
        module, (rows, columns), groups = name.removesuffix(".weight"), shape, own.scales.shape[1]
        words = (rows, columns // WORD_CODES)
        yield f"{module}.weight_packed", ("I32", words, functools.partial(getattr, own, "codes"))
        yield f"{module}.weight_scale", ("F16", (rows, groups), functools.partial(getattr, own, "scales"))
        yield f"{module}.weight_shape", ("I64", (2,), functools.partial(np.array, shape, "<i8"))
        if own.zero_points is not None:
            words = (round_up(rows, WORD_CODES) // WORD_CODES, groups)
            yield f"{module}.weight_zero_point", ("I32", words, functools.partial(_packed_zeros, own))


def _packed_zeros(own: QuantizedTensor) -> NDArray[Any]:
    """Return zero points in words of eight rows, the first in the lowest bits."""
    zeros = own.unpacked_zero_points()
    padded = np.zeros((round_up(len(zeros), WORD_CODES), zeros.shape[1]), np.uint32)
    padded[: len(zeros)] = zeros
    shifts = np.arange(0, 32, BITS, dtype=np.uint32)[:, None]
    words: NDArray[Any] = np.bitwise_or.reduce(
        padded.reshape(-1, WORD_CODES, zeros.shape[1]) << shifts, axis=1
    )
    return words.astype("<u4")


def _errors(
    checkpoint: Checkpoint, linears: dict[str, QuantizedTensor], progress: Progress
) -> dict[str, tuple[float, float]]:
    """Return the squares of the error, and of the values, of each linear."""
    found: dict[str, tuple[float, float]] = {}
    for name, own in linears.items():
        progress("Comparing", len(found), len(linears))
        values = checkpoint.read(name)
        lacking = own.dequantize() - values
        found[name] = float(np.vdot(lacking, lacking)), float(np.vdot(values, values))
    progress("Comparing", len(linears), len(linears))
    return found


def _decibels(off: float, power: float) -> float:
    """Return the signal to error; for exact weights that of float64's smallest number."""
    return 10 * math.log10(max(power, TINY) / max(off, TINY))
