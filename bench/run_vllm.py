"""compare.py's worker for vLLM: MODEL and vllm.LLM's arguments as JSON in argv, works as lines on stdin, records on stdout.

The engine is stepped here and a token counts when `step` hands it out, as in simplellm/bench/work.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from simplellm.bench.work import Work, rounded, summarise  # noqa: E402

DEFAULTS = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 131072, "max_num_seqs": 1024}


def run(engine, sampling, work: Work, seed: int):  # type: ignore[no-untyped-def]
    random = Random(seed)
    began = time.perf_counter()
    prompts = [random.choices(range(199_000), k=work.prompt) for _ in range(work.num)]
    began = time.perf_counter()
    for i, ids in enumerate(prompts):
        engine.add_request(f"{seed}-{i}-{began}", {"prompt_token_ids": ids}, sampling)
    seen: dict[str, list[float]] = {}
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            times = seen.setdefault(output.request_id, [])
            times += [now] * (len(output.outputs[0].token_ids) - len(times))
    assert all(len(times) == work.new for times in seen.values()), "a sequence is short of tokens"
    return summarise(work, began, list(seen.values()))


def main() -> None:
    import torch
    import vllm

    model, options = sys.argv[1], json.loads(sys.argv[2])
    llm = vllm.LLM(model, **(DEFAULTS | options))
    about = {"version": vllm.__version__, "torch": torch.__version__, "card": torch.cuda.get_device_name(), "options": options}
    print("RECORD " + json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        work = Work.parse(asked["work"])
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=work.new, ignore_eos=True, detokenize=False)
        print("RECORD " + json.dumps(rounded(run(llm.llm_engine, sampling, work, asked["seed"]))), flush=True)


if __name__ == "__main__":
    main()
