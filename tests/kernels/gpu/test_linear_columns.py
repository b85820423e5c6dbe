"""Launches over a range of a linear's inputs: partial sums, in every kernel that can compute them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.formats import QuantizedTensor, linear_errors, reference, take_columns
from heterollm.kernels.gpu import GpuLinear, MergedLaunch, RoundedInputs, Variant, code_bytes, merge_launches
from heterollm.kernels.gpu.rounding import rounding_launch

FORMATS = ["int4", "int4z", "int8", "int8z", "f16", "f32"]
STYLES = ["vector", "simt"]
TOKENS = (1, 2, 5, 33)
# Every number of tokens is a kernel to build for each width of weights: the common one has them all.
TOKENS_OF = {"int4": TOKENS, "int4z": TOKENS}
GUARD = 0xA5


def make_weight(rng, rows, columns, kind, block):
    if kind.startswith("f"):
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(f"f{int(kind[1:]) // 8}")
    bits, groups = int(kind[3]), columns // block
    return QuantizedTensor(
        rng.integers(0, 256, (rows, groups, block * bits // 8), np.uint8),
        rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float16),
        rng.integers(0, 256, (rows, -(-groups * bits // 8)), np.uint8) if kind.endswith("z") else None,
        bits,
        block,
    )


def slots_of(runtime, x, rows, first_token):
    """Compact inputs between NaN rows, and an output between guard bytes."""
    tokens, width = x.shape
    x_slot = runtime.shared((first_token + tokens + 2, width), x.dtype)
    x_slot.array[:] = np.nan
    x_slot.array[first_token : first_token + tokens] = x
    y_slot = runtime.shared(((first_token + tokens) * rows * x.itemsize + 4096,), np.uint8)
    y_slot.array[:] = GUARD
    return x_slot, y_slot


def read(y_slot, dtype, tokens, rows, first_token):
    size = np.dtype(dtype).itemsize * rows
    start, stop = first_token * size, (first_token + tokens) * size
    assert np.all(y_slot.array[:start] == GUARD), "bytes before the output were written"
    assert np.all(y_slot.array[stop:] == GUARD), "bytes after the output were written"
    return y_slot.array[start:stop].view(dtype).reshape(tokens, rows).copy()


def partial(x, members, columns, kept=None):
    """What a launch over a range computes, in float64."""
    spans = kept or [(0, None)] * len(members)
    values = [
        reference.weight_values(member)[rows[0] : rows[1], columns[0] : columns[1]]
        for member, rows in zip(members, spans, strict=True)
    ]
    return x.astype(np.float64) @ np.concatenate(values).T


def check(runtime, members, columns, tokens, rng, dtype, *, block, integer=False, style=None, **options):
    packed = GpuLinear.pack(runtime, members, activation_dtype=dtype, integer_inputs=integer)
    first_token, kept = options.get("first_token", 0), options.get("kept")
    rows = sum(stop - start for start, stop in kept or [(0, rows) for rows in packed.member_rows])
    x = rng.standard_normal((tokens, columns[1] - columns[0])).astype(dtype)
    x_slot, y_slot = slots_of(runtime, x, rows, first_token)
    call = {"tokens": tokens, "columns": columns, "style": style, "label": "test", **options}
    packed.launch(x_slot, y_slot, **call)()
    runtime.finish()
    actual = read(y_slot, dtype, tokens, rows, first_token)
    seen = reference.round_inputs(x, block) if integer else x
    errors = linear_errors(actual, partial(seen, members, columns, kept))
    assert errors.within("fp16" if actual.dtype == np.float16 else "fp32"), (columns, tokens, options, errors)


def ranges(columns, block):
    """All, the first and the last block, and what lies between them."""
    return [(0, columns), (0, block), (columns - block, columns), (block, columns - block), (0, 2 * block)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("style", STYLES)
def test_every_range_and_number_of_tokens_matches_float64(runtime, style, kind):
    rng = np.random.default_rng(1)
    for block, columns in ((16, 80), (32, 224), (128, 640)):
        members = [make_weight(rng, 77, columns, kind, block)]
        for span in ranges(columns, block):
            for tokens in TOKENS_OF.get(kind, (2, 33)):
                check(runtime, members, span, tokens, rng, np.float32, block=block, style=style)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.startswith("int")])
@pytest.mark.parametrize("style", STYLES)
def test_every_range_of_rounded_inputs_matches_float64(runtime, style, kind):
    rng = np.random.default_rng(2)
    for block, columns in ((16, 80), (32, 224), (128, 640)):
        members = [make_weight(rng, 77, columns, kind, block)]
        for span in ranges(columns, block):
            for tokens in TOKENS_OF.get(kind, (2, 33)):
                check(runtime, members, span, tokens, rng, np.float32, block=block, integer=True, style=style)


@pytest.mark.parametrize("style", STYLES)
def test_cut_members_offsets_and_half_activations(runtime, style):
    rng = np.random.default_rng(3)
    members = [make_weight(rng, rows, 192, "int4z", 32) for rows in (200, 64, 77)]
    kept = ((128, 200), (0, 64), (64, 77))
    for dtype, integer in ((np.float32, False), (np.float16, False), (np.float16, True)):
        for tokens, first_token in ((5, 1), (33, 0)):
            options = {"kept": kept, "first_token": first_token, "style": style, "integer": integer}
            check(runtime, members, (64, 160), tokens, rng, dtype, block=32, **options)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_cut_of_the_inputs_adds_up_to_the_whole(runtime, data):
    kind, style = data.draw(st.sampled_from(FORMATS)), data.draw(st.sampled_from(STYLES))
    block = data.draw(st.sampled_from((16, 32, 64, 128)))
    blocks = data.draw(st.integers(2, 9))
    columns, rows = blocks * block, data.draw(st.integers(1, 130))
    cut = block * data.draw(st.integers(1, blocks - 1))
    tokens = data.draw(st.sampled_from(TOKENS))
    integer = kind.startswith("int") and data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weight = make_weight(rng, rows, columns, kind, block)
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=integer)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    total = np.zeros((tokens, rows))
    for span in ((0, cut), (cut, columns)):
        x_slot, y_slot = slots_of(runtime, np.ascontiguousarray(x[:, slice(*span)]), rows, 0)
        packed.launch(x_slot, y_slot, tokens=tokens, columns=span, style=style, label="part")()
        runtime.finish()
        total += read(y_slot, np.float32, tokens, rows, 0)
    # A block never straddles the cut, so that the parts round as the whole does.
    seen = reference.round_inputs(x, block) if integer else x
    assert linear_errors(total, reference.linear(seen, [weight])).within("fp32")


@pytest.mark.parametrize("style", STYLES)
def test_the_whole_range_gives_the_same_bits_as_none(runtime, style):
    rng = np.random.default_rng(4)
    for integer, tokens in ((False, 1), (False, 33), (True, 1), (True, 33)):
        weight = make_weight(rng, 130, 256, "int4z", 32)
        packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=integer)
        x = rng.standard_normal((tokens, 256)).astype(np.float32)
        results = []
        for columns in (None, (0, 256)):
            x_slot, y_slot = slots_of(runtime, x, 130, 0)
            options = {"columns": columns, "style": style, "label": "whole"}
            packed.launch(x_slot, y_slot, tokens=tokens, **options)()
            runtime.finish()
            results.append(read(y_slot, np.float32, tokens, 130, 0))
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("style", STYLES)
def test_codes_that_another_kernel_left_are_compact(runtime, style):
    rng = np.random.default_rng(5)
    weight, span, tokens = make_weight(rng, 77, 512, "int4", 64), (192, 448), 5
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
    x = rng.standard_normal((tokens, 256)).astype(np.float32)
    x_slot, y_slot = slots_of(runtime, x, 77, 0)
    slots = [runtime.shared((size,), np.uint8) for size in code_bytes(tokens, 256, 64)]
    rounded = RoundedInputs(*slots, 4, 64)
    options = {"columns": 256, "tokens": tokens, "half": False, "variant": Variant(style)}
    rounding_launch(runtime, x_slot, rounded, **options)()
    launch = packed.launch(
        x_slot, y_slot, tokens=tokens, columns=span, rounded=rounded, style=style, label="codes"
    )
    launch()
    runtime.finish()
    exact = partial(reference.round_inputs(x, 64), [weight], span)
    assert linear_errors(read(y_slot, np.float32, tokens, 77, 0), exact).within("fp32")
    too_small = RoundedInputs(runtime.shared((64,), np.uint8), slots[1], 4, 64)
    with pytest.raises(KernelError, match="code slot"):
        packed.launch(x_slot, y_slot, tokens=tokens, columns=span, rounded=too_small, label="codes")


def test_merged_launches_keep_their_ranges(runtime):
    rng = np.random.default_rng(6)
    weight = make_weight(rng, 64, 256, "int4", 32)
    spans = [(0, 96), (96, 256), (32, 64)]
    launches, outputs, exact = [], [], []
    for integer in (False, True):
        packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=integer)
        for span in spans:
            x = rng.standard_normal((1, span[1] - span[0])).astype(np.float32)
            x_slot, y_slot = slots_of(runtime, x, 64, 0)
            launches.append(packed.launch(x_slot, y_slot, tokens=1, columns=span, label=f"{span}"))
            outputs.append(y_slot)
            exact.append(partial(reference.round_inputs(x, 32) if integer else x, [weight], span))
    merged = merge_launches(runtime, launches)
    assert [type(call) for call in merged] == [MergedLaunch]
    for call in merged:
        call()
    runtime.finish()
    for y_slot, expected in zip(outputs, exact, strict=True):
        assert linear_errors(read(y_slot, np.float32, 1, 64, 0), expected).within("fp32")


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("int4", (0, 0)),
        ("int4", (64, 32)),
        ("int4", (-32, 32)),
        ("int4", (0, 288)),
        ("int4", (16, 64)),
        ("int4", (0, 48)),
        ("f32", (8, 64)),
        ("f32", (0, 250)),
    ],
)
def test_a_range_that_does_not_fit_is_refused(runtime, kind, columns):
    packed = GpuLinear.pack(
        runtime, [make_weight(np.random.default_rng(0), 64, 256, kind, 32)], activation_dtype=np.float32
    )
    x, y = runtime.shared((1, 512), np.float32), runtime.shared((1, 64), np.float32)
    unit = 32 if kind == "int4" else 16
    with pytest.raises(KernelError, match=f"starts and stops at multiples of {unit}"):
        packed.launch(x, y, tokens=1, columns=columns, label="down")


def test_the_input_slot_needs_the_range_alone(runtime):
    packed = GpuLinear.pack(
        runtime, [make_weight(np.random.default_rng(0), 64, 256, "f32", 0)], activation_dtype=np.float32
    )
    x, y = runtime.shared((2, 96), np.float32), runtime.shared((2, 64), np.float32)
    packed.launch(x, y, tokens=2, columns=(32, 128), label="down")
    with pytest.raises(KernelError, match="input slot"):
        packed.launch(x, y, tokens=2, columns=(32, 144), label="down")


@pytest.mark.parametrize("kind", FORMATS)
def test_taken_columns_are_those_of_the_values(kind):
    rng = np.random.default_rng(7)
    weight = make_weight(rng, 9, 7 * 32, kind, 32)
    for start, stop in ((0, 224), (0, 96), (64, 192), (128, 224)):
        np.testing.assert_array_equal(
            reference.weight_values(take_columns(weight, start, stop)),
            reference.weight_values(weight)[:, start:stop],
        )


def test_columns_that_share_a_byte_or_a_block_are_not_taken():
    weight = make_weight(np.random.default_rng(8), 9, 224, "int4z", 32)
    for start, stop in ((32, 96), (0, 80), (16, 64), (64, 64), (0, 256), (-64, 64)):
        with pytest.raises(ValueError, match="whole"):
            take_columns(weight, start, stop)
    with pytest.raises(ValueError, match="lie in"):
        take_columns(make_weight(np.random.default_rng(8), 9, 64, "f32", 0), 0, 65)
