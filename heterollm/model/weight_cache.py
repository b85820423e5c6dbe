"""The cache file of a model's quantised weights: written in one pass, checked on every load."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, EngineError, locked
from heterollm.kernels.formats import QuantizedTensor, largest_weight, quantize, scale_of_largest
from heterollm.kernels.ops import WeightFormat
from heterollm.kernels.threads import allowed_cores
from heterollm.model.checkpoint import Checkpoint
from heterollm.model.tensor_file import (
    CHECKSUMS,
    TensorEntry,
    TensorFile,
    checksums,
    layout_tensors,
    written_tensors,
)

logger = logging.getLogger(__name__)

ByteProgress = Callable[[int, int], None]
"""Called with the bytes done and the total."""

SCHEMA = "1"
ERRORS = "stored_errors"
CODES, SCALES, ZERO_POINTS, MINIMUMS = ".codes", ".scales", ".zero_points", ".minimums"

SLAB_WEIGHTS = 4 * 1024 * 1024
"""Weights that a thread reads and quantises at once: 16 MB of float32."""

T = TypeVar("T")

Slab = tuple[str, int, int]
"""A tensor's name and a range of its rows."""

Squares = tuple[float, float]
"""The sum of squares of an error, and that of the values."""

TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content of a cache file.

    Args:
        key: Hash of everything that determines the values.
        formats: Number format of each tensor to quantise.
        floats: Tensors to store as float32.
        stored: Tensors of ``formats`` that the checkpoint stores quantised; the file has the error of each.
    """

    key: str
    formats: Mapping[str, WeightFormat]
    floats: tuple[str, ...]
    stored: tuple[str, ...] = ()


def cached_tensors(
    path: Path,
    checkpoint: Checkpoint,
    recipe: Recipe,
    progress: ByteProgress | None = None,
    cancelled: threading.Event | None = None,
) -> TensorFile:
    """Return the file of quantised weights; write it first if it is missing or damaged.

    Args:
        path: The cache file.
        checkpoint: Source of the weights.
        recipe: Required content of the file.
        progress: Called with the quantised bytes of the checkpoint.
        cancelled: Stops the work when set.

    Raises:
        CheckpointError: A weight of the checkpoint cannot be used.
        CacheError: The file cannot be written.
        EngineError: ``cancelled`` was set.
    """
    entries = layout_tensors(_tensors(checkpoint, recipe))
    # A read-only folder has no place for the lock; without it a file is still complete, as it is replaced
    # atomically.
    file = _open_checked(path, recipe, entries) if path.exists() else None
    if file is not None:
        return file
    with locked(path):
        # Another process may have written it meanwhile.
        file = _open_checked(path, recipe, entries) if path.exists() else None
        if file is not None:
            return file
        _write(path, checkpoint, recipe, entries, progress, cancelled)
        return TensorFile.open(path)


def quantized_view(file: TensorFile, name: str, weight: WeightFormat) -> QuantizedTensor:
    """Return a quantised tensor over the mapped file."""
    parts = {suffix: file.bits(name + suffix) for suffix in suffixes(weight)}
    return quantized_tensor(weight, parts)


def suffixes(weight: WeightFormat) -> tuple[str, ...]:
    """Return the endings of the names of a quantised weight's tensors."""
    if weight.symmetric:
        return CODES, SCALES
    return CODES, SCALES, MINIMUMS if weight.minimum else ZERO_POINTS


def quantized_tensor(weight: WeightFormat, parts: Mapping[str, NDArray[Any]]) -> QuantizedTensor:
    """Return a quantised weight over its tensors by the endings of their names."""
    bits: Literal[4, 8] = 4 if weight.bits == 4 else 8
    kind = parts.get(ZERO_POINTS), bits, weight.block, weight.scales, parts.get(MINIMUMS)
    return QuantizedTensor(parts[CODES], parts[SCALES], *kind)


def stored_errors(file: TensorFile, recipe: Recipe) -> dict[str, float]:
    """Return the error of each stored tensor against the checkpoint's values: squares over their squares."""
    if not recipe.stored:
        return {}
    return dict(zip(recipe.stored, file.bits(ERRORS).astype(float).tolist(), strict=True))


def _tensors(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, weight in recipe.formats.items():
        rows, columns = checkpoint.matrix_shape(name)
        blocks = columns // weight.block
        kinds = {
            CODES: ("U8", (rows, blocks, weight.block * weight.bits // 8)),
            SCALES: ("F16", (rows, blocks)),
            ZERO_POINTS: ("U8", (rows, -(-blocks * weight.bits // 8))),
            MINIMUMS: ("F16", (rows, blocks)),
        }
        tensors.update({name + suffix: kinds[suffix] for suffix in suffixes(weight)})
    tensors.update({name: ("F32", checkpoint.shape(name)) for name in recipe.floats})
    if recipe.stored:
        tensors[ERRORS] = ("F32", (len(recipe.stored),))
    tensors[CHECKSUMS] = ("U32", (len(tensors),))
    return tensors


def _open_checked(path: Path, recipe: Recipe, entries: dict[str, TensorEntry]) -> TensorFile | None:
    """Map a cache file; return None with a warning if it is damaged or has other content."""
    try:
        file = TensorFile.open(path)
    except CheckpointError as error:
        reason = error.message
    else:
        if file.metadata.get("schema") != SCHEMA or file.metadata.get("key") != recipe.key:
            reason = "it belongs to other weights"
        elif file.entries != entries:
            reason = "it lists other tensors"
        elif not np.array_equal(checksums(file), file.bits(CHECKSUMS)):
            reason = "its checksums do not match"
        else:
            return file
    logger.warning("The quantised weights in %s are damaged and are made again: %s.", path, reason)
    return None


def _write(
    path: Path,
    checkpoint: Checkpoint,
    recipe: Recipe,
    entries: dict[str, TensorEntry],
    progress: ByteProgress | None,
    cancelled: threading.Event | None,
) -> None:
    metadata = {"schema": SCHEMA, "key": recipe.key, "model": checkpoint.folder.resolve().name}
    with written_tensors(path, entries, metadata) as put:
        for name in recipe.floats:
            put(name, checkpoint.read(name))
        errors = {name: np.zeros(2) for name in recipe.stored}
        with contextlib.closing(_quantized_slabs(checkpoint, recipe, progress, cancelled)) as slabs:
            for name, first_row, (part, squares) in slabs:
                if name in errors:
                    errors[name] += squares
                arrays = (part.codes, part.scales, part.zero_points, part.minimums)
                for suffix, values in zip((CODES, SCALES, ZERO_POINTS, MINIMUMS), arrays, strict=True):
                    if values is not None:
                        put(name + suffix, values, first_row * values[0].nbytes)
        if errors:
            put(ERRORS, np.array([off / max(all_of, TINY) for off, all_of in errors.values()], np.float32))


def _quantized_slabs(
    checkpoint: Checkpoint, recipe: Recipe, progress: ByteProgress | None, cancelled: threading.Event | None
) -> Generator[tuple[str, int, tuple[QuantizedTensor, Squares]], None, None]:
    """Quantise all tensors on all cores; yield the name, first row and result of each slab of rows.

    Tensors with one scale are read twice: first for their largest weight.
    """
    slabs = [
        (name, start, min(start + rows_at_once, rows))
        for name in recipe.formats
        for rows, columns in [checkpoint.matrix_shape(name)]
        for rows_at_once in [max(1, SLAB_WEIGHTS // columns)]
        for start in range(0, rows, rows_at_once)
    ]

    whole = [slab for slab in slabs if recipe.formats[slab[0]].scales == "tensor"]
    found: dict[str, float] = {}
    for (name, *_), largest in _in_parallel(lambda slab: _largest(checkpoint, slab), whole):
        _check_not_stopped(cancelled)
        found[name] = max(found.get(name, 0.0), largest)
    tensor_scales = {name: scale_of_largest(largest) for name, largest in found.items()}

    def work(slab: Slab) -> tuple[QuantizedTensor, Squares]:
        name, *rows = slab
        weight = recipe.formats[name]
        return _quantize_rows(checkpoint, name, (rows[0], rows[1]), weight, tensor_scales.get(name))

    total_bytes = sum(checkpoint.size_bytes(name) for name in recipe.formats)
    done_bytes = 0
    for (name, start, stop), part in _in_parallel(work, slabs):
        _check_not_stopped(cancelled)
        yield name, start, part
        done_bytes += checkpoint.size_bytes(name) * (stop - start) // checkpoint.matrix_shape(name)[0]
        if progress is not None:
            progress(done_bytes, total_bytes)


def _check_not_stopped(cancelled: threading.Event | None) -> None:
    if cancelled is not None and cancelled.is_set():
        raise EngineError("Quantising was stopped.")


def _largest(checkpoint: Checkpoint, slab: Slab) -> float:
    name, start, stop = slab
    values = checkpoint.read(name, (start, stop))
    with _naming(name):
        return largest_weight(values)


def _quantize_rows(
    checkpoint: Checkpoint, name: str, rows: tuple[int, int], weight: WeightFormat, tensor_scale: float | None
) -> tuple[QuantizedTensor, Squares]:
    """Return rows in a canonical format, with the squares of what they lack against stored integers."""
    values = checkpoint.read(name, rows)
    bits: Literal[4, 8] = 4 if weight.bits == 4 else 8
    with _naming(name):
        found = checkpoint.canonical(name, rows, weight)
        if found is None:
            found = quantize(
                values,
                bits=bits,
                block=weight.block,
                symmetric=weight.symmetric or (weight.minimum and bits == 8),
                scale_kind=weight.scales,
                tensor_scale=tensor_scale,
            )
            found = found.with_minimums() if weight.minimum else found
    if checkpoint.kind(name) is None:
        return found, (0.0, 0.0)
    lacking = found.dequantize() - values
    return found, (float(np.vdot(lacking, lacking)), float(np.vdot(values, values)))


@contextlib.contextmanager
def _naming(tensor: str) -> Iterator[None]:
    """Name a tensor in errors of its values."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"Tensor {tensor}: {error.message}", fix=error.fix) from error


def _in_parallel(work: Callable[[Slab], T], slabs: Iterable[Slab]) -> Iterator[tuple[Slab, T]]:
    """Yield each slab with its result, in order, while only a few results wait."""
    workers = len(allowed_cores())
    waiting: deque[tuple[Slab, Future[T]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="quantize")
    try:
        for slab in slabs:
            waiting.append((slab, pool.submit(work, slab)))
            if len(waiting) > workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
