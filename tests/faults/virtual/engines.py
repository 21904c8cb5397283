"""The fake engine on virtual time, and an adapter to it. Every token names the version that sampled it, and its place.

The engine executes commands in the order in which they were sent, also those of a process that has died since. A token's id
is the version of the weights times a million, plus its place in the sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any

from gateway.engines.base import GenerateRequest, Load, TokenChunk
from gateway.engines.fake import FakeEngine, Faults
from headgate.errors import EngineUnreachable, NotComparable
from scheduler.policies.proof import Holding

TICK_S = 0.1
PLACES = 1_000_000
Pipe = asyncio.Queue[tuple[float, dict[str, Any] | None]]
"""Samples on their way to a gateway, with the time of their arrival; None: the connection is lost."""


def version_of(token: int) -> int:
    """Return the version that sampled a token."""
    return token // PLACES


def place_of(token: int) -> int:
    """Return a token's place, counted from the begin of the prompt."""
    return token % PLACES


class Server(FakeEngine):
    """The engine's process, which outlives the gateways."""

    def __init__(self, url: str, *, accounts: bool) -> None:
        """`accounts`: whether it reports at the end which labels it sampled under."""
        super().__init__("/nowhere/0", Faults(delay_s=TICK_S))
        self.url = url
        self.accounts = accounts
        self.up = True
        self.died_at = 0.0
        self.label = "0"
        self.arrival_s = 0.0
        """Virtual seconds that requests take to arrive."""
        self.stream_s = 0.0
        """Virtual seconds that tokens take to arrive."""
        self.work_s = 0.0
        """Virtual seconds that everything else takes."""
        self._loop = asyncio.get_running_loop()
        self._working = asyncio.Lock()
        self._busy: set[asyncio.Task[None]] = set()
        self._open: dict[asyncio.Task[None], Pipe] = {}

    def _take(self, weights: str) -> None:
        self.weights_id, self.weights = weights, int(Path(weights).name)

    def _next(self, context: Sequence[int], *_: object) -> tuple[int, float]:
        return self.weights * PLACES + len(context), -1.0

    def load_now(self, path: str) -> None:
        """Load the weights in a directory."""
        assert self.paused, "weights are loaded while the engine samples"
        self._take(path)

    def die(self) -> None:
        """Lose everything; a supervisor starts it with the weights of version 0."""
        self.up, self.weights, self.sampled, self.label, self.paused = False, 0, 0, "0", False
        self.died_at = self._loop.time()
        for stream, pipe in self._open.items():
            stream.cancel()
            self._send(pipe, None)

    def open(self, body: dict[str, Any], pipe: Pipe) -> asyncio.Task[None]:
        """Begin a request, which lives until its task is cancelled."""

        async def stream() -> None:
            await asyncio.sleep(self.arrival_s)
            async for choice in self.generate(body) if self.up else _no_choices():
                self._send(pipe, choice)
            self._send(pipe, None)

        task = self._loop.create_task(stream(), context=Context())
        self._open[task] = pipe
        task.add_done_callback(lambda done: self._open.pop(done, None))
        return task

    def _send(self, pipe: Pipe, choice: dict[str, Any] | None) -> None:
        pipe.put_nowait((self._loop.time() + self.stream_s, choice))

    async def do(self, work: Callable[[], object]) -> None:
        """Execute a command in its turn, also if its caller has died."""

        async def execute() -> None:
            async with self._working:
                await asyncio.sleep(self.work_s)
                if not self.up:
                    raise EngineUnreachable(f"{self.url} is down")
                work()

        task = self._loop.create_task(execute(), context=Context())
        self._busy.add(task)
        task.add_done_callback(self._end)
        await asyncio.shield(task)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        if not task.cancelled():
            task.exception()


async def _no_choices() -> AsyncIterator[dict[str, Any]]:
    for choice in ():
        yield choice


class Adapter:
    """One process's connection to the engine. See `gateway.engines.base.Engine`."""

    def __init__(self, name: str, server: Server, begins: Callable[[Server], None]) -> None:
        self.name = name
        self._server = server
        self._begins = begins

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        server, pipe = self._server, Pipe()
        self._begins(server)
        if not server.up:
            raise EngineUnreachable(f"{server.url} is down")
        sampling = {"max_tokens": request.sampling.max_tokens}
        body = {"request_id": request.request_id, "token_ids": request.prompt, "sampling_params": sampling}
        stream = server.open(body, pipe)
        try:
            while True:
                due, choice = await pipe.get()
                if (left := due - asyncio.get_running_loop().time()) > 0:
                    await asyncio.sleep(left)
                if choice is None:
                    raise EngineUnreachable(f"{server.url} died")
                ids, finish = choice["token_ids"], choice["finish_reason"]
                spans = choice["weight_versions"] if server.accounts else None
                account = (
                    None if spans is None else tuple((s["version"], s["end"] - s["start"]) for s in spans)
                )
                yield TokenChunk(ids, [-1.0] * len(ids), finish, account)
                if finish is not None:
                    return
        finally:
            stream.cancel()

    async def _do(self, work: Callable[[], object]) -> None:
        await self._server.do(work)

    async def pause(self, *, keep: bool = False) -> None:
        await self._do(lambda: self._server.pause(keep=keep))

    async def resume(self) -> None:
        await self._do(self._server.resume)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._do(lambda: self._server.abort(request_ids))

    async def load(self, path: str) -> None:
        await self._do(lambda: self._server.load_now(path))

    async def label(self, version: int) -> None:
        await self._do(lambda: setattr(self._server, "label", str(version)))

    async def prove(self, version: int, path: str, adapter: str = "") -> list[Holding]:
        raise NotComparable("these engines hold no tensors")

    async def score(self, ids: Sequence[int], adapter: str = "") -> list[float]:
        await self._do(lambda: None)
        return [-1.0] * (len(ids) - 1)

    async def read_load(self) -> Load:
        if not self._server.up:
            raise EngineUnreachable(f"{self._server.url} is down")
        running, waiting, kv = self._server.figures
        return Load(running, waiting, kv, self._server.sampled)

    async def healthy(self) -> bool:
        return self._server.up

    async def close(self) -> None:
        pass
