import numpy as np
import pytest

from heterollm.base import DeviceError
from heterollm.kernels.devices.choice import find_gpus
from heterollm.kernels.devices.gpu import open_gpu
from heterollm.kernels.devices.kind import Opening
from heterollm.kernels.formats import linear_errors, random_weight, reference
from heterollm.kernels.gpu import OpenClRuntime, list_opencl_devices
from heterollm.kernels.npu import FfnShard, LinearShard
from heterollm.kernels.operators.gated_activation import exact_gated_activation
from heterollm.kernels.ops import WeightFormat


@pytest.fixture(scope="session")
def runtime(request):
    """The GPU of ``--gpu``, or the first CPU that OpenCL offers."""
    if request.config.getoption("--gpu"):
        return open_gpu(find_gpus()[0], Opening())
    try:
        devices = [device for _, device in list_opencl_devices()]
    except DeviceError as error:
        pytest.skip(f"needs an OpenCL runtime: {error}")
    for device in devices:
        opened = OpenClRuntime(device)
        if opened.traits.is_cpu:
            return opened
    pytest.skip("needs an OpenCL runtime that serves the CPU")


@pytest.fixture(scope="module", autouse=True)
def plain_builds():
    """Build the kernels for GPUs without optimisation, which takes PoCL a quarter of the time.

    A phone has a compiler of its own; what PoCL optimises are the kernels for processors.
    """
    build = OpenClRuntime._build

    def plain(runtime, source, options, name):
        groups = any(option.startswith("-DWG=") and option != "-DWG=1" for option in options)
        if groups or "simt" in name:
            options = [*options, "-cl-opt-disable"]
        return build(runtime, source, options, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenClRuntime, "_build", plain)
        yield


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """An empty cache folder for this test and the processes that it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HETEROLLM_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def make_slice():
    """A factory of random NPU slices: ``make_slice(rows, columns, bits=4, block=32, symmetric=True)``."""
    return random_slice


def random_slice(rows, columns, bits=4, block=32, symmetric=True, seed=0, members=1, dtype=np.float16):
    floats = WeightFormat(8 * np.dtype(dtype).itemsize)
    number_format = WeightFormat(bits, block, symmetric) if bits <= 8 else floats
    weight = random_weight(np.random.default_rng([seed, rows, columns, bits]), rows, columns, number_format)
    each = rows // members
    ranges = ((0, rows - each * (members - 1)), *((8, 8 + each),) * (members - 1))
    return LinearShard(weight, 1, "gate_up", ranges, f"random {seed}")


@pytest.fixture
def make_block():
    """A factory of random parts of a block: ``make_block(hidden, width, 4, 32, activation="silu")``."""
    return random_block


def random_block(hidden, width, bits=4, block=32, symmetric=True, *, activation="silu", biased=False, **kind):
    integer, seed, dtype = kind.get("integer", False), kind.get("seed", 0), kind.get("dtype", np.float16)
    rows = width * kind.get("members", 2)
    gate_up = random_slice(rows, hidden, bits, block, symmetric, seed, dtype=dtype).weight
    down = random_slice(hidden, width, bits, block, symmetric, seed + 1, dtype=dtype).weight
    bias = np.random.default_rng(seed).standard_normal(rows).astype(np.float32) if biased else None
    return FfnShard(gate_up, down, activation, bias, 1, f"random {seed}", (0, width), integer)


@pytest.fixture
def exact_block():
    """What a part of a block computes of ``x [m, h]``, in float64; with int8 inputs, of the rounded ones."""

    def output(part, x, integer=None):
        rounds = part.integer_inputs if integer is None else integer
        seen = reference.round_inputs(x, part.format.block) if rounds else x.astype(np.float64)
        products = seen @ reference.weight_values(part.gate_up).T
        if part.bias is not None:
            products += part.bias
        gate, *up = np.split(products, 1 + part.gated, axis=1)
        activated = exact_gated_activation(gate, up[0] if up else None, part.activation, slopes=part.slopes)
        seen = reference.round_inputs(activated, part.format.block) if rounds else activated
        return seen @ reference.weight_values(part.down).T

    return output


@pytest.fixture
def exact():
    """The float64 product of ``x [m, k]`` with a slice's dequantised weight."""
    return lambda part, x: reference.linear(x, [part.weight])


@pytest.fixture(scope="session")
def within_gate():
    """Check the numbers of a linear layer against the gate of the type that holds them."""

    def check(numbers, *label):
        errors = linear_errors(*numbers)
        assert errors.within("fp16" if numbers[0].dtype == np.float16 else "fp32"), (*label, errors)

    return check
