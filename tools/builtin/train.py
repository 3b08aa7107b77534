"""Train the built-in model: `python -m tools.builtin.train OUT --tokenizer FILE`, on one GPU; on a CPU it is slow.

Writes a checkpoint in the official layout to OUT, a few times on the way and at the end, then judges it. `--resume PATH`
goes on from such a checkpoint, `--resume simplellm/builtin` from the shipped one; momenta begin anew. The learning rate
is constant and falls to zero over the last part of the time. Needs the packages of the engine, nothing of its extras.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from simplellm.text.tokenizer import Tokenizer
from tools.builtin.data import Batch, batches
from tools.builtin.export import read_weights, write_config, write_weights
from tools.builtin.judge import Table, as_text, held_out
from tools.builtin.model import Model
from tools.builtin.muon import Muon
from tools.builtin.score import score
from tools.builtin.tasks import SHARES, Example

WARM_UP = 0.01  # part of the time
LONGEST = 8192  # positions: above the long rows, and above any prompt with its answer
EVEN = 0.01  # weight of the loss that keeps all experts in use
MATRICES = ("q_w", "k_w", "v_w", "o_w", "gate_up", "down")  # what Muon trains; the rest is AdamW's
GLIMPSE = 480  # held-out problems, of all tasks, for a look on the way
LONG_EVERY = 6  # steps, of which one has long rows beside the others
LONG_WEIGHT = 0.1  # of their loss: they have few targets, so the mean over them is noisy


def optimisers(model: Model, muon_lr: float, adam_lr: float, fused: bool) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if name.rsplit(".", 1)[-1] in MATRICES]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
    both: list[torch.optim.Optimizer] = [Muon(matrices, lr=muon_lr, decay=0.1), adam]
    for optimiser in both:
        for group in optimiser.param_groups:
            group["full_lr"] = group["lr"]
    return both


def rate(progress: float, falling: float) -> float:
    """The learning rate's factor at this part of the time; it falls over the last `falling` of it."""
    return min(1.0, progress / WARM_UP + 0.01, max(0.0, (1 - progress) / falling))


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(part).to(device, non_blocking=True).long() for part in batch)


class Trainer:
    """One model, its optimisers and its data: rows of all tasks, and long ones."""

    def __init__(self, model: Model, rows: Iterator[Batch], long_rows: Iterator[Batch], args: argparse.Namespace):
        self.model, self.rows, self.long_rows = model, rows, long_rows
        self.device = model.embed.device
        self.optimisers = optimisers(model, args.muon_lr, args.adam_lr, self.device.type == "cuda")
        self.step_number, self.num_tokens, self.falling = 0, 0, args.falling
        self.loss = model.loss
        if self.device.type == "cuda" and not args.no_compile:
            for layer in model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(model.loss, dynamic=False)

    def step(self, progress: float) -> Tensor:
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["full_lr"] * rate(progress, self.falling)
        loss = self._learn(next(self.rows), 1.0)
        if self.step_number % LONG_EVERY == 0:
            self._learn(next(self.long_rows), LONG_WEIGHT)
        nn.utils.clip_grad_norm_([self.model.embed, self.model.lm_head], 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step_number += 1
        return loss

    def _learn(self, batch: Batch, weight: float) -> Tensor:
        """Add the batch's gradients. Returns its loss."""
        tokens, targets, docs = to_device(batch, self.device)
        x, uneven = self.model(tokens, docs)
        loss = self.loss(x, targets)
        (weight * (loss + EVEN * uneven)).backward()
        self.num_tokens += tokens.numel()
        return loss.detach()

    def run(self, args: argparse.Namespace, end: float, look: Callable[[], None]) -> None:
        """Train until `end`, with a line every `log` seconds and a `look` at the model `peeks` times."""
        self.step(0.0)  # compiles, which can take a minute
        start = last = time.monotonic()
        looks = [(i + 1) / (args.peeks + 1) for i in range(args.peeks)]
        while (progress := (time.monotonic() - start) / max(1e-9, end - start)) < 1:
            loss = self.step(progress)
            if time.monotonic() - last > args.log:
                last, spent = time.monotonic(), time.monotonic() - start
                speed = self.num_tokens / spent / 1e6
                print(f"{spent:6.1f} s, step {self.step_number}, {speed:.3f} M tokens/s, loss {loss.item():.4f}", flush=True)
            if looks and progress > looks[0]:
                looks.pop(0)
                look()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train the built-in model")
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of tools.builtin.tokenizer")
    parser.add_argument("--minutes", type=float, default=9.0, help="from the start to the written weights, not yet judged")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--long-rows", type=int, default=4)
    parser.add_argument("--long-length", type=int, default=5120)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--falling", type=float, default=0.5, help="last part of the time, in which the learning rate falls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judge", type=int, default=200, help="held-out problems per task and effort at the end")
    parser.add_argument("--peeks", type=int, default=3, help="looks at held-out problems on the way")
    parser.add_argument("--log", type=float, default=10.0, help="seconds between lines")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON with other sizes than export.SHAPE")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def train(args: argparse.Namespace, pool: Executor) -> None:
    end = time.monotonic() + 60 * args.minutes
    make = (pool, 4 * args.workers, args.tokenizer)
    rows = batches(*make, f"{args.seed}", args.rows, args.length)
    long_rows = batches(*make, f"{args.seed} long", args.long_rows, args.long_length, "needle")
    problems: list[Future[list[Example]]] = [pool.submit(held_out, args.judge, tasks=[task]) for task in SHARES]
    args.path.mkdir(parents=True, exist_ok=True)
    shape = write_config(args.path, json.loads(args.tokenizer.read_text()), **args.shape)
    tokenizer = Tokenizer.from_file(args.path / "tokenizer.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = Model(shape, LONGEST, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    if args.resume:
        read_weights(model, args.resume)

    def judge(glimpse: bool = False) -> tuple[Table, list[str]]:
        examples = [made for each in problems for made in each.result()]
        return score(model, tokenizer, examples[:: max(1, len(examples) // GLIMPSE) if glimpse else 1])

    def look() -> None:
        write_weights(model, args.path)
        rows = judge(glimpse=True)[0].items()
        print(" ".join(f"{task} {'/'.join(f'{v:.0f}' for v in row.values())}" for task, row in rows), flush=True)

    trainer = Trainer(model.to(device), rows, long_rows, args)
    trainer.run(args, end, look)
    num_bytes = write_weights(model, args.path)
    print(f"{trainer.step_number} steps, {trainer.num_tokens:,} tokens; {num_bytes:,} bytes", flush=True)
    table, wrong = judge()
    (args.path / "wrong.txt").write_text("\n".join(wrong[:3000]), encoding="utf-8")
    (args.path / "scores.json").write_text(json.dumps(table), encoding="utf-8")
    print(as_text(table))


def main() -> None:
    args = parse()
    pool = ProcessPoolExecutor(args.workers, multiprocessing.get_context("fork"))  # forks all at the first use
    try:
        train(args, pool)
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
