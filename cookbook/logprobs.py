"""Log-probabilities: how likely texts are under the model, and what else it might have said.

Runs with the small built-in model; with a real one: `python cookbook/logprobs.py ./gpt-oss-20b`
"""

import math
import sys

from simplellm import LLM

TEXTS = ["The capital of France is Paris.", "The capital of France is purple."]

with LLM(*sys.argv[1:2]) as llm:
    # Scoring generates nothing. The first token has no log-probability: nothing precedes it
    for text, output in zip(TEXTS, llm.generate(TEXTS, max_tokens=0, prompt_logprobs=0).result(), strict=True):
        logprobs = [entry.logprob for entry in output.prompt_logprobs[1:]]
        perplexity = math.exp(-sum(logprobs) / len(logprobs))
        print(f"{sum(logprobs):9.2f} nats, perplexity {perplexity:8.1f}: {text}")

    output = llm.generate("The capital of France is", max_tokens=4, temperature=0, logprobs=True, top_logprobs=3).result()[0]
    for entry in output.logprobs:
        others = ", ".join(f"{llm.tokenizer.decode([token])!r} {math.exp(value):.1%}" for token, value in entry.top)
        print(f"{llm.tokenizer.decode([entry.token])!r} from {others}")
