"""The weight update: which step each engine takes next, until it runs the newest version.

`abort` gives an engine's requests back before the weights change; `keep` freezes them inside. A request whose sampler cannot move
(pinned) is frozen in either mode. With `adapter` a version is loaded in addition to the others: the engine stays open, and its
requests end under the version that they began with. Owns each engine's confirmed version and its present step. Invariants:
- the weights of an engine change only between a step that ended or froze every request and the step that opens it (`adapter`:
  never);
- an engine is opened only after its probe, at the version that it was probed for;
- rolling: at most one engine is being updated at a time, counting one that is being restarted;
- pull: a version is live as soon as one engine runs it. The others keep their versions until a command to pull (`placement.py`),
  and then load the newest. Until an engine runs the version, one engine is always being updated; while that one is restarted
  after a failure, no other begins;
- versions are processed in the order in which they were published, one after the other. One older than the last fails
  immediately; a failed one becomes live later if an engine is restarted with it;
- a version on trial (`Canary`) is loaded by the engines of the trial, one after the other; the others run the live version. Its
  update ends once these engines run it; the next version waits for the end of the trial. If the version is returned, its
  engines load the live version again;
- after an engine's own process failed with a version, no other engine begins to load it, unless that engine is at fault
  (`trial.py`). If the version is bad, its update ends, and the engines that were loading it fail;
- every step has a deadline; an engine that misses one, or fails a step, is reported to the fleet, which restarts it;
- no update waits for sleeping engines: a version is live without any engine if some sleep and none has failed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from scheduler.program.calls import Opened
from scheduler.program.events import (
    Canary,
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
    TrialEnded,
    UpdateResult,
    Verdict,
)
from scheduler.program.serials import Serials
from scheduler.reactor import SECOND, Context, Reactor
from scheduler.reactor.elements import Effect, Source

Mode = Literal["abort", "keep", "adapter"]
Order = Literal["rolling", "pull"]
_WITH_WEIGHTS = ("load", "label", "resume", "probe", "open")
"""Steps that may fail because of the version."""
_FIRST_PULL_S = 1.0
"""With `pull`: seconds after which an engine loads the version without a command, if no other has begun."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Deadlines in seconds."""

    mode: Mode = "abort"
    order: Order = "rolling"
    hold_s: float = 30.0
    load_s: float = 120.0
    probe_s: float = 60.0
    resume_s: float = 30.0
    finish_s: float = 0.0
    """What a hold may take longer, because replies end where they began."""

    def deadline_s(self, step: Step) -> float:
        """Return the seconds that a step may take."""
        named = {"load": self.load_s, "probe": self.probe_s, "label": self.resume_s, "resume": self.resume_s}
        named["hold"] = self.hold_s + self.finish_s
        return named.get(step, self.hold_s)


@dataclass(slots=True)
class _EngineProgress:
    """An engine's present step, and the version that it is about."""

    confirmed: int = -1
    target: int = -1
    step: Step | None = None
    """The running step; None: the engine waits for its turn, or to be launched."""
    pinned: bool = False
    up: bool = False
    asleep: bool = False
    failed: int = -1
    """The version that it failed with, until it runs that one or was launched with another."""
    serial: int = 0

    @property
    def ready(self) -> bool:
        """True if the engine is up and no step is running."""
        return self.up and self.step is None

    def runs(self, version: int) -> bool:
        """Return true if the engine is open at a version."""
        return self.ready and self.confirmed == version


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
        self._progress: dict[str, _EngineProgress] = {}
        self._target = 0
        self._queue: list[Published] = []
        self._canary: Canary | None = None
        """The trial of the newest version, until it ends."""
        self._trial_ended = False
        """True if a trial ended at this tag, so that the others are not notified yet."""
        self._todo: list[str] = []
        """Engines that the running update still waits for, in their order; empty: no update runs."""
        self._running = False
        self._failed_version: int | None = None
        """The last update failed, and no engine has loaded its version since."""
        self._target_failed = False
        """True if an engine has failed with the newest version since its update began."""
        self._suspected = False
        """True while the newest version is suspected to be bad: no engine begins to load it until that is decided."""
        self._bad: Verdict | None = None
        self._serials = Serials()
        self._commands: list[StepCommand] = []
        self._failed: list[Failed] = []
        self._failures: list[str] = []
        self.started = self.physical("started", Started)
        self.published = self.physical("published", Published)
        self.trial_ended = self.physical("trial_ended", TrialEnded)
        self.step_result = self.physical("step_result", StepResult)
        self.step_timeout = self.logical("step_timeout", StepTimeout)
        self.next_update = self.logical("next_update", bool)
        self.first_pull = self.logical("first_pull", int)
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
        self.reaction(self._on_trial_ended, on=[self.trial_ended], writes=[self.step_timeout])
        self.reaction(self._on_launched, on=[self.launched], writes=[self.step_timeout])
        self.reaction(self._on_step_result, on=[self.step_result], writes=[self.step_timeout, self.opened])
        self.reaction(self._on_step_timeout, on=[self.step_timeout])
        self.reaction(self._on_unavailable, on=[self.unavailable])
        self.reaction(self._on_verdict, on=[self.verdict])
        self.reaction(self._on_pull, on=[self.pull], writes=[self.step_timeout])
        self.reaction(self._on_first_pull, on=[self.first_pull], writes=[self.step_timeout, self.first_pull])
        every: list[Source[Any]] = [
            *(self.published, self.launched, self.step_result, self.step_timeout, self.unavailable),
            *(self.next_update, self.pull, self.first_pull, self.verdict, self.trial_ended),
        ]
        effects: list[Effect[Any]] = [
            *(self.commands, self.failed, self.target, self.ended),
            *(self.step_timeout, self.next_update, self.first_pull),
        ]
        self.reaction(self._advance, on=every, writes=effects)

    def steps(self) -> Iterator[StepCommand]:
        """Yield the running step of each engine."""
        for name, progress in self._progress.items():
            if progress.step is not None:
                yield StepCommand(name, progress.step, progress.target)

    def _on_started(self, now: Context) -> None:
        self._target = now[self.started].version

    def _on_published(self, now: Context) -> None:
        self._queue.append(now[self.published])

    def _on_trial_ended(self, now: Context) -> None:
        """Let every engine load the version; or have those that run it, or load it, go back to the live version."""
        ended, canary = now[self.trial_ended], self._canary
        if canary is None or ended.version != self._target:
            return
        self._canary, self._trial_ended = None, True
        if ended.promoted:
            return
        self._target, first = canary.live, self._first_step
        for engine, progress in self._progress.items():
            if progress.step is not None and progress.target == ended.version:
                self._fail(engine, f"version {ended.version} was returned", excused=True)
            elif progress.runs(ended.version):
                progress.target = canary.live
                self._begin_step(now, engine, first, f"version {ended.version} was returned")

    def _on_launched(self, now: Context) -> None:
        """Name, probe and open a launched engine, which holds no request and is not paused."""
        launched = now[self.launched]
        progress = self._progress.setdefault(launched.engine, _EngineProgress())
        progress.up, progress.asleep, progress.target = True, False, launched.version
        if progress.failed != launched.version:
            progress.failed = -1
        if self._running and launched.engine not in self._todo:
            self._todo.append(launched.engine)
        self._begin_step(now, launched.engine, "label", "it was launched")

    def _on_step_result(self, now: Context) -> None:
        result = now[self.step_result]
        progress = self._progress.get(result.engine)
        if progress is None or (progress.step, progress.target) != (result.step, result.version):
            return  # the step was withdrawn
        if not result.ok:
            reason = f"step '{result.step}': {result.detail}"
            self._fail(result.engine, reason, excused=result.excused)
            return
        progress.pinned = result.pinned > 0 if result.step == "hold" else progress.pinned
        step = self._after(progress, result.step)
        if step is not None:
            self._begin_step(now, result.engine, step, f"'{result.step}' is done")
            return
        progress.step, progress.confirmed, progress.failed = None, progress.target, -1
        self._suspected &= progress.target != self._target
        now.set(self.opened, Opened(result.engine, progress.target), why="its probe has passed")

    def _after(self, progress: _EngineProgress, step: Step) -> Step | None:
        if progress.confirmed < 0 and step == "label":
            return "probe"  # a launched engine was never paused
        return next_step(self._settings.mode, progress.pinned, step)

    def _on_step_timeout(self, now: Context) -> None:
        timeout = now[self.step_timeout]
        progress = self._progress.get(timeout.engine)
        if progress is not None and progress.serial == timeout.serial and progress.step == timeout.step:
            seconds = self._settings.deadline_s(timeout.step)
            self._fail(timeout.engine, f"step '{timeout.step}' was not done within {seconds:g} s")

    def _on_unavailable(self, now: Context) -> None:
        for unavailable in now[self.unavailable]:
            progress = self._progress.setdefault(unavailable.engine, _EngineProgress())
            if progress.step in _WITH_WEIGHTS and not unavailable.removed:
                progress.failed = progress.target  # its process died there
            progress.up, progress.step, progress.confirmed, progress.asleep = (
                False,
                None,
                -1,
                unavailable.asleep,
            )
            waited = unavailable.engine in self._todo
            if self._running and not unavailable.final and not waited:
                self._todo.insert(
                    0, unavailable.engine
                )  # the others stay open until this engine is restarted
            if unavailable.final and waited:
                self._todo.remove(unavailable.engine)
                if not (unavailable.removed or unavailable.asleep):
                    self._failures.append(unavailable.engine)
            if unavailable.removed:
                del self._progress[unavailable.engine]

    def _on_verdict(self, now: Context) -> None:
        verdict = now[self.verdict]
        self._suspected = verdict.kind == "suspected"
        self._bad = verdict if verdict.kind == "bad" else None

    def _on_pull(self, now: Context) -> None:
        """Update the named engines that are open and run an older version."""
        for engine in now[self.pull]:
            self._begin_update(now, engine, "it pulls the newest weights")

    def _on_first_pull(self, now: Context) -> None:
        """Choose the engine that loads the version first, if no command to pull has named one."""
        if not self._running or now[self.first_pull] != self._target:
            return
        loading = any(p.step is not None and p.target == self._target for p in self._progress.values())
        ready = [engine for engine, progress in self._progress.items() if progress.ready]
        if ready and not loading and not self._is_live(self._target):
            self._begin_update(now, ready[0], "no other engine has pulled")
        now.schedule(self.first_pull, self._target, after=int(_FIRST_PULL_S * SECOND))

    def _begin_update(self, now: Context, engine: str, reason: str) -> None:
        progress = self._progress.get(engine)
        if self._suspected or self._first_engine_failed():
            return
        wanted = self._target if self._canary is None or self._tries(engine) else self._canary.live
        if progress is not None and progress.ready and 0 <= progress.confirmed < wanted:
            progress.target = wanted
            self._begin_step(now, engine, self._first_step, reason)

    @property
    def _first_step(self) -> Step:
        return "load" if self._settings.mode == "adapter" else "hold"

    def _tries(self, engine: str) -> bool:
        """Return true if the engine is one of a trial."""
        return self._canary is not None and engine in self._canary.engines

    def _first_engine_failed(self) -> bool:
        """Return true if, with `pull`, the first engine to load the newest version failed and is being restarted."""
        if self._settings.order != "pull" or not self._running or self._is_live(self._target):
            return False
        return any(
            self._progress[engine].failed == self._target for engine in self._todo if engine in self._progress
        )

    def _advance(self, now: Context) -> None:
        """End the running update, begin the next one, and update its next engine; then send what was decided at this tag."""
        self._todo = [engine for engine in self._todo if not self._is_updated(engine)]
        if self._bad is not None:
            self._abandon_bad(now, self._bad)
        elif self._trial_ended:
            self._trial_ended = False
            now.set(self.target, Target(self._target), why="the trial has ended")
        elif self._running and self._finished():
            self._end(now)
        elif not self._running and self._queue and self._canary is None:
            self._begin(now)
        elif self._failed_version is not None and self._is_live(self._failed_version):
            self._end_late(now, self._failed_version)
        if self._running:
            self._update_next(now)
        if self._finished() if self._running else self._queue and self._canary is None:
            now.schedule(self.next_update, True, after=0)
        if self._commands:
            why = "; ".join(f"{command.engine}: {command.reason}" for command in self._commands)
            now.set(self.commands, tuple(self._commands), why=why)
        if self._failed:
            now.set(self.failed, tuple(self._failed), why="; ".join(f.reason for f in self._failed))
        self._commands, self._failed = [], []

    def _finished(self) -> bool:
        """Return true if the running update waits for no engine; with `pull`, as soon as the first engine runs the version."""
        first = self._settings.order == "pull" and self._canary is None and self._is_live(self._target)
        return first or not self._todo

    def _begin(self, now: Context) -> None:
        published = self._queue.pop(0)
        version = published.version
        if version < self._target:
            now.set(self.ended, UpdateResult(version, live=False), why=f"version {self._target} is newer")
            return
        self._target, self._running, self._failed_version = version, True, None
        self._canary = published.canary
        self._suspected = False
        in_order = sorted(self._progress, key=lambda engine: not self._progress[engine].up)
        self._todo = [engine for engine in in_order if not self._is_updated(engine)]
        self._failures, self._target_failed = [], False
        why = f"version {self._target} was published"
        now.set(self.target, Target(self._target, self._canary), why=why)
        if self._settings.order == "pull" and self._canary is None:
            now.schedule(self.first_pull, version, after=int(_FIRST_PULL_S * SECOND))

    def _update_next(self, now: Context) -> None:
        """With `rolling`, and for a trial: update the next engine."""
        if (self._settings.order == "rolling" or self._canary is not None) and self._todo:
            engine = self._todo[0]
            self._begin_update(
                now, engine, f"version {self._target} is newer than {self._progress[engine].confirmed}"
            )

    def _end(self, now: Context) -> None:
        sleepers = any(progress.asleep for progress in self._progress.values()) and not self._target_failed
        live = self._is_live(self._target) or (sleepers and self._canary is None)
        self._running, self._failed_version = False, None if live else self._target
        why = "every engine runs it, sleeps or was given up" if live else "no engine runs it"
        now.set(self.ended, UpdateResult(self._target, live, tuple(self._failures)), why=why)
        if self._canary is not None and not live:
            self._target, self._canary, self._failed_version = self._canary.live, None, None
            now.set(self.target, Target(self._target), why="no engine of the trial runs the version")

    def _abandon_bad(self, now: Context, verdict: Verdict) -> None:
        """End the update to a bad version: the engines that were loading it fail, and the others keep what they run."""
        for engine, progress in self._progress.items():
            if progress.step is not None and progress.target == verdict.version:
                progress.step, progress.up, progress.confirmed = None, False, -1
                self._failed.append(Failed(engine, f"version {verdict.version} is bad", verdict.version))
        self._bad, self._target, self._canary = None, verdict.live, None
        self._running, self._failed_version, self._todo = False, None, []
        ended = UpdateResult(verdict.version, live=False, bad=verdict.why)
        now.set(self.ended, ended, why=f"it is bad: {verdict.why}")

    def _end_late(self, now: Context, version: int) -> None:
        self._failed_version = None
        now.set(self.ended, UpdateResult(version, live=True), why="it had failed, and an engine runs it now")

    def _is_live(self, version: int) -> bool:
        return any(progress.runs(version) for progress in self._progress.values())

    def _is_updated(self, engine: str) -> bool:
        progress = self._progress.get(engine)
        if self._canary is not None and not self._tries(engine):
            return True
        return progress is None or progress.asleep or progress.runs(self._target)

    def _fail(self, engine: str, reason: str, *, excused: bool = False) -> None:
        """`excused`: the version cannot be the reason."""
        progress = self._progress[engine]
        self._target_failed |= (
            progress.target == self._target and progress.step in ("load", "probe") and not excused
        )
        progress.failed = progress.target if progress.step in _WITH_WEIGHTS and not excused else -1
        progress.step, progress.up, progress.confirmed = None, False, -1
        self._failed.append(Failed(engine, reason, progress.failed))

    def _begin_step(self, now: Context, engine: str, step: Step, reason: str) -> None:
        progress = self._progress[engine]
        progress.step = step
        progress.serial = next(self._serials)
        self._commands.append(StepCommand(engine, step, progress.target, reason))
        deadline = int(self._settings.deadline_s(step) * SECOND)
        now.schedule(self.step_timeout, StepTimeout(engine, step, progress.serial), after=deadline)
