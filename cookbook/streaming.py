"""A text's continuation, printed as it comes, and what is known of it at the end.

Runs with the small built-in model; with a real one: `python cookbook/streaming.py ./gpt-oss-20b`
"""

import sys

from simplellm import LLM

PROMPT = "Once upon a time"

with LLM(*sys.argv[1:2]) as llm:
    print(PROMPT, end="")
    with llm.stream(PROMPT, max_tokens=60, seed=7) as chunks:  # leaving the block early would end the request
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
    output = chunks.outputs[0]
    print(f"\n({output.finish_reason} after {len(output.token_ids)} tokens, {output.timings.total:.2f} s)")
