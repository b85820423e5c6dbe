"""A feed-forward block cut along its width: the NPU's part, the GPU's, and the norm that adds them up."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.kernels.formats import concatenate_rows, linear_errors, reference, take_columns, take_rows
from heterollm.kernels.gpu import (
    GlueKernels,
    GpuLinear,
    RoundedInputs,
    Segments,
    code_bytes,
)
from heterollm.kernels.npu import FfnShard, HostNpu, QnnNpu, qnn_available
from heterollm.kernels.operators.data import fill_slot, step_slot
from heterollm.kernels.operators.gated_activation import activate, exact_gated_activation
from heterollm.kernels.operators.norm import exact_rms_norm, final_norm, rms_norm

USABLE, REASON, _ = qnn_available(emulator=True)
STYLES = ["vector", "simt"]
TYPES = [np.float32, np.float16]
EPSILON = 1e-5


def rounded_memory(runtime, tokens, columns, weight):
    slots = (runtime.shared((size,), np.uint8) for size in code_bytes(tokens, columns, weight.block))
    return RoundedInputs(*slots, weight.bits, weight.block)


# -- the norm that adds --------------------------------------------------------------------------------------


def sum_case(runtime, rng, tokens, hidden, dtype):
    """The two parts, the first with NaN rows behind it as padded NPU output has, and their sum."""
    a, b = (rng.standard_normal((tokens, hidden)).astype(dtype) for _ in range(2))
    padded = np.concatenate([a, np.full((2, hidden), np.nan, dtype)])
    delta = Segments(fill_slot(runtime, padded), fill_slot(runtime, b), (hidden,), (hidden,), join="sum")
    return delta, a.astype(np.float32) + b.astype(np.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_the_norm_adds_two_parts_and_stores_the_sum(runtime, style, dtype):
    rng = np.random.default_rng(1)
    layers = GlueKernels(runtime, dtype, np.float32, style=style)
    gate = "fp16" if dtype == np.float16 else "fp32"
    for tokens, hidden in ((1, 96), (2, 7), (5, 100), (33, 256)):
        start, weight = rng.standard_normal((tokens, hidden)).astype(np.float32), rng.standard_normal(hidden)
        weight = weight.astype(np.float32)
        bias, post = (rng.standard_normal(hidden).astype(np.float32) for _ in range(2))
        for has_bias in (False, True):
            for has_post in (False, True):
                delta, total = sum_case(runtime, rng, tokens, hidden, dtype)
                residual, out = fill_slot(runtime, start), runtime.shared((tokens, hidden), dtype)
                rms_norm(
                    layers,
                    residual,
                    runtime.upload(weight),
                    out,
                    hidden=hidden,
                    tokens=tokens,
                    epsilon=EPSILON,
                    delta=delta,
                    bias=runtime.upload(bias) if has_bias else None,
                    post=runtime.upload(post) if has_post else None,
                )()
                runtime.finish()
                added = total + bias if has_bias else total.astype(np.float64)
                if has_post:
                    added = exact_rms_norm(added, post, EPSILON)
                case = (tokens, hidden, has_bias, has_post)
                np.testing.assert_allclose(residual.read(), start + added, rtol=2e-5, atol=2e-5)
                exact = exact_rms_norm(start + added, weight, EPSILON)
                assert linear_errors(out.read(), exact).within(gate), case


@pytest.mark.parametrize("style", STYLES)
def test_the_final_norm_adds_two_parts_of_the_head_rows(runtime, style):
    rng = np.random.default_rng(2)
    layers = GlueKernels(runtime, np.float32, np.float32, style=style)
    step = step_slot(runtime, head_row=3)
    delta, total = sum_case(runtime, rng, 5, 128, np.float32)
    start, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 128), 128))
    residual, out = fill_slot(runtime, start), runtime.shared((2, 128), np.float32)
    launch = final_norm(
        layers, residual, runtime.upload(weight), out, step, rows=2, epsilon=EPSILON, delta=delta
    )
    for _ in range(2):
        launch()
        runtime.finish()
        np.testing.assert_array_equal(residual.read(), start)
        exact = exact_rms_norm((start + total)[3:], weight, EPSILON)
        assert linear_errors(out.read(), exact).within("fp32")


@pytest.mark.parametrize("style", STYLES)
def test_what_is_rounded_is_the_norm_of_the_sum(runtime, style):
    rng = np.random.default_rng(3)
    layers = GlueKernels(runtime, np.float32, np.float32, style=style)
    delta, _ = sum_case(runtime, rng, 5, 256, np.float32)
    whole = fill_slot(runtime, delta.a.read()[:5] + delta.b.read())
    start, weight = rng.standard_normal((5, 256)).astype(np.float32), runtime.upload(np.ones(256, np.float32))
    results = []
    for value in (delta, Segments(whole, whole, (256,), (0,))):
        residual, out = fill_slot(runtime, start), runtime.shared((5, 256), np.float32)
        slots = [runtime.shared((size,), np.uint8) for size in code_bytes(5, 256, 32)]
        options = {"hidden": 256, "tokens": 5, "epsilon": EPSILON, "rounded": RoundedInputs(*slots, 4, 32)}
        rms_norm(layers, residual, weight, out, delta=value, **options)()
        runtime.finish()
        used = (5 * 256, 5 * 256 // 32 * 8)
        codes = [slot.read()[:size] for slot, size in zip(slots, used, strict=True)]
        results.append([residual.read(), out.read(), *codes])
    for summed, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(summed, plain)
        assert np.any(summed)


# -- the whole block -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Network:
    """A feed-forward network with the biases that it may have."""

    gate: object
    up: object
    down: object
    activation: str
    biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    @property
    def shape(self):
        """Hidden width and width in the middle."""
        values = reference.weight_values(self.down)
        return values.shape

    @property
    def format(self):
        return getattr(self.down, "format", None)

    def exact(self, x, integer):
        seen = reference.round_inputs(x, self.format.block) if integer else x.astype(np.float64)
        gate, up = (seen @ reference.weight_values(member).T for member in (self.gate, self.up))
        if self.biases:
            gate, up = gate + self.biases[0], up + self.biases[1]
        activated = exact_gated_activation(gate, up, self.activation)
        seen = reference.round_inputs(activated, self.format.block) if integer else activated
        whole = seen @ reference.weight_values(self.down).T
        return whole + self.biases[2] if self.biases else whole


def make_network(make_slice, rng, hidden, width, kind, activation, biased):
    seeds = rng.integers(0, 2**31, 3)
    gate, up = (make_slice(width, hidden, **kind, seed=int(seed)).weight for seed in seeds[:2])
    down = make_slice(hidden, width, **kind, seed=int(seeds[2])).weight
    biases = None
    if biased:
        biases = tuple(rng.standard_normal(size).astype(np.float32) for size in (width, width, hidden))
    return Network(gate, up, down, activation, biases)


def run_cut(runtime, npu, network, x, cut, length, *, style, integer=False, form=None):
    """Compute the network with the first ``cut`` of its width on the NPU; return what the norm adds."""
    dtype, tokens = npu.activation_dtype, len(x)
    hidden, width = network.shape
    rest = width - cut
    y_npu = runtime.shared((length, hidden), dtype)
    padded = np.full((length, hidden), np.nan, dtype)
    padded[:tokens] = x
    upper = concatenate_rows([take_rows(member, [(0, cut)]) for member in (network.gate, network.up)])
    bias = network.biases and np.concatenate([part[:cut] for part in network.biases[:2]])
    part = FfnShard(
        upper, take_columns(network.down, 0, cut), network.activation, bias, 0, "cut", (0, cut), integer
    )
    y_npu.acquire()
    npu.prepare(part, length, form).bind({"x": padded}, {"y": y_npu.array})()
    y_npu.release()
    npu.release(part)

    layers = GlueKernels(runtime, dtype, dtype, style=style)
    options = {"activation_dtype": dtype, "integer_inputs": integer}
    gate_up = GpuLinear.pack(runtime, [network.gate, network.up], **options)
    down = GpuLinear.pack(runtime, [network.down], **options)
    source, wide = fill_slot(runtime, x), runtime.shared((tokens, 2 * rest), dtype)
    activated, y_gpu = runtime.shared((tokens, rest), dtype), runtime.shared((tokens, hidden), dtype)
    rounded = rounded_memory(runtime, tokens, rest, network.format) if integer else None
    tail = network.biases and np.concatenate([part[cut:] for part in network.biases[:2]])
    last = network.biases and runtime.upload(network.biases[2])
    start = np.random.default_rng(0).standard_normal((tokens, hidden)).astype(np.float32) / 8
    residual, out = fill_slot(runtime, start), runtime.shared((tokens, hidden), dtype)
    kept = ((cut, width), (cut, width))
    halves = Segments(wide, wide, (rest, rest), (0, 0))
    shape = {"tokens": tokens, "intermediate": rest, "activation": network.activation, "rounded": rounded}
    total = Segments(y_npu, y_gpu, (hidden,), (hidden,), join="sum")
    launches = [
        gate_up.launch(source, wide, tokens=tokens, kept=kept, style=style, label="gate and up"),
        activate(layers, halves, activated, bias=None if tail is None else runtime.upload(tail), **shape),
        down.launch(
            activated, y_gpu, tokens=tokens, columns=(cut, width), rounded=rounded, style=style, label="down"
        ),
        rms_norm(
            layers,
            residual,
            runtime.upload(np.ones(hidden, np.float32)),
            out,
            hidden=hidden,
            tokens=tokens,
            epsilon=EPSILON,
            delta=total,
            bias=last,
        ),
    ]
    for launch in launches:
        launch()
    runtime.finish()
    return residual.read().astype(np.float64) - start


KINDS = [
    {"bits": 4, "block": 32},
    {"bits": 4, "block": 64, "symmetric": False},
    {"bits": 8, "block": 32, "symmetric": False},
    {"bits": 16},
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("integer", [False, True])
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_cut_gives_the_uncut_network(runtime, make_slice, style, integer, data):
    kind = data.draw(st.sampled_from(KINDS[:3] if integer else KINDS))
    unit = 128
    units = data.draw(st.integers(2, 5))
    cut = unit * data.draw(st.integers(1, units - 1))
    tokens = data.draw(st.sampled_from((1, 2, 5, 33)))
    activation, biased = data.draw(st.sampled_from(("silu", "gelu_tanh"))), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    network = make_network(make_slice, rng, 192, units * unit, kind, activation, biased)
    x = rng.standard_normal((tokens, 192)).astype(np.float32)
    npu = HostNpu()
    length = next(length for length in npu.standard_lengths if length >= tokens)
    actual = run_cut(runtime, npu, network, x, cut, length, style=style, integer=integer)
    errors = linear_errors(actual, network.exact(x, integer))
    if integer:
        # Codes that float32 turns near a half, one of 256 in a token at 2e-6, are all that may differ.
        assert errors.nmse < 1e-5
        assert linear_errors(actual, network.exact(x, False)).nmse < 2 * 3e-4
    else:
        assert errors.within("fp32")


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cut_with_the_hexagon_gives_the_uncut_network(runtime, make_slice, cache_folder, kind):
    rng = np.random.default_rng(5)
    npu = QnnNpu(emulator=True, compile_in_child=False)
    for activation, biased, style, tokens in (
        ("silu", False, "vector", 1),
        ("silu", True, "simt", 33),
        ("gelu_tanh", True, "vector", 5),
    ):
        network = make_network(make_slice, rng, 256, 640, kind, activation, biased)
        x = rng.standard_normal((tokens, 256)).astype(np.float16)
        length = next(length for length in npu.standard_lengths if length >= tokens)
        for cut in (256, 512):
            actual = run_cut(runtime, npu, network, x, cut, length, style=style)
            errors = linear_errors(actual, network.exact(x, integer=False))
            assert errors.within("fp16"), (activation, tokens, cut, errors)
    npu.close()
