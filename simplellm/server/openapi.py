"""The OpenAPI document, from the table of fields by which the door itself goes."""

from __future__ import annotations

from typing import Any

from simplellm.server.protocol import HONOURED, REFUSED, WITHOUT_EFFECT

_ARRAY = {"list": "array"}  # the other kinds have their names from JSON schema
_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
_MESSAGES = {"type": "array", "items": {"type": "object"}}


def document(version: str) -> dict[str, Any]:
    """What /openapi.json tells."""
    chat, text = _body("chat", "messages"), _body("completions", "prompt")
    tokens = {"type": "object", "properties": {"model": _TEXT, "prompt": _TEXT, "messages": _MESSAGES}}
    ids = {"type": "object", "properties": {"model": _TEXT, "tokens": _IDS}, "required": ["tokens"]}
    paths = {
        "/v1/chat/completions": _post("A chat completion", chat, stream=True),
        "/v1/chat/completions/render": _post("The prompt that a chat request makes", chat),
        "/v1/completions": _post("A text completion", text, stream=True),
        "/tokenize": _post("Token ids of a text or of messages", tokens),
        "/detokenize": _post("The text of token ids", ids),
        "/v1/models": _get("The model"),
        "/v1/models/{name}": _get("The model, by a name", name=True),
        "/health": _get("Whether the engine is alive"),
        "/ready": _get("Whether requests are taken"),
        "/metrics": _get("Prometheus metrics", kind="text/plain"),
        "/version": _get("The version"),
        "/openapi.json": _get("This document"),
    }
    key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": key}
    return {
        "openapi": "3.1.0",
        "info": {"title": "SimpleLLM", "version": version, "description": "OpenAI's API for gpt-oss. See docs/server.md."},
        "paths": paths,
        "components": {"securitySchemes": schemes, "schemas": {"Error": _error()}},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _body(kind: str, needed: str) -> dict[str, Any]:
    fields: dict[str, Any] = {name: _schema(told) for name, told in HONOURED[kind].items()}
    fields |= {name: {"description": "Has no effect."} for name in sorted(WITHOUT_EFFECT)}
    fields |= {name: {"description": f"Refused: {why}."} for name, (_, why) in REFUSED.items()}
    return {"type": "object", "properties": fields, "required": [needed]}


def _schema(kind: str) -> dict[str, Any]:
    """A field's; every one but the required may be null."""
    types = [_ARRAY.get(one, one) for one in kind.split(" or ")]
    return {"type": [*types, "null"]} | ({"items": {}} if "array" in types else {})


def _error() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    error = {"type": "object", "properties": {"message": _TEXT, "type": _TEXT, "param": text, "code": text}}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _responses(kinds: list[str]) -> dict[str, Any]:
    failure = {"description": "An error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    return {"200": {"description": "OK", "content": {kind: {} for kind in kinds}}, "default": failure}


def _post(summary: str, body: dict[str, Any], stream: bool = False) -> dict[str, Any]:
    kinds = ["application/json", "text/event-stream"] if stream else ["application/json"]
    content = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": {"summary": summary, "requestBody": content, "responses": _responses(kinds)}}


def _get(summary: str, kind: str = "application/json", name: bool = False) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": summary, "responses": _responses([kind])}
    if name:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    return {"get": told}
