"""The protocol of a GPU: programs, shared memory, launches, one in-order queue, and time.

A runtime states its properties; callers never test its class or whether it is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.gpu.flags import FlagWord
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import MemoryKind, SharedArray
from heterollm.kernels.gpu.traits import DeviceTraits
from heterollm.kernels.gpu.tuning import DeviceTuning
from heterollm.kernels.gpu.variants import VariantRecord
from heterollm.kernels.gpu.waiting import HostClock
from heterollm.kernels.gpu.work import GpuWork

KernelIdentity: TypeAlias = tuple[tuple[str, ...], str, tuple[tuple[str, str | int], ...]]
"""Identity of a kernel: source files, name, and sorted defines."""

Kernel: TypeAlias = Any
"""A kernel, opaque to all but its runtime."""

GpuBuffer: TypeAlias = Any
"""Device memory, opaque to all but its runtime."""


class Event(Protocol):
    """The event of a launch or a marker, as in OpenCL."""

    @property
    def command_execution_status(self) -> int:
        """0 if complete, negative if failed."""

    @property
    def profile(self) -> Any:  # noqa: ANN401 - pyopencl is not typed
        """Its times ``queued``, ``start`` and ``end`` in nanoseconds."""

    def wait(self) -> None:
        """Block in the driver until the event is complete."""


class GpuRuntime(Protocol):
    """A GPU with one in-order queue: an OpenCL device or a simulated one.

    Attributes:
        traits: Properties of the device.
        shared_memory: Kind of the memory that host and device share.
        target: Processor that its compiler compiles for; None for the detected one.
        variants: Tested and rejected kernel variants.
        tuning: Tuned parameters of its kernels.
        tests_kernels: Whether kernel variants are tested before use.
        computes: Whether kernels compute values; otherwise only shapes and times are valid.
    """

    traits: DeviceTraits
    shared_memory: MemoryKind
    target: str | None
    variants: VariantRecord
    tuning: DeviceTuning
    tests_kernels: bool
    computes: bool

    @property
    def maps_beside_kernels(self) -> bool:
        """Whether memory that no running kernel writes is mapped without waiting for the queue."""

    @property
    def merges_launches(self) -> bool:
        """Whether adjacent launches are faster if merged into one."""

    @property
    def has_endings(self) -> bool:
        """Whether linear layers of one token compute the operators around them: on GPUs."""

    @property
    def is_tunable(self) -> bool:
        """Whether the time of its kernels depends on their parameters."""

    @property
    def stamps_host_time(self) -> bool:
        """Whether all events are stamped, on the clock of :attr:`now_ns`."""

    @property
    def flag(self) -> FlagWord | None:
        """The flag that the host polls; None if the host cannot see a kernel's writes on a busy queue."""

    # -- programs ------------------------------------------------------------------------------------

    def kernel(
        self, files: Sequence[str], name: str, defines: Mapping[str, str | int] | None = None
    ) -> Kernel:
        """Build the source files, once per set of defines, and return a new kernel.

        Args:
            files: File names inside ``heterollm.kernels.gpu.opencl``, joined in order.
            name: Kernel function.
            defines: Preprocessor definitions.

        Raises:
            BuildError: The program does not build; the message carries the compiler's log.
        """

    def kernel_of_source(self, source: str, name: str) -> Kernel:
        """Build a program once from its source, and return a new kernel."""

    def kernel_identity(self, kernel: Kernel) -> KernelIdentity:
        """Return the files, name and defines of a kernel of :meth:`kernel`."""

    def written_arguments(self, kernel: Kernel) -> tuple[bool, ...]:
        """Return for each argument of a kernel of :meth:`kernel` whether the kernel may write to it."""

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
        """Return a launch of a kernel.

        Args:
            kernel: The kernel.
            arguments: Its arguments.
            global_size: Work-items in each dimension.
            local_size: Work-items of a work-group in each dimension.
            label: Name for traces and errors.
            before: Launch to enqueue first.
            work: Returns the work of the launch; only a simulated device calls it, at each enqueue.

        Raises:
            KernelError: The kernel refuses its arguments.
        """

    # -- memory --------------------------------------------------------------------------------------

    def shared(self, shape: tuple[int, ...], dtype: DTypeLike) -> SharedArray:
        """Return zeroed memory that host and device share; unused pages take no memory.

        Raises:
            KernelError: Memory is short; this holds for all methods below.
        """

    def upload(self, array: NDArray[Any]) -> GpuBuffer:
        """Return read-only device memory with an array's content; the array must not change."""

    def word_image(self, buffer: GpuBuffer) -> GpuBuffer:
        """Return the memory of :meth:`upload` as an image with a texel for each word of 32 bits.

        Raises:
            BuildError: The device has no images, or none so large.
        """

    def scratch(self, size_bytes: int) -> GpuBuffer:
        """Return zeroed device memory that the host does not access."""

    def shared_scratch(self, name: str, size_bytes: int) -> GpuBuffer:
        """Return device memory of at least a size, for data that one launch passes to the next.

        Launches share it by name, since the queue is in order.
        """

    def copy(
        self, target: GpuBuffer | NDArray[Any], source: GpuBuffer | NDArray[Any], *, offset_bytes: int = 0
    ) -> None:
        """Copy between host and device memory, behind all kernels in the queue, and wait.

        Args:
            target: Device memory, or an array.
            source: An array, or device memory.
            offset_bytes: First byte in the device memory; in the target where both are.

        Raises:
            KernelError: The driver refuses.
        """

    def copy_range(
        self, target: GpuBuffer, source: GpuBuffer, size_bytes: int, *, to_bytes: int = 0, from_bytes: int = 0
    ) -> None:
        """Copy bytes between device memories, or within one where they do not meet, and wait.

        Args:
            target: Device memory.
            source: Device memory.
            size_bytes: Bytes to copy.
            to_bytes: First byte in the target.
            from_bytes: First byte in the source.

        Raises:
            KernelError: The driver refuses.
        """

    # -- queue ---------------------------------------------------------------------------------------

    def profiling_twin(self) -> GpuRuntime:
        """Return a runtime on the same device with stamped events; possibly this one."""

    def enqueue_marker(self) -> Event:
        """Enqueue a marker and return its event."""

    def flush(self) -> None:
        """Submit the queue to the device."""

    def finish(self) -> None:
        """Wait until the queue is empty.

        Raises:
            KernelError: A kernel failed.
        """

    def hand_to_host(self) -> None:
        """Wait until the queue is empty and the host can read the results: the baseline of fences."""

    # -- time ----------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the nanoseconds since any fixed moment, on the device's clock."""

    def host_clock(self) -> HostClock:
        """Return the clock by which the calling thread waits."""

    def processor_ns(self) -> tuple[int, int]:
        """Return the CPU time of the calling thread and of the process."""
