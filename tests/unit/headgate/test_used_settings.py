"""Settings as rows: which differ from their defaults, and no secret among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from headgate.configuration import Section
from headgate.used_settings import used_settings

SECRET = "sesame"


class Inner(Section):
    size: int = 1
    key: SecretStr | None = None
    url: str = "http://here"
    env: dict[str, str] = Field({}, repr=False)
    args: tuple[str, ...] = Field((), repr=False)


class File(Section):
    path: Path
    inner: Inner = Inner(size=2)
    by_name: dict[str, Inner] = Field({})


def rows(**values: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in used_settings(File.model_validate({"path": "p", **values}))}


def test_a_setting_is_changed_if_it_differs_from_the_default_of_its_table() -> None:
    found = rows(inner={"size": 2}, by_name={"a": {"size": 2}})
    assert found["path"] == {"name": "path", "value": "p", "default": None, "changed": True}
    assert found["inner.size"] == {"name": "inner.size", "value": 2, "default": 2, "changed": False}
    assert found["by_name.a.size"] == {"name": "by_name.a.size", "value": 2, "default": 1, "changed": True}


def test_no_row_has_a_secret() -> None:
    inner = {
        "key": SECRET, "url": f"http://{SECRET}@there/x?token={SECRET}", "env": {"TOKEN": SECRET}, "args": ["--key", SECRET],
    }  # fmt: skip
    found = rows(inner=inner)
    assert SECRET not in json.dumps(found)
    assert found["inner.url"]["value"] == "http://***@there/x?***"
    assert found["inner.env"]["value"] == {"TOKEN": "***"}
    assert all(found[f"inner.{name}"]["changed"] for name in inner)
    assert rows()["inner.key"]["value"] is None
