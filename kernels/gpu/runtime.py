"""The runtime of an opened OpenCL device: its memory, launches and queue."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import DeviceError, KernelError, format_bytes, see
from heterollm.kernels.gpu.binding import OpenClError, cl
from heterollm.kernels.gpu.clocks import new_context
from heterollm.kernels.gpu.flags import FlagWord
from heterollm.kernels.gpu.launch import Argument, ChainedLaunch, Launch, OpenClLaunch
from heterollm.kernels.gpu.maps import READER, queue_for_maps
from heterollm.kernels.gpu.memory import MemoryKind, SharedArray, aligned_empty, aligned_zeros, svm_zeros
from heterollm.kernels.gpu.opencl_devices import chosen_shared_memory, device_traits
from heterollm.kernels.gpu.pocl.target import MATRIX_TARGET, allow_matrix
from heterollm.kernels.gpu.programs import POCL_NAME, OpenClPrograms, mend_pocl
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.signals import opencl_flag
from heterollm.kernels.gpu.tuning import DeviceTuning
from heterollm.kernels.gpu.variants import BuildError, VariantRecord
from heterollm.kernels.gpu.waiting import HostClock
from heterollm.kernels.gpu.work import GpuWork
from heterollm.kernels.ops import Power


class OpenClRuntime(OpenClPrograms):
    """One opened OpenCL device with one in-order queue.

    Args:
        device: The pyopencl device.
        profiling: Whether events carry timestamps; costs a little on every launch.
        shared_memory: Kind of the memory that host and device share; None for the one that the environment
            names, else ``host`` on a CPU, and elsewhere ``svm`` if the device reports it, or ``mapped``.
        power: Clocks to ask for.

    Attributes:
        shared_memory: The kind.
        clock_hint: The hint that the context carries, or why there is none.

    Raises:
        DeviceError: The device cannot be opened, or does not have this kind of memory.
    """

    computes = True
    is_tunable = True
    stamps_host_time = False
    now_ns: Callable[[], int] = staticmethod(time.perf_counter_ns)

    def __init__(
        self,
        device: cl.Device,
        *,
        profiling: bool = False,
        shared_memory: MemoryKind | None = None,
        power: Power = "default",
    ) -> None:
        self.target = mend_pocl(device)
        self.shared_memory = chosen_shared_memory(device, shared_memory)
        has_matrix = self.target == MATRIX_TARGET and allow_matrix()
        traits = device_traits(device, coherent=self.shared_memory != "mapped", has_matrix=has_matrix)
        self._power: Power = power
        try:
            context, self.clock_hint = new_context(device, power)
            properties = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
            self.queue = cl.CommandQueue(context, device, properties)
        except OpenClError as error:
            raise DeviceError(f"Cannot open the OpenCL device {traits.name!r}: {error}.") from error
        super().__init__(device, context, traits)
        self.variants = VariantRecord(traits.name)
        self._endings_fail = False
        self.tuning = DeviceTuning(traits.identity(self.target))
        # This project's tests cover PoCL; other compilers are tested on the device.
        self.tests_kernels = traits.platform != POCL_NAME
        self._shared_scratch: dict[str, cl.Buffer] = {}

    def launch(
        self,
        kernel: cl.Kernel,
        arguments: Sequence[Argument],
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
        label: str,
        before: Launch | None = None,
        *,
        work: Callable[[], GpuWork] | None = None,  # noqa: ARG002 - only simulated devices use it
    ) -> Launch:
        """Return a launch of a kernel; see :class:`heterollm.kernels.gpu.GpuRuntime`."""
        try:
            launch = OpenClLaunch(self.queue, kernel, arguments, global_size, local_size, label)
        except (OpenClError, TypeError) as error:
            raise KernelError(f"Kernel {label!r} refuses its arguments: {error}.") from error
        return launch if before is None else ChainedLaunch(before, launch)

    # -- memory --------------------------------------------------------------------------------------

    def shared(self, shape: tuple[int, ...], dtype: DTypeLike) -> SharedArray:
        """Return zeroed memory that host and device share, of the runtime's kind.

        Unused pages take no memory, unless the kind is ``svm``.
        """
        if self.shared_memory == "svm":
            array = self._allocated(
                int(np.prod(shape)) * np.dtype(dtype).itemsize, lambda: svm_zeros(self.context, shape, dtype)
            )
            return SharedArray(array, cl.SVM(array), self.queue, coherent=True)
        array = aligned_zeros(shape, dtype)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        own = self._buffer(flags, array)
        return SharedArray(array, own, self.queue, self.traits.coherent, self.map_queue)

    def upload(self, array: NDArray[Any]) -> cl.Buffer:
        """Return read-only device memory with an array's content.

        A CPU uses the array's own memory, which must not change; the buffer keeps it alive.
        """
        array = np.ascontiguousarray(array)
        if self.traits.is_cpu:
            if array.ctypes.data % 64:
                aligned = aligned_empty(array.shape, array.dtype)
                aligned[...] = array
                array = aligned
            return self._buffer(cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR, array)
        return self._buffer(cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, array)

    def word_image(self, buffer: cl.Buffer) -> cl.Image:
        """Return a buffer's words of 32 bits as the texels of an image; see :class:`GpuRuntime`."""
        texels = buffer.size // 4
        if texels > self.traits.image_texels:
            raise BuildError(
                f"An image of {texels} texels exceeds the limit of {self.traits.name!r}, "
                f"{self.traits.image_texels}."
            )
        word = cl.ImageFormat(cl.channel_order.R, cl.channel_type.UNSIGNED_INT32)
        try:
            return cl.create_image(self.context, cl.mem_flags.READ_ONLY, word, (texels,), buffer=buffer)
        except OpenClError as error:
            raise BuildError(f"{self.traits.name!r} has no image of {texels} words: {error}.") from error

    def scratch(self, size_bytes: int) -> cl.Buffer:
        """Return zeroed device memory that the host does not access; on a CPU unused pages take no memory."""
        size, flags = max(1, size_bytes), cl.mem_flags.READ_WRITE
        if self.traits.is_cpu:
            return self._buffer(flags | cl.mem_flags.USE_HOST_PTR, aligned_zeros((size,), np.uint8))
        buffer: cl.Buffer = self._allocated(size, lambda: cl.Buffer(self.context, flags, size))
        cl.enqueue_fill_buffer(self.queue, buffer, np.uint8(0), 0, size)
        return buffer

    def copy_range(
        self, target: cl.Buffer, source: cl.Buffer, size_bytes: int, *, to_bytes: int = 0, from_bytes: int = 0
    ) -> None:
        """Copy bytes between device memories, or within one, and wait; see :class:`GpuRuntime`.

        Raises:
            KernelError: The driver refuses.
        """
        places = {"byte_count": size_bytes, "src_offset": from_bytes, "dst_offset": to_bytes}
        try:
            cl.enqueue_copy(self.queue, target, source, **places)
        except OpenClError as error:
            raise KernelError(f"A copy of {size_bytes} bytes failed: {error}.") from error
        self.finish()

    def shared_scratch(self, name: str, size_bytes: int) -> cl.Buffer:
        """Return device memory of at least a size, for data that one launch passes to the next.

        Launches share it by name, since the queue is in order.
        """
        held = self._shared_scratch.get(name)
        if held is None or held.size < size_bytes:
            # The size is a power of two, so that growing launches do not keep many buffers.
            held = self._shared_scratch[name] = self.scratch(1 << (size_bytes - 1).bit_length())
        return held

    def _buffer(self, flags: int, array: NDArray[Any]) -> cl.Buffer:
        make = functools.partial(cl.Buffer, self.context, flags, hostbuf=array)
        buffer: cl.Buffer = self._allocated(array.nbytes, make)
        return buffer

    def _allocated(self, size_bytes: int, allocate: Callable[[], Any]) -> Any:  # noqa: ANN401
        self._check_size(size_bytes)
        try:
            return allocate()
        except OpenClError as error:
            raise KernelError(
                f"{self.traits.name!r} cannot allocate {format_bytes(size_bytes)}: {error}.",
                fix="Use a smaller model or context, or close other programs.",
            ) from error

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.traits.max_buffer_bytes:
            raise KernelError(
                f"One buffer of {format_bytes(size_bytes)} exceeds the limit of {self.traits.name!r}, "
                f"{format_bytes(self.traits.max_buffer_bytes)}.",
                fix="Use a smaller model or context. " + see("one-buffer-is-too-large"),
            )

    # -- queue ---------------------------------------------------------------------------------------

    @property
    def merges_launches(self) -> bool:
        """Whether adjacent launches are faster if merged: on CPUs."""
        return self.traits.is_cpu and self.traits.coherent

    @property
    def has_endings(self) -> bool:
        """Whether linear layers of one token compute the operators around them: on GPUs where they can."""
        return not (self.traits.is_cpu or self._endings_fail)

    def refuse_endings(self, reason: str) -> None:
        """Give the operators around linear layers launches of their own from now on, for a reason."""
        self._endings_fail = True
        self.variants.note(f"{self.traits.name} launches operators behind linear layers singly: {reason}")

    @functools.cached_property
    def map_queue(self) -> cl.CommandQueue | None:
        """A queue for maps beside kernels; None where memory needs no map, or maps wait for all kernels."""
        if self.traits.coherent:
            return None
        kernel = self.kernel_of_source(READER, "read_for_long")
        return queue_for_maps(self.context, self._device, self.queue, kernel)

    @property
    def maps_beside_kernels(self) -> bool:
        """Whether memory that no running kernel writes is mapped without waiting for the queue."""
        return self.map_queue is not None

    @functools.cached_property
    def flag(self) -> FlagWord | None:
        """The flag that the host polls; None if host and device have no memory for it."""
        return opencl_flag(self, self.queue)

    def profiling_twin(self) -> OpenClRuntime:
        """Return another runtime on the same device with stamped events."""
        options: dict[str, Any] = {"shared_memory": self.shared_memory, "power": self._power}
        twin = OpenClRuntime(self._device, profiling=True, **options)
        twin._endings_fail = self._endings_fail
        return twin

    def copy(self, target: Any, source: Any, *, offset_bytes: int = 0) -> None:  # noqa: ANN401 - a buffer and an array, either way
        """Copy between host and device memory, and wait; see :class:`GpuRuntime`.

        Raises:
            KernelError: The driver refuses.
        """
        try:
            offset = {"src_offset" if isinstance(target, np.ndarray) else "dst_offset": offset_bytes}
            cl.enqueue_copy(self.queue, target, source, **(offset if offset_bytes else {}))
        except OpenClError as error:
            host = target if isinstance(target, np.ndarray) else source
            raise KernelError(f"A copy of {host.nbytes} bytes failed: {error}.") from error

    def enqueue_marker(self) -> Any:  # noqa: ANN401 - an OpenCL event
        """Enqueue a marker and return its event."""
        return cl.enqueue_marker(self.queue)

    def flush(self) -> None:
        """Submit the queue to the device."""
        self.queue.flush()

    def finish(self) -> None:
        """Wait until the queue is empty.

        Raises:
            KernelError: A kernel failed.
        """
        try:
            self.queue.finish()
        except OpenClError as error:
            raise KernelError(f"A kernel failed on {self.traits.name!r}: {error}.") from error

    def hand_to_host(self) -> None:
        """Wait until the queue is empty; shared memory needs no copy."""
        self.finish()

    # -- time ----------------------------------------------------------------------------------------

    def host_clock(self) -> HostClock:
        """Return the clock by which the calling thread waits."""
        return HostClock.of_this_thread()

    def processor_ns(self) -> tuple[int, int]:
        """Return the CPU time of the calling thread and of the process."""
        return time.thread_time_ns(), time.process_time_ns()


if TYPE_CHECKING:
    _MEETS_THE_PROTOCOL: type[GpuRuntime] = OpenClRuntime
