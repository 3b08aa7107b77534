"""Tools in many disguises (names, descriptions, parameters), questions that need one, its result, and the answer from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.builtin.arithmetic import number
from tools.builtin.phrasing import politely, vary
from tools.builtin.words import ITEMS, SKIES, any_word, city, identifier, word

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Use:
    """A question for a tool: the call that is right, what comes back, what is then to be said."""

    key: str
    ask: str
    tool: Schema
    purpose: str
    arguments: dict[str, Any]
    result: str
    found: str  # the result in the words of the reasoning
    answer: str
    place: str = ""  # of the weather: what a second question may change

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def declare(
    rng: Random, names: str, descriptions: str, fields: dict[str, Schema], optional: dict[str, Schema] | None = None
) -> Schema:
    """A tool with these parameters; those that are optional need not be in a call, and are not."""
    properties = {name: dict(schema) for name, schema in ((optional or {}) | fields).items()}
    for schema in properties.values():
        if rng.random() < 0.5:
            schema.pop("description", None)
    required = {"required": list(fields)} if rng.random() < 0.9 or optional or len(fields) > 1 else {}
    parameters = {"type": "object", "properties": _shuffled(rng, properties)} | required
    function = {"name": identifier(rng, names), "description": rng.choice(descriptions.split("|")), "parameters": parameters}
    return {"type": "function", "function": function}


def _extra(rng: Random) -> dict[str, Schema]:
    """Now and then an optional parameter."""
    if rng.random() < 0.75:
        return {}
    name = identifier(rng, "limit lang language format verbose country detail mode", 0.4)
    kind = rng.choice(
        ({"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"type": "string", "enum": ["short", "long"]})
    )
    more: Schema = {"description": " ".join(any_word(rng, 8) for _ in range(rng.randint(1, 4)))} if rng.random() < 0.5 else {}
    default = {"integer": 5, "string": "short", "boolean": True}[kind["type"]]
    return {name: kind | more | ({"default": default} if rng.random() < 0.4 else {})}


def _ask(rng: Random, phrases: str, **values: object) -> str:
    phrase = rng.choice(phrases.split("|")).format(**values)
    return vary(rng, politely(rng, phrase) if phrase.endswith(".") else phrase)


def _place_field(rng: Random) -> tuple[str, dict[str, Schema]]:
    name = identifier(rng, "city location place town city location where name", 0.15)
    text = rng.choice(
        (
            "The city",
            "Name of the city",
            "The place to look up",
            "city name, e.g. Paris",
            "The city and state, e.g. San Francisco, CA",
        )
    )
    return name, {name: {"type": "string", "description": text}}


def _unit(rng: Random) -> dict[str, Schema]:
    if rng.random() < 0.6:
        return {}
    schema: Schema = {"type": "string", "enum": rng.choice((["celsius", "fahrenheit"], ["fahrenheit", "celsius"]))}
    if rng.random() < 0.3:
        schema |= {"default": "celsius"}
    if rng.random() < 0.4:
        schema |= {"description": rng.choice(("The unit", "Unit of temperature", "The temperature unit to use"))}
    return {identifier(rng, "unit unit format units scale", 0.2): schema}


def _in_order(tool: Schema, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments in the order of the tool's parameters."""
    return {name: arguments[name] for name in tool["function"]["parameters"]["properties"] if name in arguments}


def weather(rng: Random) -> Use:
    place = city(rng)
    field, fields = _place_field(rng)
    names = (
        "get_weather get_weather weather current_weather get_current_weather fetch_weather weather_at lookup_weather forecast"
    )
    says = (
        "Get the current weather for a city.|Gets the current weather in the provided location.|Get the weather for a "
        "city.|Get the current weather.|Current weather at a place|Returns the weather of a city|Weather report"
    )
    unit, optional = _unit(rng), _extra(rng)
    needed = {name: "celsius" for name in unit if rng.random() < 0.4}
    fields |= unit if needed else {}
    optional |= {} if needed else unit
    degrees, sky = rng.randint(-9, 39), rng.choice(SKIES)
    warm, look = (
        rng.choice(("temperature", "temp", "degrees", "celsius")),
        rng.choice(("condition", "sky", "weather", "conditions")),
    )
    result = json.dumps(_shuffled(rng, {warm: degrees, look: sky}))
    if rng.random() < 0.2:
        result = f"{degrees} degrees, {sky}"
    phrases = (
        "What is the weather in {c}?|How is the weather in {c}?|weather in {c}|What's the weather like in {c}?|Is it "
        "raining in {c}?|Tell me the weather in {c}.|What is the weather like in {c} today?|How warm is it in {c}?|Is it "
        "sunny in {c}?|How cold is it in {c}?|Check the weather in {c}.|What is the temperature in {c}?|Do I need a coat "
        "in {c}?|Look up the weather for {c}.|Weather for {c}, please."
    )
    answer = f"It is {degrees} degrees and {sky} in {place}."
    tool = declare(rng, names, says, fields, optional)
    asked = _ask(rng, phrases, c=place)
    found = f"{degrees}, {sky}"
    return Use(
        f"weather {place} {degrees}",
        asked,
        tool,
        "the weather",
        _in_order(tool, {field: place} | needed),
        result,
        found,
        answer,
        place,
    )


def clock(rng: Random) -> Use:
    place = city(rng)
    field, fields = _place_field(rng)
    time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    result = time if rng.random() < 0.3 else json.dumps({rng.choice(("time", "local_time", "now")): time})
    ask = _ask(
        rng,
        "What time is it in {c}?|Tell me the time in {c}.|What is the local time in {c}?|time in {c}|How late is it in {c}?",
        c=place,
    )
    names = "get_time get_time local_time current_time clock time_in world_clock"
    tool = declare(
        rng, names, "Get the time in a city.|Local time of a place|Returns the current time.|World clock", fields, _extra(rng)
    )
    return Use(f"clock {place} {time}", ask, tool, "the time", {field: place}, result, time, f"It is {time} in {place}.")


def price(rng: Random) -> Use:
    item = rng.choice(ITEMS) if rng.random() < 0.6 else word(rng, 3, 8)
    field = identifier(rng, "item product name article item product", 0.15)
    cost = rng.randint(1, 999)
    result = str(cost) if rng.random() < 0.3 else json.dumps({rng.choice(("price", "cost", "amount")): cost})
    ask = _ask(
        rng, "What do {i} cost?|What is the price of {i}?|How much are {i}?|price of {i}|Tell me the price of {i}.", i=item
    )
    names = "get_price get_price price lookup_price price_of product_price find_price"
    tool = declare(
        rng,
        names,
        "Get the price of a product.|Price of an item|Returns what an item costs.|Look up a price",
        {field: {"type": "string", "description": "The product"}},
        _extra(rng),
    )
    return Use(
        f"price {item} {cost}", ask, tool, "the price", {field: item}, result, str(cost), f"The price of {item} is {cost}."
    )


def order(rng: Random) -> Use:
    n = rng.randint(100, 9999)
    field = identifier(rng, "order_id id number order order_id", 0.15)
    status = rng.choice(("shipped", "open", "paid", "lost", "delivered", "late", "packed"))
    result = status if rng.random() < 0.3 else json.dumps({rng.choice(("status", "state")): status})
    ask = _ask(
        rng, "Where is order {n}?|What is the status of order {n}?|Check order {n}.|status of order {n}|Track order {n}.", n=n
    )
    names = "get_order get_order order_status track_order find_order check_order"
    tool = declare(
        rng,
        names,
        "Get the status of an order.|Track an order|Returns the state of an order.",
        {field: {"type": "integer", "description": "Number of the order"}},
        _extra(rng),
    )
    return Use(f"order {n} {status}", ask, tool, "the order", {field: n}, result, status, f"Order {n} is {status}.")


def calculator(rng: Random) -> Use:
    expression = _expression(rng)
    total = round(eval(expression.replace(" ", "")), 2)  # of numbers and signs that were put together here
    field = identifier(rng, "expression expr formula expression input", 0.15)
    result = str(total) if rng.random() < 0.5 else json.dumps({rng.choice(("result", "value", "answer")): total})
    names = "calculator calculator calculate compute calc evaluate math eval_expression"
    says = (
        "Evaluates an arithmetic expression.|Evaluate an expression.|A calculator|Computes the value of an expression.|"
        "Do arithmetic|Calculate something|Use it to calculate."
    )
    tool = declare(rng, names, says, {field: {"type": "string", "description": "Such as 1+2"}})
    shown = expression if rng.random() < 0.6 else expression.replace(" ", "")
    question = _ask(
        rng, "What is {e}?|{e}|Compute {e}.|How much is {e}?|Calculate {e}.|{e} = ?|Use the tool to compute {e}.", e=shown
    )
    key = f"calc {expression}"
    return Use(
        key,
        question,
        tool,
        "a calculation",
        {field: expression.replace(" ", "")},
        result,
        str(total),
        f"{expression} = {total}.",
    )


def _expression(rng: Random) -> str:
    """Numbers with signs and spaces between them: mostly two, at times of a kind that the model could not do by itself."""
    if rng.random() < 0.6:
        return f"{number(rng)} {rng.choice('+-*')} {number(rng)}"
    size = rng.choice((2, 3, 3, 4))
    numbers = [
        str(rng.randint(1, 999)) if rng.random() < 0.8 else f"{rng.randint(1, 99)}.{rng.randint(1, 9)}" for _ in range(size)
    ]
    return numbers[0] + "".join(f" {rng.choice('+-*/')} {each}" for each in numbers[1:])


def two_numbers(rng: Random) -> Use:
    """A tool of two numbers, for one operation."""
    a, b = number(rng), number(rng)
    verb, sign, names, says = rng.choice(
        (
            ("plus", "+", "add add_numbers sum plus", "Add two numbers.|Sum of two numbers|Returns a plus b."),
            ("times", "*", "multiply mul product times", "Multiply two numbers.|Product of two numbers|Returns a times b."),
        )
    )
    total = a + b if sign == "+" else a * b
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    tool = declare(rng, names, says, {name: {"type": rng.choice(("number", "integer"))} for name in (first, second)})
    ask = _ask(
        rng,
        "What is {a} {s} {b}?|{a} {s} {b}|How much is {a} {v} {b}?|Compute {a} {s} {b}.|{a}{s}{b}",
        a=a,
        b=b,
        s=sign,
        v=verb,
    )
    result = str(total) if rng.random() < 0.5 else json.dumps({"result": total})
    return Use(
        f"two {a} {sign} {b}",
        ask,
        tool,
        "a calculation",
        _in_order(tool, {first: a, second: b}),
        result,
        str(total),
        f"{a} {sign} {b} = {total}.",
    )


def timer(rng: Random) -> Use:
    n = rng.randint(1, 240)
    field = identifier(rng, "minutes duration minutes length", 0.15)
    tool = declare(
        rng,
        "set_timer timer start_timer countdown",
        "Set a timer.|Start a timer for some minutes.|Timer",
        {field: {"type": "integer", "description": "Minutes"}},
    )
    ask = _ask(
        rng, "Set a timer for {n} minutes.|Start a timer of {n} minutes.|timer {n} minutes|Set the timer to {n} minutes.", n=n
    )
    result = rng.choice(('{"ok": true}', "ok", '{"status": "started"}', "done"))
    return Use(
        f"timer {n} {rng.randrange(4)}",
        ask,
        tool,
        "a timer",
        {field: n},
        result,
        "it runs",
        f"The timer is set to {n} minutes.",
    )


def search(rng: Random) -> Use:
    what = " ".join(any_word(rng, 8) for _ in range(rng.choice((1, 2, 2, 3))))
    field = identifier(rng, "query q text search_term query", 0.15)
    found = " ".join(any_word(rng, 8) for _ in range(rng.choice((1, 2, 3, 4))))
    result = found if rng.random() < 0.4 else json.dumps({rng.choice(("result", "text", "found")): found})
    tool = declare(
        rng,
        "search search_web web_search find lookup",
        "Search the web.|Find something on the web.|Web search",
        {field: {"type": "string", "description": "What to search"}},
        _extra(rng),
    )
    ask = _ask(rng, "Search for {w}.|Search the web for {w}.|Find {w} on the web.|search {w}|Look for {w} on the web.", w=what)
    return Use(f"search {what}", ask, tool, "a search", {field: what}, result, found, f"I found: {found}.")


FAMILIES: dict[str, Callable[[Random], Use]] = {
    "weather": weather,
    "calculator": calculator,
    "clock": clock,
    "price": price,
    "order": order,
    "two_numbers": two_numbers,
    "timer": timer,
    "search": search,
}
SHARES = (8, 7, 2, 2, 2, 2, 2, 2)  # of the families, in training
CLASHES = {"calculator", "two_numbers"}  # which both calculate


def with_others(rng: Random, use: Use, family: str) -> list[Schema]:
    """The tool that is needed among up to two of other families, in any order, under distinct names."""
    tools = [use.tool]
    others = [name for name in FAMILIES if name != family and not {name, family} <= CLASHES]
    for other in rng.sample(others, rng.choice((0, 0, 1, 1, 2, 3))):
        tools.append(FAMILIES[other](rng).tool)
    others_named = {tool["function"]["name"]: tool for tool in tools if tool["function"]["name"] != use.name}
    distinct = [use.tool, *others_named.values()]
    rng.shuffle(distinct)
    return distinct


def no_help(rng: Random, counts: bool) -> list[Schema]:
    """One or two tools for other tasks; `counts`: the task is arithmetic, which a calculator would help."""
    others = ["order", "timer", *(("weather", "clock") if counts else ("calculator", "two_numbers"))]
    made = [FAMILIES[name](rng).tool for name in rng.sample(others, rng.choice((1, 1, 2)))]
    return list({tool["function"]["name"]: tool for tool in made}.values())


def _shuffled(rng: Random, fields: dict[str, Any]) -> dict[str, Any]:
    keys = list(fields)
    rng.shuffle(keys)
    return {key: fields[key] for key in keys}


def think_call(use: Use, effort: str) -> str:
    if effort == "low":
        return f"call {use.name}"
    if effort == "medium":
        return f"The user wants {use.purpose}. I call {use.name}."
    return f"The user wants {use.purpose}. The tool {use.name} gives it. I call it with {json.dumps(use.arguments)} and wait."


def think_answer(use: Use, effort: str) -> str:
    if effort == "low":
        return use.found
    if effort == "medium":
        return f"The tool says: {use.found}"
    return f"I asked {use.name} for {use.purpose}. It says: {use.found}. Now I can answer."
