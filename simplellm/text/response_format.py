"""OpenAI's `response_format`: what the final message must be, and how the model is told of it.

`regex`, `choice` and `grammar` are extensions. Only a JSON Schema is shown to the model, in OpenAI's own words for it; of one
that would make the prompt long, an outline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simplellm.errors import RequestError
from simplellm.text.masks import ANY_OBJECT, Source
from simplellm.text.schema import compact_json, outline

SHOWN_WHOLE = 32_768  # characters of a schema that are shown, several thousand tokens; above,
SHOWN_OUTLINE = 2_048  # so many. What is not shown holds all the same

FIELD = "response_format"
TYPES = ("text", "json_object", "json_schema", "regex", "choice", "grammar")

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """`source` is what the content must match; `shown` the section of the developer message, "" for none."""

    source: Source
    shown: str = ""


def read(value: Any) -> ResponseFormat | None:
    """None for free text. RequestError for anything that cannot be honoured."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(FIELD, f"{value!r} is not an object with a type")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return ResponseFormat(ANY_OBJECT)
        case "json_schema":
            return _json_schema(value.get("json_schema"))
        case "regex" | "grammar" as kind:
            return ResponseFormat(Source(kind, _text(value, kind)).checked(FIELD))
        case "choice":
            return ResponseFormat(Source("regex", _choices(value.get("choice"))).checked(FIELD))
        case kind:
            raise RequestError(FIELD, f"type {kind!r} is not one of {', '.join(TYPES)}")


def _json_schema(given: Any) -> ResponseFormat:
    if not isinstance(given, Mapping):
        raise RequestError(FIELD, "json_schema is missing: an object with name and schema belongs there")
    name, description, strict = (given.get(key) for key in ("name", "description", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(FIELD, f"json_schema.name {name!r} is not a name of {_NAME.pattern}")
    if description is not None and not isinstance(description, str):
        raise RequestError(FIELD, f"json_schema.description {description!r} is not a string")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(FIELD, f"json_schema.strict {strict!r} is neither true nor false")
    if given.get("schema") is None:
        raise RequestError(FIELD, "json_schema.schema is missing: the JSON Schema of the answer belongs there")
    source = Source.of_schema(given["schema"], FIELD)
    return ResponseFormat(source, section(name, description or "", given["schema"]))


def section(name: str, description: str, schema: Mapping[str, Any]) -> str:
    """The part of the developer message in which gpt-oss expects formats."""
    remarks = [f"// {line}" for line in description.splitlines()]
    shown = compact_json(schema)
    if len(shown) > SHOWN_WHOLE:
        shown = outline(schema, SHOWN_OUTLINE)
    return "\n".join(["# Response Formats", "", f"## {name}", "", *remarks, shown])


def _text(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text:
        raise RequestError(FIELD, f"{key} {text!r} is not a string of at least one character")
    return text


def _choices(choices: Any) -> str:
    """A regular expression for one of these texts."""
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise RequestError(FIELD, f"choice {choices!r} is not a list of strings")
    return "|".join(re.escape(item) for item in choices)
