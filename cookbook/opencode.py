"""opencode, a coding agent for the terminal, on the server: its configuration, and one question asked through it.

`python cookbook/opencode.py ./gpt-oss-20b`; without a path, the built-in model. opencode: `npm install -g opencode-ai`. To work
with it, write what this prints first into opencode.json in your project, run `simplellm serve`, and start `opencode` there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def configuration(address: str) -> dict:
    limits = {"context": 131072, "output": 32000}
    server = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "SimpleLLM",
        "options": {"baseURL": address, "apiKey": "none needed"},
        "models": {"gpt-oss": {"name": "gpt-oss", "limit": limits, "reasoning": True, "tool_call": True}},
    }
    return {"$schema": "https://opencode.ai/config.json", "provider": {"simplellm": server}, "model": "simplellm/gpt-oss"}


command = [sys.executable, "-m", "simplellm", "serve", *sys.argv[1:2], "--port", "0", "--served-model-name", "gpt-oss"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    address = next(found[1] for line in server.stderr if (found := re.search(r" at (http\S+)", line)))
    told = json.dumps(configuration(address), indent=2)
    print(told)
    if opencode := shutil.which("opencode"):
        with tempfile.TemporaryDirectory() as project:
            (Path(project) / "opencode.json").write_text(told)
            here = {"cwd": project, "env": os.environ | {"PWD": project}}
            subprocess.run([opencode, "run", "Which files are here?"], check=True, **here)
    else:
        print("opencode is not installed: npm install -g opencode-ai")
finally:
    server.terminate()
    server.wait()
