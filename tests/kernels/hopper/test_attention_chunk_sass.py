"""What the chunk kernels compile to: asynchronous products on the tensor cores, no spills, few instructions a score."""

import pytest

pytest.importorskip("triton")

from simplellm.kernels.hopper import attention_chunk
from simplellm.kernels.hopper.launch import compiling
from tests.kernels.hopper.test_attention_decode_sass import SM_SHARED, arguments, meta


@pytest.mark.parametrize("window", [None, 128])
def test_chunk(window):
    with compiling() as built:
        attention_chunk.chunk(*arguments(4096, 0, 32), window, meta(4096, 4096))
    assert len(built) == (2 if window is None else 1), "the second launch is for full layers"
    for kernel in built:
        assert kernel.stack == 0 and kernel.count(r"\b(LDL|STL)") == 0
        assert kernel.registers <= 128  # at launch; 416 threads then share them anew
        assert kernel.shared <= SM_SHARED
        assert kernel.count("HGMMA") >= 3 * 24, "three warpgroups, QK and PV of two pages or more"
        # ptxas that gives asynchrony up fences every product; so: three arrivals and waits a loop or less
        assert kernel.count("WARPGROUP") <= kernel.count("HGMMA") // 3
        assert kernel.count("ACQBULK") == 1
