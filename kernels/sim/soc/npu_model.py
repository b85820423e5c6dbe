"""Time of an NPU graph: tiles of systolic arrays, weights that must be unpacked first, rows that spill.

One operand is *stationary*: tile after tile of it is loaded into the arrays. The other is *streamed*: for
every stationary tile all its rows pass through. So a product of ``n`` output rows, ``k`` inputs and ``m``
tokens, each counted in tiles, takes with the weight streamed and the activation stationary

``k·m·(32·n + L)`` rows, and in the other order ``n·k·(32·m + L)``,

where ``L`` is what loading a tile costs in rows. Stages are the rounding up to tiles; the order effect is
``L``. Unpacking runs beside the arrays. A streamed row of more columns than stay on the chip spills: it is
written once and read again for each stationary column of tiles. (HeteroLLM, section 3.2;
``docs/soc-model.md``.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from heterollm.base import OptionError
from heterollm.kernels.npu import INTEGER_FORMS, K_SPLIT_COLUMNS
from heterollm.kernels.sim.soc.quantities import SocParameters

NpuBound = Literal["fixed", "unpack", "memory", "array", "spill", "vector"]

SLICE_FORMS: Final = frozenset(
    {
        "matmul_nbits",
        "matmul_nbits_int8",
        "activation_first",
        "weight_first",
        "conv_1x1",
        "token_tiles",
        "k_chunked",
        "k_chunked_int8",
        "integer",
        "static_int8",
    }
)
BLOCK_FORMS: Final = frozenset(
    {"ffn", "ffn_int8", "ffn_k_chunked", "ffn_k_chunked_int8", "ffn_weight_first", "ffn_integer"}
)
FLOAT_BYTES: Final = 2
"""Of an activation, and of an unpacked weight at float activations."""

SUM_BYTES: Final = 8
"""Read and written for each output and further chunk of a chunked form: a sum in FP32."""


SCORE_BYTES: Final = 20
"""Read and written for each score of an attention graph: a mask is added, maximum and sum are taken, and the
difference, its bound and the exponential are written."""


@dataclass(frozen=True, slots=True)
class NpuWork:
    """One run of a graph.

    Args:
        rows: Output rows ``n``; of a block, of its last linear.
        columns: Inputs ``k``; of a block, of its first linears.
        tokens: Tokens ``m`` that the graph computes, padding included.
        bits: Of a weight: 4 or 8 for codes, 16 or 32 for floats.
        block: Inputs that share an FP16 scale; 0 for floats.
        form: As :data:`heterollm.kernels.npu.GraphForm`.
        integer_inputs: Whether inputs are int8.
        width: Rows of each of gate and up, for the forms of a block; else 0.
        experts: Blocks in the graph, each with so many tokens of its own.
        gated: Whether a block has a gate beside up.
        first: Inputs of the linear in front of a block, whose outputs are the block's inputs; 0 without.
        normed: Whether the graph norms the residual stream, and in front of a block adds to it.

    Raises:
        OptionError: A size, the number format or the form is not possible.
    """

    rows: int
    columns: int
    tokens: int
    bits: int = 4
    block: int = 32
    form: str = "matmul_nbits"
    integer_inputs: bool = False
    width: int = 0
    experts: int = 1
    gated: bool = True
    first: int = 0
    normed: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.tokens, self.experts) < 1:
            raise OptionError(
                f"NPU work must not be empty: {self.rows} x {self.columns}, {self.tokens} tokens."
            )
        if self.form not in SLICE_FORMS | BLOCK_FORMS:
            raise OptionError(f"The modelled NPU has no form {self.form!r:.80}.")
        if (self.form in BLOCK_FORMS) != (self.width > 0):
            raise OptionError(f"A width of {self.width} does not go with the form {self.form}.")
        if self.bits not in (4, 8, 16, 32) or (self.bits > 8) != (self.block == 0) or self.block < 0:
            raise OptionError(
                f"The modelled NPU has no weights of {self.bits} bits in blocks of {self.block}."
            )

    @property
    def weights(self) -> int:
        """Weights of all its products."""
        return self.experts * sum(rows * columns for rows, columns, _ in _products(self))

    @property
    def integer(self) -> bool:
        """Whether the arrays compute in integers of 8 bits."""
        return self.integer_inputs or self.form.endswith("_int8")  # static_int8 among them

    @property
    def wide_integer(self) -> bool:
        """Whether the arrays compute in integers, with activations of 16 bits."""
        return self.form in INTEGER_FORMS and not self.static_int8

    @property
    def static_int8(self) -> bool:
        """Whether the arrays compute in integers of 8 bits from end to end, without any unpacking."""
        return self.form == "static_int8"


@dataclass(frozen=True, slots=True)
class ScoresWork:
    """One run of a graph of attention scores.

    Args:
        heads: Heads.
        tokens: Queries of each head, padding included.
        keys: Keys of each head.
        head_dim: Elements of a query and of a key.
    """

    heads: int
    tokens: int
    keys: int
    head_dim: int

    @property
    def io_bytes(self) -> int:
        """Bytes of queries, keys and scores."""
        return self.heads * ((self.tokens + self.keys) * self.head_dim + self.tokens * self.keys)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One run of a graph of attention.

    Args:
        heads: Query heads.
        kv_heads: Key heads.
        tokens: Tokens, padding included.
        keys: Keys of each key head, padding included.
        head_dim: Elements of a head.
    """

    heads: int
    kv_heads: int
    tokens: int
    keys: int
    head_dim: int

    @property
    def io_bytes(self) -> int:
        """Bytes of queries, keys, values and output."""
        rows = 2 * self.heads * self.tokens + 2 * self.kv_heads * self.keys
        return FLOAT_BYTES * rows * self.head_dim

    @property
    def scores(self) -> int:
        """Scores of all heads; no mask spares a graph any."""
        return self.heads * self.tokens * self.keys


SharedWork: TypeAlias = ScoresWork | AttentionWork
"""A run of a graph without weights."""


@dataclass(frozen=True, slots=True)
class NpuTime:
    """The time of a run while nothing else runs. Its stages overlap, so that their sum exceeds the whole.

    Args:
        alone_us: The whole, as a caller sees it.
        fixed_us: Time before the work: the cost of running any graph, part of which can be hidden behind the
            GPU's work, and copies.
        copy_us: Share of the fixed cost in which the driver copies inputs and outputs; never hidden.
        array_us: Loading tiles and streaming rows.
        dequantise_us: Unpacking weights.
        memory_us: First reading of weights and activations from DRAM.
        spill_us: Writing and reading again of rows that do not stay on the chip.
        vector_us: Element-wise work and sums inside the graph.
        spill_bytes: Moved for spilled rows.
        dram_bytes: All that DRAM moves.
        bound: What takes longest.
    """

    alone_us: float
    fixed_us: float
    copy_us: float
    array_us: float
    dequantise_us: float
    memory_us: float
    spill_us: float
    vector_us: float
    spill_bytes: float
    dram_bytes: float
    bound: NpuBound

    @property
    def busy_us(self) -> float:
        """Time without the fixed cost."""
        return self.alone_us - self.fixed_us

    @property
    def demand_gbps(self) -> float:
        """DRAM bandwidth that it asks for after the fixed cost."""
        return self.dram_bytes / (self.busy_us * 1e3) if self.busy_us > 0 else 0.0

    @property
    def arithmetic_bound(self) -> bool:
        """Whether its arrays compute all the time, rather than wait for weights."""
        return self.bound in ("array", "vector")


@dataclass(frozen=True, slots=True)
class _Product:
    """One matrix product inside a graph, before the fixed cost."""

    whole_us: float
    array_us: float
    dequantise_us: float
    memory_us: float
    spill_us: float
    vector_us: float
    spill_bytes: float
    dram_bytes: float


def npu_time(soc: SocParameters, work: NpuWork) -> NpuTime:
    """Return what one run of a graph takes on a modelled NPU.

    Args:
        soc: The SoC.
        work: The run.
    """
    products = [_product(soc, work, rows, columns, chunk) for rows, columns, chunk in _products(work)]
    products *= work.experts
    # The activation of an ffn reads gate, if there is one, and up, and writes their product.
    gated_bytes = (2 + work.gated) * work.experts * work.width * work.tokens * FLOAT_BYTES
    # A norm reads and writes its values, a sum reads two and writes one.
    gated_bytes += (2 * work.normed + 3 * bool(work.first)) * work.columns * work.tokens * FLOAT_BYTES
    gated_us = gated_bytes / (soc.npu.vector_gbps * soc.npu.clock_factor * 1e3)
    edge_bytes = 1 if work.static_int8 else FLOAT_BYTES
    edges = work.first + work.columns + work.rows
    copy_us = _copied_us(soc, edges * work.experts * work.tokens * edge_bytes)
    fixed_us = soc.npu.execute_us + copy_us
    parts: dict[NpuBound, float] = {
        "fixed": fixed_us,
        "unpack": sum(product.dequantise_us for product in products),
        "memory": sum(product.memory_us for product in products),
        "array": sum(product.array_us for product in products),
        "spill": sum(product.spill_us for product in products),
        "vector": gated_us + sum(product.vector_us for product in products),
    }
    return NpuTime(
        alone_us=fixed_us + gated_us + sum(product.whole_us for product in products),
        fixed_us=fixed_us,
        copy_us=copy_us,
        array_us=parts["array"],
        dequantise_us=parts["unpack"],
        memory_us=parts["memory"],
        spill_us=parts["spill"],
        vector_us=parts["vector"],
        spill_bytes=sum(product.spill_bytes for product in products),
        dram_bytes=sum(product.dram_bytes for product in products),
        bound=max(parts, key=lambda name: parts[name]),
    )


def scores_time(soc: SocParameters, work: ScoresWork) -> NpuTime:
    """Return what one run of a graph of attention scores takes on a modelled NPU."""
    npu = soc.npu
    operations = 2 * work.heads * work.tokens * work.keys * work.head_dim
    array_us = npu.scores_start_us + operations / (npu.scores_tops * npu.clock_factor * 1e6)
    memory_us = work.io_bytes / (npu.dram_gbps * 1e3)
    copy_us = _copied_us(soc, work.io_bytes)
    fixed_us = npu.execute_us + copy_us
    return NpuTime(
        alone_us=fixed_us + max(array_us, memory_us),
        fixed_us=fixed_us,
        copy_us=copy_us,
        array_us=array_us,
        dequantise_us=0.0,
        memory_us=memory_us,
        spill_us=0.0,
        vector_us=0.0,
        spill_bytes=0.0,
        dram_bytes=work.io_bytes,
        bound="array" if array_us >= memory_us else "memory",
    )


def attention_time(soc: SocParameters, work: AttentionWork) -> NpuTime:
    """Return what one run of a graph of attention takes on a modelled NPU.

    Keys and values are stationary, and the queries of their heads pass through. No time of such a graph is
    published: the rates are those of other graphs.
    """
    npu = soc.npu
    row_us = 2 * npu.tile**2 / (npu.array_tflops * npu.clock_factor * 1e6)
    tiles = work.kv_heads * -(-work.keys // npu.tile) * -(-work.head_dim // npu.tile)
    streamed = work.heads // work.kv_heads * -(-work.tokens // npu.tile) * npu.tile
    array_us = 2 * tiles * (streamed + npu.tile_load_rows) * row_us
    vector_us = SCORE_BYTES * work.scores / (npu.vector_gbps * npu.clock_factor * 1e3)
    memory_us = work.io_bytes / (npu.dram_gbps * 1e3)
    copy_us = _copied_us(soc, work.io_bytes)
    fixed_us = npu.execute_us + copy_us
    parts: dict[NpuBound, float] = {"memory": memory_us, "array": array_us, "vector": vector_us}
    return NpuTime(
        alone_us=fixed_us + max(array_us, memory_us) + vector_us,
        fixed_us=fixed_us,
        copy_us=copy_us,
        array_us=array_us,
        dequantise_us=0.0,
        memory_us=memory_us,
        spill_us=0.0,
        vector_us=vector_us,
        spill_bytes=0.0,
        dram_bytes=work.io_bytes,
        bound=max(parts, key=lambda name: parts[name]),
    )


def shared_time(soc: SocParameters, work: SharedWork) -> NpuTime:
    """Return what one run of a graph without weights takes on a modelled NPU."""
    return scores_time(soc, work) if isinstance(work, ScoresWork) else attention_time(soc, work)


def _copied_us(soc: SocParameters, io_bytes: int) -> float:
    """Return the time in which the driver copies the inputs and outputs of a run."""
    return io_bytes / (soc.npu.io_copy_gbps * 1e3) if soc.npu.io_copy_gbps else 0.0


def _products(work: NpuWork) -> list[tuple[int, int, int]]:
    """Return output rows, inputs and longest piece of inputs of each product; 0 where it is not cut."""
    chunk = K_SPLIT_COLUMNS if "k_chunked" in work.form else 0
    if not work.width:
        return [(work.rows, work.columns, chunk)]
    first = [(work.columns, work.first, 0)] if work.first else []
    return [*first, ((1 + work.gated) * work.width, work.columns, 0), (work.rows, work.width, chunk)]


def _weight_streams(work: NpuWork) -> bool:
    """Whether the weight is the streamed operand rather than the stationary one."""
    plain_block = work.form in ("ffn", "ffn_int8") and work.bits > 8
    return not (work.form == "activation_first" or plain_block)


def _product(soc: SocParameters, work: NpuWork, rows: int, columns: int, chunk: int) -> _Product:
    npu, tokens = soc.npu, work.tokens
    weights = rows * columns
    chunks = -(-columns // chunk) if chunk else 1
    spills = (chunk or columns) > npu.row_limit_columns and columns > npu.row_limit_columns
    n, k, m = (-(-size // npu.tile) for size in (rows, columns, tokens))
    if work.static_int8:
        # Activations of 8 bits lie in tiles of twice as many tokens.
        m = 2 * -(-tokens // (2 * npu.tile))

    # Arrays: every row of a tile costs tile² multiply-adds.
    native = work.wide_integer
    rate = npu.array_tflops * (npu.integer_array_ratio if work.integer else 1.0)
    rate = (npu.int16_tflops if native else rate) * npu.clock_factor * 1e6
    row_us = 2 * npu.tile**2 / rate
    stationary, streamed = (k * m, n) if _weight_streams(work) else (n * k, m)
    load_us = stationary * npu.tile_load_rows * row_us
    stream_us = stationary * streamed * npu.tile * row_us

    # Weights: read packed, then unpacked.
    packed_bytes = weights * work.bits / 8 + (2 * weights / work.block if work.block else 0)
    if native:
        packed_bytes = weights * (npu.integer_weight_bytes if work.bits == 4 else 1)
    elif work.static_int8:
        packed_bytes = weights
    element_bytes = 1 if work.integer else FLOAT_BYTES
    output_bytes = 1 if work.static_int8 else FLOAT_BYTES
    # The published rate of integer graphs contains long rows.
    spills = spills and not native
    codes_us = 0.0
    if work.bits <= 8:
        # 8-bit codes with one scale need no unpacking; the rate at which they come is llm.npu's, measured so.
        speed = npu.dequantize_gweights_per_s if work.bits == 4 else npu.dequantize_int8_gweights_per_s
        speed = npu.expand_gweights_per_s if native and work.bits == 4 else speed
        codes_us = weights / (speed * npu.clock_factor * 1e3)
    token_bytes = columns * element_bytes + rows * output_bytes
    first_bytes = packed_bytes + token_bytes * tokens
    # Whole tiles move between chip and memory unit: fewer tokens than a tile cost what a tile costs.
    memory_us = (packed_bytes + token_bytes * m * npu.tile) / (npu.dram_gbps * 1e3)

    vector_bytes = (chunks - 1) * SUM_BYTES * rows * tokens
    vector_us = vector_bytes / (npu.vector_gbps * npu.clock_factor * 1e3)
    if not spills:
        spill_bytes = spill_us = 0.0
        whole_us = max(codes_us, memory_us, load_us + stream_us) + vector_us
    else:
        spill_bytes = weights * element_bytes * _crossings(work, m)
        spill_us = spill_bytes / (npu.spill_gbps * 1e3)
        # Tiles cannot be loaded while rows stream, nor can rows that are not unpacked yet.
        whole_us = max(codes_us, memory_us) + load_us + max(stream_us, spill_us) + vector_us
    # Where groups of a weight have scales of their own, a product of 8 bits is one of each group, and a sum.
    return _Product(
        whole_us * (npu.group_slowdown if work.static_int8 else 1.0),
        load_us + stream_us,
        codes_us,
        memory_us,
        spill_us,
        vector_us,
        spill_bytes,
        first_bytes + spill_bytes * npu.spill_dram_fraction + vector_bytes,
    )


def _crossings(work: NpuWork, token_tiles: int) -> int:
    """Return the DRAM traffic of a spilled product, in sizes of its unpacked weight.

    A streamed weight is written once unpacked, and read for every tile of tokens; one of floats lies in
    memory already and its first reading is no spill. Streamed activations are read for every tile of rows,
    which moves as much as reading the weight for every tile of tokens.
    """
    if not _weight_streams(work):
        return token_tiles
    return token_tiles - 1 if work.bits > 8 else token_tiles + 1
