"""The many ways of saying the same: greetings, politeness, lower case, missing punctuation."""

from __future__ import annotations

from random import Random

from tools.builtin.words import NUMERALS, listed


def split(phrases: str) -> list[str]:
    """Phrases with a bar between them."""
    return phrases.split("|")


STARTERS = set(
    listed(
        "What How Which Is Add Please Compute Calculate Subtract Multiply Sort Put Order Reverse Spell Write Turn Count "
        "Convert Tell Look Find Who Can Do Does Today If Sum Divide Compare Now And Take Where Check Will When Why "
        "Explain Give Search Set Should Are Sing Draw Recommend Summarize Translate One Double Could Would I Say Show "
        "Name My The"
    )
)
ENDS = set(
    listed("largest biggest highest greatest smallest lowest least max min sum larger smaller length weather price status time")
)
BEFORE = split(
    "Hi! |Hello, |Hi, |Hey, |Hello! |Please tell me: |Quick question: |Question: |Can you help me? |Tell me: |Ok, "
    "|Next: |So, |Good morning! |I have a question. |Thanks! |Great. |Dear model, |One more: "
)
AFTER = split(" Thanks!| Please.| please| Thank you.| Quickly.| thanks| Can you do that?| I need it for school.")


def vary(rng: Random, ask: str) -> str:
    """The question, perhaps said less or more carefully. Only the first word may change its case."""
    first = ask.split(" ", 1)[0].rstrip(",.!?")
    if ask.startswith("What is ") and rng.random() < 0.2:
        ask = rng.choice(("What's ", "Whats ", "Tell me what is ", "Can you tell me what is ")) + ask[8:]
    if first in STARTERS and rng.random() < 0.25:
        ask = ask[0].lower() + ask[1:]
    elif ask.split(" ", 1)[0] in ENDS and rng.random() < 0.5:
        ask = ask[0].upper() + ask[1:]
    if rng.random() < 0.2:
        ask = ask.rstrip("?.")
    if rng.random() < 0.12:
        ask = rng.choice(BEFORE) + ask
    if rng.random() < 0.08:
        ask += rng.choice(AFTER)
    return ask


def politely(rng: Random, command: str) -> str:
    """A command, such as "Add 1 and 2.", perhaps as a question."""
    if rng.random() < 0.7:
        return command
    inner = command[0].lower() + command[1:].rstrip(".")
    return rng.choice(
        ("Please {c}.", "Can you {c}?", "Could you {c} please?", "Can you {c} please?", "I want you to {c}.")
    ).format(c=inner)


def numeral(n: int, spelled: bool) -> str:
    return NUMERALS[n] if spelled and n < len(NUMERALS) else str(n)
