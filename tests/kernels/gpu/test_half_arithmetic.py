"""Linear kernels with half arithmetic, which Intel's runtime has and PoCL's wheel lacks: `pytest --gpu`."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from heterollm.base import OptionError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import KernelParameters, ShapeClass, Variant, default_parameters, linear_style
from heterollm.kernels.gpu.binding import cl
from heterollm.kernels.gpu.opencl_devices import build_flags
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.ops import WeightFormat

INT4 = WeightFormat(4, 32)


def shapes():
    """Yield formats and shapes: odd rows and tokens, blocks of each size, and a model's depth."""
    for (bits, block), symmetric in itertools.product(((4, 16), (4, 32), (4, 128), (8, 32)), (True, False)):
        for tokens, columns in ((9, 128), (33, 384), (65, 256)):
            yield WeightFormat(bits, block, symmetric=symmetric), tokens, columns
    for bits in (4, 8):
        yield WeightFormat(bits, 32, symmetric=False, minimum=True), 33, 384
    yield WeightFormat(16), 17, 48
    yield INT4, 64, 4096


def test_half_sums_meet_the_gate_of_float16(runtime):
    if not runtime.traits.has_half:
        pytest.skip("needs half arithmetic: pytest --gpu NAME")
    errors = []
    for weight, tokens, columns in shapes():
        depths = (16, 32) if weight.block % 32 == 0 and weight.block else (16,)
        for item_tokens, depth in itertools.product((4, 8, 16), depths):
            parameters = KernelParameters("half", True, 64, item_tokens=item_tokens, depth_inputs=depth)
            case = LinearCase(weight, (70, 3), columns, tokens)
            y, exact = case.on_gpu(runtime, np.float16, style=Variant("half", parameters=parameters))
            errors.append(linear_errors(y, exact))
            assert errors[-1].within("fp16"), (case, parameters)
    # It is half arithmetic: float sums would leave the rounding of the outputs alone, 3e-8.
    assert min(error.nmse for error in errors) > 1e-7


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
    assert build_flags(device) == flags
