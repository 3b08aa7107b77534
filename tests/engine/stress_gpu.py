"""Finds where a NaN comes from on a GPU that other processes use.

    python -m tests.engine.stress_gpu [ROUNDS [PROCESSES [PDL]]]

Long prompts through the built-in model, again and again, while PROCESSES others multiply matrices and leave NaN in the memory
that they free. After each step all keys and values that it wrote are looked at: the first layer, kind and positions with a NaN
name the kernel before. 64 positions at a tile's edge are a warpgroup of chunk attention, 192 a tile, scattered ones the
experts, blocks of 4 rope_append, single ones a norm, blocks of 64 or 128 cuBLAS. PDL 0: launches without programmatic
dependence.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from random import Random
from typing import Any

import torch

from simplellm import LLM
from simplellm.config import PAGE


def disturb(stop: Event) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while not stop.is_set():
        junk = torch.full((1 << 28,), torch.nan, device="cuda")
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        del junk
        torch.cuda.empty_cache()


def watch() -> None:
    """Look at what each step wrote, once it is done."""
    from simplellm.engine.gpu_runner import GpuRunner

    before = GpuRunner.results

    def results(self: GpuRunner, pending: Any) -> Any:
        found = before(self, pending)
        for span in pending.plan.spans:
            for full in (1, 0):
                pages = self.tables[1 - full, span.row, span.start // PAGE : (span.end - 1) // PAGE + 1].long()
                bad = (~self.kv[:, :, pages].isfinite()).any(-1).any(3).flatten(2)  # [layer of the kind, k or v, position]
                bad[:, :, : span.start % PAGE] = False
                bad[:, :, span.start % PAGE + span.end - span.start :] = False
                if bad.any():
                    kind = "full" if full else "window"
                    print(f"NaN in {kind} layers, step {span.start} to {span.end}: {bad.nonzero().tolist()[:40]}", flush=True)
        return found

    GpuRunner.results = results  # type: ignore[method-assign]


def main() -> None:
    rounds, processes, pdl = (int(x) for x in (*sys.argv[1:], *("20", "6", "1")[len(sys.argv) - 1 :]))
    if not pdl:
        from simplellm.kernels.hopper.launch import launch

        launch.__kwdefaults__["pdl"] = False  # type: ignore[index]
    watch()
    context = get_context("spawn")
    stop = context.Event()
    others = [context.Process(target=disturb, args=(stop,)) for _ in range(processes)]
    for other in others:
        other.start()
    random = Random(3)
    prompt = [random.randrange(3, 1000) for _ in range(131_000)]
    wrong, right = 0, None
    try:
        for i in range(rounds):
            with LLM(progress=False, max_running=4, num_pages=2500, prompt_budget=(16_384, 5_000)[i % 2]) as llm:
                for _ in range(2):
                    ids = llm.generate([prompt], temperature=0.0, max_tokens=24, min_tokens=24).result()[0].token_ids
                    right = right or ids
                    wrong += ids != right
                    print(f"round {i}: {'right' if ids == right else ids}", flush=True)
    finally:
        stop.set()
        for other in others:
            other.join()
    print(f"{wrong} of {2 * rounds} answers differ from the first")


if __name__ == "__main__":
    main()
