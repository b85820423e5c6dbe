"""A checkpoint on disk: checks its memory-mapped tensors and reads them as float32, or as stored integers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, Progress, file_digests, silent
from heterollm.kernels.formats import QuantizedTensor, as_float32
from heterollm.kernels.ops import WeightFormat
from heterollm.model.checkpoint_folder import checkpoint_folder, no_checkpoint
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import experts_apart
from heterollm.model.families import FAMILIES
from heterollm.model.json_fields import read_json_object
from heterollm.model.layout import (
    embedding_name,
    expected_tensors,
    head_name,
    layer_of,
    matrix_shape,
    unread_tensors,
)
from heterollm.model.lora import LoraAdapter
from heterollm.model.stored import GgufTensors, StoredTensors, TernaryLinears, canonical, open_gguf
from heterollm.model.tensor_file import TensorFile
from heterollm.model.tensor_names import name_bare_part, name_tied_embedding, packed_weights, text_part
from heterollm.model.wrappers import family_name, is_wrapped

FLOAT_TYPES = ("F16", "BF16", "F32")
"""Supported types of weights."""

ROUNDED_INPUTS: Final = (
    "BitNet's linears read inputs as they are; transformers rounds those of each token to 8 bits, as "
    "precision w4a8 rounds those of each block."
)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

LISTED_NAMES = 3
HASH_BYTES = 16 * 1024 * 1024


class Checkpoint:
    """The tensors of a checkpoint's safetensors files, or of a GGUF file, read on demand.

    Attributes:
        folder: The folder of the files.
        factors: Factors on rows of tensors by name, which are read with them.
    """

    def __init__(self, name: Path | str, lora: Path | str | None = None, progress: Progress = silent) -> None:
        """Open a local folder, a GGUF file or a hub name, and check the headers of all files.

        Args:
            name: The checkpoint.
            lora: Folder of an adapter, which is merged into the weights as they are read.
            progress: Called with the bytes done and the total while files are fetched.

        Raises:
            CheckpointError: The checkpoint is missing or incomplete, or a file is damaged; or the adapter
                does not fit the checkpoint.
            UnsupportedModelError: The adapter is no LoRA of linears alone.
        """
        self.folder = checkpoint_folder(name, progress=progress)
        self.factors: Mapping[str, NDArray[np.float32]] = {}
        self._hashed_paths: list[Path] = []
        self._files: dict[str, TensorFile] = {}
        if (self.folder / "config.json").is_file():
            self._hashed_paths.append(self.folder / "config.json")
        gguf = open_gguf(self.folder)
        self._stored: StoredTensors | None = gguf
        if gguf is not None:
            self._hashed_paths += gguf.paths
        elif (self.folder / SINGLE_FILE).is_file():
            self._add_file(SINGLE_FILE, None)
        elif (self.folder / INDEX_FILE).is_file():
            self._add_shards()
        else:
            raise no_checkpoint(
                self.folder,
                f"has neither {SINGLE_FILE} nor {INDEX_FILE}.",
                "Only safetensors are read: convert other formats with transformers' save_pretrained.",
            )
        self._unread = 0
        if self._stored is None:
            self._name_tensors()
        self.adapter = None if lora is None else LoraAdapter(lora)
        if self.adapter is not None:
            integers = {name for name in self.adapter.factors if self._stored_kind(name)}
            self.adapter.check({name: self.shape(name) for name in self.names}, integers)
            self._hashed_paths += self.adapter.paths

    def _name_tensors(self) -> None:
        """Give the tensors of safetensors files their names in the model, and packed ones their readers."""
        family, files = FAMILIES.get(family_name(self._stated)), self._files
        if is_wrapped(self._stated):
            files = text_part(files)
            self._unread = len(self._files) - len(files)
        files = experts_apart(name_bare_part(files, self.folder), family)
        self._files = name_tied_embedding(files, self.folder)
        mixture = None if family is None else family.mixture
        packed = packed_weights(self._files, self.folder, mixture, self._stated.get("quantization_config"))
        if packed is not None:
            self._stored = packed
            self._files = {name: file for name, file in self._files.items() if name not in packed.parts}

    @functools.cached_property
    def _stated(self) -> dict[str, Any]:
        """Content of ``config.json``; empty without one."""
        config = self.folder / "config.json"
        return read_json_object(config) if config.is_file() else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions about a GGUF file's metadata, fields without effect, and tensors that are not read."""
        if isinstance(self._stored, GgufTensors):
            return self._stored.notes
        notes = (ROUNDED_INPUTS,) if isinstance(self._stored, TernaryLinears) else ()
        vision = f"{self._unread} tensors of vision are not read; the text part is."
        return (*notes, *((vision,) if self._unread else ()))

    @property
    def is_gguf(self) -> bool:
        """Whether the tensors are those of a GGUF file."""
        return isinstance(self._stored, GgufTensors)

    @property
    def file_bytes(self) -> int:
        """Size of all files that :meth:`content_hash` reads."""
        return sum(path.stat().st_size for path in self._hashed_paths)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every tensor."""
        return (*self._files, *(() if self._stored is None else self._stored.names))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            CheckpointError: There is no such tensor.
        """
        stored = self._in_blocks(name)
        return self.file(name).entries[name].shape if stored is None else stored.shape(name)

    def dtype(self, name: str) -> str | None:
        """Return the type of a tensor in a safetensors file; None in other files."""
        file = self._files.get(name)
        return None if file is None else file.entries[name].dtype

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a weight; those of a stack of matrices are rows of one."""
        return matrix_shape(self.shape(name))

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor in its file."""
        stored = self._in_blocks(name)
        if stored is not None:
            return stored.size_bytes(name)
        entry = self.file(name).entries[name]
        return entry.stop - entry.start

    def read(self, name: str, rows: tuple[int, int] | None = None) -> NDArray[np.float32]:
        """Return a tensor, or rows ``[start, stop)`` of its matrix, as a new float32 array.

        Raises:
            CheckpointError: There is no such tensor, it has no float type, or a value is NaN or infinite.
        """
        values = self._read(name, rows)
        if self.adapter is not None:
            self.adapter.add(name, rows, values, lambda: self._read(name, None))
        if name in self.factors:
            values *= self.factors[name][slice(*(rows or (None,))), None]
        return values

    def _read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a tensor, or rows of it, without the adapter."""
        stored = self._in_blocks(name)
        if stored is not None:
            return finite(stored.read(name, rows), stored.path, name)
        file = self.file(name)
        dtype = file.entries[name].dtype
        if dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{file.path}: tensor {name} has type {dtype}; expected one of {', '.join(FLOAT_TYPES)}."
            )
        bits = file.bits(name)
        if rows is not None:
            bits = bits.reshape(-1, bits.shape[-1])[rows[0] : rows[1]]
        return finite(as_float32(bits), file.path, name)

    def unchanged(self, name: str) -> NDArray[Any] | None:
        """Return a float tensor as its file has it; None if reading changes it, or for other files."""
        changed = name in self.factors or (self.adapter is not None and name in self.adapter.factors)
        return None if changed or self._in_blocks(name) is not None else self.file(name).bits(name)

    def gather(self, name: str, rows: NDArray[np.int32]) -> NDArray[Any]:
        """Return some rows of a matrix, without the adapter, read from the mapped file alone.

        Raises:
            CheckpointError: There is no such tensor, or a value is NaN or infinite.
        """
        stored = self._in_blocks(name)
        if isinstance(stored, GgufTensors):
            return finite(stored.gather(name, rows), stored.path, name)
        file = self.file(name)
        return finite(as_float32(file.bits(name)[rows]), file.path, name)

    def kind(self, name: str) -> str | None:
        """Return the name of a stored format of integers; None for floats, and for what reading changes."""
        changed = name in self.factors or (self.adapter is not None and name in self.adapter.factors)
        return None if changed else self._stored_kind(name)

    def _stored_kind(self, name: str) -> str | None:
        stored = self._in_blocks(name)
        return None if stored is None or not stored.is_quantized(name) else stored.kind(name)

    def canonical(self, name: str, rows: tuple[int, int], weight: WeightFormat) -> QuantizedTensor | None:
        """Return rows ``[start, stop)`` of stored integers in a canonical format, with their scales.

        Returns:
            None if the tensor is stored as floats, or the format cannot hold it.
        """
        stored = self._in_blocks(name)
        if stored is None or self.kind(name) is None:
            return None
        blocks = stored.blocks(name, rows)
        return None if blocks is None else canonical(blocks, weight)

    def validate(self, config: ModelConfig) -> None:
        """Check that the checkpoint has exactly the tensors of the configuration.

        Raises:
            CheckpointError: A tensor is missing, has another shape or no float type, or has no place in the
                model, for example because the configuration has fewer layers or no bias.
        """
        if config.layers > len(self.names):
            # Refuse a damaged number before making a list over layers.
            raise CheckpointError(
                f"{self.folder} has {len(self.names)} tensors, too few for the {config.layers} layers that "
                "its config.json states."
            )
        expected = expected_tensors(config)
        _refuse(self.folder, "lacks tensors that its config.json calls for", set(expected) - set(self.names))
        _refuse(
            self.folder,
            "has tensors of another shape than its config.json says",
            [
                f"{name} {list(self.shape(name))} instead of {list(shape)}"
                for name, shape in expected.items()
                if self.shape(name) != shape
            ],
        )
        types = {name: self._files[name].entries[name].dtype for name in expected if name in self._files}
        _refuse(
            self.folder,
            f"has tensors that are not of a type in {', '.join(FLOAT_TYPES)}",
            [f"{name} ({dtype})" for name, dtype in types.items() if dtype not in FLOAT_TYPES],
        )
        if self.adapter is not None:
            _refuse(
                self.adapter.folder,
                "changes tensors that the model does not compute with",
                set(self.adapter.factors) - set(expected),
            )
        head = head_name(config)
        if config.tie_word_embeddings and head in self.names and not self._harmless(config, head):
            raise CheckpointError(
                f"{self.folder} ties {head} to {embedding_name(config)}, but holds two different tensors.",
                fix="Set tie_word_embeddings to false in config.json; transformers does not tie them either.",
            )
        _refuse(
            self.folder,
            "has tensors that a model as in its config.json has no place for",
            [name for name in self.names if name not in expected and not self._harmless(config, name)],
        )

    def content_hash(self, progress: Callable[[int, int], None] | None = None) -> str:
        """Return the SHA-256 of ``config.json`` and all safetensors files, as hexadecimal digits.

        Each file is read once; the cache keeps its digest until its path or stamp changes.

        Args:
            progress: Called with the bytes read and the total.
        """
        digests = file_digests(self._hashed_paths, progress, error=CheckpointError)
        whole = hashlib.sha256()
        for path in self._hashed_paths:
            whole.update(f"{path.name} {digests[path]}\n".encode())
        return whole.hexdigest()

    def _harmless(self, config: ModelConfig, name: str) -> bool:
        """Whether a tensor is a copy of the tied head, or RoPE frequencies from an old exporter."""
        if name == head_name(config) and config.tie_word_embeddings and self._in_blocks(name) is None:
            return self._equal(name, embedding_name(config))
        if name.endswith(".bias") and self._in_blocks(f"{name.removesuffix('bias')}weight"):
            return not self.read(name).any()  # some packers add zeros
        if name.startswith(unread_tensors(config)):
            return True
        layer = layer_of(config, name)
        return name.endswith(".rotary_emb.inv_freq") and (layer is None or layer < config.layers)

    def _equal(self, first: str, second: str) -> bool:
        one, other = (self.file(name).entries[name] for name in (first, second))
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        size = one.stop - one.start
        return all(
            np.array_equal(
                self._files[first].data[one.start + offset : one.start + min(size, offset + HASH_BYTES)],
                self._files[second].data[other.start + offset : other.start + min(size, offset + HASH_BYTES)],
            )
            for offset in range(0, size, HASH_BYTES)
        )

    def _in_blocks(self, name: str) -> StoredTensors | None:
        """Return the reader of a tensor that lies in no safetensors file as it is."""
        return self._stored if self._stored is not None and name in self._stored.names else None

    def file(self, name: str) -> TensorFile:
        """Return the file of a tensor.

        Raises:
            CheckpointError: There is no such tensor.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name}.")
        return self._files[name]

    def _add_shards(self) -> None:
        index_path = self.folder / INDEX_FILE
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path} has no weight_map.")
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or not shard or Path(shard).name != shard:
                raise CheckpointError(f"{index_path} places tensor {name} in {shard!r}.")
            shards.setdefault(shard, []).append(name)
        for shard, names in sorted(shards.items()):
            self._add_file(shard, names)

    def _add_file(self, file_name: str, names: list[str] | None) -> None:
        """Add the given tensors of a file, or all."""
        path = self.folder / file_name
        try:
            found = path.is_file()
        except OSError:  # such as a name that is too long
            found = False
        if not found:
            raise CheckpointError(f"{self.folder} lacks the shard {file_name:.80}.", fix="Download it again.")
        file = TensorFile.open(path)
        self._hashed_paths.append(path)
        for name in file.entries if names is None else names:
            if name not in file.entries:
                raise CheckpointError(f"{path} lacks tensor {name}, which {INDEX_FILE} places there.")
            self._files[name] = file


def finite(values: NDArray[np.float32], path: Path, name: str) -> NDArray[np.float32]:
    """Return the values of a tensor of a file.

    Raises:
        CheckpointError: A value is NaN or infinite.
    """
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{path}: tensor {name} holds NaN or infinite values.", fix="Download it again."
        )
    return values


def _refuse(folder: Path, what: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - LISTED_NAMES} more" if len(listed) > LISTED_NAMES else ""
        raise CheckpointError(f"{folder} {what}: {', '.join(listed[:LISTED_NAMES])}{more}.")
