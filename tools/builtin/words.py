"""Word lists of the built-in model's tasks, and words that nobody has seen: made of syllables or of random letters."""

from __future__ import annotations

from random import Random

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Lisbon Oslo Dublin Athens Warsaw Helsinki Budapest Zurich Munich Milan "
    "Tokyo Osaka Seoul Beijing Delhi Mumbai Bangkok Hanoi Sydney Cairo Nairobi Lagos Toronto Boston Chicago Denver Seattle "
    "Houston Miami Lima Bogota Santiago Havana"
).split()
NAMES = "Anna Ben Carla David Emma Felix Grace Henry Iris Jack Karl Laura Maria Nina Oscar Paul Rosa Sara Tom Victor".split()
ITEMS = (
    "apples pears plums grapes lemons melons cherries bananas oranges carrots onions potatoes tomatoes eggs loaves cups "
    "plates bottles chairs tables lamps books pens pencils boxes keys stamps coins balls hats shoes socks"
).split()
COLOURS = "red blue green yellow black white brown purple orange grey pink".split()
KEYS = "answer result value output solution total reply out data final response sum number text".split()
SKIES = "sunny cloudy rainy windy foggy snowy stormy clear".split()

ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr kn pl pr sh sl sn sp st str th tr".split()
VOWELS = "a e i o u a e i o u ea oo ai ee ou".split()
CODAS = ["", "", "", *"b d g k l m n p r s t x y ck ll mp nd ng nk rd rm rn rt ss st tt".split()]


def word(rng: Random, shortest: int = 3, longest: int = 10) -> str:
    """A lower-case word of that many letters: three in four speakable, the others random letters."""
    if rng.random() < 0.25:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(shortest, longest)))
    length = rng.randint(shortest, longest)
    made = ""
    while len(made) < length:
        made += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    return made[:length]


def name_word(rng: Random) -> str:
    """A word for a name or key: capitalised names, items, or an unseen word."""
    roll = rng.random()
    if roll < 0.4:
        return rng.choice(ITEMS)
    if roll < 0.65:
        return rng.choice(NAMES)
    made = word(rng, 3, 7)
    return made.capitalize() if rng.random() < 0.3 else made


def city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.7 else word(rng, 4, 8).capitalize()


def identifier(rng: Random, choices: str, unseen: float = 0.3) -> str:
    """One of the names in `choices`, or (with that chance) an unseen one, such as a tool might have."""
    if rng.random() < unseen:
        made = word(rng, 3, 6)
        return f"{made}_{word(rng, 3, 5)}" if rng.random() < 0.4 else made
    return rng.choice(choices.split())
