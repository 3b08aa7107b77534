"""The experts' MXFP4 weights in the order in which the Hopper kernels read them: a permutation of the checkpoint's bits.

A matrix is cut in stripes of 64 rows and blocks of 64 columns. Block (e, s, kb) is 544 words: 512 of codes, 32 of scales; a
stripe's blocks follow each other along K, then the next stripe. Word (w, g, q, j) of a block, w < 4, g < 8, q < 4, j < 4, holds
eight codes: row 16 w + 8 h + g, column 16 j + 8 c + 2 q + p for h, c, p in {0, 1}: what thread (warp w, lane 4 g + q) needs as
the MMA's A operand in step j. Scale byte (w, g, h, i) is that of row 16 w + 8 h + g, columns 32 i .. 32 i + 31.
MMA row 64 s + 16 w + 8 h + g is row 64 s + 16 w + 2 g + h of gate_up (h: gate or up of one unit), and itself of down.
Same bytes as in the checkpoint: 4.25 bit a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["gate_up", "down"]
BLOCK_WORDS, CODE_WORDS = 544, 512  # int32 words of a block, and those of them that hold codes
SHIFT, LARGEST = 126, 128  # a stored scale byte is the file's + SHIFT, if all of them are at most LARGEST

# Where a byte's two codes go in a word, for group h + 2 c of the four: (bits, how far they are rotated left), of the codes at
# bits 0 and 16. So placed, the kernel makes four bf16 pairs of a word with one rotation and one mask a group, two for the last.
PIECES = (
    ((0x00080008, 12), (0x00070007, 6)),
    ((0x00080008, 16), (0x00070007, 10)),
    ((0x00080008, 6), (0x00070007, 0)),
    ((0x00080008, 18), (0x00060006, 12), (0x00010001, 4)),
)
CHUNK_BYTES = 64 << 20  # of codes packed at a time; the scratch is a few times that


@dataclass(frozen=True, slots=True)
class Stream:
    """One matrix [rows, cols] of each of E experts."""

    words: torch.Tensor  # int32 [E, rows / 64, cols / 64, BLOCK_WORDS]
    bias: torch.Tensor  # float32 [E, rows] in MMA row order
    big: bool  # some scale is above 2 (byte above LARGEST): scale bytes are stored as they are
    kind: Kind
    rows: int
    cols: int


def pack(kind: Kind, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> Stream:
    """blocks [E, R, G, 16], scales [E, R, G] uint8 (none is 255: NaN), bias [E, R] -> Stream. R and 32 G: multiples of 64."""
    num_experts, rows, groups = scales.shape
    assert rows % 64 == 0 and groups % 2 == 0 and blocks.shape == (*scales.shape, 16) and bias.shape == scales.shape[:2]
    shape = (num_experts, rows // 64, groups // 2)
    big = int(scales.max()) > LARGEST
    words = torch.empty(*shape, BLOCK_WORDS, dtype=torch.int32, device=blocks.device)
    for part, codes, marks in _chunks(kind, words, blocks, scales):
        word = torch.zeros_like(codes[0], dtype=torch.int32, memory_format=torch.contiguous_format)
        for group, pieces in enumerate(PIECES):
            pair = torch.empty_like(word).copy_(codes[group])
            pair = pair | pair << 12  # the byte's high code to bit 16; the masks drop the rest
            for mask, turn in pieces:
                word |= _rotate(pair & mask, turn)
        part[..., :CODE_WORDS] = word.flatten(3)
        bytes_ = part.view(torch.uint8)[..., 4 * CODE_WORDS :]
        bytes_.copy_((marks if big else marks + SHIFT).flatten(3))
    return Stream(words, _mma_rows(kind, bias.float()[..., None]).flatten(1), big, kind, rows, 32 * groups)


def unpack(stream: Stream) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments `pack` was given: blocks, scales, and the bias in bfloat16."""
    words, kind = stream.words, stream.kind
    scales = torch.empty(len(words), stream.rows, stream.cols // 32, dtype=torch.uint8, device=words.device)
    blocks = torch.empty(*scales.shape, 16, dtype=torch.uint8, device=words.device)
    for part, codes, marks in _chunks(kind, words, blocks, scales):
        word = part[..., :CODE_WORDS].reshape(codes[0].shape)
        for group, pieces in enumerate(PIECES):
            pair = torch.zeros_like(word)
            for mask, turn in pieces:
                pair |= _rotate(word, 32 - turn) & mask
            codes[group].copy_((pair | pair >> 12) & 255)
        stored = part.view(torch.uint8)[..., 4 * CODE_WORDS :].reshape(marks.shape)
        marks.copy_(stored if stream.big else stored - SHIFT)
    bias = torch.empty(len(words), stream.rows, 1, device=words.device)
    _mma_rows(kind, bias).copy_(stream.bias.view(len(words), -1, 4, 2, 8, 1))
    return blocks, scales, bias[..., 0].bfloat16()


def _mma_rows(kind: Kind, x: torch.Tensor) -> torch.Tensor:
    """View of x [E, R, n] as [E, s, w, h, g, n]."""
    if kind == "gate_up":
        return x.view(len(x), -1, 4, 8, 2, x.shape[-1]).transpose(3, 4)
    return x.view(len(x), -1, 4, 2, 8, x.shape[-1])


def _chunks(
    kind: Kind, words: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """A few experts at a time: their words, and views in the order of the words of each group's bytes and of the scales.

    Bytes: [e, s, kb, w, g, q, j], group h + 2 c; scales: [e, s, kb, w, g, h, i].
    """
    step = max(1, CHUNK_BYTES // (blocks.shape[1] * blocks.shape[2] * 16))
    for part, b, s in zip(words.split(step), blocks.split(step), scales.split(step), strict=True):
        codes = _mma_rows(kind, b.flatten(2)).unflatten(-1, (-1, 4, 2, 4))  # e s w h g kb j c q
        marks = _mma_rows(kind, s).unflatten(-1, (-1, 2))  # e s w h g kb i
        groups = [codes[:, :, :, h, :, :, :, c].permute(0, 1, 4, 2, 3, 6, 5) for c in range(2) for h in range(2)]
        yield part, groups, marks.permute(0, 1, 5, 2, 4, 3, 6)


def _rotate(x: torch.Tensor, turn: int) -> torch.Tensor:
    """int32 rotated left by `turn` of 32."""
    if turn % 32 == 0:
        return x
    return x << turn | x >> (32 - turn) & (1 << turn) - 1
