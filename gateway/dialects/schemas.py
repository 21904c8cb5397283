"""Checks JSON schemas as far as engines and clients agree on their form; what else is in one is the engine's to judge. Pure."""

from __future__ import annotations

from typing import Any

from headgate.errors import BadRequest

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}


def check_schema(schema: Any, param: str) -> dict[str, Any]:
    """Return a schema. Raise BadRequest that names the part of it that is wrong."""
    if not isinstance(schema, dict):
        raise _invalid("a JSON schema must be an object", param)
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _invalid(f"a JSON schema has no type {kind!r}", f"{param}.type")
    for name in ("properties", "$defs"):
        parts = schema.get(name, {})
        if not isinstance(parts, dict):
            raise _invalid(f"`{name}` in a JSON schema must be an object", f"{param}.{name}")
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
        raise _invalid("a tool's parameters must be a schema of the type 'object'", f"{param}.type")


def _invalid(message: str, param: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", code="invalid_schema", param=param)
