"""The interface to tracing, and the part that stands in while `[telemetry]` names no endpoint.

Invariants: a call touches this a few times, a token never; facts are computed only for calls that are traced; nothing here
raises, so what cannot be reported never fails a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

Fact = str | int | float | bool | Sequence[str] | Sequence[int]
Facts = Mapping[str, Fact]
"""Attributes of a span, by OpenTelemetry's names."""


class Step(Protocol):
    """The span of one step of a call."""

    def note(self, facts: Callable[[], Facts]) -> None:
        """Add attributes."""
        ...


class CallTrace(Protocol):
    """The span of one call, and those of its steps."""

    def step(self, name: str, *, remote: bool = False) -> AbstractContextManager[Step]:
        """Return the span of what happens inside the context; an exception marks it as failed. `remote`: another program does
        it."""
        ...

    def end(self, facts: Callable[[], Facts], error: BaseException | None) -> None:
        """End the call's span. `error`: why there is no reply."""
        ...


class Tracing(Protocol):
    """Begins the traces of a process's calls."""

    def call(
        self, name: str, headers: Mapping[str, str], since: float, facts: Callable[[], Facts]
    ) -> CallTrace:
        """Begin a call's span, in the trace that `headers` name by `traceparent`. `since`: the time at which it came."""
        ...

    async def close(self) -> None:
        """Send what is left to send."""
        ...


class _NoStep:
    def __enter__(self) -> _NoStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        return None

    def note(self, facts: Callable[[], Facts]) -> None:
        """Do nothing."""


class _NoTrace:
    def step(self, name: str, *, remote: bool = False) -> _NoStep:
        return _NO_STEP

    def end(self, facts: Callable[[], Facts], error: BaseException | None) -> None:
        """Do nothing."""


class NoTracing:
    """Traces nothing."""

    def call(
        self, name: str, headers: Mapping[str, str], since: float, facts: Callable[[], Facts]
    ) -> CallTrace:
        return NO_TRACE

    async def close(self) -> None:
        """Do nothing."""


_NO_STEP = _NoStep()
NO_TRACE = _NoTrace()
"""A call that is not traced."""
