"""Opens devices by name, and lists the devices of this machine.

The engine thread opens the device that it will run, because its affinity determines the cores.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import numpy as np

from heterollm.base import (
    CACHE_VARIABLE,
    CacheError,
    DeviceError,
    OptionError,
    check_process,
    make_parent,
    mark_device_opened,
    own_folder,
    scratch_folder,
    see,
)
from heterollm.kernels.device import Device, DeviceStatus
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import guard_programs, target_for_this_machine
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.ops import POWERS, Power
from heterollm.kernels.sim import SIMULATED, Simulation, is_simulated
from heterollm.kernels.sync import stale_memory
from heterollm.kernels.threads import ThreadSplit, biggest_cores, on_cores, split_threads

if TYPE_CHECKING:
    from heterollm.kernels.gpu import MemoryKind, OpenClRuntime

logger = logging.getLogger(__name__)

DeviceName = Literal["snapdragon", "host", "emulator"]
DEVICE_NAMES: Final[tuple[DeviceName, ...]] = get_args(DeviceName)

QUALCOMM: Final = "qualcomm"
OPENCL_ON_12: Final = "openclon12"
"""Microsoft's OpenCL over Direct3D 12, which offers the same Adreno without its driver's compiler."""

ADRENO_VARIABLE: Final = "HETEROLLM_ADRENO"
"""Environment variable that chooses among several Adrenos: a number of ``heterollm devices``, or part of a
name or driver."""

THREADS_VARIABLE: Final = "POCL_MAX_PTHREAD_COUNT"
"""Environment variable by which PoCL takes its threads."""

ChooseThreads: TypeAlias = Callable[[int | None], tuple[int | None, int | None]]
"""Returns threads of GPU and NPU from those that OpenCL has already, None if it was not opened."""

SHARE_CORES: Final = ("auto", "host")
"""Devices whose two processors share CPU cores, and ``auto``, which may open one."""

# The CPU runtimes take their thread count once per process, from the environment.
_process_split: ThreadSplit | None = None


def open_device(
    name: str = "auto",
    *,
    gpu_threads: int | None = None,
    npu_threads: int | None = None,
    profiling: bool = False,
    shared_memory: MemoryKind | None = None,
    simulation: Simulation | None = None,
    power: Power = "burst",
    choose_threads: ChooseThreads | None = None,
) -> Device:
    """Open a device on the calling thread.

    Args:
        name: ``snapdragon``, ``host``, ``emulator``, or ``auto``, which is ``snapdragon`` if both of its
            processors pass a self-test, else ``host``; or ``sim:`` with the name of a SoC or of its YAML
            file.
        gpu_threads: Threads of OpenCL on ``host`` and ``emulator``.
        npu_threads: Threads of the NPU on ``host``; 0 opens any device but the emulator without an NPU.
        profiling: Whether OpenCL events carry timestamps.
        shared_memory: Kind of the memory that host and GPU share, ``svm``, ``mapped`` or ``host``; None for
            the one that the environment names, or the best one that the GPU has.
        simulation: Options of a simulated device.
        power: Clocks and cores to ask for on ``snapdragon``; the emulator accepts it, others ignore it.
        choose_threads: Chooses the threads of ``host`` where none are given; called before its OpenCL is.

    Raises:
        DeviceError: A processor is missing or fails; the message gives a fix.
        OptionError: The name, a thread count or the power is not legal.
    """
    if power not in POWERS:
        raise OptionError(f"There is no power {power!r:.80}.", fix=f"Choose {', '.join(POWERS)}.")
    if is_simulated(name):
        from heterollm.kernels.sim import open_simulated

        compute_on = functools.partial(_open_host, gpu_threads, npu_threads, False, None)
        return open_simulated(name, simulation, with_npu=npu_threads != 0, compute_on=compute_on)
    open_host = functools.partial(
        _open_host, gpu_threads, npu_threads, profiling, shared_memory, choose_threads
    )
    if name == "auto":
        try:
            split = split_threads(gpu_threads, npu_threads)
            device = _open_snapdragon(profiling, shared_memory, power, split, with_npu=npu_threads != 0)
            device.reason = "both processors passed a self-test"
        except DeviceError:
            device = open_host()
            device.reason = (
                "no Snapdragon can be used, so this machine's cores compute; see `heterollm devices`"
            )
        return device
    if name == "snapdragon":
        return _open_snapdragon(profiling, shared_memory, power, with_npu=npu_threads != 0)
    if name == "host":
        return open_host()
    if name == "emulator":
        return _open_emulator(gpu_threads, profiling, shared_memory, power)
    fix = f"Choose auto, {', '.join(DEVICE_NAMES)}, or a simulated one such as {SIMULATED}snapdragon-8gen3."
    raise OptionError(f"There is no device {name!r}.", fix=fix)


def shares_cores(name: str) -> bool:
    """Return whether the two processors of a device share CPU cores, or may."""
    return name in SHARE_CORES


def opens_host(name: str) -> bool:
    """Return whether a name opens ``host``: itself, or ``auto`` where no Hexagon can be reached."""
    if name == "auto":
        from heterollm.kernels.npu import qnn_available

        return not qnn_available(emulator=False)[0]
    return name == "host"


def list_devices() -> list[DeviceStatus]:
    """Return the status of all devices, with reason and fix for unusable ones. Opens none."""
    checks: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
        "snapdragon": (_find_adreno, lambda: _require_qnn(emulator=False)),
        "host": (_find_cpu, _require_onnxruntime),
        "emulator": (_find_cpu, lambda: _require_qnn(emulator=True)),
    }
    statuses = []
    for name, both in checks.items():
        texts: list[str] = []
        reasons: list[str] = []
        fixes: list[str] = []
        for check in both:
            try:
                texts.append(check())
            except DeviceError as error:
                texts.append("missing")
                reasons.append(error.message)
                fixes.append(error.fix)
        reason, fix = " ".join(reasons), " ".join(dict.fromkeys(filter(None, fixes)))
        time: TimeKind = "emulated" if name == "emulator" else "real"
        gpu, npu = texts
        usable = not reasons
        statuses.append(
            DeviceStatus(name=name, usable=usable, gpu=gpu, npu=npu, reason=reason, fix=fix, time=time)
        )
    return statuses


# -- the three devices -------------------------------------------------------------------------------


def _open_host(
    gpu_threads: int | None,
    npu_threads: int | None,
    profiling: bool,
    shared_memory: MemoryKind | None,
    choose_threads: ChooseThreads | None = None,
) -> Device:
    _require_onnxruntime()
    if choose_threads is not None and gpu_threads is None and npu_threads is None:
        gpu_threads, npu_threads = choose_threads(_fixed_threads())
    split = split_threads(gpu_threads, npu_threads)
    gpu = _open_cpu_opencl(split, profiling, shared_memory)
    from heterollm.kernels.npu import HostNpu

    npu = HostNpu(threads=len(split.npu_cores)) if split.npu_cores else None
    float32 = np.dtype(np.float32)
    return Device("host", gpu, npu, split, float32, float32, "real")


def _open_emulator(
    gpu_threads: int | None, profiling: bool, shared_memory: MemoryKind | None, power: Power
) -> Device:
    _require_qnn(emulator=True)
    split = split_threads(gpu_threads)
    gpu = _open_cpu_opencl(split, profiling, shared_memory)
    from heterollm.kernels.npu import QnnNpu

    npu = QnnNpu(emulator=True, power=power)
    half = np.dtype(np.float16)
    return Device(
        *("emulator", gpu, npu, split, npu.activation_dtype, half, "emulated"),
        power_switch=npu.power,
        packager=npu,
    )


def _open_snapdragon(
    profiling: bool,
    shared_memory: MemoryKind | None,
    power: Power,
    split: ThreadSplit | None = None,
    *,
    with_npu: bool = True,
) -> Device:
    if with_npu:
        _require_qnn(emulator=False)  # before OpenCL, whose first call fixes the threads of `host`
    chosen, _ = _adrenos(split)
    half = np.dtype(np.float16)
    # The drivers start threads here, which stay on this thread's cores; little ones would delay all calls.
    with on_cores(biggest_cores()):
        gpu = _open_opencl(chosen, profiling, shared_memory, power)
        _self_test_gpu(gpu)
        if not with_npu:
            return Device("snapdragon", gpu, None, ThreadSplit((), ()), half, half, "real", power=power)
        from heterollm.kernels.npu import QnnNpu, chosen_context_layers

        npu = QnnNpu(emulator=False, power=power)
        npu.self_test()
        npu.choose_contexts(chosen_context_layers())
        if npu.power is not None:
            npu.power.wake()
    split = ThreadSplit((), ())
    return Device(
        *("snapdragon", gpu, npu, split, npu.activation_dtype, half, "real"),
        power=power,
        power_switch=npu.power,
        packager=npu,
    )


def _open_opencl(
    device: Any,  # noqa: ANN401
    profiling: bool,
    shared_memory: MemoryKind | None,
    power: Power = "default",
) -> OpenClRuntime:
    """Open a GPU; one that reports shared virtual memory and fails the litmus test maps memory instead."""
    from heterollm.kernels.gpu import OpenClRuntime

    runtime = OpenClRuntime(device, profiling=profiling, shared_memory=shared_memory, power=power)
    if runtime.shared_memory != "svm" or not (reason := stale_memory(runtime)):
        return runtime
    if shared_memory is not None:
        raise DeviceError(
            f"The shared virtual memory of {runtime.traits.name!r} cannot be used: {reason}.",
            fix="Choose the kind mapped. " + see("memory-is-mapped"),
        )
    logger.warning("%r maps memory, since its shared virtual memory failed: %s", runtime.traits.name, reason)
    return OpenClRuntime(device, profiling=profiling, shared_memory="mapped", power=power)


def _open_cpu_opencl(split: ThreadSplit, profiling: bool, shared_memory: MemoryKind | None) -> OpenClRuntime:
    _, device = _cpu_device(split)
    from heterollm.kernels.gpu import OpenClRuntime

    runtime = OpenClRuntime(device, profiling=profiling, shared_memory=shared_memory)
    if "portable" in runtime.traits.platform.lower() and runtime.traits.compute_units != len(split.gpu_cores):
        raise DeviceError(
            f"OpenCL runs {runtime.traits.compute_units} thread(s) in this process, not "
            f"{len(split.gpu_cores)}: it was opened before heterollm could set the number.",
            fix="Open the device first. " + see("the-thread-split-cannot-change"),
        )
    return runtime


def _self_test_gpu(runtime: OpenClRuntime) -> None:
    """Compute one small linear layer: compilers have built wrong kernels before."""
    from heterollm.kernels.gpu import GpuLinear

    generator = np.random.default_rng(0)
    weight = generator.standard_normal((64, 64)).astype(np.float16)
    x, y = runtime.shared((4, 64), np.float16), runtime.shared((4, 64), np.float32)
    x.acquire()
    x.array[...] = generator.standard_normal((4, 64))
    expected = x.array.astype(np.float64) @ weight.T.astype(np.float64)
    x.release()
    linear = GpuLinear.pack(runtime, [weight], activation_dtype=np.float16)
    linear.launch(x, y, tokens=4, label="self-test", output_dtype=np.float32)()
    runtime.finish()
    y.acquire()
    errors = linear_errors(y.array, expected)
    y.release()
    if not errors.within("fp16"):
        raise DeviceError(
            f"{runtime.traits.name!r} computes a linear layer wrongly (NMSE {errors.nmse:.1e}).",
            fix="Update the GPU driver. " + see("a-part-computes-wrong-numbers"),
        )


# -- installed software ------------------------------------------------------------------------------


def _opencl_devices(split: ThreadSplit | None = None) -> list[tuple[str, Any]]:
    """Return every OpenCL device; the first call of the process fixes the threads of CPU runtimes.

    Args:
        split: Required thread split; None for that of the process, or the default.

    Raises:
        DeviceError: There is no OpenCL, or it already runs with another split.
        EngineError: The process was forked from one that had opened a device.
    """
    global _process_split
    check_process()
    if importlib.util.find_spec("pyopencl") is None:
        if (platform.system(), platform.machine()) == ("Windows", "ARM64"):
            raise DeviceError(
                "pyopencl is not installed, and has no wheel for Windows on Arm.",
                fix="Build it from source with Visual Studio's Arm tools: `pip install pyopencl`. "
                + see("pyopencl-on-windows-on-arm"),
            )
        raise DeviceError("pyopencl is not installed.", fix="Run `pip install pyopencl`.")
    try:
        from heterollm.kernels.gpu import list_opencl_devices
    except ImportError as error:
        raise DeviceError(
            f"pyopencl cannot be imported: {error}.",
            fix="Reinstall it: `pip install --force-reinstall pyopencl`.",
        ) from error

    if _process_split is not None:
        if split is not None and split.gpu_cores != _process_split.gpu_cores:
            raise DeviceError(
                f"OpenCL is already open in this process with {len(_process_split.gpu_cores)} thread(s), "
                f"not {len(split.gpu_cores)}.",
                fix="Start another process for another split. " + see("the-thread-split-cannot-change"),
            )
        return list_opencl_devices()
    split = split or split_threads()
    _make_pocl_cache()
    mark_device_opened()
    os.environ.setdefault(THREADS_VARIABLE, str(len(split.gpu_cores)))
    os.environ.setdefault("DPCPP_CPU_NUM_CUS", str(len(split.gpu_cores)))  # Intel's runtime
    cores, big = split.gpu_cores, biggest_cores()

    def asking(platform_name: str) -> AbstractContextManager[None]:
        # A driver's threads start with the first query and inherit the cores of the thread that makes it:
        # PoCL's workers belong on the GPU's cores, those of a phone's driver on no little ones.
        return on_cores(big if QUALCOMM in platform_name.lower() else cores)

    with on_cores(big):
        found = list_opencl_devices(asking)
    _process_split = split
    return found


def _fixed_threads() -> int | None:
    """Return the GPU's threads in this process if they cannot change; None before OpenCL is opened."""
    if _process_split is not None:
        return len(_process_split.gpu_cores)
    stated = os.environ.get(THREADS_VARIABLE, "")
    return int(stated) if stated.isascii() and stated.isdigit() else None


def _make_pocl_cache() -> None:
    """Create PoCL's cache folder; PoCL silently offers no device if it cannot write there."""
    try:
        default = own_folder("opencl") / f"pocl-{target_for_this_machine() or 'default'}"
    except CacheError as error:  # no device without it
        raise DeviceError(error.message, fix=error.fix) from error
    folder = Path(os.environ.get("POCL_CACHE_DIR", default))
    if folder.is_dir() and not os.access(folder, os.W_OK):
        folder = _writable_copy(folder)
    try:
        if folder == default:  # heterollm clears no other folder
            make_parent(folder)
            folder.mkdir(exist_ok=True)
            guard_programs(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(
            f"The folder of compiled OpenCL programs, {folder}, cannot be made: {error.strerror}.",
            fix=f"Point {CACHE_VARIABLE} (or POCL_CACHE_DIR) at another folder. "
            + see("the-cache-cannot-be-written"),
        ) from error
    os.environ["POCL_CACHE_DIR"] = str(folder)


def _cpu_device(split: ThreadSplit | None = None) -> tuple[str, Any]:
    devices = _opencl_devices(split)
    from heterollm.kernels.gpu import is_cpu, runtime_advice

    found = next((entry for entry in devices if is_cpu(entry[1])), None)
    if found is None:
        raise DeviceError("No OpenCL runtime for the CPU was found.", fix=runtime_advice())
    return found


def _find_cpu() -> str:
    name, device = _cpu_device()
    return f"{device.name.strip()} ({name.strip()} {device.driver_version.strip()})"


def _find_adreno(split: ThreadSplit | None = None) -> str:
    return _adrenos(split)[1]


def _adrenos(split: ThreadSplit | None = None) -> tuple[Any, str]:
    """Return the Adreno to use, and a text with all of them.

    The one with most compute units comes first, then the one with the newest driver, then the driver's order.

    Raises:
        DeviceError: There is none, or :data:`ADRENO_VARIABLE` names none.
    """
    devices = _opencl_devices(split)
    found = [
        (name, device)
        for name, device in devices
        if QUALCOMM in device.vendor.lower() and OPENCL_ON_12 not in f"{name}{device.name}".lower()
    ]
    if not found:
        seen = ", ".join(f"{device.name.strip()}" for _, device in devices) or "none"
        raise DeviceError(
            f"No Adreno among the OpenCL devices ({seen}).",
            fix="If `clinfo -l` lists it, point OCL_ICD_VENDORS at the system's vendors folder. "
            + see("no-adreno-among-the-opencl-devices"),
        )
    found.sort(key=lambda entry: (entry[1].max_compute_units, entry[1].driver_version), reverse=True)
    texts = [
        f"{device.name.strip()} ({name.strip()} {device.driver_version.strip()})" for name, device in found
    ]
    wanted = os.environ.get(ADRENO_VARIABLE, "").strip()
    number = _adreno_number(wanted, texts)
    if len(found) == 1:
        return found[0][1], texts[0]
    others = "; ".join(f"{other}: {text}" for other, text in enumerate(texts) if other != number)
    return found[number][1], f"{number}: {texts[number]}; {ADRENO_VARIABLE} can choose {others}"


def _adreno_number(wanted: str, texts: list[str]) -> int:
    """Return the position of the wanted Adreno among all; the first one's if none is wanted."""
    if not wanted:
        return 0
    if wanted.isascii() and wanted.isdigit() and int(wanted) < len(texts):
        return int(wanted)
    matches = [number for number, text in enumerate(texts) if wanted.lower() in text.lower()]
    if len(matches) != 1:
        every = "; ".join(f"{number}: {text}" for number, text in enumerate(texts))
        raise DeviceError(
            f"{ADRENO_VARIABLE} is {wanted!r:.80}, which names {len(matches)} of the Adrenos here ({every}).",
            fix="Set it to one of these numbers, or unset it.",
        )
    return matches[0]


def _require_onnxruntime() -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        raise DeviceError("onnxruntime is not installed.", fix="Run `pip install onnxruntime`.")
    try:
        import onnxruntime
    except ImportError as error:
        raise DeviceError(
            f"onnxruntime cannot be imported: {error}.",
            fix="Reinstall it: `pip install --force-reinstall onnxruntime`.",
        ) from error
    return f"onnxruntime {onnxruntime.__version__} CPU provider"


def _require_qnn(*, emulator: bool) -> str:
    from heterollm.kernels.npu import qnn_available

    usable, text, fix = qnn_available(emulator=emulator)
    if not usable:
        raise DeviceError(text, fix=fix)
    return text


def _writable_copy(folder: Path) -> Path:
    """Return a writable copy of a read-only folder, deleted at exit."""
    made = contextlib.ExitStack()
    copy = made.enter_context(scratch_folder("heterollm-opencl-"))
    atexit.register(made.close)
    for path in folder.rglob("*"):
        target = copy / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif path.is_file() and not path.name.startswith("."):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            target.chmod(0o700)
    return copy
