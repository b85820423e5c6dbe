"""The protocol of a GPU: programs, memory that the host shares, launches, one in-order queue, and time.

A runtime states its properties (what it computes, merges, tests, stamps); nothing above asks for its class or
whether it is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.gpu.flags import FlagWord
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import SharedArray
from heterollm.kernels.gpu.traits import DeviceTraits
from heterollm.kernels.gpu.tuning import DeviceTuning
from heterollm.kernels.gpu.variants import VariantRecord
from heterollm.kernels.gpu.waiting import HostClock
from heterollm.kernels.gpu.work import GpuWork

__all__ = ["Buffer", "Event", "GpuRuntime", "Kernel", "KernelIdentity"]

KernelIdentity: TypeAlias = tuple[tuple[str, ...], str, tuple[tuple[str, str | int], ...]]
"""What a kernel is made from: source files, its name, and defines in order."""

Kernel: TypeAlias = Any
"""A kernel; only the runtime that made it looks inside."""

Buffer: TypeAlias = Any
"""Device memory; only the runtime that made it looks inside."""


class Event(Protocol):
    """The event of a launch or a marker, as OpenCL has it."""

    @property
    def command_execution_status(self) -> int:
        """0 once it is complete, negative if it failed."""
        ...

    @property
    def profile(self) -> Any:  # noqa: ANN401 - pyopencl is not typed
        """When it was ``queued``, when it came to its ``start`` and ``end``, in nanoseconds."""
        ...

    def wait(self) -> None:
        """Block in the driver until it is complete."""
        ...


class GpuRuntime(Protocol):
    """A GPU part with one in-order queue, or what stands for one.

    Attributes:
        traits: What the device reports about itself.
        target: The processor that its compiler was told to compile for; None for what the driver detects.
        variants: Which variants of kernels work on it.
        tuning: The parameters of its kernels.
        tests_kernels: Whether variants of kernels are tried out before they are relied on.
        computes: Whether kernels compute anything; without it only shapes and times are right.
    """

    traits: DeviceTraits
    target: str | None
    variants: VariantRecord
    tuning: DeviceTuning
    tests_kernels: bool
    computes: bool

    @property
    def merges_launches(self) -> bool:
        """Whether launches that follow each other gain by being one."""
        ...

    @property
    def is_tunable(self) -> bool:
        """Whether the time of its kernels depends on their parameters, so that a search is worth it."""
        ...

    @property
    def stamps_host_time(self) -> bool:
        """Whether all events are stamped, in the time of :attr:`now_ns`."""
        ...

    @property
    def flag(self) -> FlagWord | None:
        """The flag that the host polls; None where it sees no write of a kernel while the queue is busy."""
        ...

    # -- programs ------------------------------------------------------------------------------------

    def kernel(
        self, files: Sequence[str], name: str, defines: Mapping[str, str | int] | None = None
    ) -> Kernel:
        """Build the named source files (once per set of defines) and return a new kernel.

        Args:
            files: File names inside ``heterollm.kernels.gpu.opencl``, joined in order.
            name: Kernel function.
            defines: Preprocessor definitions.

        Raises:
            BuildError: The program does not build; the message carries the compiler's log.
        """
        ...

    def kernel_of_source(self, source: str, name: str) -> Kernel:
        """Build a program (once) and return a new kernel, as :meth:`kernel` does with files."""
        ...

    def kernel_identity(self, kernel: Kernel) -> KernelIdentity:
        """Return what a kernel of :meth:`kernel` was made from: files, name and defines."""
        ...

    def written_arguments(self, kernel: Kernel) -> tuple[bool, ...]:
        """Return for each argument of a kernel of :meth:`kernel` whether the kernel may write to it."""
        ...

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
        """Return the prepared call of a kernel.

        Args:
            kernel: The kernel.
            arguments: Its arguments.
            global_size: Work-items in each dimension.
            local_size: Of them those of a work-group.
            label: Name for traces and errors.
            before: A launch to enqueue first.
            work: Returns what the launch has to do. Only a device whose time is modelled calls it, each time
                the launch is enqueued; to others it is of no interest.

        Raises:
            KernelError: The kernel refuses its arguments.
        """
        ...

    # -- memory --------------------------------------------------------------------------------------

    def shared(self, shape: tuple[int, ...], dtype: DTypeLike) -> SharedArray:
        """Return zeroed memory that host and device share without copies; pages count once they are used.

        Raises:
            KernelError: There is not so much memory, here as in the methods below.
        """
        ...

    def upload(self, array: NDArray[Any]) -> Buffer:
        """Return read-only device memory with the array's content; the array must not change."""
        ...

    def scratch(self, size_bytes: int) -> Buffer:
        """Return device memory that the host never reads."""
        ...

    def shared_scratch(self, name: str, size_bytes: int) -> Buffer:
        """Return device memory of at least that size for what one launch leaves to the next.

        All launches share it by name: the queue is in order.
        """
        ...

    def copy(self, target: Buffer | NDArray[Any], source: Buffer | NDArray[Any]) -> None:
        """Copy between host and device memory, and wait for it."""
        ...

    # -- queue ---------------------------------------------------------------------------------------

    def profiling_twin(self) -> GpuRuntime:
        """Return a runtime on the same device whose events are stamped; it may be this one."""
        ...

    def enqueue_marker(self) -> Event:
        """Enqueue a marker and return its event, which is complete once the queue got there."""
        ...

    def flush(self) -> None:
        """Start what is enqueued."""
        ...

    def finish(self) -> None:
        """Wait until everything enqueued is done.

        Raises:
            KernelError: A kernel failed.
        """
        ...

    def hand_to_host(self) -> None:
        """Wait for everything, and let the host at the results, as the baseline of hand-overs does."""
        ...

    # -- time ----------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the nanoseconds from any fixed moment, in the time that the device runs in."""
        ...

    def host_clock(self) -> HostClock:
        """Return what the calling thread waits by."""
        ...

    def processor_ns(self) -> tuple[int, int]:
        """Return the processor time of the calling thread and of the process so far."""
        ...
