"""Appends the gate of a block's output."""

from __future__ import annotations

from typing import Any

from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import PlacedOp, codes_of, segments_of
from heterollm.kernels.gpu import DeviceMemory, GlueKernels, Segments
from heterollm.kernels.operators import gate_output


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
