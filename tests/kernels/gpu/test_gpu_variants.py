"""Variants of the kernels for GPUs: weights as images, inputs passed in subgroups, keys that neighbours read.

PoCL's wheel has images but no subgroups; Intel's runtime has both (`pytest --gpu NAME`).
"""

import dataclasses
import itertools

import numpy as np
import pytest

from heterollm.base import OptionError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import (
    AttentionClass,
    BuildError,
    GlueKernels,
    HeadShape,
    OpenClRuntime,
    Scores,
    ShapeClass,
    TunedAttention,
    Variant,
    default_parameters,
    with_numbers,
)
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.gpu.tuning import DeviceTuning
from heterollm.kernels.operators.attention import AttentionCase
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.operators.operator import check_case
from heterollm.kernels.ops import WeightFormat

INT4 = WeightFormat(4, 32)
HEADS = HeadShape(6, 2, 64, 200)
FLOATS = np.dtype(np.float32)


def variant(weight, tokens, integer_inputs=False, half=False, **numbers):
    """The default parameters of a GPU with some numbers changed."""
    shape = ShapeClass.of(weight, integer_inputs=integer_inputs, half=half, tokens=tokens)
    parameters = with_numbers(default_parameters("simt", shape), numbers)
    parameters.check_for(shape)
    return Variant("simt", parameters=parameters)


def attended(runtime, style, tokens, dtype=FLOATS, heads=HEADS, scores=None):
    layers = GlueKernels(runtime, dtype, dtype, style=None if runtime.traits.is_cpu is False else "simt")
    case = AttentionCase(tokens, 150 - tokens, heads, scores or Scores(0.1, 67), parts=1, style=style)
    return check_case(case, layers, np.random.default_rng(2))["attended"]


@pytest.fixture
def phone(runtime, cache_folder):
    """The runtime as a GPU that tests its kernels, with a tuning table of its own."""
    opened = OpenClRuntime(runtime._device)
    opened.traits = dataclasses.replace(opened.traits, is_cpu=False)
    opened.tests_kernels = True
    opened.tuning = DeviceTuning(opened.traits.identity(), enabled=True)
    kind = AttentionClass.of(HEADS.head_dim, HEADS.group, FLOATS, 1)
    opened.tuning.change(lambda table: table.attention.update({kind: TunedAttention(kind, "coalesced")}))
    return opened


@pytest.mark.parametrize(("tokens", "integer_inputs"), [(1, False), (9, False), (5, True)])
def test_weights_as_an_image_give_the_numbers_of_a_buffer(runtime, tokens, integer_inputs):
    case = LinearCase(INT4, (70, 3), 96, tokens, integer_inputs=integer_inputs)
    found = [
        case.on_gpu(runtime, np.float32, style=variant(INT4, tokens, integer_inputs, image=image))
        for image in (0, 1)
    ]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert linear_errors(*found[1]).within("fp32")


def test_an_image_beyond_the_limit_is_no_variant(runtime):
    opened = OpenClRuntime(runtime._device)
    opened.traits = dataclasses.replace(opened.traits, image_texels=100, has_subgroups=False)
    with pytest.raises(BuildError, match="exceeds the limit"):
        LinearCase(INT4, (70,), 96, 1).on_gpu(opened, np.float32, style=variant(INT4, 1, image=1))
    assert not opened.traits.identity().can_run(variant(INT4, 1, subgroup=1).parameters)


def test_tuned_parameters_stay_when_the_memory_of_a_machine_changes(runtime):
    traits = runtime.traits
    more = dataclasses.replace(
        traits, image_texels=2 * traits.image_texels, global_bytes=2 * traits.global_bytes
    )
    assert more.identity() == traits.identity()
    none = dataclasses.replace(traits, image_texels=0).identity()
    assert not none.can_run(variant(INT4, 1, image=1).parameters)


def test_variants_that_do_not_suit_a_shape_are_refused():
    with pytest.raises(OptionError, match="image"):
        variant(WeightFormat(16), 1, image=1)
    for options in ({"tokens": 2}, {"tokens": 1, "integer_inputs": True}):
        with pytest.raises(OptionError, match="subgroup"):
            variant(INT4, **options, subgroup=1)


@pytest.mark.parametrize("tokens", [1, 9])
def test_keys_that_neighbours_share_give_the_numbers_of_own_keys(runtime, tokens):
    own, exact = attended(runtime, "simt", tokens)
    shared, _ = attended(runtime, "coalesced", tokens)
    np.testing.assert_array_equal(own, shared)
    assert linear_errors(shared, exact).within("fp32")


def test_the_tuned_style_of_attention_is_used_and_tested(phone, monkeypatch):
    built, build = [], phone.kernel
    monkeypatch.setattr(
        phone,
        "kernel",
        lambda files, name, defines=None: built.append(defines) or build(files, name, defines),
    )
    assert linear_errors(*attended(phone, None, 1)).within("fp32")
    # The test of one token and of several, and the launch.
    assert [defines.get("COALESCED") for defines in built if "GROUP" in defines] == [1, 1, 1]
    assert phone.variants.notes == []


def test_a_style_that_computes_wrongly_gives_way(phone, monkeypatch):
    def wrong(files):
        return read_sources(files).replace("staged_key * STAGED_ROW + piece", "staged_key * STAGED_ROW")

    monkeypatch.setattr("heterollm.kernels.gpu.programs.read_sources", wrong)
    assert linear_errors(*attended(phone, None, 1)).within("fp32")
    (note,) = phone.variants.notes
    assert "cannot use the coalesced kernel for attention: it computes wrong numbers" in note


def test_variants_meet_the_gates_where_subgroups_pass_values(runtime):
    if not runtime.traits.has_subgroups:
        pytest.skip("needs subgroups: pytest --gpu NAME")
    types = (np.float32, "fp32"), (np.float16, "fp16")
    weights = (INT4, WeightFormat(4, 16, symmetric=False), WeightFormat(8, 32))
    for weight, (dtype, gate), subgroup, image in itertools.product(weights, types, (0, 1), (0, 1)):
        chosen = variant(weight, 1, half=gate == "fp16", subgroup=subgroup, image=image)
        errors = linear_errors(*LinearCase(weight, (70, 3), 1056, 1).on_gpu(runtime, dtype, style=chosen))
        assert errors.within(gate), (weight, gate, chosen)
    for heads, (dtype, gate), tokens in itertools.product((HEADS, HeadShape(8, 8, 128, 200)), types, (1, 9)):
        errors = linear_errors(*attended(runtime, "coalesced", tokens, np.dtype(dtype), heads))
        assert errors.within(gate), (heads, gate, tokens)
