"""Limits of one key: calls at once, and tokens per minute. Pure: the caller has the clock.

The tokens are a bucket that fills evenly. A call's tokens are unknown before it is rendered and sampled, so a call may begin
while the bucket is not empty, and its tokens are drawn afterwards. The level may fall below zero; later calls then wait until it
is positive. So a key exceeds an even flow by at most a minute's tokens and those of its concurrent calls.
"""

from __future__ import annotations

from dataclasses import dataclass

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The limits of a key; None means unlimited."""

    calls: int | None = None
    tokens_per_minute: int | None = None

    @property
    def none(self) -> bool:
        """True if nothing is limited."""
        return self.calls is None and self.tokens_per_minute is None


@dataclass(frozen=True, slots=True)
class Usage:
    """A key's running calls, and its token bucket as it was at `at` (seconds)."""

    calls: int = 0
    level: float = 0.0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a call may not begin, and the seconds after which it may be worth another try."""

    reason: str
    """`too_many_calls` or `too_many_tokens`."""
    after_s: float


def fresh(limit: Limit, now: float) -> Usage:
    """The usage of a key that has used nothing: a full minute."""
    return Usage(0, float(limit.tokens_per_minute or 0), now)


def refill(limit: Limit, usage: Usage, now: float) -> Usage:
    """The bucket as it is at `now`; a clock that goes back adds nothing."""
    if limit.tokens_per_minute is None:
        return usage
    gained = max(0.0, now - usage.at) * limit.tokens_per_minute / _MINUTE
    return Usage(usage.calls, min(usage.level + gained, float(limit.tokens_per_minute)), max(now, usage.at))


def refusal(limit: Limit, usage: Usage, now: float, calls: int = 1) -> Refusal | None:
    """Returns why this many calls may not begin now; None if they may."""
    if limit.calls is not None and usage.calls + calls > limit.calls:
        return Refusal("too_many_calls", 2.0)
    if limit.tokens_per_minute is None:
        return None
    level = refill(limit, usage, now).level
    if level > 0:
        return None
    return Refusal("too_many_tokens", (1.0 - level) * _MINUTE / limit.tokens_per_minute)


def begun(usage: Usage, calls: int = 1) -> Usage:
    """Returns the usage with this many more calls."""
    return Usage(usage.calls + calls, usage.level, usage.at)


def ended(usage: Usage, calls: int = 1) -> Usage:
    """Returns the usage with this many fewer calls."""
    assert usage.calls >= calls, "a call ended that had not begun"
    return Usage(usage.calls - calls, usage.level, usage.at)


def drawn(limit: Limit, usage: Usage, tokens: int, now: float) -> Usage:
    """Draws a call's tokens from the bucket."""
    filled = refill(limit, usage, now)
    return Usage(filled.calls, filled.level - tokens, filled.at)


def idle(limit: Limit, usage: Usage, now: float) -> bool:
    """True if forgetting the key's usage would lose nothing."""
    full = limit.tokens_per_minute is None or refill(limit, usage, now).level >= limit.tokens_per_minute
    return usage.calls == 0 and full
