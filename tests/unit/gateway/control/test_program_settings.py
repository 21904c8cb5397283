"""The gateway's settings as the control program has them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.control.program_settings import program_settings

SEEN: dict[str, Any] = {}
"""An engine that the gateway starts, so that it sees its reading."""
ELSEWHERE = {"engine": {"launch": "external", "url": "http://10.0.0.1:8000"}}


@pytest.mark.parametrize(
    ("given", "gigabytes", "load_s", "wake_s", "sleep_s"),
    [
        (SEEN, 0, 120, 180, 15),
        (SEEN, 16, 1720, 1796, 31),
        (ELSEWHERE, 16, 280, 356, 31),
        (ELSEWHERE, 65, 770, 895, 80),
        ({"update": {"load_s": 30}, "lending": {"deadline_s": 20}}, 65, 30, 155, 10),
    ],
)
def test_the_deadlines_of_weights_follow_from_their_bytes(
    given: dict[str, Any], gigabytes: int, load_s: float, wake_s: float, sleep_s: float
) -> None:
    settings = Settings.parse({"models": {"demo": {"path": "a"}}, **given})
    found = program_settings(settings, {"demo": gigabytes * 10**9})
    fleet, update = found["models"]["demo"]["fleet"], found["models"]["demo"]["update"]
    assert (update["load_s"], fleet["wake_s"], fleet["sleep_s"]) == (load_s, wake_s, sleep_s)
    assert found["lending"]["deadline_s"] == 2 * sleep_s
