"""Many answers at once under asyncio, each streamed; cancelling a task ends its request.

Runs with the built-in model, whose answers are noise; with a real one: `python cookbook/asyncio_many.py ./gpt-oss-20b`
"""

import asyncio
import sys

from simplellm import LLM

QUESTIONS = ["What is a prime number?", "Why is the sky blue?", "Who wrote Hamlet?"]


async def ask(llm: LLM, question: str, max_tokens: int = 40) -> str:
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
