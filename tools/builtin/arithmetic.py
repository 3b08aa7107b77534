"""Problems with numbers: sums, differences, products, comparisons, sorting, units. Worked digit by digit, last one first."""

from __future__ import annotations

from random import Random

from tools.builtin.problem import Problem

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")


def number(rng: Random, longest: int = 4) -> int:
    """A number of 1 to `longest` digits, each length alike; a one-digit number is half as likely."""
    length = rng.choice([1, *range(2, longest + 1), *range(2, longest + 1)])
    return rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)


def pad(*numbers: int) -> list[str]:
    """The numbers with zeros in front, all as long as the longest."""
    width = len(str(max(numbers)))
    return [str(each).zfill(width) for each in numbers]


def _lines(steps: list[tuple[str, str]], effort: str, carried: str = "carry") -> str:
    """Steps (a column's sum, the digits so far), in the words of the effort."""
    if effort == "low":
        return "\n".join(f"{column} {done}" for column, done in steps)
    if effort == "medium":
        return "\n".join(f"{PLACES[i]}: {column}, so {done}" for i, (column, done) in enumerate(steps))
    rows = [(i + 1, PLACES[i], column, _carry(column), done) for i, (column, done) in enumerate(steps)]
    return "\n".join(f"Column {i}, {place}: {c}, {carried} {over}. Digits so far: {d}" for i, place, c, over, d in rows)


def _carry(column: str) -> str:
    """The carry of a column: tens of its result, or 1 if it had to borrow."""
    return "1" if "-" in column and "+10" in column else "0" if "-" in column else column.split("=")[-1].zfill(2)[0]


def add_steps(a: int, b: int) -> list[tuple[str, str]]:
    left, right = pad(a, b)
    carry, done, steps = 0, "", []
    for i in range(len(left) - 1, -1, -1):
        total = int(left[i]) + int(right[i]) + carry
        done = (str(total) if i == 0 else str(total % 10)) + done
        steps.append((f"{left[i]}+{right[i]}+{carry}={total}", done))
        carry = total // 10
    return steps


def subtract_steps(a: int, b: int) -> list[tuple[str, str]]:
    """For a >= b. A column below zero borrows: its line says +10."""
    left, right = pad(a, b)
    borrow, done, steps = 0, "", []
    for i in range(len(left) - 1, -1, -1):
        rest = int(left[i]) - int(right[i]) - borrow
        shown = f"{left[i]}-{right[i]}-{borrow}={rest}" + (f"+10={rest + 10}" if rest < 0 else "")
        done = str(rest % 10) + done
        steps.append((shown, done))
        borrow = int(rest < 0)
    return steps


def multiply_steps(a: int, digit: int) -> list[tuple[str, str]]:
    carry, done, steps = 0, "", []
    text = str(a)
    for i in range(len(text) - 1, -1, -1):
        product = int(text[i]) * digit
        total = product + carry
        done = (str(total) if i == 0 else str(total % 10)) + done
        steps.append((f"{text[i]}*{digit}={product}+{carry}={total}", done))
        carry = total // 10
    return steps


def work_add(a: int, b: int, effort: str) -> str:
    left, right = pad(a, b)
    head = {"low": "", "medium": "Add by columns: ", "high": f"I need the sum of {a} and {b}. Same length: "}[effort]
    return f"{head}{left}+{right}\n{_lines(add_steps(a, b), effort)}"


def work_subtract(a: int, b: int, effort: str) -> str:
    left, right = pad(a, b)
    head = {"low": "", "medium": "Subtract by columns: ", "high": f"I need {a} minus {b}. Same length: "}[effort]
    if a < b:
        head += f"{left}<{right}, so minus "
        left, right, a, b = right, left, b, a
    steps = subtract_steps(a, b)
    tail = f"\n{steps[-1][1]}={a - b}" if steps[-1][1] != str(a - b) else ""
    return f"{head}{left}-{right}\n{_lines(steps, effort, 'borrow')}{tail}"


def work_multiply(a: int, digit: int, effort: str) -> str:
    head = {"low": "", "medium": "Multiply by columns: ", "high": f"I need {a} times {digit}. Digit by digit: "}[effort]
    return f"{head}{a}*{digit}\n{_lines(multiply_steps(a, digit), effort)}"


def add(rng: Random, effort: str) -> Problem:
    a, b = number(rng), number(rng)
    if rng.random() < 0.12:
        return _add_three(rng, effort)
    ask = rng.choice(
        "What is {a} + {b}?|{a} + {b}|{a}+{b}|{a}+{b}=|{a} + {b} = ?|Add {a} and {b}.|Please add {a} and {b}.|"
        "What is the sum of {a} and {b}?|Compute {a} + {b}.|Calculate {a}+{b}|How much is {a} plus {b}?|what is {a} plus {b}|"
        "I have {a} and get {b} more. How many do I have?|whats {a}+{b}|What is {a}+{b}?|Sum of {a} and {b}?".split("|")
    ).format(a=a, b=b)
    return Problem(f"add {min(a, b)} {max(a, b)}", ask, work_add(a, b, effort), f"{a} + {b} = {a + b}.", str(a + b), a + b)


def _add_three(rng: Random, effort: str) -> Problem:
    a, b, c = (number(rng, 3) for _ in range(3))
    ask = rng.choice(
        "What is {a} + {b} + {c}?|{a}+{b}+{c}|{a} + {b} + {c}|Add {a}, {b} and {c}.|What is the sum of {a}, {b} and {c}?".split("|")
    ).format(a=a, b=b, c=c)
    think = f"{work_add(a, b, effort)}\n{work_add(a + b, c, effort)}"
    return Problem(f"add {a} {b} {c}", ask, think, f"{a} + {b} + {c} = {a + b + c}.", str(a + b + c), a + b + c)


def subtract(rng: Random, effort: str) -> Problem:
    a, b = number(rng), number(rng)
    if a < b and rng.random() < 0.75:
        a, b = b, a
    ask = rng.choice(
        "What is {a} - {b}?|{a} - {b}|{a}-{b}|{a}-{b}=|{a} - {b} = ?|Subtract {b} from {a}.|Please subtract {b} from {a}.|"
        "What is the difference of {a} and {b}?|Compute {a} - {b}.|Calculate {a}-{b}|How much is {a} minus {b}?|"
        "what is {a} minus {b}|I have {a} and give away {b}. How many are left?|whats {a}-{b}|What is {a}-{b}?".split("|")
    ).format(a=a, b=b)
    return Problem(f"sub {a} {b}", ask, work_subtract(a, b, effort), f"{a} - {b} = {a - b}.", str(a - b), a - b)


def multiply(rng: Random, effort: str) -> Problem:
    a = rng.randint(10, 99) if rng.random() < 0.6 else rng.randint(2, 999)
    digit = rng.randint(2, 9)
    x, y = (a, digit) if rng.random() < 0.6 else (digit, a)
    ask = rng.choice(
        "What is {x} * {y}?|{x} * {y}|{x}*{y}|{x}*{y}=|{x} x {y}|Multiply {x} by {y}.|Please multiply {x} and {y}.|"
        "What is the product of {x} and {y}?|Compute {x} * {y}.|Calculate {x}*{y}|How much is {x} times {y}?|"
        "what is {x} times {y}|One box holds {a} and I have {digit} boxes. How many in all?|whats {x}*{y}".split("|")
    ).format(x=x, y=y, a=a, digit=digit)
    if "box" in ask:
        x, y = a, digit
    return Problem(f"mul {a} {digit}", ask, work_multiply(a, digit, effort), f"{x} * {y} = {a * digit}.", str(a * digit), a * digit)


def _digits_compared(a: int, b: int, effort: str) -> str:
    left, right = pad(a, b)
    signs = ["=" if x == y else ">" if x > y else "<" for x, y in zip(left, right, strict=True)]
    seen = next((i + 1 for i, sign in enumerate(signs) if sign != "="), len(signs))
    steps = [f"{left[i]}{signs[i]}{right[i]}" for i in range(seen)]
    verdict = f"{a}{signs[seen - 1]}{b}"
    if effort == "low":
        return f"{left} {right}\n{' '.join(steps)}\n{verdict}"
    if effort == "medium":
        return f"Same length: {left} and {right}\nDigits from the left: {', '.join(steps)}\nSo {verdict}."
    lines = "\n".join(f"Digit {i + 1}: {step}" for i, step in enumerate(steps))
    return f"I compare {a} and {b}. Same length: {left} and {right}\n{lines}\nThe first digits that differ decide. So {verdict}."


def compare(rng: Random, effort: str) -> Problem:
    a, b = number(rng), number(rng)
    if rng.random() < 0.3:
        b = max(0, a + rng.randint(-20, 20))
    if a == b:
        b += 1
    think = _digits_compared(a, b, effort)
    kind, words = rng.choice(
        (
            ("larger", "Which is larger, {a} or {b}?|Which number is bigger: {a} or {b}?|larger: {a} or {b}?|What is the maximum of {a} and {b}?"),
            ("smaller", "Which is smaller, {a} or {b}?|Which number is less: {a} or {b}?|smaller: {a} or {b}?|What is the minimum of {a} and {b}?"),
            ("more", "Is {a} larger than {b}?|Is {a} more than {b}?|Is {a} > {b}?|Is {a} greater than {b}?"),
            ("less", "Is {a} smaller than {b}?|Is {a} less than {b}?|Is {a} < {b}?"),
        )
    )
    ask, key = rng.choice(words.split("|")).format(a=a, b=b), f"compare {kind} {min(a, b)} {max(a, b)}"
    if kind in ("larger", "smaller"):
        right = max(a, b) if kind == "larger" else min(a, b)
        return Problem(key, ask, think, f"{right} is {kind}.", str(right), right)
    true = (a > b) == (kind == "more")
    than = "larger" if a > b else "smaller"
    short = "Yes" if true else "No"
    return Problem(key, ask, think, f"{short}, {a} is {than} than {b}.", short, true)


def sort(rng: Random, effort: str) -> Problem:
    count = rng.choice((3, 4, 4, 5, 5, 6))
    numbers = rng.sample(range(1, 100 if rng.random() < 0.65 else 1000), count)
    down = rng.random() < 0.35
    ordered = sorted(numbers, reverse=down)
    separator = rng.choice((", ", ", ", " ", ","))
    listed = separator.join(map(str, numbers))
    up_words = (
        "Sort {l}.|Sort these numbers: {l}|Put {l} in ascending order.|Sort from smallest to largest: {l}|sort {l}|"
        "Order these numbers from low to high: {l}|Please sort {l} in increasing order."
    )
    down_words = (
        "Sort {l} in descending order.|Sort from largest to smallest: {l}|Order these numbers from high to low: {l}|"
        "Please sort {l} in decreasing order.|Sort in descending order: {l}"
    )
    ask = rng.choice((down_words if down else up_words).split("|")).format(l=listed)
    answer = ", ".join(map(str, ordered))
    key = f"sort {down} {numbers}"
    return Problem(key, ask, _selection(numbers, down, effort), f"Sorted: {answer}.", answer, ordered)


def _selection(numbers: list[int], down: bool, effort: str) -> str:
    """Take the first of the rest, again and again, and write down what is left."""
    width = len(str(max(numbers)))
    left = [str(each).zfill(width) for each in numbers]
    end = "largest" if down else "smallest"
    lines = [{"low": "", "medium": f"Take the {end} each time: ", "high": f"I sort {len(left)} numbers, {end} first. List: "}[effort]]
    lines[0] += " ".join(left)
    for i in range(len(numbers)):
        taken = max(left) if down else min(left)
        left.remove(taken)
        rest = " ".join(left) or "-"
        head = {"low": "", "medium": f"{end} ", "high": f"Step {i + 1}: the {end} is "}[effort]
        lines.append(f"{head}{taken}: {rest}" if effort != "high" else f"{head}{taken}. Left: {rest}")
    return "\n".join(lines)


UNITS = (
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("weeks", "days", 7),
    ("kilometers", "meters", 1000),
    ("kilograms", "grams", 1000),
    ("meters", "centimeters", 100),
    ("dollars", "cents", 100),
    ("centimeters", "millimeters", 10),
)


def units(rng: Random, effort: str) -> Problem:
    big, small, factor = rng.choice(UNITS)
    n = rng.randint(2, 250)
    answer = n * factor
    ask = rng.choice(
        "How many {s} are {n} {b}?|Convert {n} {b} to {s}.|{n} {b} in {s}|What is {n} {b} in {s}?|How many {s} are in {n} {b}?".split("|")
    ).format(s=small, b=big, n=n)
    digit = factor if factor == 7 else factor // 10 if factor == 60 else 1
    zeros = "0" * (len(str(factor)) - 1)
    rule = f"{big}->{small} *{factor}" if effort == "low" else f"One of {big} is {factor} {small}, so {n}*{factor}."
    lines = [rule]
    if effort == "high":
        lines.insert(0, f"I convert {n} {big} to {small}.")
    if digit > 1:
        lines.append(work_multiply(n, digit, "low" if effort == "low" else "medium"))
    if zeros:
        lines.append(f"{n * digit} and {zeros}: {answer}")
    sentence = f"{n} {big} are {answer} {small}."
    return Problem(f"units {n} {big} {small}", ask, "\n".join(lines), sentence, str(answer), answer)
