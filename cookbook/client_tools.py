"""The server and tools: the model asks for a function, this program runs it, over OpenAI's own client, streaming.

`python cookbook/client_tools.py ./gpt-oss-20b`; without a path, the built-in model. Needs the extra `server`, and openai.
"""

import json
import re
import subprocess
import sys

import openai

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bonn"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": CITY, "strict": True}
TOOLS = [{"type": "function", "function": WEATHER}]


def weather(city: str) -> str:
    return json.dumps({"city": city, "celsius": {"Oslo": -3, "Bonn": 21}[city]})


command = [sys.executable, "-m", "simplellm", "serve", *sys.argv[1:2], "--port", "0", "--served-model-name", "gpt-oss"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    address = next(found[1] for line in server.stderr if (found := re.search(r" at (http\S+)", line)))
    client = openai.OpenAI(base_url=address, api_key="none needed")
    messages = [{"role": "user", "content": "Is it warm in Bonn?"}]
    for choice in ("required", "auto"):  # the first answer must be a call, the second one may be text
        settings = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "extra_body": {"answer_tokens": 200}}
        with client.chat.completions.stream(model="gpt-oss", messages=messages, **settings) as stream:
            for event in stream:
                if event.type == "content.delta":
                    print(event.delta, end="", flush=True)
            answer = stream.get_final_completion().choices[0].message
        messages.append(answer.model_dump(exclude_none=True))  # with its reasoning, which the model reads again
        for call in answer.tool_calls or []:
            result = weather(json.loads(call.function.arguments)["city"])  # strict: the arguments follow the schema
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(f"\n{len(messages)} messages")
finally:
    server.terminate()
    server.wait()
