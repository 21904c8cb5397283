"""The arithmetic of limits: what may begin, what is owed, and that nothing leaks, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tenancy.limits import Limit, Usage

MINUTE = Limit(tokens_per_minute=60)


def test_concurrent_calls_are_counted() -> None:
    limit = Limit(calls=2)
    usage = Usage.unused(limit, 0.0).begin().begin()
    assert (found := usage.refusal(0.0)) and found.reason == "too_many_calls"
    assert usage.end().refusal(0.0) is None
    with pytest.raises(AssertionError):
        usage.end().end().end()


def test_a_minutes_tokens_come_back_evenly() -> None:
    usage = Usage.unused(MINUTE, 0.0).draw(60, 0.0)
    found = usage.refusal(0.0)
    assert found is not None and (found.reason, found.after_s) == ("too_many_tokens", 1.0)
    assert usage.refusal(0.5) is None  # something is there again
    assert usage.refill(30.0).level == 30.0
    assert usage.refill(600.0).level == 60.0  # and never more than a minute's


def test_a_debt_is_paid_before_the_next_call() -> None:
    usage = Usage.unused(MINUTE, 0.0).draw(160, 0.0)
    found = usage.refusal(0.0)
    assert found is not None and found.after_s == 101.0
    assert usage.refusal(100.0) is not None and usage.refusal(101.0) is None


def test_nothing_is_refused_without_limits() -> None:
    usage = Usage.unused(Limit(), 0.0).begin().draw(10**9, 0.0)
    assert usage.refusal(0.0) is None and Limit().none and not MINUTE.none


events = st.lists(
    st.tuples(st.sampled_from(["begin", "end"]), st.integers(0, 500), st.floats(0, 90)), max_size=60
)


@given(events, st.integers(1, 5), st.integers(1, 600))
def test_whatever_happens_limits_hold(
    happened: list[tuple[str, int, float]], calls: int, tokens: int
) -> None:
    """Never more calls than allowed; tokens of any time are a minute's, the even flow, and what the last calls took beyond."""
    limit, now, running, used, overdrawn = Limit(calls, tokens), 0.0, 0, 0, 0
    usage = Usage.unused(limit, now)
    for what, taken, later in happened:
        now += later
        if what == "begin" and usage.refusal(now) is None:
            usage, running = usage.begin(), running + 1
        elif what == "end" and running:
            usage, running = usage.draw(taken, now).end(), running - 1
            used, overdrawn = used + taken, max(overdrawn, taken)
        assert usage.calls == running <= calls
        assert used <= tokens + now * tokens / 60 + calls * overdrawn + 1e-6
    for _ in range(running):
        usage = usage.end()
    wait = usage.refusal(now)
    assert wait is None or usage.refusal(now + wait.after_s + 1e-6) is None
    assert usage.idle(now + 60.0 * (used / tokens + 2))
