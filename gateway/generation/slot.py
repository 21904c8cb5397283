"""One engine of the pool, and the requests that run in it.

Only the slot's methods change it; `slot_state` has the legal transitions of its state. Invariants:
- a run begins only while the slot is open, under the slot's confirmed version;
- tokens that arrive between `begin_weight_swap` and `confirm`, or while output is held (`hold_output`), are accepted only after
  the probe has passed;
- `fail` cuts every run and drops held tokens; the call continues elsewhere from its last accepted token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypedDict

from gateway.engines.base import Engine, GenerateRequest, TokenChunk
from gateway.engines.process import EngineProcess
from gateway.generation.call import Call
from gateway.generation.slot_state import SlotState, check_transition
from headgate.errors import EngineUnreachable

_STOP_GRACE_S = 10.0
OnChunk = Callable[[TokenChunk, float], None]
"""Receives a chunk of tokens, and the time of its arrival by the loop's clock."""


class EngineDescription(TypedDict):
    """An engine, as the admin API returns it."""

    name: str
    model: str
    state: SlotState
    reason: str
    paused: bool
    version: int
    streams: int
    pinned: int
    restarts: int
    proof: str
    pid: int | None
    url: str | None
    node: str | None


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
        """End the run from outside."""
        if not self.cut_reason:
            self.cut_reason = reason
            self.scope.reschedule(0.0)


class Slot:
    """The gateway's view of an engine: its state, its version and its runs."""

    def __init__(
        self, name: str, url: str | None = None, node: str = "", mirror: str = "", zone: str = ""
    ) -> None:
        self.name = name
        self.node = node
        """The name of the engine's node, if it has one."""
        self.external_url = url
        """The engine's URL, if this gateway does not start it."""
        self.mirror = mirror
        """The URL of the mirror of weights near the engine, if it does not read this machine's files."""
        self.zone = zone
        """The network zone of its node."""
        self.owned = False
        """True if the engine is a child process of the coordinator, with which it ends; set in followers."""
        self.reason = ""
        self.version = -1
        self.given_up = False
        """True if updates and calls no longer wait for the engine."""
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
        """The result of the last proof: `proven`, `failed`, or why nothing or only a part was compared."""
        self.engine: Engine | None = None
        self.process: EngineProcess | None = None
        self.runs: dict[str, Run] = {}
        """The runs in the engine, by request id."""
        self._state: SlotState = "starting"
        self._stop_grace_s = _STOP_GRACE_S
        """0 for an engine that failed to sleep while a trainer waits for its memory."""
        self._ended = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._weights_changed = False
        """True if `begin_weight_swap` is why output is held."""

    @property
    def state(self) -> SlotState:
        """The state, which only the methods of the slot change."""
        return self._state

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
        """The engine's label of its weights. With adapters it stays that of the first version."""
        return "0" if self.adapter else str(self.version)

    def movable(self, version: int | None = None) -> list[str]:
        """Return the ids of the requests that can continue in another engine; `version`: of those that began under it."""
        runs = (run for run in self.runs.values() if version is None or run.version == version)
        return [run.request_id for run in runs if not run.pinned]

    def runs_under(self, version: int) -> int:
        """Return the number of requests that began under a version."""
        return sum(run.version == version for run in self.runs.values())

    async def run(self, call: Call, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """Run a call's request to its finish; `on_chunk` gets what arrives. Raise EngineUnreachable if the run is cut."""
        assert self.engine is not None and self._state == "open"
        now = asyncio.get_running_loop().time()
        self.last_token_at = now if not self.runs else self.last_token_at
        run = self.runs[request.request_id] = Run(call, self, request.request_id, now)
        call.begin_run(self.name, self.version, request.request_id)
        # version and adapter change together, and this is one step of the event loop
        chunks = self.engine.generate(replace(request, adapter=self.adapter) if self.adapter else request)
        try:
            async with run.scope:
                await self._read(run, chunks, on_chunk)
        except TimeoutError as error:
            raise self._cut(run) from error
        finally:
            del self.runs[request.request_id]
            call.leave_engine()
            self._ended.set()
            await chunks.aclose()  # type: ignore[attr-defined]

    async def _read(self, run: Run, chunks: AsyncIterator[TokenChunk], on_chunk: OnChunk) -> None:
        clock = asyncio.get_running_loop().time
        async for chunk in chunks:
            if not self._settled.is_set():
                await self._settled.wait()
            if run.cut_reason:
                raise self._cut(run)
            now = run.last_token_at = self.last_token_at = clock()
            on_chunk(chunk, now)

    def _cut(self, run: Run) -> EngineUnreachable:
        return EngineUnreachable(f"{self.name}: {run.cut_reason}", code="run_cut")

    async def ended(self) -> None:
        """Wait until a run ends."""
        self._ended.clear()
        await self._ended.wait()

    def begin_weight_swap(self, version: int) -> None:
        """Hold output until `confirm`: the engine continues its frozen requests under `version`."""
        self._settled.clear()
        self._weights_changed = True
        for run in self.runs.values():
            run.call.weights_changed(version)

    @property
    def settled(self) -> bool:
        """True if arriving tokens are accepted."""
        return self._settled.is_set()

    def hold_output(self) -> None:
        """Hold output, because without a coordinator it is not known whether the engine's weights change."""
        self._settled.clear()

    def release_output(self) -> None:
        """Accept what was held: the weights have not changed."""
        self._settled.set()

    # States. Each method raises EngineError where the transition is not legal.

    def start(self) -> None:
        """Begin to start the engine, or to connect to it. Nothing is known about its weights."""
        self._enter("starting", self.reason)
        self.given_up = False
        self.adapters = {}

    def hold(self, reason: str = "") -> None:
        """Begin no more runs; the engine is about to be opened, or its weights change."""
        self._enter("held", reason)

    def confirm(self, version: int, adapter: str = "") -> None:
        """Open the engine, which runs `version`, and accept what was held. `adapter`: the version's, if it is one."""
        self._enter("open", "")
        self._opened(version, adapter)

    def drain(self) -> None:
        """Begin no more runs: the engine is removed once those in it have left."""
        self._enter("draining", self.reason)
        self.evict("it is drained while its weights change")

    def sleep(self) -> None:
        """Begin no more runs: the engine frees its memory once those in it have left."""
        self._enter("asleep", self.why_asleep)
        self.evict("it is put to sleep while its weights change")

    def wake(self) -> None:
        """Hold the engine while it wakes and loads the newest weights."""
        self._enter("held", "it wakes")

    def fail(self, reason: str, *, given_up: bool = False) -> None:
        """Quarantine the engine and cut its runs; their calls continue in other engines."""
        self._stop_grace_s = 0.0 if self._state == "asleep" else _STOP_GRACE_S
        self.given_up = given_up
        self._enter("quarantined", reason)
        self._cut_all(reason)

    def mirror_state(self, state: SlotState, reason: str, version: int, generation: int) -> None:
        """Set the state that the coordinator reports. Any may follow any, since a process without a link misses some."""
        self._state, self.reason = state, reason
        if state == "open":
            self._opened(version, "")
        elif state == "quarantined":
            self._cut_all(reason)
        elif state != "held":
            self.evict(reason or f"the engine is {state}")
        self.generation = generation

    def _enter(self, to: SlotState, reason: str) -> None:
        check_transition(self.name, self._state, self.reason, to)
        self._state, self.reason = to, reason

    def _opened(self, version: int, adapter: str) -> None:
        self.version, self.adapter = version, adapter
        self.generation += 1
        self._weights_changed = False
        self._settled.set()

    def _cut_all(self, reason: str) -> None:
        for run in self.runs.values():
            run.cut(reason)
        self._weights_changed = False
        self._settled.set()

    def evict(self, reason: str) -> None:
        """If output is held, discard it, because it will never be confirmed, and cut the runs; their calls continue elsewhere."""
        if not self._settled.is_set():
            self._cut_all(reason)

    def take_over(self, reason: str) -> None:
        """Take over an engine as the new coordinator: its weights are loaded again, so held tokens are dropped as in `evict`.

        A request in doubt that cannot move stays; its tokens are held until the engine is open.
        """
        if not self._weights_changed and any(run.pinned for run in self.runs.values()):
            for run in self.runs.values():
                if not run.pinned and not self._settled.is_set():
                    run.cut(reason)
        else:
            self.evict(reason)

    # The engine behind the slot

    def adopt(self, *, node: str = "", mirror: str = "", zone: str = "") -> None:
        """Set what only a coordinator knows about an engine."""
        self.node, self.mirror, self.zone = node, mirror, zone

    def follow(self, url: str | None, *, owned: bool, zone: str) -> None:
        """Set what the coordinator reports; a new URL drops the connection to the old one."""
        self.owned, self.zone = owned, zone
        if url is not None and url != self.external_url:
            self.external_url, self.engine = url, None

    def attach(self, engine: Engine) -> None:
        """Set the connection to the engine."""
        self.engine = engine

    def set_process(self, process: EngineProcess) -> None:
        """Set the process of an engine that this gateway has started."""
        self.process, self.engine = process, process.engine

    def set_paused(self, paused: bool) -> None:
        """Record whether a person has paused the engine."""
        self.paused = paused
        if self._state == "asleep":
            self.reason = self.why_asleep

    def record_proof(self, proof: str) -> None:
        """Record the result of the last comparison of the engine's weights."""
        self.proof = proof

    async def stop_to_restart(self) -> None:
        """Stop the engine, and count a restart."""
        self.restarts += 1
        await self.stop(self._stop_grace_s)

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Stop the engine within `grace_s`; an external one is only disconnected."""
        process, engine = self.process, self.engine
        self.process = self.engine = None
        if process is not None:
            await process.stop(grace_s)
        elif engine is not None:
            await engine.close()

    def describe(self, model: str) -> EngineDescription:
        """Describe the slot for the admin API."""
        process = self.process.process if self.process else None
        return {
            "name": self.name,
            "model": model,
            "state": self._state,
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
