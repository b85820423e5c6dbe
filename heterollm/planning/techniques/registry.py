"""The techniques that add entries to a finished plan, by the names of their records."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import structs

from heterollm.base import CalibrationError, OptionError
from heterollm.planning.techniques import experts, npu_attention, sparse_attention
from heterollm.solver import BEST_TECHNIQUES, TECHNIQUE_OPTIONS, Plan, PlanRequest

if TYPE_CHECKING:
    from heterollm.model import ModelConfig
    from heterollm.planning.profiled_model import ProfiledModel

Evidence = Mapping[str, Any]
"""Facts of a model that techniques place their entries by, calibrated or assumed, for those asked for."""


class PlanningTechnique(Protocol):
    """A module of this folder; ``evidence`` is of its own type."""

    def calibrated(self, path: str | Path | None, config: ModelConfig, request: PlanRequest | None) -> Any:  # noqa: ANN401
        """Return the evidence of a calibration; None where the technique is not asked for."""
        ...

    def placed(self, model: ProfiledModel, plan: Plan, request: PlanRequest, evidence: Any, /) -> Plan:  # noqa: ANN401
        """Return a plan, with chunks one after the other, with the entries that a request asks for."""
        ...

    def notes(self, model: ProfiledModel, plan: Plan, request: PlanRequest) -> tuple[str, ...]:
        """Return notes on a plan that is not what the user may expect, with the reason."""
        ...


TECHNIQUES: Final[Mapping[str, PlanningTechnique]] = {"attention": sparse_attention, "experts": experts}


def calibrated_evidence(
    path: str | Path | None, config: ModelConfig, request: PlanRequest | None
) -> Evidence:
    """Return what a calibration says for the techniques of a request.

    Raises:
        CalibrationError: The file cannot be read, is no calibration, or one of another model.
        OptionError: The model or the calibration lacks what a technique needs.
    """
    if request is None or BEST_TECHNIQUES not in request.techniques:
        found = {name: one.calibrated(path, config, request) for name, one in TECHNIQUES.items()}
        return {name: own for name, own in found.items() if own is not None}
    possible: dict[str, Any] = {}
    for technique, *_ in TECHNIQUE_OPTIONS.values():
        # Those that the model or the calibration cannot have are no choice.
        with contextlib.suppress(CalibrationError, OptionError):
            possible |= calibrated_evidence(path, config, structs.replace(request, techniques=(technique,)))
    return possible


def with_techniques(model: ProfiledModel, plan: Plan, request: PlanRequest, evidence: Evidence) -> Plan:
    """Return a plan with the entries of techniques, placed by their evidence.

    Args:
        model: The model on the profiled device.
        plan: The plan, with chunks one after the other.
        request: The request with its techniques.
        evidence: By technique.

    Raises:
        HeteroLLMError: The profile lacks times, or the NPU memory, for a technique.
    """
    for name, own in evidence.items():
        plan = TECHNIQUES[name].placed(model, plan, request, own)
    # The configuration is all the evidence that it needs.
    return npu_attention.placed(model, plan, request)


def technique_notes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Return the notes of all techniques on a plan; arguments as for :func:`with_techniques`."""
    found = tuple(note for one in TECHNIQUES.values() for note in one.notes(model, plan, request))
    return (*found, *npu_attention.notes(model, plan, request))
