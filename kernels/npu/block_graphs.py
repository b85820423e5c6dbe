"""A part of a feed-forward network as one NPU graph: gate, up, their activation and a partial down product.

Both activations are ``gate * sigmoid(s)``: ``s`` is the gate itself, or for GELU by its tanh formula
``2 sqrt(2 / pi) (gate + 0.044715 gate³)``, since ``(1 + tanh(t)) / 2 = sigmoid(2 t)``. What the formula loses
of a small ``1 + tanh`` in float16 is kept this way, with one operator less.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from heterollm.kernels.formats import LinearWeight, take_rows
from heterollm.kernels.npu.linear_graphs import (
    INPUT,
    OUTPUT,
    Bounds,
    GraphBody,
    add_linear,
    add_transpose,
    add_weight_first,
    chunk_bounds,
)
from heterollm.kernels.npu.parts import NpuBlock
from heterollm.kernels.npu.protocol import Form
from heterollm.kernels.ops import Activation

__all__ = ["build_block"]

GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR


def build_block(part: NpuBlock, form: Form, body: GraphBody, chunk_columns: int) -> None:
    """Append the nodes of a block's part from ``x [1, m, h]`` to ``y [1, m, h]``.

    Args:
        part: The part.
        form: How to write it, legal for its number format.
        body: Where to.
        chunk_columns: Most inputs of a piece of the last linear in a chunked form.

    Raises:
        GraphError: The last linear has no such pieces.
    """
    bounds = None
    if form in ("ffn_k_chunked", "ffn_k_chunked_int8"):
        bounds = chunk_bounds(part.width, part.format, chunk_columns, part.label)
    if part.format.quantized or form == "ffn":
        _build_rows(part, body, bounds, integer_inputs=form in ("ffn_int8", "ffn_k_chunked_int8"))
    else:
        _build_columns(part, body, bounds)


def _build_rows(part: NpuBlock, body: GraphBody, bounds: Bounds | None, *, integer_inputs: bool) -> None:
    """Write each linear from ``[1, m, k]`` to ``[1, m, n]``."""
    for name, weight in zip(("gate", "up"), _gate_up(part), strict=True):
        target, prefix = _product(part, name), f"{name}_"
        add_linear(body, weight, INPUT, target, prefix=prefix, integer_inputs=integer_inputs)
    _add_activated(part, body, bias_shape=(part.width,))
    add_linear(body, part.down, "activated", OUTPUT, bounds, prefix="down_", integer_inputs=integer_inputs)


def _build_columns(part: NpuBlock, body: GraphBody, bounds: Bounds | None) -> None:
    """Write each linear from ``[1, k, m]`` to ``[1, n, m]``, transposed once at either end."""
    add_transpose(body, INPUT, "x_columns")
    for name, weight in zip(("gate", "up"), _gate_up(part), strict=True):
        add_weight_first(body, weight, "x_columns", _product(part, name), prefix=f"{name}_")
    _add_activated(part, body, bias_shape=(part.width, 1))
    add_weight_first(body, part.down, "activated", "y_columns", bounds, prefix="down_")
    add_transpose(body, "y_columns", OUTPUT)


def _gate_up(part: NpuBlock) -> tuple[LinearWeight, LinearWeight]:
    """Return the two members, each a view."""
    width = part.width
    return take_rows(part.gate_up, [(0, width)]), take_rows(part.gate_up, [(width, 2 * width)])


def _product(part: NpuBlock, member: str) -> str:
    """Return the name of a member's product, to which its bias comes, where there is one."""
    return member if part.bias is None else f"{member}_product"


def _add_activated(part: NpuBlock, body: GraphBody, bias_shape: tuple[int, ...]) -> None:
    """Append ``activated = activation(gate + bias) * (up + bias)``."""
    if part.bias is not None:
        for name, bias in zip(("gate", "up"), np.split(part.bias, 2), strict=True):
            body.tensors[f"{name}_bias"] = bias.astype(body.dtype).reshape(bias_shape)
            body.add("Add", [_product(part, name), f"{name}_bias"], name)
    share = ACTIVATIONS[part.activation](body)
    body.add("Sigmoid", [share], "share")
    # In this order: QNN takes gate * sigmoid(gate) for one operator, which it rounds to NMSE 2e-6 of a block
    # (emulated, one token), and gate * up could exceed float16 where the whole does not.
    body.add("Mul", ["up", "share"], "up_share")
    body.add("Mul", ["gate", "up_share"], "activated")


def _silu(_body: GraphBody) -> str:
    return "gate"


def _gelu_tanh(body: GraphBody) -> str:
    """Append what the sigmoid is taken of. The factor comes before the square, which float16 may not hold."""
    body.tensors["cubic"] = np.array([math.sqrt(GELU_CUBIC)], body.dtype)
    body.tensors["linear"] = np.array([GELU_LINEAR], body.dtype)
    body.add("Mul", ["gate", "cubic"], "scaled")
    body.add("Mul", ["scaled", "scaled"], "square")
    body.add("Add", ["square", "linear"], "slope")
    body.add("Mul", ["gate", "slope"], "argument")
    return "argument"


ACTIVATIONS: dict[Activation, Callable[[GraphBody], str]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}
"""Append what an activation needs and return the name of what its sigmoid is taken of."""
