"""Stop strings across tokens: what is shown, what is held back, which tokens survive."""

import codecs
import random

import pytest

from simplellm.text.reader import TextReader


class Pieces:
    """A decoder whose tokens are indices into `pieces`; bytes of a character may be split over tokens."""

    def __init__(self, pieces: list[bytes]):
        self.pieces, self.utf8 = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        return self.utf8.decode(b"".join(self.pieces[i] for i in ids))

    def flush(self) -> str:
        return self.utf8.decode(b"", final=True)


def run(pieces: list[bytes], stops: tuple[str, ...]) -> tuple[list[str], TextReader]:
    reader, shown = TextReader(Pieces(pieces), stops), []
    for token in range(len(pieces)):
        shown.append("".join(delta.text for delta in reader.push(token)))
        if reader.complete:
            return shown, reader
    return [*shown, "".join(delta.text for delta in reader.close())], reader


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "num_tokens"),
    [
        ([b"ab", b"cd"], (), ["ab", "cd", ""], 2),
        ([b"ab", b"cd"], ("d",), ["ab", "c"], 2),
        ([b"ab", b"cd"], ("c",), ["ab", ""], 1),
        ([b"ab", b"cd", b"e"], ("bcd",), ["a", ""], 1),
        ([b"ab", b"cd", b"e"], ("abc",), ["", ""], 0),
        ([b"ab", b"cx", b"e"], ("bcd",), ["a", "bcx", "e", ""], 3),
        ([b"aa", b"ab"], ("aab",), ["", "a"], 1),  # the held text begins the stop twice over
        ([b"hello", b" wor"], (" world",), ["hello", "", " wor"], 2),  # held to the end, then shown
        ([b"a", b"b", b"c"], ("abcd", "bc"), ["", "", "a"], 1),
        ([b"one STOP two"], ("STOP", "ST"), ["one "], 1),
        (
            [b"x\xe2", b"\x82", b"\xac!"],
            ("\u20ac!",),
            ["x", "", ""],
            2,
        ),  # a character over three tokens; without text the second one was given out
        ([b"x\xe2"], (), ["x", "\ufffd"], 1),
    ],
)
def test_stops(pieces: list[bytes], stops: tuple[str, ...], shown: list[str], num_tokens: int) -> None:
    got, reader = run(pieces, stops)
    assert (got, reader.num_tokens) == (shown, num_tokens)


def test_any_cut_into_tokens_gives_the_same_text() -> None:
    """What is shown never takes back a character, and is the text up to the first stop string."""
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("ab\u20ac") for _ in range(rng.randrange(1, 30)))
        stops = tuple("".join(rng.choice("ab\u20ac") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(3)))
        data, pieces = text.encode(), []
        while data:
            cut = rng.randrange(1, 5)
            pieces.append(data[:cut])
            data = data[cut:]
        shown, reader = run(pieces, stops)
        first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
        # of two stops that end in one token the one that begins first counts; a later token never wins over an earlier
        got = "".join(shown)
        assert text.startswith(got) and len(got) >= first
        assert reader.cut == any(stop in text for stop in stops)
        assert not any(stop in got for stop in stops)
