"""`simplellm serve` as it is run: two processes, signals, kills. Whatever happens, neither process outlives the other."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from simplellm.cli import main
from simplellm.server import options
from simplellm.server.settings import is_loopback, model_names
from tests.server.harness import wait_for
from tests.server.process import BODY, ROOT, Process


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log"


def test_sigterm_drains_and_exits_with_zero(log: Path) -> None:
    served = Process(log)
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=BODY, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines)
        served.process.send_signal(signal.SIGTERM)
        assert '"finish_reason":"length"' in "".join(lines)
    assert served.ended() == 0
    assert "Oslo" not in log.read_text() and "Traceback" not in log.read_text()


def test_a_second_signal_does_not_wait(log: Path) -> None:
    served = Process(log)
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=BODY | {"max_tokens": 10**5}, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines)
        for _ in range(2):
            served.process.send_signal(signal.SIGINT)
            wait_for(lambda: not served.ready(), "it does not drain")
        assert '"error"' in "".join(lines)
    assert served.ended() == 0


@pytest.mark.parametrize("which", ["front", "engine"])
def test_killing_either_process_ends_the_other(log: Path, which: str) -> None:
    served = Process(log)
    os.kill(served.front if which == "front" else served.process.pid, signal.SIGKILL)
    assert served.ended() != 0


def test_a_signal_while_the_model_loads(log: Path) -> None:
    served = Process(log, wait=False)
    served.process.send_signal(signal.SIGTERM)
    assert served.ended() == 0


def test_tls(log: Path) -> None:
    """The certificate is checked, and the address that is told says https."""
    pem = str(Path(__file__).parent / "localhost.pem")
    context = ssl.create_default_context(cafile=pem)
    with Process(log, "--ssl-certfile", pem, "--ssl-keyfile", pem, verify=context) as served:
        assert served.url.startswith("https://") and served.chat().json()["usage"]["completion_tokens"] == 2
        with httpx.stream("POST", served.url + "/v1/chat/completions", json=BODY, verify=context, timeout=60) as response:
            assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")
        assert f"at https://127.0.0.1:{served.port}/v1" in log.read_text()
        with pytest.raises(httpx.ConnectError):  # nobody vouches for this certificate
            httpx.get(served.url + "/ready")
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url.replace("https", "http") + "/ready")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0


@pytest.mark.parametrize("key", ["", "secret-1"])
def test_the_warning_beyond_loopback(log: Path, key: str) -> None:
    """Loud where anybody may connect and no key is needed; with a key there is none, and without the key no answer."""
    with Process(log, "--host", "0.0.0.0", environment={"SIMPLELLM_API_KEY": key}) as served:
        told = log.read_text()
        assert ("WARNING: 0.0.0.0 can be reached from other machines and no API key is set" in told) is not bool(key)
        assert served.chat().status_code == (401 if key else 200) and (not key or key not in told)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0


def test_a_missing_checkpoint_is_one_line(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "simplellm", "serve", "no-such-folder", "--port", "0"], cwd=log.parent, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 1 and b"no-such-folder" in ran.stderr.splitlines()[-1] and b"Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--port", "99999"], "port: 99999"),
        (["--host", "no.such.host.invalid"], "port: cannot listen"),
        (["--api-key-file", "no-such-file"], "api_key_file"),
        (["--ssl-keyfile", "no-such-file"], "ssl_certfile"),
        (["--ssl-certfile", "no-such-file"], "no-such-file"),
        (["--drain-s", "-1"], "drain_s"),
        (["here", "--model", "there"], "model: PATH"),
    ],
)
def test_a_wrong_option_is_one_line(command: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *command]) == 1
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("simplellm.server.serve.PACKAGES", ("no_such_package",))
    assert main(["serve"]) == 1
    assert "pip install 'simplellm-engine[server]'" in capsys.readouterr().err


def test_names_of_a_checkpoint() -> None:
    names = ("gpt-oss-20b", "openai/gpt-oss-20b", "20b")
    assert model_names(Path("/models/gpt-oss-20b")) == names
    assert model_names(Path("/models/gpt-oss-20b/original")) == names
    assert model_names(Path("/hub/models--openai--gpt-oss-20b/snapshots/0123abc")) == names
    assert model_names(options.BUILTIN) == ("builtin", "openai/builtin")


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "[::1]", "localhost", "127.8.9.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")))


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    monkeypatch.setenv(options.KEY_VARIABLE, "three")
    assert options.read_keys(str(tmp_path / "keys")) == ("three", "one", "two")
