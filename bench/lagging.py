"""`python -m bench.lagging serve --config FILE`: `gateway serve`, with an event loop that is watched.

The gateway's own command runs unchanged; only the application that it serves is wrapped. `GET /bench/lag` returns by how much the
loop was late, in milliseconds, since the last such request; `own_max` counts no more of that than the CPU time that the process
used in that time, so that other programs on a busy machine are left out.

A timer is due every `EVERY_S`. Where the loop is held up for longer than that, the timers that would have been due in the
meantime count too, each with the rest of the wait: a sample is what a request that arrives at any moment would have to wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bench.report import percentile

EVERY_S = 0.005
_PATH = "/bench/lag"


class LagSampler:
    """Samples the lag of the running loop, in seconds."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._used = 0.0
        self._own = 0.0
        self._next()

    def reset(self) -> dict[str, float | int | None]:
        """Return the figures since the last time, in milliseconds."""
        samples, self.samples = self.samples, []
        own, self._own = self._own, 0.0
        found: dict[str, float | int | None] = {"samples": len(samples), "own_max": own * 1000}
        for percent in (50, 99, 100):
            value = percentile(samples, percent)
            found["max" if percent == 100 else f"p{percent}"] = None if value is None else value * 1000
        return found

    def _next(self) -> None:
        self._due = time.perf_counter() + EVERY_S
        self._used = time.process_time()
        self._loop.call_later(EVERY_S, self._wake)

    def _wake(self) -> None:
        late = max(0.0, time.perf_counter() - self._due)
        self.samples.append(late)
        self._own = max(self._own, min(late, time.process_time() - self._used))
        while (late := late - EVERY_S) > 0:
            self.samples.append(late)
        self._next()


class Watched:
    """An application whose loop is sampled from its start on. Pure ASGI."""

    def __init__(self, app: FastAPI) -> None:
        self.state = app.state
        """The server looks for what it has to stop there."""
        self._app: ASGIApp = app
        self._sampler: LagSampler | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == _PATH and self._sampler is not None:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": orjson.dumps(self._sampler.reset())})
            return

        async def started(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._sampler = LagSampler()
            await send(message)

        await self._app(scope, receive, started if scope["type"] == "lifespan" else send)


def main() -> None:
    """Run `gateway serve` with a watched loop."""
    import gateway.app
    from gateway.cli import app

    create_app = gateway.app.create_app

    def watched(*args: Any, **options: Any) -> Watched:
        return Watched(create_app(*args, **options))

    gateway.app.create_app = watched  # type: ignore[assignment]
    app()


if __name__ == "__main__":
    main()
