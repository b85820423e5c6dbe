"""Memory bandwidth of each processor alone and of both, and how much each slows while the other runs.

Each processor has two jobs. The memory-bound job reads float weights for one token; the compute-bound job
computes a linear layer at 256 tokens. Each job is timed alone, and repeatedly while the other processor runs
one of its jobs (HeteroLLM, sections 3 and 4.3: decode gains by the bandwidth of both).

An NPU with units of its own differs twice. Beside the GPU its memory-bound job reads 4-bit weights, as decode
does: unpacking them is slower than memory, which leaves bandwidth to the GPU. And it has a third job with
rows too long for its on-chip memory, whose use of bandwidth differs from device to device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from heterollm.base import MIB, DeviceError, bandwidth_gbps
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuLinear, Launch, SharedArray, is_complete, kernel_times_ns
from heterollm.kernels.npu import LinearShape, LinearShard, NpuBackend
from heterollm.kernels.ops import WeightFormat
from heterollm.profiler.measure.builds import build_prior_s
from heterollm.profiler.measure.caches import eviction_bytes, reading_bytes, reading_launch
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.random_data import fill_shared, weight_for
from heterollm.profiler.measure.sampling import MOST_SAMPLES, take_samples
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import BandwidthKey, ContentionBound, ContentionKey, Processor, Record

STAGE: Final = "Bandwidth and contention"

NPU_READ_BYTES: Final = 384 * MIB
"""Largest read of the NPU: ONNX Runtime may hold the weights twice."""
EMULATED_READ_BYTES: Final = 4 * MIB
"""Read of an emulated NPU, which takes a second for more."""

READ_COLUMNS: Final = 4096
LONG_COLUMNS: Final = 4 * READ_COLUMNS
COMPUTE_ROWS: Final = 2048
COMPUTE_ROWS_FACTOR: Final = 8
"""Factor of rows on an NPU with units of its own, where a smaller graph would mostly measure its start."""
COMPUTE_COLUMNS: Final = 2048
COMPUTE_TOKENS: Final = 256
EMULATED_COMPUTE_ROWS: Final = 256
PACKED: Final = WeightFormat(4, 32)

ROUNDS: Final = 3
"""Fewest runs of the slower processor in one measurement of both."""

TURNS: Final = range(3, 10)
"""Fewest and most turns, each alone and together, in a measurement of contention."""
TURNS_US: Final = 1.5e6
"""Time after which the fewest turns are enough."""
RUNS_ALONE: Final = 3
"""Runs of each processor alone between two measurements of both."""

ContentionJob: TypeAlias = ContentionBound | Literal["packed", "spill_compute"]
"""A job of a processor; ``packed`` reads 4-bit weights, ``spill_compute`` has the tokens of ``compute``."""

GPU_BOUNDS: Final[tuple[ContentionBound, ...]] = ("compute", "memory")
PROCESSORS: Final[tuple[Processor, ...]] = get_args(Processor)


class SharedLoad:
    """The jobs of both processors, prepared at first use.

    Args:
        device: An opened device with both processors; the calling thread is its engine thread.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timer = gpu_timer(device.gpu)
        self._jobs: dict[tuple[Processor, ContentionJob], Any] = {}
        self._alone_us: dict[
            tuple[Processor, ContentionJob], tuple[tuple[float, ...], tuple[float, ...]]
        ] = {}
        self._buffers: list[SharedArray] = []
        self._shards: list[LinearShard] = []

    @property
    def processors(self) -> tuple[Processor, ...]:
        """The processors that the device has."""
        return PROCESSORS if self._device.npu is not None else ("gpu",)

    def alone_us(
        self, processor: Processor, bound: ContentionJob
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return samples and warm-up runs of a processor's job alone, measured once."""
        key = processor, bound
        if key not in self._alone_us:
            self._alone_us[key] = self.alone_now_us(processor, bound)
        return self._alone_us[key]

    def alone_now_us(
        self, processor: Processor, bound: ContentionJob, *, most: int = MOST_SAMPLES
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Measure :meth:`alone_us` again, right beside a measurement of both processors."""
        job = self.job(processor, bound)
        once = partial(self._timer.time_us, [job]) if processor == "gpu" else partial(self._wall_us, job)
        return take_samples(once, most=most)

    def now_us(self) -> float:
        """Return the time of the clock that the jobs are timed by."""
        return self._timer.runtime.now_ns() / 1e3

    @property
    def npu_bounds(self) -> tuple[ContentionBound, ...]:
        """The kinds of jobs that the NPU has beside the GPU; see the head of this module."""
        return get_args(ContentionBound) if self._has_own_units else GPU_BOUNDS

    @property
    def _has_own_units(self) -> bool:
        return not self._device.gpu.traits.is_cpu

    def beside(self, gpu: ContentionBound, npu: ContentionBound) -> ContentionJob:
        """Return the NPU's job of a kind beside one of the GPU."""
        if npu == "spill" and gpu == "compute":
            return "spill_compute"
        return "packed" if npu == "memory" and self._has_own_units else npu

    def together_us(self, gpu: ContentionBound, npu: ContentionJob) -> dict[Processor, tuple[float, ...]]:
        """Return samples of both jobs, each taken while the other processor worked throughout.

        Raises:
            DeviceError: The runs never overlapped.
        """
        launch, call = self.job("gpu", gpu), self.job("npu", npu)
        gpu_us = statistics.median(self.alone_us("gpu", gpu)[0])
        npu_us = statistics.median(self.alone_us("npu", npu)[0])
        count = max(ROUNDS, round(ROUNDS * npu_us / gpu_us) + 1)
        for more in (1, 4, 16):
            found = self._both_at_work(launch, call, count * more)
            if found["npu"]:
                return found
        raise DeviceError("The processors did not run at the same time: the GPU had ended before the NPU.")

    def _both_at_work(self, launch: Any, call: Any, count: int) -> dict[Processor, tuple[float, ...]]:  # noqa: ANN401
        """Enqueue ``count`` GPU jobs and run NPU jobs meanwhile; without overlap the NPU has no samples."""
        events = [launch() for _ in range(count)]
        self._timer.runtime.flush()
        npu_samples: list[float] = []
        while True:
            elapsed_us = self._wall_us(call)
            if is_complete(events[-1]):
                break
            npu_samples.append(elapsed_us)
        self._timer.runtime.finish()
        times = [kernel_times_ns(event) for event in events]
        # The first launch may have begun before the NPU did, and the first run of the NPU before the GPU.
        gpu_samples = tuple((moment.end - moment.start) / 1e3 for moment in times[1:])
        return {"gpu": gpu_samples, "npu": tuple(npu_samples[1:] or npu_samples)}

    def rest(self, seconds: float) -> None:
        """Sleep, on the device's clock."""
        self._timer.runtime.host_clock().sleep_s(seconds)

    def close(self) -> None:
        """Free the jobs; the next use prepares them again."""
        self._jobs.clear()
        self._buffers.clear()
        for shard in self._shards:
            if self._device.npu is not None:
                self._device.npu.release(shard)
        self._shards.clear()

    def run_once(self, processor: Processor) -> None:
        """Run a processor's compute-bound job, and wait for it."""
        self.job(processor, "compute")()
        self._timer.runtime.finish()

    def job(self, processor: Processor, bound: ContentionJob) -> Any:  # noqa: ANN401 - a launch or the call of a graph
        """Return a processor's prepared job: a launch on the GPU, the call of a graph on the NPU."""
        key = processor, bound
        if key not in self._jobs:
            self._jobs[key] = (self._gpu_job if processor == "gpu" else self._npu_job)(bound)
        return self._jobs[key]

    def read_bytes(self, processor: Processor) -> int:
        """Return the bytes that a processor's memory-bound job reads."""
        if processor == "gpu":
            return reading_bytes(self._timer.runtime, eviction_bytes(self._timer.runtime.traits.cache_bytes))
        npu = self._device.npu
        if npu is not None and npu.time_kind == "emulated":
            return EMULATED_READ_BYTES
        return min(NPU_READ_BYTES, eviction_bytes(self._timer.runtime.traits.cache_bytes))

    def _gpu_job(self, bound: ContentionJob) -> Launch:
        runtime = self._timer.runtime
        if bound == "memory":
            return reading_launch(runtime, self.read_bytes("gpu"))
        weight = weight_for(runtime, COMPUTE_ROWS, COMPUTE_COLUMNS, PACKED)
        linear = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
        x = self._filled((COMPUTE_TOKENS, COMPUTE_COLUMNS), np.dtype(np.float32))
        y = runtime.shared((COMPUTE_TOKENS, COMPUTE_ROWS), np.float32)
        return linear.launch(x, y, tokens=COMPUTE_TOKENS, label="computing")

    def _npu_job(self, bound: ContentionJob) -> Callable[[], None]:
        npu = self._device.npu
        if npu is None:
            raise DeviceError("The device has no NPU.", fix="Give it at least one thread.")
        return self._graph(npu, *self._npu_size(npu, bound))

    def _npu_size(self, npu: NpuBackend, bound: ContentionJob) -> tuple[int, int, WeightFormat, int]:
        """Return rows, inputs, format and tokens of a job."""
        floats = WeightFormat(32), WeightFormat(16)
        wanted = (*floats, PACKED) if bound == "memory" else (PACKED, *floats[::-1])
        weight = next(item for item in wanted if npu.forms(LinearShape(item, READ_COLUMNS), 1))
        if bound == "spill_compute":
            return COMPUTE_ROWS, LONG_COLUMNS, weight, COMPUTE_TOKENS
        if bound != "compute":
            columns = LONG_COLUMNS if bound == "spill" else READ_COLUMNS
            return self.read_bytes("npu") // weight.weight_bytes(1, columns), columns, weight, 1
        rows = EMULATED_COMPUTE_ROWS if npu.time_kind == "emulated" else COMPUTE_ROWS
        if self._has_own_units:
            rows *= COMPUTE_ROWS_FACTOR
        return rows, COMPUTE_COLUMNS, weight, COMPUTE_TOKENS

    def build_s(self, job: ContentionJob) -> float:
        """Return about how long the graph of one of the NPU's jobs takes to build."""
        npu = self._device.npu
        if npu is None:
            return 0.0
        rows, columns, _, _ = self._npu_size(npu, job)
        return build_prior_s(self._device, rows * columns)

    def _graph(
        self, npu: NpuBackend, rows: int, columns: int, weight: WeightFormat, length: int
    ) -> Callable[[], None]:
        values = weight_for(self._timer.runtime, rows, columns, weight)
        shard = LinearShard(values, 0, "o", ((0, rows),), f"random {rows}x{columns}")
        graph = npu.prepare(shard, length)
        dtype = npu.activation_dtype
        x, y = self._filled((length, columns), dtype), self._timer.runtime.shared((length, rows), dtype)
        y.acquire()
        x.acquire()
        self._buffers += [x, y]
        self._shards.append(shard)
        return graph.bind({"x": x.array}, {"y": y.array})

    def _wall_us(self, call: Callable[[], None]) -> float:
        now_ns = self._timer.runtime.now_ns
        begin = now_ns()
        call()
        return (now_ns() - begin) / 1e3

    def _filled(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> SharedArray:
        array = self._timer.runtime.shared(shape, dtype)
        fill_shared(self._timer.runtime, array)
        return array


def bandwidth_tasks(load: SharedLoad) -> list[Task]:
    """Return the work of measuring bandwidth and contention; less where the device has no NPU."""
    processors = load.processors
    tasks = [
        Task(
            STAGE,
            (BandwidthKey(processor, load.read_bytes(processor), together=False),),
            partial(_alone, load, processor),
            1.0,
            essential=True,
            graphs=processor == "npu",
            build_s=load.build_s("memory") if processor == "npu" else 0.0,
        )
        for processor in processors
    ]
    if processors != PROCESSORS:
        return tasks
    keys = tuple(
        BandwidthKey(processor, load.read_bytes(processor), together=True) for processor in processors
    )
    tasks.append(Task(STAGE, keys, partial(_both, load), 1.5, essential=True))
    built: set[ContentionJob] = {"memory"}
    for gpu in GPU_BOUNDS:
        for npu in load.npu_bounds:
            job = load.beside(gpu, npu)
            build_s = 0.0 if job in built else load.build_s(job)
            graphs = int(job not in built)
            built.add(job)
            pair = (ContentionKey("gpu", gpu, npu), ContentionKey("npu", npu, gpu))
            work = partial(_contention, load, gpu, npu)
            tasks.append(Task(STAGE, pair, work, 1.0, essential=True, graphs=graphs, build_s=build_s))
    return tasks


def _alone(load: SharedLoad, processor: Processor) -> Iterator[Record]:
    samples, warmup = load.alone_us(processor, "memory")
    yield _bandwidth(load, processor, samples, warmup, together=False)


def _both(load: SharedLoad) -> Iterator[Record]:
    for processor, samples in load.together_us("memory", "memory").items():
        yield _bandwidth(load, processor, samples, (), together=True)


def _bandwidth(
    load: SharedLoad,
    processor: Processor,
    samples: tuple[float, ...],
    warmup: tuple[float, ...],
    *,
    together: bool,
) -> Record:
    size = load.read_bytes(processor)
    rate = bandwidth_gbps(size, statistics.median(samples))
    return Record(BandwidthKey(processor, size, together), samples, warmup, {"gbps": round(rate, 3)})


def _contention(load: SharedLoad, gpu: ContentionBound, npu: ContentionBound) -> Iterator[Record]:
    job = load.beside(gpu, npu)
    jobs: dict[Processor, ContentionJob] = {"gpu": gpu, "npu": job}

    def alone_us() -> dict[Processor, float]:
        return {
            processor: statistics.median(load.alone_now_us(processor, bound, most=RUNS_ALONE)[0])
            for processor, bound in jobs.items()
        }

    # Each turn together is compared with the runs alone right before and after it: clocks drift within
    # seconds by more than contention slows, and one disturbed moment must not decide every plan.
    together: dict[Processor, list[float]] = {processor: [] for processor in PROCESSORS}
    slowdowns: dict[Processor, list[float]] = {processor: [] for processor in PROCESSORS}
    before, begin_us = alone_us(), load.now_us()
    for turn in range(1, TURNS.stop):
        both = load.together_us(gpu, job)
        after = alone_us()
        for processor, samples in both.items():
            together[processor] += samples
            slowdowns[processor].append(
                2.0 * statistics.median(samples) / (before[processor] + after[processor])
            )
        before = after
        if turn >= TURNS.start and load.now_us() - begin_us > TURNS_US:
            break
    for key in (ContentionKey("gpu", gpu, npu), ContentionKey("npu", npu, gpu)):
        slowdown = round(statistics.median(slowdowns[key.processor]), 4)
        yield Record(key, tuple(together[key.processor]), values={"slowdown": slowdown})
