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
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from heterollm.kernels.formats import CodeGrid, largest_code, linear_errors, random_weight, reference
from heterollm.kernels.gpu import (
    COUNT_WORDS,
    COUNTED_PAIRS,
    KV_CODES,
    SOURCES,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    DeltaShape,
    DeviceMemory,
    ExpertLists,
    ExpertShape,
    GlueKernels,
    GpuLinear,
    GroupedLinear,
    HeadShape,
    KernelStyle,
    KvLayer,
    NpuCodes,
    OpenClRuntime,
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
    list_opencl_devices,
    page_elements,
    pages_of,
    programs,
    with_numbers,
)
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.operators.attention import AttentionCase, attend
from heterollm.kernels.operators.attention_inputs import AttentionInputsCase
from heterollm.kernels.operators.data import Data, fill_slot
from heterollm.kernels.operators.delta_net import DeltaCase
from heterollm.kernels.operators.embedding import PositionsCase
from heterollm.kernels.operators.endings import EndingCase
from heterollm.kernels.operators.experts import GpuExperts, weigh_tokens
from heterollm.kernels.operators.gate_cutoff import CutoffCase
from heterollm.kernels.operators.gated_activation import GatedCase, activate
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.operators.logits import AddBiasCase, JoinCase, SoftCapCase
from heterollm.kernels.operators.norm import NormCase, final_norm, rms_norm
from heterollm.kernels.operators.npu_codes import read_codes, write_codes
from heterollm.kernels.operators.operator import OperatorCase
from heterollm.kernels.operators.outliers import OutlierCase
from heterollm.kernels.operators.output_gate import OutputGateCase
from heterollm.kernels.operators.rope import RopeCase
from heterollm.kernels.operators.short_conv import ShortConvCase
from heterollm.kernels.operators.sparse_attention import SparseCase, SparsePass
from heterollm.kernels.operators.streams import StreamsCase
from heterollm.kernels.operators.token_gate import TokenGateCase
from heterollm.kernels.ops import Routing, WeightFormat

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

ENDINGS = [
    f"-DENDING -DBITS=4 -DTOKENS=1 -DBLOCK=32 {own}"
    for own in (
        "-DNORMED",
        "-DADDED -DOUT_FLOAT",
        "-DADDED -DOUT_FLOAT -DROWS=8 -DSLICES=32",
        "-DADDED -DOUT_FLOAT -DCODE_BITS=4 -DCODE_BLOCK=32 -DLOCAL_VALUES",
        "-DNORMED -DGATED -DTILES=2 -DSLICES=2",
        "-DNORMED -DGATED -DCODE_BITS=8 -DCODE_BLOCK=16 -DLOCAL_VALUES -DWHOLE_EIGHTS",
        "-DNORMED -DROTATED -DOUT_FLOAT -DTILES=2 -DSLICES=2 -DHEAD_DIM=128 -DROTARY=96 -DKV_CODES",
        "-DROTATED -DOUT_FLOAT -DHEAD_DIM=32 -DROTARY=32 -DKV_HALF -DWHOLE_EIGHTS",
    )
]
ENDED = ("linear_tiles.h", "linear_endings.h")
LINEAR_MATRIX = ("linear_wide.h", "matrix.h")
MATRIX_PROGRAMS: dict[tuple[str, ...], list[str]] = {
    # Of one processor, which no simulator has; test_linear_matrix.py runs them.
    ("common.h", "matrix_parts.h", "split_inputs.cl"): [f"-DCODE_BITS={bits} -DBLOCK=16" for bits in (4, 8)],
    ("common.h", "linear.h", *LINEAR_MATRIX, "matrix_parts.h", "matrix_floats.h", "linear_matrix.cl"): [
        f"-DBITS={bits} -DTOKENS={tokens} -DBLOCK={block}{more}"
        for bits, tokens, block in ((4, 1, 32), (8, 16, 128))
        for more in ("", " -DASYMMETRIC", " -DASYMMETRIC -DMINIMUMS", " -DGROUPED")
    ],
    ("common.h", "linear.h", "linear_int8.h", *LINEAR_MATRIX, "matrix_codes.h", "linear_matrix.cl"): [
        f"-DBITS={bits} -DTOKENS=16 -DBLOCK={block}{more}"
        for bits, block in ((4, 16), (8, 128))
        for more in ("", " -DASYMMETRIC -DMINIMUMS", " -DGROUPED")
    ],
}

PROGRAMS: dict[tuple[str, ...], list[str]] = {
    # Source files in order: one string of defines for each variant to compile.
    ("common.h", "linear.h", "linear_wide.h", "linear_vector.cl"): LINEAR_DEFINES,
    ("common.h", "linear.h", "linear_tiles.h", "linear_simt.cl"): SIMT_DEFINES + IMAGES,
    ("common.h", "linear.h", "linear_int8.h", "linear_wide.h", "linear_int8_vector.cl"): INT8_DEFINES,
    ("common.h", "linear.h", "linear_int8.h", "linear_tiles.h", "linear_int8_simt.cl"): SIMT_INT8_DEFINES
    + IMAGES,
    (*LAYERS, "linear.h", *ENDED, "linear_simt.cl"): ENDINGS,
    (*LAYERS, "linear.h", "linear_int8.h", *ENDED, "linear_int8_simt.cl"): ENDINGS,
    ("common.h", "rounding.h", "quantize.cl"): ["-DCODE_BITS=4", "-DCODE_BITS=8 -DBLOCK=32 -DWHOLE_EIGHTS"],
    ("common.h", "linear.h", "embedding.cl"): [f"-DBITS={bits}" for bits in (4, 8, 16, 32)],
    (*LAYERS, "rms_norm.cl"): [
        "-DWG=1",
        "-DWG=1 -DCENTERED",
        "-DWG=64 -DCENTERED -DWHOLE_EIGHTS",
        "-DWG=64 -DUNNORMED -DWHOLE_EIGHTS",
        "-DWG=64 -DUNNORMED -DALONE",
        "-DWG=1 -DUNNORMED -DCODE_BITS=4 -DCODE_BLOCK=32",
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
        "-DWG=1 -DNPU_CODES=8 -DMEMBER_STEPS=6",
        "-DWG=64 -DNPU_CODES=16 -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "pointwise.cl"): [
        "-DWG=1",
        "-DWG=64",
        "-DWG=64 -DCODE_BITS=8 -DCODE_BLOCK=128 -DWHOLE_EIGHTS",
        "-DWG=64 -DSUM -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "short_conv.cl"): [
        "-DWG=1 -DTAPS=3",
        "-DWG=64 -DTAPS=7 -DWHOLE_EIGHTS",
        "-DWG=64 -DTAPS=3 -DCODE_BITS=8 -DCODE_BLOCK=128 -DWHOLE_EIGHTS",
        "-DWG=64 -DTAPS=3 -DSUM",
    ],
    (*LAYERS, "gates.h", "delta_conv.cl"): [
        "-DWG=1 -DTAPS=4",
        "-DWG=64 -DTAPS=4 -DWHOLE_EIGHTS",
        "-DWG=64 -DTAPS=3 -DSUM",
        "-DWG=64 -DTAPS=4 -DSTATE_SPACE -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "delta_rule.cl"): [
        "-DWG=1 -DGROUP=3 -DKEY_DIM=21 -DLANES=1 -DTWO_ROWS -DRUNS=3 -DBLOCK=32",
        "-DWG=64 -DGROUP=3 -DKEY_DIM=21 -DLANES=4 -DRUNS=1 -DBLOCK=1024",
        "-DWG=64 -DGROUP=2 -DKEY_DIM=128 -DLANES=4 -DRUNS=4 -DBLOCK=1024 -DWHOLE_EIGHTS",
        "-DWG=64 -DGROUP=24 -DKEY_DIM=256 -DLANES=4 -DRUNS=8 -DBLOCK=1024 -DSTATE_SPACE -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "latent.cl"): [
        "-DWG=1 -DTURNS -DLATENT=20 -DROPE=12 -DKEY",
        "-DWG=64 -DTURNS -DLATENT=512 -DROPE=64 -DKEY -DKV_HALF -DWHOLE_EIGHTS",
        "-DWG=64 -DTURNS -DLATENT=512 -DROPE=64 -DSUM -DWHOLE_EIGHTS",
        "-DWG=64 -DNORMS -DWHOLE_EIGHTS",
        "-DWG=1 -DMULTIPLIES -DINPUTS=20 -DOUTPUTS=12 -DTOKENS=1 -DFLOAT_OUTPUT",
        "-DWG=64 -DMULTIPLIES -DINPUTS=512 -DOUTPUTS=128 -DTOKENS=4 -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "gates.h", "output_gate.cl"): [
        "-DWG=1",
        "-DWG=1 -DSILU -DNORMED",
        "-DWG=64 -DSILU -DNORMED -DGATE_FIRST -DWHOLE_EIGHTS",
        "-DWG=64 -DSUM -DWHOLE_EIGHTS",
    ],
    (*LAYERS, "gate_cutoff.cl"): ["-DWG=1", "-DWG=64 -DWHOLE_EIGHTS", "-DWG=64 -DSUM"],
    (*LAYERS, "streams.cl"): [
        "-DWG=1 -DSTREAMS=2",
        "-DWG=64 -DSTREAMS=4 -DWHOLE_EIGHTS",
        "-DWG=64 -DSTREAMS=4 -DOPENS -DSUM",
    ],
    (*LAYERS, "token_gate.cl"): ["-DWG=1", "-DWG=64 -DWHOLE_EIGHTS", "-DWG=64 -DSUM"],
    (*LAYERS, "rope.cl"): [
        "-DWG=1",
        "-DWG=1 -DJOINT_NORM -DLIMITED",
        "-DWG=64 -DPIECES=4 -DJOINT_NORM -DLIMITED -DWHOLE_EIGHTS",
        "-DWG=64 -DPIECES=4 -DNORMS_LAST -DQUERY_SCALES -DWHOLE_EIGHTS",
        "-DWG=1 -DKV_CODES -DNORMS_LAST -DQUERY_SCALES",
        "-DWG=64 -DKV_HALF",
        "-DWG=64 -DPIECES=4 -DWHOLE_EIGHTS",
        "-DWG=1 -DKV_CODES -DJOINT_NORM",
        "-DWG=64 -DPIECES=4 -DKV_CODES -DWHOLE_EIGHTS",
        "-DWG=1 -DKV_CODES -DPAGED",
        "-DWG=64 -DPIECES=4 -DPAGED -DWHOLE_EIGHTS",
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
            "-DSCORING=0 -DNORMALIZED -DFACTORS",
            "-DSCORING=1 -DBIASED -DSTEP=1",
            "-DSCORING=1 -DBIASED -DGROUPS=5 -DKEPT=2",
            "-DSCORING=0 -DBIASED -DSTEP=32 -DTAKEN -DCODES",
            "-DSCORING=2 -DCOMBINES -DDROPS",
            "-DSTEP=8 -DTAKEN -DDROPS -DGATHERS_TAKEN",
            "-DCOMBINES -DADDS -DWHOLE_EIGHTS",
            "-DGATHERS_TAKEN -DCOMBINES -DWEIGHS_INPUTS",
            "-DCODES -DWEIGHS_INPUTS",
            "-DSLOTS",
            "-DSALIENCY",
            "-DSALIENCY -DSUM",
        )
    ],
    (*ATTENTION, "attention_vector.cl"): [
        "-DWG=1 -DHEAD_DIM=64 -DROWS=16 -DMICRO=4 -DVECTORS=2",
        "-DWG=1 -DHEAD_DIM=80 -DROWS=8 -DMICRO=8 -DVECTORS=1 -DKV_HALF -DCHUNKED",
        "-DWG=1 -DHEAD_DIM=36 -DROWS=8 -DMICRO=4 -DVECTORS=2 -DKV_CODES",
        "-DWG=1 -DHEAD_DIM=64 -DROWS=32 -DMICRO=4 -DVECTORS=2 -DCODE_BITS=4 -DCODE_BLOCK=32 -DCODE_HEADS=1",
        "-DWG=1 -DHEAD_DIM=80 -DROWS=32 -DMICRO=4 -DVECTORS=2 -DGATHERED -DBLOCK=32 -DMEMBERS=3",
        "-DWG=1 -DHEAD_DIM=80 -DROWS=32 -DMICRO=4 -DVECTORS=2 -DGATHERED -DBLOCK=32 -DMEMBERS=3 -DPAGED",
        "-DWG=1 -DHEAD_DIM=64 -DROWS=7 -DMICRO=7 -DVECTORS=1 -DKV_CODES -DPAGED",
    ],
    (*ATTENTION, "attention_simt.cl"): [
        "-DWG=64 -DHEAD_DIM=64 -DROWS=8 -DGROUP=4 -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=20 -DROWS=3 -DGROUP=3 -DKV_HALF -DSOFT_CAP -DCHUNKED",
        "-DWG=64 -DHEAD_DIM=20 -DROWS=3 -DGROUP=3 -DKV_CODES",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=8 -DGROUP=4 -DKV_CODES -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=3 -DGROUP=3 -DKV_HALF -DCOALESCED -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=80 -DROWS=4 -DGROUP=4 -DCODE_BITS=8 -DCODE_BLOCK=64 -DCODE_HEADS=4",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=8 -DGROUP=1 -DGATHERED -DBLOCK=32 -DMEMBERS=3 -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=8 -DGROUP=1 -DGATHERED -DBLOCK=32 -DMEMBERS=3 -DWHOLE_EIGHTS -DPAGED",
        "-DWG=64 -DHEAD_DIM=20 -DROWS=3 -DGROUP=3 -DKV_CODES -DPAGED",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=3 -DGROUP=3 -DKV_HALF -DCOALESCED -DWHOLE_EIGHTS -DPAGED",
    ],
    (*ATTENTION, "attention_join.cl"): [
        "-DWG=64 -DHEAD_DIM=64 -DROWS=4",
        "-DWG=64 -DHEAD_DIM=64 -DROWS=4 -DCODE_BITS=4 -DCODE_BLOCK=128 -DCODE_HEADS=2",
    ],
    (*LAYERS, "attention_inputs.cl"): [
        "-DWG=1 -DHEAD_DIM=64 -DGROUP=3 -DRANGE_KEYS=512",
        "-DWG=1 -DHEAD_DIM=20 -DGROUP=1 -DRANGE_KEYS=512 -DKV_CODES",
        "-DWG=64 -DHEAD_DIM=128 -DGROUP=6 -DRANGE_KEYS=512 -DKV_HALF -DWHOLE_EIGHTS",
        "-DWG=64 -DHEAD_DIM=20 -DGROUP=3 -DRANGE_KEYS=512",
    ],
    (*SPARSE, "score_codes.cl"): [
        "-DWG=1 -DHEAD_DIM=64 -DGROUP=3 -DNPU_CODES=8 -DBUCKETS=9",
        "-DWG=1 -DHEAD_DIM=20 -DGROUP=1 -DNPU_CODES=8 -DKV_HALF",
        "-DWG=64 -DHEAD_DIM=128 -DGROUP=6 -DNPU_CODES=8 -DKV_HALF -DWHOLE_EIGHTS -DBUCKETS=5",
        "-DWG=1 -DHEAD_DIM=20 -DGROUP=1 -DNPU_CODES=8 -DBUCKETS=9 -DPAGED",
        "-DWG=64 -DHEAD_DIM=64 -DGROUP=3 -DNPU_CODES=8 -DPAGED",
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


@pytest.mark.parametrize("files", MATRIX_PROGRAMS, ids=lambda files: files[-1])
def test_sources_for_a_matrix_unit_compile(clang, files):
    options = ["-cl-std=CL1.2", "-target", "x86_64", "-march=sapphirerapids", *WITHOUT_EXTENSIONS]
    source = read_sources(files)
    for defines, half in itertools.product(MATRIX_PROGRAMS[files], ([], ["-DACT_HALF"])):
        assert compiler_says(clang, source, *options, *defines.split(), *half) == "", defines


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
    unchecked = sources - {files[-1] for files in (*PROGRAMS, *MATRIX_PROGRAMS)}
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
    step = exact_step(runtime, heads.capacity, length)
    for dtype in (np.float32, np.float16):
        end = pages_of(heads.capacity) * page_elements(heads.kv_heads, heads.head_dim, dtype)
        q, cache = runtime.shared((length, 96), np.float32), runtime.shared((end,), dtype)
        q.array[...] = cache.array[...] = 0.5
        out = runtime.shared((length, 96), dtype)
        options = {"shape": heads, "scores": Scores(0.2), "tokens": length, "parts": 1}
        layers = GlueKernels(runtime, dtype, dtype, style="simt")
        for launch in attend(layers, q, KvLayer(cache, STEP_WORDS), out, step, **options, style="coalesced"):
            launch()
            yield
        np.testing.assert_allclose(out.array, 0.5, rtol=1e-3)


def exact_step(runtime: OpenClRuntime, capacity: int, tokens: int) -> SharedArray:
    """Return the step buffer of a pass whose last token is at the last position, with pages in order."""
    step = runtime.shared((STEP_WORDS + pages_of(capacity),), np.int32)
    step.array[:STEP_WORDS] = 0
    step.array[[STEP_POSITION, STEP_LENGTH]] = capacity - tokens, tokens
    step.array[STEP_WORDS:] = range(pages_of(capacity))
    return step


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


class ExactData(Data):
    """Data in slots of the exact size: the simulator tells of any byte beyond them."""

    def _guarded(self, name, shape, dtype, values=None):
        slot = self.on.runtime.shared(shape, dtype)
        if values is not None:
            slot.array[...] = values
        self._outputs[name] = lambda: slot.array.copy()
        return slot


ODD = HeadShape(3, 1, 20, 69)
CODE_OUTPUTS = ("queries", "attended", "graph queries", "graph keys", "graph values", "limits")
NET = DeltaShape(key_heads=2, value_heads=6, key_dim=21, value_dim=13, taps=4)
TURNED = RopeCase(3, 66, ODD, (24, 8, 0), rotary=12, biased=True)
OPERATORS = (
    # The row of an operator in the tests: sizes that fill no vector, in every way that a caller asks for.
    NormCase(3, 44, 13),
    NormCase(3, 44, 13, head_row=1),
    NormCase(3, 44, 13, biased=True, post=True),
    NormCase(3, 44, 44, "sum", biased=True),
    NormCase(3, 48, 13, centered=True),
    NormCase(3, 44, 13, unnormed=True, post=True),
    NormCase(3, 44, 13, biased=True, post=True, alone=True),
    NormCase(3, 96, 0, post=True, alone=True, rounds=WeightFormat(4, 32)),
    GatedCase(3, 21, (3, 16)),
    GatedCase(3, 21, (3, 16), activation="gelu_tanh", biased=True),
    GatedCase(3, 21, (3, 16), activation="gelu_erf", biased=True),
    GatedCase(3, 21, (3, 16), activation="relu", biased=True),
    GatedCase(3, 21, (3, 16), "sum"),
    GatedCase(3, 21, (3,), activation="relu_squared", biased=True),
    GatedCase(3, 21, (3,), "sum"),
    PositionsCase(3, 66, 21),
    ShortConvCase(5, 9, 21, 3, (8, 21, 0)),
    ShortConvCase(2, 0, 21, 4, (8, 21, 0)),
    ShortConvCase(1, 9, 21, 4, (0, 0, 0)),
    ShortConvCase(5, 9, 21, 3, (8, 21, 0), "sum"),
    DeltaCase(35, 9, NET, (8, 21, 0, 5, 0, 3)),
    DeltaCase(2, 0, NET),
    DeltaCase(1, 9, NET, (42, 0, 7, 39, 3, 0), "sum"),
    OutputGateCase(3, 3, 21, (5, 7), biased=True),
    OutputGateCase(3, 3, 21, (5, 2), by_head=True),
    OutputGateCase(3, 3, 21, (63, 7), "sum", normed=True),
    JoinCase(3, 21, 9),
    JoinCase(3, 21, 9, "sum"),
    AddBiasCase(3, 21),
    SoftCapCase(3, 21, 0.7),
    CutoffCase(3, 44, (13, 20)),
    CutoffCase(3, 44, (44, 44), "sum"),
    GatedCase(3, 44, (13, 20), has_cutoffs=True),
    StreamsCase("predict", 3, 44, split=13),
    StreamsCase("predict", 3, 44, has_delta=False, count=2),
    StreamsCase("correct", 3, 44, split=44, join="sum"),
    StreamsCase("read", 3, 44, split=13, stream=2),
    StreamsCase("opens", 3, 44),
    StreamsCase("opens", 3, 44, stream=2),
    StreamsCase("closes", 3, 44),
    StreamsCase("closes", 3, 44, stream=3),
    TokenGateCase(3, 44, 13),
    TokenGateCase(3, 44, 44, "sum"),
    TURNED,
    replace(TURNED, normed=True),
    replace(TURNED, splits=(24, 8, 0, 5)),
    replace(TURNED, splits=(24, 8), normed=True, value_norms=True),
    replace(TURNED, normed=True, joint=True, limit=0.5),
    replace(TURNED, normed=True, norms_last=True, scaled=True),
    replace(TURNED, join="sum"),
    *(
        AttentionCase(tokens, 66, ODD, Scores(0.2, 67, cap), parts=parts)
        for parts, tokens, cap in ((1, 3, 0.0), (2, 3, 0.5), (1, 1, 0.5), (2, 1, 0.0))
    ),
    *(AttentionCase(3, 66, ODD, sinks=(1.0, 0.0, -3.0), parts=parts) for parts in (1, 2)),
    *(AttentionCase(3, 66, ODD, Scores(0.2, 67, chunked=True), parts=parts) for parts in (1, 2)),
    AttentionInputsCase(3, 66, ODD, (32, 80)),
    AttentionInputsCase(35, 0, ODD, (64, 516)),
    OutlierCase(1, 100, (70,), (64,), 25, 9),
    OutlierCase(6, 600, (21, 9, 9), (16, 8, 0), 25, 9, covered=5),
    OutlierCase(35, 64, (24,), (24,), 25, 9),
)
HEADS = HeadShape(2, 1, 32, 69)
INT4, K_QUANT = WeightFormat(4, 16, symmetric=False), WeightFormat(8, 16, symmetric=False, minimum=True)
ENDINGS_OF_CODES = (
    EndingCase(NormCase(1, 144, 0), 1024, INT4, integer_inputs=True),
    EndingCase(GatedCase(1, 80, (0, 0)), 512, INT4, integer_inputs=True, normed=True),
    EndingCase(GatedCase(1, 144, (0,), biased=True), 1024, K_QUANT, integer_inputs=True),
    EndingCase(RopeCase(1, 66, HEADS, (0, 0, 0)), 48, INT4, integer_inputs=True, normed=True),
)
ENDED_CASES = (
    *(EndingCase(NormCase(1, rows, 0, biased=rows > 1), 512, INT4) for rows in (1, 70)),
    EndingCase(GatedCase(1, 70, (0, 0), activation="gelu_tanh", biased=True), 512, INT4, normed=True),
    EndingCase(GatedCase(1, 1, (0,), activation="relu_squared"), 48, WeightFormat(16)),
    EndingCase(RopeCase(1, 66, HEADS, (0, 0, 0), rotary=12, biased=True), 48, K_QUANT),
    EndingCase(
        RopeCase(1, 66, HeadShape(2, 1, 128, 69), (0, 0, 0), normed=True), 48, WeightFormat(32), normed=True
    ),
    *ENDINGS_OF_CODES,
)
CODE_CACHE = (
    TURNED,
    AttentionInputsCase(3, 66, ODD, (32, 80)),
    *(AttentionCase(3, 66, ODD, parts=parts) for parts in (1, 2)),
)


def case_launches(
    runtime: OpenClRuntime,
    cases: tuple[OperatorCase, ...] = OPERATORS,
    kv_dtype: np.dtype | None = None,
    styles: tuple[KernelStyle, ...] = ("vector", "simt"),
) -> Iterator[None]:
    """Every kernel between the linear layers in each style and type."""
    for style, dtype in itertools.product(styles, (np.float32, np.float16)):
        kernels = GlueKernels(runtime, dtype, dtype if kv_dtype is None else kv_dtype, style=style)
        for case in cases:
            data = ExactData(kernels, np.random.default_rng(0))
            for launch in case.launches(kernels, data):
                launch()
                yield
            for name, exact in case.exact(data.values).items():
                # Codes of keys and values are far coarser; tests of their own compare them.
                if kv_dtype is None or name in CODE_OUTPUTS:
                    width = ODD.head_dim if name == "attended" else exact.shape[-1]
                    numbers = (part.reshape(-1, width) for part in (data.read(name), exact))
                    gate = "fp32" if dtype == np.float32 else "fp16"
                    assert linear_errors(*numbers).within(gate), (case, style, dtype, name)


def ending_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Linear layers that compute the operator behind them, with whole row tiles and with divided ones."""
    OpenClRuntime.has_endings = True
    for units in (1, 132):
        runtime.traits = replace(runtime.traits, compute_units=units)
        yield from case_launches(runtime, ENDED_CASES, styles=("simt",))
    yield from case_launches(runtime, ENDED_CASES[4:6], KV_CODES, ("simt",))


def rounding_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """Every kernel that rounds what it writes, on slots of the exact size."""
    rng = np.random.default_rng(0)
    tokens, heads, kv_heads, head_dim, block = 3, 4, 2, 24, 16
    columns, capacity = heads * head_dim, 70
    step = exact_step(runtime, capacity, tokens)

    def slot(shape: tuple[int, ...], dtype: type) -> SharedArray:
        memory = runtime.shared(shape, dtype)
        memory.array[...] = rng.standard_normal(shape)
        return memory

    for style, dtype in itertools.product(("vector", "simt"), (np.float32, np.float16)):
        layers = GlueKernels(runtime, dtype, dtype, style=style)
        residual, weight = slot((tokens, columns), np.float32), slot((columns,), np.float32)
        value, wide = slot((tokens, columns), dtype), slot((tokens, 2 * columns), dtype)
        query = slot((tokens, columns), np.float32)
        cache = slot((pages_of(capacity) * page_elements(kv_heads, head_dim, dtype),), dtype)
        out = runtime.shared((tokens, columns), dtype)
        codes, blocks = (runtime.shared((size,), np.uint8) for size in code_bytes(tokens, columns, block))
        rounded = RoundedInputs(codes, blocks, 8, block)
        delta, gate_up = (
            Segments(value, value, (columns,), (0,)),
            Segments(wide, wide, (columns,) * 2, (0, 0)),
        )
        norm = {"epsilon": 1e-5, "delta": delta, "rounded": rounded}
        layer, shape = KvLayer(cache, STEP_WORDS), HeadShape(heads, kv_heads, head_dim, capacity)
        sizes = {"shape": shape, "scores": Scores(0.2), "tokens": tokens}
        sizes |= {"rounded": rounded}
        for launches in (
            [rms_norm(layers, residual, weight, out, hidden=columns, tokens=tokens, **norm)],
            [final_norm(layers, residual, weight, out, step, rows=tokens, **norm)],
            [activate(layers, gate_up, out, tokens=tokens, intermediate=columns, rounded=rounded)],
            attend(layers, query, layer, out, step, parts=1, **sizes),
            attend(layers, query, layer, out, step, parts=2, **sizes),
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
        layers, limit = GlueKernels(runtime, dtype, dtype, style=style), largest_code(bits)
        steps = () if per_token else (0.7 / limit, 0.1 / limit, 0.3 / limit)
        grid = CodeGrid(1 / limit, 3 / limit, per_token, bits, steps)
        inputs, outputs = runtime.shared((tokens, columns), grid.dtype), runtime.shared(size, grid.dtype)
        factors, counts = (
            DeviceMemory(runtime.scratch(used), used) for used in (4 * tokens, 4 * COUNT_WORDS)
        )
        codes = NpuCodes(inputs, outputs, factors, counts, 0, grid, clamps)
        x = fill_slot(runtime, rng.standard_normal((tokens, columns)).astype(dtype))
        write_codes(layers, x, codes, tokens=tokens, columns=columns)()
        yield
        expected, exact_factors = grid.codes(x.array)
        np.testing.assert_array_equal(inputs.array, expected)
        outputs.array[...] = rng.integers(0, 1 << bits, size)
        y, own = runtime.shared(size, dtype), members if steps else (sum(members),)
        read_codes(layers, codes, y, tokens=tokens, member_rows=own)()
        yield
        np.testing.assert_array_equal(y.array, grid.values(outputs.array, exact_factors, own).astype(dtype))
        residual = fill_slot(runtime, rng.standard_normal((tokens, columns)).astype(np.float32))
        weight = fill_slot(runtime, np.ones(columns, np.float32))
        options = {"hidden": columns, "tokens": tokens, "epsilon": 1e-5, "rounded": codes}
        rms_norm(layers, residual, weight, x, **options)()
        yield
        np.testing.assert_array_equal(inputs.array, grid.codes(x.array)[0])


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
        saliency = runtime.shared((30,), np.float32) if drops else None
        given = TakenRows(fill_slot(runtime, taken), 3, counts, 0, saliency)
        experts = GpuExperts(runtime, dtype, dtype, style=style)
        weights = [random_weight(rng, width, hidden, weight) for _ in range(routing.experts)]
        options = {"activation_dtype": dtype, "integer_inputs": rounds}
        layer = GroupedLinear.pack(runtime, weights, experts=routing.experts, **options)
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
            output = Segments(x, x, (hidden,), (0,))
            weighing = () if saliency is None else (weigh_tokens(experts, output, saliency, tokens=tokens),)
            for launch in (
                *weighing,
                experts.route(logits, lists, shape=shape),
                experts.sort(lists, shape=shape, taken=given),
                experts.gather_taken(x, inputs, lists, given, **sizes),
                experts.gather(x, rows, lists, **sizes),
                layer.launch(rows, y, lists, shape=shape, style=style, label="experts"),
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
            norms = np.square(x.array.astype(np.float64)).sum(axis=1)
            order = np.argsort(-norms, kind="stable") if drops else np.arange(tokens)
            for token, slot in itertools.product(order, range(2)):
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
        sparse = GlueKernels(runtime, dtype, dtype, style=style)
        shape = SparseShape(HeadShape(4, 2, 20, 115), 40, 112)
        scores, keep = Scores(0.2, window, 3.0 if window else 0.0), (0.1, 0.7, 0.9, 1.0)
        own = SparsePass(shape, 75, 35, scores, (1, 0), keep, exponent=3, buckets=9)
        case = SparseCase(runtime, sparse, dtype, own, np.random.default_rng(0))
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
    programs.read_sources = lambda files: source
    slot = runtime.shared((4,), np.int32)
    runtime.launch(runtime.kernel(("racy.cl",), "racy"), [slot], (8,), (4,), "racy")()
    yield


def overrunning_launches(runtime: OpenClRuntime) -> Iterator[None]:
    """A write behind the buffer: the check must see it."""
    source = "__kernel void over(__global int *a) { a[get_global_id(0) + 1] = 1; }"
    programs.read_sources = lambda files: source
    slot = runtime.shared((4,), np.int32)
    runtime.launch(runtime.kernel(("over.cl",), "over"), [slot], (4,), (1,), "over")()
    yield


LAUNCHES: dict[str, Callable[[OpenClRuntime], Iterator[None]]] = {
    # Add a generator for new kernel files: it enqueues one small launch and yields, again and again.
    "linear": linear_launches,
    "ranges": range_launches,
    "variants": variant_launches,
    "layers": case_launches,
    "endings": ending_launches,
    "rounding": rounding_launches,
    "code cache": partial(case_launches, cases=CODE_CACHE, kv_dtype=KV_CODES),
    "NPU codes": npu_code_launches,
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
    from drivers import driver_variables  # which that process does not find

    if not SIMULATOR.exists():
        pytest.skip("needs oclgrind, such as `apt install oclgrind`")
    environment = os.environ | {
        **driver_variables(SIMULATOR),
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
