"""A backend without some forms: it offers the others, files apart, and is the other in all else."""

from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import FewerForms, FfnShape, LinearShape
from heterollm.kernels.ops import WeightFormat

INT4 = WeightFormat(4, 128)


def test_what_is_left_out_is_not_offered_and_the_rest_is():
    device = open_device("sim:snapdragon-8gen3")
    npu = device.npu
    fewer = FewerForms(npu, ("k_chunked", "ffn_k_chunked"))
    linear, block = LinearShape(INT4, 14336), FfnShape(INT4, 4096, 8192, "silu")
    assert npu.forms(linear, 256) == ("matmul_nbits", "k_chunked")
    assert fewer.forms(linear, 256) == ("matmul_nbits",)
    assert npu.forms(block, 256) == ("ffn", "ffn_k_chunked")
    assert fewer.forms(block, 256) == ("ffn",)
    assert fewer.standard_lengths == npu.standard_lengths
    assert fewer.time_kind == "simulated"
    # What is measured on it is filed apart from what is measured on the other.
    before = device.fingerprint()
    device.npu = fewer
    assert device.fingerprint() != before
