"""Errors in OpenAI's form."""

from __future__ import annotations

import logging
from typing import Any

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


def error_answer(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of the answer to a request that failed."""
    if isinstance(error, RequestError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return error.status, _body(str(error), kind, error.param, error.code), {}
    if isinstance(error, BusyError):
        return 503, _body(str(error), "server_busy", code=error.code), {"Retry-After": str(error.retry_s)}
    if isinstance(error, InputError | OptionError):
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return 400, _body(str(error), "invalid_request_error", code=code), {}
    if isinstance(error, HeteroLLMError):
        logger.warning("A request failed: %s", error)
        return 500, _body(str(error), "server_error", code=type(error).__name__), {}
    logger.error("A request failed: %r", error, exc_info=error)
    return 500, _body("The server failed; its log says why.", "server_error", code="internal_error"), {}


def _body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
