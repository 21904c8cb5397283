"""What foreign trainers read only grows, unless the feed's version does: `recorded/feed_schema.json` has what they may rely on.

`python -m tests.unit.gateway.api.test_feed_schema` adds to the file what is new.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.app import create_app
from gateway.config.settings import Settings
from headgate.arrow import FEED_SCHEMA
from headgate.feed_version import FEED_VERSION
from tests.harness.fences import ROOT

RECORD = Path(__file__).parent / "recorded" / "feed_schema.json"
REQUIRED = ", required"
ROUTES = ("/admin/v1/leases", "/admin/v1/batches", "/admin/v1/weights")


def current() -> dict[str, dict[str, str]]:
    """Return each kind of thing with its fields or columns, and the type of each."""
    described = create_app(Settings.model_validate({"models": {"model": {"path": "model"}}})).openapi()
    schemas = described["components"]["schemas"]
    found = {"Arrow": {field.name: str(field.type) for field in FEED_SCHEMA}}
    for path, methods in described["paths"].items():
        for method, route in methods.items() if path.startswith(ROUTES) else ():
            name = f"{method.upper()} {path}"
            found[f"{name}: parameters"] = {
                one["name"]: kind(one["schema"]) + REQUIRED * one.get("required", False)
                for one in route.get("parameters", ())
            }
            found[f"{name}: body"] = fields(route.get("requestBody", {}), schemas)
            answer = route["responses"]["200"]
            found[f"{name}: response"] = fields(answer, schemas) | {
                header: kind(value["schema"]) for header, value in answer.get("headers", {}).items()
            }
    return {name: values for name, values in found.items() if values}


def fields(content: dict[str, Any], schemas: dict[str, Any]) -> dict[str, str]:
    schema = content.get("content", {}).get("application/json", {}).get("schema", {})
    return dict(walk(schema, schemas, ""))


def walk(schema: dict[str, Any], schemas: dict[str, Any], place: str) -> list[tuple[str, str]]:
    """Return the path and type of every field below a schema."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    parts = [part for part in schema.get("anyOf", ()) if part.get("type") != "null"]
    if len(parts) == 1:
        return [(place, f"{kind(parts[0])} or null"), *walk(parts[0], schemas, place)[1:]]
    assert schema.get("additionalProperties") is not True, f"{place} has no fields"
    found = [(place, kind(schema))] if place else []
    if schema.get("type") == "array":
        return found + walk(schema["items"], schemas, f"{place}[]")[1:]
    for name, value in schema.get("properties", {}).items():
        (field, type_), *below = walk(value, schemas, f"{place}.{name}".lstrip("."))
        found += [(field, f"{type_}{REQUIRED * (name in schema.get('required', ()))}"), *below]
    return found


def kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(kind(part) for part in schema["anyOf"])
    return f"{schema.get('type', 'object')}{' ' + '|'.join(schema['enum']) if 'enum' in schema else ''}"


def test_nothing_that_trainers_read_is_removed_or_changed() -> None:
    record, now = json.loads(RECORD.read_text()), current()
    assert record["version"] == FEED_VERSION, "the version has grown: make the file again"
    lost = {
        f"{name}: {field}: {known}, now {now.get(name, {}).get(field, 'missing')}"
        for name, values in record["fields"].items()
        for field, known in values.items()
        if now.get(name, {}).get(field) != known
    }
    lost |= {
        f"{name}: {field} is new, and requests without it are refused"
        for name, values in now.items()
        for field, type_ in values.items()
        if type_.endswith(REQUIRED) and "response" not in name and field not in record["fields"].get(name, {})
        if name in record["fields"]
    }
    assert not lost, "trainers of this version of the feed rely on it: let it be, or let FEED_VERSION grow"


def test_what_is_new_is_recorded() -> None:
    assert json.loads(RECORD.read_text())["fields"] == current(), f"run python -m {__name__}"


def test_the_page_has_every_column() -> None:
    page = (ROOT / "docs/topics/feed.md").read_text()
    assert [name for name in FEED_SCHEMA.names if f"`{name}`" not in page] == []
    assert f"The feed has version {FEED_VERSION}." in page


if __name__ == "__main__":
    RECORD.write_text(json.dumps({"version": FEED_VERSION, "fields": current()}, indent=1) + "\n")
