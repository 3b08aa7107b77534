"""Tools in many disguises (names, descriptions, parameters), questions that need one, its result, and the answer from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.builtin.arithmetic import number
from tools.builtin.words import ITEMS, SKIES, city, identifier, word

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

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def declare(rng: Random, names: str, descriptions: str, fields: dict[str, Schema]) -> Schema:
    properties = {}
    for name, schema in fields.items():
        shown = dict(schema)
        if rng.random() < 0.5:
            shown.pop("description", None)
        properties[name] = shown
    required = {"required": list(properties)} if rng.random() < 0.9 else {}
    parameters = {"type": "object", "properties": properties} | required
    description = rng.choice(descriptions.split("|"))
    return {"type": "function", "function": {"name": identifier(rng, names), "description": description, "parameters": parameters}}


def _place_field(rng: Random) -> tuple[str, dict[str, Schema]]:
    name = identifier(rng, "city location place town city location where name", 0.15)
    text = rng.choice(("The city", "Name of the city", "The place to look up", "city name, e.g. Paris"))
    return name, {name: {"type": "string", "description": text}}


def weather(rng: Random) -> Use:
    place = city(rng)
    field, fields = _place_field(rng)
    names = "get_weather get_weather weather current_weather get_current_weather fetch_weather weather_at lookup_weather forecast"
    says = "Get the weather for a city.|Get the current weather.|Current weather at a place|Returns the weather of a city|Weather report"
    unit: dict[str, Any] = {}
    if rng.random() < 0.2:
        fields["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        unit = {"unit": "celsius"}
    degrees, sky = rng.randint(-9, 39), rng.choice(SKIES)
    warm, look = rng.choice(("temperature", "temp", "degrees", "celsius")), rng.choice(("condition", "sky", "weather", "conditions"))
    result = json.dumps(_shuffled(rng, {warm: degrees, look: sky}))
    if rng.random() < 0.2:
        result = f"{degrees} degrees, {sky}"
    ask = rng.choice(
        "What is the weather in {c}?|How is the weather in {c}?|weather in {c}|What's the weather like in {c}?|"
        "Tell me the weather in {c}.|What is the weather like in {c} today?|How warm is it in {c}?|Is it sunny in {c}?".split("|")
    ).format(c=place)
    answer = f"It is {degrees} degrees and {sky} in {place}."
    tool = declare(rng, names, says, fields)
    return Use(f"weather {place} {degrees}", ask, tool, "the weather", {field: place} | unit, result, f"{degrees}, {sky}", answer)


def clock(rng: Random) -> Use:
    place = city(rng)
    field, fields = _place_field(rng)
    time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    result = time if rng.random() < 0.3 else json.dumps({rng.choice(("time", "local_time", "now")): time})
    ask = rng.choice("What time is it in {c}?|Tell me the time in {c}.|What is the local time in {c}?|time in {c}".split("|")).format(c=place)
    names = "get_time get_time local_time current_time clock time_in world_clock"
    tool = declare(rng, names, "Get the time in a city.|Local time of a place|Returns the current time.|World clock", fields)
    return Use(f"clock {place} {time}", ask, tool, "the time", {field: place}, result, time, f"It is {time} in {place}.")


def price(rng: Random) -> Use:
    item = rng.choice(ITEMS) if rng.random() < 0.6 else word(rng, 3, 8)
    field = identifier(rng, "item product name article item product", 0.15)
    cost = rng.randint(1, 999)
    result = str(cost) if rng.random() < 0.3 else json.dumps({rng.choice(("price", "cost", "amount")): cost})
    ask = rng.choice("What do {i} cost?|What is the price of {i}?|How much are {i}?|price of {i}|Tell me the price of {i}.".split("|"))
    names = "get_price get_price price lookup_price price_of product_price find_price"
    tool = declare(rng, names, "Get the price of a product.|Price of an item|Returns what an item costs.|Look up a price", {field: {"type": "string", "description": "The product"}})
    return Use(f"price {item} {cost}", ask.format(i=item), tool, "the price", {field: item}, result, str(cost), f"The price of {item} is {cost}.")


def order(rng: Random) -> Use:
    n = rng.randint(100, 9999)
    field = identifier(rng, "order_id id number order order_id", 0.15)
    status = rng.choice(("shipped", "open", "paid", "lost", "delivered", "late", "packed"))
    result = status if rng.random() < 0.3 else json.dumps({rng.choice(("status", "state")): status})
    ask = rng.choice("Where is order {n}?|What is the status of order {n}?|Check order {n}.|status of order {n}".split("|")).format(n=n)
    names = "get_order get_order order_status track_order find_order check_order"
    tool = declare(rng, names, "Get the status of an order.|Track an order|Returns the state of an order.", {field: {"type": "integer", "description": "Number of the order"}})
    return Use(f"order {n} {status}", ask, tool, "the order", {field: n}, result, status, f"Order {n} is {status}.")


def calculator(rng: Random) -> Use:
    a, b = number(rng), number(rng)
    sign = rng.choice("+-*")
    total = {"+": a + b, "-": a - b, "*": a * b}[sign]
    verb = {"+": "plus", "-": "minus", "*": "times"}[sign]
    ask = rng.choice("What is {a} {s} {b}?|{a}{s}{b}|{a} {s} {b}|Compute {a} {s} {b}.|How much is {a} {v} {b}?|Calculate {a}{s}{b}".split("|"))
    field = identifier(rng, "expression expr formula expression input", 0.15)
    result = str(total) if rng.random() < 0.5 else json.dumps({rng.choice(("result", "value", "answer")): total})
    names = "calculator calculator calculate compute calc evaluate math eval_expression"
    says = "Evaluate an expression.|A calculator|Computes the value of an expression.|Do arithmetic"
    tool = declare(rng, names, says, {field: {"type": "string", "description": "Such as 1+2"}})
    expression = f"{a}{sign}{b}"
    question = ask.format(a=a, b=b, s=sign, v=verb)
    return Use(f"calc {expression}", question, tool, "a calculation", {field: expression}, result, str(total), f"{a} {sign} {b} = {total}.")


FAMILIES: dict[str, Callable[[Random], Use]] = {
    "weather": weather,
    "calculator": calculator,
    "clock": clock,
    "price": price,
    "order": order,
}


def with_others(rng: Random, use: Use, family: str) -> list[Schema]:
    """The tool that is needed among up to two of other families, in any order, under distinct names."""
    tools = [use.tool]
    for other in rng.sample([name for name in FAMILIES if name != family], rng.choice((0, 0, 1, 1, 2))):
        tools.append(FAMILIES[other](rng).tool)
    rng.shuffle(tools)
    return list({tool["function"]["name"]: tool for tool in tools if tool is use.tool or tool["function"]["name"] != use.name}.values())


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
