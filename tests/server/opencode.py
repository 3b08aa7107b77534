"""`python -m tests.server.opencode`: opencode through a tool loop against the scripted model. Needs node; npx gets opencode.

Not a part of the tests: it downloads 350 MB, and opencode asks the network for more. It prints opencode's answer; exit code 1
if that, or what it sent back, is not what it should be.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.chat import FINAL, NEXT, THINK, script
from tests.scripted import scripted_llm
from tests.server.harness import MODEL, Served

HEADER = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
RESULT = "<|start|>functions.read to=assistant"
SECRET, ANSWER = "otters", FINAL.replace("It is cold.", "It says otters.")
FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
LONGEST = 300  # seconds


def configuration(url: str) -> dict[str, Any]:
    models = {MODEL: {"limit": {"context": 131072, "output": 32000}, "reasoning": True, "tool_call": True}}
    options = {"baseURL": url + "/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    return {"provider": {"simplellm": provider}, "model": f"simplellm/{MODEL}", "autoupdate": False, "share": "disabled"}


def main() -> int:
    command = [found] if (found := shutil.which("opencode")) else ["npx", "--yes", "opencode-ai"]
    command += ["run", "--model", f"simplellm/{MODEL}", "What does note.txt say?"]
    prompts: list[str] = []
    with scripted_llm(script(ANSWER)) as llm, Served(llm) as server, tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        project.mkdir()
        (project / "note.txt").write_text(SECRET)
        (project / "opencode.json").write_text(json.dumps(configuration(server.url)))
        call = HEADER + json.dumps({"filePath": str(project / "note.txt")}) + "<|call|>"
        submit, decode = server.front.submit, llm.tokenizer.decode

        def choose(feed: Any) -> None:
            """It asks for a title, too: who has tools and no result yet is to call one."""
            prompts.append(decode(feed.prompts[0], skip_special=False))
            calls = "type read = " in prompts[-1] and RESULT not in prompts[-1]
            for answer in feed.answers:
                llm.runner._by_rid[answer.request.rid] = script(THINK + NEXT + (call if calls else ANSWER))
            submit(feed)

        server.front.submit = choose  # type: ignore[method-assign]
        environment = os.environ | dict.fromkeys(FOLDERS, folder) | {"PWD": str(project)}
        told = {"cwd": project, "env": environment, "stdin": subprocess.DEVNULL, "timeout": LONGEST}
        ran = subprocess.run(command, capture_output=True, text=True, **told)
        server.wait_until_idle()
    print(ran.stdout, ran.stderr, sep="\n")
    looped = any(SECRET in prompt.partition(RESULT)[2] for prompt in prompts)
    print(f"{len(prompts)} requests; the tool's result {'came' if looped else 'did not come'} back")
    return 0 if ran.returncode == 0 and looped and "It says otters." in ran.stdout else 1


if __name__ == "__main__":
    sys.exit(main())
