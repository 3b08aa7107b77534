"""Clients that leave, read slowly, send rubbish or are many; engines that fail; draining. Nothing may be left of any of it."""

from __future__ import annotations

import json
import logging
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from simplellm import LLM
from simplellm.generation import Chunk
from simplellm.request import Logprob
from simplellm.server.remote import merge
from simplellm.text.parser import ContentDelta
from tests.chat import FINAL, THINK, script
from tests.scripted import scripted_llm
from tests.server.harness import USER, Served, events, head, post, wait_for

LONG = {"messages": USER, "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    """The built-in model, with room for one request's long prompt and few others."""
    with LLM(device="cpu", progress=False, num_pages=600, max_running=2, token_budget=64) as llm, Served(llm) as served:
        yield served


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_while_tokens_come(real: Served, stream: bool, n: int) -> None:
    before = real.metric("simplellm:requests_aborted_total")
    sock = post(real, LONG | {"stream": stream, "n": n})
    generated = real.metric("vllm:generation_tokens_total")
    wait_for(lambda: real.metric("vllm:generation_tokens_total") > generated + 3, "no token comes")
    assert not stream or sock.recv(1)
    sock.close()
    real.wait_until_idle()
    assert real.metric("simplellm:requests_aborted_total") == before + n
    real.alive()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_prompt_is_read(real: Served, stream: bool) -> None:
    """A long prompt, 64 tokens a step: it leaves after the first steps."""
    scheduler = real.llm._engine.scheduler
    sock = post(real, LONG | {"messages": [{"role": "user", "content": "word " * 4000}], "stream": stream})
    wait_for(lambda: any(request.computed > 0 for request in list(scheduler.running)), "it does not run")
    (request,) = list(scheduler.running)
    sock.close()
    real.wait_until_idle()
    assert request.computed < len(request.prompt), "it left too late to prove anything"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits(real: Served, stream: bool) -> None:
    scheduler = real.llm._engine.scheduler
    running = [post(real, LONG | {"stream": True}) for _ in range(2)]
    assert all(sock.recv(1) for sock in running)
    waiting = post(real, LONG | {"stream": stream})
    wait_for(lambda: scheduler.waiting, "it does not wait")
    waiting.close()
    wait_for(lambda: not scheduler.waiting, "it still waits")
    assert len(scheduler.running) == 2, "the others go on"
    for sock in running:
        sock.close()
    real.wait_until_idle()


def test_a_client_that_leaves_while_its_grammar_is_compiled(real: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not know the request yet: it must never begin. Others do not wait for the grammar."""
    worker, begun, go = real.llm._engine.worker, threading.Event(), threading.Event()
    compiled = worker.new_constraint
    assert compiled is not None

    def slowly(rules: Any) -> Any:
        begun.set()
        assert go.wait(30)
        return compiled(rules)

    monkeypatch.setattr(worker, "new_constraint", slowly)
    sock = post(real, {"messages": USER, "response_format": {"type": "json_object"}})
    assert begun.wait(30)
    real.alive()
    sock.close()
    wait_for(lambda: real.host._preparing and None not in real.host._preparing.values(), "the abort does not come")
    steps = real.metric("vllm:generation_tokens_total")
    go.set()
    real.wait_until_idle()
    assert real.metric("vllm:generation_tokens_total") == steps


def test_the_tables_of_grammars_are_made_before_the_first_request() -> None:
    """In both processes, as both use them."""
    with LLM(device="cpu", progress=False, num_pages=300) as llm, Served(llm) as server:
        assert server.front.llm is not None and server.front.llm._grammars._vocabulary is not None
        wait_for(lambda: llm._grammars._vocabulary is not None, "the engine's are not made")
        assert server.metric("vllm:prompt_tokens_total") == 0


def test_gauges_follow_while_idle(real: Served) -> None:
    sock = post(real, LONG | {"stream": True})
    wait_for(lambda: real.metric("vllm:num_requests_running") == 1, "the gauge does not rise")
    assert real.metric("vllm:kv_cache_usage_perc") > 0
    sock.close()
    wait_for(lambda: real.metric("vllm:num_requests_running") == 0, "the gauge does not fall")
    assert real.metric("vllm:kv_cache_usage_perc") == 0


@pytest.fixture
def roomy() -> Iterator[Served]:
    """The built-in model with its defaults."""
    with LLM(device="cpu", progress=False, num_pages=600) as llm, Served(llm) as served:
        yield served


BAD = [
    b"{",
    b'{"prompt": NaN}',
    b'{"prompt": 7}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "model": "gpt-4"}',
    b"\xff",
    b"[]",
]
READER = """
import socket, sys, time
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.sendall(bytes.fromhex(sys.argv[2]))
sock.recv(1)
print("it reads", flush=True)
time.sleep(600)
"""


class Crowd:
    """Clients of every kind, all at once: each is a function of its number that must find what it should."""

    def __init__(self, server: Served, num: int):
        self.server, self.problems, self._rng = server, list[str](), random.Random(5)
        self._together = threading.Barrier(num)
        self._http = httpx.Client(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None))
        self.kinds = [self.leaves, self.asks_badly, self.reads_all, self.babbles, self.waits, self.reads_slowly, self.is_reset]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num)]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "a client waits for ever"
        self._http.close()

    def _run(self, number: int) -> None:
        body = {"prompt": "Once", "max_tokens": 6 + number % 20, "stream": True, "ignore_eos": True, "seed": number}
        kind = self.is_killed if number % 50 == 7 else self.kinds[number % len(self.kinds)]
        try:
            self._together.wait(60)
            kind(number, body)
        except Exception as error:
            self.problems.append(f"client {number} {kind.__name__}: {error!r}")

    def leaves(self, number: int, body: dict[str, Any]) -> None:
        sock = self._post(body)
        sock.recv(self._rng.randrange(1, 400))
        sock.close()

    def asks_badly(self, number: int, body: dict[str, Any]) -> None:
        content, kind = BAD[number % len(BAD)], {"Content-Type": "application/json"}
        assert self._http.post("/v1/completions", content=content, headers=kind).status_code in (400, 404)

    def reads_all(self, number: int, body: dict[str, Any]) -> None:
        text = self._http.post("/v1/completions", json=body).text
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text

    def babbles(self, number: int, body: dict[str, Any]) -> None:
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=300)
        sock.sendall(self._rng.randbytes(40) + b"\r\n\r\n")
        sock.close()

    def waits(self, number: int, body: dict[str, Any]) -> None:
        told = self._http.post("/v1/completions", json=body | {"stream": False}).json()
        assert told["usage"]["completion_tokens"] == body["max_tokens"]

    def reads_slowly(self, number: int, body: dict[str, Any]) -> None:
        sock, text = self._post(body, buffer=2048), b""
        while b"data: [DONE]" not in text:
            part = sock.recv(200)
            assert part, "it was cut off"
            text += part
            time.sleep(0.002)
        sock.close()

    def is_reset(self, number: int, body: dict[str, Any]) -> None:
        """As when its machine dies: the connection is not closed, it is gone."""
        sock = self._post(body)
        if number % 2:
            sock.recv(self._rng.randrange(1, 400))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    def is_killed(self, number: int, body: dict[str, Any]) -> None:
        """A process, in the middle of its answer."""
        request = head("/v1/completions", data := json.dumps(body | {"max_tokens": 10**5}).encode()) + data
        command = [sys.executable, "-S", "-c", READER, str(self.server.port), request.hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"it reads\n"
            process.kill()

    def _post(self, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
        sock = post(self.server, body, "/v1/completions", buffer)
        sock.settimeout(300)
        return sock


def test_two_hundred_clients_of_every_kind_at_once(roomy: Served) -> None:
    crowd = Crowd(roomy, 200)
    crowd.run()
    assert not crowd.problems
    roomy.wait_until_idle()
    roomy.alive()


def test_a_slow_reader_gets_fewer_larger_pieces() -> None:
    """Pieces that wait are joined per answer, in order, with all ids and log-probabilities."""
    pieces = [Chunk(0, i % 2, [ContentDelta(str(i))], [i], [Logprob(i, -1.0)], "stop" if i > 7 else None) for i in range(10)]
    first, second = merge(pieces)
    assert (first.text, second.text) == ("02468", "13579") and first.finish_reason == second.finish_reason == "stop"
    assert first.token_ids == [0, 2, 4, 6, 8] and [entry.token for entry in second.logprobs or ()] == [1, 3, 5, 7, 9]


def test_silence_is_filled_with_comments() -> None:
    """A prompt that takes long: the connection is kept alive, and the stream is whole."""
    with LLM(device="cpu", progress=False, num_pages=400, token_budget=16) as llm, Served(llm, keep_alive_s=0.01) as server:
        response = server.chat(messages=[{"role": "user", "content": "word " * 300}], max_tokens=2, stream=True)
        assert ": keep-alive\n\n" in response.text and list(events(response))[-1]["choices"][0]["finish_reason"]


def test_a_reader_that_reads_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its buffers are full, so the server waits for it: not for ever."""
    caplog.set_level(logging.INFO, "simplellm.server")
    with scripted_llm([17196] * 12_000, max_context=14_000) as llm, Served(llm, stalled_s=0.3) as server:
        body = {"prompt": "Once", "max_tokens": 12_000, "stream": True, "ignore_eos": True, "logprobs": 20}
        sock = post(server, body, "/v1/completions", buffer=2048)
        wait_for(lambda: server.front.feeds, "it did not begin")
        server.wait_until_idle()
        wait_for(lambda: "end='client left'" in caplog.text, "it was served to the end")
        sock.close()
        server.alive()


def test_a_body_that_does_not_come_is_given_up() -> None:
    with scripted_llm([]) as llm, Served(llm, stalled_s=0.2) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        assert b" 408 " in sock.recv(100)
        sock.close()


LOST = "CUDA error: an illegal memory access was encountered"


def test_a_request_whose_step_fails_is_told_and_nothing_else_happens() -> None:
    """Before the first byte it is a 500; after it, the stream's last event. Pages and rows come back, the engine goes on."""
    with scripted_llm(script(FINAL)) as llm, Served(llm) as server:
        server.play([*script(THINK), RuntimeError("a kernel failed")], script(FINAL))
        *_, last = events(server.chat(stream=True))
        assert last["error"]["message"].endswith("RuntimeError: a kernel failed") and last["error"]["code"] == "engine_error"
        server.play([RuntimeError("at once")], script(FINAL))
        response = server.chat(stream=True)
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert server.metric("simplellm:requests_failed_total") == 2
        server.wait_until_idle()
        server.alive()
        assert server.chat().json()["choices"][0]["message"]["content"] == "It is cold."


@pytest.mark.parametrize("error", [RuntimeError(LOST), RuntimeError("again and again")], ids=["lost", "in a row"])
def test_an_engine_that_cannot_go_on_tells_everybody_and_ends_the_server(error: Exception) -> None:
    """A lost device at once; else three steps in a row, between which none was good."""
    with scripted_llm([error]) as llm, Served(llm) as server:
        for _ in range(1 if "CUDA" in str(error) else 3):
            assert server.front.failure is None
            response = server.chat(stream=True)
            assert response.status_code == 500 and str(error) in response.json()["error"]["message"]
        wait_for(lambda: server.front.status == "failed", "it does not fail")
        server._threads[0].join(30)
        assert server.well is False and not server.front.healthy


def test_health_says_that_the_engine_has_failed() -> None:
    """As long as there is somebody to ask: the server ends soon after."""
    with scripted_llm([]) as llm, Served(llm) as server:
        body = {"prompt": "Once", "max_tokens": 10**5, "ignore_eos": True, "stream": True}
        server.play([17196] * 1000 + [RuntimeError(LOST)])
        sock = post(server, body, "/v1/completions")
        wait_for(lambda: server.front.failure is not None, "it does not fail")
        try:
            assert server.http.get("/health").status_code == 503
        except httpx.TransportError:  # it has ended already
            assert not server.front.healthy
        sock.close()


def test_an_answer_that_cannot_be_read_hurts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_llm(script(FINAL)) as llm, Served(llm) as server:
        assert server.front.llm is not None
        feed = server.front.llm.feed

        def broken(*args: Any) -> Any:
            made = feed(*args)
            monkeypatch.setattr(type(made.answers[0].reader), "push", lambda *_: 1 / 0)
            return made

        monkeypatch.setattr(server.front.llm, "feed", broken)
        assert server.chat().status_code == 500
        monkeypatch.undo()
        server.wait_until_idle()
        server.alive()


@pytest.mark.parametrize("stream", [True, False])
def test_a_mistake_of_ours_is_told_and_logged(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_llm(script(FINAL)) as llm, Served(llm) as server:
        monkeypatch.setattr("simplellm.server.answers.usage", lambda outputs: 1 / 0)
        response = server.chat(stream=stream, stream_options={"include_usage": True})
        error = list(events(response))[-1]["error"] if stream else response.json()["error"]
        assert error["type"] == "server_error" and "division" not in error["message"]
        monkeypatch.undo()
        server.wait_until_idle()
        server.alive()


@pytest.mark.parametrize("drain_s", [30.0, 0.0])
def test_draining(drain_s: float) -> None:
    """Answers that run end whole, or with an error once the time is over; new ones are refused; then the server ends."""
    with (
        LLM(device="cpu", progress=False, num_pages=300) as llm,
        Served(llm, drain_s=drain_s) as server,
        server.http.stream("POST", "/v1/chat/completions", json=LONG | {"max_tokens": 120, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.call(server.front.ask_to_drain)
        if drain_s:
            wait_for(lambda: server.front.draining, "it does not drain")
            refused = server.chat()
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert server.http.get("/ready").status_code == 503 and server.http.get("/health").status_code == 200
        rest = "\n".join(lines)
        assert ('"finish_reason":"length"' in rest) is bool(drain_s) and ('"error"' in rest) is not bool(drain_s)
        assert rest.rstrip().endswith("data: [DONE]")
        server._threads[0].join(30)
        assert server.well is True
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)
