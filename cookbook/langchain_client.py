"""LangChain on the server: a tool that the model calls, and an answer as an object.

`python cookbook/langchain_client.py ./gpt-oss-20b`; without a path, the built-in model. Needs `server` and langchain-openai.
"""

import re
import subprocess
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: Literal["Oslo", "Bonn"]) -> str:
    """The weather in a city."""
    return {"Oslo": "-3 degrees", "Bonn": "21 degrees"}[city]


class Forecast(BaseModel):
    """What to say of the weather."""

    city: Literal["Oslo", "Bonn"]
    warm: bool


command = [sys.executable, "-m", "simplellm", "serve", *sys.argv[1:2], "--port", "0", "--served-model-name", "gpt-oss"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    address = next(found[1] for line in server.stderr if (found := re.search(r" at (http\S+)", line)))
    room = {"max_tokens": 400, "extra_body": {"answer_tokens": 200}}  # reasoning leaves room for an answer
    model = ChatOpenAI(model="gpt-oss", base_url=address, api_key="none needed", **room)
    messages = [("user", "Is it warm in Bonn?")]

    messages.append(model.bind_tools([weather], tool_choice="any", strict=True).invoke(messages))
    messages += [weather.invoke(call) for call in messages[-1].tool_calls]
    print("tool:    ", messages[-1].name, messages[-1].content)

    print("object:  ", model.with_structured_output(Forecast, method="json_schema").invoke(messages))
finally:
    server.terminate()
    server.wait()
