"""The calls that run in one attempt at an episode.

Invariant: once the attempt has ended, no call is added, however far its request has been processed.
"""

from __future__ import annotations

import asyncio

from gateway.generation.completion import Completion
from gateway.generation.upstream_call import UpstreamCall
from headgate.errors import GatewayError


class RunningCalls(set[Completion | UpstreamCall]):
    """The calls of one attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._end_reason: GatewayError | None = None

    def add(self, call: Completion | UpstreamCall) -> None:
        """Add a call that is about to start. Raise the reason if the attempt has ended."""
        if self._end_reason is not None:
            raise self._end_reason
        super().add(call)

    async def stop(self, reason: GatewayError) -> None:
        """End the attempt: stop its calls, and wait until what they sampled is recorded."""
        self._end_reason = reason
        await asyncio.gather(*(call.stop(reason) for call in self))
