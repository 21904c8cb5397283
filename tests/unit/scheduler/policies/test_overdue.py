"""The time that an episode may take follows the episodes that have ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.overdue import FACTOR, FIRST_S, LEAST_S, UsualTimes


def test_the_limit_is_fixed_until_an_episode_has_ended() -> None:
    assert (UsualTimes().limit("g").limit_s, UsualTimes().limit("g").usual_s) == (FIRST_S, None)


@given(
    others=st.lists(st.floats(0.1, 1e5), min_size=1, max_size=200),
    own=st.lists(st.floats(0.1, 1e5), max_size=8),
)
def test_no_limit_is_shorter_than_a_multiple_of_any_member_of_the_group_or_of_half_the_newest_episodes(
    others: list[float], own: list[float]
) -> None:
    times = UsualTimes()
    for seconds in others:
        times.record("other", seconds)
    for seconds in own:
        times.record("g", seconds)
    limit = times.limit("g")
    newest = [*others, *own][-64:]
    assert limit.limit_s >= LEAST_S
    assert limit.limit_s >= FACTOR * max(own, default=0.0)
    assert sum(FACTOR * seconds <= limit.limit_s for seconds in newest) * 2 >= len(newest)
    assert limit.limit_s <= max(LEAST_S, FACTOR * max(newest + own))
    times.retain(["other"])
    assert times.limit("g") == times.limit("a new group")
