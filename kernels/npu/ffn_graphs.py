"""Ffn shards as NPU graphs: gate, up, their activation and a partial down product, of one or of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from onnx import helper

from heterollm.kernels.formats import LinearWeight, take_rows
from heterollm.kernels.npu.linear_graphs import (
    Bounds,
    GraphBody,
    add_linear,
    add_norm,
    add_transpose,
    add_weight_first,
    k_split_bounds,
)
from heterollm.kernels.npu.protocol import GraphForm
from heterollm.kernels.npu.shards import ExpertsShard, FfnShard
from heterollm.kernels.npu.tensors import INPUT, OUTPUT, STREAM
from heterollm.kernels.ops import Activation, Slopes

# Activations but ReLU are gate * sigmoid(s). For SiLU s is the gate. For GELU (tanh formula) it is
# 2 sqrt(2 / pi) (gate + 0.044715 gate³), since (1 + tanh(t)) / 2 = sigmoid(2 t); this keeps the digits that a
# small 1 + tanh loses in float16, with one operator less. For GELU by the error function it is a series
# that was fitted to log(Phi / (1 - Phi)) up to 5, and GELU is off by 2.6e-5 at most; float32 has Gelu.
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR
GELU_BOUND, GELU_SERIES = 5.0, (-7.030505e-4, 7.4011402e-2, 1.59501564)


def build_ffn(
    shard: FfnShard,
    form: GraphForm,
    body: GraphBody,
    k_split_columns: int,
    *,
    source: str = INPUT,
    target: str = OUTPUT,
    prefix: str = "",
) -> None:
    """Append the nodes of an ffn shard from ``source [1, m, h]`` to ``target [1, m, h]``.

    With o in front the source is the output of attention ``[1, m, k]``, and the graph reads the residual
    stream, too.

    Args:
        shard: The shard.
        form: Graph form, legal for its number format.
        body: The graph to append to.
        k_split_columns: Most inputs of one range of the last linear in a k-split form.
        source: Name of the input.
        target: Name of the output.
        prefix: Prefix of the names of all other nodes and tensors.

    Raises:
        GraphError: The last linear cannot be split that way.
    """
    bounds, output = None, target
    if shard.fused is not None:
        fused, source, attention = shard.fused, f"{prefix}normed", source
        add_linear(body, fused.weight, attention, "o", prefix=f"{prefix}o_")
        body.add("Add", ["o", STREAM], "sum")
        add_norm(body, fused.norm, "sum", source)
        output = "network" if fused.is_added else target
    if form in ("ffn_k_chunked", "ffn_k_chunked_int8"):
        bounds = k_split_bounds(shard.width, shard.format, k_split_columns, shard.label)
    if shard.format.quantized or form == "ffn":
        integer = form in ("ffn_int8", "ffn_k_chunked_int8")
        _build_rows(shard, body, bounds, source, output, prefix, integer_inputs=integer)
    else:
        _build_columns(shard, body, bounds, source, target, prefix)
    if output != target:
        body.add("Add", [output, "o"], target)


def build_experts(shard: ExpertsShard, form: GraphForm, body: GraphBody, k_split_columns: int) -> None:
    """Append the nodes of a group of experts, each on rows of its own, of :data:`INPUT` and :data:`OUTPUT`.

    Raises:
        GraphError: As :func:`build_ffn`.
    """
    sources, targets = ([f"{name}_{own}" for own in shard.experts] for name in ("inputs", "outputs"))
    # Equal parts, of any length.
    body.nodes.append(helper.make_node("Split", [INPUT], sources, axis=1, num_outputs=len(sources)))
    for expert, part, source, target in zip(shard.experts, shard.parts, sources, targets, strict=True):
        names = {"source": source, "target": target, "prefix": f"{expert}_"}
        build_ffn(part, form, body, k_split_columns, **names)
    body.add("Concat", targets, OUTPUT, axis=1)


def _build_rows(
    shard: FfnShard,
    body: GraphBody,
    bounds: Bounds | None,
    source: str,
    target: str,
    prefix: str,
    *,
    integer_inputs: bool,
) -> None:
    """Write each linear from ``[1, m, k]`` to ``[1, m, n]``."""
    for name, weight in _members(shard):
        product, own = _product(shard, prefix + name), f"{prefix}{name}_"
        add_linear(body, weight, source, product, prefix=own, integer_inputs=integer_inputs)
    activated = _add_activated(shard, body, prefix, bias_shape=(shard.width,))
    own = f"{prefix}down_"
    add_linear(body, shard.down, activated, target, bounds, prefix=own, integer_inputs=integer_inputs)


def _build_columns(
    shard: FfnShard, body: GraphBody, bounds: Bounds | None, source: str, target: str, prefix: str
) -> None:
    """Write each linear from ``[1, k, m]`` to ``[1, n, m]``; transpose the input and the output."""
    x_columns, y_columns = f"{prefix}x_columns", f"{prefix}y_columns"
    add_transpose(body, source, x_columns)
    for name, weight in _members(shard):
        product, own = _product(shard, prefix + name), f"{prefix}{name}_"
        add_weight_first(body, weight, x_columns, product, prefix=own)
    activated = _add_activated(shard, body, prefix, bias_shape=(shard.width, 1))
    add_weight_first(body, shard.down, activated, y_columns, bounds, prefix=f"{prefix}down_")
    add_transpose(body, y_columns, target)


def _members(shard: FfnShard) -> Iterator[tuple[str, LinearWeight]]:
    """Yield gate and up; without a gate, up has its name: the member that is activated."""
    for place, name in enumerate(("gate", "up")[: 1 + shard.gated]):
        yield name, take_rows(shard.gate_up, [(place * shard.width, (place + 1) * shard.width)])


def _product(shard: FfnShard, member: str) -> str:
    """Return the name of a member's product before its bias."""
    return member if shard.bias is None else f"{member}_product"


def _add_activated(shard: FfnShard, body: GraphBody, prefix: str, bias_shape: tuple[int, ...]) -> str:
    """Append ``activation(gate + bias) * (up + bias)``, or the activation alone, and return its name."""
    gate, up, share, up_share, activated = (
        f"{prefix}{name}" for name in ("gate", "up", "share", "up_share", "activated")
    )
    if shard.bias is not None:
        for name, bias in zip((gate, up), np.split(shard.bias, 1 + shard.gated), strict=False):
            body.tensors[f"{name}_bias"] = bias.astype(body.dtype).reshape(bias_shape)
            body.add("Add", [_product(shard, name), f"{name}_bias"], name)
    if shard.activation == "xielu":
        bent = _add_xielu(body, prefix, shard.slopes)
        return _add_product(body, [bent, *([up] * shard.gated)], activated)
    own = SIGMOID_ARGUMENTS.get(shard.activation)
    if own is None or (shard.activation in OPERATORS and body.dtype == np.float32):
        body.add(OPERATORS[shard.activation], [gate], share)
        factors = [share] + [up] * shard.gated + [share] * (shard.activation == "relu_squared")
        return _add_product(body, factors, activated)
    body.add("Sigmoid", [own(body, prefix)], share)
    if not shard.gated:
        return _add_product(body, [gate, share], activated)
    # The order matters: QNN fuses gate * sigmoid(gate) into one operator, which rounds to NMSE 2e-6
    # (emulated, one token), and gate * up could exceed float16 where the whole product does not.
    body.add("Mul", [up, share], up_share)
    body.add("Mul", [gate, up_share], activated)
    return activated


def _add_xielu(body: GraphBody, prefix: str, slopes: Slopes) -> str:
    """Append xIELU of ``gate`` and return its name."""

    def number(name: str, value: float) -> str:
        body.tensors[f"{prefix}{name}"] = np.array([value], body.dtype)
        return f"{prefix}{name}"

    def add(kind: str, inputs: list[str], name: str) -> str:
        body.add(kind, inputs, f"{prefix}{name}")
        return f"{prefix}{name}"

    gate = f"{prefix}gate"
    positive = add("Relu", [gate], "positive")
    # exp(x) - 1 is 2 t / (1 - t) with t = tanh(x / 2), which keeps its digits near 0.
    low = add("Min", [gate, number("largest", slopes.largest)], "low")
    half = add("Tanh", [add("Mul", [low, number("half", 0.5)], "low_half")], "half_tanh")
    rest = add("Sub", [number("one", 1.0), half], "rest")
    grown = add("Div", [add("Mul", [half, number("two", 2.0)], "twice_tanh"), rest], "grown")
    bent = add("Add", [grown, add("Sub", [positive, gate], "magnitude")], "bent")
    falling = add("Mul", [bent, number("falling", slopes.falling)], "falling_part")
    slope = add("Mul", [positive, number("rising", slopes.rising)], "rising_part")
    slope = add("Add", [slope, number("linear", slopes.linear)], "slope")
    return add("Add", [add("Mul", [gate, slope], "sloped"), falling], "xielu")


def _add_product(body: GraphBody, factors: list[str], target: str) -> str:
    """Append the product of one to three values and return its name."""
    product, *others = factors
    for place, factor in enumerate(others):
        name = target if place == len(others) - 1 else f"{target}_{place}"
        body.add("Mul", [product, factor], name)
        product = name
    return product


def _silu(_body: GraphBody, prefix: str) -> str:
    return f"{prefix}gate"


def _gelu_tanh(body: GraphBody, prefix: str) -> str:
    # The factor comes before the square, which could exceed float16.
    gate, cubic, linear, scaled, square, slope, argument = (
        f"{prefix}{name}" for name in ("gate", "cubic", "linear", "scaled", "square", "slope", "argument")
    )
    body.tensors[cubic] = np.array([math.sqrt(GELU_CUBIC)], body.dtype)
    body.tensors[linear] = np.array([GELU_LINEAR], body.dtype)
    body.add("Mul", [gate, cubic], scaled)
    body.add("Mul", [scaled, scaled], square)
    body.add("Add", [square, linear], slope)
    body.add("Mul", [gate, slope], argument)
    return argument


def _gelu_erf(body: GraphBody, prefix: str) -> str:
    # Hexagon's own Gelu has an NMSE of 2.8e-6 (emulated, one token).
    gate, bounded, square, argument = (
        f"{prefix}{name}" for name in ("gate", "bounded", "square", "argument")
    )
    for name, value in (("lowest", -GELU_BOUND), ("highest", GELU_BOUND)):
        body.tensors[f"{prefix}{name}"] = np.array(value, body.dtype)
    body.add("Clip", [gate, f"{prefix}lowest", f"{prefix}highest"], bounded)
    body.add("Mul", [bounded, bounded], square)
    last, *others = (f"{prefix}series_{power}" for power in range(len(GELU_SERIES)))
    for name, value in zip((last, *others), GELU_SERIES, strict=True):
        body.tensors[name] = np.array([value], body.dtype)
    for place, factor in enumerate(others):
        body.add("Mul", [last, square], f"{prefix}power_{place}")
        last = f"{prefix}sum_{place}"
        body.add("Add", [f"{prefix}power_{place}", factor], last)
    body.add("Mul", [bounded, last], argument)
    return argument


OPERATORS: dict[Activation, str] = {"relu": "Relu", "relu_squared": "Relu", "gelu_erf": "Gelu"}
"""Operators of ONNX by the activation that they are, or whose root they are."""

SIGMOID_ARGUMENTS: dict[Activation, Callable[[GraphBody, str], str]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": _gelu_erf,
}
"""Functions that append the argument of an activation's sigmoid and return its name."""
