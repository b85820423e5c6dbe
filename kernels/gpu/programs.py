"""Programs of an opened OpenCL device: their sources, options, and the files that keep their binaries."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from heterollm.base import (
    CacheError,
    DeviceError,
    KernelError,
    atomic_path,
    delete_quietly,
    is_trusted,
    own_folder,
    see,
)
from heterollm.kernels.gpu.binding import OpenClError, build_quietly, cl
from heterollm.kernels.gpu.opencl_devices import build_flags
from heterollm.kernels.gpu.pocl.builtins import WITHOUT_HEADER, builtin_declarations
from heterollm.kernels.gpu.pocl.target import TARGET_VARIABLE, chosen_target, mend_target
from heterollm.kernels.gpu.protocol import KernelIdentity
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.gpu.traits import DeviceTraits
from heterollm.kernels.gpu.variants import BuildError

logger = logging.getLogger(__name__)

OTHER_BUILTINS: Final = ("-cl-std=", "-DSUBGROUP", "-DWEIGHT_IMAGE")
"""Begins of the options of programs that call functions of extensions, which are not declared one by one."""

POCL_NAME: Final = "Portable Computing Language"
ProgramKey: TypeAlias = tuple[tuple[str, ...], frozenset[tuple[str, str | int]]]
"""The files of a program and its defines."""


class OpenClPrograms:
    """The programs of one opened device, each built once.

    Args:
        device: The pyopencl device.
        context: Its context.
        traits: Its properties.
    """

    def __init__(self, device: cl.Device, context: cl.Context, traits: DeviceTraits) -> None:
        self._device = device
        self.context = context
        self.traits = traits
        self._flags = build_flags(device)
        self._written: dict[KernelIdentity, tuple[bool, ...]] = {}
        self._sources: dict[int, ProgramKey] = {}
        self._programs: dict[ProgramKey, cl.Program] = {}

    def kernel(
        self, files: Sequence[str], name: str, defines: Mapping[str, str | int] | None = None
    ) -> cl.Kernel:
        """Build source files and return a new kernel; see :class:`heterollm.kernels.gpu.GpuRuntime`."""
        # A pass of a new length needs hundreds of kernels, so the lookup of a built program is fast.
        key = (tuple(files), frozenset((defines or {}).items()))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._build(read_sources(files), self._options(key[1]), name)
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
            options = ["-cl-kernel-arg-info", *self._options(defines)]
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

    def _options(self, defines: Iterable[tuple[str, str | int]]) -> list[str]:
        return [*self._flags, *(f"-D{key}={value}" for key, value in sorted(defines))]

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


def _is_pocl_3(device: cl.Device) -> bool:
    return bool(device.platform.name.strip() == POCL_NAME and device.driver_version.startswith("3."))


def mend_pocl(device: cl.Device) -> str | None:
    """Let PoCL compile for a processor that its LLVM knows; returns that target, or None with other drivers.

    Raises:
        DeviceError: The environment names a target, and the driver takes none.
    """
    if _is_pocl_3(device) and (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return mend_target(device.int_ptr)
    if chosen := chosen_target():
        raise DeviceError(
            f"{TARGET_VARIABLE} names {chosen}, which only PoCL 3 on Linux x86-64 can be told, not "
            f"{device.platform.name.strip()} {device.driver_version.strip()}.",
            fix=f"Unset {TARGET_VARIABLE}. {see('pocl-and-new-processors')}",
        )
    return None
