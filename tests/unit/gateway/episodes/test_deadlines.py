"""When an open episode is over: by the setting, or by how long such episodes usually take."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.episodes.deadlines import EpisodeDeadlines, GroupDeadlines
from gateway.episodes.open_episode import OpenEpisode


def deadlines_of(**episodes: Any) -> EpisodeDeadlines:
    values = {"models": {"m": {"path": "nowhere"}}, "episodes": {"idle_s": 6e5, **episodes}}
    return EpisodeDeadlines(Settings.parse(values))


def member(name: str, group: str = "g") -> OpenEpisode:
    """Return an episode that was opened at 0 s."""
    return OpenEpisode(name, "t", group, "train", "m", 0.0, 0.0)


def test_the_last_member_of_a_group_is_closed_after_ten_times_the_others_time_and_announced_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    deadlines, late = deadlines_of(), member("late")
    for i in range(7):
        deadlines.record(member(f"e{i}"), 120.0)
    assert deadlines.slow([late], "m", 600.0) == []
    (slow,) = deadlines.slow([late], "m", 601.0)
    assert (slow.episode_id, slow.usual_s, slow.limit_s) == ("late", 120.0, 1200.0)
    assert deadlines.missed_deadline(late, 1200.0) == ""
    with caplog.at_level(logging.WARNING):
        assert deadlines.missed_deadline(late, 1201.0) == "total_deadline"
    assert (
        "such episodes usually take 120 s; for agents that rightly take longer, set [episodes] total_s"
        in caplog.text
    )


def test_agents_that_are_slow_by_nature_are_not_closed_after_an_hour_once_one_of_them_has_ended() -> None:
    deadlines, other = deadlines_of(), member("other", "another group")
    assert deadlines.missed_deadline(other, 3601.0) == "total_deadline"
    deadlines.record(member("first"), 3500.0)
    assert deadlines.missed_deadline(other, 5 * 3600.0) == ""


def test_a_set_limit_holds_whatever_is_usual() -> None:
    deadlines = deadlines_of(total_s=50.0)
    deadlines.record(member("first"), 3500.0)
    assert [deadlines.missed_deadline(member("e"), at) for at in (50.0, 51.0)] == ["", "total_deadline"]


async def test_a_group_whose_driver_has_ended_is_closed_once_none_of_its_members_runs() -> None:
    closed: list[str] = []

    async def apply(event: Any) -> None:
        closed.append(event.group_id)

    groups = [SimpleNamespace(group_id=name, state="reserved") for name in ("left", "waits")]
    rule = SimpleNamespace(groups=lambda: groups, leased=False)
    ledgers: Any = {"m": SimpleNamespace(rule=rule, apply=apply)}
    deadlines = GroupDeadlines(Settings.parse({"models": {"m": {"path": "nowhere"}}}), ledgers)
    deadlines.leave("m", "left")
    await deadlines.sweep(0.0, {("m", "left")})
    assert closed == []
    await deadlines.sweep(1.0, set())
    assert closed == ["left"]
