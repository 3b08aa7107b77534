"""`python -m tests.server.provider_suite DIR`: OpenAI's own checks of gpt-oss providers against the scripted model.

DIR is `compatibility-test` of a clone of github.com/openai/gpt-oss, in which `npm ci` and `npm i --no-save tsx` have run. Not a
part of the tests: it needs node. The model calls what each case expects, so the checks are of the API's shape, whole and
streaming: every call comes through, and reasoning under its name. Exit code 1 if one fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.chat import FINAL, NEXT, THINK, script
from tests.scripted import scripted_llm
from tests.server.harness import MODEL, Served

TRIES = 2
LONGEST = 300  # seconds


def main(folder: Path) -> int:
    cases = [json.loads(line) for line in (folder / "cases.jsonl").read_text("utf-8").splitlines()]
    passed = True
    with scripted_llm(script(FINAL)) as llm, Served(llm) as server:
        submit, decode = server.front.submit, llm.tokenizer.decode

        def choose(feed: Any) -> None:
            """The case's call, then, with its result, an answer."""
            prompt = decode(feed.prompts[0], skip_special=False)
            (case,) = [case for case in cases if f"<|start|>user<|message|>{case['input']}<|end|>" in prompt]
            header = f"<|channel|>commentary to=functions.{case['tool_name']} <|constrain|>json<|message|>"
            call = header + case["expected_arguments"] + "<|call|>"
            answered = f"<|start|>functions.{case['tool_name']} to=assistant" in prompt
            for answer in feed.answers:
                llm.runner._by_rid[answer.request.rid] = script(THINK + NEXT + (FINAL if answered else call))
            submit(feed)

        server.front.submit = choose  # type: ignore[method-assign]
        provider = {"apiBaseUrl": server.url + "/v1", "apiKey": "none", "apiType": ["chat"], "modelName": MODEL}
        providers = {"simplellm": provider | {"providerDetails": {}}}
        (folder / "providers.ts").write_text(f"export const PROVIDERS = {json.dumps(providers)};\n")
        command = ["npx", "tsx", "index.ts", "--provider", "simplellm", "--tries", str(TRIES), "--strict"]
        for more in ([], ["--streaming"]):
            ran = subprocess.run(
                [*command, *more], cwd=folder, env=os.environ | {"OPENAI_AGENTS_DISABLE_TRACING": "1"}, capture_output=True,
                text=True, timeout=LONGEST,
            )  # fmt: skip
            summary = ran.stdout.partition("Summary:")[2]
            print("streaming:" if more else "whole:", summary or ran.stdout[-2000:] + ran.stderr[-2000:])
            runs, tasks = f"Total runs: {TRIES * len(cases)}\n", f"Total tasks: {len(cases)}\n"
            valid = f"Invalid Chat Completions API responses: 0 (out of {TRIES * len(cases)})"
            passed &= all(told in summary for told in (runs, tasks, valid, f"pass^k (k={TRIES}): 1.000"))
        server.wait_until_idle()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
