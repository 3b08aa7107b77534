"""Many prompts in one call: they run side by side, and the results come in prompt order.

Runs with the small built-in model; with a real one: `python cookbook/batch.py ./gpt-oss-20b`
"""

import sys

from simplellm import LLM

QUESTIONS = ["What is 23 + 48?", "Sort these numbers: 9, 2, 5.", "Is 71 greater than 17?"]
conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]

with LLM(*sys.argv[1:2]) as llm:
    pending = llm.chat(conversations, max_tokens=[100, 150, 200])  # one value for all, or a list with one for each
    print("queued; this program could do something else now")
    for question, output in zip(QUESTIONS, pending.result(), strict=True):
        print(f"{question} -> {output.content!r} ({output.usage.completion_tokens} tokens, {output.finish_reason})")
