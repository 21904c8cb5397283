"""The generated reference has every setting, command, metric and error code, and describes each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import headgate.client
from reference.pages import PAGES

ROOT = Path(__file__).parents[2]


def rows(page: str) -> list[list[str]]:
    """Return the cells of every table's rows."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [
        re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
        for line in lines
        if "---" not in line
    ]


def firsts(name: str) -> set[str]:
    return {row[0].strip("`") for row in rows(PAGES[name]())}


@pytest.mark.parametrize(
    "name", [name for name in PAGES if name.endswith(("configuration", "profile")) or name == "command-line"]
)
def test_every_setting_and_every_option_is_described(name: str) -> None:
    found = rows(PAGES[name]())
    assert len(found) > 20
    assert [row[0] for row in found if not row[-1].strip()] == []


def test_a_setting_is_shown_with_its_bounds_and_its_default() -> None:
    port = next(row for row in rows(PAGES["gateway-configuration"]()) if row[0] == "`port`")
    assert port[1:3] == ["integer, 0 to 65,535", "`8000`"]


def test_errors_have_the_status_that_their_class_gives_them() -> None:
    found = {row[0].strip("`"): row[1] for row in rows(PAGES["errors"]())}
    expected = {
        "body_too_large": "400", "no_episode": "404", "episode_closed": "409", "not_finite": "422", "too_many_calls": "429",
        "bus_away": "503", "upstream_timeout": "504",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected


def test_the_python_client_has_every_export_with_its_methods() -> None:
    page = PAGES["python-client"]()
    assert all(f"## `{name}`\n" in page for name in headgate.client.__all__)
    assert (
        "### `GatewayClient.reward`\n\n```python\nreward(\n    episode_id: str,\n    reward: float,\n" in page
    )
