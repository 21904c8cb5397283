"""Records the calls of an episode that are refused, before their clients get the refusal.

So the caller that rewards the episode finds them in the store. The numbers are bounded: a client that is sent away as too fast
retries immediately, so only an episode's first refusals of that kind are written, and the others are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import Counter

from gateway.episodes.open_episode import OpenEpisode, OtherAttempt
from gateway.store import refused_calls
from gateway.store.database import Database
from gateway.store.refused_calls import RefusedCall
from headgate.errors import Busy, GatewayError

log = logging.getLogger(__name__)

_MESSAGE = 500
"""Characters of a refusal's message that are kept."""
_WAIT_S = 5.0
"""How long a refusal waits for its record: a store that is away keeps no client from its response."""
_OVER = ("episode_closed", "episode_grading", "attempt_over", "recorded_elsewhere", "requested_again")
"""Codes of calls that have no part in the episode any more, or that have a recorded response.

A running call that a restart stops has the code `attempt_over`, too; a new one is refused with `OtherAttempt`, and recorded."""


@dataclass(slots=True)
class RequestedCall:
    """A request for a reply, as far as it is known."""

    api: str
    received_at: float
    episode: OpenEpisode | None = None
    model: str = ""

    def found(self, episode: OpenEpisode, model: str) -> None:
        """Set the episode and the model, which the request has by now been resolved to."""
        self.episode, self.model = episode, model


class Refusals:
    """The refused calls of a gateway process."""

    def __init__(self, database: Database, counter: Counter, redact: Callable[[str], str] = str) -> None:
        """`counter` has the labels `api` and `code`; `redact` returns a text as it may be stored."""
        self._redact = redact
        self._database = database
        self._counter = counter

    async def record(self, call: RequestedCall, error: GatewayError) -> None:
        """Make a refusal a part of its episode."""
        code = error.code or ""
        if call.episode is None or (code in _OVER and not isinstance(error, OtherAttempt)):
            return
        self._counter.labels(call.api, code).inc()
        count = call.episode.count_refused()
        if isinstance(error, Busy) and count > refused_calls.MOST:
            return
        message = self._redact(error.message)[:_MESSAGE]
        refused = RefusedCall(call.received_at, call.api, call.model, error.status, code, message)
        try:
            self._database.check()
            async with asyncio.timeout(_WAIT_S):
                await self._database.submit(
                    partial(refused_calls.add, episode_id=call.episode.id, refused=refused)
                )
        except (GatewayError, TimeoutError) as failure:
            log.warning("a refused call of episode %s is not recorded: %r", call.episode.id, failure)
