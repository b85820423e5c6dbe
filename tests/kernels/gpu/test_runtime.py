import gc
import weakref

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import GpuLinear
from heterollm.kernels.gpu import runtime as opencl_runtime


def test_a_launch_that_is_dropped_at_once_still_sees_its_memory(runtime):
    """Its weights and input have no other owner, and what is allocated next would overwrite them."""
    generator = np.random.default_rng(0)
    for _ in range(5):
        weight = generator.standard_normal((1024, 512)).astype(np.float32)
        y = runtime.shared((64, 1024), np.float32)
        expected = _launch_and_drop(runtime, generator, weight, y)
        for _ in range(4):
            runtime.shared((1024, 512), np.float32).write(np.nan)
        runtime.finish()
        assert linear_errors(y.read(), expected).within("fp32")


def _launch_and_drop(runtime, generator, weight, y):
    x = runtime.shared((64, 512), np.float32)
    x.write(generator.standard_normal((64, 512)))
    GpuLinear.pack(runtime, [weight], activation_dtype=np.float32).launch(x, y, tokens=64, label="dropped")()
    return x.read().astype(np.float64) @ weight.T.astype(np.float64)


def test_a_program_whose_compiler_runs_out_of_memory_is_never_freed(runtime, monkeypatch):
    """PoCL would wait for its own lock."""
    made = []

    class Program:
        def __init__(self, *_):
            made.append(weakref.ref(self))

        def build(self, **_):
            raise MemoryError

    monkeypatch.setattr(opencl_runtime.cl, "Program", Program)
    with pytest.raises(KernelError, match="memory ran out"):
        runtime.kernel_of_source("kernel of this test", "nothing")
    gc.collect()
    assert made[-1]() is not None
