"""Opens a GPU through OpenCL, and tests it; CPU cores with an OpenCL runtime are one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import to_builtins

from heterollm.base import DeviceError, KeptResult, see
from heterollm.kernels.devices.kind import Opening
from heterollm.kernels.devices.runtimes import opencl_devices
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.sync import stale_memory
from heterollm.kernels.threads import ThreadSplit

if TYPE_CHECKING:
    from heterollm.kernels.gpu import OpenClRuntime
    from heterollm.kernels.ops import Power

logger = logging.getLogger(__name__)


def open_gpu(
    device: Any,  # noqa: ANN401
    wanted: Opening,
    power: Power = "default",
) -> OpenClRuntime:
    """Open a GPU; one that reports shared virtual memory and fails the litmus test maps memory instead."""
    from heterollm.kernels.gpu import OpenClRuntime

    runtime = OpenClRuntime(
        device, profiling=wanted.profiling, shared_memory=wanted.shared_memory, power=power
    )
    if runtime.shared_memory != "svm" or not (reason := stale_memory(runtime)):
        return runtime
    if wanted.shared_memory is not None:
        raise DeviceError(
            f"The shared virtual memory of {runtime.traits.name!r} cannot be used: {reason}.",
            fix="Choose the kind mapped. " + see("memory-is-mapped"),
        )
    logger.warning("%r maps memory, since its shared virtual memory failed: %s", runtime.traits.name, reason)
    return OpenClRuntime(device, profiling=wanted.profiling, shared_memory="mapped", power=power)


def open_cpu(split: ThreadSplit, wanted: Opening) -> OpenClRuntime:
    """Open the CPU's OpenCL with the threads of a split."""
    _, device = cpu_device(split)
    from heterollm.kernels.gpu import OpenClRuntime

    runtime = OpenClRuntime(device, profiling=wanted.profiling, shared_memory=wanted.shared_memory)
    if "portable" in runtime.traits.platform.lower() and runtime.traits.compute_units != len(split.gpu_cores):
        raise DeviceError(
            f"OpenCL runs {runtime.traits.compute_units} thread(s) in this process, not "
            f"{len(split.gpu_cores)}: it was opened before heterollm could set the number.",
            fix="Open the device first. " + see("the-thread-split-cannot-change"),
        )
    return runtime


def self_test(runtime: OpenClRuntime) -> None:
    """Compute one small linear layer: compilers have built wrong kernels before."""
    from heterollm.kernels.gpu import GpuLinear

    generator = np.random.default_rng(0)
    weight = generator.standard_normal((64, 64)).astype(np.float16)
    x, y = runtime.shared((4, 64), np.float16), runtime.shared((4, 64), np.float32)
    x.write(generator.standard_normal((4, 64)))
    expected = x.read().astype(np.float64) @ weight.T.astype(np.float64)
    linear = GpuLinear.pack(runtime, [weight], activation_dtype=np.float16)
    linear.launch(x, y, tokens=4, label="self-test", output_dtype=np.float32)()
    runtime.finish()
    errors = linear_errors(y.read(), expected)
    if not errors.within("fp16"):
        raise DeviceError(
            f"{runtime.traits.name!r} computes a linear layer wrongly (NMSE {errors.nmse:.1e}).",
            fix="Update the GPU driver. " + see("a-part-computes-wrong-numbers"),
        )


def check_endings(runtime: OpenClRuntime, activations: np.dtype[Any], cache: np.dtype[Any]) -> None:
    """Let linear layers compute the operators behind them only if they do so rightly.

    Each kind of weights is checked against exact results, once for a driver and the tuned parameters.

    Args:
        runtime: The GPU.
        activations: Type of inputs and outputs.
        cache: Type of keys and values.
    """
    # As for variants: this project's tests cover PoCL.
    if not (runtime.has_endings and runtime.tests_kernels):
        return
    from heterollm.kernels.gpu import GlueKernels
    from heterollm.kernels.operators import wrong_ending

    tuned = [f"{shape}: {runtime.tuning.parameters(shape)}" for shape in runtime.tuning.table.tuned]
    key = to_builtins(runtime.traits.identity()), str(activations), str(cache), sorted(tuned)
    kept = KeptResult("opencl", "endings", key, str)
    if reason := kept.load(lambda: wrong_ending(GlueKernels(runtime, activations, cache))):
        runtime.refuse_endings(reason)


def cpu_device(split: ThreadSplit | None = None) -> tuple[str, Any]:
    """Return the first OpenCL device on CPU cores, with the name of its platform."""
    devices = opencl_devices(split)
    from heterollm.kernels.gpu import is_cpu, runtime_advice

    found = next((entry for entry in devices if is_cpu(entry[1])), None)
    if found is None:
        raise DeviceError("No OpenCL runtime for the CPU was found.", fix=runtime_advice())
    return found


def find_cpu() -> str:
    """Return the name of the CPU's OpenCL."""
    name, device = cpu_device()
    return f"{device.name.strip()} ({name.strip()} {device.driver_version.strip()})"
