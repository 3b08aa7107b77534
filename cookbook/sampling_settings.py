"""How settings shape one prompt's answers: temperature, nucleus, penalties, seeds, stop strings, several answers.

Runs with the small built-in model; with a real one: `python cookbook/sampling_settings.py ./gpt-oss-20b`
"""

import sys

from simplellm import LLM

PROMPT = "My three favourite colours are"
SETTINGS = {
    "greedy": {"temperature": 0},
    "as OpenAI recommends": {"temperature": 1, "top_p": 1},
    "likely words only": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "no repetition": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "the same each time": {"seed": 42},
    "up to the end of the sentence": {"stop": [".", "\n"]},
}

with LLM(*sys.argv[1:2]) as llm:
    pending = {name: llm.generate(PROMPT, max_tokens=16, **settings) for name, settings in SETTINGS.items()}  # side by side
    for name, generation in pending.items():
        print(f"{name}: {generation.result()[0].text!r}")
    for choice in llm.generate(PROMPT, max_tokens=16, n=3).result()[0].choices:
        print(f"answer {choice.index} of 3: {choice.text!r}")
