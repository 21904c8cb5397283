"""Carries out the control program's steps on engines: one method per step (`scheduler.program.events.Step`).

Makes no decisions and keeps no deadlines: a step returns, raises EngineError, or is cancelled by its caller. Owns the reports of
the updates; what an engine runs is found out by `verification`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from gateway.config import EngineSettings, ModelSettings, UpdateSettings
from gateway.engines.base import Engine, Level
from gateway.engines.process import RETURN_ROUTES, EngineProcess, connect
from gateway.generation.peers import Peers
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from gateway.updates.distribution import Distribution
from gateway.updates.load_watch import STUCK_S, LoadWatch
from gateway.updates.verification import UpdateReport, Verifier
from gateway.updates.weights_check import Weights
from headgate.errors import EngineError
from headgate.processes.errors import ChildDied
from headgate.processes.reading import bytes_read
from headgate.weights.folders import weight_bytes
from scheduler.program.events import Step, StepCommand

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_SOON_S = 0.02
_LEVELS: dict[str, Level] = {"level1": 1, "level2": 2}
_REMEMBERED = 256


class EngineSteps:
    """The steps of one model's engines."""

    def __init__(
        self,
        pool: EnginePool,
        model: ModelSettings,
        engine: EngineSettings,
        update: UpdateSettings,
        peers: Peers,
        distribution: Distribution,
        check_coordinator: Callable[[], Awaitable[None]],
        pinned_s: float,
        patient: bool,
    ) -> None:
        """`peers`: the other gateway processes. `patient`: wait for external engines that start after the gateway.

        `check_coordinator` raises if this process may no longer be the coordinator; steps of several commands call it in between.
        `pinned_s`: how long requests that cannot move may continue in an engine that is put to sleep.
        """
        self._check_coordinator = check_coordinator
        self._pool = pool
        self._patient = patient
        self._peers = peers
        self._distribution = distribution
        self._model = model
        self._settings = engine
        self._pinned_s = pinned_s
        self._update = update
        self._watch = LoadWatch(update.load_s or STUCK_S)
        self._verifier = Verifier(update, distribution, pool.slots)
        self._weights: dict[int, Weights] = {}
        self._reports: dict[tuple[str, int], UpdateReport] = {}
        self._steps: dict[Step, Callable[[Slot, Weights], Awaitable[None]]] = {
            "launch": self._launch,
            "stop": self._stop,
            "drain": self._drain,
            "hold": self._hold,
            "abort": self._abort,
            "settle": self._settle,
            "handback": self._handback,
            "freeze": self._freeze,
            "load": self._load,
            "label": self._label,
            "resume": self._resume,
            "probe": self._probe,
            "open": self._open,
            "sleep": self._sleep,
            "wake": self._wake,
        }

    def register_version(self, weights: Weights) -> None:
        """Make a version known, so that steps can use it. The oldest are forgotten, but for those that engines run."""
        self._weights[weights.version] = weights
        needed = {slot.version for slot in self._pool.slots.values()}
        for version in sorted(self._weights)[:-_REMEMBERED]:
            if version not in needed:
                del self._weights[version]

    def weights(self, version: int) -> Weights | None:
        """Return the weights of a registered version."""
        return self._weights.get(version)

    def reports(self, version: int) -> list[UpdateReport]:
        """Return and forgets the reports of a version's update, one for each engine."""
        found = [report for (_, v), report in self._reports.items() if v == version]
        self._reports = {key: report for key, report in self._reports.items() if key[1] > version}
        return found

    def quarantine(self, command: StepCommand) -> None:
        """Put an engine out of service immediately; its requests continue in other engines."""
        slot = self._pool.slots.get(command.engine)
        if slot is not None:
            if slot.state != "draining":
                self._report(command.engine, command.version).failure = command.reason
            slot.fail(command.reason, given_up=command.step == "quarantine")
            self._pool.notify()
            self._peers.send_slot(self._pool.model, slot)

    async def run(self, command: StepCommand) -> None:
        """Carry out a step. Raise EngineError, with what went wrong."""
        slot, seconds = (
            self._pool.slots[command.engine],
            self._report(command.engine, command.version).seconds,
        )
        started = time.monotonic()
        try:
            await self._steps[command.step](slot, self._weights[command.version])
        except (ChildDied, TimeoutError) as error:
            raise EngineError(str(error)) from error
        finally:
            seconds[command.step] = seconds.get(command.step, 0.0) + time.monotonic() - started

    def _report(self, engine: str, version: int) -> UpdateReport:
        return self._reports.setdefault((engine, version), UpdateReport(engine, version))

    # Starting and stopping engines

    async def _launch(self, slot: Slot, weights: Weights) -> None:
        """Start an engine's process; or connect to an external one and load the weights, as it may have others."""
        slot.start()
        await self._announce(slot)
        if slot.external_url is not None:
            await self._attach(slot, slot.external_url, weights)
        else:
            checkpoint = self._distribution.checkpoint(weights)
            slot.set_process(
                await EngineProcess.start(
                    slot.name, self._settings, self._model, self._pool.model, checkpoint
                )
            )
            if weights.adapter:
                await self._load(slot, weights)
        slot.hold()
        await self._announce(slot)

    async def _attach(self, slot: Slot, url: str, weights: Weights) -> None:
        """Connect to an engine that may run requests of other gateways, or of one that was killed. Pinned ones stay, frozen."""
        engine = self._connected(slot, url)
        while self._patient and not await engine.healthy():  # noqa: ASYNC110
            await asyncio.sleep(_RETRY_S)
        if self._model.router_replay and not await engine.returns_routes():
            raise EngineError(
                f"{url} does not return routed experts, which router_replay = true needs: start it with {RETURN_ROUTES}"
                " (vLLM 0.32 or newer)"
            )
        slot.take_over("its weights are loaded again")
        if self.runs(slot)[1]:
            await self._handback(slot, weights)
            for step in (self._freeze, self._load, self._label, self._resume):
                await self._check_coordinator()
                await step(slot, weights)
            return
        await (engine.pause() if await self._level(engine) is None else engine.wake())
        await self._settle(slot, weights)
        if self._distribution.max_lora_rank is not None:
            await engine.forget_adapters()  # a gateway that was killed has left them
        await self._renew(slot, engine, weights)

    async def _renew(self, slot: Slot, engine: Engine, weights: Weights) -> None:
        """Load weights into a paused engine without requests, and resumes it."""
        await self._load_watched(slot, weights, self._check_coordinator)
        # Label before sampling resumes, so that a stale follower's expected version is rejected.
        await self._label(slot, weights)
        await engine.resume()

    async def _stop(self, slot: Slot, _weights: Weights) -> None:
        await slot.stop_to_restart()

    async def _drain(self, slot: Slot, _weights: Weights) -> None:
        slot.drain()
        await self._announce(slot)
        while self.runs(slot)[0] and slot.engine is not None:
            await self._give_back_movable(slot)
            await self._a_moment(slot)

    async def _sleep(self, slot: Slot, weights: Weights) -> None:
        """Move running requests to other engines, then put the engine to sleep. Those that cannot move have `pinned_s`; then
        they are cut, as if their engine had died."""
        slot.sleep()
        self._pool.notify()
        await self._announce(slot)
        if slot.engine is None and slot.external_url is None:
            return  # an external engine has no process
        engine = self._connected(slot, slot.external_url or "")
        await self._handback(slot, weights)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pinned_s):
                while self.runs(slot)[1]:
                    await self._a_moment(slot)
        await engine.pause()
        await self._settle(slot, weights)
        if (level := await self._level(engine)) is not None:
            await self._check_coordinator()
            await engine.sleep(level)
        self._pool.notify()  # people may wait until it samples nothing

    async def _wake(self, slot: Slot, weights: Weights) -> None:
        """Wake an engine and load the newest weights, as its own may be older or lost."""
        slot.wake()
        await self._announce(slot)
        engine = _engine(slot)
        await (engine.pause() if await self._level(engine) is None else engine.wake())
        await self._renew(slot, engine, weights)

    def _connected(self, slot: Slot, url: str) -> Engine:
        engine = slot.engine or connect(slot.name, url, self._settings.api)
        slot.attach(engine)
        return engine

    async def _level(self, engine: Engine) -> Level | None:
        """How deep it sleeps; None: it is paused and keeps its memory. Engines of a model may differ in what they can."""
        if self._settings.sleep == "auto":
            return 1 if await engine.frees_memory() else None
        return _LEVELS.get(self._settings.sleep)

    # Weight updates

    async def _hold(self, slot: Slot, weights: Weights) -> None:
        slot.hold()
        await self._announce(slot)
        report, name = self._report(slot.name, weights.version), self._pool.model
        streams, report.pinned = self.runs(slot)
        report.streams = streams + self._pool.waiting + self._peers.count_waiting(name)
        if self._update.canary:  # replies end under the version that began them
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._update.pause_timeout_s):
                    while self.runs(slot)[0]:
                        await self._a_moment(slot)

    async def _abort(self, slot: Slot, _weights: Weights) -> None:
        await _engine(slot).pause()

    async def _settle(self, slot: Slot, _weights: Weights) -> None:
        """Pause again until no request is left: one that was on its way when the engine paused arrives later, mostly soon."""
        wait_s = _SOON_S
        while self.runs(slot)[0]:
            await self._a_moment(slot, wait_s)
            if self.runs(slot)[0]:
                await _engine(slot).pause()
            wait_s = min(2 * wait_s, _RETRY_S)

    async def _handback(self, slot: Slot, _weights: Weights) -> None:
        while self._movable(slot):
            await self._give_back_movable(slot)
            await self._a_moment(slot)

    async def _freeze(self, slot: Slot, _weights: Weights) -> None:
        await _engine(slot).pause(keep=True)

    async def _load(self, slot: Slot, weights: Weights) -> None:
        if weights.adapter:
            self._report(slot.name, weights.version).streams = slot.streams
        if weights.adapter and not slot.adapter and slot.state == "open":
            slot.hold()  # the first adapter: see `adapters`
            await self._announce(slot)
        await self._load_watched(slot, weights, _unchecked)

    async def _load_watched(self, slot: Slot, weights: Weights, check: Callable[[], Awaitable[None]]) -> None:
        """Load a version; an engine of this machine that reads it from a folder is watched, so that a stuck load ends early."""
        load = self._distribution.load(slot, weights, self._pool.slots.values(), check)
        if slot.process is None or not self._distribution.reads_folders:
            return await load
        size = await asyncio.to_thread(weight_bytes, Path(weights.path))
        await self._watch.load(slot.name, load, size, partial(bytes_read, slot.process.process.pid))

    async def _label(self, slot: Slot, weights: Weights) -> None:
        """Label the engine; an adapter keeps the first version's label, because it does not change the engine's own weights."""
        await _engine(slot).label(0 if weights.adapter else weights.version)

    async def _resume(self, slot: Slot, weights: Weights) -> None:
        slot.begin_weight_swap(weights.version)
        await self._peers.begin_weight_swap(self._pool.model, slot, weights.version)
        await _engine(slot).resume()

    async def _probe(self, slot: Slot, weights: Weights) -> None:
        await self._verifier.verify(_engine(slot), slot, weights, self._report(slot.name, weights.version))

    async def _open(self, slot: Slot, weights: Weights) -> None:
        slot.confirm(weights.version, weights.adapter)
        self._pool.notify()
        await self._announce(slot)

    def runs(self, slot: Slot) -> tuple[int, int]:
        """Return the number of requests in the engine, other processes' included, and how many of them cannot move."""
        streams, pinned = self._peers.count_runs(self._pool.model, slot.name)
        return slot.streams + streams, slot.pinned + pinned

    def _movable(self, slot: Slot) -> int:
        streams, pinned = self.runs(slot)
        return streams - pinned

    async def _announce(self, slot: Slot) -> None:
        """Announce the slot's new state to the placer and to the other processes."""
        self._pool.on_state_change()
        await self._peers.send_slot(self._pool.model, slot)

    async def _give_back_movable(self, slot: Slot) -> None:
        returned = self._peers.give_back(self._pool.model, slot)
        await _engine(slot).abort(slot.movable())
        await returned

    async def _a_moment(self, slot: Slot, wait_s: float = _RETRY_S) -> None:
        """Wait until a run ends, or long enough that a request on its way must have arrived."""
        try:
            async with asyncio.timeout(wait_s):
                await slot.ended()
        except TimeoutError:
            return


async def _unchecked() -> None:
    """Do nothing: the host checks before each command."""


def _engine(slot: Slot) -> Engine:
    if slot.engine is None:
        raise EngineError(f"{slot.name} has no engine")
    return slot.engine
