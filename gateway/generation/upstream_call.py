"""A call to an upstream model: its response so far, and how it is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from headgate.errors import GatewayError, UpstreamFailed

FinishReason = Literal["upstream", "error", "abandoned"]


@dataclass(slots=True, eq=False)
class UpstreamCall:
    """A call to an upstream model, and its response so far."""

    call_id: str
    episode_id: str
    api: str
    request: dict[str, Any]
    received_at: float
    status: int = 0
    parts: list[bytes] = field(default_factory=list)
    first_part_at: float | None = None
    finish_reason: FinishReason = "abandoned"
    recorded: bool = False
    _stopped_by: GatewayError | None = None
    _scope: asyncio.Timeout | None = None

    def begin(self, status: int) -> None:
        """Record the status of the response."""
        self.status = status

    def finish(self, reason: FinishReason) -> None:
        """Record how the response ended."""
        self.finish_reason = reason

    def claim_record(self) -> bool:
        """Return true for the first caller, which records the exchange."""
        first, self.recorded = not self.recorded, True
        return first

    async def stop(self, reason: GatewayError | None = None) -> None:
        """End the call; its client gets `reason`."""
        self._stopped_by = reason or UpstreamFailed("the call was stopped", code="call_stopped")
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def until_stopped(self) -> AsyncIterator[None]:
        """Yield a context that `stop` ends by raising its reason."""
        if self._stopped_by is not None:
            raise self._stopped_by
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if self._stopped_by is None:
                raise
            raise self._stopped_by from None
        finally:
            self._scope = None

    def append(self, part: bytes) -> None:
        """Add a part of the response."""
        if self.first_part_at is None:
            self.first_part_at = time.time()
        self.parts.append(part)
