"""Ollama's lists of models, which have the one, and its version."""

from __future__ import annotations

import hashlib
import math
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request

from heterollm.serve.about import About
from heterollm.serve.bodies import BodyPart, decoded
from heterollm.serve.doors.ollama import LATEST, check_name
from heterollm.serve.errors import RequestError
from heterollm.tools import can_reason

API_VERSION: Final = "0.12.6"
"""The version of Ollama whose API this is: clients compare it with the first one that they can use."""

FOREVER: Final = "2318-01-01T00:00:00Z"
"""The time at which the model is unloaded."""


class _ShowBody(BodyPart, frozen=True, kw_only=True):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def tags(about: About, _request: Request) -> dict[str, Any]:
    """Return the list of models."""
    return {"models": [_model(about)]}


def processes(about: About, _request: Request) -> dict[str, Any]:
    """Return the list of loaded models."""
    own = {"expires_at": FOREVER, "size_vram": _file_bytes(about), "context_length": about.llm.context}
    return {"models": [{**_model(about), **own}]}


def version(_about: About, _request: Request) -> dict[str, Any]:
    """Return the version of Ollama's API."""
    return {"version": API_VERSION}


def show(about: About, content: bytes) -> dict[str, Any]:
    """Return the properties of a model.

    Raises:
        RequestError: There is no such model.
    """
    body = decoded(content, _ShowBody, about.llm.context)
    given = body.model or body.name
    if given is None:
        raise RequestError("model is required.", param="model")
    check_name(given, about.name)
    config, tokenizer = about.llm.config, about.llm.tokenizer
    names = {"repetition_penalty": "repeat_penalty"}
    sampling = {names.get(name, name): value for name, value in about.defaults.sampling.items()}
    kind = config.model_type
    return {
        "modelfile": "",
        "license": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in sampling.items()),
        "template": tokenizer.chat_template(),
        "modified_at": _started(about),
        "details": _details(about),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": _parameters(about),
            f"{kind}.context_length": about.llm.context,
            f"{kind}.embedding_length": config.hidden_size,
            f"{kind}.block_count": config.layers,
            f"{kind}.vocab_size": config.vocab_size,
        },
        "capabilities": [
            *("completion", "tools"),
            *(["thinking"] if can_reason(tokenizer) else []),
            *(["embedding"] if about.llm.pooling is not None else []),
        ],
    }


def _model(about: About) -> dict[str, Any]:
    name = about.name if ":" in about.name else about.name + LATEST
    size = _file_bytes(about)
    return {
        "name": name,
        "model": name,
        "modified_at": _started(about),
        "size": size,
        "digest": hashlib.sha256(f"{name} {size} {about.llm.config}".encode()).hexdigest(),
        "details": _details(about),
    }


def _details(about: About) -> dict[str, Any]:
    checkpoint, kind = about.llm.checkpoint, about.llm.config.model_type
    return {
        "parent_model": "",
        "format": "gguf" if checkpoint is not None and checkpoint.is_gguf else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": _short(_parameters(about)),
        "quantization_level": about.llm.plan.precision,
    }


def _parameters(about: About) -> int:
    checkpoint = about.llm.checkpoint
    return 0 if checkpoint is None else sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names)


def _short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _file_bytes(about: About) -> int:
    checkpoint = about.llm.checkpoint
    return 0 if checkpoint is None else checkpoint.file_bytes


def _started(about: About) -> str:
    return datetime.fromtimestamp(about.started_s, UTC).isoformat().replace("+00:00", "Z")
