"""A checkpoint on disk: checks its memory-mapped tensors and reads them as float32, or as stored integers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import huggingface_hub
import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, OptionError
from heterollm.data import BUNDLED_NAME, bundled_model
from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.ops import WeightFormat
from heterollm.model.config import ModelConfig
from heterollm.model.file_index import FileIndex
from heterollm.model.json_fields import read_json_object
from heterollm.model.layout import embedding_name, expected_tensors, head_name, layer_of, matrix_shape
from heterollm.model.stored import (
    PackedLinears,
    PackedTensor,
    StoredTensors,
    canonical,
    gguf_folder,
    is_gguf,
    open_gguf,
)
from heterollm.model.tensor_file import TensorFile

__all__ = ["FLOAT_TYPES", "Checkpoint", "checkpoint_folder", "is_hub_name"]

FLOAT_TYPES = ("F16", "BF16", "F32")
"""Supported types of weights."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
CONFIG_FILES = ["config.json", "generation_config.json"]
HUB_IGNORED = ["*/*", "consolidated*"]

OTHER_FORMATS = (
    (".gguf", "a GGUF file, llama.cpp's format", "Name the file itself."),
    (
        ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
        "part of a LoRA adapter",
        "Merge it into its model with PEFT's merge_and_unload, then save_pretrained.",
    ),
    (
        (".bin", ".pt", ".pth", ".ckpt"),
        "a PyTorch file",
        "Convert it with transformers: from_pretrained, then save_pretrained.",
    ),
)
"""Endings of file names, the format and the next step, for folders without a checkpoint."""

LISTED_NAMES = 3
HASH_BYTES = 16 * 1024 * 1024


def checkpoint_folder(name: Path | str, *, weights: bool = True) -> Path:
    """Return the folder of a local checkpoint, of a GGUF file, of the bundled model, or of one from the hub.

    Args:
        name: A folder, a GGUF file, a hub name, or the name of the bundled model; a folder of that name comes
            first.
        weights: Whether to fetch all files, or only the model's configuration.

    Raises:
        OptionError: The name is empty or no text.
        CheckpointError: There is no such folder, and the hub did not deliver it; or the file is damaged.
        CacheError: The folder of a GGUF file cannot be written.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise OptionError(f"The model is {name!r}.", fix="Give a folder or a hub name.")
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        if is_gguf(folder):
            return gguf_folder(folder)
        if folder.exists():
            raise _no_checkpoint(folder, "is a file.", "Name the folder that holds config.json.")
    except (OSError, RuntimeError) as error:  # too long, no permission, or the home of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"Cannot look for a checkpoint at {name!s:.200}: {reason}.") from error
    if str(name) == BUNDLED_NAME:
        return bundled_model()
    if not is_hub_name(name):
        raise CheckpointError(
            f"There is no folder {folder}.", fix="Name a checkpoint's folder, a GGUF file or a hub name."
        )
    try:
        found = huggingface_hub.snapshot_download(
            str(name), allow_patterns=HUB_FILES if weights else CONFIG_FILES, ignore_patterns=HUB_IGNORED
        )
    except Exception as error:
        # The hub's client raises the errors of several libraries, without a common base.
        problem, fix = _hub_problem(str(name), error)
        raise CheckpointError(f"There is no folder {name}, and {problem}.", fix=fix) from error
    return Path(found)


def _hub_problem(name: str, error: Exception) -> tuple[str, str]:
    """Return why the hub did not give a model, and what to do."""
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(error, errors.GatedRepoError):
        return (
            "the Hugging Face hub gives the model only to accounts that its owner has accepted",
            f"Ask for access on https://huggingface.co/{name}, then run `hf auth login`.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hugging Face hub has no public model of this name",
            "Check the spelling, OWNER/NAME; for a private model run `hf auth login`.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            "the model has no revision `main` on the Hugging Face hub",
            "Download a revision, and name its folder.",
        )
    if isinstance(error, errors.OfflineModeIsEnabled) or isinstance(cause, errors.OfflineModeIsEnabled):
        return (
            "HF_HUB_OFFLINE keeps heterollm from the Hugging Face hub, whose cache here lacks the model",
            "Unset HF_HUB_OFFLINE, or name the folder of a checkpoint.",
        )
    for failed in (error, cause):
        if isinstance(failed, errors.HfHubHTTPError):
            status = failed.response.status_code
            return f"the Hugging Face hub answered with status {status}", "Run the command again later."
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "the Hugging Face hub cannot be reached, and its cache here lacks the model",
            "Check the connection (HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror), or name a folder.",
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"the Hugging Face hub did not give it: {reason}",
        "Check the path; or the name, the connection and, for a gated model, `hf auth login`.",
    )


def other_format(path: Path) -> CheckpointError | None:
    """Return the error of a file, or of a folder with one, whose format heterollm does not read."""
    try:
        found = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        found = []
    for file in found:
        for ending, kind, convert in OTHER_FORMATS:
            if file.name.endswith(ending):
                return CheckpointError(f"{file} is {kind}. Only safetensors are read.", fix=convert)
    return None


def _no_checkpoint(path: Path, lack: str, fix: str) -> CheckpointError:
    """Return the error of a file, or of a folder without weights; it names another format found there."""
    return other_format(path) or CheckpointError(f"{path} {lack}", fix=fix)


def is_hub_name(name: Path | str) -> bool:
    """Return whether a text is a legal repository name on the Hugging Face hub."""
    return HUB_NAME.fullmatch(str(name)) is not None


class Checkpoint:
    """The tensors of a checkpoint's safetensors files, or of a GGUF file, read on demand.

    Attributes:
        folder: The folder of the files.
    """

    def __init__(self, name: Path | str) -> None:
        """Open a local folder, a GGUF file or a hub name, and check the headers of all files.

        Raises:
            CheckpointError: The checkpoint is missing or incomplete, or a file is damaged.
        """
        self.folder = checkpoint_folder(name)
        self._hashed_paths: list[Path] = []
        self._files: dict[str, TensorFile] = {}
        if (self.folder / "config.json").is_file():
            self._hashed_paths.append(self.folder / "config.json")
        self._stored: StoredTensors | None = open_gguf(self.folder)
        if self._stored is not None:
            self._hashed_paths.append(self._stored.path)
        elif (self.folder / SINGLE_FILE).is_file():
            self._add_file(SINGLE_FILE, None)
        elif (self.folder / INDEX_FILE).is_file():
            self._add_shards()
        else:
            raise _no_checkpoint(
                self.folder,
                f"has neither {SINGLE_FILE} nor {INDEX_FILE}.",
                "Only safetensors are read: convert other formats with transformers' save_pretrained.",
            )
        if self._stored is None:
            self._add_packed()

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
        stored = self._in_blocks(name)
        if stored is not None:
            return _finite(stored.read(name, rows), stored.path, name)
        file = self.file(name)
        dtype = file.entries[name].dtype
        if dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{file.path}: tensor {name} has type {dtype}; expected one of {', '.join(FLOAT_TYPES)}."
            )
        bits = file.bits(name)
        if rows is not None:
            bits = bits.reshape(-1, bits.shape[-1])[rows[0] : rows[1]]
        return _finite(bits.astype(np.float32), file.path, name)

    def kind(self, name: str) -> str | None:
        """Return the name of the format of a tensor that is stored as integers; None for floats."""
        stored = self._in_blocks(name)
        return None if stored is None or not stored.is_quantized(name) else stored.kind(name)

    def canonical(self, name: str, rows: tuple[int, int], weight: WeightFormat) -> QuantizedTensor | None:
        """Return rows ``[start, stop)`` of stored integers in a canonical format, with their scales.

        Returns:
            None if the tensor is stored as floats, or the format cannot hold it.
        """
        stored = self._in_blocks(name)
        if stored is None or not stored.is_quantized(name):
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
        _refuse(
            self.folder,
            "has tensors that a model as in its config.json has no place for",
            [name for name in self.names if name not in expected and not self._harmless(config, name)],
        )

    def content_hash(self, progress: Callable[[int, int], None] | None = None) -> str:
        """Return the SHA-256 of ``config.json`` and all safetensors files, as hexadecimal digits.

        Each file is read once; :class:`FileIndex` keeps its digest until its path or stamp changes.

        Args:
            progress: Called with the bytes read and the total.
        """
        total_bytes = self.file_bytes
        index = FileIndex("digests")
        whole = hashlib.sha256()
        done_bytes = 0
        for path in self._hashed_paths:
            digest = index.get(path)
            if digest is None:
                digest = _file_digest(path, progress, done_bytes, total_bytes)
                index.put(path, digest)
            done_bytes += path.stat().st_size
            whole.update(f"{path.name} {digest}\n".encode())
        return whole.hexdigest()

    def _harmless(self, config: ModelConfig, name: str) -> bool:
        """Whether a tensor is a copy of the tied head, or RoPE frequencies from an old exporter."""
        if name == head_name(config) and config.tie_word_embeddings and self._in_blocks(name) is None:
            return self._equal(name, embedding_name(config))
        if name.endswith(".bias") and self._in_blocks(f"{name.removesuffix('bias')}weight"):
            return not self.read(name).any()  # some packers add zeros
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

    def _add_packed(self) -> None:
        """Replace the packed tensors of quantised linears by the weights that they stand for."""
        config = self.folder / "config.json"
        stated = read_json_object(config).get("quantization_config") if config.is_file() else None
        if not isinstance(stated, dict):
            return
        tensors = {
            name: PackedTensor(entry.dtype, entry.shape, entry.stop - entry.start)
            for name, file in self._files.items()
            for entry in [file.entries[name]]
        }
        files = dict(self._files)
        packed = PackedLinears(self.folder, tensors, lambda name: files[name].bits(name), stated)
        if packed.names:
            self._stored = packed
            parts = packed.parts
            self._files = {name: file for name, file in files.items() if name not in parts}

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


def _finite(values: NDArray[np.float32], path: Path, name: str) -> NDArray[np.float32]:
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


def _file_digest(
    path: Path, progress: Callable[[int, int], None] | None, done_bytes: int, total_bytes: int
) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(HASH_BYTES):
                digest.update(piece)
                done_bytes += len(piece)
                if progress is not None:
                    progress(done_bytes, total_bytes)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    return digest.hexdigest()
