"""Tools: the model calls a function, this program runs it and gives the result back, until the model answers.

Runs with the small built-in model, which may call or not; with a real one, allow more tokens:
`python cookbook/tool_loop.py ./gpt-oss-20b 2000`
"""

import json
import sys

from simplellm import LLM

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather in a city, now.", "parameters": PARAMETERS}


def weather(arguments: str) -> str:
    try:
        return json.dumps({"city": json.loads(arguments)["city"], "celsius": 21, "sky": "clear"})
    except (ValueError, KeyError, TypeError) as error:  # a model may write anything; it can do better when told
        return json.dumps({"error": repr(error)})


messages = [{"role": "user", "content": "Is it warm in Bonn, and in Oslo?"}]
max_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 40

with LLM(*sys.argv[1:2]) as llm:
    for _ in range(8):  # rounds, should the model never have enough
        output = llm.chat(messages, tools=[{"type": "function", "function": WEATHER}], max_tokens=max_tokens).result()[0]
        if output.finish_reason != "tool_calls":
            break
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in output.tool_calls
        ]
        # The reasoning goes back as well: within a tool loop the model reads it
        messages.append({"role": "assistant", "content": output.content, "reasoning": output.reasoning, "tool_calls": calls})
        for call in output.tool_calls:
            result = weather(call.arguments)
            print(f"{call.name}({call.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print("answer:", output.content)
