"""A harmony header as the model wrote it, read leniently: author, channel, recipients, and what fits nowhere.

Never raises. Recipients may stand before or after the channel; each departure from the format is named in `repairs`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

CHANNEL = "<|channel|>"
PREFIX = "functions."

_ITEM = re.compile(
    r"\s*(?:to=\s*(?P<recipient>[^\s<]*)"
    r"|(?P<channel>analysis|commentary|final)(?=to=|[^a-z]|$)"
    r"|(?P<bare>functions\.[^\s<]+)"
    r"|(?:json|code|text)(?![^\s<]))",
    re.IGNORECASE,
)
_AUTHOR = re.compile(
    r"\s*(assistant|user|system|developer|tool|functions\.[^\s<]+)(?::[^\s<]*)?"
    r"(?=[^\w.]|to=|analysis|commentary|final|$)"
)
_WORD = re.compile(r"\s*([^\s<]+)")
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_NO_FUNCTIONS = {"assistant", "user", "all", "system", "developer", "tool", "python"}


@dataclass(slots=True)
class Header:
    """What `read` found."""

    author: str = "assistant"
    channel: str | None = None
    recipients: list[str] = field(default_factory=list)
    rest: str = ""  # from the first word on that belongs in no header
    spoken: str = ""  # what was said, if it turns out that no <|message|> follows
    bare: bool = False  # neither marker nor recipient: perhaps no header at all
    repairs: list[str] = field(default_factory=list)

    @property
    def others(self) -> list[str]:
        """Recipients besides the user."""
        return [name for name in self.recipients if name not in ("user", "all")]

    @property
    def for_user(self) -> bool:
        """Whether the message is content, if it is no call. Mangled headers stay behind the scenes, except `final`."""
        if self.channel == "final":
            return True
        return not self.others and (self.channel is None or (self.channel == "commentary" and not self.rest.strip()))


def read(segments: Sequence[tuple[str, str]], author_given: bool) -> Header:
    """Read (marker, text after it) pairs; the first has no marker. `author_given`: the prompt names the author."""
    header, lead = Header(), segments[0][1]
    author = _AUTHOR.match(lead)
    if author and (author[1] == "assistant" or not author_given):
        header.author, after_author = author[1], lead[author.end() :]
    else:
        after_author = lead
    header.rest = _items(header, after_author)
    for marker, text in segments[1:]:
        header.rest += _segment(header, marker, text)
    if len(header.recipients) > 1:
        header.repairs.append("repeated_recipient")
    header.bare = len(segments) == 1 and not header.recipients
    if not header.bare:
        header.spoken = header.rest.lstrip()
    elif header.rest.strip():
        header.spoken = lead if author_given or header.author != "assistant" else after_author.lstrip()
    return header


def resolve(recipient: str, tools: Collection[str] | None) -> str | None:
    """The function that a recipient means: one of `tools`; where tools is None, any well-formed name."""
    match = _NAME.match(recipient)
    name = match[0] if match else ""
    bare = not name.startswith(PREFIX)
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    if tools is not None:
        return name if name in tools else None
    return None if not name or (bare and (name in _NO_FUNCTIONS or "." in name)) else name


def _segment(header: Header, marker: str, text: str) -> str:
    if marker == CHANNEL and not _ITEM.match(text) and (word := _WORD.match(text)):
        header.channel = word[1]
        header.repairs.append("unknown_channel")
        return _items(header, text[word.end() :])
    return _items(header, text, channel_due=marker == CHANNEL)


def _items(header: Header, text: str, channel_due: bool = False) -> str:
    """Take what belongs in a header off the front of `text`; the remainder."""
    at = 0
    while match := _ITEM.match(text, at):
        at = match.end()
        if name := match["recipient"] or match["bare"]:
            header.recipients.append(name)
        elif channel := match["channel"]:
            if header.channel is not None:
                header.repairs.append("repeated_channel")
            if not channel_due:
                header.repairs.append("unmarked_channel")
            header.channel, channel_due = channel.lower(), False
    return text[at:]
