"""Every operator of every part of a device, run on small random data against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from heterollm.errors import HeteroLLMError
from heterollm.kernels import reference, reference_layers
from heterollm.kernels.device import Device
from heterollm.kernels.gpu_layers import (
    STEP_HEAD_ROW,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GpuLayers,
    Segments,
    head_stride,
)
from heterollm.kernels.gpu_linear import GpuLinear
from heterollm.kernels.npu import Form, NpuBackend, NpuSlice
from heterollm.kernels.opencl_launch import Launch
from heterollm.kernels.opencl_memory import SharedArray
from heterollm.kernels.opencl_runtime import OpenClError
from heterollm.kernels.ops import Activation, WeightFormat
from heterollm.kernels.quantize import quantize
from heterollm.kernels.quantized_tensor import LinearWeight
from heterollm.kernels.tolerances import LINEAR_NMSE, SINGLE_FACTOR, ComputeType, linear_errors

__all__ = ["Case", "Check", "device_cases", "run_case"]

Part = Literal["GPU", "NPU"]
Status = Literal["pass", "fail", "not offered"]
Numbers: TypeAlias = tuple[NDArray[Any], NDArray[np.float64]]
"""What the part computed and the exact result, both ``[m, n]``."""

FORMATS: Final = (
    *(WeightFormat(4, block, symmetric) for symmetric in (True, False) for block in (32, 64, 128)),
    WeightFormat(8, 32),
    WeightFormat(8, 32, symmetric=False),
    WeightFormat(16),
    WeightFormat(32),
)
COLUMNS: Final = 256
MEMBERS: Final = (192, 100)
NPU_ROWS: Final = 256
HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 4, 2, 32, 80


class Shape(TypedDict):
    """What the attention's launches take of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int


SHAPE: Final[Shape] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "capacity": CAPACITY}
EPSILON: Final = 1e-5
SEED: Final = 20260101


@dataclass(frozen=True, slots=True)
class Check:
    """What came out of one case.

    Args:
        part: ``GPU`` or ``NPU``.
        operator: The operator and its number format.
        case: Lengths, form and cut.
        status: Whether the error is within the gate; ``not offered`` where the part does not claim it.
        error: NMSE, the larger of the whole's and a tenth of the worst row's or token's; None if it raised.
        gate: What the error is held to.
        message: What went wrong.
        fix: What to do about it.
    """

    part: Part
    operator: str
    case: str
    status: Status
    error: float | None
    gate: float
    message: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One check to run; without ``run`` the part does not offer the operator."""

    part: Part
    operator: str
    case: str
    run: Callable[[], Numbers] | None


def run_case(case: Case, compute: ComputeType) -> Check:
    """Run one case and hold its error against the gate; a case that raises is a failed check."""
    gate = LINEAR_NMSE[compute]
    if case.run is None:
        return Check(case.part, case.operator, case.case, "not offered", None, gate)
    try:
        errors = linear_errors(*case.run())
    except HeteroLLMError as error:
        fix = error.fix or _advice(case.part)
        return Check(case.part, case.operator, case.case, "fail", None, gate, error.message, fix)
    except OpenClError as error:
        return Check(case.part, case.operator, case.case, "fail", None, gate, str(error), _advice(case.part))
    singles = errors.worst_row / SINGLE_FACTOR, errors.worst_token / SINGLE_FACTOR
    # NaN must win, which max() does not promise.
    worst = float(np.max([errors.nmse, *singles]))
    # JSON has no NaN; the message has.
    finite = worst if np.isfinite(worst) else None
    if errors.within(compute):
        return Check(case.part, case.operator, case.case, "pass", worst, gate)
    message = f"The numbers are wrong: NMSE {worst:.1e}, and the gate is {gate:.0e}."
    return Check(case.part, case.operator, case.case, "fail", finite, gate, message, _advice(case.part))


def device_cases(device: Device) -> list[Case]:
    """Return every check of a device, the GPU's first."""
    cases = [*_gpu_linear_cases(device), *_gpu_layer_cases(device)]
    if device.npu is not None:
        cases += _npu_cases(device.npu)
    return cases


def _advice(part: Part) -> str:
    if part == "GPU":
        return "Update the OpenCL driver, or use another OpenCL runtime."
    return "Use plan level gpu, and update onnxruntime, onnxruntime-qnn and the NPU driver."


def _random_weight(generator: np.random.Generator, rows: int, number_format: WeightFormat) -> LinearWeight:
    values = generator.standard_normal((rows, COLUMNS), np.float32)
    if number_format.bits == 32:
        return values
    if number_format.bits == 16:
        return values.astype(np.float16)
    bits: Literal[4, 8] = 4 if number_format.bits == 4 else 8
    return quantize(values, bits=bits, block=number_format.block, symmetric=number_format.symmetric)


# -- the GPU's linear layers -------------------------------------------------------------------------


def _gpu_linear_cases(device: Device) -> Iterator[Case]:
    whole = tuple((0, rows) for rows in MEMBERS)
    cut = ((128, MEMBERS[0]), (0, MEMBERS[1]))
    for number_format in FORMATS:
        operator = f"linear {number_format}"
        for tokens, kept in ((1, whole), (37, whole), (37, cut)):
            case = f"{tokens} token{'s' * (tokens > 1)}{', cut' * (kept is cut)}"
            yield Case("GPU", operator, case, _gpu_linear(device, number_format, tokens, kept))
    for number_format in (WeightFormat(8, 32), WeightFormat(16)):
        yield Case("GPU", f"embedding {number_format}", "5 tokens", _gpu_embedding(device, number_format))


def _gpu_linear(
    device: Device, number_format: WeightFormat, tokens: int, kept: Sequence[tuple[int, int]]
) -> Callable[[], Numbers]:
    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        dtype = device.activation_dtype
        members = [_random_weight(generator, rows, number_format) for rows in MEMBERS]
        x = generator.standard_normal((tokens, COLUMNS), np.float32).astype(dtype)
        y = device.gpu.shared((tokens, sum(stop - start for start, stop in kept)), dtype)
        linear = GpuLinear.pack(device.gpu, members, activation_dtype=dtype)
        _run(device, [linear.launch(_slot(device, x), y, tokens=tokens, kept=kept, label="doctor")])
        return _read(y), reference.linear(x, members, kept)

    return run


def _gpu_embedding(device: Device, number_format: WeightFormat) -> Callable[[], Numbers]:
    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        table = _random_weight(generator, 70, number_format)
        tokens = np.array([0, 69, 64, 63, 7], np.int32)
        y = device.gpu.shared((len(tokens), COLUMNS), np.float32)
        linear = GpuLinear.pack(device.gpu, [table], activation_dtype=device.activation_dtype)
        _run(device, [linear.embed_launch(_slot(device, tokens), y, count=len(tokens))])
        return _read(y), reference.embedding(tokens, table)

    return run


# -- what the GPU does between them ------------------------------------------------------------------


def _gpu_layer_cases(device: Device) -> Iterator[Case]:
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
    arguments = _slot(device, residual), device.gpu.upload(weight), out
    added = reference_layers.rms_norm(delta, weight, EPSILON) if post else delta
    options: dict[str, Any] = {"hidden": hidden, "epsilon": EPSILON, "delta": segments}
    if final:
        launch = layers.final_norm(*arguments, _step(device, 0, tokens, first), rows=rows, **options)
    else:
        options["post"] = arguments[1] if post else None
        launch = layers.rms_norm(*arguments, tokens=tokens, **options)
    _run(device, [launch])
    summed = (residual.astype(np.float64) + added)[first : first + rows]
    return _read(out), reference_layers.rms_norm(summed, weight, EPSILON)


def _rope_runner(
    device: Device, layers: GpuLayers, member: int, *, normed: bool = False
) -> Callable[[], Numbers]:
    """Return a check of the queries (0), the keys (1) or the values (2) that one launch writes."""

    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        tokens, position = 7, 11
        rows = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
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
            device.gpu.upload(cos),
            device.gpu.upload(sin),
            queries,
            cache,
            _step(device, position, tokens, 0),
            layer=0,
            tokens=tokens,
            norms=device.gpu.upload(norms) if normed else None,
            epsilon=EPSILON,
            **SHAPE,
        )
        _run(device, [launch])
        inputs = np.split(qkv.astype(np.float64) + bias, np.cumsum(rows)[:-1], axis=1)
        exact = inputs[member].reshape(tokens, -1, HEAD_DIM)
        if normed:
            heads = exact.reshape(-1, HEAD_DIM)
            exact = reference_layers.rms_norm(heads, norms[member], EPSILON).reshape(exact.shape)
        if member < 2:
            span = slice(position, position + tokens)
            exact = reference_layers.rotate(exact, cos[span], sin[span])
        if member == 0:
            return _read(queries), exact.reshape(tokens, -1)
        written = _cache_view(_read(cache))[member - 1, :, position : position + tokens]
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
            _slot(device, queries),
            cache,
            out,
            _step(device, position, tokens, 0),
            layer=0,
            tokens=tokens,
            bucket=CAPACITY,
            scale=HEAD_DIM**-0.5,
            soft_cap=soft_cap,
            **SHAPE,
        )
        _run(device, launches)
        heads = queries.reshape(tokens, HEADS, HEAD_DIM)
        options = {"scale": HEAD_DIM**-0.5, "soft_cap": soft_cap}
        expected = reference_layers.attention(heads, *exact, position=position, **options)
        return _read(out), expected.reshape(tokens, -1)

    return run


def _gated(device: Device, layers: GpuLayers, activation: Activation) -> Numbers:
    generator = np.random.default_rng(SEED)
    tokens, width = 5, 160
    gate_up = generator.standard_normal((tokens, 2 * width), np.float32).astype(device.activation_dtype)
    out = device.gpu.shared((tokens, width), device.activation_dtype)
    segments = _segments(device, gate_up, (width, width), (64, 64))
    options: dict[str, Any] = {"intermediate": width, "activation": activation}
    _run(device, [layers.gated_activation(segments, out, tokens=tokens, **options)])
    return _read(out), reference_layers.gated_activation(gate_up[:, :width], gate_up[:, width:], activation)


def _capped(device: Device, layers: GpuLayers) -> Numbers:
    logits = np.linspace(-40.0, 40.0, 300, dtype=np.float32)[None]
    slot = _slot(device, logits)
    _run(device, [layers.soft_cap(slot, 30.0, rows=1, vocabulary=logits.shape[1])])
    return _read(slot), reference_layers.capped(logits, 30.0)


def _join(device: Device, layers: GpuLayers) -> Numbers:
    generator = np.random.default_rng(SEED)
    rows, vocabulary = 3, 300
    logits = generator.standard_normal((rows, vocabulary), np.float32).astype(device.activation_dtype)
    out = device.gpu.shared((rows, vocabulary), np.float32)
    segments = _segments(device, logits, (vocabulary,), (256,))
    _run(device, [layers.join_logits(segments, out, rows=rows)])
    return _read(out), logits.astype(np.float64)


# -- the NPU -----------------------------------------------------------------------------------------


def _npu_cases(npu: NpuBackend) -> Iterator[Case]:
    # Every length is a graph of its own, and the emulator takes a second for each.
    lengths = [length for length in npu.standard_lengths if length in (1, 32, 256)]
    if npu.time_kind == "emulated":
        lengths = lengths[:2]
    for number_format in FORMATS:
        operator = f"linear {number_format}"
        forms = {length: npu.forms(number_format, columns=COLUMNS, length=length) for length in lengths}
        if not any(forms.values()):
            yield Case("NPU", operator, "", None)
        for form in dict.fromkeys(form for legal in forms.values() for form in legal):
            for length in lengths:
                if form not in forms[length]:
                    continue
                case = f"{form}, {length} token{'s' * (length > 1)}"
                yield Case("NPU", operator, case, _npu_linear(npu, number_format, form, length))


def _npu_linear(
    npu: NpuBackend, number_format: WeightFormat, form: Form, length: int
) -> Callable[[], Numbers]:
    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        weight = _random_weight(generator, NPU_ROWS, number_format)
        x = generator.standard_normal((length, COLUMNS), np.float32).astype(npu.activation_dtype)
        y = np.zeros((length, NPU_ROWS), npu.activation_dtype)
        key = f"doctor {SEED} {number_format}"
        part = NpuSlice(weight, 0, "doctor", ((0, NPU_ROWS),), key)
        npu.prepare(part, length, form).bind(x, y)()
        return y, reference.linear(x, [weight])

    return run


# -- memory ------------------------------------------------------------------------------------------


def _slot(device: Device, values: NDArray[Any]) -> SharedArray:
    slot = device.gpu.shared(values.shape, values.dtype)
    slot.acquire()
    slot.array[...] = values
    slot.release()
    return slot


def _read(slot: SharedArray) -> NDArray[Any]:
    slot.acquire()
    values = slot.array.copy()
    slot.release()
    return values


def _segments(
    device: Device, values: NDArray[Any], rows: tuple[int, ...], splits: tuple[int, ...]
) -> Segments:
    a, b = reference_layers.split_members(values, rows, splits)
    return Segments(_slot(device, a), _slot(device, b), rows, splits)


def _step(device: Device, position: int, length: int, head_row: int) -> SharedArray:
    words = np.zeros(STEP_WORDS, np.int32)
    words[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, length, head_row
    return _slot(device, words)


def _empty_cache(device: Device) -> SharedArray:
    stride = head_stride(CAPACITY, HEAD_DIM, device.cache_dtype)
    return device.gpu.shared((2 * KV_HEADS * stride,), device.cache_dtype)


def _cache_view(memory: NDArray[Any]) -> NDArray[Any]:
    """Return one layer's cache as ``[k|v, kv_head, position, head_dim]``."""
    blocks = memory.reshape(2, KV_HEADS, -1)
    return blocks[:, :, : CAPACITY * HEAD_DIM].reshape(2, KV_HEADS, CAPACITY, HEAD_DIM)


def _run(device: Device, launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()
    device.gpu.finish()
