"""The registry of operators, which is the folder."""

from pathlib import Path

import numpy as np

import heterollm.kernels.operators
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import GlueKernels, OpenClRuntime
from heterollm.kernels.operators.data import fill_slot
from heterollm.kernels.operators.linear import LINEARS
from heterollm.kernels.operators.operator import Form, check_case
from heterollm.kernels.operators.registry import (
    name_in_profiles,
    operator_checks,
    operator_steps,
    timed_operators,
)


def test_every_file_of_an_operator_is_found():
    folder = Path(heterollm.kernels.operators.__file__).parent
    files = [path for path in folder.glob("*.py") if "STEPS: Final" in path.read_text("utf-8")]
    assert len(files) == 22
    assert {"norm", "rope", "head", "sum of experts", "selection"} <= set(operator_steps())


def test_forms_have_names_of_their_own():
    names = [name for timed, form in timed_operators().values() for name in [timed.forms[form]]]
    assert len(names) == len(set(names)) == 48
    assert name_in_profiles("rms_norm", Form(codes="uint8")) == "rms_norm_uint8"
    assert name_in_profiles("final_norm", Form("sum")) == "final_norm"


def test_every_check_names_an_output_of_its_case(runtime):
    kernels = GlueKernels(runtime, np.float32, np.float32)
    for case, output in {check.case: check.output for check in operator_checks()}.items():
        assert output in check_case(case, kernels, np.random.default_rng(0))


def test_every_check_passes_on_a_gpu_with_memory_of_its_own(runtime, taken_for_gpu):
    """A case of the doctor for each operator and for linears of each width, on the kernels of GPUs."""
    gpu = OpenClRuntime(runtime._device)
    assert (gpu.shared_memory, gpu.traits.is_cpu) == ("mapped", False)
    kernels = GlueKernels(gpu, np.float32, np.float32)
    for check in {check.operator: check for check in operator_checks()}.values():
        numbers = check_case(check.case, kernels, np.random.default_rng(0))[check.output]
        rows = [values.reshape(len(values), -1) for values in numbers]
        assert linear_errors(*rows).within("fp32"), check.title
    for case in {(case.weight.bits, case.integer_inputs): case for case in LINEARS}.values():
        assert linear_errors(*case.on_gpu(gpu, np.float32)).within("fp32"), case


def test_memory_of_its_own_shows_nothing_to_a_host_that_has_not_acquired_it(runtime, taken_for_gpu):
    memory = fill_slot(OpenClRuntime(runtime._device), np.arange(8, dtype=np.uint32))
    assert set(memory.array.view(np.uint8)) == {0xFF}
    memory.array[:] = 7  # as a test that forgets to acquire
    np.testing.assert_array_equal(memory.read(), np.arange(8))
