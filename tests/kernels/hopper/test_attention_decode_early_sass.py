"""What the decode kernels that read ahead compile to: keys and values above the wait, tensor cores, no spills."""

import pytest

pytest.importorskip("triton")

from simplellm.kernels.hopper import attention_decode_early
from simplellm.kernels.hopper.launch import compiling
from tests.kernels.hopper.test_attention_decode_sass import SM_REGISTERS, SM_SHARED, arguments, meta

WIDE = {"num_warps": 8, "STEP": 128, "STAGES": 3}


@pytest.mark.parametrize("window, options, per_sm", [(None, {}, 3), (None, WIDE, 2), (128, {}, 5), (128, {"num_warps": 8}, 3)])
def test_decode(window, options, per_sm, monkeypatch):
    place = attention_decode_early.FULL if window is None else attention_decode_early.WINDOW_ONLY
    for name, value in options.items():
        monkeypatch.setitem(place, name, value)
    with compiling() as built:
        attention_decode_early.decode(*arguments(64, 128, 0), window, meta(64, 4096))
    (kernel,) = built
    threads = 32 * kernel.num_warps
    assert kernel.count(r"HMMA\.16816\.F32\.BF16") > 0
    assert kernel.stack == 0 and kernel.count(r"\b(LDL|STL)") == 0
    assert per_sm * kernel.registers * threads <= SM_REGISTERS
    assert per_sm * (kernel.shared + 1024) <= SM_SHARED
    (wait,) = [i for i, instruction in enumerate(kernel.sass) if "ACQBULK" in instruction]
    ahead = sum("LDG" in instruction and ".128" in instruction for instruction in kernel.sass[:wait])
    assert ahead == place["KEYS"] * 256 // 16 // threads, "keys and values wait for the kernel before"
    if window is None:
        ring = (place["STAGES"] - 1) * place["STEP"] * 256
        copies = ring // 16 // threads  # a prologue that fills the ring; the loop adds one step's
        assert kernel.count(r"LDGSTS.*\.128") == copies + copies // (place["STAGES"] - 1)
