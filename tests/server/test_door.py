"""What is refused, how, and what a refusal leaves behind: nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from simplellm.server import protocol
from tests.chat import FINAL, THINK, TOOL, script
from tests.scripted import scripted_llm
from tests.server.harness import MODEL, USER, Served, events, post, wait_for

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted_llm(script(FINAL), max_context=2000) as llm, Served(llm, max_body_mb=1) as served:
        yield served


def refusal(response: Any, status: int) -> dict[str, Any]:
    """The error's object, which must have OpenAI's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"] and isinstance(body["error"]["type"], str)
    return body["error"]


BAD_CHAT: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages of text": ({"messages": ["hi"]}, "messages"),
    "conversations": ({"messages": [USER]}, "messages"),
    "a role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "temperature text": ({"temperature": "hot"}, "temperature"),
    "temperature list": ({"temperature": [1]}, "temperature"),
    "temperature range": ({"temperature": 9}, "temperature"),
    "stream number": ({"stream": 1}, "stream"),
    "max_tokens fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "max_tokens below zero": ({"max_tokens": -1}, "max_tokens"),
    "n zero": ({"n": 0}, "n"),
    "stop numbers": ({"stop": [1]}, "stop"),
    "stop of lists": ({"stop": [["a"]]}, "stop"),
    "bias ids": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias outside": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "tools object": ({"tools": {}}, "tools"),
    "audio": ({"audio": {"voice": "x"}}, "audio"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "best_of": ({"best_of": 3}, "best_of"),
    "usage option": ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    "effort": ({"reasoning_effort": "heroic"}, "reasoning_effort"),
    "seed": ({"seed": 2**70}, "seed"),
    "schema missing": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format"),
    "undeclared tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "tool_choice",
    ),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
}


@pytest.mark.parametrize("name", BAD_CHAT)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_chat_body_is_a_400_that_names_the_field(server: Served, name: str, stream: bool) -> None:
    body, field = BAD_CHAT[name]
    error = refusal(server.chat(**({"stream": stream} | body)), 400)
    assert error["param"] == field and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompts"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 99}, "top_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n"),
    ],
)
def test_a_bad_completion_body_is_a_400_that_names_the_field(server: Served, body: dict[str, Any], field: str) -> None:
    assert refusal(server.complete(**body), 400)["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b"\xff\xfe{}",
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 250 + b"1" + b"}" * 250,
    ],
    ids=range(11),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_no_json_object_is_a_400(server: Served, body: bytes, path: str) -> None:
    refusal(server.http.post(path, content=body, headers=JSON), 400)


def test_lone_surrogates_are_answered(server: Served) -> None:
    for body in ({"messages": [{"role": "user", "content": "\ud800"}]}, {"model": "\ud800", "messages": USER}):
        response = server.http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
        assert response.status_code in (200, 404) and response.json()


def test_other_types_sizes_methods_and_paths(server: Served) -> None:
    text = json.dumps({"messages": USER})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        refusal(server.http.post("/v1/chat/completions", content=text, headers={"Content-Type": kind}), 415)
    refusal(server.http.post("/v1/chat/completions", content=text, headers=JSON | {"Content-Encoding": "gzip"}), 415)
    assert server.http.post("/v1/chat/completions", content=text, headers={"Content-Type": "application/json; charset=utf-8"})
    large = json.dumps({"messages": USER, "user": "x" * 1_000_100})
    assert refusal(server.http.post("/v1/chat/completions", content=large, headers=JSON), 413)["code"] == "body_too_large"
    pieces = (large[at : at + 50_000].encode() for at in range(0, len(large), 50_000))  # no Content-Length
    refusal(server.http.post("/v1/chat/completions", content=pieces, headers=JSON), 413)
    refusal(server.http.get("/v1/chat/completions"), 405)
    refusal(server.http.get("/v1/nothing"), 404)
    server.alive()


def test_models_go_by_their_names(server: Served) -> None:
    assert refusal(server.chat(model="gpt-4"), 404)["code"] == "model_not_found"
    assert refusal(server.complete(model="gpt-4"), 404)["param"] == "model"
    for name in (MODEL, f"openai/{MODEL}", None):
        assert server.chat(model=name).json()["model"] == (name or MODEL)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_a_400_before_any_byte(server: Served, stream: bool) -> None:
    error = refusal(server.chat(messages=[{"role": "user", "content": "word " * 2100}], stream=stream), 400)
    assert error["code"] == "context_length_exceeded" and "1999" in error["message"]
    assert refusal(server.complete(prompt=["Once", "word " * 2100], stream=stream), 400)["code"] == "context_length_exceeded"
    server.wait_until_idle()


def test_max_tokens_beyond_the_room_is_clamped(server: Served) -> None:
    server.play([17196] * 3000)
    told = server.complete(max_tokens=100_000, ignore_eos=True).json()
    assert told["usage"]["total_tokens"] == 2000 and told["choices"][0]["finish_reason"] == "length"


def test_null_is_absent_and_unknown_fields_are_logged_once(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    nulls = dict.fromkeys(("tools", "tool_choice", "stop", "logit_bias", "response_format", "stream_options", "user", "audio"))
    assert server.chat(**nulls).status_code == 200
    with caplog.at_level(logging.INFO, "simplellm.server"):
        for _ in range(3):
            body = {"made_up": 1, "user": "u", "modalities": ["text"], "metadata": {"secret": "s"}}
            assert server.chat(response_format={"type": "text"}, **body).status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("field")]
    assert sorted(lines) == [
        "field 'made_up' is unknown and has no effect",
        "field 'metadata' has no effect",
        "field 'user' has no effect",
    ]
    assert "secret" not in caplog.text and "Oslo" not in caplog.text, "what was said is not logged"


def test_the_three_lists_do_not_overlap() -> None:
    known = protocol.HONOURED["chat"].keys() | protocol.HONOURED["completions"].keys()
    assert not known & protocol.REFUSED.keys() and not known & protocol.WITHOUT_EFFECT
    assert not protocol.REFUSED.keys() & protocol.WITHOUT_EFFECT


def test_the_documentation_lists_every_field() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    known = protocol.HONOURED["chat"].keys() | protocol.HONOURED["completions"].keys()
    missing = [name for name in (*known, *protocol.REFUSED, *protocol.WITHOUT_EFFECT) if f"`{name}`" not in text]
    assert not missing


def test_openapi_names_every_route_and_field(server: Served) -> None:
    told = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models/{name}", "/tokenize", "/ready"} <= told["paths"].keys()
    schema = told["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert protocol.HONOURED["chat"].keys() <= schema["properties"].keys()


def test_probes(server: Served) -> None:
    assert server.http.get("/ready").json() == server.http.get("/health").json() == {"status": "ready"}
    assert set(server.http.get("/version").json()) == {"version"}


def test_keys_hosts_and_origins() -> None:
    settings: dict[str, Any] = {"keys": ("secret-1", "other"), "origins": ("https://app.example",)}
    with scripted_llm(script(THINK)) as llm, Served(llm, **settings) as server:
        get = server.http.get

        def status(path: str = "/v1/models", **headers: str) -> int:
            return get(path, headers={name.replace("_", "-"): value for name, value in headers.items()}).status_code

        refusal(get("/v1/models"), 401)
        assert [status(Authorization=f"Bearer {key}") for key in ("secret-1", "other", "secret-2")] == [200, 200, 401]
        assert status(Authorization="bearer secret-1") == 200 and status(x_api_key="secret-1") == 200
        assert status(Authorization="Basic secret-1") == 401
        assert [status(path) for path in ("/health", "/ready", "/metrics", "/version")] == [200, 200, 200, 401]
        refusal(server.chat(), 401)
        key = {"x_api_key": "secret-1"}
        assert status(**key, Host="evil.example") == 403 and status(**key, Host=f"localhost:{server.port}") == 200
        assert status(**key, Origin="https://evil.example") == 403 and status(**key, Origin="null") == 403
        assert status(**key, Origin="http://localhost:3000") == 200 and status(**key, Origin=server.url) == 200
        ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        preflight = server.http.options("/v1/chat/completions", headers=ask)
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "https://app.example"
        asked = get("/v1/models", headers={"x-api-key": "secret-1", "Origin": "https://app.example"})
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        assert server.http.options("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    body = {"prompt": "Once", "max_tokens": 10**6, "ignore_eos": True, "stream": True}
    with scripted_llm([17196] * 10**6, max_running=1) as llm, Served(llm, max_queue=1) as server:
        clients = [post(server, body, "/v1/completions") for _ in range(2)]
        wait_for(lambda: server.front.num_open == 2, "two requests are not open")
        response = server.complete()
        assert refusal(response, 429)["type"] == "rate_limit_error" and response.headers["retry-after"]
        assert refusal(server.complete(prompt=["a"] * 2, max_tokens=1), 429)
        for client in clients:
            client.close()
        server.wait_until_idle()
        assert refusal(server.complete(prompt=["a"] * 3, max_tokens=1), 400), "it would never fit"
        assert server.complete(max_tokens=1).status_code == 200


def test_errors_are_counted_by_status(server: Served) -> None:
    before = server.metric("simplellm:refusals_total")
    server.chat(n=0)
    assert server.metric("simplellm:refusals_total") == before + 1


def test_streams_end_with_done(server: Served) -> None:
    server.play(script(FINAL))
    response = server.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [part["object"] for part in events(response)] == ["chat.completion.chunk"] * len(list(events(response)))
