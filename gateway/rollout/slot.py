"""One engine's place in the pool, and the requests that run in it.

Invariants:
- a run begins only while the slot is open, under the slot's confirmed version;
- tokens that arrive between `continue_under` and `confirm`, or while output is held (`hold_output`), are taken only after the
  probe has passed;
- `fail` cuts every run and drops held tokens; the call goes on elsewhere from its last taken token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Literal

from gateway.engines.base import Engine, GenerateRequest, TokenChunk
from gateway.engines.process import EngineProcess
from gateway.errors import EngineUnreachable
from gateway.rollout.call import Call

SlotState = Literal["starting", "open", "held", "quarantined", "draining", "asleep", "dead"]
Take = Callable[[TokenChunk, float], None]
"""Takes a chunk of tokens, and the time of its arrival by the loop's clock."""


class Run:
    """One request's stay in one engine."""

    def __init__(self, call: Call, slot: Slot, request_id: str, began: float) -> None:
        self.call = call
        self.slot = slot
        self.request_id = request_id
        self.pinned = bool(call.pinned)
        self.version = slot.version
        """The version under which the run began."""
        self.began = self.last_token_at = began
        self.cut_reason = ""
        self.scope = asyncio.timeout(None)

    def cut(self, reason: str) -> None:
        """Ends the run from outside."""
        if not self.cut_reason:
            self.cut_reason = reason
            self.scope.reschedule(0.0)


class Slot:
    """An engine, as the data plane sees it."""

    def __init__(self, name: str, url: str | None = None, node: str = "") -> None:
        self.name = name
        self.node = node
        """The name of the engine's node, if it has one."""
        self.external_url = url
        """The engine's URL, if this gateway does not start it."""
        self.mirror = ""
        """The URL of the mirror of weights beside the engine, if it does not read this machine's files."""
        self.owned = False
        """True if the engine is a child of the coordinator, and so ends with it; set in the other processes."""
        self.state: SlotState = "starting"
        self.reason = ""
        self.version = -1
        self.given_up = False
        """True if updates and calls no longer wait for the engine."""
        self.stop_at_once = False
        """True for an engine that failed to sleep while a trainer waits for its memory: it is stopped without a grace period."""
        self.generation = 0
        """Grows whenever the engine is opened, which empties its prefix cache."""
        self.paused = False
        """True if a person has paused the engine; only the coordinator knows."""
        self.restarts = 0
        self.last_token_at = 0.0
        self.adapter = ""
        """The adapter that samples runs which begin now; empty: the engine's own weights."""
        self.adapters: dict[int, str] = {}
        """The adapters in the engine, by version (`[engine] transport = "lora"`)."""
        self.proof = ""
        """What the last comparison of the engine's weights gave: `proven`, `failed`, or why it proves nothing or a part only."""
        self.engine: Engine | None = None
        self.process: EngineProcess | None = None
        self.runs: dict[str, Run] = {}
        """The runs in the engine, by request id."""
        self._ended = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._weights_changed = False
        """True if `continue_under` is why output is held."""

    @property
    def url(self) -> str | None:
        """The engine's URL."""
        return self.process.url if self.process else self.external_url

    @property
    def why_asleep(self) -> str:
        """The reason why the engine sleeps, if it does."""
        return "it is paused" if self.paused else "its node is not lent"

    @property
    def streams(self) -> int:
        """Requests in the engine."""
        return len(self.runs)

    @property
    def pinned(self) -> int:
        """Requests in the engine whose sampler cannot move."""
        return sum(run.pinned for run in self.runs.values())

    @property
    def label(self) -> str:
        """The label that the engine has. With adapters its own weights keep the first version's."""
        return "0" if self.adapter else str(self.version)

    def movable(self, version: int | None = None) -> list[str]:
        """Ids of the requests that can continue in another engine; `version`: of those that began under it."""
        runs = (run for run in self.runs.values() if version is None or run.version == version)
        return [run.request_id for run in runs if not run.pinned]

    def runs_under(self, version: int) -> int:
        """The number of requests that began under a version."""
        return sum(run.version == version for run in self.runs.values())

    async def run(self, call: Call, request: GenerateRequest, take: Take) -> None:
        """Runs a call's request to its finish; `take` gets what arrives. Raises EngineUnreachable if the run is cut."""
        assert self.engine is not None and self.state == "open"
        now = asyncio.get_running_loop().time()
        self.last_token_at = now if not self.runs else self.last_token_at
        run = self.runs[request.request_id] = Run(call, self, request.request_id, now)
        call.entered(self.name, self.version, request.request_id)
        # version and adapter change together, and this is one step of the event loop
        chunks = self.engine.generate(replace(request, adapter=self.adapter) if self.adapter else request)
        try:
            async with run.scope:
                await self._read(run, chunks, take)
        except TimeoutError as error:
            raise self._cut(run) from error
        finally:
            del self.runs[request.request_id]
            call.left()
            self._ended.set()
            await chunks.aclose()  # type: ignore[attr-defined]

    async def _read(self, run: Run, chunks: AsyncIterator[TokenChunk], take: Take) -> None:
        clock = asyncio.get_running_loop().time
        async for chunk in chunks:
            if not self._settled.is_set():
                await self._settled.wait()
            if run.cut_reason:
                raise self._cut(run)
            now = run.last_token_at = self.last_token_at = clock()
            take(chunk, now)

    def _cut(self, run: Run) -> EngineUnreachable:
        return EngineUnreachable(f"{self.name}: {run.cut_reason}", code="run_cut")

    async def ended(self) -> None:
        """Waits until a run ends."""
        self._ended.clear()
        await self._ended.wait()

    def continue_under(self, version: int) -> None:
        """Holds output until `confirm`: the engine continues its frozen requests under `version`."""
        self._settled.clear()
        self._weights_changed = True
        for run in self.runs.values():
            run.call.weights_changed(version)

    @property
    def settled(self) -> bool:
        """True if arriving tokens are taken."""
        return self._settled.is_set()

    def hold_output(self) -> None:
        """Holds output, because no coordinator tells whether the engine's weights change."""
        self._settled.clear()

    def release_output(self) -> None:
        """Takes what was held: the weights have not changed."""
        self._settled.set()

    def confirm(self, version: int, adapter: str = "") -> None:
        """Opens the engine, which runs `version`, and takes what was held. `adapter`: the version's, if it is one."""
        self.state, self.reason, self.version, self.adapter = "open", "", version, adapter
        self.generation += 1
        self._weights_changed = False
        self._settled.set()

    def fail(self, reason: str) -> None:
        """Quarantines the engine and cuts its runs; their calls continue in other engines."""
        self.state, self.reason = "quarantined", reason
        for run in self.runs.values():
            run.cut(reason)
        self._weights_changed = False
        self._settled.set()

    def evict(self, reason: str) -> None:
        """Discards held output, which will never be confirmed, and cuts the runs; their calls continue in other engines."""
        if not self._settled.is_set():
            for run in self.runs.values():
                run.cut(reason)
            self._weights_changed = False
            self._settled.set()

    def take_over(self, reason: str) -> None:
        """Takes over an engine as the new coordinator: its weights are loaded again, so held tokens are dropped as in `evict`.

        A request in doubt that cannot move stays; its tokens are held until the engine is open.
        """
        if not self._weights_changed and any(run.pinned for run in self.runs.values()):
            for run in self.runs.values():
                if not run.pinned and not self._settled.is_set():
                    run.cut(reason)
        else:
            self.evict(reason)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ends the engine, within `grace_s`; an external one is only disconnected."""
        process, engine = self.process, self.engine
        self.process = self.engine = None
        if process is not None:
            await process.stop(grace_s)
        elif engine is not None:
            await engine.close()

    def describe(self, model: str) -> dict[str, Any]:
        """The slot for the admin API."""
        process = self.process.process if self.process else None
        return {
            "name": self.name,
            "model": model,
            "state": self.state,
            "reason": self.reason,
            "paused": self.paused,
            "version": self.version,
            "streams": self.streams,
            "pinned": self.pinned,
            "restarts": self.restarts,
            "proof": self.proof,
            "pid": process.pid if process else None,
            "url": self.url,
            "node": self.node or None,
        }
