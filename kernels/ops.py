"""The nouns that model, profiler, solver and engine share.

A *group* is a set of linear layers that read the same input and run as one operator: ``qkv``, ``o``,
``gate_up``, ``down``, ``head``. Shapes are ``m`` tokens × ``k`` inputs × ``n`` outputs; a weight is
``[n, k]``, output rows first. The ``ffn`` group is gate, up, their activation and down as one operator, which
is split along the intermediate width. A *fused* group is one NPU graph over what lies between attentions, all
or a share of the network's width: ``norm_qkv`` is the norm of the residual stream with ``qkv``, and ``o_ffn``
is ``o``, its sum with the stream, the norm and the network. The ``experts`` group is such a network for each
expert of a layer, of which each token chooses some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace as replace_struct

from heterollm.base import OptionError

Precision = Literal["w4a16", "w4a8", "w8a8", "fp16"]
Scales = Literal["free", "stepped"]
"""Scales of 4-bit blocks: each of least squared error alone, or 1 to 16 times one number of its row, which
integer NPU graphs need."""

ScaleKind = Literal["free", "stepped", "tensor"]
"""Scales of quantised weights: those of :data:`Scales`, or one positive scale for a tensor (``w8a8``)."""

Phase = Literal["prefill", "decode"]
Group: TypeAlias = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*$", max_length=24)]
"""Name of a group of linears, of which a layer has at most one: ``heterollm.model.blocks`` has the names of
layers. ``head``, ``ffn`` and ``experts`` have a meaning of their own."""

Join = Literal["concatenate", "sum"]
Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
"""Weights of the chosen experts: their shares in the softmax of all logits, the sigmoids of their logits, or
for ``sparsemixer`` the share of each in the softmax of the logits near it that were not chosen before."""

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu", "relu_squared", "xielu"]
"""Activation of a network; GELU by its tanh formula, or by the error function."""


class GateClip(NamedTuple):
    """Bounds of gate and up, with which a network's product is ``(up + 1) * gate * sigmoid(slope * gate)``.

    Args:
        limit: Upper bound of gate, and magnitude that bounds up.
        slope: Factor of the gate in the sigmoid.
    """

    limit: float
    slope: float


class Slopes(NamedTuple):
    """Numbers of xIELU (https://arxiv.org/abs/2411.13010), which each layer has; by default the initial ones.

    It is ``linear * x`` plus ``rising * x²`` where x is positive, else ``falling * (exp(x) - 1 - x)``.

    Args:
        rising: Factor of the square.
        falling: Factor of the exponential.
        linear: Factor of the input.
        largest: Upper bound of the exponent.
    """

    rising: float = 0.8
    falling: float = 0.8
    linear: float = 0.5
    largest: float = -1e-6


SLOPES: Final = Slopes()

Power = Literal["burst", "balanced", "default"]
"""Clocks and cores to ask a phone's system for: ``burst`` asks for the highest clocks and the biggest cores,
``balanced`` for medium clocks and middle cores; ``default`` asks for nothing."""

POWERS: tuple[Power, ...] = get_args(Power)


STREAM_NORM: Final = "rms_norm"
NORMS: Final = frozenset({STREAM_NORM, "final_norm"})
"""The norms among the operators before groups."""


class WeightFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """Storage format of a linear weight.

    Args:
        bits: 4 or 8 for block-quantised weights, 16 or 32 for floats.
        block: Inputs that share one scale (a power of two of at least 16); 0 for floats.
        symmetric: Whether zero is the middle code instead of a stored zero point; true for floats.
        scales: Kind of the scales; integer NPU graphs need other ones than ``free``.
        minimum: Whether each block has a float that its products of code and scale are added to, in place of
            a zero point; ``symmetric`` is false then.
    """

    bits: Literal[4, 8, 16, 32]
    block: int = 0
    symmetric: bool = True
    scales: ScaleKind = "free"
    minimum: bool = False

    @property
    def layout(self) -> WeightFormat:
        """The format without its kind of scales, which decides nothing but the legal NPU graphs."""
        return replace_struct(self, scales="free")

    @property
    def quantized(self) -> bool:
        """Whether the weight is block-quantised."""
        return self.bits <= 8

    @property
    def in_blocks(self) -> bool:
        """Whether blocks of the weight have scales of their own."""
        return self.quantized and self.scales != "tensor"

    def weight_bytes(self, rows: int, columns: int) -> int:
        """Return the size in bytes of a ``[rows, columns]`` weight with FP16 scales and minimums."""
        size = rows * columns * self.bits // 8
        if self.quantized:
            zero_bits = 16 if self.minimum else 0 if self.symmetric else self.bits
            size += rows * (columns // self.block) * (16 + zero_bits) // 8
        return size

    def __str__(self) -> str:
        if not self.quantized:
            return f"f{self.bits}"
        kind = " with minimums" if self.minimum else "" if self.symmetric else " asymmetric"
        scales = {"free": "", "stepped": " stepped", "tensor": ", one scale"}[self.scales]
        return f"int{self.bits} block {self.block}{kind}{scales}"


@dataclass(frozen=True, slots=True)
class Member:
    """One linear layer of a group: its name (``q``, ``gate``, …) and its output rows."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """The way in which the memory of an NPU's graphs counts.

    Args:
        copies_by_length: Whether each length of a slice holds weights of its own.
        activation_bytes: Size of an element of the graphs' own inputs and outputs; 0 if they have none.
        reuses_io: Whether the longest graph's input and output serve all lengths of a slice.
        unrolls_blocks: Whether graphs hold weights as Intel's compiler does: :meth:`weight_bytes`.
    """

    copies_by_length: bool = False
    activation_bytes: int = 0
    reuses_io: bool = False
    unrolls_blocks: bool = False

    @property
    def counts_graphs(self) -> bool:
        """Whether further lengths of a slice take memory."""
        return self.copies_by_length or self.activation_bytes > 0

    def weight_bytes(self, weight: WeightFormat, rows: int, columns: int, tokens: int) -> int:
        """Return the bytes of a weight in a graph.

        Intel's compiler computes each block of 4-bit weights apart, with a table of 16 bytes for each row,
        but only for one token or more than 2048 inputs; all other weights become float16
        (``bench/results/intel_npu_static.jsonl``).
        """
        if not self.unrolls_blocks:
            return weight.weight_bytes(rows, columns)
        if weight.bits == 4 and (tokens == 1 or columns > FOLDED_COLUMNS):
            return rows * columns // 2 + rows * (columns // weight.block) * UNROLLED_BLOCK_BYTES
        return 2 * rows * columns


FOLDED_COLUMNS: Final = 2048
"""Most inputs with which Intel's compiler turns 4-bit blocks into float16, with more than one token."""

UNROLLED_BLOCK_BYTES: Final = 16
"""Size of its table's entry for each row of a block."""

MOST_STREAMS: Final = 8
"""Most residual streams of a model; more would not fit the local memory of small GPUs."""

COUNTED_ONCE: Final = GraphMemory()
"""Weights count once for all lengths, inputs and outputs not at all."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of some experts of a layer by each token: the largest logits, of equal ones the first.

    Args:
        experts: Experts of a layer.
        chosen: Experts that each token chooses.
        scoring: Rule of their weights.
        normalized: Whether the weights of the chosen experts are divided by their sum.
        scale: Factor on all weights.
        jitter: With ``sparsemixer``, half the relative distance from the largest logit within which logits
            are near it.
        biased: Whether the choice is by score plus a bias of the expert, which its weight ignores.
        groups: Equal groups of neighbouring experts.
        kept_groups: Groups whose experts a token may choose: those with the largest sum of two biased scores,
            or without bias with the largest score.

    Raises:
        OptionError: A token cannot choose so many experts, or a number does not suit the scoring.
    """

    experts: int
    chosen: int
    scoring: Scoring = "softmax"
    normalized: bool = True
    scale: float = 1.0
    jitter: float = 0.0
    biased: bool = False
    groups: int = 1
    kept_groups: int = 1

    def __post_init__(self) -> None:
        mixes, of_group = self.scoring == "sparsemixer", self.experts // max(1, self.groups)
        possible = 1 <= self.kept_groups <= self.groups and of_group * self.groups == self.experts
        possible &= 1 <= self.chosen <= of_group * self.kept_groups
        if not possible or (mixes and (self.normalized or self.biased or self.groups > 1)):
            raise OptionError(f"No token can choose experts by {self}.")

    def touched(self, tokens: int) -> float:
        """Return the experts that ``tokens`` tokens are expected to choose if all experts are as likely."""
        return float(self.experts * (1 - (1 - self.chosen / self.experts) ** tokens))


STREAM_INPUT: Final = "stream_input"
"""Slot of a copy of the residual stream, which fused groups read."""

PARTS: Final[Mapping[Group, tuple[Group, ...]]] = MappingProxyType(
    {"norm_qkv": ("qkv",), "o_ffn": ("o", "gate_up", "down"), "ffn": ("gate_up", "down")}
)
"""Groups that stand for others, those that stand for more first."""

FUSED: Final = frozenset({"norm_qkv", "o_ffn"})
"""Groups whose graphs read the residual stream."""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One group of linear layers of a model.

    Args:
        group: Name of the group.
        layer: Decoder layer, counted from 0; -1 for the head.
        members: The linears in the order of their stacked rows.
        columns: Inputs ``k`` that all members read.
        weight: Number format of all members.
        join: How the outputs of both processors' shards combine.
        source: Name of the value read.
        target: Name of the value written.
        integer_inputs: Whether inputs are rounded to int8 for each block of the weights (``w4a8``).
        then: The down projection of an ``ffn`` or ``experts`` group, else None; a split of an ffn divides the
            intermediate width, and the shards' outputs are summed.
        experts: Routing of an ``experts`` group, whose members and ``then`` are of one expert; else None.
        kind: Name of the layer's kind; empty in the head, and where all layers are alike.
        parts: The groups that the group stands for; else none.
        before: The operators between the group before and this one, in order and by their names in profiles;
            the last of them writes the input.
        reader: The operator that reads the output, by its name in profiles.
        fusible: Whether nothing but a norm of the residual stream that NPU graphs can have, and in front of a
            network the sum with the output of ``o``, lies between this group and the one before.
        first: ``o`` of an ``o_ffn`` group, which the NPU computes whole; else None.
    """

    group: Group
    layer: int
    members: tuple[Member, ...]
    columns: int
    weight: WeightFormat
    source: str
    target: str
    join: Join = "concatenate"
    integer_inputs: bool = False
    then: OpSpec | None = None
    experts: Routing | None = None
    kind: str = ""
    parts: tuple[Group, ...] = ()
    before: tuple[str, ...] = ()
    reader: str = ""
    fusible: bool = False
    first: OpSpec | None = None

    @property
    def fused(self) -> bool:
        """Whether NPU graphs of the group read the residual stream."""
        return self.group in FUSED

    @property
    def timed_group(self) -> Group:
        """The group by which profiles know times of its graphs: that without the norm, and without ``o``."""
        return {"norm_qkv": "qkv", "o_ffn": "ffn"}.get(self.group, self.group)

    @property
    def input_columns(self) -> int:
        """Width of the input :attr:`source`; an ``o_ffn`` group reads the residual stream, too."""
        return self.columns if self.first is None else self.first.columns

    @property
    def graph_columns(self) -> int:
        """Values of all inputs of a token that the NPU's graphs read."""
        return self.columns if self.first is None else self.first.columns + self.columns

    @property
    def follows_norm(self) -> bool:
        """Whether a norm writes the input."""
        return bool(self.before) and self.before[-1] in NORMS

    @property
    def place(self) -> str:
        """The group among those of all kinds of layers: ``gate_up``, or ``attention+ffn.gate_up``."""
        return f"{self.kind}.{self.group}" if self.kind else self.group

    @property
    def anywhere(self) -> OpSpec:
        """The group without its layer: equal for groups of equal sizes and formats."""
        then, first = (None if own is None else own.anywhere for own in (self.then, self.first))
        return replace(self, layer=0, kind="", then=then, first=first)

    @property
    def rows(self) -> int:
        """Output rows ``n`` of all members together."""
        return sum(member.rows for member in self.members)

    @property
    def member_rows(self) -> tuple[int, ...]:
        """Output rows of each member."""
        return tuple([member.rows for member in self.members])

    def flops(self, tokens: int) -> int:
        """Return the multiply-adds of one pass over ``tokens`` tokens, counted as two each."""
        if self.experts is not None:
            tokens *= self.experts.chosen
        others = (own.flops(tokens) for own in (self.first, self.then) if own is not None)
        return 2 * tokens * self.rows * self.columns + sum(others)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        return self.slice_bytes(self.member_rows) * (1 if self.experts is None else self.experts.experts)

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a pass is expected to read: with experts those that it chooses."""
        if self.experts is None:
            return self.weight_bytes()
        return self.slice_bytes(self.member_rows) * self.experts.touched(tokens)

    def slice_bytes(self, member_rows: tuple[int, ...]) -> int:
        """Return the bytes of weights of some rows of each member and of the matching columns of ``then``.

        All those of ``first`` come with them. Those of an ``experts`` group are rows of one expert.
        """
        own = self.weight.weight_bytes(sum(member_rows), self.columns)
        own += 0 if self.first is None else self.first.weight_bytes()
        if self.then is None:
            return own
        return own + self.then.weight.weight_bytes(self.then.rows, member_rows[0])

    def graph_bytes(self, member_rows: tuple[int, ...], lengths: Collection[int], memory: GraphMemory) -> int:
        """Return the bytes that the NPU graphs of some rows of each member take.

        Args:
            member_rows: Rows of each member.
            lengths: Tokens of each graph.
            memory: How they count.
        """
        outputs = sum(member_rows) if self.then is None else self.then.rows
        tokens = max(lengths, default=0) if memory.reuses_io else sum(lengths)
        io_bytes = tokens * (self.graph_columns + outputs) * memory.activation_bytes
        copies = lengths if memory.copies_by_length else [1]
        return sum(self.held_bytes(member_rows, length, memory) for length in copies) + io_bytes

    def held_bytes(self, member_rows: tuple[int, ...], tokens: int, memory: GraphMemory) -> int:
        """Return the bytes of weights in one NPU graph of some rows of each member."""
        own = memory.weight_bytes(self.weight, sum(member_rows), self.columns, tokens)
        if self.first is not None:
            own += self.first.held_bytes(self.first.member_rows, tokens, memory)
        if self.then is None:
            return own
        return own + memory.weight_bytes(self.then.weight, self.then.rows, member_rows[0], tokens)


def ffn_spec(gate_up: OpSpec, down: OpSpec) -> OpSpec | None:
    """Return a layer's feed-forward network as one group.

    A shard has rows of gate and up, or of up alone, their activation, and the matching columns of ``down``: a
    partial sum.

    Returns:
        The group; None if the two have different number formats, since one graph takes one format, or if an
        operator on whole rows lies between them, such as a norm.
    """
    if gate_up.weight != down.weight or gate_up.integer_inputs != down.integer_inputs or len(down.before) > 1:
        return None
    return replace(
        gate_up,
        group="ffn",
        target=down.target,
        join="sum",
        then=down,
        parts=PARTS["ffn"],
        reader=down.reader,
    )


def ffn_specs(specs: Iterable[OpSpec]) -> tuple[OpSpec, ...]:
    """Return the ffn group of each layer that has one, from all groups of a model."""
    return tuple(spec for spec in joined_specs(specs) if spec.group == "ffn")


def joined_specs(specs: Iterable[OpSpec]) -> tuple[OpSpec, ...]:
    """Return the groups of each layer that stand for others, in the order of :data:`PARTS`.

    Args:
        specs: All groups of a model.
    """
    layers: dict[int, dict[Group, OpSpec]] = {}
    for spec in specs:
        layers.setdefault(spec.layer, {})[spec.group] = spec
    return tuple(spec for groups in layers.values() for spec in _joined(groups))


def _joined(groups: Mapping[Group, OpSpec]) -> Iterator[OpSpec]:
    qkv, o, gate_up, down = (groups.get(group) for group in ("qkv", "o", "gate_up", "down"))
    if qkv is not None and _can_fuse(qkv):
        yield replace(qkv, group="norm_qkv", source=STREAM_INPUT, parts=PARTS["norm_qkv"])
    ffn = None if gate_up is None or down is None else ffn_spec(gate_up, down)
    if ffn is None:
        return
    if o is not None and o.weight == ffn.weight and _can_fuse(ffn):
        # A norm's kernel copies the stream.
        before = (STREAM_NORM, *o.before)
        yield replace(ffn, group="o_ffn", first=o, source=o.source, parts=PARTS["o_ffn"], before=before)
    yield ffn


def _can_fuse(spec: OpSpec) -> bool:
    return spec.fusible and spec.weight.in_blocks and not spec.integer_inputs
