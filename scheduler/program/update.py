"""The weight update: which engine takes which step next, on its way to the newest version.

`abort` gives an engine's requests back before the weights change; `keep` freezes them inside. A request whose sampler cannot move
(pinned) is frozen in either mode. With `adapter` a version is loaded in addition (adapters): the engine stays open, and
its requests end under the version that they began with. Owns each engine's confirmed version and its present step. Invariants:
- the weights of an engine change only between a step that ended or froze every request and the step that opens it (`adapter`:
  never);
- an engine is opened only after its probe, by the version that it was probed for;
- rolling: at most one engine is on its way at a time, counting one that is being restarted;
- pull: a version is live as soon as one engine runs it. The others continue under their versions until a command to pull
  (`placement.py`), and then take the newest. One engine is always on its way, and while it comes back from a failure no other is,
  until one runs the version;
- versions are taken in the order in which they were published, each to its end. One older than the last fails immediately; a
  failed one becomes live after all if an engine comes back with it;
- after an engine's own process failed with a version, no other engine leaves for it, unless that engine is at fault (`trial.py`).
  If the version is bad, its update ends, and engines on their way to it go to the fleet;
- every step has a deadline; an engine that misses one, or fails, goes to the fleet;
- sleeping engines are not waited for: a version is live without any engine if some sleep and none has failed with it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from scheduler.program.calls import Opened
from scheduler.program.events import (
    EngineLaunched,
    EngineUnavailable,
    Failed,
    Published,
    Started,
    Step,
    StepCommand,
    StepResult,
    StepTimeout,
    Target,
    UpdateResult,
    Verdict,
)
from scheduler.reactor import SECOND, Context, Reactor
from scheduler.reactor.elements import Effect, Source

Mode = Literal["abort", "keep", "adapter"]
Order = Literal["rolling", "pull"]
_WITH_WEIGHTS = ("load", "label", "resume", "probe", "open")
"""Steps that may fail because of the version."""
_ALONE_S = 1.0
"""With `pull`: seconds after which one engine pulls unasked, if none was named and none runs the version."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Deadlines in seconds."""

    mode: Mode = "abort"
    order: Order = "rolling"
    hold_s: float = 30.0
    load_s: float = 120.0
    probe_s: float = 60.0
    resume_s: float = 30.0

    def deadline_s(self, step: Step) -> float:
        """Return the seconds that a step may take."""
        named = {"load": self.load_s, "probe": self.probe_s, "label": self.resume_s, "resume": self.resume_s}
        return named.get(step, self.hold_s)


@dataclass(slots=True)
class _EngineProgress:
    """An engine's place on its way."""

    confirmed: int = -1
    to: int = -1
    step: Step | None = None
    """The step that it takes now; None: it waits for its turn, or to be launched."""
    pinned: bool = False
    up: bool = False
    asleep: bool = False
    failed: int = -1
    """The version that it failed with, until it runs that one or was launched with another."""
    serial: int = 0


def next_step(mode: Mode, pinned: bool, step: Step) -> Step | None:
    """Return the step after `step`; None: the engine is open."""
    if mode == "adapter" and step == "load":
        return "probe"
    if step == "hold":
        return "freeze" if mode == "keep" else "handback" if pinned else "abort"
    if step == "settle":
        return "load"
    after: dict[Step, Step] = {
        "abort": "settle",
        "handback": "freeze",
        "freeze": "load",
        "load": "label",
        "label": "resume",
        "resume": "probe",
        "probe": "open",
    }
    return after.get(step)


class WeightUpdate(Reactor):
    """The updates of one model."""

    def __init__(self, name: str, settings: UpdateSettings) -> None:
        super().__init__(name)
        self._settings = settings
        self._ways: dict[str, _EngineProgress] = {}
        self._target = 0
        self._queue: list[int] = []
        self._todo: list[str] = []
        """Engines that the running update still waits for, in their order; empty: no update runs."""
        self._running = False
        self._failed_version: int | None = None
        """The last update failed, and no engine has loaded its version since."""
        self._contradicted = False
        """An engine has failed with the newest version, since its update began."""
        self._doubted = False
        """True while the newest version is suspected to be bad: no engine leaves for it until that is decided."""
        self._bad: Verdict | None = None
        self._serials = itertools.count(1)
        self._commands: list[StepCommand] = []
        self._failed: list[Failed] = []
        self._failures: list[str] = []
        self.started = self.physical("started", Started)
        self.published = self.physical("published", Published)
        self.step_result = self.physical("step_result", StepResult)
        self.late = self.logical("late", StepTimeout)
        self.turn = self.logical("turn", bool)
        self.alone = self.logical("alone", int)
        self.pull = self.input("pull", tuple[str, ...])
        self.launched = self.input("launched", EngineLaunched)
        self.unavailable = self.input("unavailable", tuple[EngineUnavailable, ...])
        self.verdict = self.input("verdict", Verdict)
        self.commands = self.output("commands", tuple[StepCommand, ...])
        self.failed = self.output("failed", tuple[Failed, ...])
        self.target = self.output("target", Target)
        self.ended = self.output("ended", UpdateResult)
        self.opened = self.output("opened", Opened)
        self.reaction(self._on_started, on=[self.started])
        self.reaction(self._on_published, on=[self.published])
        self.reaction(self._on_launched, on=[self.launched], writes=[self.late])
        self.reaction(self._on_step_result, on=[self.step_result], writes=[self.late, self.opened])
        self.reaction(self._on_late, on=[self.late])
        self.reaction(self._on_unavailable, on=[self.unavailable])
        self.reaction(self._on_verdict, on=[self.verdict])
        self.reaction(self._on_pull, on=[self.pull], writes=[self.late])
        self.reaction(self._on_alone, on=[self.alone], writes=[self.late, self.alone])
        every: list[Source[Any]] = [
            self.published,
            self.launched,
            self.step_result,
            self.late,
            self.unavailable,
            self.turn,
        ]
        every += [self.pull, self.alone, self.verdict]
        effects: list[Effect[Any]] = [
            self.commands,
            self.failed,
            self.target,
            self.ended,
            self.late,
            self.turn,
        ]
        effects.append(self.alone)
        self.reaction(self._go_on, on=every, writes=effects)

    def _on_started(self, now: Context) -> None:
        self._target = now[self.started].version

    def _on_published(self, now: Context) -> None:
        self._queue.append(now[self.published].version)

    def _on_launched(self, now: Context) -> None:
        """Name, probe and open a launched engine, which holds no request and is not paused."""
        launched = now[self.launched]
        way = self._ways.setdefault(launched.engine, _EngineProgress())
        way.up, way.asleep, way.to = True, False, launched.version
        if way.failed != launched.version:
            way.failed = -1
        if self._running and launched.engine not in self._todo:
            self._todo.append(launched.engine)
        self._do(now, launched.engine, "label", "it was launched")

    def _on_step_result(self, now: Context) -> None:
        step_result = now[self.step_result]
        way = self._ways.get(step_result.engine)
        if way is None or (way.step, way.to) != (step_result.step, step_result.version):
            return  # an answer to a question that was withdrawn
        if not step_result.ok:
            self._fail(
                step_result.engine,
                f"step '{step_result.step}': {step_result.detail}",
                excused=step_result.excused,
            )
            return
        way.pinned = step_result.pinned > 0 if step_result.step == "hold" else way.pinned
        step = self._after(way, step_result.step)
        if step is not None:
            self._do(now, step_result.engine, step, f"'{step_result.step}' is done")
            return
        way.step, way.confirmed, way.failed = None, way.to, -1
        self._doubted &= way.to != self._target
        now.set(self.opened, Opened(step_result.engine, way.to), why="its probe has passed")

    def _after(self, way: _EngineProgress, step: Step) -> Step | None:
        if way.confirmed < 0 and step == "label":
            return "probe"  # a launched engine was never paused
        return next_step(self._settings.mode, way.pinned, step)

    def _on_late(self, now: Context) -> None:
        late = now[self.late]
        way = self._ways.get(late.engine)
        if way is not None and way.serial == late.serial and way.step == late.step:
            seconds = self._settings.deadline_s(late.step)
            self._fail(late.engine, f"step '{late.step}' was not done within {seconds:g} s")

    def _on_unavailable(self, now: Context) -> None:
        for unavailable in now[self.unavailable]:
            way = self._ways.setdefault(unavailable.engine, _EngineProgress())
            if way.step in _WITH_WEIGHTS and not unavailable.removed:
                way.failed = way.to  # its process died there
            way.up, way.step, way.confirmed, way.asleep = False, None, -1, unavailable.asleep
            waited = unavailable.engine in self._todo
            if self._running and not unavailable.final and not waited:
                self._todo.insert(0, unavailable.engine)  # the others stay open until this engine is back
            if unavailable.final and waited:
                self._todo.remove(unavailable.engine)
                if not (unavailable.removed or unavailable.asleep):
                    self._failures.append(unavailable.engine)
            if unavailable.removed:
                del self._ways[unavailable.engine]

    def _on_verdict(self, now: Context) -> None:
        verdict = now[self.verdict]
        self._doubted = verdict.kind == "doubted"
        self._bad = verdict if verdict.kind == "bad" else None

    def _on_pull(self, now: Context) -> None:
        """Engines leave the version that they run; what is on its way already, or not open, is left alone."""
        for engine in now[self.pull]:
            self._leave(now, engine, "it pulls the newest weights")

    def _on_alone(self, now: Context) -> None:
        """Choose an engine if none has been chosen to load the version first."""
        if not self._running or now[self.alone] != self._target:
            return
        under_way = any(way.step is not None and way.to == self._target for way in self._ways.values())
        behind = [engine for engine, way in self._ways.items() if way.up and way.step is None]
        if behind and not under_way and not self._runs(self._target):
            self._leave(now, behind[0], "no other engine has pulled")
        now.schedule(self.alone, self._target, after=int(_ALONE_S * SECOND))

    def _leave(self, now: Context, engine: str, reason: str) -> None:
        way = self._ways.get(engine)
        if self._doubted or self._failed_first():
            return
        if way is not None and way.up and way.step is None and 0 <= way.confirmed < self._target:
            way.to = self._target
            self._do(now, engine, "load" if self._settings.mode == "adapter" else "hold", reason)

    def _failed_first(self) -> bool:
        """With `pull`: an engine failed with the newest version, which none runs, and comes back. The others stay as they are."""
        if self._settings.order != "pull" or not self._running or self._runs(self._target):
            return False
        return any(self._ways[engine].failed == self._target for engine in self._todo if engine in self._ways)

    def _go_on(self, now: Context) -> None:
        """Take the next steps: start engines, end an update, begin the next."""
        self._todo = [engine for engine in self._todo if not self._arrived(engine)]
        if self._bad is not None:
            self._leave_bad(now, self._bad)
        elif self._running and self._over():
            self._end(now)
        elif not self._running and self._queue:
            self._begin(now)
        elif self._failed_version is not None and self._runs(self._failed_version):
            self._revive(now, self._failed_version)
        if self._running:
            self._advance(now)
        if self._over() if self._running else self._queue:
            now.schedule(self.turn, True, after=0)
        if self._commands:
            why = "; ".join(f"{do.engine}: {do.reason}" for do in self._commands)
            now.set(self.commands, tuple(self._commands), why=why)
        if self._failed:
            now.set(self.failed, tuple(self._failed), why="; ".join(f.reason for f in self._failed))
        self._commands, self._failed = [], []

    def _over(self) -> bool:
        """Return true if the running update waits for no engine; with `pull`, as soon as the first engine has it."""
        first = self._settings.order == "pull" and self._runs(self._target)
        return first or not self._todo

    def _begin(self, now: Context) -> None:
        version = self._queue.pop(0)
        if version < self._target:
            now.set(self.ended, UpdateResult(version, live=False), why=f"version {self._target} is newer")
            return
        self._target, self._running, self._failed_version = version, True, None
        self._doubted = False
        in_order = sorted(self._ways, key=lambda engine: not self._ways[engine].up)
        self._todo = [engine for engine in in_order if not self._arrived(engine)]
        self._failures, self._contradicted = [], False
        why = f"version {self._target} was published"
        now.set(self.target, Target(self._target), why=why)
        if self._settings.order == "pull":
            now.schedule(self.alone, version, after=int(_ALONE_S * SECOND))

    def _advance(self, now: Context) -> None:
        """Start the update of the next engine, unless engines pull by themselves."""
        if self._settings.order == "rolling" and self._todo:
            engine = self._todo[0]
            self._leave(now, engine, f"version {self._target} is newer than {self._ways[engine].confirmed}")

    def _end(self, now: Context) -> None:
        sleepers = any(way.asleep for way in self._ways.values()) and not self._contradicted
        live = self._runs(self._target) or sleepers
        self._running, self._failed_version = False, None if live else self._target
        why = "every engine runs it, sleeps or was given up" if live else "no engine runs it"
        now.set(self.ended, UpdateResult(self._target, live, tuple(self._failures)), why=why)

    def _leave_bad(self, now: Context, verdict: Verdict) -> None:
        """Engines on their way to a bad version are of no use as they are; the others are where they should be."""
        for engine, way in self._ways.items():
            if way.step is not None and way.to == verdict.version:
                way.step, way.up, way.confirmed = None, False, -1
                self._failed.append(Failed(engine, f"version {verdict.version} is bad", verdict.version))
        self._bad, self._target = None, verdict.live
        self._running, self._failed_version, self._todo = False, None, []
        ended = UpdateResult(verdict.version, live=False, bad=verdict.why)
        now.set(self.ended, ended, why=f"it is bad: {verdict.why}")

    def _revive(self, now: Context, version: int) -> None:
        self._failed_version = None
        now.set(
            self.ended, UpdateResult(version, live=True), why="it had failed, and an engine runs it after all"
        )

    def _runs(self, version: int) -> bool:
        return any(way.up and way.step is None and way.confirmed == version for way in self._ways.values())

    def _arrived(self, engine: str) -> bool:
        way = self._ways.get(engine)
        return way is None or way.asleep or (way.up and way.step is None and way.confirmed == self._target)

    def _fail(self, engine: str, reason: str, *, excused: bool = False) -> None:
        """`excused`: the version cannot be the reason."""
        way = self._ways[engine]
        self._contradicted |= way.to == self._target and way.step in ("load", "probe") and not excused
        blames = way.to if way.step in _WITH_WEIGHTS and not excused else -1
        way.failed = blames
        way.step, way.up, way.confirmed = None, False, -1
        self._failed.append(Failed(engine, reason, blames))

    def _do(self, now: Context, engine: str, step: Step, reason: str) -> None:
        way = self._ways[engine]
        way.step = step
        way.serial = next(self._serials)
        self._commands.append(StepCommand(engine, step, way.to, reason))
        deadline = int(self._settings.deadline_s(step) * SECOND)
        now.schedule(self.late, StepTimeout(engine, step, way.serial), after=deadline)
