"""Limits of one key: concurrent calls, tokens per minute, and open episodes (`[limits]`).

Owns the usage of every key in this process; each gateway process counts for itself. Invariants: a request counts from before it
is rendered until its response has ended, however it ends: as one call until its body is read, then as one call for each reply;
tokens are charged once, at the end of a reply; a refused request counts for no limit.

The tokens are a bucket that fills evenly. A call's tokens are unknown before it is rendered and sampled, so a call may begin
while the bucket is not empty, and its tokens are charged afterwards. The level may fall below zero; later calls are then refused
until it is positive. So a key exceeds its rate by at most a minute's tokens and those of its concurrent calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from gateway.config import LimitSettings
from gateway.config.settings import Settings
from gateway.tenancy.projects import Projects
from headgate.errors import BadRequest, Busy, jittered

Holder = tuple[str, str]
"""`episode`, `agent` or `project`, and its name."""
_SWEEP_AT = 1024
_MINUTE = 60.0
_WORDS = {
    "too_many_calls": "has {calls} calls in progress ([limits.{kind}] calls)",
    "too_many_tokens": "has used its {tokens} tokens per minute ([limits.{kind}] tokens_per_minute)",
}


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
class Refusal:
    """The reason why a call may not begin, and the seconds after which a retry may succeed."""

    reason: str
    """`too_many_calls` or `too_many_tokens`."""
    after_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """A key's running calls, and its token bucket as it was at `at` (seconds). Pure: the caller has the clock."""

    limit: Limit
    calls: int
    level: float
    at: float

    @classmethod
    def unused(cls, limit: Limit, now: float) -> Usage:
        """Return the usage of a new key, with a full bucket."""
        return cls(limit, 0, float(limit.tokens_per_minute or 0), now)

    def refill(self, now: float) -> Usage:
        """Return the usage with the bucket refilled until `now`."""
        if (rate := self.limit.tokens_per_minute) is None:
            return self
        gained = max(0.0, now - self.at) * rate / _MINUTE
        return replace(self, level=min(self.level + gained, float(rate)), at=max(now, self.at))

    def refusal(self, now: float, calls: int = 1) -> Refusal | None:
        """Return why `calls` more calls may not begin now; None if they may."""
        limit = self.limit
        if limit.calls is not None and self.calls + calls > limit.calls:
            return Refusal("too_many_calls", 2.0)
        if limit.tokens_per_minute is None or (level := self.refill(now).level) > 0:
            return None
        return Refusal("too_many_tokens", (1.0 - level) * _MINUTE / limit.tokens_per_minute)

    def begin(self, calls: int = 1) -> Usage:
        """Return the usage with `calls` more running calls."""
        return replace(self, calls=self.calls + calls)

    def end(self, calls: int = 1) -> Usage:
        """Return the usage with `calls` fewer running calls."""
        assert self.calls >= calls, "a call ended that had not begun"
        return replace(self, calls=self.calls - calls)

    def draw(self, tokens: int, now: float) -> Usage:
        """Return the usage with a call's tokens taken from the bucket."""
        filled = self.refill(now)
        return replace(filled, level=filled.level - tokens)

    def idle(self, now: float) -> bool:
        """Return true if forgetting the key's usage would lose nothing."""
        rate = self.limit.tokens_per_minute
        return self.calls == 0 and (rate is None or self.refill(now).level >= rate)


class Identified(Protocol):
    """An episode or a caller, by its id."""

    @property
    def id(self) -> str: ...


class Caller(Protocol):
    """The holder of a key, as far as limits concern it (`gateway.episodes.callers.Caller`)."""

    @property
    def agent(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def episode(self) -> Identified | None: ...


class Ticket:
    """The calls of one request: a context manager for the time in which it is served. `draw` may be called afterwards."""

    def __init__(self, limits: Limits, holders: tuple[Holder, ...]) -> None:
        self._limits = limits
        self._holders = holders
        self._calls = 1

    def count_replies(self, replies: int, param: str) -> None:
        """Count a request as one call for each reply. Raise Busy, and BadRequest for more than the limit.

        `param`: the parameter that requests them.
        """
        if self._calls:
            self._limits.reserve(self._holders, replies - self._calls, replies, param)
            self._calls = replies

    def draw(self, tokens: int) -> None:
        """Charge the tokens of a reply, prompt and response together."""
        self._limits.draw(self._holders, tokens)

    def end(self) -> None:
        """Release the calls of the request. Idempotent."""
        calls, self._calls = self._calls, 0
        if calls:
            self._limits.release(self._holders, calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Limits:
    """Decides whether a key may begin a call."""

    def __init__(
        self, settings: Settings, projects: Projects, clock: Callable[[], float] = time.monotonic
    ) -> None:
        limits = settings.limits
        self._projects = projects
        self._clock = clock
        self._limits = {
            "episode": _limit(limits.episode),
            "agent": _limit(limits.agent),
            "project": _limit(limits.project),
        }
        self._usage: dict[Holder, Usage] = {}
        self._sweep_at = _SWEEP_AT

    def admit(self, caller: Caller) -> Ticket:
        """Reserve a call for one more request. Raise Busy, which names the exhausted limit."""
        holders = self._holders(caller)
        self.reserve(holders, 1)
        return Ticket(self, holders)

    def reserve(self, holders: tuple[Holder, ...], calls: int, replies: int = 1, param: str = "n") -> None:
        """Reserve `calls` more calls of a request for `replies` replies. Raise Busy, or BadRequest if they exceed the limit."""
        now = self._clock()
        for holder in holders:
            limit = self._limits[holder[0]]
            if limit.calls is not None and replies > limit.calls:
                raise _never(holder[0], limit.calls, replies, param)
            if calls and (found := self._of(holder, now).refusal(now, calls)):
                raise self._busy(holder, found)
        for holder in holders:
            self._usage[holder] = self._of(holder, now).begin(calls)

    def draw(self, holders: tuple[Holder, ...], tokens: int) -> None:
        """Charge tokens to holders."""
        now = self._clock()
        for holder in holders:
            self._usage[holder] = self._of(holder, now).draw(tokens, now)

    def release(self, holders: tuple[Holder, ...], calls: int) -> None:
        """Release calls that have ended."""
        for holder in holders:
            self._usage[holder] = self._usage[holder].end(calls)
        self._sweep()

    @property
    def running(self) -> int:
        """Return the number of running calls, summed over all holders."""
        return sum(usage.calls for usage in self._usage.values())

    def _holders(self, caller: Caller) -> tuple[Holder, ...]:
        """Return the holders whose limits apply to a caller."""
        own = (
            ("agent", caller.agent)
            if caller.agent
            else ("episode", caller.episode.id if caller.episode else "")
        )
        wanted = (own, ("project", self._projects.project_of(caller.model)))
        return tuple(holder for holder in wanted if holder[1] and not self._limits[holder[0]].none)

    def _of(self, holder: Holder, now: float) -> Usage:
        return self._usage.get(holder) or Usage.unused(self._limits[holder[0]], now)

    def _sweep(self) -> None:
        """Drop idle entries once the table has doubled since the last sweep."""
        if len(self._usage) < self._sweep_at:
            return
        now = self._clock()
        kept = {h: usage for h, usage in self._usage.items() if not usage.idle(now)}
        self._usage, self._sweep_at = kept, max(_SWEEP_AT, 2 * len(kept))

    def _busy(self, holder: Holder, found: Refusal) -> Busy:
        kind, limit = holder[0], self._limits[holder[0]]
        words = _WORDS[found.reason].format(calls=limit.calls, tokens=limit.tokens_per_minute, kind=kind)
        after = jittered(found.after_s) if found.reason == "too_many_calls" else found.after_s + jittered(1.0)
        return Busy(f"this {kind} {words}", retry_after=after, code=found.reason)


class EpisodeQuota:
    """The number of episodes that a project may have open; counts those that are being opened."""

    def __init__(self, settings: Settings) -> None:
        self._projects = Projects(settings)
        self._max_open = settings.limits.project.episodes
        self._opening: Counter[str] = Counter()

    @contextmanager
    def reserve(self, model: str, open_models: Iterable[str]) -> Iterator[None]:
        """Reserve a place while an episode is being opened. `open_models`: the models of all open episodes. Raise Busy."""
        project = self._projects.project_of(model)
        if not project or self._max_open is None:
            yield
            return
        open_now = sum(self._projects.project_of(other) == project for other in open_models)
        if open_now + self._opening[project] >= self._max_open:
            message = f"the project has {self._max_open} episodes open ([limits.project] episodes)"
            raise Busy(message, retry_after=jittered(2.0), code="too_many_episodes")
        self._opening[project] += 1
        try:
            yield
        finally:
            self._opening[project] -= 1


def _never(kind: str, calls: int, replies: int, param: str) -> BadRequest:
    message = (
        f"{param}: {replies} replies are more than the {calls} concurrent calls that this {kind} may have"
        f" ([limits.{kind}] calls): request fewer in a request"
    )
    return BadRequest(message, code="too_many_replies", param=param)


def _limit(settings: LimitSettings) -> Limit:
    return Limit(settings.calls, settings.tokens_per_minute)
