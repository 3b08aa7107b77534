"""The same question with little and with much reasoning; gpt-oss thinks before it answers, and tells what it thought.

Runs with the small built-in model; with a real one, allow more tokens:
`python cookbook/chat_effort.py ./gpt-oss-20b 2000`
"""

import sys

from simplellm import LLM

MESSAGES = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is 478 + 256?"},
]
max_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 200

with LLM(*sys.argv[1:2]) as llm:
    for effort in ("low", "medium", "high"):
        output = llm.chat(MESSAGES, reasoning_effort=effort, max_tokens=max_tokens).result()[0]
        print(f"== {effort}: {output.usage.reasoning_tokens} of {output.usage.completion_tokens} tokens are reasoning")
        print(f"thought: {output.reasoning}\nanswer: {output.content}")
