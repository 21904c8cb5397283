"""Reports each step and evaluation to the gateway, for its console. Training neither waits for that nor fails by it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from headgate.client import GatewayClient
from trainer.config.settings import Settings

_MAX_WAITING = 64
"""Steps that wait to be sent; beyond it the oldest are dropped."""
_FINISH_S = 5.0
"""Seconds that the end of a run waits for steps that are not sent."""


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    version: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunName:
    """The names of a run: the displayed one, and its folder."""

    name: str
    folder: str

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return `[report] name`, or the last two parts of `[run] dir`, whose own name is mostly `trainer`."""
        folder = settings.run.dir.resolve()
        return cls(settings.report.name or "/".join(folder.parts[-2:]), str(folder))


class StepEvents:
    """The steps of one run, sent in order by a task that ends when none is left."""

    def __init__(
        self, client: GatewayClient, model: str | None, notify: Callable[[str], None], run: RunName
    ) -> None:
        """`notify` is called once for the user, however many steps cannot be sent."""
        self._run = run
        self._client = client
        self._model = model
        self._notify = notify
        self._waiting: deque[_Step] = deque(maxlen=_MAX_WAITING)
        self._sending: asyncio.Task[None] | None = None
        self._failed = False

    def send(self, step: int, version: int, figures: Mapping[str, float]) -> None:
        """Queue the finite figures of a step that made a version."""
        self._waiting.append(_Step(step, version, figures))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all(), name="send-steps")

    async def finish(self) -> None:
        """Wait up to 5 s for queued steps, then stop."""
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=_FINISH_S)
        await self.close()

    async def close(self) -> None:
        """Stop sending."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait({self._sending})

    async def _send_all(self) -> None:
        while self._waiting:
            step = self._waiting.popleft()
            try:
                await self._client.post_step(
                    step.number, step.figures, step.version, self._model, self._run.name, self._run.folder
                )
            except Exception as error:
                if not self._failed:
                    self._notify(
                        f"step {step.number} is not among the gateway's events (reported once): {error!r}"
                    )
                self._failed = True
