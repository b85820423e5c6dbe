"""The gate of a shared network of experts: each token's output times the sigmoid of a linear of its input."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.gpu import Argument, DeviceMemory, GlueKernels, Launch, Segments, pointwise_work
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.operator import Exact, OperatorCheck, StepCategory, Values
from heterollm.kernels.ops import Join

TITLE: Final = "token gate"
STEPS: Final[Mapping[str, StepCategory]] = {TITLE: "activation"}


def gate_tokens(
    on: GlueKernels,
    x: DeviceMemory,
    weight: Argument,
    values: Segments,
    out: DeviceMemory,
    *,
    tokens: int,
) -> Launch:
    """Return the launch of ``out = sigmoid(x . weight) * values``.

    Args:
        on: The device's kernels.
        x: ``[tokens, hidden]`` in the activation type, the input of the network.
        weight: float32 ``[hidden]``.
        values: Output of the network, one member of ``hidden`` rows.
        out: ``[tokens, hidden]`` in the activation type; none of the segments.
        tokens: Tokens of the pass.
    """
    if len(values.rows) != 1:
        raise KernelError(f"{TITLE}: the output of a network is one member, not {len(values.rows)}.")
    (columns,), (split,) = values.rows, values.splits
    for memory, name in ((x, "input"), (out, "output")):
        memory.require(tokens * columns * on.item_bytes, f"{TITLE} {name}")
    kernel, _, items = on.kernel(("token_gate.cl",), "token_gate", widths=(columns, split), segments=values)
    arguments = (x, weight, values.a, values.b, out, np.int32(split), np.int32(columns))
    read = on.item_bytes * (1 + values.reads)
    work = functools.partial(pointwise_work, tokens * columns, 3, read, on.item_bytes)
    return on.runtime.launch(kernel, arguments, (tokens * items,), (items,), TITLE, work=work)


@dataclass(frozen=True, slots=True)
class TokenGateCase:
    """A gate of whole tokens, of the output of a network in two segments at ``split``."""

    tokens: int
    hidden: int
    split: int
    join: Join = "concatenate"

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, hidden = self.tokens, self.hidden
        launch = gate_tokens(
            on,
            data.inputs("x", tokens, hidden),
            data.floats("weight", hidden, scale=2 / hidden**0.5),
            data.linear(tokens, (hidden,), (self.split,), self.join),
            data.output("gated", tokens, hidden),
            tokens=tokens,
        )
        return (launch,)

    def exact(self, data: Values) -> Exact:
        scores = data["x"].astype(np.float64) @ data["weight"].astype(np.float64)
        return {"gated": data["linear"] / (1 + np.exp(-scores))[:, None]}


CHECKS: Final = (
    OperatorCheck(TITLE, "5 tokens, split", TokenGateCase(5, 192, 64), "gated"),
    OperatorCheck(TITLE, "5 tokens, sum", TokenGateCase(5, 192, 64, "sum"), "gated"),
)
