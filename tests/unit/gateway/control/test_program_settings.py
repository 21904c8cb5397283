"""The gateway's settings as the control program has them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.control.program_settings import program_settings


@pytest.mark.parametrize(
    ("update", "gigabytes", "load_s"),
    [({}, 0, 120), ({}, 16, 280), ({}, 65, 770), ({"load_s": 30}, 65, 30)],
)
def test_the_deadline_of_a_load_follows_from_the_bytes_of_the_weights(
    update: dict[str, Any], gigabytes: int, load_s: float
) -> None:
    settings = Settings.parse({"models": {"demo": {"path": "a"}}, "update": update})
    assert program_settings(settings, "demo", gigabytes * 10**9)["update"]["load_s"] == load_s
