"""The command line, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simplellm.cli import main


def test_demo_asks_three_questions_one_through_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    printed = capsys.readouterr()
    assert "[reasoning]" in printed.out and "478 + 256 = 734" in printed.out and "4, 9, 15, 31" in printed.out
    assert "[call of get_weather]" in printed.out and "4 degrees and rainy in Oslo" in printed.out
    assert printed.err.count("tokens per second") == 4


def test_generate_from_an_argument_and_from_a_pipe(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", str(tiny), "--max-tokens", "12", "--seed", "4", "--device", "cpu"]
    assert main([*command, "hello"]) == 0
    want = capsys.readouterr().out
    ran = subprocess.run([sys.executable, "-m", "simplellm", *command, "-"], input=b"hello", capture_output=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout.decode() == want and b"tokens per second" in ran.stderr


def test_info_says_what_fits(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny), "--memory-gb", "80"]) == 0
    assert "In 80 GB" in capsys.readouterr().out


def test_bench_host_ends_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("simplellm.bench.host.NUM_RUNNING", (1, 20))
    assert main(["bench", "host"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["us_per_step"].keys() == {"1", "20"} and record["us_per_step"]["20"]["step"] > 0


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["info", "no-such-folder"], "no-such-folder"),
        (["generate", "hello", "--model", "no-such-folder"], "no-such-folder"),
        (["generate", "hello", "--temperature", "9"], "temperature: 9.0 is out of range: at least 0, at most 2"),
        (["generate", "", "--device", "cpu"], "prompt: is empty"),
        (["generate", "hello", "--device", "tpu"], "device: 'tpu'"),
    ],
)
def test_a_users_mistake_is_one_line(command: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.startswith("simplellm: ") and printed.err.count("\n") == 1
    assert not printed.out


def test_importing_touches_neither_torch_nor_cuda() -> None:
    code = "import sys, simplellm, simplellm.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_reader_that_leaves_a_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m simplellm generate hello --max-tokens 400 --device cpu | head -c 1 > /dev/null"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert b"Traceback" not in ran.stderr
