"""Says who a device is, by three runtimes of one process; run as a script by test_pocl_target.py.

Given ``unknown``, PoCL is first made to not know the processor, as on one newer than its LLVM.
"""

import ctypes
import json
import sys

from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import is_cpu, kernel_source_hash, list_opencl_devices
from heterollm.kernels.gpu.pocl import target as pocl_target


def forget_processor():
    """Write into PoCL what its LLVM finds on a processor that it does not know."""
    device = next(device for _, device in list_opencl_devices() if is_cpu(device))
    readable = pocl_target._readable_ranges()
    slot = pocl_target._find_name_slot(device.int_ptr, readable, pocl_target.ANY_PROCESSOR)
    assert slot is not None, "this build of PoCL keeps its target elsewhere"
    name = ctypes.create_string_buffer(b"generic")
    pocl_target._names.append(name)  # it must live as long as PoCL
    slot.value = ctypes.addressof(name)


def identity(device):
    """Return everything that measurements and tuned parameters of a device are filed under."""
    # It must compile, too: for "generic" PoCL's compiler does not.
    device.gpu.kernel_of_source("kernel void nothing(global int *x) { x[0] = 1; }", "nothing")
    return {
        "target": device.gpu.target,
        "traits": repr(device.gpu.traits),
        "tuning": repr(device.gpu.tuning.identity),
        "description": device.description(),
        "fingerprint": device.fingerprint(),
        "kernels": kernel_source_hash(),
    }


if __name__ == "__main__":
    if "unknown" in sys.argv:
        forget_processor()
    options = {"gpu_threads": 1, "npu_threads": 0}
    devices = [open_device("host", profiling=profiling, **options) for profiling in (False, True, False)]
    print(json.dumps([identity(device) for device in devices]))
