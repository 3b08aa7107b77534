"""The server and OpenAI's own client: a whole answer, a stream, a function call, JSON by a schema.

`python cookbook/openai_client.py ./gpt-oss-20b`; without a path, the built-in model. Needs the extra `server`, and openai.
"""

import re
import subprocess
import sys

import openai

command = [sys.executable, "-m", "simplellm", "serve", *sys.argv[1:2], "--port", "0", "--served-model-name", "gpt-oss"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    address = next(found[1] for line in server.stderr if (found := re.search(r" at (http\S+)", line)))
    client = openai.OpenAI(base_url=address, api_key="none needed")
    question = [{"role": "user", "content": "Name a city in Norway."}]

    whole = client.chat.completions.create(model="gpt-oss", messages=question, max_tokens=40, reasoning_effort="low")
    print("whole:   ", repr(whole.choices[0].message.content), whole.choices[0].finish_reason, whole.usage.total_tokens)

    print("stream:  ", end=" ")
    for chunk in client.chat.completions.create(model="gpt-oss", messages=question, max_tokens=40, stream=True):
        print(repr(chunk.choices[0].delta.content or ""), end=" ", flush=True)
    print()

    city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": city, "strict": True}}
    room = {"max_tokens": 200, "extra_body": {"answer_tokens": 100}}  # reasoning leaves room for an answer
    ask = client.chat.completions.create(model="gpt-oss", messages=question, tools=[tool], tool_choice="required", **room)
    print("call:    ", [(call.function.name, call.function.arguments) for call in ask.choices[0].message.tool_calls or []])

    schema = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": city}}
    told = client.chat.completions.create(model="gpt-oss", messages=question, response_format=schema, **room)
    print("schema:  ", told.choices[0].message.content)
finally:
    server.terminate()
    server.wait()
