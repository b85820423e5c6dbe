import dataclasses

import numpy as np
import pytest

from heterollm.kernels.formats import LINEAR_NMSE, SINGLE_FACTOR
from heterollm.kernels.gpu import GlueKernels, GpuLinear, HeadShape, Scores
from heterollm.kernels.operators.attention import AttentionCase
from heterollm.kernels.operators.data import PADDING_ROWS, GuardedOutput, fill_slot, run_launches
from heterollm.kernels.operators.operator import check_case

LAYERS: dict[tuple, GlueKernels] = {}


@pytest.fixture(autouse=True)
def skip_without_a_matrix_unit(request):
    """Skip tests of the style ``matrix`` on other CPUs."""
    style = getattr(request.node, "callspec", None) and request.node.callspec.params.get("style")
    if style == "matrix" and not request.getfixturevalue("runtime").traits.has_matrix:
        pytest.skip("needs a CPU with AMX")


@pytest.fixture
def merges(runtime):
    """Skip tests of merged launches where launches are not merged: on GPUs, and where memory is mapped."""
    if not runtime.merges_launches:
        pytest.skip("needs a CPU with coherent memory")


@pytest.fixture
def make(runtime):
    """GlueKernels of a style and types, made once."""

    def get(style, activation=np.float32, kv=np.float32):
        key = (runtime, style, activation, kv)
        if key not in LAYERS:
            LAYERS[key] = GlueKernels(runtime, activation, kv, style=style)
        return LAYERS[key]

    return get


@dataclasses.dataclass(frozen=True)
class Made:
    """Kernels with a source of data: runs a case and returns its outputs, each with the exact one."""

    layers: GlueKernels
    generator: np.random.Generator

    def __call__(self, case):
        return tuple(check_case(case, self.layers, self.generator).values())


@pytest.fixture
def cases(make):
    """Kernels in a style and type, with data of a seed."""

    def get(style, dtype=np.float32, seed=0, kv=None):
        return Made(make(style, dtype, dtype if kv is None else kv), np.random.default_rng(seed))

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

        monkeypatch.setattr(made.layers, "scratch", guarded_scratch)
        full = HeadShape(*shape, position + tokens + 3)
        scores = Scores(full.head_dim**-0.5, window)
        [numbers] = made(AttentionCase(tokens, position, full, scores, **options))
        check(numbers, (full, tokens, position, window, options))
        for partial in partials:
            partial.read()

    return run


@pytest.fixture
def embed():
    """The embeddings of some ids; negative ids lie behind them."""

    def rows(gpu, table, ids, *, scale=1.0, style=None):
        linear = GpuLinear.pack(gpu, [table], activation_dtype=np.float32)
        tokens = fill_slot(gpu, np.array([*ids, *(-1,) * PADDING_ROWS], np.int32))
        out = GuardedOutput(gpu, (len(ids), linear.columns), np.float32)
        run_launches(gpu, [linear.embed_launch(tokens, out.slot, count=len(ids), scale=scale, style=style)])
        return out.read()

    return rows
