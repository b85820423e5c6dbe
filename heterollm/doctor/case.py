"""One check of `heterollm doctor`: what a part computes, held against the exact result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from heterollm.base import HeteroLLMError
from heterollm.kernels.cases import Numbers
from heterollm.kernels.formats import LINEAR_NMSE, SINGLE_FACTOR, ComputeType, linear_errors
from heterollm.kernels.gpu import OpenClError

__all__ = ["SEED", "Case", "Check", "Seen", "run_case"]

Part = Literal["GPU", "NPU"]
Status = Literal["pass", "fail", "not offered"]
SEED: Final = 20260101


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a case that has no numbers to compare.

    Args:
        passed: Whether all was as it should be.
        message: What was seen.
        fix: What to do where it was not.
    """

    passed: bool
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """What came out of one case.

    Args:
        part: ``GPU`` or ``NPU``.
        operator: The operator and its number format.
        case: Lengths, form and cut.
        status: Whether the error is within the gate; ``not offered`` where the part does not claim it.
        error: NMSE, the larger of the whole's and a tenth of the worst row's or token's; None if it raised or
            there are no numbers.
        gate: What the error is held to.
        message: What went wrong, what was seen where there are no numbers, or why the part does not offer it.
        fix: What to do about it.
    """

    part: Part
    operator: str
    case: str
    status: Status
    error: float | None
    gate: float
    message: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One check to run; without ``run`` the part does not offer the operator, for the reason given."""

    part: Part
    operator: str
    case: str
    run: Callable[[], Numbers | Seen] | None
    reason: str = ""


def run_case(case: Case, compute: ComputeType) -> Check:
    """Run one case and hold its error against the gate; a case that raises is a failed check."""
    gate = LINEAR_NMSE[compute]
    if case.run is None:
        return Check(case.part, case.operator, case.case, "not offered", None, gate, case.reason)
    try:
        found = case.run()
        if isinstance(found, Seen):
            status: Status = "pass" if found.passed else "fail"
            fix = "" if found.passed else found.fix
            return Check(case.part, case.operator, case.case, status, None, gate, found.message, fix)
        errors = linear_errors(*found)
    except HeteroLLMError as error:
        fix = error.fix or _advice(case.part)
        return Check(case.part, case.operator, case.case, "fail", None, gate, error.message, fix)
    except OpenClError as error:
        return Check(case.part, case.operator, case.case, "fail", None, gate, str(error), _advice(case.part))
    singles = errors.worst_row / SINGLE_FACTOR, errors.worst_token / SINGLE_FACTOR
    # NaN must win, which max() does not promise.
    worst = float(np.max([errors.nmse, *singles]))
    # JSON has no NaN; the message has.
    finite = worst if np.isfinite(worst) else None
    if errors.within(compute):
        return Check(case.part, case.operator, case.case, "pass", worst, gate)
    message = f"The numbers are wrong: NMSE {worst:.1e}, and the gate is {gate:.0e}."
    return Check(case.part, case.operator, case.case, "fail", finite, gate, message, _advice(case.part))


def _advice(part: Part) -> str:
    if part == "GPU":
        return "Update the OpenCL driver, or use another OpenCL runtime."
    return "Use plan level gpu, and update onnxruntime, onnxruntime-qnn and the NPU driver."
