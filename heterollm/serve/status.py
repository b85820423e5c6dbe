"""The state of a server for its page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heterollm.llm import LLM

__all__ = ["plan_status"]


def plan_status(llm: LLM) -> dict[str, Any]:
    """Return the plan of a model for the page."""
    return {"plan": llm.plan.level, "device": llm.device.name}
