"""The GPU of a simulated SoC behind the runtime's interface: launches become jobs of a virtual queue.

Without numerics nothing is computed and no weights are kept: a launch has its work, and memory its shape.
With numerics each launch runs on a real OpenCL device as well, in real time that nobody reads.
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
    Buffer,
    DeviceTraits,
    DeviceTuning,
    Event,
    GpuRuntime,
    GpuWork,
    HostClock,
    Kernel,
    KernelIdentity,
    Launch,
    SharedArray,
    VariantRecord,
    aligned_zeros,
)
from heterollm.kernels.sim.clock import Job, SimulatedClock
from heterollm.kernels.sim.soc.gpu_model import GpuTime, gpu_time
from heterollm.kernels.sim.soc.quantities import SocParameters

__all__ = ["SimulatedEvent", "SimulatedLaunch", "SimulatedRuntime"]

COMPLETE: Final = 0
RUNNING: Final = 1
"""OpenCL's CL_COMPLETE and CL_RUNNING."""

KEPT_TIMES: Final = 4096
"""Works whose times are kept: the launches of a pass recur in every layer, and nearly all in every pass."""

NOTHING: Final = object()
"""Stands for device memory and kernels that are not there; None would say that an argument is absent."""


class SimulatedEvent:
    """What OpenCL's event of a launch is, on the virtual clock; also its own profile.

    Args:
        clock: The clock.
        job: What it stands for; None for what was done when it was enqueued.
    """

    __slots__ = ("_clock", "_job", "_queued_us")

    def __init__(self, clock: SimulatedClock, job: Job | None) -> None:
        self._clock = clock
        self._job = job
        self._queued_us = clock.now_us

    @property
    def command_execution_status(self) -> int:
        """Whether it is complete; looking takes the time of a poll."""
        return COMPLETE if self._clock.is_done(self._job) else RUNNING

    def wait(self) -> None:
        """Block in the driver until it is complete."""
        self._clock.wait_for(self._job)

    @property
    def profile(self) -> SimulatedEvent:
        """The moments of its life, in nanoseconds."""
        return self

    @property
    def queued(self) -> int:
        """When it was enqueued."""
        return round(1e3 * (self._queued_us if self._job is None else self._job.queued_us))

    @property
    def start(self) -> int:
        """When it began."""
        return round(1e3 * (self._queued_us if self._job is None else self._job.begin_us))

    @property
    def end(self) -> int:
        """When it ended."""
        return round(1e3 * (self._queued_us if self._job is None else self._job.end_us))


class SimulatedLaunch(Launch):
    """A launch that takes virtual time; with ``real`` it computes as well.

    Args:
        runtime: The simulated GPU.
        kernel: The kernel.
        arguments: Of the kernel; kept and named as those of a real launch.
        label: Name for traces and errors.
        work: Returns what it has to do, which may depend on the step: attention reads as many positions
            as the session holds.
        real: The launch that computes it, if anything does.
        before: A launch to enqueue first.
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

    def replace(self, old: SharedArray | None, new: SharedArray) -> None:
        """Name other memory in place of ``old``."""
        if self._real is not None:
            self._real.replace(old, new)
        self.arguments = tuple(new if argument is old else argument for argument in self.arguments)

    def __call__(self) -> SimulatedEvent:
        """Enqueue it without waiting; returns its event."""
        if self.before is not None:
            self.before()
        if self._real is not None:
            self._real()
        clock, time = self._runtime.clock, self._runtime.time_of(self.work())
        job = Job(self.label, time.alone_us, time.dram_bytes, arithmetic_bound=time.arithmetic_bound)
        return SimulatedEvent(clock, clock.submit(job))


class SimulatedRuntime:
    """The GPU part of a simulated SoC.

    Args:
        soc: Its parameters.
        clock: Its clock, shared with the NPU part.
        real: Computes what is launched; None computes nothing.
    """

    target: str | None = None
    flag = None  # a kernel writes at no simulated time
    tests_kernels = False
    is_tunable = False  # the model knows no parameters of kernels
    stamps_host_time = True
    merges_launches = False  # a launch costs a GPU little, and the virtual queue knows each by itself

    def __init__(self, soc: SocParameters, clock: SimulatedClock, real: GpuRuntime | None = None) -> None:
        self.soc = soc
        self.clock = clock
        self.real = real
        self.computes = real is not None
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
        """Return the real device's kernel, or what stands for one."""
        return NOTHING if self.real is None else self.real.kernel(files, name, defines)

    def kernel_of_source(self, source: str, name: str) -> Kernel:
        """Return the real device's kernel, or what stands for one."""
        return NOTHING if self.real is None else self.real.kernel_of_source(source, name)

    def kernel_identity(self, kernel: Kernel) -> KernelIdentity:
        """Return what a kernel was made from; nothing where nothing is computed."""
        return ((), "", ()) if self.real is None else self.real.kernel_identity(kernel)

    def written_arguments(self, kernel: Kernel) -> tuple[bool, ...]:
        """Return which arguments a kernel writes; none where nothing is computed."""
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
        """Return the prepared call of a kernel; one that states no work takes next to no time."""
        real = None
        if self.real is not None:
            real = self.real.launch(kernel, arguments, global_size, local_size, label)
        return SimulatedLaunch(self, kernel, arguments, label, work or _no_work, real, before)

    # -- memory --------------------------------------------------------------------------------------

    def shared(self, shape: tuple[int, ...], dtype: DTypeLike) -> SharedArray:
        """Return zeroed memory; pages count once they are used, so that what nothing writes costs nothing."""
        if self.real is not None:
            return self.real.shared(shape, dtype)
        nothing: Any = NOTHING
        return SharedArray(aligned_zeros(shape, dtype), nothing, nothing, coherent=True)

    def upload(self, array: NDArray[Any]) -> Buffer:
        """Return the real device's memory with the array's content, or what stands for it."""
        return NOTHING if self.real is None else self.real.upload(array)

    def scratch(self, size_bytes: int) -> Buffer:
        """Return device memory that the host never reads, or what stands for it."""
        return NOTHING if self.real is None else self.real.scratch(size_bytes)

    def shared_scratch(self, name: str, size_bytes: int) -> Buffer:
        """Return device memory that launches share by name, or what stands for it."""
        return NOTHING if self.real is None else self.real.shared_scratch(name, size_bytes)

    def copy(self, target: Buffer | NDArray[Any], source: Buffer | NDArray[Any]) -> None:
        """Copy between host and device memory, and wait for it."""
        if self.real is not None:
            self.real.copy(target, source)
        self.clock.copy()

    # -- queue and time ------------------------------------------------------------------------------

    def profiling_twin(self) -> SimulatedRuntime:
        """Return this object: its events carry timestamps."""
        return self

    def enqueue_marker(self) -> SimulatedEvent:
        """Return the event of what is enqueued so far."""
        return SimulatedEvent(self.clock, self.clock.last_job())

    def flush(self) -> None:
        """Do nothing: what is enqueued starts by itself."""

    def finish(self) -> None:
        """Wait until everything enqueued is done."""
        self.settle_real()
        self.clock.wait_idle()

    def hand_to_host(self) -> None:
        """Wait for everything by the driver, and copy what the other part reads: the papers' baseline."""
        self.finish()
        self.clock.hand_over_by_driver()

    def settle_real(self) -> None:
        """Let the real device compute all that it was given, in real time."""
        if self.real is not None:
            self.real.finish()

    def now_ns(self) -> int:
        """Return the nanoseconds of the virtual clock."""
        return round(1e3 * self.clock.now_us)

    def host_clock(self) -> HostClock:
        """Return the virtual clock: a turn of a poll ends when the GPU comes to the end of a kernel."""

        def turn() -> None:
            self.clock.poll_on()

        def sleep_s(seconds: float) -> None:
            self.clock.sleep(seconds * 1e6)

        return HostClock(self.now_ns, sleep_s, turn, self.clock.costs.sleep_us)

    def processor_ns(self) -> tuple[int, int]:
        """Return the control thread's processor time, twice: kernels take none of it."""
        busy_ns = round(1e3 * self.clock.totals.busy_us["host"])
        return busy_ns, busy_ns


if TYPE_CHECKING:
    _RUNTIME_MEETS_THE_PROTOCOL: type[GpuRuntime] = SimulatedRuntime
    _EVENT_MEETS_THE_PROTOCOL: type[Event] = SimulatedEvent


def _no_work() -> GpuWork:
    return GpuWork("elementwise", 0, 0, 0)


def _traits(soc: SocParameters, real: GpuRuntime | None) -> DeviceTraits:
    """Return what the simulated GPU reports; where something computes, how that must be programmed."""
    name, platform, driver = f"simulated GPU of {soc.name}", "heterollm model", f"parameters {soc.digest()}"
    cache_bytes = soc.memory.cache_mib * MIB
    if real is not None:
        return replace(real.traits, name=name, platform=platform, driver=driver, cache_bytes=cache_bytes)
    return DeviceTraits(
        name=name,
        platform=platform,
        version="",
        driver=driver,
        is_cpu=False,
        has_half=True,
        has_subgroups=True,
        has_integer_dot=True,
        compute_units=6,
        max_work_group=1024,
        max_buffer_bytes=4 * GIB,
        global_bytes=16 * GIB,
        local_bytes=32 << 10,
        cache_bytes=cache_bytes,
        coherent=True,
        extensions=(),
    )
