"""Measures the glue operators of a layer on the GPU, so that the times of a whole pass can be summed.

They are timed as linears are: inside a busy queue, on random data. Attention of few tokens finds the caches
emptied where the model is larger than they are; other inputs were written just before.

In a :class:`heterollm.profiler.records.LayerKey`, ``context`` counts the positions that the last token of the
pass attends to, its own included, :data:`OPERATORS` defines ``hidden``, and sizes that an operator does not
depend on are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import numpy as np

from heterollm.base import HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GpuGlue,
    GpuLinear,
    HeadShape,
    KvLayer,
    Launch,
    Rotation,
    RoundedInputs,
    Scores,
    Segments,
    SharedArray,
    head_stride,
    kernel_source_hash,
    scratch_codes,
)
from heterollm.kernels.ops import WeightFormat
from heterollm.model import ModelShape
from heterollm.profiler.measure.caches import COLD_TOKENS, eviction_bytes
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.random_data import fill_shared, weight_for
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S, taken
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import Key, LayerKey, Record
from heterollm.profiler.work import HEAD_TOKENS

__all__ = ["ATTENTION_POSITIONS", "OPERATORS", "SUBMISSIONS", "GlueOperator", "layer_key", "layer_tasks"]

GlueOperator: TypeAlias = Literal[
    "embedding",
    "rms_norm",
    "rms_norm_int8",
    "rope_and_store",
    "attention",
    "attention_int8",
    "gated_activation",
    "gated_activation_int8",
    "final_norm",
    "final_norm_int8",
    "join_logits",
]

OPERATORS: Final[dict[GlueOperator, str]] = {
    "embedding": "the residual stream",
    "rms_norm": "the residual stream; the sum with the linear before it included",
    "rms_norm_int8": "the same, with the inputs of the next linear rounded to int8",
    "rope_and_store": "nothing",
    "attention": "nothing",
    "attention_int8": "nothing",
    "gated_activation": "the width of the feed-forward network",
    "gated_activation_int8": "the same",
    "final_norm": "the residual stream",
    "final_norm_int8": "the same",
    "join_logits": "the vocabulary",
}
"""The operators by name, and the size that ``hidden`` states for each."""

TOKENS: Final = (1, 32, 256, 512)
QUICK_TOKENS: Final = (1, 256)
ATTENTION_POSITIONS: Final = (0, 256, 1024, 2048)
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

ROUNDING: Final[dict[GlueOperator, GlueOperator]] = {
    "rms_norm": "rms_norm_int8",
    "attention": "attention_int8",
    "gated_activation": "gated_activation_int8",
    "final_norm": "final_norm_int8",
}
"""Operators that write a linear's input, and their names where they round it to int8 as well."""


@dataclass(frozen=True, slots=True)
class _GlueCase:
    """One operator of a model at one size, after ``position`` tokens of the session."""

    shape: ModelShape
    operator: GlueOperator
    tokens: int
    position: int = 0

    @property
    def key(self) -> LayerKey:
        return layer_key(self.shape, self.operator, self.tokens, self.position)


def layer_key(shape: ModelShape, operator: GlueOperator, tokens: int, position: int = 0) -> LayerKey:
    """Return the key of an operator in a model.

    Args:
        shape: The model; where its linears read int8 inputs, so does the operator that writes them.
        operator: Its plain name.
        tokens: Rows of the pass.
        position: Tokens of the session before it, which only attention depends on.
    """
    context = position + tokens if operator == "attention" else 0
    hidden = heads = kv_heads = head_dim = 0
    if operator in ("attention", "rope_and_store"):
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    elif operator == "gated_activation":
        hidden = shape.intermediate_size
    elif operator == "join_logits":
        hidden = shape.vocab_size
    else:
        hidden = shape.hidden_size
    name = ROUNDING.get(operator, operator) if shape.head.integer_inputs else operator
    return LayerKey(name, tokens, context, hidden, heads, kv_heads, head_dim, kernel_source_hash())


def layer_tasks(device: Device, shapes: Iterable[ModelShape], *, quick: bool = False) -> list[Task]:
    """Return the tasks that measure the glue operators of some models, each size once.

    Args:
        device: The opened device; tasks run on the thread that opened it.
        shapes: The models.
        quick: Whether to measure only two sizes of each, which every plan needs.
    """
    bench = _GlueBench(device)
    cases: dict[Key, _GlueCase] = {}
    for shape in shapes:
        for case in _cases(shape, quick=quick):
            cases.setdefault(case.key, case)
    groups: dict[tuple[str, str], list[_GlueCase]] = {}
    for case in cases.values():
        groups.setdefault((case.shape.name, case.operator), []).append(case)
    return [
        Task(
            STAGE,
            tuple(case.key for case in chunk),
            partial(bench.measure, chunk),
            sum(_estimate_s(case, device) for case in chunk),
            essential=quick,
        )
        for group in groups.values()
        for chunk in _split(group)
    ]


def _cases(shape: ModelShape, *, quick: bool) -> Iterator[_GlueCase]:
    sizes = QUICK_TOKENS if quick else TOKENS
    plain: tuple[GlueOperator, ...] = ("embedding", "rms_norm", "rope_and_store", "gated_activation")
    for operator in plain:
        for tokens in sizes:
            yield _GlueCase(shape, operator, tokens)
    for tokens in sizes:
        for position in ATTENTION_POSITIONS[:: 2 if quick else 1]:
            yield _GlueCase(shape, "attention", tokens, position)
    head: tuple[GlueOperator, ...] = ("final_norm", "join_logits")
    for operator in head:
        for tokens in (1,) if quick else (1, HEAD_TOKENS):
            yield _GlueCase(shape, operator, tokens)


def _split(cases: Sequence[_GlueCase]) -> Iterator[Sequence[_GlueCase]]:
    """Yield an operator's cases a few at a time, since attention is slow."""
    size = len(ATTENTION_POSITIONS)
    for first in range(0, len(cases), size):
        yield cases[first : first + size]


def _estimate_s(case: _GlueCase, device: Device) -> float:
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
    """Measures operators on a device, with buffers that operators share."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timer = gpu_timer(device.gpu)
        self._runtime = self._timer.runtime
        self._glue = GpuGlue(self._runtime, device.activation_dtype, device.cache_dtype)
        self._slots: dict[str, SharedArray] = {}
        self._makers: dict[GlueOperator, Callable[[_GlueCase], Sequence[Launch]]] = {
            "embedding": self._embedding,
            "rms_norm": self._rms_norm,
            "rope_and_store": self._rope,
            "attention": self._attention,
            "gated_activation": self._activation,
            "final_norm": self._final_norm,
            "join_logits": self._join_logits,
        }

    def measure(self, cases: Sequence[_GlueCase]) -> list[Record]:
        """Measure some cases; a failure is a record too."""
        return [self._measure(case) for case in cases]

    def _measure(self, case: _GlueCase) -> Record:
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

    def _slot(self, name: str, elements: int, dtype: np.dtype[np.floating] | None = None) -> SharedArray:
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

    def _write_step(self, case: _GlueCase) -> None:
        words = [0] * STEP_WORDS
        words[STEP_POSITION], words[STEP_LENGTH] = case.position, case.tokens
        self._integers("step", words)

    def _linear_output(self, rows: tuple[int, ...], tokens: int) -> Segments:
        """Return a linear's output after a split in halves."""
        splits = tuple(row // 2 for row in rows)
        taken_rows = sum(splits)
        first = self._slot("first segment", tokens * taken_rows)
        return Segments(first, self._slot("second segment", tokens * (sum(rows) - taken_rows)), rows, splits)

    def _rounded(self, case: _GlueCase, weight: WeightFormat, columns: int) -> RoundedInputs | None:
        if not case.shape.head.integer_inputs:
            return None
        return scratch_codes(self._runtime, weight, case.tokens, columns)

    # -- the operators -------------------------------------------------------------------------------

    def _embedding(self, case: _GlueCase) -> Sequence[Launch]:
        shape = case.shape
        columns, weight = shape.hidden_size, shape.head.weight
        rows = min(TABLE_ROWS, shape.vocab_size)
        generator = np.random.default_rng(0)
        table = weight_for(self._runtime, rows, columns, weight)
        linear = GpuLinear.pack(self._runtime, [table], activation_dtype=self._device.activation_dtype)
        tokens = self._integers("tokens", generator.integers(0, rows, case.tokens).tolist())
        residual = self._floats("residual", case.tokens * columns)
        return [linear.embed_launch(tokens, residual, count=case.tokens)]

    def _rms_norm(self, case: _GlueCase) -> Sequence[Launch]:
        hidden, tokens = case.shape.hidden_size, case.tokens
        launch = self._glue.rms_norm(
            self._floats("residual", tokens * hidden),
            self._floats("norm", hidden),
            self._slot("linear input", tokens * hidden),
            hidden=hidden,
            tokens=tokens,
            epsilon=1e-5,
            delta=self._linear_output((hidden,), tokens),
            rounded=self._rounded(case, case.shape.layer[0].weight, hidden),
        )
        return [launch]

    def _final_norm(self, case: _GlueCase) -> Sequence[Launch]:
        hidden, rows = case.shape.hidden_size, case.tokens
        launch = self._glue.final_norm(
            self._floats("residual", rows * hidden),
            self._floats("norm", hidden),
            self._slot("linear input", rows * hidden),
            self._slots["step"],
            rows=rows,
            epsilon=1e-5,
            delta=self._linear_output((hidden,), rows),
            rounded=self._rounded(case, case.shape.head.weight, hidden),
        )
        return [launch]

    def _rope(self, case: _GlueCase) -> Sequence[Launch]:
        shape, tokens = case.shape, case.tokens
        keys = shape.kv_heads * shape.head_dim
        capacity = _capacity()
        angles = capacity * shape.head_dim // 2
        launch = self._glue.rope_and_store(
            self._linear_output((shape.heads * shape.head_dim, keys, keys), tokens),
            None,
            self._floats("query", tokens * shape.heads * shape.head_dim),
            KvLayer(self._cache(shape), 0),
            self._slots["step"],
            shape=_heads(shape),
            rotation=Rotation(self._floats("cosines", angles), self._floats("sines", angles)),
            tokens=tokens,
        )
        return [launch]

    def _attention(self, case: _GlueCase) -> Sequence[Launch]:
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
            shape=_heads(shape),
            scores=Scores(shape.head_dim**-0.5),
            tokens=tokens,
            bucket=min(bucket, _capacity()),
            rounded=self._rounded(case, output.weight, width),
        )

    def _activation(self, case: _GlueCase) -> Sequence[Launch]:
        wide, tokens = case.shape.intermediate_size, case.tokens
        down = next(spec for spec in case.shape.layer if spec.group == "down")
        launch = self._glue.gated_activation(
            self._linear_output((wide, wide), tokens),
            self._slot("activated", tokens * wide),
            tokens=tokens,
            intermediate=wide,
            rounded=self._rounded(case, down.weight, wide),
        )
        return [launch]

    def _join_logits(self, case: _GlueCase) -> Sequence[Launch]:
        vocabulary, rows = case.shape.vocab_size, case.tokens
        logits = self._floats("logits", rows * vocabulary)
        return [self._glue.join_logits(self._linear_output((vocabulary,), rows), logits, rows=rows)]

    def _cache(self, shape: ModelShape) -> SharedArray:
        dtype = self._device.cache_dtype
        elements = 2 * shape.kv_heads * head_stride(_capacity(), shape.head_dim, dtype)
        return self._slot("cache", elements, dtype)


def _capacity() -> int:
    return max(ATTENTION_POSITIONS) + max(TOKENS)


def _heads(shape: ModelShape) -> HeadShape:
    return HeadShape(shape.heads, shape.kv_heads, shape.head_dim, _capacity())
