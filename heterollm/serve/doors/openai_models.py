"""The list of models, which has one: OpenAI's form, or Anthropic's for its clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from heterollm.serve.about import About
from heterollm.serve.bodies import check_model


def models(about: About, request: Request) -> dict[str, Any]:
    """Return the list of models."""
    model = _description(about, request)
    if _is_anthropics(request):
        return {"data": [model], "has_more": False, "first_id": about.name, "last_id": about.name}
    return {"object": "list", "data": [model]}


def model(about: About, request: Request) -> dict[str, Any]:
    """Return the model of a name.

    Raises:
        RequestError: There is no such model.
    """
    check_model(request.path_params["name"], about.name)
    return _description(about, request)


def _is_anthropics(request: Request) -> bool:
    # Both have /v1/models, with different types of the same fields.
    return "anthropic-version" in request.headers


def _description(about: About, request: Request) -> dict[str, Any]:
    if _is_anthropics(request):
        created = datetime.fromtimestamp(about.started_s, UTC).isoformat().replace("+00:00", "Z")
        return {
            "type": "model",
            "id": about.name,
            "display_name": about.name,
            "created_at": created,
            "max_input_tokens": about.llm.context,
            "max_tokens": about.llm.context,
        }
    return {
        "id": about.name,
        "object": "model",
        "created": about.started_s,
        "owned_by": "heterollm",
        "context_length": about.llm.context,
        "default_sampling": {**about.defaults.sampling, "max_tokens": about.defaults.max_tokens},
    }
