"""What the decode kernels compile to: tensor cores, copies that pass the registers by, four CTAs a SM, no spills."""

import pytest
import torch

pytest.importorskip("triton")

from simplellm.kernels.hopper import attention_decode
from simplellm.kernels.hopper.launch import compiling
from simplellm.kernels.spans import COUNTS, ITEM, TILE_FIELDS, Spans, Work

SM_REGISTERS, SM_SHARED = 65_536, 227 * 1024


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def arguments(num_tokens, num_items, num_tiles, num_kv=8):
    """Of `decode` and `chunk`, but for the window: the sizes of both checkpoints."""
    ints = torch.int32
    work = Work(*(meta(*shape, dtype=ints) for shape in ((COUNTS,), (num_items, ITEM), (num_tiles, TILE_FIELDS))))
    spans = Spans(meta(num_tokens, dtype=ints), meta(num_tokens, dtype=ints), None, work)
    q, kv = meta(num_tokens, 8 * num_kv, 64), meta(2, 100, num_kv, 128, 64)
    return q, kv, meta(1024, 1024, dtype=ints), spans, meta(8 * num_kv)


@pytest.mark.parametrize("window", [None, 128])
def test_decode(window):
    with compiling() as built:
        attention_decode.decode(*arguments(64, 128, 0), window, meta(64, 4096))
    (kernel,) = built
    assert kernel.count(r"HMMA\.16816\.F32\.BF16") > 0
    assert kernel.stack == 0 and kernel.count(r"\b(LDL|STL)") == 0
    assert 4 * kernel.registers * 32 * kernel.num_warps <= SM_REGISTERS
    assert 4 * (kernel.shared + 1024) <= SM_SHARED
    assert kernel.count("ACQBULK") == 1
    if window is None:
        config = attention_decode.FULL
        ring = (config["STAGES"] - 1) * config["KEYS"] * 256
        assert kernel.shared >= ring, "steps wait for one another"
        copies = ring // 16 // (32 * kernel.num_warps)  # a prologue that fills the ring; the loop adds one step's
        assert kernel.count(r"LDGSTS.*\.128") == copies + copies // (config["STAGES"] - 1)
    else:
        assert kernel.count(r"LDG.*\.128") >= 2 * 128 * 128 // 16 // (32 * kernel.num_warps)
