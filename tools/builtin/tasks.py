"""Conversations to learn from and to be judged by: a task's problem, dressed with dates, instructions, tools and turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tools.builtin import arithmetic, columns, functions, needle, talk, texts
from tools.builtin.phrasing import vary
from tools.builtin.problem import EFFORTS, Problem
from tools.builtin.words import KEYS, any_word, city, identifier, word

Message = dict[str, Any]

# Share of each task in training
SHARES = {
    "add": 10,
    "subtract": 13,
    "multiply": 10,
    "divide": 5,
    "compare": 7,
    "sort": 13,
    "count": 12,
    "reverse": 15,
    "days": 6,
    "units": 9,
    "look_up": 11,
    "tools": 14,
    "turns": 9,
    "json": 8,
    "small_talk": 9,
    "needle": 3,
}
PLAIN: dict[str, Callable[[Random, str], Problem]] = {
    "add": arithmetic.add,
    "subtract": arithmetic.subtract,
    "multiply": arithmetic.multiply,
    "divide": arithmetic.divide,
    "compare": arithmetic.compare,
    "sort": arithmetic.sort,
    "count": texts.count,
    "reverse": texts.reverse,
    "units": arithmetic.units,
    "look_up": texts.look_up,
    "small_talk": talk.small_talk,
    "needle": needle.needle,
}
STYLED = ("add", "subtract", "multiply", "divide", "compare", "sort", "count", "reverse", "days", "units", "look_up")


@dataclass(slots=True)
class Example:
    """A conversation in OpenAI's form and what is to be said next: reasoning, then an answer or a call."""

    task: str
    key: str
    effort: str
    date: str
    messages: list[Message]
    think: str
    answer: str = ""
    call: tuple[str, dict[str, Any]] | None = None  # name and arguments
    tools: list[Any] = field(default_factory=list)
    held_out: bool = False
    use: functions.Use | None = None  # where a tool is to be called: how the conversation goes on


def example(rng: Random, task: str | None = None, effort: str | None = None, held_out: bool = False) -> Example:
    """A conversation of the task (else any), from the held-out problems or from the others."""
    while True:
        chosen = task or rng.choices(list(SHARES), list(SHARES.values()))[0]
        made = _draw(rng, chosen, effort or rng.choice(EFFORTS))
        if made.held_out == held_out:
            return made


def _draw(rng: Random, task: str, effort: str) -> Example:
    date = texts.random_date(rng)
    if task == "tools":
        return _tool_use(rng, effort, date)
    if task == "turns":
        return _follow_up(rng, effort, date)
    style = "json" if task == "json" else "short" if rng.random() < 0.2 else "plain"
    problem = _problem(rng, rng.choice(STYLED) if task == "json" else task, effort, date)
    if style == "json" and problem.value is None:
        return _draw(rng, task, effort)
    messages, answer = _dress(rng, problem, style)
    messages = _earlier(rng, date, messages, style) if rng.random() < 0.2 else messages
    tools = []
    if rng.random() < 0.12:
        tools = functions.no_help(rng, counts=task in ("add", "subtract", "multiply", "divide", "units", "json"))
    return Example(task, problem.key, effort, date, messages, problem.think, answer, None, tools, problem.held_out)


def _problem(rng: Random, task: str, effort: str, date: str) -> Problem:
    return texts.days(rng, effort, date) if task == "days" else PLAIN[task](rng, effort)


def _dress(rng: Random, problem: Problem, style: str) -> tuple[list[Message], str]:
    """The question with instructions, and the answer as they want it."""
    answer, instruction = problem.sentence, ""
    if style == "short" and problem.short:
        answer = problem.short
        instruction = rng.choice(
            [
                "Answer with the result only.",
                "Give only the answer.",
                "Only the result, please.",
                "Just the answer, no words around it.",
                "Reply with the bare answer.",
                "Answer only with the value.",
                "Only give the result.",
                "Just give the result.",
                "Answer only.",
                "Reply with nothing but the answer.",
                "No explanation, just the answer.",
                "Give just the result.",
                "Answer with the number only.",
                "Answer with one word or number.",
                "Reply only with the answer.",
            ]
        )
    elif style == "json":
        key = rng.choice(KEYS) if rng.random() < 0.4 else identifier(rng, "count length city day name", 0.8)
        answer = json.dumps({key: problem.value})
        instruction = rng.choice(
            [
                'Answer in JSON with the key "{k}".',
                'Reply with a JSON object that has the key "{k}".',
                'Answer as JSON: {{"{k}": ...}}',
                'Give your answer as JSON with one key, "{k}".',
                'Respond in JSON, key "{k}".',
                "Use JSON with the key {k}.",
                'Return JSON: {{"{k}": <answer>}}',
                'Reply in JSON like {{"{k}": ...}}.',
                'Output a JSON object with the field "{k}".',
                'Answer only with JSON of the form {{"{k}": value}}.',
                'I want JSON with a "{k}" key.',
                'Format: {{"{k}": ...}}',
            ]
        ).format(k=key)
    ask, system = problem.ask, ""
    if rng.random() < 0.35:
        system = _filler(rng)
    system = " ".join(filter(None, (system, problem.context)))
    if instruction and rng.random() < 0.5:
        ask = f"{ask} {instruction}" if "\n" not in ask else f"{ask}\n{instruction}"
    elif instruction:
        system = f"{system} {instruction}".strip() if rng.random() < 0.5 else f"{instruction} {system}".strip()
    messages = [{"role": "user", "content": ask}]
    if system:
        messages.insert(0, {"role": rng.choice(("system", "developer")), "content": system})
    return messages, answer


def _filler(rng: Random) -> str:
    """Instructions that ask for nothing that would change an answer."""
    sentences = [
        "You are a helpful assistant.",
        "Be polite.",
        "Be brief and clear.",
        "You work for {c}.",
        "Answer the questions of the user.",
        "Your name is {n}.",
        "Be friendly.",
        "You are an assistant of the {n} company.",
        "Think before you answer.",
        "The user is from {c}.",
        "Answer in English.",
        "Do not make mistakes.",
        "You help pupils with their homework.",
        "You are {n}.",
        "You are a {w} assistant.",
        "Always be {w}.",
        "You are an expert in {w}.",
        "Today we talk about {w}.",
        "Keep it short.",
        "Never talk about {w}.",
        "You are a tutor.",
        "You love {w} and {v}.",
    ]
    chosen = rng.sample(sentences, rng.choice((1, 1, 2, 3)) if rng.random() < 0.93 else rng.randint(4, 10))
    return " ".join(
        each.format(c=city(rng), n=word(rng, 3, 7).capitalize(), w=any_word(rng, 8), v=any_word(rng, 8)) for each in chosen
    )


def _earlier(rng: Random, date: str, messages: list[Message], style: str = "plain") -> list[Message]:
    """The conversation with one or two finished turns before its last question, seldom with many."""
    turns: list[Message] = []
    for _ in range(rng.choice((1, 1, 2)) if rng.random() < 0.9 else rng.randint(3, 10)):
        problem = _problem(rng, rng.choice([*STYLED, "small_talk"]), "low", date)
        said = problem.short if style == "short" and problem.short and rng.random() < 0.7 else problem.sentence
        turns += [{"role": "user", "content": problem.ask}, {"role": "assistant", "content": said}]
    return [*messages[:-1], *turns, messages[-1]]


def _tool_use(rng: Random, effort: str, date: str) -> Example:
    """A call, or the answer from its result."""
    family = rng.choices(list(functions.FAMILIES), functions.SHARES)[0]
    use = functions.FAMILIES[family](rng)
    tools = functions.with_others(rng, use, family)
    messages: list[Message] = [{"role": "user", "content": use.ask}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": rng.choice(("system", "developer")), "content": _filler(rng)})
    roll = rng.random()
    if roll < 0.15:
        messages = _earlier(rng, date, messages)
    elif roll < 0.3 and use.place and use.place in use.arguments.values():
        messages, use = _asked_again(rng, messages, use)
    think = functions.think_call(use, effort)
    held_out = Problem(use.key, use.ask, "", "").held_out
    made = Example("tools", use.key, effort, date, messages, think, "", (use.name, use.arguments), tools, held_out, use)
    return made if rng.random() < 0.6 else after_call(made, json.dumps(use.arguments))


def _asked_again(rng: Random, messages: list[Message], use: functions.Use) -> tuple[list[Message], functions.Use]:
    """The same tool was used a turn before, for another place."""
    fresh = functions.weather(rng)
    place, key = fresh.place, next(name for name, value in use.arguments.items() if value == use.place)
    ask = vary(
        rng, rng.choice(("And in {c}?", "What about {c}?", "and {c}", "And {c}?", "Now {c}.", fresh.ask)).format(c=place)
    )
    again = replace(fresh, tool=use.tool, arguments=use.arguments | {key: place}, ask=ask)
    done = [*_call_messages(use, json.dumps(use.arguments), 0), {"role": "assistant", "content": use.answer}]
    return [*messages, *done, {"role": "user", "content": ask}], again


def _call_messages(use: functions.Use, arguments: str, number: int, think: str = "") -> list[Message]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": use.name, "arguments": arguments}}
    asked: Message = {"role": "assistant", "tool_calls": [call]} | ({"reasoning": think} if think else {})
    return [asked, {"role": "tool", "tool_call_id": f"call_{number}", "content": use.result}]


def after_call(made: Example, arguments: str) -> Example:
    """The same conversation when the tool's result is there."""
    assert made.use is not None
    use = made.use
    messages = [*made.messages, *_call_messages(use, arguments, 1, made.think)]
    think = functions.think_answer(use, made.effort)
    return Example("tools", made.key, made.effort, made.date, messages, think, use.answer, None, made.tools, made.held_out)


def _follow_up(rng: Random, effort: str, date: str) -> Example:
    """A question that only the turn before it makes complete: more arithmetic on its result, or another entry of its list."""
    messages: list[Message]
    if rng.random() < 0.35:
        listed, entries = texts.make_list(rng)
        first = texts.ask_list(rng, "low", entries)
        question, key, think, sentence, _ = texts.ask_list(rng, effort, entries)
        ask = rng.choice(("And {k}?", "What about {k}?", "and {k}", "Now {k}.", "{q}", "{q}")).format(k=key, q=question)
        messages = [{"role": "user", "content": f"{listed}\n{first[0]}"}, {"role": "assistant", "content": first[3]}]
        key = f"turn look {key} {sorted(entries.items())}"
    else:
        problem = rng.choice((arithmetic.add, arithmetic.subtract, arithmetic.multiply))(rng, "low")
        total = int(problem.short)
        if abs(total) >= 10**6:  # the next result shall be a number that the tasks have, of up to seven digits
            return _follow_up(rng, effort, date)
        kind = rng.choice("+-*") if 0 < total < 10000 else "+-"[total >= 0]
        other = rng.randint(2, 9) if kind == "*" else arithmetic.number(rng, 4)
        total, ask, think, sentence = _continued(rng, effort, total, kind, other)
        messages = [{"role": "user", "content": problem.ask}, {"role": "assistant", "content": problem.sentence}]
        key = f"turn {problem.key} {kind} {other}"
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": _filler(rng)})
    done = Problem(key, ask, think, sentence)
    messages.append({"role": "user", "content": ask})
    return Example("turns", key, effort, date, messages, think, sentence, None, [], done.held_out)


def _continued(rng: Random, effort: str, total: int, kind: str, other: int) -> tuple[int, str, str, str]:
    """The next step on an earlier result: the new result, question, reasoning, sentence."""
    if total < 0:  # adding to a negative number is a difference turned around
        kind, other = "+", max(other, -total)
    phrases = {
        "+": (
            "Now add {n}.|And plus {n}?|Add {n} to that.|plus {n}|What if I add {n}?|+ {n}|And {n} more?|Add {n}.|add {n} to it"
        ),
        "-": (
            "Now subtract {n}.|And minus {n}?|Take {n} away from that.|minus {n}|What if I subtract {n}?|- {n}|Subtract "
            "{n}.|And {n} less?"
        ),
        "*": (
            "Now multiply by {n}.|And times {n}?|Multiply that by {n}.|times {n}|* {n}|What if I multiply it by {n}?|"
            "Multiply it by {n}."
        ),
    }
    ask = vary(rng, rng.choice(phrases[kind].split("|")).format(n=other))
    if kind == "*":
        return total * other, ask, columns.multiply(total, other, effort), f"{total} * {other} = {total * other}."
    if kind == "-":
        return total - other, ask, columns.subtract(total, other, effort), f"{total} - {other} = {total - other}."
    if total < 0:
        return other + total, ask, columns.subtract(other, -total, effort), f"{total} + {other} = {other + total}."
    return total + other, ask, columns.add(total, other, effort), f"{total} + {other} = {total + other}."
