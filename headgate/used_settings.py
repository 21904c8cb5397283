"""The settings that a program uses, as rows for people: in the console, and in a file of the run's folder (`write_used`).

No row has a secret: a SecretStr, a field with `repr=False`, and the user and query of a URL are replaced by `HIDDEN`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

HIDDEN = "***"
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s'\"]+@")
_QUERY_OF_URL = re.compile(r"(://[^?\s'\"]*)\?[^\s'\"]*")


def used_file(folder: Path, program: str) -> Path:
    """Return the file of a program's settings in the folder of its run."""
    return folder / f"{program}-settings.json"


def write_used(folder: Path, program: str, settings: BaseModel) -> None:
    """Write the settings of a program that starts, in place of those of its last start. Raise OSError."""
    path = used_file(folder, program)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps({"at": time.time(), "settings": used_settings(settings)}, indent=1))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def used_settings(settings: BaseModel) -> list[dict[str, Any]]:
    """Return a row for each setting: `name` (`table.key`), `value`, `default` and `changed`, in the order of the tables.

    `changed` is true if the value is not the default, or if the setting has none.
    """
    return [*_rows(settings, None, "")]


def _rows(table: BaseModel, default: BaseModel | None, prefix: str) -> Iterator[dict[str, Any]]:
    for name, field in type(table).model_fields.items():
        value, usual = getattr(table, name), _default(name, field, default)
        tables = _tables(value, prefix + name)
        for place, inner in tables.items():
            yield from _rows(inner, usual if isinstance(usual, BaseModel) else None, f"{place}.")
        if not tables:
            changed = value != usual or (usual is None and field.is_required())
            shown, usually = (_shown(each, hidden=not field.repr) for each in (value, usual))
            yield {"name": prefix + name, "value": shown, "default": usually, "changed": changed}


def _default(name: str, field: FieldInfo, default: BaseModel | None) -> Any:
    if hasattr(default, name):
        return getattr(default, name)
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _tables(value: Any, name: str) -> dict[str, BaseModel]:
    """Return the tables that a value consists of by their names; none if it is a plain value."""
    if isinstance(value, BaseModel):
        return {name: value}
    if isinstance(value, Mapping) and value and all(isinstance(each, BaseModel) for each in value.values()):
        return {f"{name}.{key}": each for key, each in value.items()}
    return {}


def _shown(value: Any, *, hidden: bool) -> Any:
    if isinstance(value, SecretStr):
        return HIDDEN
    plain = to_jsonable_python(value, fallback=str)
    if not hidden or not plain:
        return without_secrets(plain)
    if isinstance(plain, Mapping):
        return dict.fromkeys(plain, HIDDEN)
    return without_secrets(plain) if isinstance(plain, str) and "://" in plain else HIDDEN


def without_secrets(value: Any) -> Any:
    """Return a JSON value with `***` instead of users, passwords and queries in URLs, at any depth."""
    if isinstance(value, str):
        return _QUERY_OF_URL.sub(rf"\1?{HIDDEN}", _USER_OF_URL.sub(f"{HIDDEN}@", value))
    if isinstance(value, Mapping):
        return {key: without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(without_secrets, value)]
    return value
