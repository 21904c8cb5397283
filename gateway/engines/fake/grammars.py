"""Refuses the grammars that real engines cannot compile, in words like theirs. Pure.

Only what vLLM with xgrammar and llguidance was seen to refuse. A grammar that is taken does not change what is sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_BOUNDS = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_NUMBERS = {"integer", "number"}


def check_grammar(kind: str, value: str) -> None:
    """Raise ValueError, in an engine's words, for a grammar that engines refuse. `kind`: as in `headgate.types.Grammar`."""
    try:
        if kind == "json":
            _check(json.loads(value))
        elif kind == "regex":
            _compile(value)
        elif kind in ("grammar", "ebnf"):
            _check_rules(value)
        elif kind == "structural_tag":
            for part in _parts(json.loads(value)):
                if part.get("type") == "json_schema":
                    _check(part["json_schema"])
                elif part.get("type") == "regex":
                    _compile(part["pattern"])
                elif part.get("type") == "grammar":
                    _check_rules(part["grammar"])
    except ValueError as error:
        raise ValueError(f"Grammar error: {error}") from error


def _check_rules(grammar: str) -> None:
    """Raise ValueError for a grammar without a rule: `name ::= ...` in EBNF, `name: ...` in Lark's form."""
    if not re.search(r"^\s*\w+\s*:", grammar, re.MULTILINE):
        raise ValueError("Invalid grammar specification.")


def _parts(tag: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a structural tag, itself included, but for what is within a JSON schema."""
    if isinstance(tag, dict):
        yield tag
    inner = tag if isinstance(tag, list) else tag.values() if isinstance(tag, dict) else ()
    if not isinstance(tag, dict) or tag.get("type") != "json_schema":
        for value in inner:
            yield from _parts(value)


def _check(root: Any) -> None:
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise ValueError("a schema must be an object or a boolean")
        _check_one(schema, root)
        left += _subschemas(schema)


def _check_one(schema: dict[str, Any], root: Any) -> None:
    if isinstance(ref := schema.get("$ref"), str):
        _resolve(ref, root)
    if not isinstance(required := schema.get("required", []), list):
        raise ValueError(f"required must be a list, not {required!r}")
    if "enum" in schema and not schema["enum"]:
        raise ValueError("Unsatisfiable schema: enum has no values")
    for low, high in _BOUNDS:
        if low in schema and high in schema and schema[low] > schema[high]:
            raise ValueError(f"Unsatisfiable schema: {low} ({schema[low]}) > {high} ({schema[high]})")
    if isinstance(pattern := schema.get("pattern"), str):
        _compile(pattern)
    kinds = [_types(part) for part in schema.get("allOf", []) if isinstance(part, dict) and "type" in part]
    if kinds and not set.intersection(*kinds):
        raise ValueError("Unsatisfiable schema: allOf has no common type")


def _types(schema: dict[str, Any]) -> set[str]:
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {*kinds, *(_NUMBERS if "number" in kinds else ())}


def _resolve(ref: str, root: Any) -> None:
    found = root
    for name in ref.removeprefix("#").split("/")[1:]:
        if not isinstance(found, dict) or name not in found:
            raise ValueError(f"Pointer {ref.removeprefix('#')!r} does not exist")
        found = found[name]


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"invalid regex {pattern!r}: {error}") from error


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for name in _NAMED:
        if name in schema:
            yield from schema[name].values()
    for name in _LISTS:
        yield from schema.get(name, ())
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield schema[name]
