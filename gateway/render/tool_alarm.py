"""Counts faulty tool calls of a gateway process, and warns of them once a minute with an example."""

from __future__ import annotations

import logging
import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from gateway.render.tool_faults import CUT, NOT_JSON, UNKNOWN_TOOL, UNPARSED

log = logging.getLogger(__name__)

EVERY_S = 60.0
_EXAMPLE = 200
"""Characters of a reply that a warning shows."""
WORDS = {
    UNPARSED: "the reply looks like a tool call and is none in the form of the model's template (docs/topics/templates.md)",
    CUT: "the reply ended inside a tool call: it was cut at a limit on tokens",
    NOT_JSON: "the arguments of a tool call are not a JSON object",
    UNKNOWN_TOOL: "a tool was called that the request does not have",
}
"""Each fault in words."""


class ToolAlarm:
    """One for all models of a process."""

    def __init__(
        self,
        counter: Counter,
        clock: Callable[[], float] = time.monotonic,
        redact: Callable[[str], str] = str,
    ) -> None:
        """`counter` has the label `fault`; `redact` returns a text as it may be logged."""
        self._redact = redact
        self._counter = counter
        self._clock = clock
        self._since: Tally[str] = Tally()
        """Replies with each fault since the last warning of it."""
        self._warned: dict[str, float] = {}

    def report(self, call_id: str, faults: Sequence[str], example: str) -> None:
        """Count a reply with faults; `example` is its text, or the calls in it."""
        for fault in faults:
            self._counter.labels(fault).inc()
            self._since[fault] += 1
            now = self._clock()
            if now - self._warned.get(fault, -EVERY_S) >= EVERY_S:
                self._warned[fault] = now
                count = self._since.pop(fault)
                log.warning(
                    "%s (%s, %d since the last such warning): %s",
                    WORDS[fault],
                    call_id,
                    count,
                    self._redact(example)[:_EXAMPLE],
                )
