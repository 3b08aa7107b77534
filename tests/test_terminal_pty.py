"""`simplellm chat` as a process, in a pipe and in a pseudo-terminal, with the built-in model."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.test_terminal import ROOT, TOOLS


def chat_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "simplellm", "chat", "--device", "cpu", "--max-context", "4096", *options]


def environment(home: Path, **more: str) -> dict[str, str]:
    return os.environ | {"XDG_STATE_HOME": str(home), "TERM": "xterm", "PYTHONPATH": str(ROOT)} | more


def test_in_a_pipe_lines_are_messages_and_there_are_no_prompts_or_escape_codes(tmp_path: Path) -> None:
    typed = b"hello\n\xff\xfe\n/save talk.json\n/quit\nnever read\n"
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    command = chat_command("--max-tokens", "16", "--seed", "1", "--system", "Be brief.", "--tools", "tools.json")
    ran = subprocess.run(command, input=typed, capture_output=True, timeout=120, cwd=tmp_path, env=environment(tmp_path))
    assert ran.returncode == 0 and ran.stderr.count(b"per second") == 2
    assert len(re.findall(rb"^\[(?:reasoning|answer)\]$", ran.stdout, re.MULTILINE)) >= 2
    assert b"\x1b" not in ran.stdout + ran.stderr and b"\n> " not in ran.stdout and b"Traceback" not in ran.stderr
    roles = [message["role"] for message in json.loads((tmp_path / "talk.json").read_text("utf-8"))]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert not (tmp_path / "simplellm").exists(), "a pipe's lines went into the history"


# A session's leader owns the first terminal that it opens, whose Ctrl-C then reaches it; a shell's background jobs ignore that
OWN_TERMINAL = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self.fd, child = pty.openpty()
        command = [sys.executable, "-c", OWN_TERMINAL, *command]
        self.process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True)
        os.close(child)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def interrupt(self, done: Callable[[], bool]) -> None:
        """Ctrl-C, which gets lost when it comes between Python's and readline's looking for it: so a moment later, or again."""
        for _ in range(6):
            time.sleep(0.3)
            self.type("\x03")
            self.read_until(done, 15)
            if done():
                return
        raise AssertionError(self.shown)

    def wait_for(self, words: str) -> None:
        self.read_until(lambda: words in self.shown)
        assert words in self.shown, self.shown

    def exit_code(self) -> int:
        self.read_until(self.has_left)
        os.close(self.fd)
        return self.process.wait(10)

    def has_left(self) -> bool:
        return self.process.poll() is not None

    def read_until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # the program has left
                    self.process.wait(10)
                    return


ENDLESS = """
import sys, time
from simplellm import LLM
from simplellm.terminal import Chat, Printer

with LLM(device="cpu", progress=False) as llm:
    never = dict.fromkeys(llm.tokenizer.special.values(), -100)  # no answer ends by itself
    printers = Printer(sys.stdout, False), Printer(sys.stderr, False)
    code = Chat(llm, input, *printers, sampling={"logit_bias": never, "max_tokens": 100_000}).run()
    deadline = time.monotonic() + 10
    while llm._engine.scheduler.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    print("left with", code, "busy" if llm._engine.scheduler.busy else "idle")
"""


def test_ctrl_c_in_a_terminal_cancels_the_request_and_the_chat_goes_on(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", ENDLESS], environment(tmp_path, TERM="dumb"))
    terminal.wait_for("> ")
    terminal.type("hello\r")
    terminal.wait_for("[answer]")
    terminal.interrupt(lambda: "[stopped, and kept" in terminal.shown)
    terminal.type(f"/save {tmp_path}/talk.json\r")
    terminal.wait_for("2 messages are in")
    terminal.type("/quit\r")
    assert terminal.exit_code() == 0 and "left with 0 idle" in terminal.shown
    asked, answered = json.loads((tmp_path / "talk.json").read_text("utf-8"))
    assert asked["content"] == "hello" and len(answered["content"]) > 100


def test_in_a_terminal_there_are_prompts_colours_and_a_history(tmp_path: Path) -> None:
    terminal = Terminal(chat_command("--max-tokens", "4", "--seed", "1"), environment(tmp_path, NO_COLOR=""))
    terminal.wait_for("> ")
    terminal.type("hello\r")
    terminal.read_until(lambda: re.search("per second[^>]*> ", terminal.shown) is not None)  # at the next prompt
    assert "\x1b[2m" in terminal.shown and "[answer]" not in terminal.shown
    terminal.interrupt(lambda: re.search("Ctrl-C again[^>]*> ", terminal.shown) is not None)
    terminal.interrupt(terminal.has_left)
    assert terminal.exit_code() == 0 and "Traceback" not in terminal.shown
    assert "hello" in (tmp_path / "simplellm" / "history").read_text()
