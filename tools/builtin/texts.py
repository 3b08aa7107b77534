"""Problems with words: counting letters, reversing, weekdays and dates, looking up in a list; and messages out of scope."""

from __future__ import annotations

import datetime
from random import Random

from tools.builtin.problem import Problem
from tools.builtin.words import CITIES, COLOURS, DAYS, ITEMS, NAMES, name_word, word

LISTED = [*ITEMS, *COLOURS, *(each.lower() for each in DAYS)]  # words that are one token: their spelling must be learnt

ABILITIES = "sums, differences, products, comparing, sorting, counting letters, reversing words, weekdays, units, lists and tools"
HELLO = "Hello! I am the small built-in model of SimpleLLM. Ask me something like: What is 23 + 48?"
WHO = f"I am a tiny model that comes with SimpleLLM, trained to show the engine at work. I can do {ABILITIES}."
CAN = f"I can do {ABILITIES}. Nothing else."
UNKNOWN = "I do not know that: I am a tiny model. I can do sums, sort numbers, count letters and a few things more."
NO_TOOL = "I cannot know that, as I have no tool for it."
WELCOME = "You are welcome!"


def _some_word(rng: Random, longest: int) -> str:
    return rng.choice(LISTED) if rng.random() < 0.15 else word(rng, 3, longest)


def count(rng: Random, effort: str) -> Problem:
    text = _some_word(rng, 12)
    if rng.random() < 0.2:
        return _length(rng, effort, text)
    letter = rng.choice(text) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    ask = rng.choice(
        'How many "{c}" are in "{w}"?|How many times does {c} appear in {w}?|How many letters {c} are in {w}?|'
        "How many {c}s are in {w}?|How many {c}'s are in {w}?|Count the letter {c} in {w}.|How many {c} are there in {w}?|"
        'How often does the letter "{c}" occur in the word "{w}"?|how many {c} in {w}|How many {c}\'s are in the word {w}?'.split("|")
    ).format(c=letter, w=text)
    runs = [text[: i + 1].count(letter) for i in range(len(text))]
    total = runs[-1]
    pairs = [f"{c}{n}" for c, n in zip(text, runs, strict=True)]
    if effort == "low":
        think = f"{letter}: {''.join(pairs)}"
    elif effort == "medium":
        think = f"I count {letter} in {text}, letter by letter: {' '.join(pairs)}\nThat makes {total}."
    else:
        marks = ["yes" if c == letter else "no" for c in text]
        rows = "\n".join(f"{i + 1} {c} {m} {n}" for i, (c, m, n) in enumerate(zip(text, marks, runs, strict=True)))
        think = f"I look for {letter} in {text}, one letter at a time.\n{rows}\nSo {letter} is there {total} times."
    sentence = f'"{letter}" appears in "{text}" this many times: {total}.'
    return Problem(f"count {letter} {text}", ask, think, sentence, str(total), total)


def _length(rng: Random, effort: str, text: str) -> Problem:
    ask = rng.choice(
        'How many letters does "{w}" have?|How long is the word {w}?|How many letters are in {w}?|Count the letters of {w}.'.split("|")
    ).format(w=text)
    pairs = [f"{c}{i + 1}" for i, c in enumerate(text)]
    think = {
        "low": "".join(pairs),
        "medium": f"I number the letters of {text}: {' '.join(pairs)}\nThat makes {len(text)}.",
        "high": f"I go through {text}, one letter at a time.\n" + "\n".join(f"{i + 1} {c}" for i, c in enumerate(text)),
    }[effort]
    sentence = f'The number of letters in "{text}" is {len(text)}.'
    return Problem(f"length {text}", ask, think, sentence, str(len(text)), len(text))


def reverse(rng: Random, effort: str) -> Problem:
    text = _some_word(rng, 9)
    ask = rng.choice(
        'Reverse the word "{w}".|Reverse {w}.|What is {w} spelled backwards?|Spell {w} backwards.|Write "{w}" backwards.|'
        "reverse {w}|Turn the word {w} around.|Please reverse the word {w}.|What is {w} in reverse?".split("|")
    ).format(w=text)
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
    phrases = (
        "What day is {n} days {w} {d}?|Which weekday is {n} days {w} {d}?|what day is {n} days {w} {d}|"
        + ("{n} days before {d}?|Today is {d}. What day was it {n} days ago?" if back else "{n} days after {d}?|")
        + ("" if back else "Today is {d}. What day is it in {n} days?|If today is {d}, which day is it {n} days from now?")
    )
    ask = rng.choice([each for each in phrases.split("|") if each]).format(n=n, w="before" if back else "after", d=day)
    head = f"{n}=7*{weeks}+{rest}"
    if effort == "low":
        think = f"{head}\n" + " ".join(path)
    elif effort == "medium":
        numbered = ", ".join(f"{i} {each}" for i, each in enumerate(path))
        think = f"Weeks change nothing: {head}, so {rest} days {'back' if back else 'on'}: {numbered}"
    else:
        rows = "\n".join(f"{i} of {rest}: {each}" for i, each in enumerate(path))
        think = f"I start at {day} and go {n} days {'back' if back else 'on'}. A week is 7 days: {head}. So {rest} are left.\n{rows}"
    return Problem(f"days {start} {n} {back}", ask, think, f"It is {end}.", end, end)


def _today(rng: Random, effort: str, date: str) -> Problem:
    kind, words = rng.choice(
        (
            ("date", "What is today's date?|What date is it today?|What is the date?|which date is today?|What is the current date?"),
            ("year", "What year is it?|Which year is it now?|What is the current year?"),
        )
    )
    ask = rng.choice(words.split("|"))
    answer = date if kind == "date" else date[:4]
    think = {
        "low": f"date: {date}",
        "medium": f"The current date is {date}.",
        "high": f"The user asks for the {kind}. The system message says that the current date is {date}.",
    }[effort]
    return Problem(f"{kind} {date}", ask, think, f"It is {answer}.", answer, answer if kind == "date" else int(answer))


def random_date(rng: Random) -> str:
    return (datetime.date(2024, 1, 1) + datetime.timedelta(days=rng.randrange(365 * 8))).isoformat()


def make_list(rng: Random) -> tuple[str, dict[str, str], bool]:
    """A list as text, its entries, and whether their values are numbers."""
    wanted = rng.choice((2, 3, 3, 4, 4, 5, 6, 7))
    numbers = rng.random() < 0.7
    entries: dict[str, str] = {}
    while len(entries) < wanted:
        entries[name_word(rng)] = str(rng.randint(1, 999)) if numbers else rng.choice((rng.choice(COLOURS), rng.choice(CITIES)))
    between, after = rng.choice(((": ", "\n"), (": ", ", "), (" = ", "\n"), (" ", ", "), (" is ", ", "), (" - ", "\n"), (" costs ", "; ")))
    bullet = "- " if after == "\n" and rng.random() < 0.4 else ""
    return after.join(f"{bullet}{key}{between}{value}" for key, value in entries.items()), entries, numbers


def look_up(rng: Random, effort: str) -> Problem:
    listed, entries, _ = make_list(rng)
    question, key, think, sentence, short = ask_list(rng, effort, entries)
    ask = f"{listed}\n{question}" if rng.random() < 0.7 else f"{question}\n{listed}"
    if rng.random() < 0.3:
        ask = rng.choice(("List:\n", "Here is a list:\n", "I have this list: ", "Look at this list:\n", "Prices:\n")) + ask
    value = int(short) if short.isdigit() else short or None
    return Problem(f"look {key} {sorted(entries.items())}", ask, think, sentence, short, value)


def ask_list(rng: Random, effort: str, entries: dict[str, str]) -> tuple[str, str, str, str, str]:
    """A question about an entry: question, key, reasoning, answer as a sentence, answer alone."""
    keys = list(entries)
    missing = rng.random() < 0.12
    key = rng.choice(keys)
    while missing and key in entries:
        key = name_word(rng)
    question = rng.choice(
        "What is the value of {k}?|What does the list say about {k}?|{k}?|Look up {k}.|What is {k}?|Which value has {k}?|"
        "Find {k} in the list.|Tell me the value for {k}.|What about {k}?".split("|")
    ).format(k=key)
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


SAID = {
    HELLO: "hello|hi|hey|Hello!|Hi there|Hello there!|Good morning|Good evening|Hi!|Hey there|hello, how are you?|How are you?|"
    "Hi, how are you doing?|Greetings|Good day|hello there|Hey!|Good afternoon|yo|Nice to meet you|Hello, my name is {n}.|"
    "Hi, I am {n}.|Hey, it is {n} here.|Hello {n}|Good morning, {n}!",
    WHO: "who are you|Who are you?|What are you?|What is your name?|Are you ChatGPT?|Tell me about yourself|Who made you?|"
    "Which model are you?|Are you a human?|Introduce yourself.|what model is this|Who created you?|Are you {n}?|Is your name {n}?",
    CAN: "What can you do?|help|Help me|How can you help me?|what can you do|What are you good at?|Can you help me?|What do you know?",
    WELCOME: "Thanks|thank you|Thank you!|Thanks a lot|thanks!|Thank you very much, {n}.|Great, thanks!|Thanks, {n}!",
    NO_TOOL: "What is the weather in {c}?|How is the weather in {c} today?|Is it raining in {c}?|What time is it in {c}?|"
    "What is the temperature in {c}?|weather in {c}|Will it rain in {c} tomorrow?|What is the time?|How warm is it in {c}?",
    UNKNOWN: "What is the capital of {c}?|Who wrote {w}?|Write a poem about {w}.|Tell me a joke.|What is the meaning of life?|"
    "Tell me about {w}.|Explain {w} to me.|Who is {n} {w}?|Where is {c}?|Write a story about {n}.|What is {w} made of?|"
    "Translate {w} to French.|Who was the first president of {c}?|How do I cook {w}?|Write code for {w}.|Why is the sky {o}?|"
    "How tall is {n}?|When was {n} {w} born?|Give me a recipe for {w}.|Do you like {w}?|What do you think about {w}?|"
    "Write an email to {n}.|Sing a song about {w}.|How many people live in {c}?|Is {w} dangerous?|Should I buy {w}?|"
    "What happened in {c}?|Summarize {w}.|Can you explain {w}?|How does {w} work?|Draw a {w}.|Who invented {w}?|"
    "Tell me a story.|Recommend a book about {w}.|What is the best {w}?|I feel {w} today.|Why do {w} fly?|Is God real?",
}
_THOUGHTS = {HELLO: "a greeting", WHO: "a question about me", CAN: "a question about me", WELCOME: "thanks"}


def small_talk(rng: Random, effort: str) -> Problem:
    answer = rng.choice((HELLO, WHO, CAN, WELCOME, NO_TOOL, UNKNOWN, UNKNOWN, UNKNOWN))
    other = rng.choice(ITEMS) if rng.random() < 0.3 else word(rng, 3, 10)
    place = rng.choice(CITIES) if rng.random() < 0.5 else word(rng, 4, 8).capitalize()
    name = rng.choice(NAMES) if rng.random() < 0.5 else word(rng, 3, 7).capitalize()
    phrase = rng.choice(SAID[answer].split("|"))
    ask = phrase.format(n=name, w=other, c=place, o=rng.choice(COLOURS))
    what = _THOUGHTS.get(answer, "something that I cannot know")
    think = {
        "low": f"{what}",
        "medium": f"This is {what}, no task of mine.",
        "high": f"The user does not ask for a task that I have learnt. This is {what}. I answer briefly and say what I am.",
    }[effort]
    return Problem(f"talk {ask}" if "{" in phrase else f"={ask}", ask, think, answer)


