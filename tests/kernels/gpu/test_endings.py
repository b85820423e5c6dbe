"""Linear layers of one token that compute the operator behind them, against exact results."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from heterollm.kernels import operators
from heterollm.kernels.devices import gpu
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import (
    KV_CODES,
    GlueKernels,
    HeadShape,
    OpenClRuntime,
    ShapeClass,
    Variant,
    default_parameters,
    with_numbers,
)
from heterollm.kernels.gpu.parameters import LANES
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.endings import CHECKS, EndingCase, wrong_ending
from heterollm.kernels.operators.gated_activation import GatedCase
from heterollm.kernels.operators.norm import NormCase
from heterollm.kernels.operators.operator import check_case
from heterollm.kernels.operators.rope import RopeCase
from heterollm.kernels.ops import WeightFormat

MANY_UNITS = 132
FORMATS = (
    WeightFormat(4, 32),
    WeightFormat(4, 128, symmetric=False),
    WeightFormat(8, 32),
    WeightFormat(8, 16, symmetric=False, minimum=True),
    WeightFormat(16),
    WeightFormat(32),
)
HALF = np.dtype(np.float16)


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(OpenClRuntime, "has_endings", True)


@pytest.fixture(params=[1, MANY_UNITS], ids=["whole tiles", "divided tiles"])
def units(request, runtime, ends, monkeypatch):
    monkeypatch.setattr(runtime, "traits", replace(runtime.traits, compute_units=request.param))
    return request.param


def drawn(count):
    """Cases of random sizes, each operator behind each kind of weights."""
    random = np.random.default_rng(26)
    kinds = [(weight, False) for weight in FORMATS] + [(weight, True) for weight in FORMATS[:4]]
    for number, (weight, integer) in zip(range(count), itertools.cycle(kinds), strict=False):
        unit = weight.block if integer else 1
        width = unit * int(random.choice([1, 2, 3, 5, 9])) + (0 if integer else int(random.integers(0, 64)))
        columns = 128 * int(random.choice([1, 3, 8]))
        heads = HeadShape(*((2, 1, 32), (3, 1, 64), (4, 2, 128))[number % 3], 80)
        normed, biased = random.random(2) < 0.5
        for behind in (
            NormCase(1, width, 0, biased=biased),
            GatedCase(1, width, (0,) * (1 + number % 2), biased=biased),
            RopeCase(1, 70, heads, (0, 0, 0), rotary=heads.head_dim // 2, biased=biased, normed=normed),
        ):
            yield EndingCase(behind, columns, weight, integer, normed)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_numbers_are_right(runtime, units, make, dtype):
    """Those of a layer of one row as well as of 1152; codes of wide blocks keep a launch of their own."""
    ended = 0
    for case in drawn(10):
        on = make("simt", dtype)
        data = Data(on, np.random.default_rng(0))
        launches = list(run_each(case.launches(on, data)))
        alone = case.integer_inputs and case.weight.block > LANES and not isinstance(case.behind, RopeCase)
        assert len(launches) == 1 + case.integer_inputs + alone
        ended += not alone
        for name, exact in case.exact(data.values).items():
            errors = linear_errors(data.read(name), exact)
            assert errors.within("fp32" if dtype == np.float32 else "fp16"), (case, name)
    assert ended > 25


def run_each(launches):
    for launch in launches:
        launch()
        yield launch


@pytest.mark.parametrize("numbers", [{"image": 1}, {"fewest_rows": 64}, {"items": 1}, {"items": 8}])
def test_tuned_layers_end_rightly(runtime, units, numbers):
    on = GlueKernels(runtime, np.float32, np.float32)
    for check in CHECKS:
        case = check.case
        if case.weight.quantized or "image" not in numbers:
            shape = ShapeClass.of(case.weight, integer_inputs=case.integer_inputs, half=False, tokens=1)
            parameters = with_numbers(default_parameters("simt", shape), numbers)
            on.variants = (Variant("simt", parameters=parameters),)
            found = check_case(case, on, np.random.default_rng(0))
            assert linear_errors(*found[check.output]).within("fp32"), check


def test_keys_in_codes_are_those_of_a_launch_for_rope(runtime, ends, monkeypatch):
    case = EndingCase(RopeCase(1, 70, HeadShape(3, 1, 64, 80), (0, 0, 0)), 96, WeightFormat(4, 32))
    on = GlueKernels(runtime, np.float32, KV_CODES, style="simt")
    found = check_case(case, on, np.random.default_rng(0))
    monkeypatch.setattr(OpenClRuntime, "has_endings", False)
    alone = check_case(case, on, np.random.default_rng(0))
    for name in ("keys", "values"):
        exact = found[name][1]
        step = np.abs(exact).max() / 127
        assert np.abs(found[name][0] - alone[name][0]).max() <= 1.01 * step
        assert np.abs(found[name][0] - exact).max() <= 0.51 * step


# -- the test of an opened device ----------------------------------------------------------------------


@pytest.fixture
def opened(runtime, monkeypatch, cache_folder):
    """Open a GPU of an untested driver: return whether it has endings, its notes, and the tests so far."""
    tests = []
    monkeypatch.setattr(operators, "wrong_ending", lambda on: tests.append(on) or wrong_ending(on))

    def open_gpu():
        found = OpenClRuntime(runtime._device)
        found.traits = replace(found.traits, is_cpu=False)
        found.tests_kernels = True
        gpu.check_endings(found, HALF, HALF)
        assert found.profiling_twin()._endings_fail != found.has_endings
        return found.has_endings, found.variants.notes, len(tests)

    return open_gpu


def test_a_driver_is_tested_once(opened):
    assert opened() == opened() == (True, [], 1)


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        ("sum_of(values);", "0.0f;", "linear and norm, int4: wrong normed (NMSE "),
        ("* UP; ", "* 1; ", "linear and activation, int4: wrong activated (NMSE "),
        (
            "element + ROTARY / 2 : element",
            "element : element",
            "linear and RoPE, int4: wrong queries (NMSE ",
        ),
        ("row < ROWS / CODE_BLOCK", "row < 1", "linear and norm, int4, w4a8: wrong normed (NMSE "),
        ("next_x[column] = ", "next_z[column] = ", "linear and norm, int4: The OpenCL compiler of "),
    ],
)
def test_operators_keep_launches_of_their_own_where_an_ending_fails(
    opened, monkeypatch, right, wrong, reason
):
    def changed(files):
        text = read_sources(files)
        assert "linear_endings.h" not in files or right in text
        return text.replace(right, wrong)

    monkeypatch.setattr("heterollm.kernels.gpu.programs.read_sources", changed)
    for _ in range(2):
        has_endings, (note,), tests = opened()
        assert (has_endings, tests) == (False, 1)
        assert f"launches operators behind linear layers singly: {reason}" in note
