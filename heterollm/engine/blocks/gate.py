"""Appends a gate or a norm of a block's output."""

from __future__ import annotations

from typing import Any

from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import PlacedOp, codes_of, segments_of
from heterollm.kernels.gpu import DeviceMemory, GlueKernels, Segments
from heterollm.kernels.operators import gate_output, norm_output


def append_gate(
    builder: PassBuilder,
    kernels: GlueKernels,
    x: DeviceMemory,
    inputs: Segments,
    member: int,
    out: PlacedOp,
    *,
    heads: int,
    **options: Any,  # noqa: ANN401 - of gate_output
) -> None:
    """Append the gate of what the linears ``out`` read.

    Args:
        builder: The pass so far.
        kernels: The device's kernels.
        x: The output without its gate.
        inputs: Output of the block's first linears.
        member: Place of the gate among their members.
        out: The block's last linears.
        heads: Heads of the output.
        options: Bias and norm, see :func:`gate_output`.
    """
    target, rounded, layer = out.source, out.rounded, out.spec.layer
    options |= {"heads": heads, "tokens": builder.tokens, "rounded": rounded}
    gate, *rounding = gate_output(kernels, x, inputs, member, target, **options)
    reads = x, *segments_of(inputs)
    builder.kernel(gate.label, layer, gate, reads=reads, writes=(target,), ends=not rounding)
    for launch in rounding:
        builder.kernel("rounding of inputs", layer, launch, reads=(target,), writes=codes_of(rounded))


def append_norm(
    builder: PassBuilder,
    kernels: GlueKernels,
    norm: Any,  # noqa: ANN401 - pyopencl is not typed
    out: PlacedOp,
    epsilon: float,
) -> None:
    """Append a norm of what the linears ``out`` read, in place.

    Args:
        builder: The pass so far.
        kernels: The device's kernels.
        norm: Weights of the norm, float32.
        out: The block's last linears.
        epsilon: Added to the mean square in the norm.
    """
    x, rounded, layer = out.source, out.rounded, out.spec.layer
    values = Segments(x, x, (out.spec.input_columns,), (0,))
    launch = norm_output(kernels, values, norm, x, tokens=builder.tokens, epsilon=epsilon, rounded=rounded)
    builder.kernel("inner norm", layer, launch, reads=(x,), writes=(x, *codes_of(rounded)))
