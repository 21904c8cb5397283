"""Small instances of JSON schemas, made of the words of a conversation where these fit."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|`([^`\n]+)`")
_NAMED = re.compile(r"\b(?:in|of|for|about|named|to) (?:the )?([A-Z]\w*(?: [A-Z]\w*)*)")
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "person@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_DEEPEST = 6


class Words:
    """The numbers and strings in a user's words and the tools' results; each is used once, in order."""

    def __init__(self, request: str, results: list[str] | None = None) -> None:
        self.request = request
        self.keys = _strings(request) if re.search(r"\bkeys?\b", request) else []
        self._numbers = _NUMBER.findall(request)
        self._strings = list(results or []) + _strings(request)

    def number(self) -> float:
        """The next number; 1 when there is none left."""
        return float(self._numbers.pop(0)) if self._numbers else 1.0

    def string(self, name: str) -> str:
        """The next string; something that holds the name of the property when there is none left."""
        return self._strings.pop(0) if self._strings else f"some {name}"


def _strings(text: str) -> list[str]:
    quoted = [next(part for part in found if part) for found in _QUOTED.findall(text)]
    return quoted + [named for named in _NAMED.findall(text) if named not in quoted]


def instance(schema: dict[str, Any] | bool, words: Words) -> Any:
    """A value that the schema allows; every property is there."""
    root = schema if isinstance(schema, dict) else {}
    return _value(root, root, words, "text", 0)


def _value(schema: Any, root: dict[str, Any], words: Words, name: str, depth: int) -> Any:
    if not isinstance(schema, dict):
        schema = {}
    if "$ref" in schema:
        return _value(_resolved(schema["$ref"], root), root, words, name, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return next((x for x in schema["enum"] if str(x).lower() in words.request.lower()), schema["enum"][0])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return _value(_first_of(schema[union], depth), root, words, name, depth)
    if "allOf" in schema:
        merged = {k: v for part in schema["allOf"] for k, v in _direct(part, root).items()}
        return _value(
            {**merged, **{k: v for k, v in schema.items() if k != "allOf"}}, root, words, name, depth
        )
    return _typed(schema, root, words, name, depth)


def _first_of(options: list[Any], depth: int) -> Any:
    """The first that is not null; null itself when the schema goes on too deep."""
    null = next((option for option in options if option.get("type") == "null"), None)
    if depth > _DEEPEST and null is not None:
        return null
    return next((option for option in options if option.get("type") != "null"), null)


def _typed(schema: dict[str, Any], root: dict[str, Any], words: Words, name: str, depth: int) -> Any:
    kind = schema.get("type") or (
        "object" if "properties" in schema else "array" if "items" in schema else None
    )
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), "null")
    match kind:
        case "object":
            return _object(schema, root, words, depth)
        case "array":
            most = schema.get("maxItems", 1)
            count = max(schema.get("minItems", 0), 0 if depth > _DEEPEST else min(1, most))
            prefix = schema.get("prefixItems", [])
            items = [*prefix, *[schema.get("items")] * max(0, count - len(prefix))]
            return [_value(item, root, words, name, depth + 1) for item in items]
        case "integer" | "number":
            return _number(schema, words, whole=kind == "integer")
        case "boolean":
            return True
        case "null":
            return None
        case "string":
            return _string(schema, words, name)
        case _:
            return words.string(name)


def _object(schema: dict[str, Any], root: dict[str, Any], words: Words, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    if not properties:
        return {key: words.string(key) for key in [*words.keys, *schema.get("required", [])]}
    wanted = schema.get("required", []) if depth > _DEEPEST else list(properties)
    return {key: _value(properties.get(key), root, words, key, depth + 1) for key in wanted}


def _number(schema: dict[str, Any], words: Words, *, whole: bool) -> float | int:
    value = words.number()
    low, high = schema.get("minimum"), schema.get("maximum")
    low = schema["exclusiveMinimum"] + 1 if "exclusiveMinimum" in schema else low
    high = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else high
    value = value if low is None else max(value, low)
    value = value if high is None else min(value, high)
    return int(value) if whole else value


def _string(schema: dict[str, Any], words: Words, name: str) -> str:
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    text = words.string(name).ljust(schema.get("minLength", 0), ".")
    return text[: schema.get("maxLength")]


def _direct(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    return _resolved(schema["$ref"], root) if "$ref" in schema else schema


def _resolved(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            found = found[part.replace("~1", "/").replace("~0", "~")]
    return found
