"""The doctor's checks of the linear layers and the embedding, on either part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from heterollm.doctor.case import COLUMNS, SEED, Case
from heterollm.kernels.cases import Numbers, fill_slot, run_launches, slot_values
from heterollm.kernels.device import Device
from heterollm.kernels.formats import random_weight, reference
from heterollm.kernels.gpu import GpuLinear
from heterollm.kernels.npu import GraphForm, LinearShard, NpuBackend
from heterollm.kernels.ops import WeightFormat

__all__ = ["gpu_linear_cases", "npu_cases"]

FORMATS: Final = (
    *(WeightFormat(4, block, symmetric) for symmetric in (True, False) for block in (32, 64, 128)),
    WeightFormat(8, 32),
    WeightFormat(8, 32, symmetric=False),
    WeightFormat(16),
    WeightFormat(32),
)
MEMBERS: Final = (192, 100)
NPU_ROWS: Final = 256


def gpu_linear_cases(device: Device) -> Iterator[Case]:
    """Yield every number format, for one token and many, whole and cut."""
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
        members = [random_weight(generator, rows, COLUMNS, number_format) for rows in MEMBERS]
        x = generator.standard_normal((tokens, COLUMNS), np.float32).astype(dtype)
        y = device.gpu.shared((tokens, sum(stop - start for start, stop in kept)), dtype)
        linear = GpuLinear.pack(device.gpu, members, activation_dtype=dtype)
        run_launches(
            device.gpu, [linear.launch(fill_slot(device.gpu, x), y, tokens=tokens, kept=kept, label="doctor")]
        )
        return slot_values(y), reference.linear(x, members, kept)

    return run


def _gpu_embedding(device: Device, number_format: WeightFormat) -> Callable[[], Numbers]:
    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        table = random_weight(generator, 70, COLUMNS, number_format)
        tokens = np.array([0, 69, 64, 63, 7], np.int32)
        y = device.gpu.shared((len(tokens), COLUMNS), np.float32)
        linear = GpuLinear.pack(device.gpu, [table], activation_dtype=device.activation_dtype)
        run_launches(device.gpu, [linear.embed_launch(fill_slot(device.gpu, tokens), y, count=len(tokens))])
        return slot_values(y), reference.embedding(tokens, table)

    return run


def npu_cases(npu: NpuBackend) -> Iterator[Case]:
    """Yield every number format in every form that is legal, at a few standard lengths."""
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
    npu: NpuBackend, number_format: WeightFormat, form: GraphForm, length: int
) -> Callable[[], Numbers]:
    def run() -> Numbers:
        generator = np.random.default_rng(SEED)
        weight = random_weight(generator, NPU_ROWS, COLUMNS, number_format)
        x = generator.standard_normal((length, COLUMNS), np.float32).astype(npu.activation_dtype)
        y = np.zeros((length, NPU_ROWS), npu.activation_dtype)
        key = f"doctor {SEED} {number_format}"
        part = LinearShard(weight, 0, "doctor", ((0, NPU_ROWS),), key)
        npu.prepare(part, length, form).bind(x, y)()
        return y, reference.linear(x, [weight])

    return run
