"""Many answers at once under asyncio, each streamed; cancelling a task ends its request.

Runs with the small built-in model; with a real one: `python cookbook/asyncio_many.py ./gpt-oss-20b`
"""

import asyncio
import sys

from simplellm import LLM

QUESTIONS = ["What is 23 + 48?", "Sort these numbers: 9, 2, 5.", "Is 71 greater than 17?"]


async def ask(llm: LLM, question: str, max_tokens: int = 150) -> str:
    pieces = []
    async for chunk in llm.chat_stream([{"role": "user", "content": question}], max_tokens=max_tokens):
        pieces.append(chunk.text)
    print(f"{question} -> {''.join(pieces)!r}")
    return "".join(pieces)


async def main() -> None:
    with LLM(*sys.argv[1:2]) as llm:
        long = asyncio.create_task(ask(llm, "Count to a million.", 4000))
        answers = await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
        long.cancel()
        print(f"{len(answers)} answers, {sum(map(len, answers))} characters")


asyncio.run(main())
