"""Reads the weights of single experts from the files of a model, while it runs.

A mapped page of a file that was cut meanwhile would end the process. So this module reads with calls that
report an error, into memory that all experts share, and refuses a file that changed since the load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.kernels.formats import LinearWeight, QuantizedTensor, as_float32
from heterollm.kernels.ops import OpSpec, WeightFormat
from heterollm.model.expert_layout import expert_rows
from heterollm.model.tensor_file import DATA_TYPES, TensorFile
from heterollm.model.tensor_rows import TensorRows
from heterollm.model.weight_cache import quantized_tensor, suffixes
from heterollm.model.weight_views import beyond_float16
from heterollm.model.weights import ModelWeights


class ExpertReader:
    """Reads gate, up and down of one expert at a time.

    Args:
        weights: Weights of a model with experts, quantised or float.

    Attributes:
        read_bytes: Bytes read so far.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self._config = weights.config
        self._quantized, self._checkpoint = weights.quantized, weights.checkpoint
        self._streams: dict[TensorFile, _Stream] = {}
        self._kept: dict[tuple[str, str], tuple[LinearWeight, tuple[_Part, ...]]] = {}
        self.read_bytes = 0
        for spec in weights.experts:
            for expert in range(0 if spec.experts is None else spec.experts.experts):
                for place in expert_rows(self._config, spec.layer, expert).values():
                    self._stream(place)

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def read_ahead(self, spec: OpSpec, expert: int) -> None:
        """Ask the system to read an expert in the background."""
        for member, weight, place in self._places(spec, expert):
            for part in self._memory(member, weight, place)[1]:
                self._stream(place).read_ahead(place, part)

    def read(self, spec: OpSpec, expert: int) -> tuple[Sequence[LinearWeight], Sequence[LinearWeight]]:
        """Return gate and up, and down, of an expert; the next call overwrites them.

        Args:
            spec: The experts of a layer.
            expert: Number of the expert.

        Raises:
            CheckpointError: A file changed since the model was loaded, or cannot be read; or a float weight
                is not finite in its format.
        """
        found = []
        for member, weight, place in self._places(spec, expert):
            value, parts = self._memory(member, weight, place)
            stream = self._stream(place)
            for part in parts:
                stream.read(place, part)
                self.read_bytes += part.raw.nbytes
            if not isinstance(value, QuantizedTensor):
                with np.errstate(over="ignore"):
                    np.copyto(value, as_float32(parts[0].values), casting="unsafe")
                if not np.isfinite(value).all():
                    raise _unusable(place.name, parts[0].values)
            found.append(value)
        return found[:-1], found[-1:]

    def _places(self, spec: OpSpec, expert: int) -> list[tuple[str, WeightFormat, TensorRows]]:
        assert spec.then is not None  # by expert_specs
        rows = expert_rows(self._config, spec.layer, expert)
        own = [(member.name, spec.weight, rows[member.name]) for member in spec.members]
        return [*own, ("down", spec.then.weight, rows["down"])]

    def _memory(
        self, member: str, weight: WeightFormat, place: TensorRows
    ) -> tuple[LinearWeight, tuple[_Part, ...]]:
        """Return the weight that all experts of a member share, and the parts that it is read from."""
        file, endings = self._file(place), suffixes(weight) if weight.quantized else ("",)
        # Tensors of a checkpoint may differ in their type.
        key = member, file.entries[place.name + endings[0]].dtype
        if key not in self._kept:
            parts = tuple(_Part(file, place, suffix) for suffix in endings)
            self._kept[key] = _weight(weight, parts), parts
        return self._kept[key]

    def _file(self, place: TensorRows) -> TensorFile:
        if self._quantized is not None:
            return self._quantized
        assert self._checkpoint is not None  # weights with values
        if self._checkpoint.dtype(place.name) is None:
            raise CheckpointError(
                f"{self._checkpoint.folder} has no expert in one piece of safetensors, as floats are read.",
                fix="Choose precision w4a16, or leave the memory budget of experts out.",
            )
        return self._checkpoint.file(place.name)

    def _stream(self, place: TensorRows) -> _Stream:
        file = self._file(place)
        if file not in self._streams:
            self._streams[file] = _Stream(file)
        return self._streams[file]


class _Part:
    """Memory for the rows of one tensor of a file; experts have as many rows each.

    Args:
        file: The file.
        place: The rows of one expert.
        suffix: Ending of the tensor's name in the file.
    """

    def __init__(self, file: TensorFile, place: TensorRows, suffix: str) -> None:
        shape = file.entries[place.name + suffix].shape
        kind = DATA_TYPES[file.entries[place.name + suffix].dtype]
        # A stack of matrices counts the rows of all.
        own = shape[1:] if suffix else shape[-1:]
        self.suffix = suffix
        self.values: NDArray[Any] = np.empty((place.stop - place.start, *own), kind)
        self.raw = self.values.reshape(-1).view(np.uint8).data
        self.row_bytes = self.values[0].nbytes


class _Stream:
    """An open file of weights, whose size and time of change are those of its opening."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        try:
            self._raw = file.path.open("rb", buffering=0)
            self._first_byte = 8 + int.from_bytes(self._raw.read(8) or b"", "little")
        except OSError as error:
            raise CheckpointError(f"Cannot read {file.path}: {error.strerror}.") from error
        self._stamp = self._present()
        if self._stamp[0] != self._first_byte + len(file.data):
            raise self._changed()
        # Only Linux has this call; elsewhere the read itself waits.
        self._advise = getattr(os, "posix_fadvise", None)
        self._will_need = getattr(os, "POSIX_FADV_WILLNEED", 0)

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def read_ahead(self, place: TensorRows, part: _Part) -> None:
        """Ask the system to read rows in the background."""
        if self._advise is not None:
            self._advise(self._raw.fileno(), self._start(place, part), part.raw.nbytes, self._will_need)

    def read(self, place: TensorRows, part: _Part) -> None:
        """Read the rows of a place into a part's memory."""
        try:
            self._raw.seek(self._start(place, part))
            done = 0
            while done < part.raw.nbytes:
                count = self._raw.readinto(part.raw[done:])
                if not count:
                    raise self._changed()
                done += count
        except OSError as error:
            raise CheckpointError(
                f"Cannot read weights of experts from {self._file.path}: {error.strerror}.",
                fix="Check the disk, and load the model again.",
            ) from error
        # Behind the read: a change during it counts, too.
        if self._present() != self._stamp:
            raise self._changed()

    def _start(self, place: TensorRows, part: _Part) -> int:
        entry = self._file.entries[place.name + part.suffix]
        return int(self._first_byte + entry.start + place.start * part.row_bytes)

    def _present(self) -> tuple[int, int]:
        status = os.fstat(self._raw.fileno())
        return status.st_size, status.st_mtime_ns

    def _changed(self) -> CheckpointError:
        return CheckpointError(
            f"{self._file.path} changed while the model was loaded, so that its experts cannot be read.",
            fix="Load the model again.",
        )


def _unusable(name: str, values: NDArray[Any]) -> CheckpointError:
    """Return the error of a tensor whose values are not finite, or not in the range of its format."""
    if np.isfinite(as_float32(values)).all():
        return beyond_float16(name)
    return CheckpointError(f"Tensor {name} holds NaN or infinite values.", fix="Download it again.")


def _weight(weight: WeightFormat, parts: Sequence[_Part]) -> LinearWeight:
    """Return a weight over the memory of its parts, or memory for their values in the weight's format."""
    if not weight.quantized:
        return np.empty(parts[0].values.shape, np.float32 if weight.bits == 32 else np.float16)
    return quantized_tensor(weight, {part.suffix: part.values for part in parts})
