"""Measures the glue operators of a layer on the GPU, so that the times of a whole pass can be summed.

They are timed as linears are: inside a busy queue, on random data. Attention of few tokens finds the caches
emptied where the model is larger than they are; other inputs were written just before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from heterollm.base import HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.formats import LARGEST_CODE, CodeGrid
from heterollm.kernels.gpu import (
    COUNT_WORDS,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GpuGlue,
    GpuLinear,
    GpuOutliers,
    HeadShape,
    HotWeights,
    KvLayer,
    Launch,
    NpuCodes,
    OutlierList,
    Rotation,
    RoundedInputs,
    Scores,
    Segments,
    SharedArray,
    head_stride,
    scratch_codes,
)
from heterollm.kernels.ops import WeightFormat
from heterollm.model import ModelShape
from heterollm.profiler.measure.caches import COLD_TOKENS, eviction_bytes
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.layer_cases import (
    ATTENTION_POSITIONS,
    GlueCase,
    GlueOperator,
    cache_positions,
    layer_cases,
)
from heterollm.profiler.measure.random_data import fill_shared, weight_for
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S, taken
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import Key, Record

TABLE_ROWS: Final = 4096
"""Rows of the embedding: the time of a look-up does not depend on their number."""

SUBMISSIONS: Final = "submissions"
"""Name of a record's value: kernels of the operator, where a decode pass submits them one by one."""

SMALLEST_BUCKET: Final = 256
STAGE: Final = "Other operators"
CORE_FLOPS: Final = 20e9
CORE_BYTES: Final = 4e9
USUAL_RUNS: Final = 8
OVERHEAD_S: Final = 0.02

PER_TOKEN: Final = CodeGrid(1 / LARGEST_CODE, 1 / LARGEST_CODE, per_token=True)
"""Grid of codes of 16 bits: nearly all linears divide by the largest magnitude of a token."""

STATIC: Final = CodeGrid(1 / 127, 1 / 127, per_token=False, bits=8)


def layer_tasks(
    device: Device, shapes: Iterable[ModelShape], *, quick: bool = False, sparse: bool = False
) -> list[Task]:
    """Return the tasks that measure the glue operators of some models, each size once.

    Args:
        device: The opened device; tasks run on the thread that opened it.
        shapes: The models.
        quick: Whether to measure only two sizes of each, which every plan needs.
        sparse: Whether to measure attention at the sizes of sparse attention, too.
    """
    cases: dict[Key, GlueCase] = {}
    for shape in shapes:
        for case in layer_cases(device, shape, quick=quick, sparse=sparse):
            cases.setdefault(case.key, case)
    bench = _GlueBench(device, cache_positions(cases.values()))
    groups: dict[tuple[str, str, bool], list[GlueCase]] = {}
    for case in cases.values():
        groups.setdefault((case.shape.name, case.operator, case.essential), []).append(case)
    return [
        Task(
            STAGE,
            tuple(case.key for case in chunk),
            partial(bench.measure, chunk),
            sum(_estimate_s(case, device) for case in chunk),
            essential=quick and chunk[0].essential,
        )
        for group in groups.values()
        for chunk in _split(group)
    ]


def _split(cases: Sequence[GlueCase]) -> Iterator[Sequence[GlueCase]]:
    """Yield an operator's cases a few at a time, since attention is slow."""
    size = len(ATTENTION_POSITIONS)
    for first in range(0, len(cases), size):
        yield cases[first : first + size]


def _estimate_s(case: GlueCase, device: Device) -> float:
    """Return about how long a case takes to measure."""
    if not device.gpu.computes:
        return NOTHING_COMPUTED_S
    shape, key = case.shape, case.key
    width = key.hidden or (key.heads + 2 * key.kv_heads) * key.head_dim
    flops, size = 0, 12 * case.tokens * width
    if case.operator == "attention":
        positions = case.position + case.tokens
        flops = 4 * case.tokens * positions * shape.heads * shape.head_dim
        size += 8 * positions * shape.kv_heads * shape.head_dim
    cores = device.gpu.traits.compute_units if device.gpu.traits.is_cpu else 16
    run_s = flops / (CORE_FLOPS * cores) + size / CORE_BYTES
    if case.operator == "attention" and case.tokens <= COLD_TOKENS:
        run_s += eviction_bytes(device.gpu.traits.cache_bytes) / (2 * CORE_BYTES)
    return OVERHEAD_S + USUAL_RUNS * run_s


class _GlueBench:
    """Measures operators on a device, with buffers and a KV cache that operators share."""

    def __init__(self, device: Device, positions: int) -> None:
        self._device = device
        self._positions = positions
        self._timer = gpu_timer(device.gpu)
        self._runtime = self._timer.runtime
        self._glue = GpuGlue(self._runtime, device.activation_dtype, device.cache_dtype)
        self._outliers = GpuOutliers(self._runtime, device.activation_dtype, device.cache_dtype)
        self._slots: dict[str, SharedArray] = {}
        self._makers: dict[GlueOperator, Callable[[GlueCase], Sequence[Launch]]] = {
            "embedding": self._embedding,
            "rms_norm": self._rms_norm,
            "rope_and_store": self._rope,
            "attention": self._attention,
            "gated_activation": self._activation,
            "final_norm": self._final_norm,
            "join_logits": self._join_logits,
            "rms_norm_uint16": self._rms_norm,
            "final_norm_uint16": self._final_norm,
            "write_codes": self._write_codes,
            "read_codes": self._read_codes,
            "rms_norm_uint8": self._rms_norm,
            "write_codes_uint8": self._write_codes,
            "read_codes_uint8": self._read_codes,
            "rms_norm_sum": self._rms_norm,
            "rope_and_store_sum": self._rope,
            "gated_activation_sum": self._activation,
            "find_outliers": self._find_outliers,
            "multiply_outliers": self._multiply_outliers,
        }

    def measure(self, cases: Sequence[GlueCase]) -> list[Record]:
        """Measure some cases; a failure is a record too."""
        return [self._measure(case) for case in cases]

    def _measure(self, case: GlueCase) -> Record:
        timer = self._timer
        streamed = case.shape.streamed(self._runtime.traits.cache_bytes)
        cold = streamed and case.operator == "attention" and case.tokens <= COLD_TOKENS
        try:
            self._write_step(case)
            launches = self._makers[case.operator](case)
        except HeteroLLMError as error:
            return Record(case.key, error=error.message)
        separate = {} if self._runtime.merges_launches else {SUBMISSIONS: float(len(launches))}
        return taken(
            case.key,
            lambda: timer.time_us(launches, cold=cold),
            lambda: timer.time_us(launches),
            values=lambda: separate,
        )

    # -- memory --------------------------------------------------------------------------------------

    def _slot(self, name: str, elements: int, dtype: np.dtype[Any] | None = None) -> SharedArray:
        """Return a random buffer of at least that size, of the activation type by default."""
        kind = self._device.activation_dtype if dtype is None else dtype
        held = self._slots.get(name)
        if held is None or held.array.size < elements:
            held = self._slots[name] = self._runtime.shared((elements,), kind)
            fill_shared(self._runtime, held)
        return held

    def _floats(self, name: str, elements: int) -> SharedArray:
        return self._slot(name, elements, np.dtype(np.float32))

    def _integers(self, name: str, values: Sequence[int]) -> SharedArray:
        held = self._slots.get(name)
        if held is None or held.array.size < len(values):
            held = self._slots[name] = self._runtime.shared((len(values),), np.int32)
        held.acquire()
        held.array[: len(values)] = values
        held.release()
        return held

    def _write_step(self, case: GlueCase) -> None:
        words = [0] * STEP_WORDS
        words[STEP_POSITION], words[STEP_LENGTH] = case.position, case.tokens
        self._integers("step", words)

    def _linear_output(self, case: GlueCase, rows: tuple[int, ...]) -> Segments:
        """Return a linear's output after a split in halves, or of the whole NPU with a shadow."""
        tokens = case.tokens
        if case.operator.endswith("_sum"):
            whole = tokens * sum(rows)
            both = self._slot("first segment", whole), self._slot("second segment", whole)
            return Segments(*both, rows, rows, join="sum")
        splits = tuple(row // 2 for row in rows)
        taken_rows = sum(splits)
        first = self._slot("first segment", tokens * taken_rows)
        return Segments(first, self._slot("second segment", tokens * (sum(rows) - taken_rows)), rows, splits)

    def _rounded(self, case: GlueCase, weight: WeightFormat, columns: int) -> RoundedInputs | None:
        if not case.shape.head.integer_inputs:
            return None
        return scratch_codes(self._runtime, weight, case.tokens, columns)

    def _norm_codes(self, case: GlueCase, weight: WeightFormat) -> RoundedInputs | NpuCodes | None:
        hidden = case.shape.hidden_size
        if case.operator.endswith(("_uint8", "_uint16")):
            return self._codes(case, hidden)
        return self._rounded(case, weight, hidden)

    def _codes(self, case: GlueCase, width: int) -> NpuCodes:
        codes = self._slot("codes", case.tokens * width, np.dtype(np.uint16))
        factors, counts = self._floats("factors", case.tokens), self._integers("counts", [0] * COUNT_WORDS)
        grid = STATIC if case.operator.endswith("_uint8") else PER_TOKEN
        return NpuCodes(codes, codes, factors, counts, 0, grid)

    # -- the operators -------------------------------------------------------------------------------

    def _embedding(self, case: GlueCase) -> Sequence[Launch]:
        shape = case.shape
        columns, weight = shape.hidden_size, shape.head.weight
        rows = min(TABLE_ROWS, shape.vocab_size)
        generator = np.random.default_rng(0)
        table = weight_for(self._runtime, rows, columns, weight)
        linear = GpuLinear.pack(self._runtime, [table], activation_dtype=self._device.activation_dtype)
        tokens = self._integers("tokens", generator.integers(0, rows, case.tokens).tolist())
        residual = self._floats("residual", case.tokens * columns)
        return [linear.embed_launch(tokens, residual, count=case.tokens)]

    def _rms_norm(self, case: GlueCase) -> Sequence[Launch]:
        hidden, tokens = case.shape.hidden_size, case.tokens
        launch = self._glue.rms_norm(
            self._floats("residual", tokens * hidden),
            self._floats("norm", hidden),
            self._slot("linear input", tokens * hidden),
            hidden=hidden,
            tokens=tokens,
            epsilon=1e-5,
            delta=self._linear_output(case, (hidden,)),
            rounded=self._norm_codes(case, case.shape.layer[0].weight),
        )
        return [launch]

    def _final_norm(self, case: GlueCase) -> Sequence[Launch]:
        hidden, rows = case.shape.hidden_size, case.tokens
        launch = self._glue.final_norm(
            self._floats("residual", rows * hidden),
            self._floats("norm", hidden),
            self._slot("linear input", rows * hidden),
            self._slots["step"],
            rows=rows,
            epsilon=1e-5,
            delta=self._linear_output(case, (hidden,)),
            rounded=self._norm_codes(case, case.shape.head.weight),
        )
        return [launch]

    def _rope(self, case: GlueCase) -> Sequence[Launch]:
        shape, tokens = case.shape, case.tokens
        keys = shape.kv_heads * shape.head_dim
        capacity = self._positions
        angles = capacity * shape.head_dim // 2
        launch = self._glue.rope_and_store(
            self._linear_output(case, (shape.heads * shape.head_dim, keys, keys)),
            None,
            self._floats("query", tokens * shape.heads * shape.head_dim),
            KvLayer(self._cache(shape), 0),
            self._slots["step"],
            shape=self._heads(shape),
            rotation=Rotation(self._floats("cosines", angles), self._floats("sines", angles)),
            tokens=tokens,
        )
        return [launch]

    def _attention(self, case: GlueCase) -> Sequence[Launch]:
        shape, tokens = case.shape, case.tokens
        width = shape.heads * shape.head_dim
        bucket = SMALLEST_BUCKET
        while bucket < case.position + tokens:
            bucket *= 2
        output = next(spec for spec in shape.layer if spec.group == "o")
        return self._glue.attention(
            self._floats("query", tokens * width),
            KvLayer(self._cache(shape), 0),
            self._slot("attention output", tokens * width),
            self._slots["step"],
            shape=self._heads(shape),
            scores=Scores(shape.head_dim**-0.5),
            tokens=tokens,
            bucket=min(bucket, self._positions),
            rounded=self._rounded(case, output.weight, width),
        )

    def _activation(self, case: GlueCase) -> Sequence[Launch]:
        wide, tokens = case.shape.intermediate_size, case.tokens
        down = next(spec for spec in case.shape.layer if spec.group == "down")
        launch = self._glue.gated_activation(
            self._linear_output(case, (wide, wide)),
            self._slot("activated", tokens * wide),
            tokens=tokens,
            intermediate=wide,
            rounded=self._rounded(case, down.weight, wide),
        )
        return [launch]

    def _join_logits(self, case: GlueCase) -> Sequence[Launch]:
        vocabulary, rows = case.shape.vocab_size, case.tokens
        logits = self._floats("logits", rows * vocabulary)
        return [self._glue.join_logits(self._linear_output(case, (vocabulary,)), logits, rows=rows)]

    def _write_codes(self, case: GlueCase) -> Sequence[Launch]:
        tokens, columns = case.tokens, case.key.hidden
        codes = self._codes(case, columns)
        x = self._slot("linear input", tokens * columns)
        return [self._glue.write_codes(x, codes, tokens=tokens, columns=columns)]

    def _read_codes(self, case: GlueCase) -> Sequence[Launch]:
        tokens, rows = case.tokens, case.key.hidden
        codes = self._codes(case, rows)
        out = self._slot("first segment", tokens * rows)
        return [self._glue.read_codes(codes, out, tokens=tokens, member_rows=(rows,))]

    def _find_outliers(self, case: GlueCase) -> Sequence[Launch]:
        tokens, columns = case.tokens, case.key.hidden
        x = self._slot("linear input", tokens * columns)
        found, place = self._outlier_list(columns, []), self._integers("places", [-1] * columns)
        # No value is beyond these limits, so that the list stays empty.
        hot = HotWeights(x, place, (columns,), columns, -np.inf, np.inf)
        return self._outliers.find(x, found, hot, tokens=tokens)

    def _multiply_outliers(self, case: GlueCase) -> Sequence[Launch]:
        tokens, rows, count = case.tokens, case.key.hidden, case.channels
        columns = case.shape.hidden_size
        channels = [number * columns // count for number in range(count)]
        places = dict(zip(channels, range(count), strict=True))
        hot = HotWeights(
            self._slot("weights of channels", count * rows),
            self._integers("places", [places.get(channel, -1) for channel in range(columns)]),
            (rows,),
            columns,
            -0.5,
            0.5,
            expected=count,
        )
        launch = self._outliers.multiply(
            self._slot("linear input", tokens * columns),
            self._outlier_list(columns, [count, 0, *channels]),
            hot,
            self._slot("first segment", tokens * rows),
            tokens=tokens,
            covered=tokens,
            npu_rows=(rows,),
        )
        return [launch]

    def _outlier_list(self, columns: int, words: Sequence[int]) -> OutlierList:
        flags = self._integers("flags of channels", [0] * columns)
        found = self._integers("channels", [*words, *[0] * (columns + 2 - len(words))])
        return OutlierList(flags, found, self._integers("batch", [0, 0]))

    def _cache(self, shape: ModelShape) -> SharedArray:
        dtype = self._device.cache_dtype
        elements = 2 * shape.kv_heads * head_stride(self._positions, shape.head_dim, dtype)
        return self._slot("cache", elements, dtype)

    def _heads(self, shape: ModelShape) -> HeadShape:
        return HeadShape(shape.heads, shape.kv_heads, shape.head_dim, self._positions)
