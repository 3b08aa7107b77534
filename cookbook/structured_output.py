"""Answers in a given form: JSON by a schema, one of several texts, a regular expression. Reasoning before them is free.

Runs with the small built-in model; a real one needs more tokens: `python cookbook/structured_output.py ./gpt-oss-20b 2000`
"""

import json
import sys

from simplellm import LLM

INVOICE = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 20},
        "items": {"type": "array", "items": {"enum": ["tea", "coffee", "cake"]}, "minItems": 1, "maxItems": 3},
        "paid": {"type": "boolean"},
    },
    "required": ["customer", "items", "paid"],
    "additionalProperties": False,
}
FORMATS = {
    "json_schema": {"type": "json_schema", "json_schema": {"name": "invoice", "schema": INVOICE}},
    "choice": {"type": "choice", "choice": ["positive", "negative", "neutral"]},
    "regex": {"type": "regex", "regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"},
}
QUESTIONS = {
    "json_schema": "Ada had tea and cake, and has paid. Write the invoice as JSON.",
    "choice": "Positive, negative or neutral: 'The cake was fine, the tea was cold.'",
    "regex": "When was the first of May 2024? Answer as YYYY-MM-DD.",
}
max_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 300

with LLM(*sys.argv[1:2]) as llm:
    room = {"max_tokens": max_tokens, "answer_tokens": max_tokens // 2}  # reasoning ends in time for the answer
    for kind, form in FORMATS.items():
        messages = [{"role": "user", "content": QUESTIONS[kind]}]
        answer = llm.chat(messages, response_format=form, **room).result()[0].content
        print(f"{kind:12}", json.loads(answer) if kind == "json_schema" else answer)
