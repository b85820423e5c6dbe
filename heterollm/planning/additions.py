"""Passes that add to a plan of linear layers: sparse attention, and experts on the NPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heterollm.model import ModelConfig
from heterollm.planning.experts import calibrated_routing, expert_notes, with_expert_placements
from heterollm.planning.sparse_attention import attention_notes, calibrated_heads, with_sparse_attention
from heterollm.solver import AttentionHeads, Plan, PlanRequest

if TYPE_CHECKING:
    from heterollm.calibration import RoutingCalibration
    from heterollm.planning.profiled_model import ProfiledModel


def calibrated_parts(
    path: str | Path | None, config: ModelConfig, request: PlanRequest | None
) -> tuple[AttentionHeads | None, Sequence[RoutingCalibration] | None]:
    """Return what a calibration says of heads and of experts, each as far as a pass asks for it.

    Args:
        path: File of the calibration.
        config: The model.
        request: The request with its passes.

    Raises:
        CalibrationError: The file cannot be read, is no calibration, or lacks what a pass needs.
        OptionError: A pass is not for this model.
    """
    return calibrated_heads(path, config, request), calibrated_routing(path, config, request)


def with_additions(
    model: ProfiledModel,
    plan: Plan,
    request: PlanRequest,
    heads: AttentionHeads | None,
    routing: Sequence[RoutingCalibration] | None,
) -> Plan:
    """Return a plan with what passes add to it; errors are those of the two functions."""
    plan = with_sparse_attention(model, plan, request, heads)
    return with_expert_placements(model, plan, request, routing)


def addition_notes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Return notes on additions that a plan lacks, or that change results."""
    return (*attention_notes(model, plan, request), *expert_notes(model, plan, request))
