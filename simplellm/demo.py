"""`simplellm demo`: the terminal chat with the built-in model, its part of the user typed by this file."""

from __future__ import annotations

import sys

from simplellm.api import LLM
from simplellm.terminal import Chat, Printer, has_colour

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TYPED = (
    "What is 478 + 256?",
    "Sort these numbers: 31, 4, 15, 9.",
    "What is the weather in Oslo?",
    '{"temperature": 4, "sky": "rainy"}',  # what the call returns, then an empty line
    "",
)


def run() -> int:
    """Three questions, reasoning shown, the last one through a tool; then the exit code."""
    typed = iter(TYPED)

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        print(f"{prompt}{line}", flush=True)
        return line

    with LLM(progress=False) as llm:
        printers = Printer(sys.stdout, has_colour(sys.stdout)), Printer(sys.stderr, has_colour(sys.stderr))
        return Chat(llm, read, *printers, tools=[WEATHER], sampling={"temperature": 0.0, "max_tokens": 400}).run()
