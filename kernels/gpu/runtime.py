"""The list of OpenCL devices, and the runtime of an opened one: its programs, memory and queue."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import (
    CacheError,
    DeviceError,
    KernelError,
    OptionError,
    atomic_path,
    delete_quietly,
    format_bytes,
    is_trusted,
    own_folder,
    see,
)
from heterollm.kernels.gpu.binding import OpenClError, build_quietly, cl
from heterollm.kernels.gpu.clocks import new_context
from heterollm.kernels.gpu.flags import FlagWord
from heterollm.kernels.gpu.launch import Argument, ChainedLaunch, Launch, OpenClLaunch
from heterollm.kernels.gpu.maps import READER, queue_for_maps
from heterollm.kernels.gpu.memory import (
    MEMORY_KINDS,
    MemoryKind,
    SharedArray,
    aligned_empty,
    aligned_zeros,
    svm_zeros,
)
from heterollm.kernels.gpu.pocl.builtins import WITHOUT_HEADER, builtin_declarations
from heterollm.kernels.gpu.pocl.target import (
    MATRIX_TARGET,
    TARGET_VARIABLE,
    allow_matrix,
    chosen_target,
    mend_target,
)
from heterollm.kernels.gpu.protocol import GpuRuntime, KernelIdentity
from heterollm.kernels.gpu.signals import has_fine_grained_atomics, opencl_flag
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.gpu.traits import DEFAULT_CACHE_BYTES, DeviceTraits, host_cache_bytes
from heterollm.kernels.gpu.tuning import DeviceTuning
from heterollm.kernels.gpu.variants import BuildError, VariantRecord
from heterollm.kernels.gpu.waiting import HostClock
from heterollm.kernels.gpu.work import GpuWork
from heterollm.kernels.ops import Power

logger = logging.getLogger(__name__)

OTHER_BUILTINS: Final = ("-cl-std=", "-DSUBGROUP", "-DWEIGHT_IMAGE")
"""Begins of the options of programs that call functions of extensions, which are not declared one by one."""

POCL_NAME: Final = "Portable Computing Language"

FEATURES: Final = {
    "float16": ("cl_khr_fp16",),
    "subgroups": ("cl_khr_subgroups", "cl_intel_subgroups"),
    "integer dot product": ("cl_khr_integer_dot_product",),
}
"""Features of GPUs, each with the extensions of which one offers it."""

MEMORY_VARIABLE: Final = "HETEROLLM_SHARED_MEMORY"
"""Environment variable with the kind of shared memory of devices that are opened without one."""


class OpenClRuntime:
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
        self.target = _mend_pocl(device)
        self.shared_memory = _shared_memory(device, shared_memory)
        has_matrix = self.target == MATRIX_TARGET and allow_matrix()
        self.traits = _traits(device, coherent=self.shared_memory != "mapped", has_matrix=has_matrix)
        self._device = device
        self._power: Power = power
        self._flags = _build_flags(device)
        try:
            self.context, self.clock_hint = new_context(device, power)
            properties = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
            self.queue = cl.CommandQueue(self.context, device, properties)
        except OpenClError as error:
            raise DeviceError(f"Cannot open the OpenCL device {self.traits.name!r}: {error}.") from error
        self.variants = VariantRecord(self.traits.name)
        self._endings_fail = False
        self.tuning = DeviceTuning(self.traits.identity(self.target))
        # This project's tests cover PoCL; other compilers are tested on the device.
        self.tests_kernels = self.traits.platform != POCL_NAME
        self._shared_scratch: dict[str, cl.Buffer] = {}
        self._written: dict[KernelIdentity, tuple[bool, ...]] = {}
        self._sources: dict[int, tuple[tuple[str, ...], frozenset[tuple[str, str | int]]]] = {}
        self._programs: dict[tuple[tuple[str, ...], frozenset[tuple[str, str | int]]], cl.Program] = {}

    # -- programs ------------------------------------------------------------------------------------

    def kernel(
        self, files: Sequence[str], name: str, defines: Mapping[str, str | int] | None = None
    ) -> cl.Kernel:
        """Build source files and return a new kernel; see :class:`heterollm.kernels.gpu.GpuRuntime`."""
        # A pass of a new length needs hundreds of kernels, so the lookup of a built program is fast.
        key = (tuple(files), frozenset((defines or {}).items()))
        program = self._programs.get(key)
        if program is None:
            options = [*self._flags, *(f"-D{key}={value}" for key, value in sorted((defines or {}).items()))]
            program = self._programs[key] = self._build(read_sources(files), options, name)
            self._sources[program.int_ptr] = key
        try:
            return cl.Kernel(program, name)
        except OpenClError as error:
            raise BuildError(f"{'+'.join(files)} has no usable kernel {name!r}: {error}.") from error

    def kernel_identity(self, kernel: cl.Kernel) -> KernelIdentity:
        """Return the files, name and defines of a kernel of :meth:`kernel`."""
        files, defines = self._sources[kernel.program.int_ptr]
        return files, kernel.function_name, tuple(sorted(defines))

    def written_arguments(self, kernel: cl.Kernel) -> tuple[bool, ...]:
        """Return for each argument of a kernel of :meth:`kernel` whether it is memory that is not constant.

        Only checks need this. It builds the program again with the option to keep argument types.
        """
        files, name, defines = kind = self.kernel_identity(kernel)
        found = self._written.get(kind)
        if found is None:
            options = ["-cl-kernel-arg-info", *self._flags, *(f"-D{key}={value}" for key, value in defines)]
            twin = cl.Kernel(self._build(read_sources(files), options, name), name)
            spaces, kinds = cl.kernel_arg_address_qualifier, cl.kernel_arg_type_qualifier
            info = cl.kernel_arg_info
            found = self._written[kind] = tuple(
                twin.get_arg_info(index, info.ADDRESS_QUALIFIER) == spaces.GLOBAL
                and not twin.get_arg_info(index, info.TYPE_QUALIFIER) & kinds.CONST
                for index in range(twin.num_args)
            )
        return found

    def kernel_of_source(self, source: str, name: str) -> cl.Kernel:
        """Build a program once from its source, and return a new kernel."""
        key = ((source,), frozenset[tuple[str, str | int]]())
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._build(source, [], name)
        return cl.Kernel(program, name)

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

    def _build(self, source: str, options: list[str], name: str) -> cl.Program:
        # PoCL has a cache of binaries; for other drivers this is one file per program and driver.
        own_cache = self.traits.platform != POCL_NAME
        device_key = hashlib.sha256(repr((self.traits, source, options)).encode()).hexdigest()
        path = own_folder("opencl") / f"{device_key}.bin"
        if own_cache and path.exists():
            program = self._from_binary(path)
            if program is not None:
                return program
        try:
            program = self._compiled(source, options)
        except OpenClError as error:
            raise BuildError(
                f"The OpenCL compiler of {self.traits.name!r} ({self.traits.driver}) refuses the program "
                f"with kernel {name!r} and options {' '.join(options)}: {error}",
                fix="Run `heterollm doctor` and report its table. "
                + see("the-opencl-compiler-refuses-a-program"),
            ) from error
        if own_cache:
            self._keep_binary(path, program)
        return program

    def _compiled(self, source: str, options: list[str]) -> cl.Program:
        if _is_pocl_3(self._device) and not any(option.startswith(OTHER_BUILTINS) for option in options):
            declared = cl.Program(self.context, f"{builtin_declarations()}\n{source}")
            # A program that calls yet other functions is built with the header.
            with contextlib.suppress(OpenClError):
                return _built(declared, [*options, WITHOUT_HEADER])
        return _built(cl.Program(self.context, source), options)

    def _from_binary(self, path: Path) -> cl.Program | None:
        if not is_trusted(path):
            logger.warning("Another user can write the OpenCL program %s; building it again", path)
            return None
        with path.open("rb") as file:
            digest, binary = file.read(32), file.read()
        if hashlib.sha256(binary).digest() != digest:
            logger.warning("The cached OpenCL program %s is damaged; building it again", path)
            return None
        # Some drivers crash on a binary; the marker left behind keeps the next process from loading it.
        marker = path.with_suffix(".loading")
        if marker.exists():
            logger.warning("A process ended while it loaded the OpenCL program %s; building it again", path)
            delete_quietly(marker)
            return None
        try:
            marker.touch()
            program = build_quietly(cl.Program(self.context, [self._device], [binary]))
            delete_quietly(marker)
        except OSError:  # a folder that cannot be written
            return None
        except OpenClError as error:
            delete_quietly(marker)
            logger.warning(
                "The driver refuses the cached OpenCL program %s (%s); building it again", path, error
            )
            return None
        return program

    @staticmethod
    def _keep_binary(path: Any, program: cl.Program) -> None:  # noqa: ANN401
        binary = program.get_info(cl.program_info.BINARIES)[0]
        try:
            with atomic_path(path) as temporary:
                temporary.write_bytes(hashlib.sha256(binary).digest() + binary)
        except CacheError as error:
            logger.warning("OpenCL programs are not kept: %s", error)

    # -- memory --------------------------------------------------------------------------------------

    def shared(self, shape: tuple[int, ...], dtype: DTypeLike) -> SharedArray:
        """Return zeroed memory that host and device share, of the runtime's kind.

        Unused pages take no memory, unless the kind is ``svm``.
        """
        if self.shared_memory == "svm":
            array = self._allocated(
                int(np.prod(shape)) * np.dtype(dtype).itemsize,
                lambda: svm_zeros(self.context, shape, dtype),
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
        self,
        target: cl.Buffer,
        source: cl.Buffer,
        size_bytes: int,
        *,
        to_bytes: int = 0,
        from_bytes: int = 0,
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


def list_opencl_devices(
    asking: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> list[tuple[str, cl.Device]]:
    """Return every OpenCL device of the process with its platform's name.

    Args:
        asking: Returns the context in which to ask the platform of a name; drivers start their threads then.

    Raises:
        DeviceError: No OpenCL runtime is installed.
    """
    try:
        platforms = cl.get_platforms()
    except OpenClError as error:
        raise DeviceError(f"No OpenCL runtime was found ({error}).", fix=runtime_advice()) from error
    found: list[tuple[str, cl.Device]] = []
    for entry in platforms:
        with asking(entry.name):
            found.extend((entry.name, device) for device in _platform_devices(entry))
    return found


def _platform_devices(entry: cl.Platform) -> list[cl.Device]:
    """Return the devices of a platform; a phone's driver has refused the type ALL and answered to GPU."""
    try:
        return list(entry.get_devices())
    except OpenClError as error:
        logger.info("OpenCL platform %s refuses the list of all its devices: %s", entry.name, error)
    try:
        return list(entry.get_devices(cl.device_type.GPU))
    except OpenClError as error:
        logger.info("OpenCL platform %s has no usable device: %s", entry.name, error)
    return []


def is_cpu(device: cl.Device) -> bool:
    """Return whether a device is the host's CPU."""
    return bool(device.type & cl.device_type.CPU)


def gpu_features(device: cl.Device) -> str:
    """Return a GPU's kind of shared memory, compute units and features without opening it."""
    memory = f"{'svm' if has_fine_grained_atomics(device) else 'mapped'} memory"
    return ", ".join((memory, f"{device.max_compute_units} compute units", *_features(device)))


def _features(device: cl.Device) -> list[str]:
    extensions = set(device.extensions.split())
    return [name for name, offering in FEATURES.items() if extensions.intersection(offering)]


def runtime_advice() -> str:
    """Return the command that installs an OpenCL runtime for the CPU on this platform."""
    system, machine = platform.system(), platform.machine()
    advice = "Install the OpenCL driver of the machine's vendor."
    if (system, machine) in {("Linux", "x86_64"), ("Windows", "AMD64")}:
        advice = "Install one with `pip install 'heterollm[host]'`."
    elif system == "Linux":
        advice = "Install the distribution's PoCL, such as `apt install pocl-opencl-icd`."
    return f"{advice} {see('no-opencl-runtime-for-the-cpu')}"


def _shared_memory(device: cl.Device, kind: MemoryKind | None) -> MemoryKind:
    """Return the kind of shared memory of a device; see :class:`OpenClRuntime`."""
    name, cpu = device.name.strip(), is_cpu(device)
    chosen = kind or os.environ.get(MEMORY_VARIABLE) or ""
    if chosen and chosen not in MEMORY_KINDS:
        raise OptionError(
            f"There is no kind of shared memory {chosen!r:.80}.",
            fix=f"Choose among {', '.join(MEMORY_KINDS)}, or unset {MEMORY_VARIABLE}.",
        )
    if not chosen:
        return "host" if cpu else "svm" if has_fine_grained_atomics(device) else "mapped"
    if chosen == "svm" and not has_fine_grained_atomics(device):
        raise DeviceError(
            f"{name!r} does not report fine-grained shared virtual memory with atomics.",
            fix="Choose the kind mapped. " + see("memory-is-mapped"),
        )
    if chosen == "host" and not cpu:
        raise DeviceError(
            f"{name!r} is no CPU, so that it may hold copies of the host's memory.",
            fix="Choose the kind svm or mapped. " + see("memory-is-mapped"),
        )
    return next(known for known in MEMORY_KINDS if known == chosen)


def _traits(device: cl.Device, *, coherent: bool, has_matrix: bool) -> DeviceTraits:
    features = _features(device)
    return DeviceTraits(
        name=device.name.strip(),
        platform=device.platform.name.strip(),
        version=device.version.strip(),
        driver=device.driver_version.strip(),
        is_cpu=is_cpu(device),
        has_half="float16" in features,
        has_subgroups="subgroups" in features,
        has_matrix=has_matrix,
        has_integer_dot="integer dot product" in features,
        compute_units=device.max_compute_units,
        max_work_group=device.max_work_group_size,
        max_buffer_bytes=device.max_mem_alloc_size,
        global_bytes=device.global_mem_size,
        local_bytes=device.local_mem_size,
        cache_bytes=_cache_bytes(device),
        image_texels=device.image_max_buffer_size if device.image_support else 0,
        coherent=coherent,
        extensions=tuple(device.extensions.split()),
    )


def _build_flags(device: cl.Device) -> list[str]:
    """Return the compiler options that a device gets beside the defines; none for CPUs.

    A GPU without a fast fused multiply-add may add after multiplying unless it is told that `mad` will do.
    The integer dot product is part of OpenCL C 3.0 alone.
    """
    if is_cpu(device):
        return []
    newest = device.opencl_c_version.startswith("OpenCL C 3")
    return ["-cl-mad-enable", *(["-cl-std=CL3.0"] if newest else [])]


def _built(program: cl.Program, options: list[str]) -> cl.Program:
    try:
        return build_quietly(program, options)
    except MemoryError as error:
        # PoCL keeps its lock: freeing the program, at the end of the process too, would wait for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(program))
        raise KernelError(
            "The memory ran out while the OpenCL compiler was at work.",
            fix="Free some memory, or raise the limit of the process, and start it again.",
        ) from error


def _cache_bytes(device: cl.Device) -> int:
    """Return the size of the last cache before memory."""
    # A GPU's driver does not report the cache that it shares with the SoC, so an upper estimate is assumed.
    if is_cpu(device):
        return host_cache_bytes()
    return max(DEFAULT_CACHE_BYTES, int(device.global_mem_cache_size))


def _is_pocl_3(device: cl.Device) -> bool:
    return bool(device.platform.name.strip() == POCL_NAME and device.driver_version.startswith("3."))


def _mend_pocl(device: cl.Device) -> str | None:
    if _is_pocl_3(device) and (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return mend_target(device.int_ptr)
    if chosen := chosen_target():
        raise DeviceError(
            f"{TARGET_VARIABLE} names {chosen}, which only PoCL 3 on Linux x86-64 can be told, not "
            f"{device.platform.name.strip()} {device.driver_version.strip()}.",
            fix=f"Unset {TARGET_VARIABLE}. {see('pocl-and-new-processors')}",
        )
    return None
