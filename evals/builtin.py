"""The built-in model on held-out problems of its tasks, through the engine: `python -m evals.builtin [PATH]`.

Each problem is a conversation of its own for `LLM.chat` at temperature 0. Right is the exact answer; where a tool is
needed, the right call and then the exact answer from its result. Prints per cent by task and effort.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from simplellm import LLM, Generation, Output
from tools.builtin.judge import LONGEST, Table, as_text, held_out, is_right
from tools.builtin.problem import EFFORTS
from tools.builtin.tasks import SHARES, Example, after_call


def ask(llm: LLM, made: Example) -> Generation:
    """Queue the conversation."""
    return llm.chat(
        made.messages,
        tools=made.tools or None,
        reasoning_effort=made.effort,
        current_date=made.date,
        temperature=0,
        max_tokens=LONGEST,
    )


def right(made: Example, output: Output) -> bool:
    return is_right(made, output.content, [(call.name, call.arguments) for call in output.tool_calls])


def evaluate(llm: LLM, examples: list[Example]) -> tuple[list[tuple[Example, Output]], int]:
    """Ask all at once, then those with right calls again. Returns the wrong ones, and the number of tokens generated."""
    wrong, num_tokens = [], 0
    while examples:
        again = []
        pending = [(made, ask(llm, made)) for made in examples]
        for made, generation in pending:
            output = generation.result()[0]
            num_tokens += len(output.token_ids)
            if not right(made, output):
                wrong.append((made, output))
            elif made.call is not None:
                again.append(after_call(made, output.tool_calls[0].arguments))
        examples = again
    return wrong, num_tokens


def tabulate(examples: list[Example], wrong: list[tuple[Example, Output]]) -> Table:
    """Per cent right by task and effort."""
    asked = Counter((made.task, made.effort) for made in examples)
    missed = Counter((made.task, made.effort) for made, _ in wrong)
    tasks = dict.fromkeys(made.task for made in examples)
    return {task: {e: 100 * (1 - missed[task, e] / asked[task, e]) for e in EFFORTS if asked[task, e]} for task in tasks}


def main() -> None:
    parser = argparse.ArgumentParser(description="the built-in model on held-out problems")
    parser.add_argument("path", nargs="?", type=Path, help="another checkpoint with the same tasks")
    parser.add_argument("--num", type=int, default=200, help="problems per task and effort")
    parser.add_argument("--tasks", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--wrong", type=Path, help="file for the wrong answers, one JSON object a line")
    args = parser.parse_args()
    examples = held_out(args.num, args.seed, args.tasks)
    started = time.monotonic()
    with LLM(args.path, device=args.device, max_context=8192, progress=False) as llm:
        wrong, num_tokens = evaluate(llm, examples)
    spent = time.monotonic() - started
    print(as_text(tabulate(examples, wrong)))
    print(f"{len(examples):,} conversations, {num_tokens:,} tokens in {spent:.0f} s: {num_tokens / spent:.0f} tokens/s")
    if args.wrong:
        rows = [
            {"task": made.task, "effort": made.effort, "messages": made.messages, "wanted": made.answer or made.call}
            | {"reasoning": out.reasoning, "content": out.content, "calls": [(c.name, c.arguments) for c in out.tool_calls]}
            for made, out in wrong
        ]
        args.wrong.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
