"""What compilers and a race detector say about the kernels, without the hardware that they are for.

Every source file needs an entry in PROGRAMS (the compiler's defines; a test fails for a file without one) and
a generator in LAUNCHES (small runs that the simulator watches).
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from heterollm.kernels.cases import cache_view, fill_slot, scales_view
from heterollm.kernels.formats import (
    CodeGrid,
    largest_code,
    linear_errors,
    random_weight,
    reference,
    reference_layers,
)
from heterollm.kernels.gpu import (
    COUNT_WORDS,
    COUNTED_PAIRS,
    KV_CODES,
    SOURCES,
    STEP_HEAD_ROW,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    DeviceMemory,
    ExpertLists,
    ExpertShape,
    GpuExperts,
    GpuGlue,
    GpuLinear,
    GpuOutliers,
    GpuSparseAttention,
    HeadShape,
    KernelStyle,
    KvLayer,
    NpuCodes,
    OpenClRuntime,
    Rotation,
    RoundedInputs,
    Scores,
    Segments,
    ShapeClass,
    SharedArray,
    SparseShape,
    TakenRows,
    Variant,
    code_bytes,
    default_parameters,
    head_stride,
    list_opencl_devices,
    with_numbers,
)
from heterollm.kernels.gpu import runtime as opencl_runtime
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.linear_cases import LinearCase
from heterollm.kernels.ops import Routing, WeightFormat
from heterollm.kernels.outlier_cases import OutlierCases
from heterollm.kernels.sparse_cases import SparseCase, SparsePass

SIMULATOR = Path("/usr/lib/oclgrind/liboclgrind-rt-icd.so")
COMPLAINT = re.compile(r"data race|invalid|error|uninitialized|divergence", re.IGNORECASE)

LINEAR_DEFINES = [
    f"-DBITS={bits}{few}"
    for bits in (4, 8, 16, 32)
    for few in ("", " -DTOKENS=1", " -DTOKENS=8", " -DGROUPED", " -DTOKENS=2 -DGROUPED")
]
INT8_DEFINES = [defines for defines in LINEAR_DEFINES if defines[:8] in ("-DBITS=4", "-DBITS=8")]
# Kernels for GPUs know the block when compiling.
SIMT_DEFINES = [
    f"{defines} -DBLOCK=32{more}"
    for defines in LINEAR_DEFINES
    for more in ("", " -DWHOLE_EIGHTS -DASYMMETRIC", " -DASYMMETRIC -DMINIMUMS")
]
IMAGES = [
    f"-DBITS={bits}{few} -DBLOCK=32 -DWEIGHT_IMAGE"
    for bits in (4, 8)
    for few in ("", " -DTOKENS=1", " -DGROUPED")
]
SIMT_INT8_DEFINES = [defines for defines in SIMT_DEFINES if defines[:8] in ("-DBITS=4", "-DBITS=8")]
LAYERS = ("common.h", "rounding.h", "glue.h")
ATTENTION = (*LAYERS, "attention.h")
SPARSE = (*LAYERS, "codes.h", "sparse.h")

PROGRAMS: dict[tuple[str, ...], list[str]] = {
    # Source files in order: one string of defines for each variant to compile.
    ("common.h", "linear.h", "linear_wide.h", "linear_vector.cl"): LINEAR_DEFINES,
    ("common.h", "linear.h", "linear_tiles.h", "linear_simt.cl"): SIMT_DEFINES + IMAGES,
    ("common.h", "linear.h", "linear_int8.h", "linear_wide.h", "linear_int8_vector.cl"): INT8_DEFINES,
    ("common.h", "linear.h", "linear_int8.h", "linear_tiles.h", "linear_int8_simt.cl"): SIMT_INT8_DEFINES
    + IMAGES,
    ("common.h", "rounding.h", "quantize.cl"): ["-DCODE_BITS=4", "-DCODE_BITS=8 -DBLOCK=32 -DWHOLE_EIGHTS"],
    ("common.h", "linear.h", "embedding.cl"): [f"-DBITS={bits}" for bits in (4, 8, 16, 32)],
    (*LAYERS, "rms_norm.cl"): [
        "-DWG=1",
        "-DWG=1 -DCENTERED",
        "-DWG=64 -DCENTERED -DWHOLE_EIGHTS",
        "-DWG=64",
        "-DWG=1 -DCODE_BITS=4 -DCODE_BLOCK=32",
        "-DWG=64 -DWHOLE_EIGHTS",
        "-DWG=1 -DSUM",
    ],
    (*LAYERS, "codes.h", "rms_norm.cl"): [
        "-DWG=1 -DNPU_CODES=16 -DCLAMPED",
        "-DWG=1 -DNPU_CODES=8",
        "-DWG=64 -DNPU_CODES=16 -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "codes.h", "npu_codes.cl"): [
        "-DWG=1 -DNPU_CODES=16",
        "-DWG=1 -DNPU_CODES=8",
        "-DWG=64 -DNPU_CODES=16 -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "pointwise.cl"): [
        "-DWG=1",
        "-DWG=64",
        "-DWG=64 -DCODE_BITS=8 -DCODE_BLOCK=128 -DWHOLE_EIGHTS",
        "-DWG=64 -DSUM -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "rope.cl"): [
        "-DWG=1",
        "-DWG=1 -DJOINT_NORM -DLIMITED",
        "-DWG=64 -DPIECES=4 -DJOINT_NORM -DLIMITED -DWHOLE_EIGHTS",
        "-DWG=64 -DKV_HALF",
        "-DWG=64 -DPIECES=4 -DWHOLE_EIGHTS",
        "-DWG=1 -DKV_CODES -DJOINT_NORM",
        "-DWG=64 -DPIECES=4 -DKV_CODES -DWHOLE_EIGHTS",
        "-DWG=64 -DSUM",
    ],
    (*LAYERS, "outliers.cl"): [
        "-DWG=1",
        "-DWG=1 -DTOKENS=1 -DFETCHED",
        "-DWG=64 -DTOKENS=4",
        "-DWG=64 -DTOKENS=4 -DFETCHED -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "experts.cl"): [
        f"-DWG={items} -DEXPERTS=60 -DCHOSEN=4 {own}"
        for items in (1, 64)
        for own in (
            "-DSCORING=0 -DNORMALIZED",
            "-DSCORING=1 -DBIASED -DSTEP=1",
            "-DSCORING=0 -DBIASED -DSTEP=32 -DTAKEN -DCODES",
            "-DSCORING=2 -DCOMBINES -DDROPS",
            "-DSTEP=8 -DTAKEN -DDROPS -DGATHERS_TAKEN",
            "-DCOMBINES -DADDS -DWHOLE_EIGHTS",
            "-DSLOTS",
        )
    ],
    (*ATTENTION, "attention_vector.cl"): [
        "-DWG=1 -DHEAD_DIM=64 -DROWS=16 -DMICRO=4 -DVECTORS=2",
        "-DWG=1 -DHEAD_DIM=80 -DROWS=8 -DMICRO=8 -DVECTORS=1 -DKV_HALF",
        "-DWG=1 -DHEAD_DIM=36 -DROWS=8 -DMICRO=4 -DVECTORS=2 -DKV_CODES",
        "-DWG=1 -DHEAD_DIM=64 -DROWS=32 -DMICRO=4 -DVECTORS=2 -DCODE_BITS=4 -DCODE_BLOCK=32 -DCODE_HEADS=1",
        "-DWG=1 -DHEAD_DIM=80 -DROWS=32 -DMICRO=4 -DVECTORS=2 -DGATHERED -DBLOCK=32 -DMEMBERS=3",
    ],
    (*ATTENTION, "attention_simt.cl"): [
        "-DWG=64 -DHEAD_DIM=64 -DROWS=8 -DGROUP=4 -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=20 -DROWS=3 -DGROUP=3 -DKV_HALF -DSOFT_CAP",
        "-DWG=64 -DHEAD_DIM=20 -DROWS=3 -DGROUP=3 -DKV_CODES",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=8 -DGROUP=4 -DKV_CODES -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=3 -DGROUP=3 -DKV_HALF -DCOALESCED -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=80 -DROWS=4 -DGROUP=4 -DCODE_BITS=8 -DCODE_BLOCK=64 -DCODE_HEADS=4",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=8 -DGROUP=1 -DGATHERED -DBLOCK=32 -DMEMBERS=3 -DWHOLE_EIGHTS",
    ],
    (*ATTENTION, "attention_join.cl"): [
        "-DWG=64 -DHEAD_DIM=64 -DROWS=4",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=4 -DCODE_BITS=4 -DCODE_BLOCK=128 -DCODE_HEADS=2",
    ],
    (*SPARSE, "score_codes.cl"): [
        "-DWG=1 -DHEAD_DIM=64 -DGROUP=3 -DNPU_CODES=8 -DBUCKETS=9",
        "-DWG=1 -DHEAD_DIM=20 -DGROUP=1 -DNPU_CODES=8 -DKV_HALF",
        "-DWG=64 -DHEAD_DIM=128 -DGROUP=6 -DNPU_CODES=8 -DKV_HALF -DWHOLE_EIGHTS -DBUCKETS=5",
    ],
    (*SPARSE, "score_estimate.cl"): [
        "-DWG=1 -DHEAD_DIM=64 -DGROUP=3 -DNPU_CODES=8",
        "-DWG=1 -DHEAD_DIM=20 -DGROUP=1 -DNPU_CODES=8",
        "-DWG=64 -DHEAD_DIM=64 -DGROUP=3 -DNPU_CODES=8",
        "-DWG=64 -DHEAD_DIM=20 -DGROUP=1 -DNPU_CODES=8",
    ],
    (*SPARSE, "select.cl"): [
        f"-DWG={items} -DHEAD_DIM=64 -DGROUP=3 -DNPU_CODES=8 -DBLOCK=32 -DFIRST=4 -DLAST=64{cap}"
        for items in (1, 64)
        for cap in ("", " -DSOFT_CAP")
    ],
    SOURCES: [""],
}


# ---- the compiler ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clang():
    names = ["clang", *(f"clang-{version}" for version in range(30, 12, -1))]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs clang, such as `apt install clang`")
    return found


def compiler_says(clang: str, source: str, *options: str) -> str:
    command = [clang, "-x", "cl", "-target", "spir64", "-Xclang", "-finclude-default-header"]
    command += ["-Wall", "-Werror", "-Wno-unused-function", "-fsyntax-only", *options, "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=600, check=False)
    return "" if done.returncode == 0 else done.stderr


# The plain -cl-ext= of the driver is ignored by clang 15.
WITHOUT_EXTENSIONS = ("-Xclang", "-cl-ext=-all")


@pytest.mark.parametrize("files", PROGRAMS, ids=lambda files: files[-1])
def test_sources_are_portable_opencl_c(clang, files):
    """OpenCL C 1.2 without any extension, and 3.0 with cl_khr_fp16, with each type of activation."""
    source = read_sources(files)
    old, new = ["-cl-std=CL1.2", *WITHOUT_EXTENSIONS], ["-cl-std=CL3.0"]
    kinds = (old, [*old, "-DACT_HALF"], [*new, "-DACT_HALF", "-DOUT_FLOAT"])
    for defines, kind in itertools.product(PROGRAMS[files], kinds):
        options = [*defines.split(), *kind]
        assert compiler_says(clang, source, *options) == "", options


# The paths of the one in the middle are run in test_gpu_linear_int8.py.
@pytest.mark.parametrize(
    "processor", ["haswell", pytest.param("skylake-avx512", marks=pytest.mark.slow), "cascadelake"]
)
def test_the_paths_for_x86_compile(clang, processor):
    options = ["-cl-std=CL1.2", "-target", "x86_64", f"-march={processor}", *WITHOUT_EXTENSIONS]
    for files, variants in PROGRAMS.items():
        source = read_sources(files)
        chosen = variants if files[-1] == "linear_int8_vector.cl" else variants[:2]
        for defines, half in itertools.product(chosen, ([], ["-DACT_HALF"])):
            assert compiler_says(clang, source, *options, *defines.split(), *half) == "", files


def test_half_arithmetic_compiles(clang):
    files = ("common.h", "linear.h", "linear_tiles.h", "linear_simt.cl")
    device = ["-cl-std=CL3.0", "-DACT_HALF", "-DHALF_SUMS", "-DWHOLE_EIGHTS", "-DHAS_HALF", "-DBLOCK=32"]
    for bits, more, tile in itertools.product((4, 8, 16), ("", "-DASYMMETRIC -DMINIMUMS"), (4, 8, 16)):
        options = [*device, f"-DBITS={bits}", f"-DITEM_TOKENS={tile}", "-DTILE_TOKENS=64", *more.split()]
        assert compiler_says(clang, read_sources(files), *options) == "", options


def test_the_integer_dot_product_of_opencl_3_compiles(clang):
    files = ("common.h", "linear.h", "linear_int8.h", "linear_tiles.h", "linear_int8_simt.cl")
    # What a compiler defines for a device with cl_khr_integer_dot_product.
    device = ["-DINTEGER_DOT", "-D__opencl_c_integer_dot_product_input_4x8bit_packed=1"]
    for defines in PROGRAMS[files]:
        options = ["-cl-std=CL3.0", *device, *defines.split()]
        assert compiler_says(clang, read_sources(files), *options) == "", defines


def test_subgroups_compile(clang):
    files = ("common.h", "linear.h", "linear_tiles.h", "linear_simt.cl")
    for bits, more in itertools.product((4, 8), ("", "-DWEIGHT_IMAGE", "-DASYMMETRIC -DMINIMUMS -DACT_HALF")):
        options = ["-DTOKENS=1", "-DSUBGROUP", "-DBLOCK=32", f"-DBITS={bits}", *more.split()]
        assert compiler_says(clang, read_sources(files), "-cl-std=CL3.0", *options) == "", options


@pytest.mark.parametrize("standard", ["CL2.0", "CL3.0"])
def test_the_flag_in_shared_virtual_memory_compiles(clang, standard):
    assert compiler_says(clang, read_sources(SOURCES), f"-cl-std={standard}", "-DSVM_ATOMICS") == ""


def test_the_compiler_check_can_fail(clang):
    arithmetic = "__kernel void f(__global half *a) { half b = a[0]; a[1] = b * b; }"
    enabled = "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n"
    assert "half" in compiler_says(clang, arithmetic, "-cl-std=CL1.2", *WITHOUT_EXTENSIONS)
    assert compiler_says(clang, enabled + arithmetic, "-cl-std=CL3.0") == ""


def test_every_source_file_is_checked():
    folder = resources.files("heterollm.kernels.gpu.opencl")
    sources = {entry.name for entry in folder.iterdir() if entry.name.endswith(".cl")}
    unchecked = sources - {files[-1] for files in PROGRAMS}
    assert not unchecked, f"add {sorted(unchecked)} to PROGRAMS, with the defines of their compiler"


# ---- the simulator --------------------------------------------------------------------------------------


def linear_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Every kernel of the linear layers in each style, format and activation type."""
    for bits, dtype in itertools.product((4, 8, 16, 32), (np.float32, np.float16)):
        number_format = WeightFormat(bits, 16, symmetric=False) if bits <= 8 else WeightFormat(bits)
        for rounds in (False, True)[: 1 + number_format.quantized]:
            # The simulator takes the paths of common.h for devices that are no x86 CPU.
            case = LinearCase(number_format, (70, 3), 48, 1, integer_inputs=rounds)
            # The width of weights changes their loads, and that of activations the stores.
            tokens = (1, 3, 5, 9, 34) if (bits, dtype) == (4, np.float16) else (1, 5)
            yield from exact_launches(runtime, case, tokens, dtype)
        members, _ = case.data(dtype)
        table = GpuLinear.pack(runtime, members[:1], activation_dtype=dtype)
        for style in ("vector", "simt"):
            ids, out = runtime.shared((2,), np.int32), runtime.shared((2, 48), np.float32)
            ids.array[:] = [69, 1 << 30]
            table.embed_launch(ids, out, count=2, style=style)()
            yield
            exact = reference.embedding(np.array([69, 69]), members[0])
            np.testing.assert_allclose(out.array, exact, rtol=1e-6)


def range_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """The kernels of the linear layers over a range of the inputs, which lie next to each other."""
    for bits, rounds in ((4, False), (4, True), (32, False)):
        number_format = WeightFormat(bits, 16, symmetric=False) if bits == 4 else WeightFormat(bits)
        case = LinearCase(number_format, (70,), 80, 1, inputs=(32, 80), integer_inputs=rounds)
        yield from exact_launches(runtime, case, (1, 5, 9), np.float32)


def variant_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Weights as images, and attention whose neighbours read the keys of each other."""
    for bits, tokens, rounds in ((4, 1, False), (8, 9, False), (4, 5, True)):
        number_format = WeightFormat(bits, 16, symmetric=False)
        shape = ShapeClass.of(number_format, integer_inputs=rounds, half=False, tokens=tokens)
        parameters = with_numbers(default_parameters("simt", shape), {"image": 1})
        case = LinearCase(number_format, (70, 3), 48, tokens, integer_inputs=rounds)
        variants = (Variant("simt", parameters=parameters),)
        yield from exact_launches(runtime, case, (tokens,), np.float32, variants)
    heads, length = HeadShape(3, 1, 32, 67), 3
    step = runtime.shared((STEP_WORDS,), np.int32)
    step.array[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = heads.capacity - length, length, 0
    for dtype in (np.float32, np.float16):
        *_, end = heads.layer_offsets(0, dtype)
        q, cache = runtime.shared((length, 96), np.float32), runtime.shared((end,), dtype)
        q.array[...] = cache.array[...] = 0.5
        out = runtime.shared((length, 96), dtype)
        options = {"shape": heads, "scores": Scores(0.2), "tokens": length, "bucket": 67, "parts": 1}
        layers = GpuGlue(runtime, dtype, dtype, style="simt")
        for launch in layers.attention(q, KvLayer(cache, 0), out, step, **options, style="coalesced"):
            launch()
            yield
        np.testing.assert_allclose(out.array, 0.5, rtol=1e-3)


def exact_launches(
    runtime: OpenClRuntime,
    case: LinearCase,
    tokens: tuple[int, ...],
    dtype: type,
    styles: tuple[KernelStyle | Variant, ...] = ("vector", "simt"),
) -> Iterator[None]:
    """A case in each style, on slots of the exact size: the simulator tells of any byte beyond them."""
    for own in (replace(case, tokens=count) for count in tokens):
        members, x = own.data(dtype)
        packed = GpuLinear.pack(runtime, members, activation_dtype=dtype, integer_inputs=case.integer_inputs)
        for style in styles:
            x_slot, y = fill_slot(runtime, x), runtime.shared((len(x), sum(case.rows)), dtype)
            options = {"tokens": len(x), "columns": case.inputs, "style": style}
            packed.launch(x_slot, y, **options, label="linear")()
            yield
            errors = linear_errors(y.array, own.exact(members, x))
            assert errors.within("fp32" if dtype == np.float32 else "fp16"), (own, style, errors)


def layer_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Every kernel between the linear layers in each style and type, on slots of the exact size."""
    rng = np.random.default_rng(0)
    heads, kv_heads, head_dim, tokens, position = 3, 1, 20, 3, 66
    capacity, rows = position + tokens, (heads * head_dim, head_dim, head_dim)
    step = runtime.shared((STEP_WORDS,), np.int32)
    step.array[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, tokens, 1

    def slot(shape: tuple[int, ...], dtype: type) -> SharedArray:
        memory = runtime.shared(shape, dtype)
        memory.array[...] = rng.standard_normal(shape)
        return memory

    def segments(members: tuple[int, ...], splits: tuple[int, ...], dtype: type) -> Segments:
        a_columns = sum(splits)
        b = slot((tokens, sum(members) - a_columns), dtype)
        return Segments(slot((tokens, a_columns), dtype), b, members, splits)

    for style, dtype in itertools.product(("vector", "simt"), (np.float32, np.float16)):
        layers = GpuGlue(runtime, dtype, dtype, style=style)
        gate = "fp32" if dtype == np.float32 else "fp16"
        residual, weight, out = (
            slot((tokens, 44), np.float32),
            slot((44,), np.float32),
            slot((tokens, 44), dtype),
        )
        delta, norm = segments((44,), (13,), dtype), {"hidden": 44, "epsilon": 1e-5}
        layers.final_norm(residual, weight, out, step, rows=2, delta=delta, epsilon=1e-5)()
        yield
        (added,) = reference_layers.join_members(delta.a.array, delta.b.array, (44,), (13,))
        exact = reference_layers.rms_norm(residual.array + added, weight.array, 1e-5)
        assert linear_errors(out.array[:2], exact[1:]).within(gate)
        layers.rms_norm(residual, weight, out, tokens=tokens, delta=delta, **norm)()
        yield
        assert linear_errors(out.array, exact).within(gate)
        bias, post = slot((44,), np.float32), slot((44,), np.float32)
        before = residual.array.copy()
        layers.rms_norm(residual, weight, out, tokens=tokens, delta=delta, bias=bias, post=post, **norm)()
        yield
        exact = before + reference_layers.rms_norm(added + bias.array, post.array, 1e-5)
        exact = reference_layers.rms_norm(exact, weight.array, 1e-5)
        assert linear_errors(out.array, exact).within(gate)
        total = Segments(slot((tokens, 44), dtype), slot((tokens, 44), dtype), (44,), (44,), join="sum")
        before = residual.array.copy()
        layers.rms_norm(residual, weight, out, tokens=tokens, delta=total, bias=bias, **norm)()
        yield
        exact = before.astype(np.float64) + total.a.array + total.b.array + bias.array
        assert linear_errors(out.array, reference_layers.rms_norm(exact, weight.array, 1e-5)).within(gate)
        gate_up, out = segments((21, 21), (3, 16), dtype), slot((tokens, 21), dtype)
        layers.gated_activation(gate_up, out, tokens=tokens, intermediate=21)()
        yield
        members = reference_layers.join_members(gate_up.a.array, gate_up.b.array, (21, 21), (3, 16))
        assert linear_errors(out.array, reference_layers.gated_activation(*members)).within(gate)
        bias = slot((42,), np.float32)
        options = {"tokens": tokens, "intermediate": 21, "activation": "gelu_tanh", "bias": bias}
        layers.gated_activation(gate_up, out, **options)()
        yield
        biased = [part + shift for part, shift in zip(members, np.split(bias.array, 2), strict=True)]
        assert linear_errors(out.array, reference_layers.gated_activation(*biased, "gelu_tanh")).within(gate)
        logits = slot((tokens, 21), np.float32)
        head = segments((21,), (9,), dtype)
        layers.join_logits(head, logits, rows=tokens)()
        yield
        capped = np.tanh(logits.array.astype(np.float64) / 0.7) * 0.7
        layers.soft_cap(logits, 0.7, rows=tokens, vocabulary=21)()
        yield
        assert linear_errors(logits.array, capped).within("fp32")
        layers.add_bias(logits, slot((21,), np.float32), rows=tokens, vocabulary=21)()
        yield
        cache = slot((2 * kv_heads * head_stride(capacity, head_dim, dtype),), dtype)
        layer, shape = KvLayer(cache, 0), HeadShape(heads, kv_heads, head_dim, capacity)
        qkv, bias = segments(rows, (24, 8, 0), dtype), slot((sum(rows),), np.float32)
        tables = [slot((capacity, 6), np.float32) for _ in range(2)]
        q = slot((tokens, rows[0]), np.float32)
        for norms in (None, slot((2 * head_dim,), np.float32)):
            rotation = Rotation(*tables, 12, norms, 1e-5)
            layers.rope_and_store(
                *(qkv, bias, q, layer, step), shape=shape, rotation=rotation, tokens=tokens
            )()
            yield
        rotation = Rotation(*tables, 12, slot((sum(rows[:2]),), np.float32), 1e-5, joint=True, limit=0.5)
        layers.rope_and_store(*(qkv, bias, q, layer, step), shape=shape, rotation=rotation, tokens=tokens)()
        yield
        for parts, length, cap in ((1, tokens, 0.0), (2, tokens, 0.5), (1, 1, 0.5), (2, 1, 0.0)):
            step.array[STEP_LENGTH] = length
            out = slot((length, rows[0]), dtype)
            options = {"shape": shape, "scores": Scores(0.2, 67, cap), "tokens": length, "bucket": 128}
            for launch in layers.attention(q, layer, out, step, parts=parts, **options):
                launch()
                yield
            blocks = cache.array.reshape(2, kv_heads, -1)[..., : capacity * head_dim]
            exact = reference_layers.attention(
                q.array[:length].reshape(length, heads, head_dim),
                *blocks.reshape(2, kv_heads, capacity, head_dim),
                position=position,
                scale=0.2,
                window=67,
                soft_cap=cap,
            )
            by_head = out.array.reshape(-1, head_dim), exact.reshape(-1, head_dim)
            assert linear_errors(*by_head).within(gate), (style, dtype, parts, length)
        step.array[STEP_LENGTH] = tokens


def sum_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Readers of outputs that add the NPU's rows to those of a shadow, on slots of the exact size."""
    rng, tokens, heads = np.random.default_rng(0), 3, HeadShape(3, 1, 20, 9)
    step = runtime.shared((STEP_WORDS,), np.int32)
    step.array[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = heads.capacity - tokens, tokens, 0

    def slot(columns: int, dtype: type) -> SharedArray:
        return fill_slot(runtime, rng.standard_normal((tokens, columns)).astype(dtype))

    def segments(members: tuple[int, ...], splits: tuple[int, ...], dtype: type) -> Segments:
        return Segments(slot(sum(splits), dtype), slot(sum(members), dtype), members, splits, join="sum")

    def members_of(value: Segments) -> list[np.ndarray]:
        parts = np.split(value.b.array.astype(np.float64), np.cumsum(value.rows)[:-1], axis=1)
        added = np.split(value.a.array, np.cumsum(value.splits)[:-1], axis=1)
        for part, own in zip(parts, added, strict=True):
            part[:, : own.shape[1]] += own
        return parts

    for style, dtype in itertools.product(("vector", "simt"), (np.float32, np.float16)):
        layers, gate = GpuGlue(runtime, dtype, dtype, style=style), "fp32" if dtype == np.float32 else "fp16"
        gate_up, out = segments((21, 21), (3, 16), dtype), slot(21, dtype)
        layers.gated_activation(gate_up, out, tokens=tokens, intermediate=21)()
        yield
        assert linear_errors(out.array, reference_layers.gated_activation(*members_of(gate_up))).within(gate)
        head, logits = segments((21,), (9,), dtype), slot(21, np.float32)
        layers.join_logits(head, logits, rows=tokens)()
        yield
        assert linear_errors(logits.array, *members_of(head)).within(gate)
        *_, end = heads.layer_offsets(0, dtype)
        qkv, cache = segments((60, 20, 20), (24, 8, 0), dtype), runtime.shared((end,), dtype)
        tables = [fill_slot(runtime, np.full((heads.capacity, 10), value, np.float32)) for value in (1, 0)]
        options = {"shape": heads, "rotation": Rotation(*tables), "tokens": tokens}
        q = slot(60, np.float32)
        layers.rope_and_store(qkv, None, q, KvLayer(cache, 0), step, **options)()
        yield
        # Angles of zero turn nothing.
        assert linear_errors(q.array, members_of(qkv)[0]).within(gate)


def code_cache_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """RoPE and attention with a KV cache of 8 bits of the exact size."""
    rng, tokens = np.random.default_rng(0), 3
    step = runtime.shared((STEP_WORDS,), np.int32)
    for style, head_dim, dtype in (
        ("vector", 20, np.float32),
        ("simt", 20, np.float32),
        ("simt", 64, np.float16),
    ):
        layers, shape = GpuGlue(runtime, dtype, KV_CODES, style=style), HeadShape(3, 1, head_dim, 70)
        position, gate = shape.capacity - tokens, "fp32" if dtype == np.float32 else "fp16"
        step.array[[STEP_POSITION, STEP_LENGTH]] = position, tokens
        rows, (_, _, stride, end) = sum(shape.rows), shape.layer_offsets(0, KV_CODES)
        whole = rng.integers(-127, 128, 2 * stride).astype(np.int8)
        scales_view(whole, shape)[...] = rng.uniform(0.005, 0.02, (1, 2, 1, shape.capacity))
        cache = fill_slot(runtime, whole[:end])
        value = fill_slot(runtime, rng.standard_normal((tokens, rows)).astype(dtype))
        tables = [
            fill_slot(runtime, np.full((shape.capacity, head_dim // 2), one, np.float32)) for one in (1, 0)
        ]
        q = runtime.shared((tokens, shape.query_columns), np.float32)
        qkv = Segments(value, value, shape.rows, (0, 0, 0))
        options = {"shape": shape, "rotation": Rotation(*tables), "tokens": tokens}
        layers.rope_and_store(qkv, None, q, KvLayer(cache, 0), step, **options)()
        yield
        whole[:end] = cache.array
        exact = cache_view(whole, shape)[0] * scales_view(whole, shape)[0].astype(np.float64)[..., None]
        stored = value.array[:, shape.query_columns :].astype(np.float64).reshape(tokens, 2, 1, head_dim)
        assert np.abs(exact[:, :, position:] - stored.transpose(1, 2, 0, 3)).max() < 0.51 * 4 / 127
        for parts in (1, 2):
            out = runtime.shared(q.array.shape, dtype)
            sizes = {"shape": shape, "scores": Scores(0.2), "tokens": tokens, "bucket": 128, "parts": parts}
            for launch in layers.attention(q, KvLayer(cache, 0), out, step, **sizes):
                launch()
                yield
            queries = q.array.reshape(tokens, 3, head_dim)
            right = reference_layers.attention(queries, *exact, position=position, scale=0.2)
            assert linear_errors(out.array, right.reshape(tokens, -1)).within(gate), (style, parts)


def rounding_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Every kernel that rounds what it writes, on slots of the exact size."""
    rng = np.random.default_rng(0)
    tokens, heads, kv_heads, head_dim, block = 3, 4, 2, 24, 16
    columns, capacity = heads * head_dim, 70
    step = runtime.shared((STEP_WORDS,), np.int32)
    step.array[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = capacity - tokens, tokens, 0

    def slot(shape: tuple[int, ...], dtype: type) -> SharedArray:
        memory = runtime.shared(shape, dtype)
        memory.array[...] = rng.standard_normal(shape)
        return memory

    for style, dtype in itertools.product(("vector", "simt"), (np.float32, np.float16)):
        layers = GpuGlue(runtime, dtype, dtype, style=style)
        residual, weight = slot((tokens, columns), np.float32), slot((columns,), np.float32)
        value, wide = slot((tokens, columns), dtype), slot((tokens, 2 * columns), dtype)
        query = slot((tokens, columns), np.float32)
        cache = slot((2 * kv_heads * head_stride(capacity, head_dim, dtype),), dtype)
        out = runtime.shared((tokens, columns), dtype)
        codes, blocks = (runtime.shared((size,), np.uint8) for size in code_bytes(tokens, columns, block))
        rounded = RoundedInputs(codes, blocks, 8, block)
        delta, gate_up = (
            Segments(value, value, (columns,), (0,)),
            Segments(wide, wide, (columns,) * 2, (0, 0)),
        )
        norm = {"epsilon": 1e-5, "delta": delta, "rounded": rounded}
        layer, shape = KvLayer(cache, 0), HeadShape(heads, kv_heads, head_dim, capacity)
        sizes = {"shape": shape, "scores": Scores(0.2), "tokens": tokens, "bucket": capacity}
        sizes |= {"rounded": rounded}
        for launches in (
            [layers.rms_norm(residual, weight, out, hidden=columns, tokens=tokens, **norm)],
            [layers.final_norm(residual, weight, out, step, rows=tokens, **norm)],
            [layers.gated_activation(gate_up, out, tokens=tokens, intermediate=columns, rounded=rounded)],
            layers.attention(query, layer, out, step, parts=1, **sizes),
            layers.attention(query, layer, out, step, parts=2, **sizes),
        ):
            codes.array[...] = blocks.array[...] = 0
            for launch in launches:
                launch()
                yield
            assert "rounding of inputs" not in [launch.label for launch in launches]
            scales = blocks.view(np.float32, (tokens, columns // block, 2))[..., :1].astype(np.float64)
            seen = codes.view(np.int8, (tokens, columns // block, block)) * scales
            exact = reference.round_inputs(out.array, block)
            np.testing.assert_allclose(seen.reshape(tokens, columns), exact, rtol=1e-6)


def npu_code_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Codes at the edges of integer NPU graphs in each style, type and width, on slots of the exact size."""
    rng = np.random.default_rng(0)
    tokens, columns, members = 3, 72, (9, 3, 9)
    size, places = (tokens, sum(members)), itertools.product((8, 16), (False, True), (False, True))
    styles = itertools.product(("vector", "simt"), (np.float32, np.float16))
    for (style, dtype), (bits, per_token, clamps) in itertools.product(styles, list(places)):
        layers, limit = GpuGlue(runtime, dtype, dtype, style=style), largest_code(bits)
        steps = () if per_token else (0.7 / limit, 0.1 / limit, 0.3 / limit)
        grid = CodeGrid(1 / limit, 3 / limit, per_token, bits, steps)
        inputs, outputs = runtime.shared((tokens, columns), grid.dtype), runtime.shared(size, grid.dtype)
        factors, counts = (
            DeviceMemory(runtime.scratch(used), used) for used in (4 * tokens, 4 * COUNT_WORDS)
        )
        codes = NpuCodes(inputs, outputs, factors, counts, 0, grid, clamps)
        x = fill_slot(runtime, rng.standard_normal((tokens, columns)).astype(dtype))
        layers.write_codes(x, codes, tokens=tokens, columns=columns)()
        yield
        expected, exact_factors = grid.codes(x.array)
        np.testing.assert_array_equal(inputs.array, expected)
        outputs.array[...] = rng.integers(0, 1 << bits, size)
        y, own = runtime.shared(size, dtype), members if steps else (sum(members),)
        layers.read_codes(codes, y, tokens=tokens, member_rows=own)()
        yield
        np.testing.assert_array_equal(y.array, grid.values(outputs.array, exact_factors, own).astype(dtype))
        residual = fill_slot(runtime, rng.standard_normal((tokens, columns)).astype(np.float32))
        weight = fill_slot(runtime, np.ones(columns, np.float32))
        options = {"hidden": columns, "tokens": tokens, "epsilon": 1e-5, "rounded": codes}
        layers.rms_norm(residual, weight, x, **options)()
        yield
        np.testing.assert_array_equal(inputs.array, grid.codes(x.array)[0])


def outlier_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Shadow outliers in each style and type, with channels in memory and channels that the host fetches."""
    for style, dtype in itertools.product(("vector", "simt"), (np.float32, np.float16)):
        outliers = GpuOutliers(runtime, dtype, dtype, style=style)
        cases = OutlierCases(runtime, outliers, np.dtype(dtype), np.random.default_rng(0))
        for tokens, covered, columns, rows, npu_rows in (
            (1, 1, 100, (70,), (64,)),
            (6, 5, 600, (21, 9, 9), (16, 8, 0)),
            (35, 35, 64, (24,), (24,)),
        ):
            sizes = {"channels": 25, "hot": 9, "covered": covered}
            actual, exact = cases.product(tokens, columns, rows, npu_rows, **sizes)
            yield
            assert linear_errors(actual, exact).nmse < (1e-6 if dtype == np.float16 else 1e-10)


def expert_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """A layer with experts in each style and type, on slots of the exact size; some rows are another's."""
    rng = np.random.default_rng(0)
    routing, hidden, width = Routing(3, 2), 48, 21
    weight = WeightFormat(4, 16, symmetric=False)
    taken = np.array([(0, 0), (2, 0), (1, 2)], np.int32)
    for style, dtype, rounds, drops in (
        *(("vector", np.float32, True, False), ("simt", np.float16, True, True)),
        *(("vector", np.float16, False, True), ("simt", np.float32, False, False)),
    ):
        counts = runtime.shared((COUNTED_PAIRS,), np.int32)
        given = TakenRows(fill_slot(runtime, taken), 3, counts, 0, drops)
        experts = GpuExperts(runtime, dtype, dtype, style=style)
        weights = [random_weight(rng, width, hidden, weight) for _ in range(routing.experts)]
        options = {"activation_dtype": dtype, "integer_inputs": rounds}
        layer = GpuLinear.pack(runtime, weights, experts=routing.experts, **options)
        for tokens in (1, 5, 30):
            shape = ExpertShape(routing, tokens)
            lists = ExpertLists(
                **{
                    name: runtime.shared((size // 4,), np.float32 if name == "weights" else np.int32)
                    for name, size in ExpertLists.sizes(shape).items()
                }
            )
            logits = fill_slot(runtime, rng.standard_normal((tokens, routing.experts)).astype(np.float32))
            x = fill_slot(runtime, rng.standard_normal((tokens, hidden)).astype(dtype))
            rows, y = (runtime.shared((shape.pairs, columns), dtype) for columns in (hidden, width))
            other, out = runtime.shared((3, width), dtype), runtime.shared((tokens, width), dtype)
            inputs = runtime.shared((3, hidden), dtype)
            sizes = {"shape": shape, "columns": hidden}
            for launch in (
                experts.route(logits, lists, shape=shape),
                experts.sort(lists, shape=shape, taken=given),
                experts.gather_taken(x, inputs, lists, given, **sizes),
                experts.gather(x, rows, lists, **sizes),
                layer.grouped_launch(rows, y, lists, shape=shape, style=style, label="experts"),
                experts.combine(
                    y, lists, out, shape=shape, columns=width, other=other, taken=given, adds=True
                ),
            ):
                launch()
                yield
            chosen = np.argsort(-logits.array, axis=1)[:, :2]
            np.testing.assert_array_equal(lists.chosen.array.reshape(chosen.shape), chosen)
            shares = lists.weights.array.reshape(chosen.shape)
            seen = reference.round_inputs(x.array, 16) if rounds else x.array
            products = np.stack([reference.linear(seen, [own]) for own in weights])
            left, exact = taken[:, 0].copy(), np.zeros((tokens, width))
            for token, slot in np.ndindex(*chosen.shape):
                expert = chosen[token, slot]
                left[expert] -= 1
                # The other processor's rows are zeros.
                is_own = left[expert] < 0 and not (drops and taken[expert, 0])
                exact[token] += shares[token, slot] * products[expert, token] * is_own
            power = np.square(products).mean() * exact.size
            assert np.square(out.array - exact).sum() < (1e-6 if dtype == np.float16 else 1e-10) * power
        # Tokens of all three passes.
        assert counts.array[0] == 2 * 36
        assert counts.array[2 if drops else 3] == 0


def sparse_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """The steps of sparse attention in each style and type, on slots of the exact size."""
    for (style, dtype), window in zip(
        itertools.product(("vector", "simt"), (np.float32, np.float16)), (0, 40, 0, 40), strict=True
    ):
        sparse = GpuSparseAttention(runtime, dtype, dtype, style=style)
        shape = SparseShape(HeadShape(4, 2, 20, 115), 40, 112)
        scores, keep = Scores(0.2, window, 3.0 if window else 0.0), (0.1, 0.7, 0.9, 1.0)
        own = SparsePass(shape, 75, 35, scores, (1, 0), keep, exponent=3, buckets=9)
        case = SparseCase(runtime, sparse, dtype, dtype, own, np.random.default_rng(0))
        for actual, exact in zip(*case.quantise(), strict=True):
            np.testing.assert_allclose(actual, exact, rtol=1e-6)
        yield
        np.testing.assert_array_equal(*case.estimate((0, 2)))
        yield
        selected = case.select((1, 2), (0, 1))
        yield
        numbers = case.attend(selected)
        yield
        assert linear_errors(*numbers).within("fp32" if dtype == np.float32 else "fp16")


def hand_over_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Kernels of fences, of their litmus test and of injected delays."""
    data, rounds = runtime.shared((70,), np.uint32), runtime.shared((1,), np.uint32)
    arguments = {
        "write_round": ((data, rounds), 70),
        "count_round": ((rounds,), 1),
        "late_write": ((data, np.int32(70), rounds, np.int32(9)), 1),
        "stand_at_gate": ((data, np.int32(9)), 1),
    }
    for name, (memory, size) in arguments.items():
        runtime.launch(runtime.kernel(SOURCES, name), memory, (size,), (1,), name)()
        yield
        assert (data.array == (2 if name in ("late_write", "stand_at_gate") else 1)).all(), name
    flag = runtime.flag
    assert flag is not None
    flag.send()
    yield
    assert flag.reached(1)
    assert not flag.reached(2)


def racy_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Neighbours that write one element: the check must see it."""
    source = "__kernel void racy(__global int *a) { a[get_global_id(0) / 2] += get_global_id(0); }"
    opencl_runtime.read_sources = lambda files: source
    slot = runtime.shared((4,), np.int32)
    runtime.launch(runtime.kernel(("racy.cl",), "racy"), [slot], (8,), (4,), "racy")()
    yield


def overrunning_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """A write behind the buffer: the check must see it."""
    source = "__kernel void over(__global int *a) { a[get_global_id(0) + 1] = 1; }"
    opencl_runtime.read_sources = lambda files: source
    slot = runtime.shared((4,), np.int32)
    runtime.launch(runtime.kernel(("over.cl",), "over"), [slot], (4,), (1,), "over")()
    yield


LAUNCHES: dict[str, Callable[[OpenClRuntime], Iterator[None]]] = {
    # Add a generator for new kernel files: it enqueues one small launch and yields, again and again.
    "linear": linear_launches,
    "ranges": range_launches,
    "variants": variant_launches,
    "layers": layer_launches,
    "sums": sum_launches,
    "rounding": rounding_launches,
    "code cache": code_cache_launches,
    "NPU codes": npu_code_launches,
    "outliers": outlier_launches,
    "experts": expert_launches,
    "sparse attention": sparse_launches,
    "hand-overs": hand_over_launches,
}
FAULTY: dict[str, Callable[[OpenClRuntime], Iterator[None]]] = {
    "racy": racy_launches,
    "overrunning": overrunning_launches,
}


def simulate(name: str, folder: Path) -> tuple[int, str]:
    """Run the launches in a process of their own, under the simulator; return their number and the log."""
    if not SIMULATOR.exists():
        pytest.skip("needs oclgrind, such as `apt install oclgrind`")
    environment = os.environ | {
        "OCL_ICD_VENDORS": str(SIMULATOR),
        "OCLGRIND_DATA_RACES": "1",
        "HETEROLLM_CACHE": str(folder),
    }
    environment.pop("HETEROLLM_SHARED_MEMORY", None)  # it has no shared virtual memory
    command = [sys.executable, "-P", __file__, name]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_have_no_races_and_stay_in_bounds(name, tmp_path):
    launches, log = simulate(name, tmp_path)
    assert launches > 0
    assert not COMPLAINT.search(log), log[:4000]


@pytest.mark.parametrize(("name", "message"), [("racy", "data race"), ("overrunning", "Invalid write")])
def test_the_simulator_check_can_fail(name, message, tmp_path):
    launches, log = simulate(name, tmp_path)
    assert launches == 1
    assert message in log
    assert COMPLAINT.search(log)


def main() -> None:
    """Run the named launches on the only device that the process sees."""
    (_, device), *_ = list_opencl_devices()
    runtime = OpenClRuntime(device)
    count = 0
    for _ in (LAUNCHES | FAULTY)[sys.argv[1]](runtime):
        runtime.finish()
        count += 1
    sys.stdout.write(str(count))


if __name__ == "__main__":
    main()
