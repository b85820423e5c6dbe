"""The registry of operators, which is the folder."""

from pathlib import Path

import numpy as np

import heterollm.kernels.operators
from heterollm.kernels.gpu import GlueKernels
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
    assert len(files) == 20
    assert {"norm", "rope", "head", "sum of experts", "selection"} <= set(operator_steps())


def test_forms_have_names_of_their_own():
    names = [name for timed, form in timed_operators().values() for name in [timed.forms[form]]]
    assert len(names) == len(set(names)) == 47
    assert name_in_profiles("rms_norm", Form(codes="uint8")) == "rms_norm_uint8"
    assert name_in_profiles("final_norm", Form("sum")) == "final_norm"


def test_every_check_names_an_output_of_its_case(runtime):
    kernels = GlueKernels(runtime, np.float32, np.float32)
    for case, output in {check.case: check.output for check in operator_checks()}.items():
        assert output in check_case(case, kernels, np.random.default_rng(0))
