"""Measures the operators between the linears of a layer, so that the times of a whole pass can be summed.

They are timed as linears are: inside a busy queue, on random data. Operators that read the KV cache for few
tokens find the caches emptied where the model is larger than they are; other inputs were written just before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.formats import LinearWeight
from heterollm.kernels.gpu import (
    STEP_WORDS,
    GlueKernels,
    HeadShape,
    KvLayer,
    Launch,
    RoundedInputs,
    Segments,
    SharedArray,
    kernel_source_hash,
    page_elements,
    pages_of,
    scratch_codes,
)
from heterollm.kernels.npu import INTEGER_FORMS, LinearShape
from heterollm.kernels.operators import Data, Form, OperatorSizes, Point, Scope, Timed, timed_operators
from heterollm.kernels.ops import Join, OpSpec, WeightFormat
from heterollm.model import ModelShape
from heterollm.profiler.measure.caches import COLD_TOKENS, eviction_bytes
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.random_data import fill_shared, weight_for
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S, taken
from heterollm.profiler.measure.sparse_cases import ESSENTIAL_SIZES, sparse_sizes
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import Key, LayerKey, Record
from heterollm.profiler.work import HEAD_TOKENS

SUBMISSIONS: Final = "submissions"
"""Name of a record's value: kernels of the operator, where a decode pass submits them one by one."""

ENDING_ROWS: Final = "ending_rows"
"""Name of a record's value: rows from which a linear layer before the operator computes it in its launch."""

TOKENS: Final = (1, 32, 256, 512)
QUICK_TOKENS: Final = (1, 256)
POSITIONS: Final = (0, 256, 1024, 2048)
"""Tokens of the session before a pass, where attention reads them."""

CASES_OF_A_TASK: Final = 4
STAGE: Final = "Other operators"
CORE_FLOPS: Final = 20e9
CORE_BYTES: Final = 4e9
USUAL_RUNS: Final = 8
OVERHEAD_S: Final = 0.02


def layer_key(
    shape: ModelShape,
    operator: str,
    tokens: int,
    position: int = 0,
    *,
    width: int | None = None,
    channels: int = 0,
) -> LayerKey:
    """Return the key of an operator in a model.

    Args:
        shape: The model; where its linears read int8 inputs, so does the operator that writes them.
        operator: Its name in profiles, that without int8 codes.
        tokens: Rows of the pass.
        position: Tokens of the session before it, which only attention depends on.
        width: Inputs or outputs of each token, for kernels on codes and outliers.
        channels: Channels that are multiplied.
    """
    timed, form = timed_operators()[operator]
    sizes = timed.sizes(shape, tokens, position, width=width, channels=channels)
    return LayerKey(timed.forms[timed.form(shape, form)], *sizes, kernel_source_hash())


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One operator of a model at one size. A quick run can do without some sizes."""

    shape: ModelShape
    timed: Timed
    form: Form
    sizes: OperatorSizes
    essential: bool = True

    @property
    def key(self) -> LayerKey:
        """Key of the measurement."""
        return LayerKey(self.timed.forms[self.form], *self.sizes, kernel_source_hash())


def layer_cases(
    device: Device, shape: ModelShape, *, quick: bool, sparse: bool = False, on_npu: bool = False
) -> Iterator[LayerCase]:
    """Yield every operator of a model at the sizes to measure.

    Args:
        device: The device.
        shape: The model.
        quick: Whether to yield only sizes that every plan needs.
        sparse: Whether to yield attention at the sizes of sparse attention, too.
        on_npu: Whether to yield it at these sizes with the inputs of the NPU's graphs.
    """
    scope = Scope(
        tokens=QUICK_TOKENS if quick else TOKENS,
        head_tokens=(1,) if quick else (1, HEAD_TOKENS),
        positions=POSITIONS[:: 2 if quick else 1],
        coded=tuple(spec for spec in shape.specs if _has_integer_graphs(device, spec)),
        sparse=sparse_sizes(quick=quick) if sparse or on_npu else (),
        on_npu=on_npu,
    )
    spared = {size for size in scope.sparse if size not in ESSENTIAL_SIZES}
    usual = {(tokens, position + tokens) for tokens in scope.tokens for position in scope.positions}
    for timed in {id(timed): timed for timed, _ in timed_operators().values()}.values():
        for form, sizes in timed.points(timed, shape, scope):
            essential = sizes[:2] in usual or sizes[:2] not in spared
            yield LayerCase(shape, timed, timed.form(shape, form), sizes, essential)


def layer_tasks(
    device: Device,
    shapes: Iterable[ModelShape],
    *,
    quick: bool = False,
    sparse: bool = False,
    on_npu: bool = False,
) -> list[Task]:
    """Return the tasks that measure the operators of some models, each size once.

    Args:
        device: The opened device; tasks run on the thread that opened it.
        shapes: The models.
        quick: Whether to measure only two sizes of each, which every plan needs.
        sparse: Whether to measure attention at the sizes of sparse attention, too.
        on_npu: Whether to measure it at these sizes with the inputs of the NPU's graphs.
    """
    cases: dict[Key, LayerCase] = {}
    for shape in shapes:
        for own in shape.by_heads:
            for case in layer_cases(device, own, quick=quick, sparse=sparse, on_npu=on_npu):
                cases.setdefault(case.key, case)
    longest = (case.sizes.context for case in cases.values() if case.timed.reads_cache)
    bench = _LayerBench(device, max(POSITIONS[-1] + TOKENS[-1], *longest))
    groups: dict[tuple[str, str, bool], list[LayerCase]] = {}
    for case in cases.values():
        groups.setdefault((case.shape.name, case.key.operator, case.essential), []).append(case)
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


def _split(cases: Sequence[LayerCase]) -> Iterator[Sequence[LayerCase]]:
    """Yield an operator's cases a few at a time, since attention is slow."""
    for first in range(0, len(cases), CASES_OF_A_TASK):
        yield cases[first : first + CASES_OF_A_TASK]


def _has_integer_graphs(device: Device, spec: OpSpec) -> bool:
    npu = device.npu
    return npu is not None and any(
        not INTEGER_FORMS.isdisjoint(
            npu.forms(LinearShape(spec.weight, spec.columns, spec.integer_inputs), length)
        )
        for length in npu.standard_lengths
    )


def _estimate_s(case: LayerCase, device: Device) -> float:
    """Return about how long a case takes to measure."""
    if not device.gpu.computes:
        return NOTHING_COMPUTED_S
    tokens, context, hidden, heads, kv_heads, head_dim = case.sizes
    flops, size = 0, 12 * tokens * (hidden or (heads + 2 * kv_heads) * head_dim)
    if case.timed.reads_cache:
        flops = 4 * tokens * context * heads * head_dim
        size += 8 * context * kv_heads * head_dim
    cores = device.gpu.traits.compute_units if device.gpu.traits.is_cpu else 16
    run_s = flops / (CORE_FLOPS * cores) + size / CORE_BYTES
    if case.timed.reads_cache and tokens <= COLD_TOKENS:
        run_s += eviction_bytes(device.gpu.traits.cache_bytes) / (2 * CORE_BYTES)
    return OVERHEAD_S + USUAL_RUNS * run_s


class _Unsplit(Form):
    """The form of an operator whose inputs the GPU has whole."""

    __slots__ = ()

    def splits(self, *rows: int) -> tuple[int, ...]:
        return (0,) * len(rows)


class _LayerBench:
    """Measures operators on a device, with data that they share."""

    def __init__(self, device: Device, positions: int) -> None:
        self._positions = positions
        self._timer = gpu_timer(device.gpu)
        runtime = self._timer.runtime
        self._kernels = GlueKernels(runtime, device.activation_dtype, device.cache_dtype)
        self._data = _SharedData(self._kernels)

    def measure(self, cases: Sequence[LayerCase]) -> list[Record]:
        """Measure some cases; a failure is a record too."""
        return [self._measure(case) for case in cases]

    def _measure(self, case: LayerCase) -> Record:
        timer, runtime = self._timer, self._timer.runtime
        streamed = case.shape.streamed(runtime.traits.cache_bytes)
        cold = streamed and case.timed.reads_cache and case.sizes.tokens <= COLD_TOKENS
        point = Point(case.shape, case.form, case.sizes, self._positions)
        try:
            launches = tuple(case.timed.case(point).launches(self._kernels, self._data))
            separate = self._separate(case, point, launches)
        except HeteroLLMError as error:
            return Record(case.key, error=error.message)
        return taken(
            case.key,
            lambda: timer.time_us(launches, cold=cold),
            lambda: timer.time_us(launches),
            values=lambda: separate,
        )

    def _separate(self, case: LayerCase, point: Point, launches: Sequence[Launch]) -> dict[str, float]:
        """Return the values of a record that a decode pass of separate kernels needs."""
        runtime = self._timer.runtime
        found = {} if runtime.merges_launches else {SUBMISSIONS: float(len(launches))}
        if runtime.has_endings and case.sizes.tokens == 1:
            unsplit = case.timed.case(point._replace(form=_Unsplit(*case.form)))
            ending = next(iter(unsplit.launches(self._kernels, self._data))).ending
            if ending is not None and ending.suits:
                found[ENDING_ROWS] = float(ending.least_rows(runtime.traits.compute_units))
        return found


class _SharedData(Data):
    """Random data of any size for all operators: one memory for each name, which grows."""

    def __init__(self, on: GlueKernels) -> None:
        super().__init__(on, np.random.default_rng(0))
        self._slots: dict[str, SharedArray] = {}

    def output(self, name: str, *shape: int, dtype: DTypeLike | None = None) -> SharedArray:
        elements, held = int(np.prod(shape)), self._slots.get(name)
        if held is None or held.array.size < elements:
            kind = self.dtype if dtype is None else np.dtype(dtype)
            held = self._slots[name] = self._gpu.shared((elements,), kind)
            fill_shared(self._gpu, held)
        return held

    def put(self, name: str, values: NDArray[Any]) -> SharedArray:
        held = self.output(name, values.size, dtype=values.dtype)
        held.acquire()
        held.array[: values.size] = values.reshape(-1)
        held.release()
        return held

    def floats(self, name: str, *shape: int, scale: Any = 1.0) -> SharedArray:  # noqa: ANN401, ARG002
        return self.output(f"{name}, float32", *shape, dtype=np.float32)

    def weights(self, name: str, *shape: int) -> SharedArray:
        return self.floats(name, *shape)

    def inputs(self, name: str, *shape: int) -> SharedArray:
        return self.output(name, *shape)

    def table(
        self,
        rows: int,
        columns: int,
        weight: WeightFormat,
        name: str = "table",  # noqa: ARG002
    ) -> LinearWeight:
        return weight_for(self._gpu, rows, columns, weight)

    def linear(
        self,
        tokens: int,
        rows: tuple[int, ...],
        splits: tuple[int, ...],
        join: Join,
        scale: float = 1.0,  # noqa: ARG002
    ) -> Segments:
        second = sum(rows) - (0 if join == "sum" else sum(splits))
        first = self.output("first segment", tokens, sum(splits))
        return Segments(first, self.output("second segment", tokens, second), rows, splits, join)

    def int8(self, weight: WeightFormat | None, tokens: int, columns: int) -> RoundedInputs | None:
        # Those of a pass lie in the device's own memory, too.
        return None if weight is None else scratch_codes(self._gpu, weight, tokens, columns)

    def cache(
        self,
        shape: HeadShape,
        known: int,  # noqa: ARG002
        written: range = range(0),  # noqa: ARG002
        pages: Sequence[int] = (),  # noqa: ARG002
    ) -> KvLayer:
        self._pages = np.arange(pages_of(shape.capacity), dtype=np.int32)
        elements = len(self._pages) * page_elements(shape.kv_heads, shape.head_dim, self.on.kv_dtype)
        return KvLayer(self.output("cache", elements, dtype=self.on.kv_dtype), STEP_WORDS)
