"""compare.py's worker for vLLM: MODEL and vllm.LLM's arguments as JSON in argv, works as lines on stdin, records on stdout.

The engine is stepped here and a token counts when `step` hands it out, as in simplellm/bench/work.py and inter.py. A prompt
that arrives during a step is added after it; its wait counts from when it was due.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from simplellm.bench import inter  # noqa: E402
from simplellm.bench.trace import TEXT_IDS  # noqa: E402
from simplellm.bench.work import Work, draw_ids, machine, rounded, summarise  # noqa: E402

DEFAULTS = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 131072, "max_num_seqs": 1024}


class Driver:
    """Adds requests to vLLM's engine and steps it; `seen` has the moment of each token, by request."""

    def __init__(self, engine: Any, sampling: Any):
        self.engine, self._sampling = engine, sampling
        self.seen: dict[str, list[float]] = {}
        self._ended: set[str] = set()
        self._number = 0

    def add(self, ids: list[int], new: int) -> str:
        name, self._number = f"bench-{self._number}", self._number + 1
        self.seen[name] = []
        params = self._sampling(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def step(self) -> None:
        outputs, now = self.engine.step(), time.perf_counter()
        for output in outputs:
            times = self.seen[output.request_id]
            times += [now] * (len(output.outputs[0].token_ids) - len(times))
            if output.finished:
                self._ended.add(output.request_id)

    def run(self, work: Work, seed: int) -> dict[str, float]:
        prompts = draw_ids(work.num, work.prompt, TEXT_IDS, seed)
        began = time.perf_counter()
        names = [self.add(ids, work.new) for ids in prompts]
        while self.engine.has_unfinished_requests():
            self.step()
        seen = [self.seen.pop(name) for name in names]
        assert all(len(times) == work.new for times in seen), "a sequence is short of tokens"
        return rounded(summarise(work, began, seen))

    def run_inter(self, asked: inter.Inter, seed: int, max_length: int) -> dict[str, float]:
        running, arriving = asked.draw(TEXT_IDS, seed)
        decodes = [self.add(ids, max_length - max(asked.prompt, asked.arriving)) for ids in running]
        while min(len(self.seen[name]) for name in decodes) < inter.WARM:
            self.step()
        prompts: list[str] = []
        began = time.perf_counter()
        while len(prompts) < asked.count or not all(self.seen[name] for name in prompts):
            while len(prompts) < asked.count and time.perf_counter() >= began + asked.due(len(prompts)):
                prompts.append(self.add(arriving[len(prompts)], 1))
            self.step()
            assert self._ended.isdisjoint(decodes), "a running sequence ended too early"
        self.engine.abort_request(decodes)
        while self.engine.has_unfinished_requests():
            self.step()
        firsts = [self.seen.pop(name)[0] for name in prompts]
        return inter.summarise(asked, began, [self.seen.pop(name) for name in decodes], firsts)


def main() -> None:
    import vllm

    model, options = sys.argv[1], DEFAULTS | json.loads(sys.argv[2])
    llm = vllm.LLM(model, **options)
    about = machine() | {"version": vllm.__version__, "options": options}
    del about["commit"]  # of SimpleLLM
    print("RECORD " + json.dumps(about), flush=True)
    driver = Driver(llm.llm_engine, vllm.SamplingParams)
    for line in sys.stdin:
        asked = json.loads(line)
        if "+" in asked["work"]:
            figures = driver.run_inter(inter.Inter.parse(asked["work"]), asked["seed"], options["max_model_len"])
        else:
            figures = driver.run(Work.parse(asked["work"]), asked["seed"])
        print("RECORD " + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
