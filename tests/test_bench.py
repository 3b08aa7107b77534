"""`simplellm bench serve`: traces, figures on known moments, and each way to drive, down to servers that fail."""

from __future__ import annotations

import json
import math
import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from simplellm import LLM
from simplellm.bench.client import Client
from simplellm.bench.figures import Answer, figures, middle_rate, percentiles
from simplellm.bench.serve import EngineDriver
from simplellm.bench.trace import Arrival, draw_prompts, draw_trace, load_trace, parse_lengths, save_trace
from simplellm.cli import main
from simplellm.errors import EngineError, OptionError
from tests.server.harness import Served

FEW = ["--num", "5", "--prompt", "3-9", "--new", "4", "--device", "cpu", "--max-running", "8", "--passes", "1"]


def record(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


# Traces


def test_lengths_have_the_distribution_that_was_asked_for() -> None:
    random = Random(0)
    assert {parse_lengths("7")(random) for _ in range(9)} == {7}
    assert {parse_lengths("3-5")(random) for _ in range(200)} == {3, 4, 5}
    drawn = [parse_lengths("lognormal:1000:0.5")(random) for _ in range(20_000)]
    logs = [math.log(value) for value in drawn]
    assert abs(statistics.median(drawn) / 1000 - 1) < 0.03 and abs(statistics.stdev(logs) - 0.5) < 0.01
    cut = [parse_lengths("lognormal:1000:2:1200")(random) for _ in range(2000)]
    assert max(cut) == 1200 and min(cut) >= 1 and abs(sum(value < 1000 for value in cut) / 2000 - 0.5) < 0.05


@pytest.mark.parametrize(
    "text", ["", "x", "0", "5-3", "0-4", "1-2-3", "lognormal:9", "lognormal:0:1", "lognormal:9:1:0", "3:4"]
)
def test_lengths_that_mean_nothing(text: str) -> None:
    with pytest.raises(OptionError, match="length"):
        parse_lengths(text)


def test_arrivals_are_all_at_once_or_poisson_and_come_again_with_the_seed() -> None:
    one = parse_lengths("1")
    assert {arrival.at for arrival in draw_trace(50, None, one, one, 3)} == {0.0}
    trace = draw_trace(20_000, 40.0, one, one, 3)
    gaps = [b.at - a.at for a, b in zip(trace, trace[1:], strict=False)]
    assert trace[0].at == 0 and min(gaps) >= 0
    assert abs(statistics.mean(gaps) * 40 - 1) < 0.03 and abs(statistics.stdev(gaps) * 40 - 1) < 0.03
    assert draw_trace(20_000, 40.0, one, one, 3) == trace != draw_trace(20_000, 40.0, one, one, 4)
    for num, rate in ((0, None), (3, 0.0), (3, math.inf)):
        with pytest.raises(OptionError):
            draw_trace(num, rate, one, one, 3)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = draw_trace(30, 7.0, parse_lengths("1-99"), parse_lengths("lognormal:20:1"), 5)
    save_trace(tmp_path / "trace", trace)
    assert load_trace(tmp_path / "trace") == trace
    first = draw_prompts(trace, 300, 1)
    assert [len(ids) for ids in first] == [one.prompt for one in trace] and max(map(max, first)) < 300
    assert draw_prompts(trace, 300, 1) == first != draw_prompts(trace, 300, 2)


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"arrival_s": -1, "prompt_tokens": 1, "new_tokens": 1}',
                                  '{"arrival_s": 0, "prompt_tokens": 0, "new_tokens": 1}'])  # fmt: skip
def test_a_trace_with_a_wrong_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"arrival_s": 0, "prompt_tokens": 1, "new_tokens": 1}\n' + line)
    with pytest.raises(OptionError, match="trace:2"):
        load_trace(tmp_path / "trace")


# Figures


def test_percentiles_of_known_numbers() -> None:
    assert percentiles(list(range(101))) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([1.0, 2.0]) == {"p50": 1.5, "p90": 1.9, "p99": 1.99}
    assert percentiles([]) is None


def test_figures_of_known_moments() -> None:
    early = Answer(Arrival(1.0, 10, 4), sent=1.5, times=[2.0, 3.0, 4.0, 5.0])
    late = Answer(Arrival(3.0, 20, 2), sent=3.0, times=[6.0, 8.0])
    lost = Answer(Arrival(0.0, 30, 9), times=[99.0], error="gone")
    short = Answer(Arrival(0.0, 30, 9), times=[99.0])
    for answer in (early, late, lost, short):
        answer.end(len(answer.times))
    found = figures([early, late, lost, short])
    assert found["requests"] == 4 and found["failures"] == 2
    assert found["errors"] == {"gone": 1, "1 tokens came, 9 were asked for": 1}
    assert (found["output_tokens"], found["prompt_tokens"], found["seconds"], found["overall"]) == (6, 30, 8.0, 0.75)
    assert found["deliveries"] == 6
    assert found["first_s"]["p50"] == 2.0 and found["first_s"]["p99"] == 2.98  # of 1 and 3
    assert found["between_s"] == percentiles([1.0, 1.0, 1.0, 2.0]) and found["late_s"] == 0.5
    with pytest.raises(EngineError, match="all 2 requests failed"):
        figures([lost, short])


def test_the_steady_rate_is_that_of_the_middle_half() -> None:
    """100 tokens: 25 in the first 10 s, then 10 a second, then 25 in 100 s; and the same as chunks of five tokens."""
    times = [0.4 * i for i in range(1, 26)] + [10 + 0.1 * i for i in range(1, 51)] + [15 + 4.0 * i for i in range(1, 26)]
    assert middle_rate([Answer(Arrival(0, 1, 100), times=times, tokens=100)]) == pytest.approx(10)
    assert middle_rate([Answer(Arrival(0, 1, 100), times=times[4::5], tokens=100)]) == pytest.approx(10)
    assert middle_rate([Answer(Arrival(0, 1, 1), times=[1.0], tokens=1)]) == 0


# Driving


def test_the_engine_in_process(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "trace"
    assert main(["bench", "serve", str(tiny), *FEW, "--rate", "50", "--passes", "2", "--save-trace", str(saved)]) == 0
    told = record(capsys)
    (row,) = told["rows"]
    assert row["way"] == "engine" and row["failures"] == 0 and len(row["passes"]) == 2 and "ratios" not in told
    assert told["options"]["max_running"] == 8 and told["options"]["device"] == "cpu"
    assert row["output_tokens"] == 20 and row["overall"] > 0 and row["first_s"]["p50"] > 0 and row["between_s"]["p99"] > 0
    assert row["seconds"] >= load_trace(saved)[-1].at > 0
    assert main(["bench", "serve", str(tiny), *FEW, "--trace", str(saved)]) == 0
    again = record(capsys)
    assert again["trace"]["file"] == "trace" and again["rows"][0]["prompt_tokens"] == row["prompt_tokens"]


def test_a_request_without_room(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", str(tiny), *FEW, "--max-context", "256", "--prompt", "256"]) == 1
    assert "a request comes to 260 tokens, there is room for 256" in capsys.readouterr().err


def test_as_many_tokens_come_over_http_as_in_process(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = draw_trace(6, 40.0, parse_lengths("2-40"), parse_lengths("1-12"), 1)
    prompts = draw_prompts(trace, 256, 1)
    with LLM(str(tiny), device="cpu", progress=False, num_pages=64, max_running=8) as llm:
        alone = EngineDriver(llm._engine).run(trace, prompts)
        with Served(llm) as served:
            answers = Client(served.url + "/v1").run(trace, prompts)
            url = ["--url", served.url + "/v1/", "--vocab", "256", *FEW]
            assert main(["bench", "serve", *url]) == 0
            told = record(capsys)
            assert served.metric("vllm:generation_tokens_total") == sum(one.new for one in trace) + 20
            served.wait_until_idle()
    for answer, one in zip(answers, trace, strict=True):
        assert answer.error is None and answer.tokens == one.new and one.at <= answer.sent < answer.times[0]
        assert answer.times == sorted(answer.times) and 1 <= len(answer.times) <= one.new
    assert [answer.tokens for answer in alone] == [one.new for one in trace]
    assert told["model"] is None and told["rows"][0]["served"] == "gpt-oss-20b" and told["rows"][0]["output_tokens"] == 20


def test_both_ways_one_after_the_other(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", str(tiny), *FEW, "--both"]) == 0
    out = capfd.readouterr().out
    told = json.loads(out.splitlines()[-1])
    engine, server = told["rows"]
    assert (engine["way"], server["way"]) == ("engine", "server") and engine["output_tokens"] == server["output_tokens"] == 20
    assert engine["prompt_tokens"] == server["prompt_tokens"] and engine["failures"] == server["failures"] == 0
    (ratio,) = told["ratios"]
    assert ratio["overall"] == pytest.approx(server["overall"] / engine["overall"], abs=1e-3)
    assert out.count("tok/s overall") == 2 and "server / engine:" in out


# Servers that fail

MODELS = b'{"data": [{"id": "m"}]}'
CHUNK = b'data: {"choices": [{"text": "a"}]}\n\n'
WHOLE = CHUNK * 2 + b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'


@contextmanager
def answering(*pieces: bytes, status: bytes = b"200 OK", end: bool = True, silent: bool = False) -> Iterator[str]:
    """A server's url: it lists a model, then answers one request with these pieces of a chunked body. silent: then it waits."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + (b"0\r\n\r\n" if end else b"")
    replies = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS)]
    replies.append(b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + body)

    def serve() -> None:
        for reply in replies:
            connection = listener.accept()[0]
            with closing(connection):
                connection.recv(1 << 16)
                connection.sendall(reply)
                if silent and reply is replies[-1]:
                    connection.recv(1)  # until the client has left

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("pieces", "how", "words"),
    [
        ([CHUNK, CHUNK, USAGE, b"data: [DONE]\n\n"], {}, None),
        ([WHOLE[i : i + 7] for i in range(0, len(WHOLE), 7)], {}, None),  # cut anywhere, and no usage
        ([CHUNK, USAGE, b"data: [DONE]\n\n"], {}, None),  # two tokens in one chunk
        ([CHUNK, b"data: [DONE]\n\n"], {}, "1 tokens came, 2 were asked for"),
        ([CHUNK, CHUNK, USAGE], {}, "without [DONE]"),
        ([CHUNK, b'data: {"error": {"message": "broke"}}\n\ndata: [DONE]\n\n'], {}, "broke"),
        ([CHUNK, CHUNK], {"end": False}, "the connection ended"),
        ([CHUNK, b"data: {nonsense}\n\n"], {}, "not understood: JSONDecodeError"),
        ([b"wait ", b"a\nlittle"], {"status": b"429 Too Many"}, "429 wait a\nlittle"),
    ],
)
def test_what_a_server_may_answer(pieces: list[bytes], how: dict[str, Any], words: str | None) -> None:
    with answering(*pieces, **how) as url:
        (answer,) = Client(url).run([Arrival(0, 1, 2)], [[5]])
    assert answer.error is None if words is None else words in str(answer.error)
    assert words is not None or answer.tokens == 2


def test_nobody_answers() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EngineError, match="does not answer"):
        Client(f"http://127.0.0.1:{port}/v1")
    for url in ("https://127.0.0.1/v1", "127.0.0.1:8000", "http://a:b/v1"):
        with pytest.raises(OptionError, match="url"):
            Client(url)


def test_a_server_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplellm.bench.client.PATIENCE_S", 0.2)
    with answering(CHUNK, end=False, silent=True) as url:
        (answer,) = Client(url).run([Arrival(0, 1, 2)], [[5]])
    assert answer.error == "nothing came for 0.2 s" and answer.tokens == 1
