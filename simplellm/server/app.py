"""The routes. Each says what it takes and gives; the door (`door.py`, `protocol.py`) and answers have rooms of their own."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from simplellm import __version__
from simplellm.errors import SimpleLLMError
from simplellm.server import openapi, protocol
from simplellm.server.door import Door, encode, read_body
from simplellm.server.errors import RETRY, ApiError, translate
from simplellm.server.state import Front

log = logging.getLogger("simplellm.server")

Endpoint = Callable[[Front, Request], Awaitable[Any]]


def make_app(front: Front) -> ASGIApp:
    """The whole server, as ASGI."""
    routes = [
        Route("/v1/chat/completions", _route(front, chat_completions), methods=["POST"]),
        Route("/v1/chat/completions/render", _route(front, render), methods=["POST"]),
        Route("/v1/completions", _route(front, completions), methods=["POST"]),
        Route("/v1/models", _route(front, list_models), methods=["GET"]),
        Route("/v1/models/{name:path}", _route(front, get_model), methods=["GET"]),
        Route("/tokenize", _route(front, tokenize), methods=["POST"]),
        Route("/detokenize", _route(front, detokenize), methods=["POST"]),
        Route("/health", _route(front, health), methods=["GET"]),
        Route("/ready", _route(front, ready), methods=["GET"]),
        Route("/metrics", _route(front, metrics), methods=["GET"]),
        Route("/version", _route(front, version), methods=["GET"]),
        Route("/openapi.json", _route(front, describe), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route, Exception: _failed})
    return Door(app, front.settings, front.metrics.refused)


def _route(front: Front, endpoint: Endpoint) -> Callable[[Request], Awaitable[Any]]:
    """A Starlette endpoint: what it returns goes out as JSON, what it raises in the API's form."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Any:
        try:
            value = await endpoint(front, request)
        except (ApiError, SimpleLLMError) as error:
            refusal = translate(error)
            front.metrics.refused(refusal.status)
            return _json(refusal.body(), refusal.status, refusal.headers)
        return _json(value) if isinstance(value, dict) else value

    return answer


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}", code="no_such_route")
    return _json(told.body(), error.status_code, dict(error.headers or {}))


async def _failed(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path[:80], exc_info=error)
    return _json(translate(error).body(), 500)


async def _body(front: Front, request: Request) -> dict[str, Any]:
    return protocol.read_json(await read_body(request, front.settings))


async def chat_completions(front: Front, request: Request) -> Any:
    """A chat completion, or its chunks."""
    return await _answer(front, request, protocol.chat_call)


async def completions(front: Front, request: Request) -> Any:
    """A text completion, or its chunks."""
    return await _answer(front, request, protocol.completion_call)


async def _answer(front: Front, request: Request, read: Callable[[dict[str, Any]], protocol.Call]) -> Any:
    from simplellm.server.answers import Answers
    from simplellm.server.reply import Reply

    data = await read_body(request, front.settings)
    call = read(protocol.read_json(data))
    call.num_bytes = len(data)
    feed = await front.open(call)
    llm = front.ready_llm()
    answers = Answers(call, front.model if call.model is None else call.model, front.fingerprint, llm.tokenizer, feed.prompts)
    if call.kind == "chat" and call.logprobs:
        answers.content = llm.mark_content(feed)
    return Reply(front, call, feed, answers)


async def render(front: Front, request: Request) -> Any:
    """A chat request's prompt: its ids, and its text with control tokens spelled out. Nothing is generated."""
    ids = await _rendered(front, await _body(front, request))
    tokenizer = front.ready_llm().tokenizer
    return {
        "object": "chat.prompt",
        "model": front.model,
        "prompt_token_ids": ids,
        "prompt": tokenizer.decode(ids, skip_special=False),
    } | _room(front)


async def tokenize(front: Front, request: Request) -> Any:
    """Ids of `prompt`, or of the prompt that `messages` (and tools) make."""
    body = await _body(front, request)
    if "messages" in body:
        ids = await _rendered(front, body)
    else:
        front.check_model(_string(body, "model", None))
        ids = await asyncio.to_thread(front.ready_llm().tokenizer.encode, _string(body, "prompt"))
    return {"tokens": ids, "count": len(ids)} | _room(front)


async def detokenize(front: Front, request: Request) -> Any:
    """The text of `tokens`, control tokens spelled out."""
    body = await _body(front, request)
    front.check_model(_string(body, "model", None))
    llm, ids = front.ready_llm(), body.get("tokens")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < llm.config.vocab_size for token in ids):
        raise ApiError(400, f"tokens: a list of token ids below {llm.config.vocab_size} is needed", param="tokens")
    return {"prompt": llm.tokenizer.decode(ids, skip_special=False)}


async def _rendered(front: Front, body: dict[str, Any]) -> list[int]:
    """The prompt's ids, by the way that a request for an answer goes, its limits included."""
    call = protocol.chat_call(body)
    front.check_model(call.model)
    feed = await asyncio.to_thread(front.ready_llm().feed, "chat", call.prompt, call.settings)
    return list(feed.prompts[0])


def _string(body: dict[str, Any], name: str, default: str | None = "") -> Any:
    value = body.get(name)
    if value is None and default is None:
        return None
    if not isinstance(value, str):
        raise ApiError(400, f"{name}: a string is needed", param=name)
    return value


def _room(front: Front) -> dict[str, int]:
    assert front.engine is not None
    return {"max_model_len": front.engine.limit + 1}


async def list_models(front: Front, request: Request) -> Any:
    """The model, under the first of its names."""
    return {"object": "list", "data": [_model(front, front.model)]}


async def get_model(front: Front, request: Request) -> Any:
    """The model, by any of its names; some have a slash."""
    name = request.path_params["name"]
    front.check_model(name)
    return _model(front, name)


def _model(front: Front, name: str) -> dict[str, Any]:
    told = {"id": name, "object": "model", "created": front.created, "owned_by": "simplellm", "root": front.model}
    return told if front.engine is None else told | _room(front)


async def health(front: Front, request: Request) -> Any:
    """200 while the server loads, and then while the engine's heartbeat is fresh."""
    return _json({"status": front.status if front.healthy else "failed"}, 200 if front.healthy else 503)


async def ready(front: Front, request: Request) -> Any:
    """200 while requests are taken."""
    able = front.status == "ready" and front.healthy
    return _json({"status": front.status}, 200 if able else 503, None if able else RETRY)


async def metrics(front: Front, request: Request) -> Any:
    """Prometheus' text format."""
    return Response(front.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def version(front: Front, request: Request) -> Any:
    return {"version": __version__}


async def describe(front: Front, request: Request) -> Any:
    """OpenAPI, made from the door's own table."""
    return openapi.document(__version__)
