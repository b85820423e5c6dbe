"""The linear kernels with half arithmetic, on a runtime that has it: Intel's, as PoCL's wheel has none.

They run in a process of their own, since the OpenCL loader reads its list of drivers once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from drivers import driver_variables

from heterollm.base import OptionError
from heterollm.kernels.gpu import KernelParameters, ShapeClass, default_parameters, linear_style
from heterollm.kernels.gpu.binding import cl
from heterollm.kernels.gpu.runtime import _build_flags
from heterollm.kernels.ops import WeightFormat

RUNTIME = Path(os.environ.get("HETEROLLM_HALF_RUNTIME", Path(sys.prefix) / "lib" / "libintelocl.so"))
SCRIPT = Path(__file__).with_name("half_runtime.py")
INT4 = WeightFormat(4, 32)


@pytest.mark.slow
def test_half_sums_meet_the_gate_of_float16(tmp_path):
    if not RUNTIME.exists():
        pytest.skip("needs `pip install intel-opencl-rt intel-cmplr-lib-rt`, or $HETEROLLM_HALF_RUNTIME")
    environment = os.environ | {
        **driver_variables(RUNTIME),
        "LD_LIBRARY_PATH": str(RUNTIME.parent),
        "HETEROLLM_CACHE": str(tmp_path),
    }
    command = [sys.executable, "-P", str(SCRIPT)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 40
    assert [case for case, _, within in found if not within] == []
    # It is half arithmetic: float sums would leave the rounding of the outputs alone, 3e-8.
    assert min(error for _, error, _ in found) > 1e-7


def test_half_arithmetic_is_chosen_where_its_rounding_is_allowed():
    def style(half=True, tokens=64, integer_inputs=False, weight=INT4, has_half=True):
        shape = ShapeClass.of(weight, integer_inputs=integer_inputs, half=half, tokens=tokens)
        return linear_style(shape, is_cpu=False, has_half=has_half, has_matrix=False)

    assert style() == style(weight=WeightFormat(16)) == "half"
    others = [{"half": False}, {"tokens": 8}, {"integer_inputs": True}, {"has_half": False}]
    others += [{"weight": WeightFormat(32)}]
    assert [style(**other) for other in others] == ["simt"] * len(others)


def test_parameters_of_half_kernels_are_refused_for_other_shapes():
    many = ShapeClass.of(INT4, integer_inputs=False, half=True, tokens=64)
    parameters = default_parameters("half", many)
    parameters.check_for(many)
    assert (
        default_parameters("half", ShapeClass.of(INT4, integer_inputs=False, half=True, tokens=1)).style
        == "simt"
    )
    with pytest.raises(OptionError):
        parameters.check_for(ShapeClass.of(INT4, integer_inputs=False, half=False, tokens=64))
    with pytest.raises(OptionError):
        KernelParameters("half", False, 8)


@pytest.mark.parametrize(
    ("kind", "version", "flags"),
    [
        ("GPU", "OpenCL C 3.0 Adreno(TM) 750", ["-cl-mad-enable", "-cl-std=CL3.0"]),
        ("GPU", "OpenCL C 2.0 Adreno(TM) 640", ["-cl-mad-enable"]),
        ("CPU", "OpenCL C 3.0 PoCL", []),
    ],
)
def test_the_compilers_flags_follow_the_device(kind, version, flags):
    device = SimpleNamespace(type=getattr(cl.device_type, kind), opencl_c_version=version)
    assert _build_flags(device) == flags
