"""The base of all tables of configuration files, the reader of TOML, and plain lines about what pydantic refused of a file.

One file may hold both programs' tables: their names are distinct (`TABLES`), and each program reads its own. A file is such a
file if it has `[run]` and `[models]`. Any other file is one program's, and a table of the other program is refused.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
Place = tuple[int | str, ...]


TABLES = {
    "gateway": frozenset((
        "admin", "agents", "bus", "calls", "cluster", "control", "engine", "episodes", "feed",
        "graders", "lending", "limits", "models", "nodes", "projects", "queue", "redaction", "render",
        "retention", "rewards", "routing", "sampling", "server", "staleness", "store", "telemetry",
        "update", "weights",
    )),
    "trainer": frozenset((
        "algorithm", "batch", "checkpoint", "credit", "distill", "eval", "gateway", "model", "optimizer",
        "parallel", "publish", "report", "rollout", "run",
    )),
}  # fmt: skip
"""The tables that each program reads."""


class Section(BaseModel):
    """A table of a file: typed, frozen, with unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Unreadable(Exception):
    """A file that is missing or not TOML; the message names it and the reason."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a file. Raise Unreadable."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: {error}") from error


def is_shared(values: Mapping[str, Any]) -> bool:
    """Return true if the values are of a file for both programs."""
    return "run" in values and "models" in values


def own_tables(values: dict[str, Any], program: str) -> dict[str, Any]:
    """Return what `program` has to read of a file: of a shared file all but the tables that only the other program reads."""
    if not is_shared(values):
        return values
    others = frozenset[str]().union(*TABLES.values()) - TABLES[program]
    return {name: table for name, table in values.items() if name not in others}


def complaints(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return a line for each mistake, `table.key: what is wrong`. `model` is what the file was validated against."""
    return [_complaint(each["loc"], each["type"], each["msg"], model) for each in error.errors()]


def _complaint(where: Place, kind: str, message: str, model: type[BaseModel]) -> str:
    text = message.removeprefix("Value error, ")
    if kind == "extra_forbidden":
        text = _unknown_key(str(where[-1]), _keys(model, where[:-1]))
    name = ".".join(map(str, where))
    return f"{name}: {text}" if name else text


def _unknown_key(name: str, known: list[str]) -> str:
    if near := get_close_matches(name, known, n=1, cutoff=0.6):
        return f"there is no such key; did you mean `{near[0]}`?"
    return "there is no such key" + (f"; there are: {', '.join(known)}" if known else "")


def _keys(annotation: Any, path: Place) -> list[str]:
    """Return the keys of the table at `path` below a type; none where it is not a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        names = {field.alias or name: field for name, field in annotation.model_fields.items()}
        if not path:
            return sorted(names)
        return _keys(names[str(path[0])].annotation, path[1:]) if path[0] in names else []
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _keys(inner[0], path)
    if origin in (Union, types.UnionType):
        return next((keys for each in inner if (keys := _keys(each, path))), [])
    if origin in (dict, list, tuple) and path:
        return _keys(inner[1] if origin is dict else inner[0], path[1:])
    return []
