"""Tells the gateway of each step, for those who watch its events. Training neither waits for that nor fails by it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.client import GatewayClient

_KEPT = 64
"""Steps that wait to be told; of more the oldest are left out."""
_LAST_S = 5.0
"""How long the end of a run waits for what is still to be told."""


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    version: int
    figures: Mapping[str, float]


class StepEvents:
    """The steps of one run, told in order by a task that ends when there is nothing left."""

    def __init__(self, client: GatewayClient, model: str | None, say: Callable[[str], None]) -> None:
        """`say`: for people; called once, however many steps cannot be told."""
        self._client = client
        self._model = model
        self._say = say
        self._waiting: deque[_Step] = deque(maxlen=_KEPT)
        self._telling: asyncio.Task[None] | None = None
        self._failed = False

    def tell(self, step: int, version: int, figures: Mapping[str, float]) -> None:
        """A step was done, and made this version; its figures are finite."""
        self._waiting.append(_Step(step, version, figures))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_all(), name="tell-steps")

    async def finish(self) -> None:
        """Waits for what is still to be told, but not for long."""
        if self._telling is not None:
            await asyncio.wait({self._telling}, timeout=_LAST_S)
        await self.close()

    async def close(self) -> None:
        """Tells nothing more."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})

    async def _tell_all(self) -> None:
        while self._waiting:
            step = self._waiting.popleft()
            try:
                await self._client.post_step(step.number, step.figures, step.version, self._model)
            except Exception as error:
                if not self._failed:
                    self._say(f"step {step.number} is not among the gateway's events (said once): {error!r}")
                self._failed = True
