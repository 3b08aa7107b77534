"""pack: the words, unpacked by the kernel's rotations and masks, are the weights; unpack gives the file's bytes back."""

import pytest
import torch

from simplellm.kernels.hopper import pack as pack_module
from simplellm.kernels.hopper.pack import Stream, pack, unpack
from simplellm.kernels.moe import dequantise
from tests.kernels.hopper.check import broken

MASK = 0x81C081C0 - (1 << 32)
SHAPES = [("gate_up", 128, 64), ("gate_up", 384, 192), ("down", 64, 64), ("down", 192, 320)]  # kind, rows, columns


def matrices(rows, columns, largest, seed=0, num_experts=3):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (num_experts, rows, columns // 32, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(0, largest + 1, (num_experts, rows, columns // 32), generator=g, dtype=torch.uint8)
    scales[0, 0, 0] = largest
    return blocks, scales, torch.randn(num_experts, rows, generator=g).bfloat16()


def right(words, turn):
    return (words >> turn & (1 << 32 - turn) - 1) | words << (32 - turn)


def decode(stream: Stream) -> torch.Tensor:
    """What the kernel makes of the words -> float64 [E, rows, cols], rows in MMA order."""
    num_experts, stripes, blocks, _ = stream.words.shape
    words = stream.words[..., :512].reshape(num_experts, stripes, blocks, 4, 8, 4, 4)  # w g q j
    last = right(words, 6) & 0x81808180 - (1 << 32) | words << 2 & 0x00400040
    pairs = torch.stack([words & MASK, right(words, 4) & MASK, words << 6 & MASK, last], -1)  # h + 2 c
    values = pairs.contiguous().view(torch.bfloat16).double() * 2.0**126  # e s kb w g q j (c h p)
    values = values.unflatten(-1, (2, 2, 2)).permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9)  # e s w h g kb j c q p
    scales = stream.words.view(torch.uint8)[..., 2048:].reshape(num_experts, stripes, blocks, 4, 8, 2, 2)  # w g h i
    scales = scales.permute(0, 1, 3, 5, 4, 2, 6).flatten(1, 4).flatten(2)
    powers = 2.0 ** (scales.double() - (127 if stream.big else 253))
    return values.flatten(1, 4).flatten(2) * powers.repeat_interleave(32, -1)


def mma_rows(kind, x):
    """By definition: MMA row 64 s + 16 w + 8 h + g."""
    if kind == "down":
        return x
    return torch.stack([x[:, 64 * (m // 64) + 16 * (m // 16 % 4) + 2 * (m % 8) + m // 8 % 2] for m in range(x.shape[1])], 1)


def check(pack, kind, rows, columns, largest) -> None:
    blocks, scales, bias = matrices(rows, columns, largest)
    stream = pack(kind, blocks, scales, bias)
    assert stream.words.shape == (3, rows // 64, columns // 64, 544) and stream.big == (largest > 128)
    assert torch.equal(decode(stream), mma_rows(kind, dequantise(blocks, scales)))
    assert torch.equal(stream.bias, mma_rows(kind, bias.float()))


@pytest.mark.parametrize("largest", [122, 128, 129, 254])
@pytest.mark.parametrize(("kind", "rows", "columns"), SHAPES)
def test_the_kernel_would_read_the_weights(kind, rows, columns, largest) -> None:
    check(pack, kind, rows, columns, largest)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x00060006, 12", "0x00060006, 11"),
        ("LARGEST = 126, 128", "LARGEST = 126, 130"),
        ("-1, 4, 8, 2, x.shape[-1]).transpose(3, 4)", "-1, 4, 2, 8, x.shape[-1])"),
    ],
    ids=["a bit off", "scales that overflow", "gate and up not paired"],
)
def test_a_broken_pack_is_noticed(old, new) -> None:
    with pytest.raises(AssertionError):
        check(broken(pack_module, old, new).pack, "gate_up", 128, 64, 129)


@pytest.mark.parametrize("largest", [128, 254])
@pytest.mark.parametrize(("kind", "rows", "columns"), SHAPES)
def test_unpack_gives_the_bytes_back(kind, rows, columns, largest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "CHUNK_BYTES", 2 * rows * columns // 2)  # of three experts two at a time
    given = matrices(rows, columns, largest)
    assert all(torch.equal(*pair) for pair in zip(unpack(pack(kind, *given)), given, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [128, 254])
@pytest.mark.parametrize("kind", ["gate_up", "down"])
def test_on_the_gpu(kind, largest) -> None:
    given = matrices(5760, 2880, largest, num_experts=2)
    stream, want = pack(kind, *(x.cuda() for x in given)), pack(kind, *given)
    assert torch.equal(stream.words.cpu(), want.words) and torch.equal(stream.bias.cpu(), want.bias)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(unpack(stream), given, strict=True))
