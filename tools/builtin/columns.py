"""Column arithmetic as reasoning: one line a digit, from the last one on, with the digits found so far. In three lengths."""

from __future__ import annotations

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions")
Steps = list[tuple[str, str]]  # the sum of a column, the digits so far


def pad(*numbers: int) -> list[str]:
    """The numbers with zeros in front, all as long as the longest."""
    width = len(str(max(numbers)))
    return [str(each).zfill(width) for each in numbers]


def _lines(steps: Steps, effort: str, carried: str = "carry") -> str:
    if effort == "low":
        return "\n".join(f"{column} {done}" for column, done in steps)
    if effort == "medium":
        return "\n".join(f"{PLACES[i]}: {column}, so {done}" for i, (column, done) in enumerate(steps))
    rows = [(i + 1, PLACES[i], column, _carry(column), done) for i, (column, done) in enumerate(steps)]
    return "\n".join(f"Column {i}, {place}: {c}, {carried} {over}. Digits so far: {d}" for i, place, c, over, d in rows)


def _carry(column: str) -> str:
    """The carry of a column: tens of its result, or 1 if it had to borrow."""
    return "1" if "-" in column and "+10" in column else "0" if "-" in column else column.split("=")[-1].zfill(2)[0]


def _add_steps(a: int, b: int) -> Steps:
    left, right = pad(a, b)
    carry, done, steps = 0, "", []
    for i in range(len(left) - 1, -1, -1):
        total = int(left[i]) + int(right[i]) + carry
        done = (str(total) if i == 0 else str(total % 10)) + done
        steps.append((f"{left[i]}+{right[i]}+{carry}={total}", done))
        carry = total // 10
    return steps


def _subtract_steps(a: int, b: int) -> Steps:
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


def _multiply_steps(a: int, digit: int) -> Steps:
    carry, done, steps = 0, "", []
    text = str(a)
    for i in range(len(text) - 1, -1, -1):
        product = int(text[i]) * digit
        total = product + carry
        done = (str(total) if i == 0 else str(total % 10)) + done
        steps.append((f"{text[i]}*{digit}={product}+{carry}={total}", done))
        carry = total // 10
    return steps


def _signs(left: str, right: str) -> list[str]:
    """Digits compared from the left, up to the first that differ."""
    signs = [f"{x}{'=' if x == y else '>' if x > y else '<'}{y}" for x, y in zip(left, right, strict=True)]
    return signs[: next((i + 1 for i, sign in enumerate(signs) if "=" not in sign), len(signs))]


def add(a: int, b: int, effort: str) -> str:
    left, right = pad(a, b)
    head = {"low": "", "medium": "Add by columns: ", "high": f"I need the sum of {a} and {b}. Same length: "}[effort]
    return f"{head}{left}+{right}\n{_lines(_add_steps(a, b), effort)}"


def subtract(a: int, b: int, effort: str) -> str:
    left, right = pad(a, b)
    head = {"low": "", "medium": "Subtract by columns: ", "high": f"I need {a} minus {b}. Same length: "}[effort]
    signs = _signs(left, right)
    compared = " ".join(signs) if effort == "low" else f"Digits from the left: {', '.join(signs)}"
    turned = f"\nSo minus {right}-{left}" if a < b else ""
    steps = _subtract_steps(max(a, b), min(a, b))
    done, size = steps[-1][1], str(abs(a - b))
    tail = (f"\n{done}={size}" if done != size else "") + (f"\nSo minus: {a - b}" if a < b else "")
    return f"{head}{left}-{right}\n{compared}{turned}\n{_lines(steps, effort, 'borrow')}{tail}"


def multiply(a: int, b: int, effort: str) -> str:
    """By one digit; or two digits by two, in two products and their sum."""
    if b > 9:
        ones, tens = b % 10, b // 10
        parts = [multiply(a, ones, effort), multiply(a, tens, effort), f"{a * tens} and 0: {a * tens * 10}"]
        parts.append(add(a * ones, a * tens * 10, effort))
        head = {
            "low": f"{a}*{b}",
            "medium": f"{b} is {tens} tens and {ones}: {a}*{b}",
            "high": f"I need {a} times {b}. {b} is {tens} tens and {ones}.",
        }
        return "\n".join([head[effort], *parts])
    head_of = {"low": "", "medium": "Multiply by columns: ", "high": f"I need {a} times {b}. Digit by digit: "}
    return f"{head_of[effort]}{a}*{b}\n{_lines(_multiply_steps(a, b), effort)}"


def divide(a: int, digit: int, effort: str) -> str:
    """From the first digit on; what is left goes before the next one."""
    rest, done, lines = 0, "", []
    for i, figure in enumerate(str(a)):
        now = 10 * rest + int(figure)
        done += str(now // digit)
        column = f"{now}/{digit}={now // digit} rest {now % digit}"
        lines.append(
            {
                "low": f"{column} {done}",
                "medium": f"Take {column}, so {done}",
                "high": f"Digit {i + 1}: {column}. Digits so far: {done}",
            }[effort]
        )
        rest = now % digit
    head = {"low": "", "medium": "Divide from the left: ", "high": f"I need {a} divided by {digit}. Digit by digit: "}[effort]
    tail = f"\n{done}={a // digit}" if done != str(a // digit) else ""
    return f"{head}{a}/{digit}\n" + "\n".join(lines) + tail


def compare(a: int, b: int, effort: str) -> str:
    left, right = pad(a, b)
    steps = _signs(left, right)
    verdict = f"{a}{steps[-1][1]}{b}"
    if effort == "low":
        return f"{left} {right}\n{' '.join(steps)}\n{verdict}"
    if effort == "medium":
        return f"Same length: {left} and {right}\nDigits from the left: {', '.join(steps)}\nSo {verdict}."
    lines = "\n".join(f"Digit {i + 1}: {step}" for i, step in enumerate(steps))
    return (
        f"I compare {a} and {b}. Same length: {left} and {right}\n{lines}\nThe first digits that differ decide. So {verdict}."
    )


def select(numbers: list[int], down: bool, effort: str, times: int | None = None) -> str:
    """Take the first of the rest, again and again, and write down what is left; `times` or until none is."""
    left = pad(*numbers)
    end = "largest" if down else "smallest"
    heads = {"low": "", "medium": f"Take the {end} each time: ", "high": f"I look at {len(left)} numbers, {end} first. List: "}
    lines = [heads[effort] + " ".join(left)]
    for i in range(times or len(numbers)):
        taken = max(left) if down else min(left)
        left.remove(taken)
        rest = " ".join(left) or "-"
        shown = {
            "low": f"{taken}: {rest}",
            "medium": f"{end} {taken}: {rest}",
            "high": f"Step {i + 1}: the {end} is {taken}. Left: {rest}",
        }
        lines.append(shown[effort])
    return "\n".join(lines)
