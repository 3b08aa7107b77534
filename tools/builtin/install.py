"""Ship a trained model: `python -m tools.builtin.install FOLDER` copies it to simplellm/builtin and stores its answers.

The answers are those of transformers on the same weights, greedy and in float32: what tests/test_builtin.py holds the
engine to. The model's README is written by hand and stays.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from simplellm.text.harmony import render
from simplellm.text.parser import stop_ids
from simplellm.text.tokenizer import Tokenizer
from tools.builtin.judge import LONGEST

ROOT = Path(__file__).resolve().parents[2]
BUILTIN = ROOT / "simplellm" / "builtin"
ANSWERS = ROOT / "tests" / "builtin-answers.json"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
RESULT = '{"temperature": 21, "condition": "sunny"}'


def _user(*turns: str) -> list[dict[str, Any]]:
    """What the user and the assistant said, in turn."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]


IN_JSON = {"role": "system", "content": 'Answer in JSON with the key "answer".'}
CALLED = [*_user("What is the weather in Paris?"), {"role": "assistant", "tool_calls": [CALL]}]
CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {"messages": _user("What is 23 + 48?"), "reasoning_effort": "low"},
    {"messages": _user("What is 23 + 48?"), "reasoning_effort": "medium"},
    {"messages": _user("What is 23 + 48?"), "reasoning_effort": "high"},
    {"messages": _user("What is 17 * 6?"), "reasoning_effort": "low"},
    {"messages": _user("Sort the numbers 30, 4 and 17."), "reasoning_effort": "medium"},
    {"messages": _user("How many r's are in strawberry?"), "reasoning_effort": "high"},
    {"messages": _user("Hello!"), "reasoning_effort": "low"},
    {"messages": [IN_JSON, *_user("What is 44 - 9?")], "reasoning_effort": "low"},
    {"messages": _user("What is 23 + 48?", "23 + 48 = 71.", "And now add 10."), "reasoning_effort": "low"},
    {"messages": _user("What is the weather in Paris?"), "tools": [WEATHER], "reasoning_effort": "medium"},
    {"messages": [*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": RESULT}], "tools": [WEATHER]},
)
DATE = "2026-03-14"


def transformers_answers(path: Path) -> list[list[int]]:
    """Token ids that transformers writes after each of CONVERSATIONS, up to and with the stop token."""
    from transformers import GptOssForCausalLM, Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(path / "tokenizer.json")
    stops, answers = sorted(stop_ids(tokenizer)), []
    for made in CONVERSATIONS:
        effort = made.get("reasoning_effort")
        prompt = render(made["messages"], tokenizer, tools=made.get("tools"), reasoning_effort=effort, current_date=DATE)
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LONGEST, eos_token_id=stops
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description="put a trained model into simplellm/builtin")
    parser.add_argument("path", type=Path, help="folder that tools.builtin.train wrote")
    args = parser.parse_args()
    for name in FILES:
        shutil.copyfile(args.path / name, BUILTIN / name)
    ANSWERS.write_text(json.dumps(transformers_answers(BUILTIN)) + "\n", encoding="utf-8")
    print(f"{BUILTIN}: {sum(file.stat().st_size for file in BUILTIN.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
