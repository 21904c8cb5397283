"""Spans of engines and nodes follow from their events."""

from __future__ import annotations

from typing import Any

from gateway.observe.timeline import spans
from gateway.store.events import Event


def engine(at: float, what: str, version: int = 0) -> Event:
    return Event(f"engine.{what}", "m", data={"engine": "e", "version": version, "reason": ""}, at=at)


def node(at: float, role: str) -> Event:
    return Event(f"node.{role}", "", data={"node": "n", "role": role, "reason": "why"}, at=at)


EVENTS = [
    engine(1, "starting"),
    engine(2, "open"),
    node(3, "idle"),
    Event("version.published", "m", data={"version": 1}, at=4),
    engine(5, "held"),
    Event("version.live", "m", data={"version": 1}, at=6),
    engine(7, "open", 1),
    node(8, "train"),
    engine(9, "removed"),
]


def states(found: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    return [(span["state"], span["from"], span["to"]) for span in found["engines"][0]["spans"]]


def test_a_state_lasts_until_the_next_and_a_removed_engine_has_none() -> None:
    found = spans(EVENTS, None, None)
    assert states(found) == [("starting", 1, 2), ("open", 2, 5), ("held", 5, 7), ("open", 7, 9)]
    assert [(s["role"], s["from"], s["to"]) for s in found["nodes"][0]["spans"]] == [
        ("idle", 3, 8),
        ("train", 8, None),
    ]
    assert found["versions"] == [{"model": "m", "version": 1, "published_at": 4, "live_at": 6}]


def test_a_part_of_the_time_has_the_spans_that_reach_into_it() -> None:
    found = spans(EVENTS, 5.5, 6.5)
    assert states(found) == [("held", 5, 7)]
    assert [span["role"] for span in found["nodes"][0]["spans"]] == ["idle"]
    assert len(found["versions"]) == 1
    assert spans(EVENTS, 6.5, None)["versions"] == []
