"""Requests of cases, sent to a real server over HTTP, and what came of them in the words that checks use."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.cases.case import NotRun
from tests.server.harness import Served

NOT_YET = ("/v1/responses", "/v1/messages")


@dataclass
class Asked:
    """One request's answer."""

    body: Any
    path: str
    status: int
    text: str
    headers: dict[str, str]
    data: dict[str, Any] = field(default_factory=dict)  # of a JSON answer
    events: list[dict[str, Any]] = field(default_factory=list)  # of a stream

    @property
    def error(self) -> dict[str, Any]:
        return self.data.get("error") or next((event["error"] for event in self.events if "error" in event), {})

    @property
    def seen(self) -> dict[str, Any]:
        """The first choice: reasoning, content, tool_calls (how many), tool_name, finish_reason."""
        reasoning, content, calls, reason = "", "", list[str](), None
        for choice in self._choices():
            said = choice.get("message") or choice.get("delta") or {}
            reasoning += said.get("reasoning") or ""
            content += said.get("content") or choice.get("text") or ""
            calls += [name for call in said.get("tool_calls") or () if (name := call["function"].get("name"))]
            reason = choice["finish_reason"] or reason
        name = calls[0] if calls else None
        told = {
            "reasoning": reasoning,
            "content": content,
            "tool_calls": len(calls),
            "tool_name": name,
            "finish_reason": reason,
        }
        return told if self.status == 200 else dict.fromkeys(told, f"(status {self.status}: {self.error})")

    def _choices(self) -> list[dict[str, Any]]:
        parts = self.events or [self.data]
        return [choice for part in parts for choice in part.get("choices", ())[:1] if choice["index"] == 0]


def ask(server: Served, request: dict[str, Any], earlier: Sequence[Asked] = ()) -> Asked:
    """Send one request. NotRun for an endpoint that is not there yet."""
    body = filled(request.get("json"), server, earlier)
    path = request.get("path", "/v1/chat/completions")
    path = filled(path, server, earlier)
    if path.startswith(NOT_YET):
        raise NotRun(f"needs {path}, which is not there yet")
    content = {"content": request["body"]} if "body" in request else {} if body is None else {"json": body}
    answer = server.http.request(request.get("method", "POST"), path, headers=request.get("headers"), timeout=120, **content)
    asked = Asked(body, path, answer.status_code, answer.text, dict(answer.headers))
    kind = answer.headers.get("content-type", "")
    if kind.startswith("application/json"):
        asked.data = answer.json()
    elif kind.startswith("text/event-stream"):
        asked.events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return asked


def filled(value: Any, server: Served, earlier: Sequence[Asked] = ()) -> Any:
    """A case's value with `$repeat`, `$generate` and `$k.id` worked out."""
    match value:
        case {"$repeat": [text, count]}:
            return text * _count(count, server)
        case {"$generate": "nested_one_of", "depth": depth}:
            return nested_one_of(depth)
        case {"$generate": rule}:
            raise NotRun(f"unknown $generate {rule!r}")
        case dict():
            return {name: filled(item, server, earlier) for name, item in value.items()}
        case list():
            return [filled(item, server, earlier) for item in value]
        case str():
            return re.sub(r"\$(\d+)\.id", lambda match: str(earlier[int(match[1])].data["id"]), value)
    return value


def nested_one_of(depth: int) -> dict[str, Any]:
    """{type: string}, wrapped `depth` times as one of itself and an object that holds it."""
    schema: dict[str, Any] = {"type": "string"}
    for i in range(depth):
        key = f"k{i}"
        schema = {"oneOf": [schema, {"type": "object", "properties": {key: schema}, "required": [key]}]}
    return schema


def _count(count: Any, server: Served) -> int:
    if isinstance(count, int):
        return count
    if found := re.fullmatch(r"context_window\s*([+-]\s*\d+)?", str(count)):
        assert server.front.engine is not None
        return server.front.engine.max_context + int((found[1] or "0").replace(" ", ""))
    raise NotRun(f"unknown $repeat count {count!r}")
