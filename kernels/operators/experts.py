"""Launches that route tokens to the experts of a layer, and move rows around the experts' products.

In the order of a pass: :meth:`GpuExperts.route` chooses experts from the router's logits;
:meth:`GpuExperts.sort` gives the chosen pairs the order of the experts; :meth:`GpuExperts.gather` copies rows
into this order, in which :meth:`heterollm.kernels.gpu.GroupedLinear.launch` multiplies them; and
:meth:`GpuExperts.combine` adds up the rows of each token. Where another processor takes some rows
(:class:`TakenRows`), :meth:`GpuExperts.gather_taken` copies them for it. The device alone reads what was
chosen, so the launches serve every pass of their length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from heterollm.base import KernelError, round_up
from heterollm.kernels.formats import random_weight, reference
from heterollm.kernels.gpu import (
    BLOCK_BYTES,
    Argument,
    Defines,
    DeviceMemory,
    ExpertLists,
    ExpertShape,
    GlueKernels,
    GroupedLinear,
    Launch,
    RoundedInputs,
    Segments,
    TakenRows,
    pointwise_work,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.gated_activation import ExpertBiases, activate, exact_gated_activation
from heterollm.kernels.operators.operator import Exact, OperatorCheck, StepCategory, Values
from heterollm.kernels.ops import GateClip, Join, Routing, Scoring, WeightFormat

STEPS: Final[Mapping[str, StepCategory]] = dict.fromkeys(
    ("saliency", "routing", "order of experts", "gathering of rows", "sum of experts"), "other"
)

FILES: Final = ("experts.cl",)
SCORINGS: Final[tuple[Scoring, ...]] = ("softmax", "sigmoid", "sparsemixer")
"""Scorings in the order of their numbers in experts.cl."""

UNIT_BYTES, CODE_UNIT_BYTES = 16, 8
"""Bytes that a work-item copies at once."""

VECTOR_COLUMNS: Final = 2048


class GpuExperts(GlueKernels):
    """Makes the launches of routing and of the moves of rows; see :class:`GlueKernels`."""

    def route(
        self,
        logits: DeviceMemory,
        lists: ExpertLists,
        *,
        shape: ExpertShape,
        bias: Argument = None,
        shift: Argument = None,
        factors: Argument = None,
    ) -> Launch:
        """Return the launch that chooses experts and their weights.

        Args:
            logits: float32 ``[tokens, experts]``, of the router.
            lists: Target of the choices and weights.
            shape: OperatorSizes of the pass.
            bias: float32 ``[experts]``, added to the scores for the choice if the routing is biased.
            shift: float32 ``[experts]``, added to the logits; None for none.
            factors: float32 ``[experts]`` on the weights; None for none.
        """
        routing, label = shape.routing, "routing"
        logits.require(shape.tokens * routing.experts * 4, f"{label} logits")
        lists.require(shape)
        if routing.biased is (bias is None) or (routing.biased and shift is not None):
            raise KernelError(f"{label}: a biased routing, and no other, has a bias and no shift: {routing}.")
        bias = logits if bias is None else bias
        own = self._routing_defines(shape) | {"SCORING": SCORINGS.index(routing.scoring)}
        flags = {
            "NORMALIZED": routing.normalized,
            "BIASED": routing.biased,
            "SHIFTED": shift is not None,
            "FACTORS": factors is not None,
        }
        own |= {name: 1 for name, holds in flags.items() if holds}
        if routing.groups > 1:
            own |= {"GROUPS": routing.groups, "KEPT": routing.kept_groups}
        kernel, _, items = self.kernel(FILES, "route", lambda _: own)
        arguments = (
            *(logits, bias if shift is None else shift, lists.chosen, lists.weights),
            *map(np.float32, (routing.scale, 2 * routing.jitter)),
            *(() if factors is None else (factors,)),
        )
        elements = shape.tokens * routing.experts
        work = functools.partial(pointwise_work, elements, 4 + routing.chosen, 4, 0)
        return self.runtime.launch(kernel, arguments, (shape.tokens * items,), (items,), label, work=work)

    def sort(self, lists: ExpertLists, *, shape: ExpertShape, taken: TakenRows | None = None) -> Launch:
        """Return the launch that orders the pairs by expert, those of one expert by token.

        Where tokens have a saliency, and an expert more of them than rows, those of the least saliency have
        none; of equal ones the last.

        Args:
            lists: The choices, and the target of the order.
            shape: OperatorSizes of the pass.
            taken: The rows that another processor takes, and the target of their counts; None for no rows.
        """
        lists.require(shape)
        own = self._routing_defines(shape) | {"STEP": shape.step}
        if taken is not None:
            taken.require(shape)
            own |= {"TAKEN": 1} | _drops(taken)
        kernel, _, items = self.kernel(FILES, "sort_pairs", lambda _: own)
        arguments = (
            *(lists.chosen, lists.source, lists.position, lists.places),
            *map(np.int32, (shape.pairs, shape.places)),
            *(() if taken is None else (taken.table, taken.counts, np.int32(taken.place))),
            *(() if taken is None or taken.saliency is None else (taken.saliency,)),
        )
        work = functools.partial(pointwise_work, shape.pairs, 4, 8, 8)
        return self.runtime.launch(kernel, arguments, (items,), (items,), "order of experts", work=work)

    def place_in_slots(
        self, lists: ExpertLists, slots: DeviceMemory, number: int, *, shape: ExpertShape
    ) -> Launch:
        """Return the launch that gives the places the slots of their experts in a round.

        Args:
            lists: The places, of :meth:`sort` or of an earlier round.
            slots: int32 ``[rounds, experts]``: the slot that holds an expert's weights, or -1.
            number: The round.
            shape: OperatorSizes of the pass.
        """
        label, first = "slots of experts", number * shape.routing.experts
        lists.require(shape)
        slots.require(4 * (first + shape.routing.experts), label)
        kernel, _, items = self.kernel(FILES, "place_in_slots", lambda _: {"SLOTS": 1})
        work = functools.partial(pointwise_work, 4 * shape.places, 1, 4, 4)
        size = round_up(shape.places, items)
        arguments = (lists.places, slots, np.int32(shape.places), np.int32(first))
        return self.runtime.launch(kernel, arguments, (size,), (items,), label, work=work)

    def gather_taken(
        self,
        x: DeviceMemory,
        rows: DeviceMemory,
        lists: ExpertLists,
        taken: TakenRows,
        *,
        shape: ExpertShape,
        columns: int,
        weighs: bool = False,
    ) -> Launch:
        """Return the launch that copies the rows of the pairs that another processor takes.

        Args:
            x: ``[tokens, columns]`` in the activation type.
            rows: ``[taken.rows, columns]`` in the activation type; those without a pair stay as they are.
            lists: The order.
            taken: The rows.
            shape: OperatorSizes of the pass.
            columns: Inputs of a row, a multiple of 16.
            weighs: Whether rows are multiplied by the token's weight.
        """
        label, row_bytes = "gathering for the NPU", columns * self.item_bytes
        lists.require(shape)
        x.require(shape.tokens * row_bytes, f"{label} input")
        rows.require(taken.rows * row_bytes, f"{label} output")
        own = self._routing_defines(shape) | {"GATHERS_TAKEN": 1} | _weighs(shape, weighs)
        kernel, _, items = self.kernel(FILES, "gather_taken", lambda _: own)
        units = _units((row_bytes,), UNIT_BYTES, label)
        weights = (lists.weights,) if weighs else ()
        arguments = (x, rows, lists.position, *units, np.int32(taken.rows), *weights)
        work = functools.partial(pointwise_work, min(taken.rows, shape.pairs) * row_bytes, 0, 1, 1)
        return self.runtime.launch(kernel, arguments, (shape.pairs * items,), (items,), label, work=work)

    def gather(
        self,
        x: DeviceMemory,
        rows: DeviceMemory,
        lists: ExpertLists,
        *,
        shape: ExpertShape,
        columns: int,
        codes: tuple[RoundedInputs, RoundedInputs] | None = None,
        weighs: bool = False,
    ) -> Launch:
        """Return the launch that copies the row of each pair's token to the pair's position.

        Args:
            x: ``[tokens, columns]`` in the activation type.
            rows: ``[pairs, columns]`` in the activation type.
            lists: The order.
            shape: OperatorSizes of the pass.
            columns: Inputs of a row, a multiple of 16.
            codes: Rounded inputs of the tokens and of the positions, which are copied instead of ``x``; None
                to copy ``x``.
            weighs: Whether rows are multiplied by the token's weight.
        """
        label = "gathering of rows"
        lists.require(shape)
        memory: tuple[Argument, ...]
        row_bytes: tuple[int, ...]
        if codes is None:
            x.require(shape.tokens * columns * self.item_bytes, f"{label} input")
            rows.require(shape.pairs * columns * self.item_bytes, f"{label} output")
            memory, unit, row_bytes = (x, rows), UNIT_BYTES, (columns * self.item_bytes,)
        else:
            source, target = codes
            if (source.bits, source.block) != (target.bits, target.block):
                raise KernelError(f"{label}: {source} has codes of another order than {target}.")
            x_codes, x_blocks = source.arguments(shape.tokens, columns, f"{label} input")
            own_codes, own_blocks = target.arguments(shape.pairs, columns, f"{label} output")
            memory, unit = (x_codes, own_codes, x_blocks, own_blocks), CODE_UNIT_BYTES
            row_bytes = (columns, columns // source.block * BLOCK_BYTES)
        defines: Defines = _weighs(shape, weighs) | ({} if codes is None else {"CODES": 1})
        kernel, _, items = self.kernel(FILES, "gather_rows", lambda _: defines)
        units = _units(row_bytes, unit, label)
        weights = (lists.weights,) if weighs else ()
        arguments = (*memory[:2], lists.source, units[0], *memory[2:], *units[1:], *weights)
        work = functools.partial(pointwise_work, shape.pairs * sum(row_bytes), 0, 1, 1)
        return self.runtime.launch(kernel, arguments, (shape.pairs * items,), (items,), label, work=work)

    def combine(
        self,
        y: DeviceMemory,
        lists: ExpertLists,
        out: DeviceMemory,
        *,
        shape: ExpertShape,
        columns: int,
        other: DeviceMemory | None = None,
        taken: TakenRows | None = None,
        adds: bool = False,
        bias: Argument = None,
        weighed: bool = False,
    ) -> Launch:
        """Return the launch that adds up the weighted rows of each token, in the order of its choices.

        Args:
            y: ``[pairs, columns]`` in the activation type, by position.
            lists: The order and the weights.
            out: ``[tokens, columns]`` in the activation type.
            shape: OperatorSizes of the pass.
            columns: Width of a row.
            other: Rows in the activation type of the processor that takes some; None for no such processor.
            taken: The rows that it takes.
            adds: Whether the sum is added to what ``out`` holds.
            bias: float32 ``[experts, columns]``, added to the rows of each expert; None for none.
            weighed: Whether weights were on the inputs, so that none is on these rows.
        """
        label, routing = "sum of experts", shape.routing
        lists.require(shape)
        y.require(shape.pairs * columns * self.item_bytes, f"{label} input")
        out.require(shape.tokens * columns * self.item_bytes, f"{label} output")
        own = self._routing_defines(shape) | {"COMBINES": 1} | ({"ADDS": 1} if adds else {}) | _drops(taken)
        own |= {} if bias is None else {"OUTPUT_BIASED": 1}
        own |= _weighs(shape, weighed)
        kernel, style, items = self.kernel(FILES, "combine_rows", lambda _: own, widths=(columns,))
        span = VECTOR_COLUMNS if style == "vector" else 8
        arguments = (
            *(y, y if other is None else other, lists.position, lists.weights, out),
            *map(np.int32, (columns, span)),
            *(() if bias is None else (lists.chosen, bias)),
        )
        elements, read = shape.tokens * columns, (routing.chosen + adds) * self.item_bytes
        work = functools.partial(pointwise_work, elements, 2 * routing.chosen, read, self.item_bytes)
        size = round_up(-(-columns // span), items), shape.tokens
        return self.runtime.launch(kernel, arguments, size, (items, 1), label, work=work)

    @staticmethod
    def _routing_defines(shape: ExpertShape) -> Defines:
        return {"EXPERTS": shape.routing.experts, "CHOSEN": shape.routing.chosen}


def weigh_tokens(
    on: GlueKernels, output: Segments, saliency: DeviceMemory, *, tokens: int, bias: Argument = None
) -> Launch:
    """Return the launch of the saliency of tokens: the squared norm of each row.

    Args:
        on: The device's kernels.
        output: Output of the attention's last linear, one member.
        saliency: float32 ``[tokens]``.
        tokens: Rows.
        bias: float32 of that linear, which the norm includes, or None.
    """
    (columns,), (split,) = output.rows, output.splits
    saliency.require(4 * tokens, "saliency of tokens")
    options: dict[str, Any] = {"widths": (columns, split), "segments": output}
    kernel, _, items = on.kernel(FILES, "weigh_tokens", lambda _: {"SALIENCY": 1}, **options)
    # Absent memory is never read, but OpenCL needs a valid argument.
    memory = (output.a, output.b, saliency if bias is None else bias, saliency)
    arguments = (*memory, *map(np.int32, (split, columns, bias is not None)))
    work = functools.partial(pointwise_work, tokens * columns, 2, on.item_bytes * output.reads, 0)
    return on.runtime.launch(kernel, arguments, (tokens * items,), (items,), "saliency", work=work)


def _weighs(shape: ExpertShape, weighs: bool) -> Defines:
    if weighs and shape.routing.chosen != 1:
        raise KernelError(
            f"A weight multiplies the input of one expert of a token, not of {shape.routing.chosen}."
        )
    return {"WEIGHS_INPUTS": 1} if weighs else {}


def _drops(taken: TakenRows | None) -> Defines:
    return {"DROPS": 1} if taken is not None and taken.saliency is not None else {}


def _units(row_bytes: Sequence[int], unit_bytes: int, label: str) -> list[np.int32]:
    """Return the units of each of a row's parts, by which a kernel copies it."""
    if any(size % unit_bytes for size in row_bytes):
        raise KernelError(f"{label}: rows of {row_bytes} bytes are not copied in units of {unit_bytes}.")
    return [np.int32(size // unit_bytes) for size in row_bytes]


@dataclass(frozen=True, slots=True)
class MixtureCase:
    """All kernels of a mixture together, from the router's logits to the sum of experts.

    With ``clip`` gate and up are clipped, and router and experts have biases.
    """

    routing: Routing
    tokens: int
    hidden: int = 128
    width: int = 64
    weight: WeightFormat = WeightFormat(4, 32)  # noqa: RUF009 - frozen
    seed: int = 0
    clip: GateClip | None = None

    def _weights(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return gates, ups and downs of all experts."""
        generator = np.random.default_rng(self.seed)
        shapes = ((self.width, self.hidden), (self.width, self.hidden), (self.hidden, self.width))
        gates, ups, downs = (
            [random_weight(generator, *shape, self.weight) for _ in range(self.routing.experts)]
            for shape in shapes
        )
        return gates, ups, downs

    def launches(self, on: GlueKernels, data: Data) -> Iterator[Launch]:
        tokens, hidden, width, experts = self.tokens, self.hidden, self.width, self.routing.experts
        gates, ups, downs = self._weights()
        options: dict[str, Any] = {"activation_dtype": data.dtype, "experts": experts}
        pairs = [member for pair in zip(gates, ups, strict=True) for member in pair]
        gate_up, down = (GroupedLinear.pack(on.runtime, members, **options) for members in (pairs, downs))
        shape = ExpertShape(self.routing, tokens)
        lists, kernels = (
            ExpertLists.allocate(on.runtime, shape),
            GpuExperts(on.runtime, data.dtype, on.kv_dtype),
        )
        x, logits = data.inputs("x", tokens, hidden), data.floats("logits", tokens, experts)
        sizes = {"rows": hidden, "inner": 2 * width, "activated": width}
        rows, inner, activated = (data.output(name, shape.pairs, size) for name, size in sizes.items())
        members = Segments(inner, inner, (width, width), (0, 0))
        shift, bias, down_bias = self._biases(data)
        inner_bias = None if bias is None else ExpertBiases(bias, lists.position, lists.chosen)
        clipped = functools.partial(activate, bias=inner_bias, clip=self.clip)
        yield kernels.route(logits, lists, shape=shape, shift=shift)
        yield kernels.sort(lists, shape=shape)
        yield kernels.gather(x, rows, lists, shape=shape, columns=hidden)
        yield gate_up.launch(rows, inner, lists, shape=shape, label="experts")
        yield clipped(on, members, activated, tokens=shape.pairs, intermediate=width)
        yield down.launch(activated, rows, lists, shape=shape, label="experts")
        out = data.output("sum", tokens, hidden)
        yield kernels.combine(rows, lists, out, shape=shape, columns=hidden, bias=down_bias)

    def _biases(self, data: Data) -> tuple[Argument, ...]:
        """Return the biases of the router, of gate and up, and of down."""
        if self.clip is None:
            return None, None, None
        experts = self.routing.experts
        sizes = {"shift": 1, "bias": 2 * self.width, "down_bias": self.hidden}
        return tuple(data.floats(name, experts, size) for name, size in sizes.items())

    def exact(self, data: Values) -> Exact:
        x, (gates, ups, downs) = data["x"], self._weights()
        exact = np.zeros(x.shape)
        none = np.zeros((self.routing.experts, 1))
        biases = [data.get(name, none) for name in ("shift", "bias", "down_bias")]
        for token, own in enumerate(data["logits"].astype(np.float64) + biases[0][:, 0]):
            chosen = np.argsort(-own, kind="stable")[: self.routing.chosen]
            shares = np.exp(own[chosen] - own.max())
            for expert, share in zip(chosen, shares / shares.sum(), strict=True):
                row = x[token : token + 1]
                pair = np.concatenate([reference.linear(row, [own[expert]]) for own in (gates, ups)], axis=1)
                gate, up = np.split(pair + biases[1][expert], 2, axis=1)
                gated = exact_gated_activation(gate, up, clip=self.clip)
                exact[token] += share * (reference.linear(gated, [downs[expert]])[0] + biases[2][expert])
        return {"sum": exact}


@dataclass(frozen=True, slots=True)
class SaliencyCase:
    """Saliency of tokens, of an output in two segments at ``split``, with or without a bias."""

    tokens: int
    hidden: int
    split: int
    join: Join = "concatenate"
    biased: bool = False

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        output = data.linear(self.tokens, (self.hidden,), (self.split,), self.join)
        bias = data.floats("bias", self.hidden) if self.biased else None
        saliency = data.output("saliency", self.tokens, dtype=np.float32)
        return (weigh_tokens(on, output, saliency, tokens=self.tokens, bias=bias),)

    def exact(self, data: Values) -> Exact:
        return {"saliency": np.square(data["linear"] + data.get("bias", 0.0)).sum(axis=1)}


_CLIPPED: Final = MixtureCase(Routing(8, 2), 33, clip=GateClip(0.7, 1.702))
CHECKS: Final = tuple(
    OperatorCheck("mixture of experts", title, case, output)
    for title, case, output in (
        ("1 token, 2 of 8 experts", MixtureCase(Routing(8, 2), 1), "sum"),
        ("33 tokens, 2 of 8 experts", MixtureCase(Routing(8, 2), 33), "sum"),
        ("33 tokens, clipped, biases, 2 of 8 experts", _CLIPPED, "sum"),
        ("saliency of 5 tokens", SaliencyCase(5, 160, 64), "saliency"),
    )
)
