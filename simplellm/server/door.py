"""What stands before every route: Host and Origin, the API key, CORS, and the size and type of bodies. Plain ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from simplellm.server.errors import ApiError
from simplellm.server.settings import Settings, is_loopback

WITHOUT_KEY = ("/health", "/ready", "/metrics")  # probes: numbers and states, nothing of any request
SEND = "simplellm.send"  # in a scope: the server's own `send`, for a stream's pieces; Starlette wraps it twice over
Headers = MutableMapping[str, str]

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Door:
    """Lets requests pass to `app`, or answers them itself. `refused` is told the status of every refusal."""

    def __init__(self, app: ASGIApp, settings: Settings, refused: Callable[[int], None]):
        self._app, self._settings, self._refused = app, settings, refused
        self._keys = [_digest(key) for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope[SEND] = send
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        allowed = origin is not None and bool({"*", origin} & set(self._settings.origins))
        if allowed:
            send = _with_headers(send, {"Access-Control-Allow-Origin": origin or "", "Vary": "Origin"})
        try:
            self._check_host(headers)
            self._check_origin(headers, allowed)
            if allowed and scope["method"] == "OPTIONS":
                return await respond(send, 200, {}, _preflight(headers))
            self._check_key(scope["path"], headers)
            self._check_length(headers)
        except ApiError as error:
            self._refused(error.status)
            return await refuse(send, error)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A page whose name was made to point here (DNS rebinding) tells that name."""
        host, settings = hostname("//" + headers.get("host", "localhost")), self._settings
        if (settings.loopback or settings.hosts) and not is_loopback(host) and host not in (*settings.hosts, settings.host):
            raise ApiError(403, f"host {host[:80]!r} is not this server's: allow it with --allow-host", code="host_not_allowed")

    def _check_origin(self, headers: Headers, allowed: bool) -> None:
        """A browser tells which page asks. Pages of this machine may, if the server is for this machine alone."""
        origin = headers.get("origin")
        if origin is None or allowed:
            return
        host = hostname(origin)
        if host != hostname("//" + headers.get("host", "")) and not (self._settings.loopback and is_loopback(host)):
            raise ApiError(403, f"origin {origin[:80]!r} is not allowed: see --allow-origin", code="origin_not_allowed")

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in WITHOUT_KEY:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        if not any([hmac.compare_digest(digest, known) for known in self._keys]):  # a list: all are compared, always
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:18]) > self._settings.max_body_mb * 1e6:
            raise too_large(self._settings)


def too_large(settings: Settings) -> ApiError:
    return ApiError(413, f"the body is above the limit of {settings.max_body_mb:g} MB", code="body_too_large")


async def read_body(request: Request, settings: Settings) -> bytes:
    """A JSON body's bytes. Raises ApiError if it is something else, too large, or does not come."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"content type {kind[:80]!r}: send application/json", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"content encoding {encoding[:80]!r}: send the body as it is", code="unsupported_media_type")
    parts, num_bytes, limit = [], 0, settings.max_body_mb * 1e6
    stream = aiter(request.stream())
    try:
        while True:
            async with asyncio.timeout(settings.stalled_s):
                part = await anext(stream)
            num_bytes += len(part)
            if num_bytes > limit:
                raise too_large(settings)
            parts.append(part)
    except StopAsyncIteration:
        return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.stalled_s:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body had come") from None


def encode(value: Any) -> bytes:
    """JSON as it goes out; a lone surrogate, which only a request can hold, becomes a question mark."""
    return _JSON.encode(value).encode("utf-8", "replace")


async def respond(
    send: Send, status: int, value: Any, headers: MutableMapping[str, str] | None = None, kind: str = "application/json"
) -> None:
    """A whole response."""
    body = value if isinstance(value, bytes) else encode(value)
    told = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
    await send({"type": "http.response.start", "status": status, "headers": raw(told)})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, error: ApiError) -> None:
    await respond(send, error.status, error.body(), error.headers)


def raw(headers: MutableMapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def hostname(address: str) -> str:
    """The host in an origin or in `//HOST:PORT`; "" if there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _with_headers(send: Send, headers: MutableMapping[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *raw(headers)]
        await send(message)

    return sending


def _preflight(headers: Headers) -> dict[str, str]:
    return {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "authorization, content-type, x-api-key"),
        "Access-Control-Max-Age": "600",
    }


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
