"""Hosts the control program (`scheduler.program`): injects events into it and carries out its commands.

Events enter only by its physical actions. Every command becomes one named task per engine, and the task's end is the next event;
the next step of an engine begins only after its previous one has ended. Owns these tasks, the health checks and the recording.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gateway.config import EngineSettings
from gateway.config.settings import ConfigError, Settings
from gateway.control.program_settings import program_settings
from gateway.generation.peers import Peers
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from gateway.updates.engine_steps import EngineSteps
from headgate.errors import EngineError, Unavailable, WeightsMissed
from headgate.processes.child import LocalProcess
from scheduler.program import ControlProgram
from scheduler.program.events import (
    Added,
    Canary,
    EngineLost,
    Published,
    Removed,
    Started,
    StepCommand,
    StepResult,
    TrialEnded,
    UpdateResult,
)
from scheduler.program.nodes import Hosted, Wanted
from scheduler.reactor import Limit, Output, PhysicalAction, Recording, Runtime, Tag, WallClock, drive

log = logging.getLogger(__name__)
_RECORDING = Limit(1024 * 10**6, kept_s=3600.0)
"""A recording has two files at most, so that a long run does not fill the disk; the last hour can always be replayed."""

T = TypeVar("T")
CheckCoordinator = Callable[[], Awaitable[None]]
_MAX_FAILED_CHECKS = 3
_FLEET_STEPS = ("launch", "stop", "drain", "sleep", "wake")


class UpdateListener(Protocol):
    """What records the outcome of a model's updates."""

    def ended_late(self, ended: UpdateResult) -> None:
        """Handle a version whose update had failed and that an engine runs after all, or that is found to be bad."""
        ...


@dataclass(slots=True)
class ModelEngines:
    """One model's engines, and who waits for its updates to end."""

    pool: EnginePool
    steps: EngineSteps
    settings: EngineSettings
    ended: dict[int, asyncio.Future[UpdateResult]] = field(default_factory=dict)
    late_ends: UpdateListener | None = None
    tasks: dict[str, set[asyncio.Task[None]]] = field(default_factory=dict)
    """The present step of each engine, and earlier ones that were cancelled and have not ended."""
    checks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Health checks of engines that a request could not reach."""
    watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks that wait for the end of each engine's process."""
    removed: set[str] = field(default_factory=set)
    failed_checks: dict[str, int] = field(default_factory=dict)
    """Health checks in a row that each engine has failed."""

    def all_tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that run on behalf of the engines."""
        steps = [task for tasks in self.tasks.values() for task in tasks]
        return [*steps, *self.watchers.values(), *self.checks.values()]


class ControlHost:
    """The control program of this gateway."""

    def __init__(
        self,
        settings: Settings,
        models: dict[str, ModelEngines],
        peers: Peers,
        check_coordinator: CheckCoordinator,
        weight_bytes: Mapping[str, int],
    ) -> None:
        """`check_coordinator` is called before every step, and raises if this process may not be the coordinator any more;
        `weight_bytes`: of each model."""
        self.models = models
        self._check_coordinator = check_coordinator
        self._peers = peers
        whole = program_settings(settings, weight_bytes)
        self.program = ControlProgram(whole)
        path = settings.control.recording
        self._recording = None
        if path is not None:
            on_lost = partial(_report_lost, path)
            try:
                self._recording = Recording.open(path, whole, _RECORDING, on_lost)
            except OSError as error:
                message = f"[control] recording = {str(path)!r} cannot be written: {error.strerror}; name another file"
                raise ConfigError(message) from error
        self._runtime = Runtime(self.program, WallClock(), self._recording)
        self._driver: asyncio.Task[None] | None = None
        for name, model in models.items():
            model.pool.set_monitor(self)
            for reactor in (self.program.fleets[name], self.program.updates[name]):
                self._runtime.observe(reactor.commands, self._on_commands(name))
            self._runtime.observe(self.program.updates[name].ended, self._on_ended(name))

    def set_update_listener(self, model: str, listener: UpdateListener) -> None:
        """Set what records the late outcomes of a model's updates."""
        self.models[model].late_ends = listener

    # Other reactors of the program

    def observe(self, port: Output[T], callback: Callable[[T], None]) -> None:
        """Call `callback` with every value of an output, immediately and in order. Before `start` only."""
        self._runtime.observe(port, lambda _tag, value: callback(value))

    def inject(self, action: PhysicalAction[T], value: T, *, now: bool = False) -> None:
        """Inject an event. `now`: the decisions about it have been observed when this returns.

        Raise Unavailable if the program has stopped.
        """
        if not self.running:
            message = "the control program has stopped; restart the gateway"
            raise Unavailable(message, retry_after=30.0, code="control_stopped")
        if now:
            self._runtime.inject_now(action, value)
        else:
            self._runtime.inject(action, value)

    def start(self) -> None:
        """Start the program. Call it once, before any event."""
        self._runtime.start()
        self._driver = asyncio.create_task(drive(self._runtime), name="control-program")
        self._driver.add_done_callback(_report_death)

    async def close(self) -> None:
        """End the program and every step; the engines are the caller's to stop."""
        tasks = [task for model in self.models.values() for task in model.all_tasks()]
        if self._driver is not None:
            tasks.append(self._driver)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._recording is not None:
            self._recording.close()

    @property
    def running(self) -> bool:
        """True while decisions are made."""
        return self._driver is not None and not self._driver.done()

    # Events

    def begin(self, model: str, version: int) -> None:
        """Begin with the newest live version of a model, at the gateway's start."""
        self._runtime.inject(self.program.fleets[model].started, Started(version))
        self._runtime.inject(self.program.updates[model].started, Started(version))
        self._runtime.inject(self.program.placements[model].started, Started(version))

    def add(self, model: str, slot: Slot) -> None:
        """Add an engine."""
        self.models[model].pool.slots[slot.name] = slot
        if slot.node:
            self._runtime.inject(self.program.lending.hosted, Hosted(slot.name, slot.node))
        self._runtime.inject(self.program.fleets[model].added, Added(slot.name))

    def remove(self, model: str, engine: str) -> None:
        """Have an engine drained, stopped and forgotten."""
        self.models[model].removed.add(engine)
        self._runtime.inject(self.program.fleets[model].removed, Removed(engine))

    def pause(self, model: str, engine: str, *, paused: bool) -> None:
        """Have an engine sleep until a person resumes it, whatever else is decided about it."""
        slot = self.models[model].pool.slots[engine]
        reason = "a person has paused it" if paused else "a person has resumed it"
        self.inject(self.program.fleets[model].requested, Wanted(engine, awake=not paused, reason=reason))
        slot.set_paused(paused)

    def publish(self, model: str, version: int, canary: Canary | None = None) -> asyncio.Future[UpdateResult]:
        """Update every engine of a model, or those of a trial, to `version`, which its steps know; the future is done when the
        update has ended."""
        ended: asyncio.Future[UpdateResult] = asyncio.get_running_loop().create_future()
        self.models[model].ended[version] = ended
        self._runtime.inject(self.program.updates[model].published, Published(version, canary))
        return ended

    def end_trial(self, model: str, version: int, *, promoted: bool) -> None:
        """Have every engine load a version that was on trial, or none run it any longer."""
        self._runtime.inject(self.program.updates[model].trial_ended, TrialEnded(version, promoted))

    def report_lost(self, model: str, engine: str, reason: str) -> None:
        """Report an engine that died or is unusable; its requests immediately continue in other engines."""
        slot = self.models[model].pool.slots.get(engine)
        if slot is not None and slot.state not in ("quarantined", "starting"):
            log.error("%s is lost: %s", engine, reason)
            slot.fail(reason)
            self.models[model].pool.notify()
            self._peers.send_slot(model, slot)
            self._runtime.inject(self.program.fleets[model].lost, EngineLost(engine, reason))

    async def tend(self) -> None:
        """Report engines that have gone silent."""
        await self._check_coordinator()  # after a long suspension of this process every engine looks silent
        for name, model in self.models.items():
            for slot in model.pool.silent(model.settings.stall_s):
                self.report_lost(
                    name, slot.name, f"no token for {model.settings.stall_s:g} s ([engine] stall_s)"
                )

    async def check_health(self) -> None:
        """Check every open engine; several checks in a row without a response count as its death."""
        await self._check_coordinator()
        checks = [
            self._check(name, slot, _MAX_FAILED_CHECKS)
            for name, model in self.models.items()
            for slot in model.pool.slots.values()
            if slot.state == "open"
        ]
        await asyncio.gather(*checks)

    async def _check(self, name: str, slot: Slot, failures: int) -> None:
        if (engine := slot.engine) is None:
            return
        healthy, failed = await engine.healthy(), self.models[name].failed_checks
        failed[slot.name] = 0 if healthy else failed.get(slot.name, 0) + 1
        if failed[slot.name] >= failures and slot.state == "open" and slot.engine is engine:
            self.report_lost(name, slot.name, f"no response to {failed[slot.name]} health checks")

    def unreachable(self, model: str, slot: Slot) -> None:
        """Check an engine that a request of any process could not reach immediately; one failed check is enough."""
        checks = self.models[model].checks
        if slot.state == "open" and (slot.name not in checks or checks[slot.name].done()):
            check = asyncio.create_task(self._check(model, slot, 1), name=f"check-{slot.name}")
            check.add_done_callback(_report_death)
            checks[slot.name] = check

    def disputed(self, model: str, slot: Slot, reason: str) -> None:
        """Stop using an engine that a process reports as unusable."""
        if slot.state == "open":  # otherwise it was reported already
            self.report_lost(model, slot.name, reason)

    async def _watch(self, name: str, slot: Slot, process: LocalProcess) -> None:
        """Report the end of a child process that was not stopped as the engine's death."""
        status = await process.wait()
        if slot.process is not None and slot.process.process is process:
            self.report_lost(name, slot.name, f"its process ended with {status}")

    # Decisions

    def _on_commands(self, name: str) -> Callable[[Tag, Any], None]:
        def act(_tag: Tag, commands: tuple[StepCommand, ...]) -> None:
            for command in commands:
                self._act(name, command)

        return act

    def _on_ended(self, name: str) -> Callable[[Tag, Any], None]:
        def settle(_tag: Tag, ended: UpdateResult) -> None:
            future = self.models[name].ended.pop(ended.version, None)
            if future is not None and not future.done():
                future.set_result(ended)
            elif (ended.live or ended.bad) and (listener := self.models[name].late_ends) is not None:
                listener.ended_late(ended)

        return settle

    def _act(self, name: str, command: StepCommand) -> None:
        model = self.models[name]
        log.info("%s: %s (version %d): %s", command.engine, command.step, command.version, command.reason)
        if command.step in ("quarantine", "stop"):
            model.steps.quarantine(command)
        if command.step == "quarantine":
            log.error("%s is quarantined: %s", command.engine, command.reason)
            self._cancel(model, command.engine)
            self._forget(name, command.engine)
            return
        cancelled = self._cancel(model, command.engine)
        task = asyncio.create_task(
            self._run(name, command, cancelled), name=f"{command.engine}-{command.step}"
        )
        running = model.tasks.setdefault(command.engine, set())
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(_report_death)

    @staticmethod
    def _cancel(model: ModelEngines, engine: str) -> set[asyncio.Task[None]]:
        """Cancel what runs for an engine; return what has not ended yet."""
        running = set(model.tasks.get(engine, ()))
        for task in running:
            task.cancel()
        return running

    def _forget(self, name: str, engine: str) -> None:
        """Record that a removed engine is stopped, or cannot be."""
        model = self.models[name]
        if engine in model.removed:
            model.removed.discard(engine)
            model.pool.slots.pop(engine, None)
            model.pool.notify()
            self._peers.remove_engine(name, engine)

    async def _run(self, name: str, command: StepCommand, cancelled: set[asyncio.Task[None]]) -> None:
        if cancelled:
            await asyncio.wait(cancelled)
        model = self.models[name]
        ok, detail, excused = True, "", False
        try:
            await self._check_coordinator()
            await model.steps.run(command)
        except EngineError as error:
            ok, detail, excused = False, error.message, isinstance(error, WeightsMissed)
        except Exception as error:
            log.exception("%s: step %s", command.engine, command.step)
            ok, detail = False, repr(error)
        if command.step == "stop":
            self._forget(name, command.engine)
        slot = model.pool.slots.get(command.engine)
        if ok and command.step == "launch" and slot is not None and slot.process is not None:
            watch = self._watch(name, slot, slot.process.process)
            model.watchers[command.engine] = asyncio.create_task(watch, name=f"watch-{command.engine}")
        pinned = model.steps.runs(slot)[1] if slot is not None and command.step == "hold" else 0
        reactor = self.program.fleets[name] if command.step in _FLEET_STEPS else self.program.updates[name]
        self._runtime.inject(
            reactor.step_result,
            StepResult(command.engine, command.step, command.version, ok, detail, pinned, excused),
        )


def _report_lost(path: Path, error: OSError) -> None:
    log.error("the recording %s ends here: %s ([control] recording)", path, error.strerror)


def _report_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s ended: %s", task.get_name(), error, exc_info=error)
