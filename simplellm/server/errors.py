"""Refusals and failures in OpenAI's form: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simplellm.errors import EngineError, RequestError

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY = {"Retry-After": "1"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        code = self.code or (None if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}


class ContextLengthError(RequestError):
    """A prompt that does not fit."""

    def at(self, index: int) -> ContextLengthError:
        return ContextLengthError(self.field, self.problem, index)


def unavailable(message: str) -> ApiError:
    """Not now: loading, or draining."""
    return ApiError(503, message, code="unavailable", headers=RETRY)


def translate(error: Exception) -> ApiError:
    """What the API says of an error. One that nobody raised on purpose is told without its text."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case EngineError():
            return ApiError(500, str(error), code="engine_error")
    return ApiError(500, f"the server failed ({type(error).__name__}); its log says more")
