"""One check of `heterollm doctor`: the output of a processor against the exact result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from heterollm.base import HeteroLLMError
from heterollm.kernels.formats import LINEAR_NMSE, SINGLE_FACTOR, ComputeType, linear_errors
from heterollm.kernels.gpu import OpenClError
from heterollm.kernels.operators import Numbers

Processor = Literal["GPU", "NPU"]
Status = Literal["pass", "fail", "unverified", "not offered"]
SEED: Final = 20260101


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of a case that has no numbers to compare.

    Args:
        passed: Whether the case succeeded.
        message: The observation.
        fix: Next step for the user if the case failed.
        verified: Whether the observation shows an effect, and not just that nothing was refused.
    """

    passed: bool
    message: str
    fix: str = ""
    verified: bool = True


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one case.

    Args:
        part: ``GPU`` or ``NPU``.
        operator: The operator and its number format.
        case: Lengths, form and split.
        status: Whether the error is within the gate; ``unverified`` if there is no refusal and no effect;
            ``not offered`` if the processor lacks the operator.
        error: NMSE, the larger of the whole's and a tenth of the worst row's or token's; None if it raised or
            there are no numbers.
        gate: Largest error that passes.
        message: Why the case failed; the observation, where there are no numbers; or why the processor does
            not offer the operator.
        fix: Next step for the user.
    """

    part: Processor
    operator: str
    case: str
    status: Status
    error: float | None
    gate: float
    message: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class DoctorCase:
    """One check to run; where ``run`` is None the processor lacks the operator, for ``reason``."""

    part: Processor
    operator: str
    case: str
    run: Callable[[], Numbers | Seen] | None
    reason: str = ""


def run_case(case: DoctorCase, compute: ComputeType) -> Check:
    """Run one case and hold its error against the gate; a case that raises is a failed check."""

    def check(status: Status, error: float | None = None, message: str = "", fix: str = "") -> Check:
        return Check(
            case.part, case.operator, case.case, status, error, LINEAR_NMSE[compute], message=message, fix=fix
        )

    advice = _advice(case.part)
    if case.run is None:
        return check("not offered", message=case.reason)
    try:
        found = case.run()
        if isinstance(found, Seen):
            if not found.passed:
                return check("fail", None, found.message, found.fix)
            return check("pass" if found.verified else "unverified", None, found.message)
        if found[0].dtype == np.float16:  # keys and values of a float16 cache, beside float32 activations
            compute = "fp16"
        # Streams have an axis more, factors of tokens one fewer.
        errors = linear_errors(*(values.reshape(len(values), -1) for values in found))
    except HeteroLLMError as error:
        return check("fail", None, error.message, error.fix or advice)
    except OpenClError as error:
        return check("fail", None, str(error), advice)
    singles = errors.worst_row / SINGLE_FACTOR, errors.worst_token / SINGLE_FACTOR
    # NaN must win, which max() does not promise.
    worst = float(np.max([errors.nmse, *singles]))
    if errors.within(compute):
        return check("pass", worst)
    message = f"The numbers are wrong: NMSE {worst:.1e}, and the gate is {LINEAR_NMSE[compute]:.0e}."
    # JSON has no NaN; the message has.
    return check("fail", worst if np.isfinite(worst) else None, message, advice)


def _advice(processor: Processor) -> str:
    if processor == "GPU":
        return "Update the OpenCL driver, or use another OpenCL runtime."
    return "Use plan level gpu, and update onnxruntime, onnxruntime-qnn and the NPU driver."
