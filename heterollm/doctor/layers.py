"""The doctor's checks of what the GPU does between the linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.doctor.case import Case, Numbers
from heterollm.doctor.data import SEED, filled_slot, run_launches, slot_values
from heterollm.kernels.device import Device
from heterollm.kernels.formats import reference_layers
from heterollm.kernels.gpu import (
    STEP_HEAD_ROW,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GpuLayers,
    HeadShape,
    KvLayer,
    Rotation,
    Scores,
    Segments,
    SharedArray,
    head_stride,
)
from heterollm.kernels.ops import Activation

__all__ = ["gpu_layer_cases"]

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 4, 2, 32, 80


SHAPE: Final = HeadShape(HEADS, KV_HEADS, HEAD_DIM, CAPACITY)
EPSILON: Final = 1e-5


def gpu_layer_cases(device: Device) -> Iterator[Case]:
    """Yield every operator, with cut inputs where it reads a linear layer's output."""
    layers = GpuLayers(device.gpu, device.activation_dtype, device.cache_dtype)
    yield Case("GPU", "norm with residual", "5 tokens, cut", lambda: _norm(device, layers))
    yield Case("GPU", "norm with residual", "normed delta", lambda: _norm(device, layers, post=True))
    yield Case("GPU", "final norm", "3 of 5 tokens, cut", lambda: _norm(device, layers, final=True))
    for member, name in enumerate(("queries", "keys", "values")):
        case = f"7 tokens at 11, cut, {name}"
        yield Case("GPU", "RoPE and KV write", case, _rope_runner(device, layers, member))
    for member, name in enumerate(("queries", "keys")):
        case = f"normed heads, {name}"
        yield Case("GPU", "RoPE and KV write", case, _rope_runner(device, layers, member, normed=True))
    yield Case("GPU", "attention, prefill", "37 tokens at 11", _attention_runner(device, layers, 37, 11))
    yield Case("GPU", "attention, decode", "1 token at 70", _attention_runner(device, layers, 1, 70))
    capped = _attention_runner(device, layers, 1, 70, soft_cap=0.5)
    yield Case("GPU", "attention, decode", "1 token at 70, capped", capped)
    yield Case("GPU", "gated activation", "5 tokens, cut", lambda: _gated(device, layers, "silu"))
    yield Case("GPU", "gated activation", "5 tokens, GELU", lambda: _gated(device, layers, "gelu_tanh"))
    yield Case("GPU", "soft cap of the logits", "1 row", lambda: _capped(device, layers))
    yield Case("GPU", "join of the logits", "3 tokens, cut", lambda: _join(device, layers))


def _norm(device: Device, layers: GpuLayers, *, final: bool = False, post: bool = False) -> Numbers:
    generator = np.random.default_rng(SEED)
    hidden, tokens = 192, 5
    first, rows = (2, 3) if final else (0, tokens)
    residual = generator.standard_normal((tokens, hidden), np.float32)
    weight = generator.uniform(0.5, 1.5, hidden).astype(np.float32)
    delta = generator.standard_normal((tokens, hidden), np.float32).astype(device.activation_dtype)
    segments = _segments(device, delta, (hidden,), (64,))
    out = device.gpu.shared((rows, hidden), device.activation_dtype)
    arguments = filled_slot(device, residual), device.gpu.upload(weight), out
    added = reference_layers.rms_norm(delta, weight, EPSILON) if post else delta
    if final:
        step = _step(device, 0, tokens, first)
        launch = layers.final_norm(*arguments, step, rows=rows, epsilon=EPSILON, delta=segments)
    else:
        launch = layers.rms_norm(
            *arguments,
            hidden=hidden,
            tokens=tokens,
            epsilon=EPSILON,
            delta=segments,
            post=arguments[1] if post else None,
        )
    run_launches(device, [launch])
    summed = (residual.astype(np.float64) + added)[first : first + rows]
    return slot_values(out), reference_layers.rms_norm(summed, weight, EPSILON)


def _rope_runner(
    device: Device, layers: GpuLayers, member: int, *, normed: bool = False
) -> Callable[[], Numbers]:
    """Return a check of the queries (0), the keys (1) or the values (2) that one launch writes."""

    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        tokens, position = 7, 11
        rows = SHAPE.rows
        qkv = generator.standard_normal((tokens, sum(rows)), np.float32).astype(device.activation_dtype)
        bias = generator.standard_normal(sum(rows), np.float32)
        angles = generator.uniform(0.0, 6.0, (CAPACITY, HEAD_DIM // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        norms = generator.uniform(0.5, 1.5, (2, HEAD_DIM)).astype(np.float32)
        queries = device.gpu.shared((tokens, rows[0]), np.float32)
        cache = _empty_cache(device)
        launch = layers.rope_and_store(
            _segments(device, qkv, rows, (64, 32, 0)),
            device.gpu.upload(bias),
            queries,
            KvLayer(cache, 0),
            _step(device, position, tokens, 0),
            shape=SHAPE,
            rotation=Rotation(
                device.gpu.upload(cos),
                device.gpu.upload(sin),
                norms=device.gpu.upload(norms) if normed else None,
                epsilon=EPSILON,
            ),
            tokens=tokens,
        )
        run_launches(device, [launch])
        inputs = np.split(qkv.astype(np.float64) + bias, np.cumsum(rows)[:-1], axis=1)
        exact = inputs[member].reshape(tokens, -1, HEAD_DIM)
        if normed:
            heads = exact.reshape(-1, HEAD_DIM)
            exact = reference_layers.rms_norm(heads, norms[member], EPSILON).reshape(exact.shape)
        if member < 2:
            span = slice(position, position + tokens)
            exact = reference_layers.rotate(exact, cos[span], sin[span])
        if member == 0:
            return slot_values(queries), exact.reshape(tokens, -1)
        written = _cache_view(slot_values(cache))[member - 1, :, position : position + tokens]
        return written.transpose(1, 0, 2).reshape(tokens, -1), exact.reshape(tokens, -1)

    return run


def _attention_runner(
    device: Device, layers: GpuLayers, tokens: int, position: int, *, soft_cap: float = 0.0
) -> Callable[[], Numbers]:
    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        queries = generator.standard_normal((tokens, HEADS * HEAD_DIM), np.float32)
        cache = _empty_cache(device)
        cache.acquire()
        held = _cache_view(cache.array)
        held[...] = generator.standard_normal(held.shape, np.float32)
        exact = held.astype(np.float64)
        cache.release()
        out = device.gpu.shared(queries.shape, device.activation_dtype)
        launches = layers.attention(
            filled_slot(device, queries),
            KvLayer(cache, 0),
            out,
            _step(device, position, tokens, 0),
            shape=SHAPE,
            scores=Scores(HEAD_DIM**-0.5, soft_cap=soft_cap),
            tokens=tokens,
            bucket=CAPACITY,
        )
        run_launches(device, launches)
        heads = queries.reshape(tokens, HEADS, HEAD_DIM)
        options = {"scale": HEAD_DIM**-0.5, "soft_cap": soft_cap}
        expected = reference_layers.attention(heads, *exact, position=position, **options)
        return slot_values(out), expected.reshape(tokens, -1)

    return run


def _gated(device: Device, layers: GpuLayers, activation: Activation) -> Numbers:
    generator = np.random.default_rng(SEED)
    tokens, width = 5, 160
    gate_up = generator.standard_normal((tokens, 2 * width), np.float32).astype(device.activation_dtype)
    out = device.gpu.shared((tokens, width), device.activation_dtype)
    segments = _segments(device, gate_up, (width, width), (64, 64))
    options: dict[str, Any] = {"intermediate": width, "activation": activation}
    run_launches(device, [layers.gated_activation(segments, out, tokens=tokens, **options)])
    return slot_values(out), reference_layers.gated_activation(
        gate_up[:, :width], gate_up[:, width:], activation
    )


def _capped(device: Device, layers: GpuLayers) -> Numbers:
    logits = np.linspace(-40.0, 40.0, 300, dtype=np.float32)[None]
    slot = filled_slot(device, logits)
    run_launches(device, [layers.soft_cap(slot, 30.0, rows=1, vocabulary=logits.shape[1])])
    return slot_values(slot), reference_layers.capped(logits, 30.0)


def _join(device: Device, layers: GpuLayers) -> Numbers:
    generator = np.random.default_rng(SEED)
    rows, vocabulary = 3, 300
    logits = generator.standard_normal((rows, vocabulary), np.float32).astype(device.activation_dtype)
    out = device.gpu.shared((rows, vocabulary), np.float32)
    segments = _segments(device, logits, (vocabulary,), (256,))
    run_launches(device, [layers.join_logits(segments, out, rows=rows)])
    return slot_values(out), logits.astype(np.float64)


def _segments(
    device: Device, values: NDArray[Any], rows: tuple[int, ...], splits: tuple[int, ...]
) -> Segments:
    a, b = reference_layers.split_members(values, rows, splits)
    return Segments(filled_slot(device, a), filled_slot(device, b), rows, splits)


def _step(device: Device, position: int, length: int, head_row: int) -> SharedArray:
    words = np.zeros(STEP_WORDS, np.int32)
    words[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, length, head_row
    return filled_slot(device, words)


def _empty_cache(device: Device) -> SharedArray:
    stride = head_stride(CAPACITY, HEAD_DIM, device.cache_dtype)
    return device.gpu.shared((2 * KV_HEADS * stride,), device.cache_dtype)


def _cache_view(memory: NDArray[Any]) -> NDArray[Any]:
    """Return one layer's cache as ``[k|v, kv_head, position, head_dim]``."""
    blocks = memory.reshape(2, KV_HEADS, -1)
    return blocks[:, :, : CAPACITY * HEAD_DIM].reshape(2, KV_HEADS, CAPACITY, HEAD_DIM)
