"""Checks JSON schemas as far as engines and clients agree on their form; what else is in one is the engine's to judge. Pure."""

from __future__ import annotations

from typing import Any

from headgate.errors import invalid

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}


def check_schema(schema: Any, param: str) -> dict[str, Any]:
    """Return a schema. Raise BadRequest that names the part of it that is wrong."""
    if not isinstance(schema, dict):
        raise invalid(param, "a JSON schema must be an object", "invalid_schema")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise invalid(f"{param}.type", f"a JSON schema has no type {kind!r}", "invalid_schema")
    for name in ("properties", "$defs"):
        parts = schema.get(name, {})
        if not isinstance(parts, dict):
            raise invalid(f"{param}.{name}", f"`{name}` in a JSON schema must be an object", "invalid_schema")
        for key, part in parts.items():
            if not isinstance(part, bool):
                check_schema(part, f"{param}.{name}.{key}")
    if isinstance(schema.get("items"), dict):
        check_schema(schema["items"], f"{param}.items")
    return schema


def check_parameters(schema: Any, param: str) -> None:
    """Raise BadRequest if a tool's parameters are not the schema of an object. None: it has no parameters."""
    if schema is None:
        return
    check_schema(schema, param)
    if schema.get("type", "object") != "object":
        raise invalid(
            f"{param}.type", "a tool's parameters must be a schema of the type 'object'", "invalid_schema"
        )
