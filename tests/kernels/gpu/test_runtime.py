import numpy as np

from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import GpuLinear


def test_a_launch_that_is_dropped_at_once_still_sees_its_memory(runtime):
    """Its weights and input have no other owner, and what is allocated next would overwrite them."""
    generator = np.random.default_rng(0)
    for _ in range(5):
        weight = generator.standard_normal((1024, 512)).astype(np.float32)
        y = runtime.shared((64, 1024), np.float32)
        expected = _launch_and_drop(runtime, generator, weight, y)
        for _ in range(4):
            runtime.shared((1024, 512), np.float32).array.fill(np.nan)
        runtime.finish()
        assert linear_errors(y.array, expected).within("fp32")


def _launch_and_drop(runtime, generator, weight, y):
    x = runtime.shared((64, 512), np.float32)
    x.array[...] = generator.standard_normal((64, 512))
    GpuLinear.pack(runtime, [weight], activation_dtype=np.float32).launch(x, y, tokens=64, label="dropped")()
    return x.array.astype(np.float64) @ weight.T.astype(np.float64)
