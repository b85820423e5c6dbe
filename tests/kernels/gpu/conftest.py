import numpy as np
import pytest

from heterollm.kernels.cases import GuardedOutput, LayerCases
from heterollm.kernels.formats import LINEAR_NMSE, SINGLE_FACTOR
from heterollm.kernels.gpu import GpuGlue, HeadShape, Scores

LAYERS: dict[tuple, GpuGlue] = {}


@pytest.fixture
def make(runtime):
    """GpuGlue of a style and types, made once."""

    def get(style, activation=np.float32, kv=np.float32):
        key = (runtime, style, activation, kv)
        if key not in LAYERS:
            LAYERS[key] = GpuGlue(runtime, activation, kv, style=style)
        return LAYERS[key]

    return get


@pytest.fixture
def cases(runtime, make):
    """The table's operators in a style and type, with data of a seed."""

    def get(style, dtype=np.float32, seed=0):
        dtype = np.dtype(dtype)
        generator = np.random.default_rng(seed)
        return LayerCases(runtime, make(style, dtype.type, dtype.type), dtype, dtype, generator)

    return get


@pytest.fixture
def check():
    """Check numbers: NMSE of the whole and of every row; float32 is held 100 times tighter than the gate."""

    def within_gate(numbers, label=""):
        actual, expected = numbers
        gate = LINEAR_NMSE["fp16"] if actual.dtype == np.float16 else LINEAR_NMSE["fp32"] / 100
        error = np.square(actual.astype(np.float64) - expected)
        power = np.square(expected) + 1e-30
        assert error.sum() <= gate * power.sum(), label
        width = expected.shape[-1]
        rows = error.reshape(-1, width).sum(1) / power.reshape(-1, width).sum(1)
        assert np.all(rows <= SINGLE_FACTOR * gate), (label, rows.max())

    return within_gate


@pytest.fixture
def check_attention(runtime, check, monkeypatch):
    """Run and check a case; what one part leaves to the next stays in its memory too."""

    def run(made, *, shape, tokens, position, window=0, **options):
        partials = []

        def guarded_scratch(size_bytes):
            partials.append(GuardedOutput(runtime, (size_bytes,), np.uint8))
            return partials[-1].slot

        monkeypatch.setattr(made.layers, "_partial", guarded_scratch)
        full = HeadShape(*shape, position + tokens + 3)
        scores = Scores(full.head_dim**-0.5, window)
        numbers = made.attention(tokens, position, full, scores=scores, **options)
        check(numbers, (full, tokens, position, window, options))
        for partial in partials:
            partial.read()

    return run
