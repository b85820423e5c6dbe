"""The ctypes binding of OpenCL: the facts and results of pyopencl, objects given back, other libraries."""

import ctypes.util
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from heterollm.base import DeviceError, OptionError
from heterollm.kernels.gpu import binding, ctypes_binding, ctypes_handles, is_cpu, opencl_library
from heterollm.kernels.gpu.ctypes_binding import Error

FACTS = Path(__file__).with_name("binding_facts.py")
LOADERS = Path(importlib.util.find_spec("pyopencl").origin).parent.glob(".libs/libOpenCL-*")


def facts(folder, **variables):
    environment = os.environ | {"HETEROLLM_CACHE": str(folder)} | variables
    command = [sys.executable, "-P", str(FACTS)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return facts(tmp_path_factory.mktemp("own"), HETEROLLM_OPENCL_BINDING="ctypes")


def test_both_bindings_find_and_compute_the_same(own, tmp_path):
    assert facts(tmp_path, HETEROLLM_OPENCL_BINDING="pyopencl") == own
    # The three kinds of memory are the last.
    assert own[-1] == own[-2] == own[-3]


def test_a_loader_of_drivers_is_a_library_too(own, tmp_path):
    """Its functions are called by name, those of a driver for loaders by their places in its table."""
    loader = next(LOADERS, None)
    if loader is None:
        pytest.skip("this pyopencl brings no loader")
    opencl_device()  # loads the driver
    driver = ctypes_binding.functions.path
    assert facts(tmp_path, HETEROLLM_OPENCL_LIBRARY=str(loader), OCL_ICD_VENDORS=driver) == own


# -- objects -----------------------------------------------------------------------------------------------


@pytest.fixture
def released(monkeypatch):
    """Count the calls that give objects back."""
    found = Counter()
    device = opencl_device()
    functions = ctypes_binding.functions
    for name in [name for name in opencl_library.FUNCTIONS if name.startswith("clRelease")]:
        real = getattr(functions, name)

        def counted(handle, name=name, real=real):
            found[name] += 1
            return real(handle)

        monkeypatch.setitem(vars(functions), name, counted)
    yield device, found
    gc.collect()


def opencl_device():
    return next(
        device
        for platform in ctypes_binding.get_platforms()
        for device in platform.get_devices()
        if is_cpu(device)
    )


def test_each_object_is_given_back_once(released):
    device, found = released
    cl = ctypes_binding
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    memory = np.zeros(64, np.int32)
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=memory)
    program = cl.Program(context, "kernel void one(global int *x) { x[get_global_id(0)] = 1; }").build()
    kernel = cl.Kernel(program, "one")
    kernel.set_args(buffer)
    for _ in range(3):
        cl.enqueue_nd_range_kernel(queue, kernel, (64,), (1,))
    view, event = cl.enqueue_map_buffer(queue, buffer, cl.map_flags.READ, 0, (256,), np.uint8)
    assert view.view(np.int32).tolist() == [1] * 64
    assert found == {"clReleaseEvent": 3}
    del view, event  # unmaps
    assert found["clReleaseEvent"] == 5
    with pytest.raises(Error, match="INVALID_KERNEL_NAME"):
        cl.Kernel(program, "two")
    del context, queue, buffer, program, kernel
    gc.collect()
    assert found == {
        "clReleaseEvent": 5,
        **dict.fromkeys(("clReleaseContext", "clReleaseCommandQueue", "clReleaseMemObject"), 1),
        **dict.fromkeys(("clReleaseProgram", "clReleaseKernel"), 1),
    }


@pytest.mark.parametrize("order", [1, -1])
def test_a_cycle_of_objects_is_collected_in_any_order(released, order):
    """A finalizer may finish a queue that was given back, as that of a launch does; memory goes behind it."""
    device, found = released
    cl = ctypes_binding

    class Launch:
        def __del__(self):
            for held in self.held:
                if isinstance(held, cl.CommandQueue):
                    held.finish()

    launch, context = Launch(), cl.Context([device])
    flags = cl.svm_mem_flags.READ_WRITE | cl.svm_mem_flags.SVM_FINE_GRAIN_BUFFER
    array = cl.svm_empty(context, flags, (16,), np.int32)
    queue = cl.CommandQueue(context, device)
    queue.launch = launch
    launch.held = [context, queue, array, launch][::order]
    del launch, context, queue, array
    gc.collect()
    assert found["clReleaseCommandQueue"] == 1
    assert found["clReleaseContext"] == 2  # its own reference, and that of its memory


def test_a_launch_prepares_its_sizes_once():
    device, cl = opencl_device(), ctypes_binding
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    program = cl.Program(context, "kernel void count(global int *x) { atomic_inc(x); }").build()
    kernel, memory = cl.Kernel(program, "count"), np.zeros(1, np.int32)
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=memory)
    kernel.set_args(buffer)
    prepared = []
    for size in ((8,), (8,), (4, 2), (8,)):
        cl.enqueue_nd_range_kernel(queue, kernel, size, (1,) * len(size))
        prepared.append(kernel.range)
    queue.finish()
    assert memory[0] == 4 * 8
    assert prepared[0] is prepared[1] is not prepared[2]


def test_names_of_statuses():
    for code, name in ((-5, "OUT_OF_RESOURCES"), (-30, "INVALID_VALUE"), (-59, "INVALID_OPERATION")):
        with pytest.raises(Error, match=rf"clFinish failed: {name}$") as caught:
            ctypes_handles.check("clFinish", code)
        assert caught.value.code == code
    for code in (-1001, -9999, 7):
        with pytest.raises(Error, match=f"status {code}$"):
            ctypes_handles.check("clFinish", code)


# -- the choice --------------------------------------------------------------------------------------------


@pytest.fixture
def variables(monkeypatch):
    def chosen(name="", library=""):
        monkeypatch.setenv(binding.BINDING_VARIABLE, name)
        monkeypatch.setenv(opencl_library.LIBRARY_VARIABLE, library)
        return binding._choose()

    return chosen


def test_a_library_by_path_is_for_ctypes_alone(variables):
    assert variables().__name__ == variables("pyopencl").__name__ == "pyopencl"
    assert variables("ctypes") is variables("", "libOpenCL.so.1") is ctypes_binding
    with pytest.raises(OptionError, match="pyopencl cannot load by its path"):
        variables("pyopencl", "libOpenCL.so.1")
    with pytest.raises(OptionError, match="names 'cuda', which is no OpenCL binding") as caught:
        variables("cuda")
    assert "pyopencl, ctypes" in caught.value.fix


def test_ctypes_takes_over_where_pyopencl_cannot_be_imported(variables, monkeypatch, caplog):
    def broken():
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr(binding, "_pyopencl", broken)
    assert variables() is ctypes_binding
    assert "pyopencl cannot be imported, so that ctypes calls OpenCL: numpy.core" in caplog.text
    with pytest.raises(DeviceError, match=r"pyopencl cannot be imported: numpy\.core"):
        variables("pyopencl")


@pytest.mark.parametrize("wrong", ["/nowhere/libOpenCL.so", __file__, os.sep, "a\nb" * 500, "libm"])
def test_a_library_that_is_none(wrong, monkeypatch):
    if wrong == "libm":
        wrong = ctypes.util.find_library("m")
    monkeypatch.setenv(opencl_library.LIBRARY_VARIABLE, wrong)
    with pytest.raises(DeviceError, match=r"(?s)_LIBRARY names .*, which cannot be used: ") as caught:
        opencl_library._find()
    assert "unset the variable" in caught.value.fix
    assert len(caught.value.message) < 3000


def test_no_library_at_all_names_those_that_were_tried(monkeypatch):
    monkeypatch.setattr(opencl_library, "_candidates", lambda: iter(("libnone.so", __file__)))
    with pytest.raises(Error, match=r"libnone\.so: .*; .*test_binding\.py: "):
        opencl_library._find()


@pytest.mark.parametrize(
    ("system", "first"),
    [
        ("Windows", "OpenCL.dll"),
        ("Linux", "libOpenCL.so.1"),
        ("Android", "/vendor/lib64/libOpenCL.so"),
        ("Darwin", "/System/Library/Frameworks/OpenCL.framework/OpenCL"),
        ("FreeBSD", "libOpenCL.so.1"),
    ],
)
def test_where_libraries_are_looked_for(system, first, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: system)
    found = list(opencl_library._candidates())
    assert found[0] == first
    assert len(set(found)) == len(found)


def test_a_wrong_library_ends_a_command_with_one_error(tmp_path):
    script = "import sys; from heterollm.cli.command_line import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"HETEROLLM_OPENCL_LIBRARY": "/nowhere/libOpenCL.so"}
    environment["HETEROLLM_CACHE"] = str(tmp_path)
    environment.pop(binding.BINDING_VARIABLE, None)
    command = [sys.executable, "-P", "-c", script, "doctor", "--device", "host"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    words = " ".join((done.stdout + done.stderr).split())
    assert "HETEROLLM_OPENCL_LIBRARY names '/nowhere/libOpenCL.so', which cannot be used" in words
    assert "Traceback" not in words
