"""Messages that are no task: greetings, questions about the model, and all that it cannot do, with short honest answers."""

from __future__ import annotations

from random import Random

from tools.builtin.phrasing import politely, vary
from tools.builtin.problem import Problem
from tools.builtin.words import CITIES, COLOURS, ITEMS, NAMES, NOUNS, QUALITIES, VERBS, any_word, word

ABILITIES = "arithmetic, comparing, sorting, counting letters, reversing words, weekdays, units, lists and tools"
HELLO = "Hello! I am the small built-in model of SimpleLLM. Ask me something like: What is 23 + 48?"
WHO = f"I am a tiny model that comes with SimpleLLM, trained to show the engine at work. I can do {ABILITIES}."
CAN = f"I can do {ABILITIES}. Nothing else."
UNKNOWN = f"I do not know that: I am a tiny model. I can do {ABILITIES}."
HARDER = "I have not learnt to work that out. I can do sums and differences, products, division by one digit, and sorting."
NO_TOOL = "I cannot know that, as I have no tool for it."
WELCOME = "You are welcome!"
BYE = "Goodbye!"

SAID = {
    HELLO: (
        "hello|hi|hey|Hello!|Hi there|Hello there!|Good morning|Good evening|Hi!|Hey there|hello, how are you?|How are "
        "you?|Hi, how are you doing?|Greetings|Good day|hello there|Hey!|Good afternoon|yo|Nice to meet you|how are you|"
        "What's up?|Hello, how are you|Hello, my name is {n}.|Hi, I am {n}.|Hey, it is {n} here.|Hello {n}|Good morning, "
        "{n}!|My name is {n}.|Hi {n}!|Hello from {c}!|I am {n}."
    ),
    WHO: (
        "who are you|Who are you?|What are you?|What is your name?|Are you ChatGPT?|Tell me about yourself|Who made you?|"
        "what are you|Which model are you?|Are you a human?|Introduce yourself.|what model is this|Who created you?|Are "
        "you {n}?|Is your name {n}?|Are you from {c}?|What is SimpleLLM?|Are you a robot?|How big are you?|Are you "
        "GPT-4?|Do you live in {c}?|what's your name|Who are you, {n}?"
    ),
    CAN: (
        "What can you do?|help|Help me|How can you help me?|what can you do|What are you good at?|Can you help me?|What "
        "do you know?|Help!|What are your abilities?|What can I ask you?|Can you help {n}?|What can you do for me?|What "
        "tasks can you do?|How can you help {n}?"
    ),
    WELCOME: (
        "Thanks|thank you|Thank you!|Thanks a lot|thanks!|Thank you very much, {n}.|Great, thanks!|Thanks, {n}!|thx|"
        "Nice, thank you|Thank you|Thanks for the help!|Well done!|Good job|Great!|That is right, thanks|Perfect, thank "
        "you {n}!"
    ),
    BYE: (
        "bye|Bye!|Goodbye|See you|goodbye!|See you later|Bye bye|Good night|Bye, {n}!|See you in {c}!|Goodbye {n}|Have a "
        "nice day"
    ),
    NO_TOOL: (
        "What is the weather in {c}?|How is the weather in {c} today?|Is it raining in {c}?|What time is it in {c}?|What "
        "is the temperature in {c}?|weather in {c}|Will it rain in {c} tomorrow?|What is the time?|What day is it today?|"
        "Which weekday is it?|What day of the week is it?|Is it going to rain tomorrow?|How warm is it in {c}?|What time "
        "is it?|What's the weather like in {c}?|What is the weather like?|Tell me the weather in {c}.|How cold is it in "
        "{c}?|What is the local time in {c}?"
    ),
    HARDER: (
        "What is {p}.{d} + {d}.{p}?|What is {a} + {b} * {d}?|{a}*{b}+{d}|What is {s} + {d} * {a}?|{d} * {s} + {a}|"
        "{d}+{s}*{d}|{d}-{s}*{a}|What is {s} * {d} - {a}?|({s} + {d}) * {a}|What is {s}.{d} + {a}?|{s}.{d} - {d}|{s}.{d} "
        "* {s}|Is {s} odd?|Multiply {a} by {s} and add {d}.|Add {a} and {b}, then multiply by {s}.|What is a third of "
        "{a}?|How much is {s} plus {d} times {a}?|What is {a} squared?|What is {s} times {d} plus {a}?|{s} times {d} "
        "minus {p}|What is {a} minus {s} times {d}?|Count to {a}.|What is {p} plus {d} minus {s}?|{p} + {s} - {d}|{p} - "
        "{s} - {d}|What is {p} - {s} + {d}?|{s} * {d} * {p}|What is {p} to the power of {d}?|{p}^{d}|What is the square "
        "root of {a}?|What is {p}% of {a}?|Is {a} prime?|Factor {a}.|What is the average of {a}, {b} and {p}?|({a} + "
        "{b}) * {d}|What is {p}.{d} * {d}?|Solve x + {p} = {a}.|What is {a} mod {p}?|What is {a} / {b}?|{big} + {large}|"
        "What is {big} * {p}?|Which is larger, {p}.{d} or {d}.{p}?|What is the sine of {p}?|What is {d}! ?|What is "
        "{large} - {big}?|Round {p}.{d}.|{a} - {p} * {d}|What is {d}/{p} + {a}?|Sort {p}.{d}, {d}.{p} and {a}.|What is "
        "half of {a}?|What is {a} in binary?|Convert {a} to binary.|What is the cube of {p}?|{a} + {b} + {p} + {d}|What "
        "is {a}.{p} - {b}?"
    ),
}
OTHER = (  # answered by UNKNOWN
    "What is the capital of {c}?|Who wrote {w}?|Write a poem about {w}.|Tell me a joke.|What is the meaning of life?|"
    "Tell me about {w}.|Explain {w} to me.|Who is {n} {w}?|Where is {c}?|Write a story about {n}.|What is {w} made of?|"
    "Translate {w} to French.|Who was the first president of {c}?|How do I cook {w}?|Write code for {w}.|Why is the sky "
    "{o}?|How tall is {n}?|When was {n} {w} born?|Give me a recipe for {w}.|Do you like {w}?|What do you think about "
    "{w}?|Write an email to {n}.|Sing a song about {w}.|How many people live in {c}?|Is {w} dangerous?|Should I buy {w}?|"
    "What happened in {c}?|Summarize {w}.|Can you explain {w}?|How does {w} work?|Draw a {w}.|Who invented {w}?|Tell me "
    "a story.|Recommend a book about {w}.|What is the best {w}?|I feel {q} today.|Why do {w} {v}?|Does a {w} {v}?|How do "
    "you {v} a {w}?|Can a {q} {w} {v}?|What makes a {w} {q}?|I want to {v} a {w}.|My {w} is {q}.|The {w} and the {x} "
    "{v}.|{w}|{w} {x}|{q} {w}|{v} the {w}|What does {w} mean?|Where can I {v} a {w}?|When does the {w} {v}?|Who is the "
    "{q} {w} of {c}?|Is a {w} {q}?|Why is my {w} so {q}?|Tell me why {x} {v} {w}.|Please {v} my {w}.|Give me a {q} {w}.|"
    "What is the difference between {w} and {x}?|What should I {v} for {n}?|{n} likes {w}.|{n} wants to {v}.|What is a "
    "{w}?|What are {w}?|How far is {c} from {e}?|Which {w} is {q}?|Translate the {w} into German.|Write a {q} song.|What "
    "is your favourite {w}?|Is {n} {q}?|How old is the {w}?|Name a {q} {w}.|List some {w}.|What colour is the {w}?|How "
    "much does a {w} weigh?|I am {q}.|I {v} {w} in {c}.|What is new in {c}?|Do {w} {v} {x}?|Play some {w}.|Why?|What?|Ok|"
    "Yes|No|{g}|{g} {h}|Can you {v}?|Could you {v} the {w}?|How do I get to {c}?|Who won the {w}?|What is the {w} of "
    "{x}?|What is {w} {v} {x}?|Make me {q}.|Let us {v}.|Is there {w} in {c}?"
)
THOUGHTS = {HELLO: "a greeting", WHO: "a question about me", CAN: "a question about me", WELCOME: "thanks", BYE: "a goodbye"}
THOUGHTS |= {HARDER: "a calculation that I have not learnt", NO_TOOL: "something that needs a tool"}
KINDS = [HELLO] * 3 + [WHO] * 3 + [CAN, WELCOME, BYE] + [NO_TOOL] * 2 + [HARDER] * 4 + [UNKNOWN] * 9


def small_talk(rng: Random, effort: str) -> Problem:
    answer = rng.choice(KINDS)
    phrase = rng.choice(SAID.get(answer, OTHER).split("|"))
    ask = phrase.format(**_values(rng))
    key = f"talk {ask}" if "{" in phrase else f"={ask}"
    if answer in (WHO, NO_TOOL, HARDER, UNKNOWN):
        ask = vary(rng, politely(rng, ask) if phrase.endswith(".") and phrase[:2] not in ("I ", "My", "{n", "Th") else ask)
    what = THOUGHTS.get(answer, "something that I cannot know")
    think = {
        "low": what,
        "medium": f"This is {what}, no task of mine.",
        "high": f"The user does not ask for a task that I have learnt. This is {what}. I answer briefly and say what I am.",
    }[effort]
    return Problem(key, ask, think, answer)


def _values(rng: Random) -> dict[str, object]:
    """Words and numbers for the phrases."""
    place, other_place = (rng.choice(CITIES) if rng.random() < 0.5 else word(rng, 4, 8).capitalize() for _ in range(2))
    noun, other = (rng.choice(NOUNS) if rng.random() < 0.6 else any_word(rng, 10) for _ in range(2))
    numbers: dict[str, object] = {"p": rng.randint(10, 99), "d": rng.randint(2, 9)}
    small = rng.random() < 0.3
    numbers |= {"a": rng.randint(2, 20 if small else 9999), "b": rng.randint(11, 30 if small else 999), "s": rng.randint(2, 9)}
    return numbers | {
        "n": rng.choice(NAMES) if rng.random() < 0.5 else word(rng, 3, 7).capitalize(),
        "w": noun,
        "x": other,
        "v": rng.choice(VERBS) if rng.random() < 0.8 else word(rng, 3, 7),
        "q": rng.choice(QUALITIES) if rng.random() < 0.8 else word(rng, 3, 7),
        "c": place,
        "e": other_place,
        "o": rng.choice(COLOURS),
        "g": word(rng, 3, 8),
        "h": rng.choice(ITEMS) if rng.random() < 0.3 else word(rng, 3, 8),
        "big": rng.randint(10**7, 10**10),
        "large": rng.randint(10**7, 10**10),
    }
