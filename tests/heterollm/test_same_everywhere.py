"""Simulated results are the same to the digit on every machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__ as DISPATCHED

SCRIPT = Path(__file__).with_name("same_everywhere.py")
EXPECTED = {
    "qwen2-0.5b profile": "7e867326c8a16a7a",
    "qwen2-0.5b predictor": "a92a8472ce65640f",
    "qwen2-0.5b tensor plan": "1c8ee658be55e992",
    "qwen2-0.5b block plan": "14e1463d6ab45adb",
    "qwen3-0.6b profile": "1fb62fe4cdede33f",
    "qwen3-0.6b predictor": "c9091e0231bd907f",
    "qwen3-0.6b tensor plan": "6c687f2d272284eb",
    "qwen3-0.6b block plan": "13a4ce6ac89b3bed",
    "simulation": "9b3b69cccefda051",
}
"""On every machine. A change of the profiler, the solver or the simulation that is meant writes new ones."""

NEWEST = [name for name in DISPATCHED if name.startswith(("AVX512", "X86_V4"))]
WITHOUT_FMA = "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX2_Usable,-FMA_Usable,-AVX512F,-AVX512VL"
MACHINES = {
    "this one": (32 << 20, {}),
    "with AVX2 and a large cache": (
        1 << 30,
        {"NPY_DISABLE_CPU_FEATURES": " ".join(NEWEST), "OPENBLAS_CORETYPE": "Haswell"},
    ),
    "with SSE4 and a small cache": (
        1 << 20,
        {
            "NPY_DISABLE_CPU_FEATURES": " ".join(DISPATCHED),
            "OPENBLAS_CORETYPE": "Nehalem",
            "GLIBC_TUNABLES": WITHOUT_FMA,
        },
    ),
}
"""Sizes of the host's cache, and what makes NumPy, its BLAS and the C library take other instructions."""


# By default the two that differ most.
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "with AVX2 and a large cache"))
        for name in MACHINES
    ],
)
def test_simulated_results_are_the_same_on_a_machine(machine, tmp_path):
    cache_bytes, variables = MACHINES[machine]
    environment = os.environ | variables | {"HETEROLLM_CACHE": str(tmp_path)}
    command = [sys.executable, "-P", str(SCRIPT), str(cache_bytes)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == EXPECTED
