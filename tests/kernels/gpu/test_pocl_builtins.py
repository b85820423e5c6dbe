"""The declarations that stand for PoCL's header of all functions."""

import numpy as np
import pytest

from heterollm.kernels.gpu.binding import OpenClError, cl
from heterollm.kernels.gpu.pocl.builtins import WITHOUT_HEADER, builtin_declarations
from heterollm.kernels.gpu.programs import _is_pocl_3
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.operators.data import fill_slot

pytestmark = pytest.mark.cpu

LAYERS = ("common.h", "rounding.h", "glue.h")
SPARSE = (*LAYERS, "codes.h", "sparse.h")
HEADS = "-DHEAD_DIM=64 -DROWS=8 -DGROUP=2 -DMICRO=4 -DVECTORS=2"
SPARSE_HEADS = "-DHEAD_DIM=64 -DGROUP=2 -DNPU_CODES=8 -DBLOCK=32 -DFIRST=4 -DLAST=64"
PROGRAMS = {
    ("common.h", "linear.h", "linear_wide.h", "linear_vector.cl"): "-DBITS=4 -DACT_HALF",
    ("common.h", "linear.h", "linear_tiles.h", "linear_simt.cl"): "-DBITS=8 -DBLOCK=32",
    ("common.h", "linear.h", "linear_int8.h", "linear_wide.h", "linear_int8_vector.cl"): "-DBITS=4",
    ("common.h", "linear.h", "linear_int8.h", "linear_tiles.h", "linear_int8_simt.cl"): "-DBITS=4 -DBLOCK=32",
    ("common.h", "rounding.h", "quantize.cl"): "-DCODE_BITS=4",
    ("common.h", "linear.h", "embedding.cl"): "-DBITS=16",
    (*LAYERS, "codes.h", "rms_norm.cl"): "-DWG=64 -DNPU_CODES=16",
    (*LAYERS, "codes.h", "npu_codes.cl"): "-DWG=64 -DNPU_CODES=8",
    (*LAYERS, "pointwise.cl"): "-DWG=1",
    (*LAYERS, "gates.h", "delta_conv.cl"): "-DWG=64 -DTAPS=4",
    (*LAYERS, "delta_rule.cl"): "-DWG=64 -DGROUP=3 -DKEY_DIM=21 -DLANES=4 -DRUNS=1 -DBLOCK=1024",
    (*LAYERS, "gates.h", "output_gate.cl"): "-DWG=64 -DSILU -DNORMED",
    (*LAYERS, "latent.cl"): "-DWG=64 -DTURNS -DLATENT=512 -DROPE=64 -DKEY -DKV_HALF",
    (*LAYERS, "rope.cl"): "-DWG=64 -DKV_HALF -DPIECES=4 -DJOINT_NORM",
    (*LAYERS, "outliers.cl"): "-DWG=64 -DTOKENS=4 -DFETCHED",
    (*LAYERS, "experts.cl"): "-DWG=64 -DEXPERTS=60 -DCHOSEN=4 -DSCORING=2 -DSTEP=8 -DTAKEN -DCOMBINES",
    (*LAYERS, "attention.h", "attention_vector.cl"): f"-DWG=1 {HEADS} -DSOFT_CAP",
    (*LAYERS, "attention.h", "attention_simt.cl"): f"-DWG=64 {HEADS} -DKV_HALF -DSOFT_CAP",
    (*LAYERS, "attention.h", "attention_join.cl"): f"-DWG=64 {HEADS}",
    (*LAYERS, "attention_inputs.cl"): f"-DWG=64 {HEADS} -DRANGE_KEYS=512 -DKV_HALF",
    (*SPARSE, "score_codes.cl"): f"-DWG=64 {SPARSE_HEADS} -DBUCKETS=9",
    (*SPARSE, "score_estimate.cl"): f"-DWG=64 {SPARSE_HEADS}",
    (*SPARSE, "select.cl"): f"-DWG=64 {SPARSE_HEADS}",
    ("sync.cl",): "",
}


@pytest.fixture
def pocl(runtime):
    if not _is_pocl_3(runtime._device):
        pytest.skip("needs PoCL 3")
    return runtime


def build(runtime, source, *options):
    return cl.Program(runtime.context, source).build(options=[*options, "-cl-opt-disable"], cache_dir=False)


def test_every_kernel_is_built_without_the_header(pocl):
    for files, defines in PROGRAMS.items():
        build(pocl, f"{builtin_declarations()}\n{read_sources(files)}", *defines.split(), WITHOUT_HEADER)


def test_the_declarations_are_those_of_the_header(pocl):
    """The compiler refuses a function of the same name and arguments with another result."""
    kernel = "__kernel void f(__global float *a) { a[0] = exp(a[1]); }"
    build(pocl, f"{builtin_declarations()}\n{kernel}")
    with pytest.raises(OpenClError):
        build(pocl, f"int __attribute__((overloadable, const)) exp(float);\n{kernel}")


def test_other_functions_are_found(pocl):
    values = fill_slot(pocl, np.array([1.0, 20.0], np.float32))
    kernel = pocl.kernel_of_source("__kernel void f(__global float *a) { a[0] = log10(a[1]); }", "f")
    pocl.launch(kernel, (values,), (1,), (1,), "test")()
    pocl.finish()
    assert values.read()[0] == pytest.approx(np.log10(20))
