"""Errors of requests, and their forms by door."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
from starlette.responses import Response

from heterollm.base import ContextError, HeteroLLMError, InputError, OptionError
from heterollm.serve.admission import BusyError

logger = logging.getLogger(__name__)


class GoneError(Exception):
    """The client has left."""


class RequestError(HeteroLLMError):
    """A request that the server refuses.

    Args:
        message: The reason.
        fix: The next step.
        status: The HTTP status.
        param: The field of the request at fault.
        code: A word for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str = "",
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed, before a door gives it a form.

    Args:
        status: The HTTP status in OpenAI's API.
        message: The reason and the next step.
        kind: OpenAI's type of the error.
        param: The field at fault.
        code: A word for programs.
        headers: Headers of the answer.
    """

    status: int
    message: str
    kind: str = "server_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def failure_of(error: BaseException) -> FailedRequest:
    """Return the failure of a request, and log those that are not the client's."""
    if isinstance(error, RequestError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return FailedRequest(error.status, str(error), kind, error.param, error.code, headers)
    if isinstance(error, BusyError):
        headers = {"Retry-After": str(error.retry_s)}
        return FailedRequest(503, str(error), "server_busy", code=error.code, headers=headers)
    if isinstance(error, InputError | OptionError):
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return FailedRequest(400, str(error), "invalid_request_error", code=code)
    if isinstance(error, HeteroLLMError):
        logger.warning("A request failed: %s", error)
        return FailedRequest(500, str(error), code=type(error).__name__)
    logger.error("A request failed: %r", error, exc_info=error)
    return FailedRequest(500, "The server failed; its log says why.", code="internal_error")


def openai_error(failure: FailedRequest) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in OpenAI's form."""
    own = {"type": failure.kind, "param": failure.param, "code": failure.code}
    return failure.status, {"error": {"message": failure.message, **own}}


LLAMA_CPP_KINDS: Final = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def llama_cpp_error(failure: FailedRequest) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in the form of llama.cpp's server."""
    other = "unavailable_error" if failure.status == 503 else failure.kind
    kind = LLAMA_CPP_KINDS.get(failure.status, other)
    return failure.status, {"error": {"code": failure.status, "message": failure.message, "type": kind}}


ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
OVERLOADED: Final = 529
"""Anthropic's status of a server that is busy."""


def anthropic_error(failure: FailedRequest) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in Anthropic's form."""
    kind = ANTHROPIC_KINDS.get(failure.status, "invalid_request_error")
    # Clients look for these words before they shorten a dialogue.
    too_long = "prompt is too long: " if failure.code == "context_length_exceeded" else ""
    error = {"type": kind, "message": too_long + failure.message}
    status = OVERLOADED if failure.status == 503 else failure.status
    return status, {"type": "error", "error": error, "request_id": None}


def ollama_error(failure: FailedRequest) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in Ollama's form."""
    return failure.status, {"error": failure.message}


ErrorForm: TypeAlias = Callable[[FailedRequest], tuple[int, dict[str, Any]]]
FORMS: Final[Mapping[str, ErrorForm]] = {
    "/v1/messages": anthropic_error,
    "/api/": ollama_error,
    "/tokenize": llama_cpp_error,
    "/detokenize": llama_cpp_error,
    "/props": llama_cpp_error,
    "/slots": llama_cpp_error,
}
"""The forms of errors by the beginning of the path; all others have OpenAI's."""


def error_response(path: str, error: BaseException) -> Response:
    """Return the answer to a request that failed, in the form of its door."""
    failure = failure_of(error)
    form = next((form for begin, form in FORMS.items() if path.startswith(begin)), openai_error)
    status, body = form(failure)
    return json_response(body, status, failure.headers)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response in JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
