"""Times of candidate dense kernels: whole-row GEMV (dense_gemv), MMA along rows (dense_rows), TMA ring (dense_ring), cuBLAS.

    python -m tests.kernels.hopper.bench_dense_variants

Each line: 16 calls in a CUDA graph over copies of random weights that fill 300 MB, the median of 7 replays; first the result of
one call is compared with that of add_norm, cuBLAS and rope_append ("WRONG" if it is more than 1 % off). "qkv" is the whole op;
"fused" has the norm in the kernel, else its own kernel is in the time; cuBLAS's line is all three kernels of the op.
The rings come last: a wrong barrier there would hang, and the lines before stand.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from simplellm.kernels.hopper import dense, dense_gemv, dense_ring, dense_rows, dense_stream
from simplellm.kernels.hopper.dense import Plan
from simplellm.kernels.hopper.dense_rope import rope_append
from simplellm.kernels.hopper.launch import compiling, launch, num_sms
from simplellm.kernels.hopper.norm import add_norm
from tests.kernels.hopper.bench_dense import microseconds
from tests.kernels.hopper.test_dense import EPS, Qkv, make_qkv

SHAPES = {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201088, 2880)}
KINDS = {"qkv": "qkv", "o": "linear", "lm_head": "logits"}


class Gemv(NamedTuple):
    rows: int
    warps: int
    u: int
    per_sm: int  # 0: a tile a CTA
    maxnreg: int
    fused: bool = False
    evict: str = "evict_first"


class Rows(NamedTuple):
    plan: Plan
    fused: bool = False
    evict: str = "evict_first"


class Ring(NamedTuple):
    rows: int
    warps: int
    depth: int
    per_sm: int
    maxnreg: int = 128


class Old(NamedTuple):
    plan: Plan
    fused: bool = False


class Cublas(NamedTuple):
    fused: bool = False


P = Plan
Variant = Gemv | Rows | Ring | Old | Cublas
A1, A2, A3 = P(16, 8, 8, 2, 3, 2, 128), P(16, 8, 8, 4, 2, 2, 128), P(32, 8, 8, 2, 2, 2, 128)
A4, A5 = P(16, 8, 8, 2, 2, 3, 80), P(16, 4, 4, 4, 2, 4, 128)
CASES: dict[tuple[str, int], list[Variant]] = {
    ("qkv", 1): [
        Gemv(8, 8, 6, 2, 128, True), Gemv(8, 8, 12, 2, 128, True), Gemv(16, 16, 6, 1, 128, True),
        Gemv(16, 8, 6, 1, 255, True), Gemv(4, 4, 6, 4, 128, True), Gemv(8, 8, 6, 0, 128, True), Gemv(8, 4, 6, 0, 168, True),
        Gemv(8, 8, 6, 2, 128, True, ""),
        Gemv(4, 4, 6, 0, 96), Gemv(8, 4, 6, 0, 168), Gemv(8, 8, 6, 0, 128), Gemv(8, 8, 6, 2, 128),
        Gemv(4, 4, 6, 0, 96, False, ""),
        Rows(A1, True), Rows(A2, True), Rows(A3, True), Rows(A1), Old(A3, True), Ring(16, 4, 8, 2), Cublas(),
    ],
    ("qkv", 2): [Gemv(8, 8, 6, 2, 128), Gemv(8, 8, 6, 2, 128, True), Gemv(4, 4, 6, 0, 128)],
    ("qkv", 4): [Gemv(8, 8, 6, 2, 128), Gemv(4, 4, 6, 0, 128), Gemv(8, 4, 6, 0, 255), Rows(A1)],
    ("qkv", 8): [
        Rows(A1), Rows(A1, False, ""), Rows(A2), Rows(A3), Rows(A4), Rows(A5), Old(A1), Ring(16, 4, 8, 2), Ring(16, 8, 4, 2),
        Ring(16, 4, 16, 1), Ring(32, 4, 8, 1), Cublas(),
    ],
    ("qkv", 16): [Rows(A3), Rows(A2), Ring(16, 4, 15, 1), Ring(32, 4, 7, 1), Cublas()],
    ("o", 1): [
        Gemv(4, 4, 8, 0, 128), Gemv(4, 4, 8, 0, 128, False, ""), Gemv(8, 8, 8, 0, 128), Gemv(8, 4, 8, 0, 232),
        Gemv(8, 8, 8, 2, 128), Gemv(16, 16, 8, 1, 128), Rows(A1), Rows(A2), Old(A1), Cublas(),
    ],
    ("o", 4): [Gemv(4, 4, 8, 0, 160), Gemv(8, 8, 8, 0, 128)],
    ("o", 8): [
        Rows(A1), Rows(A1, False, ""), Rows(A2), Rows(A4), Old(A1), Ring(16, 4, 5, 2), Ring(16, 8, 2, 2),
        Ring(16, 4, 16, 1), Cublas(),
    ],
    ("o", 16): [Rows(A3), Rows(A2), Ring(16, 4, 10, 1), Cublas()],
    ("lm_head", 1): [
        Gemv(8, 8, 6, 2, 128), Gemv(8, 8, 4, 2, 128), Gemv(8, 8, 12, 2, 128), Gemv(16, 8, 6, 1, 255), Gemv(16, 16, 6, 1, 128),
        Gemv(8, 8, 6, 0, 128), Gemv(8, 4, 6, 0, 168), Gemv(4, 4, 6, 0, 96), Gemv(8, 8, 6, 2, 128, False, ""),
        Rows(A1), Rows(A2), Rows(A3), Ring(32, 4, 8, 1), Cublas(),
    ],
    ("lm_head", 8): [Rows(A2), Rows(A3), Ring(16, 4, 8, 2), Ring(32, 4, 8, 1), Cublas()],
}  # fmt: skip


class Data(NamedTuple):
    op: str
    weight: torch.Tensor
    given: Qkv | None
    x: torch.Tensor
    bias: torch.Tensor


def make(op: str, num_tokens: int, device: str = "cuda") -> Data:
    given = make_qkv("120b", num_tokens, 4, device) if op == "qkv" else None
    if given is not None:
        return Data(op, given.weight, given, given.x, given.bias)
    rows, k = SHAPES[op]
    torch.manual_seed(num_tokens)
    weight = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) * k**-0.5).to(torch.bfloat16)
    return Data(op, weight, None, torch.randn(num_tokens, k, device=device, dtype=torch.bfloat16),
                torch.randn(rows, device=device, dtype=torch.bfloat16))  # fmt: skip


def rotation_of(given: Qkv | None) -> tuple[Any, ...]:
    if given is None:
        return None, None, None, None, None, 0, None, 0
    spans, pages, kv = given.spans, given.pages, given.kv
    assert spans.work is not None
    return given.rope, spans.rows, spans.positions, spans.work.counts, pages, pages.stride(0), kv, kv.stride(0)


def call(data: Data, variant: Variant, weight: torch.Tensor) -> torch.Tensor:
    """The op's y, or q, by the variant."""
    given, num_tokens, (rows, k) = data.given, len(data.x), data.weight.shape
    bias = None if data.op == "lm_head" else data.bias
    if isinstance(variant, Rows | Old):
        return _call_stream(data, variant, weight)
    if isinstance(variant, Cublas):
        if data.op == "lm_head":
            return torch.mm(data.x, weight.T, out_dtype=torch.float32)
        if given is None:
            return torch.addmm(data.bias, data.x, weight.T)
        _, y = add_norm(given.x, given.parts, given.gain, EPS)
        return rope_append(torch.addmm(given.bias, y, weight.T), given.rope, given.spans, given.pages, given.kv)
    x, fused = data.x, isinstance(variant, Gemv) and variant.fused
    if given is not None and not fused:
        _, x = add_norm(given.x, given.parts, given.gain, EPS)
    heads = 8 if given is not None else 0
    y = x.new_empty(num_tokens, rows - 128 * heads, dtype=torch.float32 if data.op == "lm_head" else torch.bfloat16)
    tiles = rows // variant.rows
    grid = min(tiles, variant.per_sm * num_sms()) if variant.per_sm else tiles
    shared = {"M": rows, "K": k, "KIND": KINDS[data.op], "KV_HEADS": heads, "num_warps": variant.warps}
    if isinstance(variant, Gemv):
        norm = (None, None, None, 0.0)
        if given is not None and fused:
            norm = (given.parts, given.gain, torch.empty_like(x), EPS)  # type: ignore[assignment]
        launch(
            dense_gemv.gemv_kernel, (grid,), weight, bias, x, y, *norm, *rotation_of(given), T=num_tokens, NORM=fused,
            PARTS=4 if fused else 0, ROWS=variant.rows, U=variant.u, LOOP=grid < tiles, EVICT=variant.evict,
            maxnreg=variant.maxnreg, **shared,
        )  # fmt: skip
    else:
        layout = gl.NVMMASharedLayout(128, 16, 2)
        descriptor = TensorDescriptor.from_tensor(weight, [variant.rows // 2, 64 * variant.warps], layout)
        launch(
            dense_ring.ring_kernel, (grid,), descriptor, bias, x, y, num_tokens, *rotation_of(given),
            N=max(8, num_tokens), DEPTH=variant.depth, maxnreg=variant.maxnreg, **shared,
        )  # fmt: skip
    return y


def _call_stream(data: Data, variant: Rows | Old, weight: torch.Tensor) -> torch.Tensor:
    dense.dense_stream = dense_rows if isinstance(variant, Rows) else dense_stream  # type: ignore[assignment]
    dense.launch = partial(launch, EVICT=variant.evict) if isinstance(variant, Rows) else launch  # type: ignore[assignment]
    dense.PLANS.update(dict.fromkeys(dense.PLANS, variant.plan))
    dense.LOGITS.update(dict.fromkeys(dense.LOGITS, variant.plan))
    dense.FUSED, dense.MAX_FUSED = variant.plan, 8 if variant.fused else 0
    dense.MAX_STREAMED = dense.MAX_STREAMED_LOGITS = 64
    dense._cut.cache_clear()
    if data.given is not None:
        return data.given._replace(weight=weight).call(dense.norm_qkv)[1]  # type: ignore[no-any-return]
    if data.op == "lm_head":
        return dense.lm_head(data.x, weight)
    return dense.linear(data.x, weight, data.bias)


def build(op: str, num_tokens: int, variant: Variant) -> str:
    with compiling() as built:
        data = make(op, num_tokens, "meta")
        call(data, variant, data.weight)
    if not built:
        return ""
    kernel = built[-1]
    return f"{kernel.registers} registers, {kernel.stack} stack, {kernel.shared >> 10} KB"


def check(data: Data, variant: Variant) -> str:
    def results(variant: Variant) -> list[torch.Tensor]:
        if data.given is not None:
            data.given.kv.fill_(torch.nan)
        y = call(data, variant, data.weight)
        return [y.flatten()] if data.given is None else [y[: data.given.num_tokens].flatten(), data.given.kv.flatten().clone()]

    for want, got in zip(results(Cublas()), results(variant), strict=True):
        want, got = want[: got.numel()], got[: want.numel()]
        same_poison = torch.equal(want.isnan(), got.isnan())
        want, got = want.nan_to_num().float(), got.nan_to_num().float()
        if not same_poison or not float((got - want).norm() / want.norm()) < 0.01:
            return f"WRONG {float((got - want).norm() / want.norm()):.3f} "
    return ""


def main() -> None:
    cases = [(op, n, variant) for (op, n), variants in CASES.items() for variant in variants]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        builds = [pool.submit(build, *case) for case in cases]
        notes: dict[Any, str] = {}
        for case, done in zip(cases, builds, strict=True):
            try:
                notes[case] = done.result()
            except Exception as error:
                notes[case] = f"FAILED {error!r:.120}"
    print("op       tokens     us  TB/s  variant")
    for (op, num_tokens), variants, rings in [(*case, rings) for rings in (False, True) for case in CASES.items()]:
        variants = [variant for variant in variants if isinstance(variant, Ring) is rings]
        if not variants:
            continue
        data = make(op, num_tokens)
        copies = [data.weight.clone() for _ in range(max(1, 300_000_000 // (2 * data.weight.numel())))]
        for variant in variants:
            note = notes[op, num_tokens, variant]
            try:
                wrong = check(data, variant)
                functions: list[Callable[[], object]] = [partial(call, data, variant, w) for w in copies]
                us = microseconds(functions)
            except Exception as error:
                print(f"{op:8} {num_tokens:6}   {variant} {error!r:.200} {note}", flush=True)
                continue
            rate = 2e-6 * data.weight.numel() / us
            print(f"{op:8} {num_tokens:6} {us:6.1f} {rate:5.2f}  {wrong}{variant} ({note})", flush=True)


if __name__ == "__main__":
    main()
