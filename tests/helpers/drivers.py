"""The environment of a process that is to meet one OpenCL driver alone."""

import os


def driver_variables(library):
    """Return the variables by which the test run's binding finds a driver's library, and no other."""
    by_path = os.environ.get("HETEROLLM_OPENCL_BINDING") == "ctypes"
    return {"HETEROLLM_OPENCL_LIBRARY" if by_path else "OCL_ICD_VENDORS": str(library)}
