"""An engine that knows the truth: every token that it samples says which weights sampled it, and at which place.

It does what it is asked in the order in which it was asked, also for somebody who died meanwhile. A token's id is the version of
the weights times a million, plus its place in the sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any

from gateway.engines.base import GenerateRequest, Load, TokenChunk
from gateway.errors import EngineUnreachable, NotComparable
from scheduler.policies.proof import Holding

TICK_S = 0.1
PLACES = 1_000_000


def version_of(token: int) -> int:
    """Returns the version that sampled a token."""
    return token // PLACES


def place_of(token: int) -> int:
    """Its place, counted from the prompt's begin."""
    return token % PLACES


class _Request:
    """A request's state in the engine."""

    def __init__(self, request: GenerateRequest) -> None:
        self.id = request.request_id
        self.place = len(request.prompt)
        self.left = request.sampling.max_tokens
        self.account: list[tuple[str, int]] = []
        self.said: asyncio.Queue[tuple[float, TokenChunk | None]] = asyncio.Queue()


class Server:
    """The engine's process, which outlives the gateways."""

    def __init__(self, url: str, *, accounts: bool) -> None:
        """`accounts`: whether it says at the end which label it sampled under."""
        self.url = url
        self.accounts = accounts
        self.up = True
        self.died_at = 0.0
        self.weights = 0
        self.sampled = 0
        """Tokens since its start."""
        self.label = "0"
        self.paused = False
        self.arrival_s = 0.0
        """Virtual seconds that requests are on their way."""
        self.stream_s = 0.0
        """Virtual seconds that tokens are on their way."""
        self.work_s = 0.0
        """Virtual seconds that everything else takes."""
        self.requests: dict[str, _Request] = {}
        self._loop = asyncio.get_running_loop()
        self._working = asyncio.Lock()
        self._busy: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._sampler = asyncio.get_running_loop().create_task(self._sample_forever())

    async def _sample_forever(self) -> None:
        while True:
            if not self.requests:
                self._arrived.clear()
                await self._arrived.wait()
            await asyncio.sleep(TICK_S)
            if self.up and not self.paused:
                for request in list(self.requests.values()):
                    self._sample(request)

    def _sample(self, request: _Request) -> None:
        token = self.weights * PLACES + request.place
        request.place += 1
        self.sampled += 1
        request.left -= 1
        if request.account and request.account[-1][0] == self.label:
            request.account[-1] = (self.label, request.account[-1][1] + 1)
        else:
            request.account.append((self.label, 1))
        self._say(request, TokenChunk([token], [-1.0]))
        if not request.left:
            self._end(request, "length")

    def _say(self, request: _Request, chunk: TokenChunk | None) -> None:
        request.said.put_nowait((self._loop.time() + self.stream_s, chunk))

    def _end(self, request: _Request, finish: Any) -> None:
        account = tuple(request.account) if self.accounts else None
        self._say(request, TokenChunk([], [], finish, account))
        del self.requests[request.id]

    def die(self) -> None:
        """Everything in it is gone; whoever starts it anew gives it the weights of version 0."""
        self.up, self.weights, self.sampled, self.label, self.paused = False, 0, 0, "0", False
        self.died_at = self._loop.time()
        for request in self.requests.values():
            self._say(request, None)
        self.requests.clear()

    def arrive(self, request: _Request) -> None:
        """A request has come in."""
        self.requests[request.id] = request
        self._arrived.set()

    def abort(self, ids: Sequence[str]) -> None:
        """Gives requests back."""
        for request in [self.requests[name] for name in ids if name in self.requests]:
            self._end(request, "abort")

    async def do(self, work: Callable[[], None]) -> None:
        """Carries a command out in its turn, also if nobody waits for it any more."""

        async def done() -> None:
            async with self._working:
                await asyncio.sleep(self.work_s)
                if not self.up:
                    raise EngineUnreachable(f"{self.url} is down")
                work()

        task = asyncio.get_running_loop().create_task(done(), context=Context())
        self._busy.add(task)
        task.add_done_callback(self._over)
        await asyncio.shield(task)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        if not task.cancelled():
            task.exception()


class Adapter:
    """One process's connection to it. See `gateway.engines.base.Engine`."""

    def __init__(self, name: str, server: Server, begins: Callable[[Server], None]) -> None:
        self.name = name
        self._server = server
        self._begins = begins

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        server = self._server
        self._begins(server)
        if not server.up:
            raise EngineUnreachable(f"{server.url} is down")
        inside = _Request(request)
        coming = asyncio.get_running_loop().call_later(server.arrival_s, server.arrive, inside)
        try:
            while True:
                due, chunk = await inside.said.get()
                if (left := due - asyncio.get_running_loop().time()) > 0:
                    await asyncio.sleep(left)
                if chunk is None:
                    raise EngineUnreachable(f"{server.url} died")
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            coming.cancel()
            if server.requests.get(inside.id) is inside:
                del server.requests[inside.id]

    async def _do(self, work: Callable[[], None]) -> None:
        await self._server.do(work)

    async def pause(self, *, keep: bool = False, clear_cache: bool = True) -> None:
        def pause() -> None:
            self._server.paused = True
            if not keep:
                self._server.abort(list(self._server.requests))

        await self._do(pause)

    async def resume(self) -> None:
        await self._do(lambda: setattr(self._server, "paused", False))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._do(lambda: self._server.abort(request_ids))

    async def load(self, path: str) -> None:
        def load() -> None:
            assert self._server.paused, "weights are loaded while the engine samples"
            self._server.weights = int(Path(path).name)

        await self._do(load)

    async def label(self, version: int) -> None:
        await self._do(lambda: setattr(self._server, "label", str(version)))

    async def prove(self, version: int, path: str, adapter: str = "") -> list[Holding]:
        raise NotComparable("these engines hold no tensors")

    async def score(self, ids: Sequence[int], adapter: str = "") -> list[float]:
        await self._do(lambda: None)
        return [-1.0] * (len(ids) - 1)

    async def read_load(self) -> Load:
        server = self._server
        if not server.up:
            raise EngineUnreachable(f"{server.url} is down")
        kv = sum(request.place for request in server.requests.values())
        return Load(len(server.requests), 0, kv, server.sampled)

    async def healthy(self) -> bool:
        return self._server.up

    async def close(self) -> None:
        pass
