"""The linear kernels of CPUs with a matrix unit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import linear_errors, random_weight, reference
from heterollm.kernels.gpu import GpuLinear, all_parameters, linear_style, rows_alike
from heterollm.kernels.gpu.parameters import ShapeClass
from heterollm.kernels.gpu.pocl import target
from heterollm.kernels.gpu.variants import Variant
from heterollm.kernels.operators.linear import LinearCase, run_linear
from heterollm.kernels.ops import WeightFormat

FORMATS = {
    "int4": WeightFormat(4, 32),
    "int4 with zero points": WeightFormat(4, 32, symmetric=False),
    "int4 with minimums": WeightFormat(4, 32, symmetric=False, minimum=True),
    "int8": WeightFormat(8, 32),
    "int8 with zero points": WeightFormat(8, 32, symmetric=False),
}
BLOCKS = {16: 80, 32: 96, 64: 192, 128: 384}
STEPS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 257)


@pytest.fixture(autouse=True)
def unit(runtime):
    if not runtime.traits.has_matrix:
        pytest.skip("needs a CPU with AMX")


@pytest.fixture
def check(runtime, within_gate):
    def run(case, dtype=np.float32, **options):
        within_gate(case.on_gpu(runtime, dtype, style="matrix", **options), case)

    return run


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("integer_inputs", [False, True])
def test_every_number_of_tokens_matches_float64(check, name, integer_inputs):
    for tokens in STEPS:
        check(LinearCase(FORMATS[name], (77,), 96, tokens, integer_inputs=integer_inputs))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_every_block_matches_float64(check, block, dtype):
    for name in ("int4 with zero points", "int8"):
        own = replace_struct(FORMATS[name], block=block)
        for tokens, integer_inputs in ((18, False), (40, True)):
            case = LinearCase(own, (1, 64, 65), BLOCKS[block], tokens, integer_inputs=integer_inputs)
            check(case, dtype)
            check(replace(case, first_token=3), dtype)
    if dtype == np.float16:
        check(case, dtype, output_dtype=np.float32)


def test_ranges_of_rows_and_inputs_match_float64(check):
    whole = LinearCase(WeightFormat(4, 32, symmetric=False), (200, 64, 77), 256, 1)
    for tokens, integer_inputs in ((1, False), (6, True), (40, False)):
        case = replace(whole, tokens=tokens, integer_inputs=integer_inputs)
        check(replace(case, kept=((128, 200), (0, 0), (64, 77))))
        check(replace(case, inputs=(64, 160)))
        check(replace(case, inputs=(64, 160), kept=((0, 200), (0, 17), (0, 1)), first_token=2))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=10)
@given(tokens=st.integers(1, 70), data=st.data())
def test_a_row_has_the_same_bits_among_any_others(runtime, name, tokens, data):
    case = LinearCase(FORMATS[name], (130,), 256, tokens)
    members, x = case.data(np.float32)
    packed = GpuLinear.pack(runtime, members, activation_dtype=np.float32)
    together = run_linear(runtime, packed, x, style="matrix")
    row = data.draw(st.integers(0, tokens - 1))
    alone = run_linear(runtime, packed, x[row : row + 1], style="matrix")
    np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.parametrize("name", FORMATS)
def test_int8_inputs_give_the_bits_of_the_vector_kernels(runtime, name):
    for tokens in (1, 5, 8, 70):
        case = LinearCase(FORMATS[name], (130,), 256, tokens, integer_inputs=True)
        matrix, vector = (case.on_gpu(runtime, np.float32, style=style)[0] for style in ("matrix", "vector"))
        np.testing.assert_array_equal(matrix, vector)


def test_inputs_of_any_size_keep_the_precision_of_floats(runtime):
    """Parts add up to a float exactly, so large inputs beside small ones cost nothing."""
    generator = np.random.default_rng(0)
    weight = random_weight(generator, 64, 256, WeightFormat(4, 32))
    x = (generator.standard_normal((20, 256)) * 10.0 ** generator.integers(-20, 15, (20, 1))).astype(
        np.float32
    )
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    found = run_linear(runtime, packed, x, style="matrix")
    exact = reference.linear(x, [weight])
    scale = np.abs(exact).max(axis=1, keepdims=True)
    assert linear_errors(found / scale, exact / scale).within("fp32")
    assert np.square(found / scale - exact / scale).mean() < 1e-13


def test_rows_that_are_not_numbers_stay_alone(runtime):
    case = LinearCase(WeightFormat(4, 32), (70,), 96, 12)
    members, x = case.data(np.float32)
    packed = GpuLinear.pack(runtime, members, activation_dtype=np.float32)
    clean = run_linear(runtime, packed, x, style="matrix")
    x[2], x[7] = np.nan, np.inf
    found = run_linear(runtime, packed, x, style="matrix")
    others = np.delete(np.arange(12), [2, 7])
    np.testing.assert_array_equal(found[others], clean[others])
    assert not np.isfinite(found[[2, 7]]).any()


def test_every_parameter_that_tuning_may_choose_gives_the_same_bits(runtime):
    for tokens in (1, 5, 70):
        case = LinearCase(WeightFormat(4, 32), (130,), 256, tokens)
        shape = ShapeClass.of(case.weight, integer_inputs=False, half=False, tokens=tokens)
        variants = [Variant("matrix", parameters=own) for own in all_parameters("matrix", shape)[::3]]
        first, *others = (case.on_gpu(runtime, np.float32, style=variant)[0] for variant in variants)
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_linears_use_it_by_default(runtime):
    case = LinearCase(WeightFormat(4, 32), (130,), 256, 5)
    default, matrix = (case.on_gpu(runtime, np.float32, style=style)[0] for style in (None, "matrix"))
    np.testing.assert_array_equal(default, matrix)
    shapes = [ShapeClass.of(own, integer_inputs=False, half=False, tokens=1) for own in FORMATS.values()]
    unit = {"is_cpu": True, "has_half": False, "has_matrix": True}
    assert {linear_style(shape, **unit) for shape in shapes} == {"matrix"}
    floats = ShapeClass.of(WeightFormat(32), integer_inputs=False, half=False, tokens=1)
    assert linear_style(floats, **unit) == "vector"
    assert rows_alike(floats.weight, is_cpu=True, has_matrix=True) == 8


def test_a_kernel_that_does_not_build_gives_way_to_vectors(within_gate, monkeypatch):
    device = open_device("host")
    build = device.gpu.kernel

    def refuse(files, name, defines=None):
        return build(files, name, {**(defines or {}), **({"BROKEN(": 1} if "matrix.h" in files else {})})

    monkeypatch.setattr(device.gpu, "kernel", refuse)
    case = LinearCase(WeightFormat(4, 32), (100,), 128, 9)
    within_gate(case.on_gpu(device.gpu, np.float32), case)
    (note,) = device.gpu.variants.notes
    device.close()
    assert "cannot use the matrix kernel for linear int4 block 32" in note


def test_a_process_that_may_not_use_the_unit_does_without(monkeypatch):
    target.allow_matrix.cache_clear()
    try:
        monkeypatch.setattr(target, "_processor_flags", lambda: frozenset({"avx2"}))
        assert not target.allow_matrix()
    finally:
        target.allow_matrix.cache_clear()
