"""Kernels that round what they write give the bits of a launch of its own that rounds it afterwards."""

import itertools

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import linear_errors, quantize, reference
from heterollm.kernels.gpu import (
    STEP_WORDS,
    GlueKernels,
    GpuLinear,
    HeadShape,
    KvLayer,
    MergedLaunch,
    OpenClRuntime,
    RoundedInputs,
    Scores,
    Segments,
    Variant,
    code_bytes,
    merge_launches,
    page_elements,
    pages_of,
    programs,
)
from heterollm.kernels.gpu.rounding import rounding_launch
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.operators.attention import attend
from heterollm.kernels.operators.data import fill_slot, step_slot
from heterollm.kernels.operators.gated_activation import activate
from heterollm.kernels.operators.linear import LINEARS
from heterollm.kernels.operators.norm import final_norm, rms_norm

STYLES = ["vector", "simt"]
TOKENS = (1, 7, 33)
BLOCKS = (32, 64, 128)
GUARD = 0xA5
HIDDEN = 384

LAYERS: dict[tuple, GlueKernels] = {}


def layers_for(runtime, style, dtype=np.float32):
    key = (runtime, style, dtype)
    if key not in LAYERS:
        LAYERS[key] = GlueKernels(runtime, dtype, dtype, style=style)
    return LAYERS[key]


def random(rng, shape, dtype=np.float32):
    """Rows of very unlike sizes, one block of zeros among them."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1)))
    values[-1, : shape[-1] // 2] = 0
    return values.astype(dtype)


def both_ways(runtime, make, tokens, columns, style, *, block, bits=4, dtype=np.float32):
    """Run a producer twice, once rounding by itself; return the launches of the second time.

    Args:
        runtime: The device.
        make: Given the output slot and where codes go (or None), returns the launches.
        tokens: Rows of the output.
        columns: Columns of the output.
        style: Kernel family.
        block: Inputs that share a scale.
        bits: Bits of the weights that the codes are for.
        dtype: Of the output.
    """
    sizes = code_bytes(tokens, columns, block)
    used = tokens * columns, tokens * columns // block * 8
    results = []
    for fused in (False, True):
        out = runtime.shared((tokens, columns), dtype)
        out.write(np.nan)
        slots = [runtime.shared((size,), np.uint8) for size in sizes]
        for slot in slots:
            slot.write(GUARD)
        rounded = RoundedInputs(*slots, bits, block)
        launches = make(out, rounded if fused else None)
        for launch in launches:
            launch()
        if not fused:
            rounding_launch(
                runtime,
                out,
                rounded,
                columns=columns,
                tokens=tokens,
                half=dtype == np.float16,
                variant=Variant(style),
            )()
        runtime.finish()
        for slot, size in zip(slots, used, strict=True):
            assert np.all(slot.read()[size:] == GUARD), "bytes behind the codes were written"
        results.append([out.read(), *(slot.read() for slot in slots)])
    apart, fused = results
    assert np.isfinite(fused[0].astype(np.float32)).all()
    assert np.any(fused[0])
    for one, other in zip(apart, fused, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    scales = fused[2][: used[1]].view(np.float32).reshape(tokens, -1, 2)[..., 0]
    largest = np.abs(fused[0].astype(np.float32)).reshape(tokens, -1, block).max(axis=2)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    return launches


# Every case is a kernel to build: by default each number of tokens with one block.
SOME = list(zip(TOKENS, BLOCKS, strict=True))
EVERY = list(itertools.product(TOKENS, BLOCKS))
# One of floats and two of halves, where both types are tried.
SOME_OF_BOTH = (1, 2, 5)
cases_of = pytest.mark.parametrize(
    "cases", [pytest.param(SOME, id="some"), pytest.param(EVERY, id="every", marks=pytest.mark.slow)]
)


@cases_of
@pytest.mark.parametrize("style", STYLES)
def test_the_norm_rounds_its_output(runtime, style, cases):
    rng = np.random.default_rng(1)
    weight = runtime.upload(rng.standard_normal(HIDDEN).astype(np.float32))
    for number, ((tokens, block), dtype) in enumerate(itertools.product(cases, (np.float32, np.float16))):
        if cases is SOME and number not in SOME_OF_BOTH:
            continue
        residual = random(rng, (tokens, HIDDEN))
        a, b = random(rng, (tokens, 200), dtype), random(rng, (tokens, HIDDEN - 200), dtype)
        delta = Segments(fill_slot(runtime, a), fill_slot(runtime, b), (HIDDEN,), (200,))

        def make(out, rounded, residual=residual, delta=delta, dtype=dtype, tokens=tokens):
            stream = fill_slot(runtime, residual)
            options = {"hidden": HIDDEN, "tokens": tokens, "epsilon": 1e-5, "delta": delta}
            layers = layers_for(runtime, style, dtype)
            return [rms_norm(layers, stream, weight, out, **options, rounded=rounded)]

        both_ways(runtime, make, tokens, HIDDEN, style, block=block, dtype=dtype)


@cases_of
@pytest.mark.parametrize("style", STYLES)
def test_the_final_norm_rounds_the_head_rows(runtime, style, cases):
    rng = np.random.default_rng(2)
    weight = runtime.upload(rng.standard_normal(HIDDEN).astype(np.float32))
    step = step_slot(runtime, head_row=3)
    for rows, block in cases:
        residual = fill_slot(runtime, random(rng, (rows + 3, HIDDEN)))
        value = fill_slot(runtime, random(rng, (rows + 3, HIDDEN)))
        delta = Segments(value, value, (HIDDEN,), (0,))

        def make(out, rounded, residual=residual, delta=delta, rows=rows):
            options = {"rows": rows, "epsilon": 1e-5, "delta": delta, "rounded": rounded}
            return [final_norm(layers_for(runtime, style), residual, weight, out, step, **options)]

        both_ways(runtime, make, rows, HIDDEN, style, block=block, bits=8)


@cases_of
@pytest.mark.parametrize("style", STYLES)
def test_the_activation_rounds_its_output(runtime, style, cases):
    rng = np.random.default_rng(3)
    for (tokens, block), columns in itertools.product(cases, (HIDDEN, 2048 + 640)):
        dtype = np.float16 if block == 64 else np.float32
        half = columns // 2
        a, b = (random(rng, (tokens, width), dtype) for width in (half + 8, 2 * columns - half - 8))
        gate_up = Segments(fill_slot(runtime, a), fill_slot(runtime, b), (columns, columns), (half, 8))

        def make(out, rounded, gate_up=gate_up, dtype=dtype, tokens=tokens, columns=columns):
            options = {"tokens": tokens, "intermediate": columns, "rounded": rounded}
            return [activate(layers_for(runtime, style, dtype), gate_up, out, **options)]

        both_ways(runtime, make, tokens, columns, style, block=block, dtype=dtype)


# Query heads, key heads, elements of a head; and the blocks that cross what a work-group writes.
ATTENTIONS = [
    ((8, 2, 64), ()),
    ((8, 8, 64), (128,)),
    ((8, 2, 80), (128,)),
]


# A shape of each kind for either style: SIMT kernels are the slowest to compile for a CPU.
@pytest.mark.parametrize(
    ("style", "shape", "crossing", "cases"),
    [
        *(pytest.param("vector", *one, SOME, id=f"vector-{one[0]}-some") for one in ATTENTIONS),
        pytest.param("simt", *ATTENTIONS[2], SOME, id=f"simt-{ATTENTIONS[2][0]}-some"),
        *(
            pytest.param(style, *one, EVERY, id=f"{style}-{one[0]}-every", marks=pytest.mark.slow)
            for style, one in itertools.product(STYLES, ATTENTIONS)
        ),
    ],
)
def test_attention_rounds_its_output(runtime, style, shape, crossing, cases):
    rng = np.random.default_rng(4)
    heads, kv_heads, head_dim = shape
    columns = heads * head_dim
    for tokens, block in cases:
        if columns % block:
            continue
        dtype = np.float16 if block == 64 else np.float32
        position = 260
        capacity = position + tokens
        cache = runtime.shared((pages_of(capacity) * page_elements(kv_heads, head_dim, dtype),), dtype)
        cache.write(rng.standard_normal(cache.array.shape))
        query = fill_slot(runtime, random(rng, (tokens, columns)) / 16)
        step = step_slot(runtime, position, tokens)
        for parts in (1, 2) if tokens < 8 else (1,):

            def make(
                out, rounded, query=query, cache=cache, step=step, parts=parts, dtype=dtype, capacity=capacity
            ):
                return attend(
                    layers_for(runtime, style, dtype),
                    *(query, KvLayer(cache, STEP_WORDS), out, step),
                    shape=HeadShape(heads, kv_heads, head_dim, capacity),
                    scores=Scores(head_dim**-0.5),
                    tokens=len(query.array),
                    parts=parts,
                    rounded=rounded,
                )

            launches = both_ways(runtime, make, tokens, columns, style, block=block, dtype=dtype)
            labels = [launch.label for launch in launches]
            if parts == 2:
                assert labels == ["attention", "attention join"]
            elif block in crossing:
                assert labels == ["attention", "rounding of inputs"]
            else:
                assert labels == ["attention"]


@pytest.mark.usefixtures("merges")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_chain_merged_or_not_gives_what_separate_launches_give(runtime, bits):
    """Norm, linear, activation, linear: the codes reach the linear in the order that it reads."""
    rng = np.random.default_rng(bits)
    layers = layers_for(runtime, None)
    residual, ones = random(rng, (1, 256)), runtime.upload(np.ones(256, np.float32))
    linears = []
    for rows, columns in (((512, 512), 256), ((256,), 512)):
        members = [
            quantize(rng.standard_normal((n, columns)).astype(np.float32), bits=bits, block=32) for n in rows
        ]
        linears.append(GpuLinear.pack(runtime, members, activation_dtype=np.float32, integer_inputs=True))
    outputs = []
    for fused in (False, True):
        x, wide, activated, y = (runtime.shared((1, width), np.float32) for width in (256, 1024, 512, 256))
        codes = [None, None]
        if fused:
            codes = [
                RoundedInputs(
                    *(runtime.shared((size,), np.uint8) for size in code_bytes(1, width, 32)), bits, 32
                )
                for width in (256, 512)
            ]
        gate_up = Segments(wide, wide, (512, 512), (0, 0))
        stream = fill_slot(runtime, residual)
        options = {"hidden": 256, "tokens": 1, "epsilon": 1e-5}
        launches = [
            rms_norm(layers, stream, ones, x, **options, rounded=codes[0]),
            linears[0].launch(x, wide, tokens=1, rounded=codes[0], label="gate_up"),
            activate(layers, gate_up, activated, tokens=1, intermediate=512, rounded=codes[1]),
            linears[1].launch(activated, y, tokens=1, rounded=codes[1], label="down"),
        ]
        (merged,) = merge_launches(runtime, launches)
        assert isinstance(merged, MergedLaunch)
        for calls in (launches, [merged]):
            y.write(np.nan)
            for call in calls:
                call()
            runtime.finish()
            outputs.append(y.read())
        assert np.any(outputs[-1])
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


def test_slots_that_do_not_fit_are_refused(runtime):
    layers = layers_for(runtime, None)
    out = runtime.shared((2, 96), np.float32)
    weight = runtime.upload(np.ones(96, np.float32))
    options = {"hidden": 96, "tokens": 2, "epsilon": 1e-5}
    for size, block, message in (
        (1 << 16, 64, "96 columns cannot be rounded in blocks of 64"),
        (1 << 16, 48, "blocks of 48"),
        (95, 32, "norm code slot has 95 bytes, 864 are needed"),
    ):
        slots = [runtime.shared((size,), np.uint8) for _ in range(2)]
        with pytest.raises(KernelError, match=message):
            rms_norm(layers, out, weight, out, **options, rounded=RoundedInputs(*slots, 4, block))


# -- devices whose division is a few units off ------------------------------------------------------------

UNITS = (-3, -2, -1, 1, 2, 3)
"""OpenCL allows an error of 2.5 units. An H200 is one unit low for some of the quotients below."""


@pytest.fixture
def dividing(runtime, monkeypatch):
    """Return a function that opens the device again, with divisions in roundings off by some units."""

    def opened(units):
        def read(files):
            source = read_sources(files)
            if "rounding.h" in files:
                assert source.count("near = a / b;") == 1
                source = source.replace("near = a / b;", f"near = as_float(as_int(a / b) + {units});")
            return source

        monkeypatch.setattr(programs, "read_sources", read)
        return OpenClRuntime(runtime._device)

    return opened


@pytest.mark.parametrize("units", UNITS)
def test_codes_do_not_depend_on_the_device_s_division(dividing, units):
    """Bit for bit on ties of halves, and within the gate in every case of `heterollm doctor`."""
    runtime = dividing(units)
    rng = np.random.default_rng(8)
    # Every mantissa of a half is the largest of a block, with values halfway between two codes.
    tops = (1024 + np.arange(1024)).reshape(-1, 1) / 1024
    halfway = tops * (2 * rng.integers(-127, 127, (1024, 31)) + 1) / 254
    rows = np.concatenate([tops, halfway], 1).reshape(64, 512)
    for dtype in (np.float16, np.float32):
        x = rows.astype(dtype)
        slots = [runtime.shared((size,), np.uint8) for size in code_bytes(64, 512, 32)]
        rounded = RoundedInputs(*slots, 8, 32)
        variant = Variant("simt", plain=True)
        options = {"columns": 512, "tokens": 64, "half": dtype == np.float16, "variant": variant}
        rounding_launch(runtime, fill_slot(runtime, x), rounded, **options)()
        runtime.finish()
        codes = slots[0].read()[: x.size].view(np.int8).reshape(64, 16, 32)
        largest = np.abs(x.astype(np.float32)).reshape(64, 16, 32).max(2, keepdims=True)
        values = codes * (largest / np.float32(127)).astype(np.float64)
        np.testing.assert_array_equal(values.reshape(x.shape), reference.round_inputs(x, 32))
    for case in LINEARS:
        if case.integer_inputs:
            errors = linear_errors(*case.on_gpu(runtime, np.float16, style=variant))
            assert errors.within("fp16"), (case.weight, case.tokens)
