"""The page of the HTTP API, from the routes' own OpenAPI description (`/openapi.json` of a running gateway)."""

from __future__ import annotations

from typing import Any

from gateway.app import create_app
from gateway.config.settings import Settings
from reference.markdown import cell, code, prose, table


def page() -> str:
    """Return the routes by their group, with parameters and bodies."""
    described = create_app(Settings.model_validate({"models": {"model": {"path": "model"}}})).openapi()
    groups: dict[str, list[str]] = {}
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            group = " and ".join(route["tags"])
            groups.setdefault(group, []).append(
                _route(method.upper(), path, route, described["components"]["schemas"])
            )
    parts = [
        "# HTTP API\n",
        "Routes under `/v1` are for agents, with the key of an episode or an agent; those under `/admin/v1` need the admin key or"
        " a project's, as `Authorization: Bearer KEY`. A running gateway describes the same at `/openapi.json` and `/docs`;"
        " [errors](errors.md) have a page of their own.\n",
    ]
    for group, routes in groups.items():
        parts += [f"## {group}\n", *routes]
    return "\n".join(parts)


def _route(method: str, path: str, route: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [f"### `{method} {path}`\n", prose(route.get("description", "")) + "\n"]
    rows = [_parameter(one) for one in route.get("parameters", ())]
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "$ref" in body:
        schema = schemas[body["$ref"].rpartition("/")[2]]
        needed = schema.get("required", ())
        rows += [
            _row(name, "body", kind, name in needed) for name, kind in schema.get("properties", {}).items()
        ]
    if rows:
        parts.append(table(("name", "in", "value", "default", "meaning"), rows))
    return "\n".join(parts)


def _parameter(one: dict[str, Any]) -> tuple[str, ...]:
    schema = {"description": one.get("description", ""), **one["schema"]}
    return _row(one["name"], one["in"], schema, one.get("required", False))


def _row(name: str, place: str, schema: dict[str, Any], needed: bool) -> tuple[str, ...]:
    default = schema.get("default")
    shown = "needed" if needed else "" if default is None else code(str(default))
    return code(name), place, cell(_kind(schema)), shown, cell(schema.get("description", ""))


def _kind(schema: dict[str, Any]) -> str:
    """Return a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        return "object"
    signs = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
    }
    bounds = [words.format(f"{schema[key]:g}") for key, words in signs.items() if key in schema]
    return ", ".join([schema.get("type", "any"), *bounds])
