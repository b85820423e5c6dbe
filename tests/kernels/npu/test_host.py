import gc
import itertools
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from heterollm.base import GraphError, OptionError
from heterollm.kernels.formats import QuantizedTensor, linear_errors, reference
from heterollm.kernels.npu import STANDARD_LENGTHS, HostNpu, LinearShape, LinearShard
from heterollm.kernels.operators.linear import LinearCase, run_part
from heterollm.kernels.ops import WeightFormat

QUANTIZED = [
    WeightFormat(bits, block, symmetric)
    for bits in (4, 8)
    for block in (32, 64, 128)
    for symmetric in (True, False)
] + [WeightFormat(bits, block, symmetric=False, minimum=True) for bits, block in ((4, 32), (8, 16))]
LENGTHS = ((1, 1), (20, 32), (64, 64))
"""Tokens and the length of the graph: rows behind the tokens are NaN."""


@pytest.fixture
def check(npu, within_gate):
    return lambda case, *graph: within_gate(case.on_npu(npu, *graph), case, *graph)


def activations(length, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((length, columns)).astype(np.float32)


def run(npu, part, length):
    x = activations(length, part.columns)
    return x, run_part(npu, part, x, length)


@pytest.mark.parametrize("number_format", QUANTIZED, ids=str)
def test_quantized_formats_against_float64(npu, check, number_format):
    for tokens, length in LENGTHS:
        check(LinearCase(number_format, (77,), 896, tokens), length)
    assert npu.compiled_count == 1


@pytest.mark.parametrize("length", STANDARD_LENGTHS)
def test_every_standard_length(check, length):
    check(LinearCase(WeightFormat(4, 128), (35, 35), 4864, length), length)


@pytest.mark.parametrize("bits", [16, 32])
def test_float_forms_against_float64(npu, check, bits):
    seen, tokens_of = set(), {1: 1, 32: 1, 64: 33, 128: 127}
    for columns in (896, 4864):
        for length, tokens in tokens_of.items():
            forms = npu.forms(LinearShape(WeightFormat(bits), columns), length)
            assert forms[0] == "activation_first"
            for form in forms:
                check(LinearCase(WeightFormat(bits), (99,), columns, tokens), length, form)
                seen.add((columns, length, form))
    every = itertools.product((896, 4864), tokens_of, ("activation_first", "weight_first", "conv_1x1"))
    tiled = {(columns, length, "token_tiles") for columns in (896, 4864) for length in (64, 128)}
    assert seen == {*every} | tiled | {(4864, length, "k_chunked") for length in tokens_of}


@pytest.mark.parametrize("number_format", QUANTIZED, ids=str)
def test_pieces_of_quantized_weights_against_float64(npu, check, number_format):
    for tokens, length in LENGTHS:
        assert npu.forms(LinearShape(number_format, 4864), length) == ("matmul_nbits", "k_chunked")
        case = LinearCase(number_format, (33,), 4864, tokens)
        check(case, length, "k_chunked")
        check(replace(case, integer_inputs=True), length, "k_chunked_int8")


def test_several_threads_compute_the_same(make_slice, exact):
    npu = HostNpu(threads=2)
    part = make_slice(512, 256)
    x, y = run(npu, part, 64)
    assert linear_errors(y, exact(part, x)).within("fp32")


def test_a_bound_call_reads_and_writes_in_place(npu, make_slice, exact):
    part = make_slice(64, 256)
    x, y = activations(32, 256), np.zeros((32, 64), np.float32)
    call = npu.prepare(part, 32).bind({"x": x}, {"y": y})
    for seed in range(3):
        x[:] = activations(32, 256, seed)
        call()
        assert linear_errors(y, exact(part, x)).within("fp32")


def test_rows_of_a_larger_buffer_are_bound_in_place(npu, make_slice, exact):
    part = make_slice(64, 256)
    pool = np.zeros((96, 256), np.float32)
    outputs = np.full((96, 64), 7.0, np.float32)
    pool[32:64] = activations(32, 256)
    npu.prepare(part, 32).bind({"x": pool[32:64]}, {"y": outputs[32:64]})()
    assert linear_errors(outputs[32:64], exact(part, pool[32:64])).within("fp32")
    assert (outputs[:32] == 7).all()
    assert (outputs[64:] == 7).all()


def test_calls_leave_nothing_behind(npu, make_slice):
    x, y = activations(1, 256), np.zeros((1, 64), np.float32)
    call = npu.prepare(make_slice(64, 256), 1).bind({"x": x}, {"y": y})
    gc.collect()
    gc.disable()  # finalizers of other tests' objects would count
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
        gc.enable()
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
            graph.bind({"x": source}, {"y": target})
    for inputs, outputs, reason in (
        ({"input": x}, {"y": y}, "inputs x, not input"),
        ({"x": x, "mask": x}, {"y": y}, "inputs x, not x, mask"),
        ({"x": x}, {}, "outputs y, not none"),
    ):
        with pytest.raises(GraphError, match=reason):
            graph.bind(inputs, outputs)


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


def test_it_emulates_nothing(npu, make_slice):
    assert npu.cpu_times_us(make_slice(64, 256), 32, runs=3) is None
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
    assert npu.forms(LinearShape(WeightFormat(8, 64, False), 256), 32) == ("matmul_nbits",)


def test_a_full_temporary_folder_is_an_error_with_advice(npu, make_slice, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent-folder")
    with pytest.raises(GraphError, match="TMPDIR"):
        npu.prepare(make_slice(64, 256), 32)


# ---- activations rounded to int8 ------------------------------------------------------------------------


@pytest.mark.parametrize("number_format", QUANTIZED, ids=str)
def test_rounded_inputs_against_float64_and_the_gpu(npu, within_gate, runtime, number_format):
    for tokens, length in LENGTHS:
        case = LinearCase(number_format, (77,), 896, tokens, integer_inputs=True)
        y, exact = case.on_npu(npu, length)
        within_gate((y, exact), case)
        within_gate(case.on_gpu(runtime, np.float32), case)
        within_gate(case.on_both(runtime, npu, length), case)
        floats = replace(case, integer_inputs=False).exact(*case.data(np.float32))
        assert 0 < linear_errors(y, floats).nmse <= 3e-4
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
            npu.prepare(part, length).bind({"x": x}, {"y": y})()
            scales = (np.abs(x).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float64)
            np.testing.assert_array_equal(
                np.rint(y / scales), np.rint(reference.round_inputs(x, block) / scales)
            )


def test_rounded_inputs_never_run_as_floats(npu, make_slice):
    part = replace(make_slice(64, 256), integer_inputs=True)
    assert npu.forms(LinearShape(part.format, 256, integer_inputs=True), 32) == ("matmul_nbits_int8",)
    with pytest.raises(GraphError, match=r"as matmul_nbits at 32"):
        npu.prepare(part, 32, "matmul_nbits")
    with pytest.raises(GraphError, match="as matmul_nbits_int8"):
        npu.prepare(make_slice(64, 256), 32, "matmul_nbits_int8")
    with pytest.raises(GraphError, match="f16 weights and int8 activations"):
        npu.prepare(replace(make_slice(64, 256, bits=16), integer_inputs=True), 32)


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
