"""The arithmetic of limits: what may begin, what is owed, and that nothing leaks, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.limits import Limit, begun, drawn, ended, fresh, idle, refill, refusal

MINUTE = Limit(tokens_per_minute=60)


def test_calls_at_once_are_counted() -> None:
    limit = Limit(calls=2)
    usage = begun(begun(fresh(limit, 0.0)))
    assert (found := refusal(limit, usage, 0.0)) and found.reason == "too_many_calls"
    assert refusal(limit, ended(usage), 0.0) is None
    with pytest.raises(AssertionError):
        ended(ended(ended(usage)))


def test_a_minutes_tokens_come_back_evenly() -> None:
    usage = drawn(MINUTE, fresh(MINUTE, 0.0), 60, 0.0)
    found = refusal(MINUTE, usage, 0.0)
    assert found is not None and (found.reason, found.after_s) == ("too_many_tokens", 1.0)
    assert refusal(MINUTE, usage, 0.5) is None  # something is there again
    assert refill(MINUTE, usage, 30.0).level == 30.0
    assert refill(MINUTE, usage, 600.0).level == 60.0  # and never more than a minute's


def test_a_debt_is_paid_before_the_next_call() -> None:
    usage = drawn(MINUTE, fresh(MINUTE, 0.0), 160, 0.0)
    found = refusal(MINUTE, usage, 0.0)
    assert found is not None and found.after_s == 101.0
    assert refusal(MINUTE, usage, 100.0) is not None and refusal(MINUTE, usage, 101.0) is None


def test_nothing_is_refused_without_limits() -> None:
    usage = drawn(Limit(), begun(fresh(Limit(), 0.0)), 10**9, 0.0)
    assert refusal(Limit(), usage, 0.0) is None and Limit().none and not MINUTE.none


events = st.lists(
    st.tuples(st.sampled_from(["begin", "end"]), st.integers(0, 500), st.floats(0, 90)), max_size=60
)


@given(events, st.integers(1, 5), st.integers(1, 600))
def test_whatever_happens_limits_hold(
    happened: list[tuple[str, int, float]], calls: int, tokens: int
) -> None:
    """Never more calls than allowed; tokens of any time are a minute's, the even flow, and what the last calls took beyond."""
    limit, now, running, used, overdrawn = Limit(calls, tokens), 0.0, 0, 0, 0
    usage = fresh(limit, now)
    for what, taken, later in happened:
        now += later
        if what == "begin" and refusal(limit, usage, now) is None:
            usage, running = begun(usage), running + 1
        elif what == "end" and running:
            usage, running = ended(drawn(limit, usage, taken, now)), running - 1
            used, overdrawn = used + taken, max(overdrawn, taken)
        assert usage.calls == running <= calls
        assert used <= tokens + now * tokens / 60 + calls * overdrawn + 1e-6
    for _ in range(running):
        usage = ended(usage)
    wait = refusal(limit, usage, now)
    assert wait is None or refusal(limit, usage, now + wait.after_s + 1e-6) is None
    assert idle(limit, usage, now + 60.0 * (used / tokens + 2))
