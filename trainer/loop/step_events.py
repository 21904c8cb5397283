"""Tells the gateway of each step and evaluation, for its console. Training neither waits for that nor fails by it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from gateway.client import GatewayClient
from trainer.settings import Settings

_KEPT = 64
"""Steps that wait to be told; of more the oldest are left out."""
_LAST_S = 5.0
"""How long the end of a run waits for what is still to be told."""


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    version: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunName:
    """The names of a run: one for people, and its folder."""

    name: str
    folder: str

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """`[report] name`, or the end of the path of `[run] dir`: its own name is mostly `trainer`."""
        folder = settings.run.dir.resolve()
        return cls(settings.report.name or "/".join(folder.parts[-2:]), str(folder))


class StepEvents:
    """The steps of one run, told in order by a task that ends when there is nothing left."""

    def __init__(
        self, client: GatewayClient, model: str | None, say: Callable[[str], None], run: RunName
    ) -> None:
        """`say`: for people; called once, however many steps cannot be told."""
        self._run = run
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
                told = step.number, step.figures, step.version, self._model
                await self._client.post_step(*told, self._run.name, self._run.folder)
            except Exception as error:
                if not self._failed:
                    self._say(f"step {step.number} is not among the gateway's events (said once): {error!r}")
                self._failed = True
