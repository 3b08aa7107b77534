"""The sampling kernels compile for sm_90, without a GPU: no spills, wide loads, and few enough instructions a logit."""

import pytest
import torch

from simplellm.kernels.hopper.launch import Compiled, compiling
from simplellm.kernels.hopper.sampling import sample, sample_full
from simplellm.kernels.hopper.sampling_common import TILE
from simplellm.kernels.hopper.sampling_tables import TOP, Tables

VOCAB_SIZE = 201_088
THREADS = 128


def build(num_rows: int, full: bool) -> dict[str, Compiled]:
    meta = torch.device("meta")
    ints = lambda *shape: torch.empty(shape, dtype=torch.int32, device=meta)  # noqa: E731
    logits = torch.empty(num_rows, VOCAB_SIZE, device=meta)
    arguments = (logits, ints(num_rows, 2), Tables.empty(1024, 32, VOCAB_SIZE, meta), ints(num_rows), ints(1024))
    with compiling() as built:
        if full:
            sample_full(*arguments, torch.empty(num_rows, 1 + TOP, device=meta), ints(num_rows, TOP))
        else:
            sample(*arguments)
    assert len(built) == (20 if full else 2)
    return {kernel.name: kernel for kernel in built}


@pytest.mark.parametrize("num_rows", [1, 256])
@pytest.mark.parametrize("full", [False, True])
def test_kernels_fit(num_rows, full):
    for kernel in build(num_rows, full).values():
        assert kernel.stack == 0 and not kernel.count(r"LDL|STL"), f"{kernel.name} spills"
        assert kernel.registers * THREADS <= 65_536 // 4, f"{kernel.name}: fewer than four programs on a multiprocessor"
        assert kernel.count("ACQBULK") == 1 and kernel.count("PREEXIT") == 1, kernel.name
        if kernel.name not in ("_finish", "_report"):
            assert kernel.count(r"LDG.E.128") >= TILE // THREADS // 16, kernel.name


def test_noise_hides_behind_the_reading():
    """One multiprocessor has about 30 issue slots a logit in the time in which 4.5 TB/s bring it."""
    kernel = build(256, False)["_race"]
    per_logit = len(kernel.sass) / (TILE / THREADS)
    assert per_logit < 50, "with all that is done once a program"
    assert kernel.count("MUFU.LG2") == 2 * TILE // THREADS
    assert kernel.count(r"IMAD\.(WIDE|HI)\.U32") <= 20 * TILE // THREADS // 4, "one multiplication a half-round"
