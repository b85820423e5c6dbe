import pytest

from heterollm.errors import DeviceError
from heterollm.kernels.opencl_runtime import OpenClRuntime, list_opencl_devices


@pytest.fixture(scope="session")
def runtime():
    """The first CPU that OpenCL offers."""
    try:
        devices = [device for _, device in list_opencl_devices()]
    except DeviceError as error:
        pytest.skip(f"needs an OpenCL runtime: {error}")
    for device in devices:
        opened = OpenClRuntime(device)
        if opened.traits.is_cpu:
            return opened
    pytest.skip("needs an OpenCL runtime that serves the CPU")
