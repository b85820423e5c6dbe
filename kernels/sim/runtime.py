"""The GPU of a simulated SoC: launches become jobs of a virtual queue.

Without numerics it computes nothing and keeps no weights. With numerics each launch also runs on a real
OpenCL device, whose time is ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import DTypeLike, NDArray

from heterollm.base import GIB, MIB
from heterollm.kernels.gpu import (
    Argument,
    DeviceTraits,
    DeviceTuning,
    Event,
    GpuBuffer,
    GpuRuntime,
    GpuWork,
    HostClock,
    Kernel,
    KernelIdentity,
    Launch,
    MemoryKind,
    SharedArray,
    VariantRecord,
    aligned_zeros,
)
from heterollm.kernels.sim.clock import SimulatedClock
from heterollm.kernels.sim.jobs import SimulatedJob
from heterollm.kernels.sim.memory import MappedArray
from heterollm.kernels.sim.soc.gpu_model import GpuTime, gpu_time
from heterollm.kernels.sim.soc.quantities import SocParameters

COMPLETE: Final = 0
RUNNING: Final = 1
"""OpenCL's CL_COMPLETE and CL_RUNNING."""

KEPT_TIMES: Final = 4096
"""Size of the cache of times: the launches of a pass recur in every layer and nearly all in every pass."""

NOTHING: Final = object()
"""Placeholder of absent device memory and kernels; None would mean an absent argument."""


class SimulatedEvent:
    """The event of a launch on the virtual clock; it is its own profile.

    Args:
        clock: The clock.
        job: The job; None if it was complete at the enqueue.
    """

    __slots__ = ("_clock", "_job", "_queued_us")

    def __init__(self, clock: SimulatedClock, job: SimulatedJob | None) -> None:
        self._clock = clock
        self._job = job
        self._queued_us = clock.now_us

    @property
    def command_execution_status(self) -> int:
        """Whether the job is complete; this costs a poll."""
        return COMPLETE if self._clock.is_done(self._job) else RUNNING

    def wait(self) -> None:
        """Block in the driver until the job is complete."""
        self._clock.wait_for(self._job)

    @property
    def profile(self) -> SimulatedEvent:
        """The times of the job, in nanoseconds."""
        return self

    @property
    def queued(self) -> int:
        """Time of the enqueue."""
        return round(1e3 * (self._queued_us if self._job is None else self._job.queued_us))

    @property
    def start(self) -> int:
        """Start."""
        return round(1e3 * (self._queued_us if self._job is None else self._job.begin_us))

    @property
    def end(self) -> int:
        """End."""
        return round(1e3 * (self._queued_us if self._job is None else self._job.end_us))


class SimulatedLaunch(Launch):
    """A launch that takes virtual time.

    Args:
        runtime: The simulated GPU.
        kernel: The kernel.
        arguments: Arguments of the kernel.
        label: Name for traces and errors.
        work: Returns the work, which may depend on the step buffer: attention reads all positions of the
            session.
        real: The real launch that computes, or None.
        before: Launch to enqueue first, or None.
    """

    __slots__ = ("_real", "_runtime", "before", "work")

    def __init__(
        self,
        runtime: SimulatedRuntime,
        kernel: Kernel,
        arguments: Sequence[Argument],
        label: str,
        work: Callable[[], GpuWork],
        real: Launch | None,
        before: Launch | None,
    ) -> None:
        super().__init__(kernel, arguments, label)
        self.work = work
        self.before = before
        self._runtime = runtime
        self._real = real

    def rebind(self) -> None:
        """Set all arguments again: their memory may have got other buffers."""
        if self._real is not None:
            self._real.rebind()

    def __call__(self) -> SimulatedEvent:
        """Enqueue the launch without waiting; returns its event."""
        if self.before is not None:
            self.before()
        if self._real is not None:
            self._real()
        clock, work = self._runtime.clock, self.work()
        if work.kind == "shadow":
            clock.work(self._runtime.soc.hand_over.shadow_us, "join of a shadow", "shadow")
        time = self._runtime.time_of(work)
        job = SimulatedJob(self.label, time.alone_us, time.dram_bytes, arithmetic_bound=time.arithmetic_bound)
        return SimulatedEvent(clock, clock.submit(job))


class SimulatedRuntime:
    """The GPU of a simulated SoC.

    Args:
        soc: Parameters of the SoC.
        clock: Its clock, shared with the NPU.
        real: Runtime that computes; None computes nothing.
    """

    target: str | None = None
    flag = None  # kernels have no simulated time of their writes
    tests_kernels = False
    is_tunable = False  # the model does not depend on kernel parameters
    stamps_host_time = True
    merges_launches = False  # a launch costs a GPU little
    has_endings = False  # profiles have the operators' own times

    def __init__(self, soc: SocParameters, clock: SimulatedClock, real: GpuRuntime | None = None) -> None:
        self.soc = soc
        self.clock = clock
        self.real = real
        self.computes = real is not None
        self.shared_memory: MemoryKind = "svm" if soc.memory.fine_grained_svm else "mapped"
        self.traits = _traits(soc, real)
        self.variants = VariantRecord(self.traits.name)
        self.tuning = DeviceTuning(self.traits.identity())
        self.time_of: Callable[[GpuWork], GpuTime] = functools.lru_cache(KEPT_TIMES)(
            functools.partial(gpu_time, soc)
        )

    # -- programs ------------------------------------------------------------------------------------

    def kernel(
        self, files: Sequence[str], name: str, defines: Mapping[str, str | int] | None = None
    ) -> Kernel:
        """Return the real device's kernel, or a placeholder."""
        return NOTHING if self.real is None else self.real.kernel(files, name, defines)

    def kernel_of_source(self, source: str, name: str) -> Kernel:
        """Return the real device's kernel, or a placeholder."""
        return NOTHING if self.real is None else self.real.kernel_of_source(source, name)

    def kernel_identity(self, kernel: Kernel) -> KernelIdentity:
        """Return the identity of the real device's kernel; empty without one."""
        return ((), "", ()) if self.real is None else self.real.kernel_identity(kernel)

    def written_arguments(self, kernel: Kernel) -> tuple[bool, ...]:
        """Return which arguments the real device's kernel writes; empty without one."""
        return () if self.real is None else self.real.written_arguments(kernel)

    def launch(
        self,
        kernel: Kernel,
        arguments: Sequence[Argument],
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
        label: str,
        before: Launch | None = None,
        *,
        work: Callable[[], GpuWork] | None = None,
    ) -> Launch:
        """Return a launch; one without ``work`` takes next to no time."""
        real = None
        if self.real is not None:
            real = self.real.launch(kernel, arguments, global_size, local_size, label)
        return SimulatedLaunch(self, kernel, arguments, label, work or _no_work, real, before)

    # -- memory --------------------------------------------------------------------------------------

    @property
    def maps_beside_kernels(self) -> bool:
        """Whether maps do not wait for the queue."""
        return not self.traits.coherent and bool(self.soc.hand_over.maps_beside_kernels)

    def shared(self, shape: tuple[int, ...], dtype: DTypeLike) -> SharedArray:
        """Return zeroed memory; unused pages take no memory."""
        nothing: Any = NOTHING
        if self.real is not None:
            found = self.real.shared(shape, dtype)
        else:
            found = SharedArray(aligned_zeros(shape, dtype), nothing, nothing, coherent=True)
        if self.soc.memory.fine_grained_svm:
            return found
        return MappedArray(found, self.soc.hand_over, self.clock, self.settle_real)

    def upload(self, array: NDArray[Any]) -> GpuBuffer:
        """Return the real device's memory with an array's content, or a placeholder."""
        return NOTHING if self.real is None else self.real.upload(array)

    def word_image(self, buffer: GpuBuffer) -> GpuBuffer:
        """Return the real device's image over a buffer, or a placeholder."""
        return NOTHING if self.real is None else self.real.word_image(buffer)

    def scratch(self, size_bytes: int) -> GpuBuffer:
        """Return device memory that the host does not access, or a placeholder."""
        return NOTHING if self.real is None else self.real.scratch(size_bytes)

    def shared_scratch(self, name: str, size_bytes: int) -> GpuBuffer:
        """Return device memory that launches share by name, or a placeholder."""
        return NOTHING if self.real is None else self.real.shared_scratch(name, size_bytes)

    def copy(
        self, target: GpuBuffer | NDArray[Any], source: GpuBuffer | NDArray[Any], *, offset_bytes: int = 0
    ) -> None:
        """Copy between host and device memory, and wait."""
        if self.real is not None:
            self.real.copy(target, source, offset_bytes=offset_bytes)
        self.clock.copy()

    def copy_range(
        self, target: GpuBuffer, source: GpuBuffer, size_bytes: int, *, to_bytes: int = 0, from_bytes: int = 0
    ) -> None:
        """Copy bytes between device memories, or within one, and wait."""
        if self.real is not None:
            self.real.copy_range(target, source, size_bytes, to_bytes=to_bytes, from_bytes=from_bytes)
        self.clock.copy()

    # -- queue and time ------------------------------------------------------------------------------

    def profiling_twin(self) -> SimulatedRuntime:
        """Return this object: its events are stamped."""
        return self

    def enqueue_marker(self) -> SimulatedEvent:
        """Return the event of the last enqueued job."""
        return SimulatedEvent(self.clock, self.clock.last_job())

    def flush(self) -> None:
        """Do nothing: the virtual queue starts jobs by itself."""

    def finish(self) -> None:
        """Wait until the queue is empty."""
        self.settle_real()
        self.clock.wait_idle()

    def hand_to_host(self) -> None:
        """Wait in the driver until the queue is empty; the papers' baseline copies the NPU's input, too."""
        self.finish()
        if self.soc.hand_over.driver_copies:
            self.clock.hand_over_by_driver()

    def settle_real(self) -> None:
        """Wait until the real device has computed everything."""
        if self.real is not None:
            self.real.finish()

    def now_ns(self) -> int:
        """Return the nanoseconds of the virtual clock."""
        return round(1e3 * self.clock.now_us)

    def host_clock(self) -> HostClock:
        """Return the virtual clock; a turn of polling lasts until the GPU's present kernel ends."""

        def turn() -> None:
            self.clock.poll_on()

        def sleep_s(seconds: float) -> None:
            self.clock.sleep(seconds * 1e6)

        return HostClock(self.now_ns, sleep_s, turn, self.clock.costs.sleep_us)

    def processor_ns(self) -> tuple[int, int]:
        """Return the control thread's CPU time, twice: kernels take none of it."""
        busy_ns = round(1e3 * self.clock.totals.busy_us["host"])
        return busy_ns, busy_ns


if TYPE_CHECKING:
    _RUNTIME_MEETS_THE_PROTOCOL: type[GpuRuntime] = SimulatedRuntime
    _EVENT_MEETS_THE_PROTOCOL: type[Event] = SimulatedEvent


def _no_work() -> GpuWork:
    return GpuWork("elementwise", 0, 0, 0)


def _traits(soc: SocParameters, real: GpuRuntime | None) -> DeviceTraits:
    """Return the traits of the simulated GPU; with numerics, kernels see the real device's limits."""
    name, platform, driver = f"simulated GPU of {soc.name}", "heterollm model", f"parameters {soc.digest()}"
    cache_bytes = soc.memory.cache_mib * MIB
    coherent = bool(soc.memory.fine_grained_svm)
    if real is not None:
        return replace(
            real.traits,
            name=name,
            platform=platform,
            driver=driver,
            cache_bytes=cache_bytes,
            coherent=coherent,
        )
    return DeviceTraits(
        name=name,
        platform=platform,
        version="",
        driver=driver,
        is_cpu=False,
        has_half=True,
        has_subgroups=True,
        has_integer_dot=True,
        has_matrix=False,
        compute_units=6,
        max_work_group=1024,
        max_buffer_bytes=4 * GIB,
        global_bytes=16 * GIB,
        local_bytes=32 << 10,
        cache_bytes=cache_bytes,
        image_texels=1 << 27,
        coherent=coherent,
        extensions=(),
    )
