"""Problems with numbers: sums, differences, products, quotients, comparisons, sorting, units."""

from __future__ import annotations

from random import Random

from tools.builtin import columns
from tools.builtin.phrasing import numeral, politely, vary
from tools.builtin.problem import Problem
from tools.builtin.words import ITEMS, NAMES, any_word

LENGTHS = (1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7)  # digits of an operand


def number(rng: Random, longest: int = 7) -> int:
    """A number of 1 to `longest` digits, those of 2 to 4 more often."""
    length = rng.choice([each for each in LENGTHS if each <= longest])
    return rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)


def _ask(rng: Random, phrases: str, **values: object) -> str:
    """One of the phrases, filled in; those that end in a full stop are commands."""
    phrase = rng.choice(phrases.split("|")).format(**values)
    return vary(rng, politely(rng, phrase) if phrase.endswith(".") and phrase[0].isupper() else phrase)


def _operands(rng: Random) -> tuple[int, int, bool]:
    """Two numbers and whether they are spelled."""
    if rng.random() < 0.08:
        return rng.randint(0, 20), rng.randint(0, 20), rng.random() < 0.6
    return number(rng), number(rng), False


SUMS = (
    "What is {a} + {b}?|{a} + {b}|{a}+{b}|{a}+{b}=|{a} + {b} = ?|Add {a} and {b}.|What is the sum of {a} and {b}?|"
    "Compute {a} + {b}.|Calculate {a}+{b}.|How much is {a} plus {b}?|What is {a} plus {b}?|{a} plus {b}|What does {a} + "
    "{b} make?|What is {a}+{b}?|Sum of {a} and {b}?|Sum up {a} and {b}.|Find {a} + {b}.|Add {b} to {a}.|How much is {a} "
    "+ {b}?"
)
SUM_STORIES = (
    "I have {a} {i} and get {b} more. How many do I have?|{n} has {a} {i} and {m} has {b}. How many {i} do they have "
    "together?|I have {a} {i} and {b} {j}. How many things do I have?|There are {a} {i} and {b} {j}. How many are there "
    "in total?|{n} buys {a} {i} and then {b} more. How many {i} does {n} have now?|A shop sold {a} {i} today and {b} {i} "
    "before. How many in all?"
)
DIFFERENCES = (
    "What is {a} - {b}?|{a} - {b}|{a}-{b}|{a}-{b}=|{a} - {b} = ?|Subtract {b} from {a}.|What is the difference of {a} "
    "and {b}?|Compute {a} - {b}.|Calculate {a}-{b}.|How much is {a} minus {b}?|What is {a} minus {b}?|{a} minus {b}|Take "
    "{b} away from {a}.|What is {a}-{b}?|Find {a} - {b}.|How much is {a} - {b}?|What is {a} less {b}?"
)
DIFFERENCE_STORIES = (
    "I have {a} {i} and give away {b}. How many are left?|{n} has {a} {i} and loses {b}. How many {i} does {n} still have?|"
    "There were {a} {i} and {b} were sold. How many are left?|{n} had {a} {i} and ate {b}. How many remain?"
)
PRODUCTS = (
    "What is {x} * {y}?|{x} * {y}|{x}*{y}|{x}*{y}=|{x} x {y}|Multiply {x} by {y}.|Multiply {x} and {y}.|What is the "
    "product of {x} and {y}?|Compute {x} * {y}.|Calculate {x}*{y}.|How much is {x} times {y}?|What is {x} times {y}?|{x} "
    "times {y}|What is {x}*{y}?|What is {x} x {y}?|Find {x} * {y}.|What is {x} multiplied by {y}?|{x} × {y}"
)
PRODUCT_STORIES = (
    "One box holds {x} {i} and I have {y} boxes. How many {i} in all?|A book costs {x} dollars. What do {y} books cost?|"
    "{n} has {y} bags with {x} {i} each. How many {i} is that?|There are {y} rows of {x} {i}. How many {i} are there?"
)
QUOTIENTS = (
    "What is {a} / {b}?|{a} / {b}|{a}/{b}|Divide {a} by {b}.|How much is {a} divided by {b}?|What is {a} divided by {b}?|"
    "{a} divided by {b}|Compute {a} / {b}.|Calculate {a}/{b}.|What is {a}/{b}?|{a} : {b}|What is {a} ÷ {b}?"
)
QUOTIENT_STORIES = (
    "{n} shares {a} {i} among {b} friends. How many does each get?|I put {a} {i} into {b} boxes. How many are in each?"
)


def _story(rng: Random) -> dict[str, str]:
    first, second = rng.sample(NAMES, 2)
    return {"i": rng.choice(ITEMS) if rng.random() < 0.7 else any_word(rng), "j": rng.choice(ITEMS), "n": first, "m": second}


def _worded(rng: Random, plain: str, stories: str, share: float = 0.15, **values: object) -> str:
    return _ask(rng, stories if rng.random() < share else plain, **values, **_story(rng))


def add(rng: Random, effort: str) -> Problem:
    if rng.random() < 0.12:
        return _add_three(rng, effort)
    a, b, spelled = _operands(rng)
    ask = _worded(rng, SUMS, SUM_STORIES, a=numeral(a, spelled), b=numeral(b, spelled))
    key = f"add {min(a, b)} {max(a, b)}"
    return Problem(key, ask, columns.add(a, b, effort), f"{a} + {b} = {a + b}.", str(a + b), a + b)


def _add_three(rng: Random, effort: str) -> Problem:
    a, b, c = (number(rng, 4) for _ in range(3))
    phrases = (
        "What is {a} + {b} + {c}?|{a}+{b}+{c}|{a} + {b} + {c}|Add {a}, {b} and {c}.|What is the sum of {a}, {b} and {c}?|"
        "Sum of {a}, {b}, {c}"
    )
    think = f"{columns.add(a, b, effort)}\n{columns.add(a + b, c, effort)}"
    ask = _ask(rng, phrases, a=a, b=b, c=c)
    return Problem(f"add {a} {b} {c}", ask, think, f"{a} + {b} + {c} = {a + b + c}.", str(a + b + c), a + b + c)


def subtract(rng: Random, effort: str) -> Problem:
    a, b, spelled = _operands(rng)
    if rng.random() < 0.25:  # close to each other: the first digits do not decide
        near = rng.choice((9, 60, 60, 600))
        b = max(0, a + rng.randint(-near, near))
    if a < b and rng.random() < 0.7:
        a, b = b, a
    stories = 0.15 if a >= b else 0.0
    ask = _worded(rng, DIFFERENCES, DIFFERENCE_STORIES, stories, a=numeral(a, spelled), b=numeral(b, spelled))
    return Problem(f"sub {a} {b}", ask, columns.subtract(a, b, effort), f"{a} - {b} = {a - b}.", str(a - b), a - b)


def multiply(rng: Random, effort: str) -> Problem:
    roll = rng.random()
    a = rng.randint(10, 99) if roll < 0.55 else rng.randint(2, 9) if roll < 0.65 else rng.randint(100, 9999)
    b = rng.randint(2, 9)
    if roll < 0.2:
        b = rng.randint(11, 99)
    turned = a > 9 and rng.random() < 0.4
    spelled = a <= 20 and b <= 20 and rng.random() < 0.3
    x, y = (b, a) if turned else (a, b)
    ask = _worded(rng, PRODUCTS, PRODUCT_STORIES, 0.12, x=numeral(x, spelled), y=numeral(y, spelled))
    if turned and b > 9:
        a, b = b, a
    return Problem(
        f"mul {min(a, b)} {max(a, b)}", ask, columns.multiply(a, b, effort), f"{x} * {y} = {a * b}.", str(a * b), a * b
    )


def divide(rng: Random, effort: str) -> Problem:
    digit = rng.randint(2, 9)
    a = number(rng, 4) + 1
    if rng.random() < 0.5:
        a = a // digit * digit or digit
    rest = a % digit
    ask = _worded(rng, QUOTIENTS, QUOTIENT_STORIES, 0.1 if rest == 0 else 0.0, a=a, b=digit)
    sentence = f"{a} / {digit} = {a // digit}" + (f", remainder {rest}." if rest else ".")
    short, value = (str(a // digit), a // digit) if rest == 0 else ("", None)
    return Problem(f"div {a} {digit}", ask, columns.divide(a, digit, effort), sentence, short, value)


COMPARISONS = {
    "larger": (
        "Which is larger, {a} or {b}?|Which number is bigger: {a} or {b}?|Which is greater, {a} or {b}?|larger: {a} or "
        "{b}?|What is the maximum of {a} and {b}?|What is more, {a} or {b}?|Which of {a} and {b} is larger?|Find the "
        "larger of {a} and {b}."
    ),
    "smaller": (
        "Which is smaller, {a} or {b}?|Which number is less: {a} or {b}?|Which is lower, {a} or {b}?|smaller: {a} or "
        "{b}?|What is the minimum of {a} and {b}?|What is less, {a} or {b}?|Which of {a} and {b} is smaller?|Find the "
        "smaller of {a} and {b}."
    ),
    "more": (
        "Is {a} larger than {b}?|Is {a} more than {b}?|Is {a} > {b}?|Is {a} greater than {b}?|Is {a} bigger than {b}?|"
        "{a} > {b}?"
    ),
    "less": "Is {a} smaller than {b}?|Is {a} less than {b}?|Is {a} < {b}?|Is {a} lower than {b}?|{a} < {b}?",
    "both": "Compare {a} and {b}.|Compare {a} with {b}.|How do {a} and {b} compare?",
}


def compare(rng: Random, effort: str) -> Problem:
    if rng.random() < 0.2:
        return _extreme(rng, effort)
    a, b = number(rng), number(rng)
    if rng.random() < 0.4:
        b = max(0, a + rng.randint(-20, 20))
    kind = rng.choice(list(COMPARISONS))
    if a == b and kind in ("larger", "smaller"):
        b += 1
    think = columns.compare(a, b, effort)
    ask, key = _ask(rng, COMPARISONS[kind], a=a, b=b), f"compare {kind} {min(a, b)} {max(a, b)}"
    if kind in ("larger", "smaller"):
        right = max(a, b) if kind == "larger" else min(a, b)
        return Problem(key, ask, think, f"{right} is {kind}.", str(right), right)
    relation = f"{a} is {'larger than' if a > b else 'smaller than' if a < b else 'equal to'} {b}"
    if kind == "both":
        return Problem(key, ask, think, f"{relation}.")
    true = a > b if kind == "more" else a < b
    short = "Yes" if true else "No"
    return Problem(key, ask, think, f"{short}, {relation}.", short, true)


def _numbers(rng: Random) -> tuple[list[int], str]:
    """Distinct numbers to sort, and their list as text."""
    limit = rng.choice((10, 100, 100, 100, 1000, 1000))
    numbers = rng.sample(range(1, limit), rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)))
    texts = list(map(str, numbers))
    if rng.random() < 0.25:
        return numbers, f"{', '.join(texts[:-1])} and {texts[-1]}"
    return numbers, rng.choice((", ", ", ", " ", " ", ",", "; ")).join(texts)


UP = (
    "Sort {l}.|Sort these numbers: {l}|Put {l} in ascending order.|Sort from smallest to largest: {l}|sort {l}|Sort the "
    "numbers {l}.|Order these numbers from low to high: {l}|Sort {l} in increasing order.|Arrange {l} from smallest to "
    "largest.|Order {l} ascending.|Sort {l} ascending.|Sort ascending: {l}|Sort: {l}|Sort the list {l}.|Put these "
    "numbers in order: {l}|Order the numbers {l}.|Sort this list: [{l}]|Sort {l} in ascending order.|sort: {l}"
)
DOWN = (
    "Sort {l} in descending order.|Sort from largest to smallest: {l}|Order these numbers from high to low: {l}|Sort {l} "
    "in decreasing order.|Sort in descending order: {l}|Put {l} in descending order.|Arrange {l} from largest to "
    "smallest.|Sort the numbers {l} from high to low.|Sort these numbers in reverse order: {l}|Order {l} descending.|"
    "Sort descending: {l}"
)


def sort(rng: Random, effort: str) -> Problem:
    numbers, listed = _numbers(rng)
    down = rng.random() < 0.35
    ordered = sorted(numbers, reverse=down)
    answer = ", ".join(map(str, ordered))
    think = columns.select(numbers, down, effort)
    return Problem(
        f"sort {down} {numbers}", _ask(rng, DOWN if down else UP, l=listed), think, f"Sorted: {answer}.", answer, ordered
    )


def _extreme(rng: Random, effort: str) -> Problem:
    numbers, listed = _numbers(rng)
    down = rng.random() < 0.6
    end, right = ("largest", max(numbers)) if down else ("smallest", min(numbers))
    words = ("largest", "biggest", "highest", "greatest") if down else ("smallest", "lowest", "least")
    phrases = (
        "What is the {e} of {l}?|Which is the {e}: {l}?|Find the {e} number in {l}.|What is the {e} number in this list: "
        "{l}?|{e} of {l}|" + ("What is the maximum of {l}?|max of {l}" if down else "What is the minimum of {l}?|min of {l}")
    )
    think = columns.select(numbers, down, effort, times=1)
    return Problem(
        f"extreme {down} {numbers}",
        _ask(rng, phrases, e=rng.choice(words), l=listed),
        think,
        f"{right} is the {end}.",
        str(right),
        right,
    )


UNITS = (
    ("hour", "minute", 60),
    ("minute", "second", 60),
    ("week", "day", 7),
    ("kilometer", "meter", 1000),
    ("kilogram", "gram", 1000),
    ("meter", "centimeter", 100),
    ("dollar", "cent", 100),
    ("euro", "cent", 100),
    ("centimeter", "millimeter", 10),
    ("decade", "year", 10),
    ("century", "year", 100),
    ("liter", "milliliter", 1000),
    ("day", "hour", 24),
    ("year", "month", 12),
    ("foot", "inch", 12),
)
PLURALS = {"century": "centuries", "foot": "feet", "inch": "inches"}


def _plural(unit: str, n: int = 2) -> str:
    return unit if n == 1 else PLURALS.get(unit, f"{unit}s")


def units(rng: Random, effort: str) -> Problem:
    big, small, factor = rng.choice(UNITS)
    n = rng.randint(1, 99 if factor in (12, 24) else 250)
    if rng.random() < 0.5 if factor in (12, 24) else rng.random() < 0.15:
        n = rng.choice((1, 1, rng.randint(1, 12)))
    answer, many, parts = n * factor, _plural(big, n), _plural(small)
    phrases = (
        "How many {s} are {n} {b}?|Convert {n} {b} to {s}.|{n} {b} in {s}|What is {n} {b} in {s}?|How many {s} are in "
        "{n} {b}?|How many {s} is {n} {b}?|How many {s} does {n} {b} have?|Turn {n} {b} into {s}.|{n} {b} = ? {s}|How "
        "long is {n} {b} in {s}?"
    )
    ask = _ask(rng, phrases.replace("|How long is {n} {b} in {s}?", "") if factor > 60 else phrases, s=parts, b=many, n=n)
    lines = [f"{big}->{small} *{factor}" if effort == "low" else f"One {big} is {factor} {parts}, so {n}*{factor}."]
    if effort == "high":
        lines.insert(0, f"I convert {n} {many} to {parts}.")
    digits, zeros = (str(factor).rstrip("0"), "0" * (len(str(factor)) - len(str(factor).rstrip("0"))))
    if digits != "1":
        lines.append(columns.multiply(n, int(digits), "low" if effort == "low" else "medium"))
    if zeros:
        lines.append(f"{n * int(digits)} and {zeros}: {answer}")
    verb = "is" if n == 1 else "are"
    return Problem(
        f"{'=' if n == 1 else ''}units {n} {big} {small}",
        ask,
        "\n".join(lines),
        f"{n} {many} {verb} {answer} {parts}.",
        str(answer),
        answer,
    )
