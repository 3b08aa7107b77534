"""JSON Schema -> the TypeScript in which gpt-oss reads its tools; character for character as openai-harmony 0.0.8.

Total: a schema of any shape gives some text, what it cannot say is `any`. Keys keep their order. `nesting` is for
callers to bound, as both functions recurse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

STEP, VARIANT_STEP = "    ", "   "  # deeper by one object, by one variant of a union


def typescript(schema: Any, indent: str = "") -> str:
    """The type that `schema` describes; lines after the first are indented by `indent`."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(f"\n{_variant(variant, indent)}{_remarks(variant)}" for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        names = [name for name in kind if isinstance(name, str)]
        return " | ".join("number" if name == "integer" else name for name in names)
    match kind:
        case "object":
            return _object(schema, indent)
        case "string":
            return " | ".join(f'"{value}"' for value in _enum(schema) if isinstance(value, str)) or "string"
        case "number" | "integer":
            return "number"
        case "boolean":
            return "boolean"
        case "array":
            return f"{typescript(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    return "any"


def nesting(value: Any) -> int:
    """Depth of nested objects and lists in a JSON value."""
    depth, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        depth += 1
        layer = [inner for item in layer for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def outline(value: Any, length: int) -> str:
    """`value` as JSON, without its deepest levels: as many of them as `length` characters hold, "{}" if none fit."""
    shown = "{}"
    for depth in range(nesting(value)):
        text = compact_json(_upper(value, depth))
        if len(text) > length:
            break
        shown = text
    return shown


def _upper(value: Any, depth: int) -> Any:
    """Its upper `depth` levels below the first: objects and lists further down are left out."""
    if isinstance(value, dict):
        return {key: _upper(item, depth - 1) for key, item in value.items() if depth or not isinstance(item, dict | list)}
    if isinstance(value, list):
        return [_upper(item, depth - 1) for item in value if depth or not isinstance(item, dict | list)]
    return value


def _object(schema: Mapping[str, Any], indent: str) -> str:
    head = _line(indent, schema.get("description"))
    fields, required = schema.get("properties"), schema.get("required")
    if not isinstance(fields, Mapping):
        fields = {}
    needed = required if isinstance(required, list) else []
    body = "".join(_field(key if key in needed else f"{key}?", value, indent) for key, value in fields.items())
    return f"{head}{{\n{body}{indent}}}"


def _field(key: str, schema: Any, indent: str) -> str:
    """A property with its comment lines; `key` carries its question mark."""
    if not isinstance(schema, Mapping):
        schema = {}
    title = schema.get("title")
    head = f"{indent}// {title}\n{indent}//\n" if isinstance(title, str) else ""
    plain = "oneOf" not in schema
    head += _line(indent, schema.get("description")) if plain else ""
    head += _examples(schema, indent)
    if isinstance(schema.get("oneOf"), list):
        return head + _union_field(key, schema, indent)
    default = f" // {_default(schema)}" if plain and "default" in schema else ""
    return f"{head}{indent}{key}: {_nullable(typescript(schema, indent + STEP), schema)},{default}\n"


def _union_field(key: str, schema: Mapping[str, Any], indent: str) -> str:
    variants: list[Any] = schema["oneOf"]
    description = schema.get("description")
    said = isinstance(description, str) and not (variants and _description(variants[0]) == description)
    lines = [
        _line(indent, description) if said else "",
        f"{indent}// {_default(schema)}\n" if "default" in schema else "",
    ]
    lines.append(f"{indent}{key}:\n")
    for number, variant in enumerate(variants):
        own = _description(variant)
        remarks = [own] if own is not None and own != description and not (said and number == 0) else []
        if isinstance(variant, Mapping) and "default" in variant:
            remarks.append(_default(variant))
        lines.append(_variant(variant, indent) + (f" // {' '.join(remarks)}" if remarks else "") + "\n")
    return "".join(lines) + f"{indent},\n"


def _variant(schema: Any, indent: str) -> str:
    return f"{indent} | {_nullable(typescript(schema, indent + VARIANT_STEP), schema)}"


def _nullable(text: str, schema: Any) -> str:
    wants = isinstance(schema, Mapping) and schema.get("nullable") is True and "null" not in text
    return f"{text} | null" if wants else text


def _remarks(variant: Any) -> str:
    """Comment behind a variant that is not directly a property's. Its defaults are quoted unlike a property's."""
    if not isinstance(variant, Mapping):
        return ""
    remarks = [variant["description"]] if isinstance(variant.get("description"), str) else []
    if "default" in variant:
        value = variant["default"]
        plain = isinstance(value, str) and not _enum(variant)
        remarks.append(f'default: "{value}"' if plain else f"default: {compact_json(value)}")
    return f" // {' '.join(remarks)}" if remarks else ""


def _default(schema: Mapping[str, Any]) -> str:
    value = schema["default"]
    if isinstance(value, str):
        return f"default: {value}" if _enum(schema) else f'default: "{value}"'
    return f"default: {compact_json(value)}"


def _examples(schema: Mapping[str, Any], indent: str) -> str:
    examples = schema.get("examples")
    if not isinstance(examples, list) or not examples:
        return ""
    shown = "".join(f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str))
    return f"{indent}// Examples:\n{shown}"


def _line(indent: str, comment: Any) -> str:
    return f"{indent}// {comment}\n" if isinstance(comment, str) else ""


def _description(schema: Any) -> str | None:
    text = schema.get("description") if isinstance(schema, Mapping) else None
    return text if isinstance(text, str) else None


def _enum(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def compact_json(value: Any) -> str:
    """`value` as Rust's serde_json prints it: no spaces, shortest floats, exponents only below 1e-5 and from 1e16."""
    match value:
        case dict():
            return "{" + ",".join(f"{compact_json(key)}:{compact_json(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(compact_json, value)) + "]"
        case float():
            return _float(value)
        case int() if not isinstance(value, bool) and not -(2**63) <= value < 2**64:
            return _float(float(value)) if abs(value) < 2**1023 else "null"
    return json.dumps(value, ensure_ascii=False, default=str)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return "null"
    if value and not 1e-5 <= abs(value) < 1e16:
        mantissa, _, exponent = repr(value).partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    text = repr(value)
    return format(Decimal(text), "f") if "e" in text else text
