"""Every file of the cookbook runs unedited on the built-in model, is short, and stands in the cookbook's table."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import simplellm
from simplellm.text.harmony import conversation
from simplellm.text.parser import ToolCall
from tests.frameworks import installed

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "cookbook").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_runs_unedited_on_the_builtin_model(file: Path, tmp_path: Path) -> None:
    """In a folder and a locale of its own, as nothing may depend on these."""
    if file.stem == "langchain_client":
        installed("langchain_openai")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    ran = subprocess.run([sys.executable, file], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.strip() and b"Traceback" not in ran.stderr
    assert not list(tmp_path.iterdir()), "it left files behind"


def test_there_are_files_to_run() -> None:
    assert len(FILES) >= 6


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_short_and_says_how_to_run_it_with_a_real_model(file: Path) -> None:
    source = file.read_text("utf-8")
    assert len(source.splitlines()) <= 45
    assert f"`python cookbook/{file.name} ./gpt-oss-20b" in (ast.get_docstring(ast.parse(source)) or "")


def test_the_table_names_exactly_the_files() -> None:
    rows = [line for line in (ROOT / "cookbook" / "README.md").read_text("utf-8").splitlines() if line.startswith("| [")]
    assert sorted(row[3 : row.index("]")] for row in rows) == [file.name for file in FILES]


class CallingLLM:
    """Calls `weather` twice, with bad and with good arguments, then answers: what the random built-in model never does."""

    def __init__(self, *path: str):
        self._calls = [ToolCall("call_0", "weather", "[]"), ToolCall("call_1", "weather", '{"city": "Bonn"}')]

    def __enter__(self) -> CallingLLM:
        return self

    def __exit__(self, *_: object) -> None: ...

    def chat(self, messages: list[dict[str, Any]], **_: Any) -> Any:
        conversation(messages)  # refuses a result without a call, and what else the engine would
        calls = [self._calls.pop(0)] if self._calls else []
        reason = "tool_calls" if calls else "stop"
        content = "" if calls else f"{len(messages)} messages"
        answer = SimpleNamespace(tool_calls=calls, reasoning="Hm.", content=content, finish_reason=reason)
        return SimpleNamespace(result=lambda: [answer])


def test_the_tool_loop_feeds_results_back_until_there_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simplellm, "LLM", CallingLLM)
    monkeypatch.setattr(sys, "argv", ["tool_loop.py"])
    runpy.run_path(str(ROOT / "cookbook" / "tool_loop.py"))
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith('weather([]) = {"error":') and second.startswith('weather({"city": "Bonn"}) = {"city": "Bonn"')
    assert last == "answer: 5 messages"
