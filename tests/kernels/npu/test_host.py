import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from heterollm.base import GraphError, OptionError
from heterollm.kernels.formats import QuantizedTensor, linear_errors, reference
from heterollm.kernels.gpu import GpuLinear
from heterollm.kernels.npu import STANDARD_LENGTHS, HostNpu, LinearShard
from heterollm.kernels.ops import WeightFormat

QUANTIZED = [
    (bits, block, symmetric) for bits in (4, 8) for block in (32, 64, 128) for symmetric in (True, False)
]


@pytest.fixture
def npu():
    backend = HostNpu()
    yield backend
    backend.close()


def activations(length, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((length, columns)).astype(np.float32)


def run(npu, part, length, form=None, seed=0):
    x = activations(length, part.columns, seed)
    y = np.full((length, part.rows), np.nan, np.float32)
    npu.prepare(part, length, form).bind(x, y)()
    return x, y


@pytest.mark.parametrize(("bits", "block", "symmetric"), QUANTIZED)
def test_quantized_formats_against_float64(npu, make_slice, exact, bits, block, symmetric):
    part = make_slice(77, 896, bits, block, symmetric)
    for length in (1, 32, 64):
        x, y = run(npu, part, length)
        errors = linear_errors(y, exact(part, x))
        assert errors.within("fp32"), (length, errors)
    assert npu.compiled_count == 1


@pytest.mark.parametrize("length", STANDARD_LENGTHS)
def test_every_standard_length(npu, make_slice, exact, length):
    part = make_slice(70, 4864, 4, 128, members=2)
    x, y = run(npu, part, length)
    assert linear_errors(y, exact(part, x)).within("fp32")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_float_forms_against_float64(npu, make_slice, exact, dtype):
    seen = set()
    for columns in (896, 4864):
        part = make_slice(99, columns, bits=16, dtype=dtype)
        for length in (1, 32, 64):
            forms = npu.forms(part.format, columns=columns, length=length)
            assert forms[0] == "activation_first"
            for form in forms:
                x, y = run(npu, part, length, form)
                assert linear_errors(y, exact(part, x)).within("fp32"), (columns, length, form)
                seen.add((columns, length, form))
    always = {
        (columns, length, form)
        for columns in (896, 4864)
        for length in (1, 32, 64)
        for form in ("activation_first", "weight_first", "conv_1x1")
    }
    tiled = {(columns, 64, "token_tiles") for columns in (896, 4864)}
    assert seen == always | tiled | {(4864, length, "k_chunked") for length in (1, 32, 64)}


@pytest.mark.parametrize(("bits", "block", "symmetric"), QUANTIZED)
def test_pieces_of_quantized_weights_against_float64(npu, make_slice, exact, bits, block, symmetric):
    part = make_slice(33, 4864, bits, block, symmetric)
    rounded = replace(part, integer_inputs=True)
    for length in (1, 32, 64):
        assert npu.forms(part.format, columns=4864, length=length) == ("matmul_nbits", "k_chunked")
        x, y = run(npu, part, length, "k_chunked")
        assert linear_errors(y, exact(part, x)).within("fp32")
        x, y = run(npu, rounded, length, "k_chunked_int8")
        oracle = reference.linear(reference.round_inputs(x, block), [part.weight])
        assert linear_errors(y, oracle).within("fp32")


def test_several_threads_compute_the_same(make_slice, exact):
    npu = HostNpu(threads=2)
    part = make_slice(512, 256)
    x, y = run(npu, part, 64)
    assert linear_errors(y, exact(part, x)).within("fp32")


def test_a_bound_call_reads_and_writes_in_place(npu, make_slice, exact):
    part = make_slice(64, 256)
    x, y = activations(32, 256), np.zeros((32, 64), np.float32)
    call = npu.prepare(part, 32).bind(x, y)
    for seed in range(3):
        x[:] = activations(32, 256, seed)
        call()
        assert linear_errors(y, exact(part, x)).within("fp32")


def test_rows_of_a_larger_buffer_are_bound_in_place(npu, make_slice, exact):
    part = make_slice(64, 256)
    pool = np.zeros((96, 256), np.float32)
    outputs = np.full((96, 64), 7.0, np.float32)
    pool[32:64] = activations(32, 256)
    npu.prepare(part, 32).bind(pool[32:64], outputs[32:64])()
    assert linear_errors(outputs[32:64], exact(part, pool[32:64])).within("fp32")
    assert (outputs[:32] == 7).all()
    assert (outputs[64:] == 7).all()


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        ("matmul_nbits", 4),
        ("activation_first", 16),
        ("weight_first", 16),
        ("conv_1x1", 16),
        ("token_tiles", 16),
        ("k_chunked", 4),
        ("k_chunked", 16),
    ],
)
def test_padding_rows_never_reach_the_others(npu, make_slice, exact, form, bits):
    columns = 4864 if form == "k_chunked" else 256
    part = make_slice(64, columns, bits)
    for length, tokens in ((32, 1), (64, 33), (128, 127)):
        if form == "token_tiles" and length == 32:
            continue
        x, y = activations(length, columns), np.zeros((length, 64), np.float32)
        x[tokens:] = np.nan
        npu.prepare(part, length, form).bind(x, y)()
        assert linear_errors(y[:tokens], exact(part, x[:tokens])).within("fp32")


def test_calls_leave_nothing_behind(npu, make_slice):
    x, y = activations(1, 256), np.zeros((1, 64), np.float32)
    call = npu.prepare(make_slice(64, 256), 1).bind(x, y)
    tracemalloc.start()
    try:
        for _ in range(1000):  # the first few hundred fill a pool inside ONNX Runtime's bindings
            call()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(2000):
            call()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000  # less than half a byte a call
    assert peak - before < 1500


def test_arrays_that_would_be_copied_are_refused(npu, make_slice):
    graph = npu.prepare(make_slice(64, 256), 32)
    x, y = activations(32, 256), np.zeros((32, 64), np.float32)
    read_only = y.copy()
    read_only.flags.writeable = False
    memory = np.zeros(32 * 256 + 32 * 64, np.float32)
    overlapping = memory[: 32 * 256].reshape(32, 256), memory[4096 : 4096 + 32 * 64].reshape(32, 64)
    cases = [
        (np.zeros((32, 512), np.float32)[:, :256], y, "not contiguous"),
        (x, np.zeros((64, 64), np.float32)[::2], "not contiguous"),
        (np.asfortranarray(x), y, "not contiguous"),
        (x.astype(np.float16), y, "float32"),
        (x[:31], y, r"\[32, 256\]"),
        (x, y[:, :63].copy(), r"\[32, 64\]"),
        (x[np.newaxis], y, r"\[32, 256\]"),
        (x, read_only, "read-only"),
        (*overlapping, "overlap"),
    ]
    for source, target, reason in cases:
        with pytest.raises(GraphError, match=reason):
            graph.bind(source, target)


def test_only_standard_lengths_and_legal_forms(npu, make_slice):
    part = make_slice(64, 256)
    with pytest.raises(GraphError, match=r"length 33.*1, 32, 64"):
        npu.prepare(part, 33)
    with pytest.raises(GraphError, match=r"weight_first.*matmul_nbits"):
        npu.prepare(part, 32, "weight_first")
    assert npu.compiled_count == 0


def test_a_form_may_be_legal_at_one_length_only(npu, make_slice):
    part = make_slice(64, 256, bits=16)
    npu.prepare(part, 64, "token_tiles")
    with pytest.raises(GraphError, match=r"token_tiles at 32 tokens.*activation_first"):
        npu.prepare(part, 32, "token_tiles")
    with pytest.raises(GraphError, match="as k_chunked at 64"):
        npu.prepare(part, 64, "k_chunked")


def test_it_counts_no_cycles(npu, make_slice):
    assert npu.count_cycles(make_slice(64, 256), 32, runs=3) is None
    assert npu.compiled_count == 0


def test_slices_with_other_numbers_have_other_sessions(npu, make_slice, exact):
    for part in (make_slice(64, 256), make_slice(64, 256, seed=1), make_slice(64, 512)):
        x, y = run(npu, part, 32)
        assert linear_errors(y, exact(part, x)).within("fp32")
    assert npu.compiled_count == 3


def test_a_thread_is_needed():
    with pytest.raises(OptionError, match="0"):
        HostNpu(threads=0)


def test_it_states_what_computes(npu):
    assert npu.versions()["onnxruntime"][0].isdigit()
    assert npu.time_kind == "real"
    assert npu.forms(WeightFormat(8, 64, False), columns=256, length=32) == ("matmul_nbits",)


def test_a_full_temporary_folder_is_an_error_with_advice(npu, make_slice, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent-folder")
    with pytest.raises(GraphError, match="TMPDIR"):
        npu.prepare(make_slice(64, 256), 32)


# ---- activations rounded to int8 ------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "block", "symmetric"), QUANTIZED)
def test_rounded_inputs_against_float64_and_the_gpu(npu, make_slice, runtime, bits, block, symmetric):
    part = replace(make_slice(77, 896, bits, block, symmetric), integer_inputs=True)
    packed = GpuLinear.pack(runtime, [part.weight], activation_dtype=np.float32, integer_inputs=True)
    for length in (1, 32, 64):
        x, y = run(npu, part, length)
        exact = reference.linear(reference.round_inputs(x, block), [part.weight])
        assert linear_errors(y, exact).within("fp32")
        x_slot, y_slot = runtime.shared(x.shape, np.float32), runtime.shared(y.shape, np.float32)
        x_slot.array[:] = x
        packed.launch(x_slot, y_slot, tokens=length, label="test")()
        runtime.finish()
        assert linear_errors(y_slot.array, exact).within("fp32")
        assert linear_errors(y_slot.array, y.astype(np.float64)).within("fp32")
        assert 0 < linear_errors(y, reference.linear(x, [part.weight])).nmse <= 3e-4
    assert npu.compiled_count == 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_rounding_is_the_oracles(npu, bits, block):
    """The weight hands the inputs through, so that every code shows, ties included."""
    middle = 1 << (bits - 1)
    codes = np.full((block, block), middle, np.uint8)
    np.fill_diagonal(codes, middle + 1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes)[:, np.newaxis]
    weight = QuantizedTensor(packed, np.ones((block, 1), np.float16), None, bits, block)
    part = LinearShard(weight, 0, "o", ((0, block),), "one on the diagonal", integer_inputs=True)
    rng = np.random.default_rng(0)
    halves = rng.integers(-252, 253, (64, block)) / 2
    halves[:, 0] = 127
    for length in (1, 64):
        for values in (rng.standard_normal((64, block)), halves, halves * rng.uniform(0.01, 100, (64, 1))):
            x, y = values[:length].astype(np.float32), np.empty((length, block), np.float32)
            npu.prepare(part, length).bind(x, y)()
            scales = (np.abs(x).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float64)
            np.testing.assert_array_equal(
                np.rint(y / scales), np.rint(reference.round_inputs(x, block) / scales)
            )


def test_rounded_inputs_never_run_as_floats(npu, make_slice):
    part = replace(make_slice(64, 256), integer_inputs=True)
    assert npu.forms(part.format, columns=256, length=32, integer_inputs=True) == ("matmul_nbits_int8",)
    with pytest.raises(GraphError, match=r"as matmul_nbits at 32"):
        npu.prepare(part, 32, "matmul_nbits")
    with pytest.raises(GraphError, match="as matmul_nbits_int8"):
        npu.prepare(make_slice(64, 256), 32, "matmul_nbits_int8")
    with pytest.raises(GraphError, match="f16 weights and int8 activations"):
        npu.prepare(replace(make_slice(64, 256, bits=16), integer_inputs=True), 32)


def test_padding_rows_never_reach_rounded_ones(npu, make_slice):
    part = replace(make_slice(64, 256), integer_inputs=True)
    x, y = activations(32, 256), np.zeros((32, 64), np.float32)
    x[5:] = np.nan
    npu.prepare(part, 32).bind(x, y)()
    exact = reference.linear(reference.round_inputs(x[:5], 32), [part.weight])
    assert linear_errors(y[:5], exact).within("fp32")


MEMORY_SCRIPT = """
import ctypes, gc, sys
import numpy as np
from heterollm.kernels.npu import LinearShard
from heterollm.kernels.npu.host import HostNpu
from heterollm.kernels.formats.quantized_tensor import QuantizedTensor

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) * 1024

def part(layer):
    generator = np.random.default_rng(layer)
    codes = generator.integers(0, 256, (8192, 64, 16), np.uint8)
    weight = QuantizedTensor(codes, generator.random((8192, 64)).astype(np.float16), None, 4, 32)
    return LinearShard(weight, layer, "down", ((0, 8192),), "key")

npu = HostNpu()
npu.prepare(part(9), 1)
before = anonymous()
for layer in range(4):
    for length in npu.standard_lengths:
        npu.prepare(part(layer), length)
print((anonymous() - before) / (4 * (8192 * 1024 + 8192 * 128)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_held_once_for_all_lengths(tmp_path):
    command = [sys.executable, "-P", "-c", MEMORY_SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.3
