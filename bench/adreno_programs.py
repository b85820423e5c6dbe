"""The OpenCL programs that a phone-class GPU would build, recorded with the project's own launch code.

Nothing runs: a GPU runtime that only notes files, names and defines stands in for the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import LARGEST_CODE, CodeGrid, QuantizedTensor, buckets, score_scales
from heterollm.kernels.gpu import (
    KV_CODES,
    STEP_WORDS,
    AddedToStream,
    DeltaShape,
    Ending,
    ExpertLists,
    ExpertShape,
    Gated,
    GlueKernels,
    GpuLinear,
    GpuRuntime,
    GroupedLinear,
    HeadShape,
    HeadTable,
    KernelParameters,
    KernelStyle,
    KvLayer,
    NormedInput,
    NpuCodes,
    RecurrentLayer,
    Rotated,
    Rotation,
    RoundedInputs,
    ScoreMemory,
    Scores,
    Segments,
    Selection,
    ShapeClass,
    SharedArray,
    SparseShape,
    TakenRows,
    Variant,
    default_parameters,
    with_numbers,
)
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.operators.attention import attend
from heterollm.kernels.operators.delta_net import apply_delta_rule, convolve_inputs
from heterollm.kernels.operators.experts import GpuExperts, weigh_tokens
from heterollm.kernels.operators.gate_cutoff import find_cutoffs
from heterollm.kernels.operators.gated_activation import TokenFactors, activate
from heterollm.kernels.operators.latent import multiply_heads, turn
from heterollm.kernels.operators.logits import join_logits, soft_cap
from heterollm.kernels.operators.norm import rms_norm
from heterollm.kernels.operators.npu_codes import read_codes, write_codes
from heterollm.kernels.operators.outliers import HotWeights, OutlierList, find_outliers, multiply_outliers
from heterollm.kernels.operators.output_gate import gate_output
from heterollm.kernels.operators.rope import rope_and_store
from heterollm.kernels.operators.score_codes import estimate_scores, write_score_codes
from heterollm.kernels.operators.selection import select_positions
from heterollm.kernels.operators.short_conv import convolve
from heterollm.kernels.operators.sparse_attention import attend_selected
from heterollm.kernels.operators.streams import (
    Mixing,
    Normed,
    Streams,
    correct_streams,
    fit_stream,
    predict_streams,
    read_stream,
)
from heterollm.kernels.operators.token_gate import gate_tokens
from heterollm.kernels.ops import Routing, WeightFormat

sys.path.insert(0, str(Path(__file__).parent))
from live_text import live_hash

ROWS: Final = 256
COLUMNS: Final = 2048
BLOCK: Final = 32
HEADS: Final = ((8, 2, 128), (32, 4, 64), (4, 4, 128))
"""Query heads, key heads and elements of a head: groups of four, eight and one."""

SLOT_BYTES: Final = 1 << 24


@dataclass(frozen=True)
class Program:
    """One program to compile.

    Args:
        name: Name in the tables, such as ``linear w4 f16 T64``.
        kernel: Kernel function.
        files: Source files in order.
        defines: Preprocessor definitions, sorted.
    """

    name: str
    kernel: str
    files: tuple[str, ...]
    defines: tuple[tuple[str, str | int], ...]

    @property
    def source(self) -> str:
        """The OpenCL C of the program."""
        return read_sources(self.files)

    @property
    def options(self) -> str:
        """The compiler's options."""
        return " ".join(f"-D{key}={value}" for key, value in self.defines)

    @property
    def hash(self) -> str:
        """A short hash of what a compiler sees of the program."""
        return live_hash(self.kernel, self.source, {key: str(value) for key, value in self.defines})


class ProgramRecorder:
    """A GPU runtime that notes what it is asked to build, and otherwise is the simulated one.

    Args:
        runtime: The simulated GPU; it computes nothing.
    """

    def __init__(self, runtime: GpuRuntime) -> None:
        # Layers of real models have more rows, hence two work-groups for each of the phone's compute units.
        self.traits = replace(runtime.traits, compute_units=1)
        self.has_endings = True
        self.label = ""
        self.programs: dict[str, Program] = {}
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the simulated runtime has
        return getattr(self._runtime, name)

    def kernel(
        self, files: Sequence[str], name: str, defines: Mapping[str, str | int] | None = None
    ) -> object:
        """Note a program under the present label."""
        defined = tuple(sorted((defines or {}).items()))
        known = {(own.kernel, own.files, own.defines) for own in self.programs.values()}
        if (name, tuple(files), defined) not in known:
            label = self.label
            if name == "quantize_activations":
                label = f"quantize_activations w{dict(defined)['CODE_BITS']} f16"
            elif name == "attention_join":
                label = f"attention_join {self.label.partition(' ')[2]}"
            elif name == "list_outliers":
                label = "list_outliers"
            elif name == "find_largest_steps":
                label = self.label.replace("score_codes", "score_ranges").removesuffix(" 9 buckets")
            while label in self.programs:
                label += "+"
            self.programs[label] = Program(label, name, tuple(files), defined)
        return self._runtime.kernel(files, name, defines)


def _weight(bits: int) -> Any:  # noqa: ANN401 - either kind of weight
    if bits > 8:
        return np.zeros((ROWS, COLUMNS), np.float16)
    groups = COLUMNS // BLOCK
    codes = np.zeros((ROWS, groups, BLOCK * bits // 8), np.uint8)
    return QuantizedTensor(codes, np.zeros((ROWS, groups), np.float16), None, bits, BLOCK)


def _shape(bits: int, tokens: int) -> ShapeClass:
    weight = WeightFormat(bits, BLOCK)
    return ShapeClass.of(weight, integer_inputs=False, half=True, tokens=tokens)


def _record_linears(runtime: ProgramRecorder, slot: SharedArray) -> None:
    def record(
        bits: int,
        tokens: int,
        *,
        rounds: bool = False,
        style: KernelStyle = "simt",
        parameters: KernelParameters | None = None,
        note: str = "",
    ) -> None:
        layer = GpuLinear.pack(runtime, [_weight(bits)], activation_dtype=np.float16, integer_inputs=rounds)
        variant = Variant(parameters.style if parameters else style, parameters=parameters)
        half = " half" if variant.style == "half" else ""
        runtime.label = f"linear w{bits}{'a8' if rounds else ''} f16 T{tokens}{half}{note}"
        layer.launch(slot, slot, tokens=tokens, style=variant, label="linear")

    for bits in (4, 8, 16):
        for tokens in (1, 2, 4, 8, 64):
            record(bits, tokens)
    for bits in (4, 8):
        for tokens in (1, 8, 64):
            record(bits, tokens, rounds=True)
    for bits in (4, 8, 16):
        record(bits, 64, style="half")
    tiles: tuple[tuple[KernelStyle, bool, tuple[tuple[int, int, int], ...]], ...] = (
        ("simt", False, ((32, 4, 16), (32, 8, 16), (64, 8, 16))),
        ("half", False, ((32, 8, 16), (64, 8, 32), (64, 16, 16))),
        ("simt", True, ((32, 4, 16), (32, 4, 32), (32, 8, 16))),
    )
    for style, rounds, sizes in tiles:
        for step, sums, depth in sizes:
            chosen = KernelParameters(style, True, step, item_tokens=sums, depth_inputs=depth)
            record(4, 64, rounds=rounds, parameters=chosen, note=f" tile {step}x{sums}x{depth}")
    chosen = with_numbers(default_parameters("simt", _shape(4, 1)), {"subgroup": 1})
    record(4, 1, parameters=chosen, note=" subgroup")
    images: tuple[tuple[int, KernelStyle], ...] = ((1, "simt"), (64, "simt"), (64, "half"))
    for tokens, style in images:
        chosen = with_numbers(default_parameters(style, _shape(4, tokens)), {"image": 1})
        record(4, tokens, parameters=chosen, note=" image")
    runtime.traits = replace(runtime.traits, has_integer_dot=False)
    for tokens in (1, 8, 64):
        record(4, tokens, rounds=True, note=" without dp4acc")
    runtime.traits = replace(runtime.traits, has_integer_dot=True)


def _record_glue(
    runtime: ProgramRecorder, slot: SharedArray, heads: tuple[int, int, int], rounds: bool
) -> None:
    layers = GlueKernels(runtime, np.float16, np.float16, style="simt")
    step = runtime.shared((STEP_WORDS,), np.int32)
    shape = HeadShape(*heads, 512)
    hidden, kind = shape.query_columns, f"f16{' codes' if rounds else ''}"
    rounded = RoundedInputs(slot, slot, 4, BLOCK) if rounds else None
    one, two = Segments(slot, slot, (hidden,), (hidden,)), Segments(slot, slot, (hidden,) * 2, (hidden,) * 2)
    runtime.label = f"rms_norm {kind}"
    rms_norm(layers, slot, slot, slot, hidden=hidden, tokens=16, epsilon=1e-5, delta=one, rounded=rounded)
    runtime.label = f"gated_activation {kind}"
    activate(layers, two, slot, tokens=16, intermediate=hidden, rounded=rounded)
    runtime.label = "join_logits f16"
    join_logits(layers, Segments(slot, slot, (1024,), (512,)), slot, rows=1)
    runtime.label = f"short_conv {kind}"
    gates = Segments(slot, slot, (hidden,) * 3, (hidden,) * 3)
    sizes: dict[str, Any] = {"tokens": 16, "width": hidden, "rounded": rounded}
    convolve(layers, gates, slot, slot, RecurrentLayer(slot, 2 * hidden), step, **sizes)
    runtime.label = "token_gate f16"
    gate_tokens(layers, slot, slot, one, slot, tokens=16)
    net = DeltaShape(16, 32, 128, 128, taps=4)
    members = Segments(slot, slot, tuple(net.members.values()), tuple(net.members.values()))
    state = RecurrentLayer(slot, net.history + net.matrix)
    sizes = {"shape": net, "tokens": 16}
    runtime.label = "delta_conv f16"
    convolve_inputs(layers, members, slot, slot, slot, slot, state, step, **sizes)
    runtime.label = "delta_rule f16"
    apply_delta_rule(layers, slot, slot, slot, slot, state, step, **sizes)
    # Eight groups, as in Nemotron-H: one, as in Granite 4-H, keeps parts of vectors in memory.
    space = DeltaShape(8, 64, 128, 64, taps=4, recalls=False)
    members = Segments(slot, slot, tuple(space.members.values()), tuple(space.members.values()))
    state, sizes = RecurrentLayer(slot, space.history + space.matrix), {"shape": space, "tokens": 16}
    runtime.label = "state_conv f16"
    convolve_inputs(layers, members, slot, slot, slot, slot, state, step, **sizes)
    runtime.label = "selective_scan f16"
    apply_delta_rule(layers, slot, slot, slot, slot, state, step, **sizes)
    runtime.label = "norm_behind_gate f16"
    options = {"gate_first": True, "weights_by_head": True, "norm": slot}
    list(gate_output(layers, slot, members, 3, slot, heads=1, tokens=16, **options))
    latent = HeadShape(16, 1, 576, 4096, shares_values=True)
    parts = Segments(slot, slot, (2048, 1024, 512, 64), (2048, 1024, 512, 64))
    for name, member, norms in (("latent_turn f16", 1, None), ("latent_store f16", 2, slot)):
        runtime.label = name
        turned = Rotation(slot, slot, 64, norms)
        turn(layers, parts, member, slot, KvLayer(slot, 0), step, shape=latent, rotation=turned, tokens=16)
    for name, own, strides, floats in (
        ("absorbed_queries f16", (128, 512), (128, 576), True),
        ("expanded_values f16", (512, 128), (576, 128), False),
    ):
        runtime.label = name
        linear = Segments(slot, slot, (16 * strides[0],), (0,))
        options = {"heads": 16, "sizes": own, "strides": strides, "tokens": 16, "floats": floats}
        multiply_heads(layers, linear, 0, slot, slot, **options)
    net = DeltaShape(16, 32, 128, 128, taps=4)
    members = Segments(slot, slot, tuple(net.members.values()), tuple(net.members.values()))
    for name, norm in (("output_gate f16", None), ("gated_norm f16", slot)):
        runtime.label = name
        list(gate_output(layers, slot, members, 3, slot, heads=32, tokens=16, norm=norm))
    runtime.label = "soft_cap f16"
    soft_cap(layers, slot, 30.0, rows=1, vocabulary=1024)
    cache = KvLayer(slot, STEP_WORDS)
    runtime.label = f"rope_and_store f16 hd{shape.head_dim}"
    qkv = Segments(slot, slot, shape.rows, shape.rows)
    rope_and_store(
        layers, qkv, None, slot, cache, step, shape=shape, rotation=Rotation(slot, slot), tokens=16
    )
    for tokens, parts in ((1, 1), (1, 4), (64, 1)):
        # Parts of the context are an argument: what differs is only the kernel that joins them.
        runtime.label = f"attention {kind} hd{shape.head_dim} group{shape.group} T{tokens}"
        options = {"tokens": tokens, "parts": parts, "rounded": rounded}
        attend(layers, slot, cache, slot, step, shape=shape, scores=Scores(0.1), **options)
    if rounds:
        codes = NpuCodes(
            slot, slot, slot, slot, 0, CodeGrid(1 / LARGEST_CODE, 1 / LARGEST_CODE, per_token=True)
        )
        clamped = replace(codes, grid=CodeGrid(1 / 128, 1 / 128, per_token=False, bits=8), clamps=True)
        for name, own in (("", codes), (" uint8", clamped)):
            runtime.label = f"rms_norm f16{name or ' uint16'} codes"
            rms_norm(layers, slot, slot, slot, hidden=hidden, tokens=16, epsilon=1e-5, delta=one, rounded=own)
            runtime.label = f"write_npu_codes f16{name}"
            write_codes(layers, slot, own, tokens=16, columns=hidden)
            runtime.label = f"read_npu_codes f16{name}"
            read_codes(layers, own, slot, tokens=16, member_rows=(hidden,))
    else:
        for tokens in (1, 64):
            name = f"attention {kind} hd{shape.head_dim} group{shape.group} T{tokens}"
            runtime.label = f"{name} coalesced"
            if name in runtime.programs:
                options = {"tokens": tokens, "parts": 1, "style": "coalesced"}
                attend(layers, slot, cache, slot, step, shape=shape, scores=Scores(0.1), **options)
        # Twice the rows of a work-group, to show that it is no better.
        half = runtime.programs.get(f"attention {kind} hd{shape.head_dim} group{shape.group} T64")
        if half is not None:
            defines = (*((key, value) for key, value in half.defines if key != "ROWS"), ("ROWS", 16))
            name = f"{half.name} rows 16"
            runtime.programs[name] = replace(half, name=name, defines=tuple(sorted(defines)))


def _record_streams(runtime: ProgramRecorder, slot: SharedArray) -> None:
    """Record what Gemma 3n alone has: several residual streams, and sparse networks behind their gates."""
    layers = GlueKernels(runtime, np.float16, np.float16, style="simt")
    streams, mixing = Streams(slot, slot, 4, COLUMNS, 16, 1e-6), Mixing(slot, slot)
    added = Normed(Segments(slot, slot, (COLUMNS,), (COLUMNS,)), slot)
    runtime.label = "predict_streams f16"
    predict_streams(layers, streams, mixing, added)
    runtime.label = "correct_streams f16"
    correct_streams(layers, streams, mixing, added, slot, slot)
    runtime.label = "read_stream f16"
    read_stream(layers, streams, 1, added, slot)
    for opens in (True, False):
        runtime.label = f"fit_stream f16 {'opens' if opens else 'closes'}"
        fit_stream(layers, streams, 1, slot, opens=opens)
    gate_up = Segments(slot, slot, (COLUMNS,) * 2, (COLUMNS,) * 2)
    runtime.label = "gate_cutoff f16"
    find_cutoffs(layers, gate_up, slot, tokens=16, deviations=1.645)
    sizes: dict[str, Any] = {"tokens": 16, "intermediate": COLUMNS, "activation": "gelu_tanh"}
    runtime.label = "gated_activation f16 cutoffs"
    activate(layers, gate_up, slot, cutoffs=slot, **sizes)
    runtime.label = "gated_activation f16 factors"
    gate = Segments(slot, slot, (COLUMNS,), (COLUMNS,))
    activate(layers, gate, slot, factors=TokenFactors(slot, COLUMNS, 0), **sizes)


def _record_endings(runtime: ProgramRecorder, slot: SharedArray) -> None:
    """Note linear layers of one token with the operators around them."""
    normed, place = NormedInput(slot, slot, 32, COLUMNS, 1e-5), (np.int32(0), np.int32(0))
    sizes = map(np.int32, (2, 1, 512))
    cached = (slot, np.int32(0), np.float32(0), slot, slot, slot, slot, *place, *sizes)
    for rounds in (False, True):
        rounded = RoundedInputs(slot, slot, 4, BLOCK) if rounds else None
        pack = functools.partial(GpuLinear.pack, activation_dtype=np.float16, integer_inputs=rounds)
        layer = pack(runtime, [_weight(4)] * 2)
        endings: tuple[tuple[str, NormedInput | None, Ending], ...] = (
            ("added", None, AddedToStream.of(runtime, slot, None, slot, ROWS, 1e-5, rounded)),
            ("normed gated", normed, Gated(slot, None, 0, 2, rounded)),
            *(
                (
                    f"normed rotated hd{size}",
                    normed,
                    Rotated(slot, None, size, {"KV_HALF": 1, "ROTARY": size}, cached),
                )
                for size in (64, 128)
            ),
        )
        for name, before, ending in endings:
            runtime.label = f"linear w4{'a8' if rounds else ''} f16 T1"
            launch = layer.launch(slot, slot, tokens=1, style="simt", rounded=rounded, label="linear")
            assert launch.remade is not None
            runtime.label += f" {name}"
            launch.remade(before, ending)


def _record_code_cache(runtime: ProgramRecorder, slot: SharedArray, heads: tuple[int, int, int]) -> None:
    layers, shape = GlueKernels(runtime, np.float16, KV_CODES, style="simt"), HeadShape(*heads, 512)
    step, cache = runtime.shared((STEP_WORDS,), np.int32), KvLayer(slot, STEP_WORDS)
    qkv, rotation = Segments(slot, slot, shape.rows, shape.rows), Rotation(slot, slot)
    runtime.label = f"rope_and_store f16 kv8 hd{shape.head_dim}"
    rope_and_store(layers, qkv, None, slot, cache, step, shape=shape, rotation=rotation, tokens=16)
    for tokens in (1, 64):
        runtime.label = f"attention f16 kv8 hd{shape.head_dim} group{shape.group} T{tokens}"
        options = {"tokens": tokens, "parts": 1}
        attend(layers, slot, cache, slot, step, shape=shape, scores=Scores(0.1), **options)


def _record_outliers(runtime: ProgramRecorder, slot: SharedArray) -> None:
    outliers = GlueKernels(runtime, np.float16, np.float16, style="simt")
    found, hot = OutlierList(slot, slot, slot), HotWeights(slot, slot, (ROWS,), COLUMNS, -1.0, 1.0)
    runtime.label = "find_outliers f16"
    find_outliers(outliers, slot, found, hot, tokens=64)
    for tokens in (1, 64):
        for name, fetched in (("hot", None), ("cold", slot)):
            runtime.label = f"multiply_outliers f16 T{tokens} {name}"
            options = {"tokens": tokens, "covered": tokens, "npu_rows": (ROWS,), "fetched": fetched}
            multiply_outliers(outliers, slot, found, hot, slot, **options)


def _record_experts(runtime: ProgramRecorder, slot: SharedArray) -> None:
    routing = Routing(8, 2)
    grouped: tuple[tuple[int, bool, KernelStyle], ...] = (
        *((tokens, rounds, "simt") for rounds in (False, True) for tokens in (1, 28, 512)),
        (512, False, "half"),
    )
    for tokens, rounds, style in grouped:
        options = {"activation_dtype": np.float16, "integer_inputs": rounds, "experts": routing.experts}
        layer = GroupedLinear.pack(runtime, [_weight(4)] * routing.experts, **options)
        shape = ExpertShape(routing, tokens)
        lists = ExpertLists.allocate(runtime, shape)
        half = " half" if style == "half" else ""
        runtime.label = f"experts w4{'a8' if rounds else ''} f16 T{shape.step}{half}"
        layer.launch(slot, slot, lists, shape=shape, style=style, label="experts")
    experts = GpuExperts(runtime, np.float16, np.float16, style="simt")
    for own in (
        Routing(128, 8),
        Routing(64, 8, "sigmoid", biased=True),
        Routing(16, 2, "sparsemixer", normalized=False, jitter=0.01),
    ):
        shape = ExpertShape(own, 1)
        runtime.label = f"route {own.scoring}"
        bias = slot if own.biased else None
        experts.route(slot, ExpertLists.allocate(runtime, shape), shape=shape, bias=bias)
    shape = ExpertShape(Routing(128, 8), 64)
    lists = ExpertLists.allocate(runtime, shape)
    taken, dropping = (TakenRows(slot, 64, slot, saliency=own) for own in (None, slot))
    runtime.label = "weigh_tokens f16"
    output = Segments(slot, slot, (COLUMNS,), (0,))
    weigh_tokens(experts, output, slot, tokens=shape.tokens)
    for name, own_rows in (("", None), (" taken", taken), (" dropped", dropping)):
        runtime.label = f"sort_pairs{name}"
        experts.sort(lists, shape=shape, taken=own_rows)
    runtime.label = "gather_taken f16"
    experts.gather_taken(slot, slot, lists, taken, shape=shape, columns=COLUMNS)
    codes = RoundedInputs(slot, slot, 4, BLOCK)
    for name, own_codes in (("f16", None), ("codes", (codes, codes))):
        runtime.label = f"gather_rows {name}"
        experts.gather(slot, slot, lists, shape=shape, columns=COLUMNS, codes=own_codes)
    for name, own_rows in (("", None), (" dropped", dropping)):
        runtime.label = f"combine_rows f16{name}"
        experts.combine(slot, lists, slot, shape=shape, columns=COLUMNS, taken=own_rows)


def _record_sparse(runtime: ProgramRecorder, slot: SharedArray, heads: tuple[int, int, int]) -> None:
    layers = GlueKernels(runtime, np.float16, np.float16, style="simt")
    step = runtime.shared((STEP_WORDS,), np.int32)
    shape = SparseShape(HeadShape(*heads, 512), 64, 512)
    group, kv_heads, cache = shape.heads.group, shape.heads.kv_heads, KvLayer(slot, STEP_WORDS)
    memory, selection = ScoreMemory.allocate(runtime, shape), Selection.allocate(runtime, shape)
    scale = score_scales((10.0,) * group, 5.0, (80.0,) * group)
    kind = f"f16 hd{shape.heads.head_dim} group{group}"
    for count in (1, 9):
        options = {"order": range(kv_heads), "keep": (0.2,) * heads[0], "buckets": buckets(count)}
        table = HeadTable.upload(runtime, shape.heads, [scale] * kv_heads, **options)
        runtime.label = f"score_codes {kind}{' 9 buckets' if count > 1 else ''}"
        write_score_codes(layers, slot, cache, memory, table, step, shape=shape)
    slots: dict[str, Any] = {"shape": shape, "slots": (0, kv_heads)}
    runtime.label = f"score_estimate {kind}"
    estimate_scores(layers, memory, exponent=scale.exponent, **slots)
    runtime.label = f"selection {kind}"
    select_positions(layers, memory, table, selection, step, scores=Scores(0.1), **slots)
    runtime.label = f"attention {kind} gathered"
    attend_selected(layers, slot, cache, table, selection, slot, step, scores=Scores(0.1), **slots)


@functools.cache
def programs() -> tuple[Program, ...]:
    """Return the programs of the `simt` style with float16 activations, in the order of the tables."""
    runtime = ProgramRecorder(open_device("sim:snapdragon-8gen3").gpu)
    slot = runtime.shared((SLOT_BYTES,), np.uint8)
    _record_linears(runtime, slot)
    _record_endings(runtime, slot)
    for heads in HEADS:
        _record_glue(runtime, slot, heads, rounds=False)
    _record_glue(runtime, slot, HEADS[0], rounds=True)
    _record_streams(runtime, slot)
    _record_code_cache(runtime, slot, HEADS[0])
    _record_outliers(runtime, slot)
    _record_experts(runtime, slot)
    for heads in HEADS[:2]:
        _record_sparse(runtime, slot, heads)
    for bits in (4, 8):
        runtime.label = f"embedding w{bits}"
        table = GpuLinear.pack(runtime, [_weight(bits)], activation_dtype=np.float16)
        table.embed_launch(slot, slot, count=1, style="simt")
    return tuple(runtime.programs.values())
