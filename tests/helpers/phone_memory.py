"""Stand-ins for a phone's shared memory, for processes that tests start: see the C files of shared_buffers.

With them the whole chain runs here: rpcmem's allocator over shared pages, QNN's memory handles in front of
the emulator, and Qualcomm's import of host pointers on an OpenCL device of the CPU.
"""

import ctypes.util
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "shared_buffers"
LIBRARIES = {
    "rpcmem.c": ("libcdsprpc.so", ()),
    # The provider looks for its backend by this name, and must find this file in place of the real one.
    "qnn_backend.c": ("libQnnHtp.so", ("-Wl,-soname,libQnnHtp.so", "-Wl,-z,nodelete")),
    "opencl_layer.c": ("libopencl_layer.so", ()),
}
PROVIDER = "libonnxruntime_providers_qnn.so"


def build_stand_ins(folder: Path) -> Path:
    """Compile the stand-ins into a folder, with links to QNN's libraries; skip without a compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc, which compiles the stand-ins")
    wheel = Path(importlib.util.find_spec("onnxruntime_qnn").origin).parent
    for source, (name, options) in LIBRARIES.items():
        command = [compiler, "-O1", "-shared", "-fPIC", str(SOURCES / source), "-o", str(folder / name)]
        subprocess.run([*command, *options, "-ldl"], check=True)
    for library in wheel.glob("*.so"):
        if library.name == PROVIDER:
            shutil.copy(library, folder)  # it looks for its backend beside the file behind a link
        elif not (folder / library.name).exists():
            (folder / library.name).symlink_to(library)
    (folder / "libQnnHtpReal.so").symlink_to(wheel / "libQnnHtp.so")
    return folder


def run_on_phone_memory(folder: Path, cache: Path, script: str, *arguments: str, **variables: str) -> dict:
    """Run a script of shared_buffers with the stand-ins, and return the last line that it prints, as JSON."""
    wheel = Path(importlib.util.find_spec("onnxruntime_qnn").origin).parent
    # The layer needs a loader that knows layers, which a test names together with the binding.
    inherited = {name: text for name, text in os.environ.items() if name != "HETEROLLM_OPENCL_BINDING"}
    environment = {
        **inherited,
        "LD_LIBRARY_PATH": f"{folder}:{wheel}.libs",
        "HETEROLLM_QNN_LIBRARY": str(folder / PROVIDER),
        "OPENCL_LAYERS": str(folder / "libopencl_layer.so"),
        "HETEROLLM_CACHE": str(cache),
        "STAND_INS": str(folder),
        **variables,
    }
    command = [sys.executable, str(SOURCES / script), *arguments]
    child = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, timeout=1800)
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout.splitlines()[-1])
    return found | {"log": child.stderr}


def ctypes_variables(folder: Path) -> dict[str, str]:
    """Return the environment in which ctypes calls OpenCL by a loader that knows layers; skip without."""
    loader = ctypes.util.find_library("OpenCL")
    spec = importlib.util.find_spec("pyopencl")
    drivers = sorted(Path(spec.origin).parent.glob(".libs/libpocl-*.so*"))
    if loader is None or not drivers:
        pytest.skip("needs a loader of OpenCL drivers beside that of pyopencl, and PoCL of its wheel")
    (folder / "vendors").mkdir(exist_ok=True)
    (folder / "vendors" / "pocl.icd").write_text(f"{drivers[0]}\n")
    return {
        "HETEROLLM_OPENCL_BINDING": "ctypes",
        "HETEROLLM_OPENCL_LIBRARY": loader,
        "OCL_ICD_VENDORS": str(folder / "vendors"),
    }
