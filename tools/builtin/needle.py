"""One fact to find in a long text or list: from a hundred tokens to five thousand, at any depth."""

from __future__ import annotations

from random import Random

from tools.builtin.phrasing import vary
from tools.builtin.problem import Problem
from tools.builtin.words import CITIES, COLOURS, ITEMS, NAMES, NOUNS, QUALITIES, SAID, VERBS, name_word

SHORTEST, LONGEST = 100, 4_400  # tokens of the text, roughly; with all around it stays below 5,120
SENTENCE, ENTRY = 10.8, 8.9  # tokens of one, on average
WHATS = ("number", "phone number", "room number", "secret number", "code", "price", "key", "order number", "lucky number")
PLACES = ("city", "colour", "home", "favourite colour", "favourite city")
FILLERS = (
    "The {q} {n} can {v} the {m}.",
    "Some {n} must {v} with a {q} {m}.",
    "They {v} every {n} in the {m}.",
    "A {n} and a {m} are {q}.",
    "People {v} the {n} when it is {q}.",
    "There are {q} words in the {n}.",
    "We {v} it on the {q} {m}.",
    "My {n} was not {q}.",
    "Is the {m} more {q} than the {n}?",
    "In the {q} {n} they {v} {m}.",
)
ENTRIES = list(dict.fromkeys((*ITEMS, *NAMES, *COLOURS, *NOUNS, *VERBS, *QUALITIES, *SAID, *CITIES)))  # words of one token


def needle(rng: Random, effort: str) -> Problem:
    near = SHORTEST * (LONGEST / SHORTEST) ** rng.random()
    size = near if rng.random() < 0.5 else rng.uniform(SHORTEST, LONGEST)
    return _in_list(rng, effort, int(size / ENTRY)) if rng.random() < 0.35 else _in_text(rng, effort, int(size / SENTENCE))


def _asked(rng: Random, text: str, question: str) -> str:
    """The question, mostly after the text."""
    head = rng.choice(("", "", "Text:\n", "Read this:\n", "Here is a text:\n", "Given:\n"))
    return f"{question}\n{head}{text}" if rng.random() < 0.2 else f"{head}{text}\n{question}"


def _in_text(rng: Random, effort: str, size: int) -> Problem:
    """A sentence among others that say nothing to the matter, up to three of them about other people."""
    people = list(dict.fromkeys(rng.choice(NAMES) if rng.random() < 0.7 else name_word(rng).capitalize() for _ in range(4)))
    number = rng.random() < 0.75
    what = rng.choice(WHATS if number else PLACES)
    facts = {
        name: str(rng.randrange(10 ** rng.randint(2, 5))) if number else rng.choice(COLOURS if "colour" in what else CITIES)
        for name in people[: rng.randint(1, 4)]
    }
    name = rng.choice(list(facts))
    sentences = [
        rng.choice(FILLERS).format(q=rng.choice(QUALITIES), n=rng.choice(NOUNS), m=rng.choice(NOUNS), v=rng.choice(VERBS))
        for _ in range(size)
    ]
    for who, value in facts.items():
        sentences.insert(rng.randint(0, len(sentences)), f"The {what} of {who} is {value}.")
    phrases = (
        "What is the {k} of {n}?|Which {k} does {n} have?|Tell me the {k} of {n}.|Find the {k} of {n} in the text.|"
        "What does the text say about the {k} of {n}?|Look up the {k} of {n}.|{k} of {n}?"
    )
    question = vary(rng, rng.choice(phrases.split("|")).format(k=what, n=name))
    found, sentence = f"{name}: {facts[name]}", f"The {what} of {name} is {facts[name]}."
    think = {
        "low": found,
        "medium": f"I look for {name} in the text. {found}",
        "high": f"I look for the {what} of {name} in the text. It says: {sentence} So {found}",
    }[effort]
    text = rng.choice((" ", " ", "\n")).join(sentences)
    return Problem(f"needle {what} {facts}", _asked(rng, text, question), think, sentence, facts[name])


def _in_list(rng: Random, effort: str, size: int) -> Problem:
    """An entry of a long list of numbers, each name once."""
    entries = {key: str(rng.randint(1, 9999)) for key in rng.sample(ENTRIES, min(size, len(ENTRIES)))}
    key = rng.choice(list(entries))
    between = rng.choice((": ", " = ", " is ", " has "))
    text = "".join(f"- {name}{between}{value}\n" for name, value in entries.items()).rstrip()
    phrases = (
        "What is the value of {k}?|What does the list say about {k}?|Look up {k}.|Find {k} in the list.|Tell me the value "
        "for {k}.|What is the value for {k}?|Give me {k}.|How many {k} are there?"
    )
    question = vary(rng, rng.choice(phrases.split("|")).format(k=key))
    found = f"{key}: {entries[key]}"
    think = {
        "low": found,
        "medium": f"I look for {key} in the list. {found}",
        "high": f"I look for {key} in the list. It says: {key}{between}{entries[key]}. So {found}",
    }[effort]
    return Problem(f"needle list {key} {entries[key]} {size}", _asked(rng, text, question), think, f"{found}.", entries[key])
