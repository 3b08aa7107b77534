"""Problems with words: counting letters, reversing, weekdays and dates, looking up in a list."""

from __future__ import annotations

import datetime
import json
from random import Random

from tools.builtin.phrasing import politely, vary
from tools.builtin.problem import Problem
from tools.builtin.words import (
    CITIES,
    COLOURS,
    DAYS,
    ITEMS,
    KEYS,
    NAMES,
    NOUNS,
    NUMERALS,
    QUALITIES,
    SAID,
    SKIES,
    SMALL,
    VERBS,
    name_word,
    word,
)

PLAIN = (*ITEMS, *COLOURS, *NOUNS, *VERBS, *QUALITIES, *NUMERALS, *SMALL, *KEYS, *SKIES, *SAID, *NAMES, *CITIES, *DAYS)
LISTED = list(dict.fromkeys((*PLAIN, *(each.lower() for each in DAYS))))  # tokens, whose spelling must be learnt


def _some_word(rng: Random, longest: int) -> str:
    made = rng.choice(LISTED) if rng.random() < 0.45 else word(rng, 3, longest)
    return made.capitalize() if rng.random() < 0.15 else made


def _ask(rng: Random, phrases: str, **values: object) -> str:
    phrase = rng.choice(phrases.split("|")).format(**values)
    return vary(rng, politely(rng, phrase) if phrase.endswith(".") else phrase)


def count(rng: Random, effort: str) -> Problem:
    """Letters are counted without regard to case."""
    text = _some_word(rng, 14)
    if rng.random() < 0.2:
        return _length(rng, effort, text)
    spelled = text.lower()
    letter = rng.choice(spelled) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    phrases = (
        'How many "{c}" are in "{w}"?|How many times does {c} appear in {w}?|How many letters {c} are in {w}?|How many '
        "{c}s are in {w}?|How many {c}'s are in {w}?|Count the letter {c} in {w}.|How many {c} are there in {w}?|How "
        'often does the letter "{c}" occur in the word "{w}"?|How many {c} in {w}?|How many {c}\'s are in the word {w}?|'
        "Count the {c}'s in {w}.|How many {c}'s does {w} have?|How often is {c} in {w}?|How many {c}s in {w}?|Number of "
        '{c} in {w}?|How many times is the letter {c} in "{w}"?|How many {c}\'s in the word "{w}"?'
    )
    ask = _ask(rng, phrases, c=letter.upper() if rng.random() < 0.1 else letter, w=text)
    runs = [spelled[: i + 1].count(letter) for i in range(len(text))]
    total = runs[-1]
    pairs = [f"{c}{n}" for c, n in zip(spelled, runs, strict=True)]
    times = "1 time" if total == 1 else f"{total} times"
    if effort == "low":
        think = f"{letter}: {''.join(pairs)}"
    elif effort == "medium":
        think = f"I count {letter} in {text}, letter by letter: {' '.join(pairs)}\nThat makes {total}."
    else:
        marks = ["yes" if c == letter else "no" for c in spelled]
        rows = "\n".join(f"{i + 1} {c} {m} {n}" for i, (c, m, n) in enumerate(zip(spelled, marks, runs, strict=True)))
        think = f"I look for {letter} in {text}, one letter at a time.\n{rows}\nSo {letter} is there {times}."
    sentence = f'The letter "{letter}" appears {times} in "{text}".'
    return Problem(f"count {letter} {spelled}", ask, think, sentence, str(total), total)


def _length(rng: Random, effort: str, text: str) -> Problem:
    phrases = (
        'How many letters does "{w}" have?|How long is the word {w}?|How many letters are in {w}?|Count the letters of {w}.|'
        "How many letters are in the word {w}?|How many letters does {w} have?|How long is {w}?|What is the length of {w}?|"
        "Count the letters in {w}.|How many characters are in {w}?|length of {w}"
    )
    pairs = [f"{c}{i + 1}" for i, c in enumerate(text)]
    think = {
        "low": "".join(pairs),
        "medium": f"I number the letters of {text}: {' '.join(pairs)}\nThat makes {len(text)}.",
        "high": f"I go through {text}, one letter at a time.\n" + "\n".join(f"{i + 1} {c}" for i, c in enumerate(text)),
    }[effort]
    sentence = f'The word "{text}" has {len(text)} letters.'
    return Problem(f"length {text}", _ask(rng, phrases, w=text), think, sentence, str(len(text)), len(text))


def reverse(rng: Random, effort: str) -> Problem:
    text = _some_word(rng, 12)
    phrases = (
        'Reverse the word "{w}".|Reverse {w}.|What is {w} spelled backwards?|Spell {w} backwards.|Write "{w}" backwards.|'
        "Turn the word {w} around.|Reverse the word {w}.|What is {w} in reverse?|Write {w} backwards.|Write {w} in "
        "reverse.|What is the reverse of {w}?|{w} backwards|{w} reversed|Reverse the letters of {w}.|Reverse the string "
        "{w}.|reverse: {w}|Say {w} backwards.|How do you spell {w} backwards?|What does {w} read backwards?|Spell the "
        "word {w} in reverse."
    )
    ask = _ask(rng, phrases, w=text)
    there = [f"{i + 1}{c}" for i, c in enumerate(text)]
    back = there[::-1]
    answer = text[::-1]
    if effort == "low":
        think = f"{''.join(there)}\n{''.join(back)}"
    elif effort == "medium":
        think = f"I number the letters of {text}: {' '.join(there)}\nFrom the last to the first: {' '.join(back)}"
    else:
        rows = "\n".join(f"{pair} {answer[: i + 1]}" for i, pair in enumerate(back))
        think = f"I number the letters of {text}: {' '.join(there)}\nNow from the last one, adding a letter each time.\n{rows}"
    return Problem(f"reverse {text}", ask, think, f'"{text}" backwards is "{answer}".', answer, answer)


def days(rng: Random, effort: str, date: str) -> Problem:
    if rng.random() < 0.15:
        return _today(rng, effort, date)
    start, n, back = rng.randrange(7), rng.randint(1, 99) if rng.random() < 0.8 else rng.randint(1, 6), rng.random() < 0.4
    weeks, rest = divmod(n, 7)
    path = [DAYS[(start + (-i if back else i)) % 7] for i in range(rest + 1)]
    day, end = DAYS[start], path[-1]
    ask = _ask(rng, _day_phrases(n, back), n=n, d=day.lower() if rng.random() < 0.15 else day)
    head = f"{n}=7*{weeks}+{rest}"
    if effort == "low":
        think = f"{head}\n" + " ".join(path)
    elif effort == "medium":
        numbered = ", ".join(f"{i} {each}" for i, each in enumerate(path))
        think = f"Weeks change nothing: {head}, so {rest} days {'back' if back else 'on'}: {numbered}"
    else:
        rows = "\n".join(f"{i} of {rest}: {each}" for i, each in enumerate(path))
        way = "back" if back else "on"
        think = f"I start at {day} and go {n} days {way}. A week is 7 days: {head}. So {rest} are left.\n{rows}"
    return Problem(f"days {start} {n} {back}", ask, think, f"It is {end}.", end, end)


def _day_phrases(n: int, back: bool) -> str:
    if n == 1 and back:
        return (
            "What day comes before {d}?|Today is {d}. What day was yesterday?|Which day is before {d}?|What is the day "
            "before {d}?"
        )
    if n == 1:
        return (
            "What day comes after {d}?|Today is {d}. What day is tomorrow?|Which day is after {d}?|If today is {d}, what "
            "day is tomorrow?"
        )
    if back:
        return (
            "What day is {n} days before {d}?|Which weekday is {n} days before {d}?|{n} days before {d}?|{d} minus {n} "
            "days|Today is {d}. What day was it {n} days ago?|What day was it {n} days before {d}?|If today is {d}, what "
            "was {n} days ago?"
        )
    return (
        "What day is {n} days after {d}?|Which weekday is {n} days after {d}?|{n} days after {d}?|{d} plus {n} days|"
        "Today is {d}. What day is it in {n} days?|If today is {d}, which day is it {n} days from now?|What is {n} days "
        "after {d}?|What day is it {n} days after {d}?|What day of the week is {n} days after {d}?|It is {d}. What day "
        "will it be in {n} days?"
    )


def _today(rng: Random, effort: str, date: str) -> Problem:
    kind, words = rng.choice(
        (
            (
                "date",
                "What is today's date?|What date is it today?|What is the date?|Which date is today?|What is the current "
                "date?|What's the date today?|today's date",
            ),
            (
                "year",
                "What year is it?|Which year is it now?|What is the current year?|What year is it today?|Which year do "
                "we have?",
            ),
            ("month", "What month is it?|Which month is it now?|What is the current month?|What number does this month have?"),
        )
    )
    ask = _ask(rng, words)
    answer = {"date": date, "year": date[:4], "month": date[5:7]}[kind]
    think = {
        "low": f"date: {date}",
        "medium": f"The current date is {date}.",
        "high": f"The user asks for the {kind}. The system message says that the current date is {date}.",
    }[effort]
    return Problem(f"{kind} {date}", ask, think, f"It is {answer}.", answer, answer)


def random_date(rng: Random) -> str:
    return (datetime.date(2024, 1, 1) + datetime.timedelta(days=rng.randrange(365 * 8))).isoformat()


LIST_FORMS = (
    ": /\n",
    ": /, ",
    " = /\n",
    " / , ",
    " is /, ",
    " - /\n",
    " costs /; ",
    " has /, ",
    ",/\n",
    ":/ ",
    " -> /\n",
    "=/, ",
)


def make_list(rng: Random) -> tuple[str, dict[str, str]]:
    """A list as text, and its entries."""
    wanted = rng.choice((2, 3, 3, 4, 4, 5, 6, 7, 9))
    numbers = rng.random() < 0.7
    entries: dict[str, str] = {}
    while len(entries) < wanted:
        entries[name_word(rng)] = str(rng.randint(1, 999)) if numbers else rng.choice((rng.choice(COLOURS), rng.choice(CITIES)))
    if rng.random() < 0.1:
        return json.dumps({key: int(value) if numbers else value for key, value in entries.items()}), entries
    between, after = rng.choice(LIST_FORMS).split("/")
    bullet = "- " if after == "\n" and rng.random() < 0.4 else ""
    return after.join(f"{bullet}{key}{between}{value}" for key, value in entries.items()), entries


def look_up(rng: Random, effort: str) -> Problem:
    listed, entries = make_list(rng)
    question, key, think, sentence, short = ask_list(rng, effort, entries)
    ask = f"{listed}\n{question}" if rng.random() < 0.7 else f"{question}\n{listed}"
    heads = (
        "List:\n",
        "Here is a list:\n",
        "I have this list: ",
        "Look at this list:\n",
        "Prices:\n",
        "Given:\n",
        "Data: ",
        "Our prices are:\n",
    )
    context = ""
    if rng.random() < 0.3:
        ask = rng.choice(heads) + ask
    if rng.random() < 0.15:
        context, ask = rng.choice(heads) + listed, question
    value = int(short) if short.isdigit() else short or None
    return Problem(f"look {key} {sorted(entries.items())}", ask, think, sentence, short, value, context)


def ask_list(rng: Random, effort: str, entries: dict[str, str]) -> tuple[str, str, str, str, str]:
    """A question about an entry: question, key, reasoning, answer as a sentence, answer alone."""
    keys = list(entries)
    missing = rng.random() < 0.12
    key = rng.choice(keys)
    while missing and key in entries:
        key = name_word(rng)
    phrases = (
        "What is the value of {k}?|What does the list say about {k}?|{k}?|Look up {k}.|What is {k}?|Which value has {k}?|"
        "Find {k} in the list.|Tell me the value for {k}.|What about {k}?|What is the value for {k}?|Give me {k}.|What "
        "does {k} have?|"
    )
    counted = (
        "How many {k} are there?|How many {k} do I have?|How much is {k}?|What does {k} cost?|How much does {k} cost?|"
        "How old is {k}?|"
    )
    named = "Which colour is {k}?|What colour is {k}?|Where is {k}?|Where does {k} live?|"
    more = counted if next(iter(entries.values())).isdigit() else named
    question = _ask(rng, (phrases + more).rstrip("|"), k=key)
    value = entries.get(key, "")
    found = f"{key}: {value}" if value else f"{key}: not there"
    if effort == "low":
        think = found
    elif effort == "medium":
        think = f"I look for {key} in the list. {found}"
    else:
        seen = keys[: keys.index(key) + 1] if value else keys
        rows = "\n".join(f"{each} {'yes' if each == key else 'no'}" for each in seen)
        think = f"I look for {key} in the list, entry by entry.\n{rows}\n{found}"
    sentence = f"{key}: {value}." if value else f"The list does not have {key}."
    return question, key, think, sentence, value
