"""The lifecycle of a model's engines: they are launched, lost, restarted, given up, put to sleep, removed.

Owns the list of engines and the counts of their restarts. An engine that is up belongs to the weight update (`update.py`), which
decides its version. Invariants:
- an engine is launched only after its last process was stopped;
- an engine that fails more than `max_restarts` times within the window is given up, and nothing waits for it. It is restarted
  after `revive_s`, and when the next version is published;
- an engine that failed before it was ever up is not restarted, unless another program starts it: a wrong command line stays
  wrong;
- an engine that must sleep, by its node (`lending.py`) or a person's request, is asleep or has no process within `sleep_s` and
  `stop_s`: one that does not fall asleep is stopped. It is not launched, woken or given up while one of the two requires sleep;
- failures of a version on trial (`trial.py`) do not count as restarts, and engines leave a version that is found to be bad;
- while a share of the conversations tries a version (`Canary`), only the engines of that trial are launched with it;
- a removed engine is forgotten within `drain_s` and `stop_s`; only then can another engine have its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from scheduler.program.calls import Opened
from scheduler.program.events import (
    Added,
    Canary,
    EngineLaunched,
    EngineLost,
    EngineUnavailable,
    Failed,
    Relaunch,
    Removed,
    Started,
    Step,
    StepCommand,
    StepResult,
    StepTimeout,
    Target,
    UpdateResult,
    Verdict,
)
from scheduler.program.nodes import Asleep, Wanted
from scheduler.program.outbox import Outbox
from scheduler.program.serials import Serials
from scheduler.program.trial import Trial
from scheduler.reactor import SECOND, Context, Reactor
from scheduler.reactor.elements import Source

Phase = Literal[
    "launching",
    "up",
    "stopping",
    "waiting",
    "given_up",
    "draining",
    "removing",
    "falling_asleep",
    "asleep",
    "waking",
]


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Seconds, and restarts within a window of `window_s`."""

    start_s: float = 180.0
    stop_s: float = 60.0
    drain_s: float = 30.0
    sleep_s: float = 25.0
    wake_s: float = 180.0
    """To take the memory again and to load the newest weights."""
    max_restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 1.0
    """Before the second restart of a window; twice as long before each further one."""
    revive_s: float = 30.0
    """Seconds after which an engine that was up once and was given up is restarted."""
    insist: bool = False
    """True if another program starts the engines, so that one that was never up may appear later."""


_STEPS: dict[Phase, Step] = {
    "launching": "launch",
    "waking": "wake",
    "falling_asleep": "sleep",
    "draining": "drain",
}


@dataclass(slots=True)
class _Lifecycle:
    phase: Phase = "launching"
    restarts: list[int] = field(default_factory=list)
    """The times (ns) within the window."""
    was_up: bool = False
    warm: bool = False
    """True if the engine has a process, which only has to be woken while it sleeps."""
    version: int = 0
    """The version that its last step is about."""
    started: int = -1
    """The version that its process was started with."""
    serial: int = 0
    """The number of the last decision, unique over all lives of engines with this name."""


class Fleet(Reactor):
    """The engines of one model. The reactions decide; the last one emits the decisions, once a tag."""

    def __init__(self, name: str, settings: FleetSettings) -> None:
        super().__init__(name)
        self._settings = settings
        self._lives: dict[str, _Lifecycle] = {}
        self._unlent: set[str] = set()
        """Engines that must sleep because their nodes are not lent, including engines that do not exist yet."""
        self._paused: set[str] = set()
        """Engines that must sleep because a person requested it."""
        self._asleep: list[Asleep] = []
        self._version = 0
        """The newest version that is not bad."""
        self._live = 0
        """The newest version that an engine was open with."""
        self._bad: int | None = None
        """The version that was last found to be bad."""
        self._trial: Trial | None = None
        self._canary: Canary | None = None
        self._suspected = False
        self._serials = Serials()
        self._outbox = Outbox()
        self.started = self.physical("started", Started)
        self.added = self.physical("added", Added)
        self.removed = self.physical("removed", Removed)
        self.lost = self.physical("lost", EngineLost)
        self.requested = self.physical("requested", Wanted)
        self.step_result = self.physical("step_result", StepResult)
        self.relaunch = self.logical("relaunch", Relaunch)
        self.step_timeout = self.logical("step_timeout", StepTimeout)
        self.failed = self.input("failed", tuple[Failed, ...])
        self.target = self.input("target", Target)
        self.opened = self.input("opened", Opened)
        self.ended = self.input("ended", UpdateResult)
        self.wanted = self.input("wanted", tuple[Wanted, ...])
        self.commands = self.output("commands", tuple[StepCommand, ...])
        self.launched = self.output("launched", EngineLaunched)
        self.unavailable = self.output("unavailable", tuple[EngineUnavailable, ...])
        self.asleep = self.output("asleep", tuple[Asleep, ...])
        self.verdict = self.output("verdict", Verdict)
        self.reaction(self._on_started, on=[self.started])
        self.reaction(self._on_target, on=[self.target], writes=[self.step_timeout])
        self.reaction(self._on_ended, on=[self.ended])
        self.reaction(self._on_opened, on=[self.opened], writes=[self.step_timeout])
        self.reaction(self._on_wanted, on=[self.wanted], writes=[self.step_timeout])
        self.reaction(self._on_requested, on=[self.requested], writes=[self.step_timeout])
        self.reaction(self._on_added, on=[self.added], writes=[self.step_timeout])
        self.reaction(
            self._on_step_result,
            on=[self.step_result],
            writes=[self.launched, self.relaunch, self.step_timeout],
        )
        self.reaction(self._on_relaunch, on=[self.relaunch], writes=[self.step_timeout])
        self.reaction(
            self._on_step_timeout, on=[self.step_timeout], writes=[self.step_timeout, self.relaunch]
        )
        self.reaction(self._on_failed, on=[self.failed], writes=[self.step_timeout, self.relaunch])
        self.reaction(self._on_lost, on=[self.lost], writes=[self.step_timeout, self.relaunch])
        self.reaction(self._on_removed, on=[self.removed], writes=[self.step_timeout])
        every: list[Source[Any]] = [
            *(self.target, self.ended, self.opened, self.wanted, self.requested, self.added),
            *(self.step_result, self.relaunch, self.step_timeout, self.failed, self.lost, self.removed),
        ]
        self.reaction(
            self._emit, on=every, writes=[self.commands, self.unavailable, self.asleep, self.verdict]
        )

    def steps(self) -> Iterator[StepCommand]:
        """Yield the step of each engine that is on its way."""
        for name, life in self._lives.items():
            if step := _STEPS.get(life.phase):
                yield StepCommand(name, step, life.version)

    def _on_started(self, now: Context) -> None:
        self._version = self._live = now[self.started].version

    def _on_target(self, now: Context) -> None:
        """Retry engines that were given up, because there are other weights; start those over that begin with a version which
        was returned."""
        target = now[self.target]
        self._canary, self._version = target.canary, target.version
        version, self._live = target.version, min(self._live, target.version)
        self._trial = Trial(version, self._live, now.tag.time) if version > self._live else None
        self._bad = None
        for engine, life in self._lives.items():
            if life.phase == "given_up":
                life.restarts.clear()
                self._stop(now, engine, f"it is restarted with version {self._version}")
            elif life.phase in ("launching", "waking") and life.version > version:
                self._start_over(now, engine, f"version {life.version} was returned", life.version)

    def _on_ended(self, now: Context) -> None:
        """End a version's trial once it is live, which needs no engine while all of them sleep."""
        ended = now[self.ended]
        if ended.live:
            self._pass_trial(ended.version)

    def _on_opened(self, now: Context) -> None:
        opened, trial = now[self.opened], self._trial
        if trial is None:
            return
        if opened.version == trial.version:
            self._pass_trial(opened.version)
        elif trial.record_open(opened.engine, opened.version):
            self._declare_bad(now, trial)

    def _pass_trial(self, version: int) -> None:
        self._live = max(self._live, version)
        if self._trial is not None and self._trial.version <= version:
            self._trial = None

    def _declare_bad(self, now: Context, trial: Trial) -> None:
        """Declare the version on trial bad: engines leave it, and their restarts since the trial began are not counted."""
        self._bad, self._version, self._canary = trial.version, trial.live, None
        for engine, life in self._lives.items():
            life.restarts = [at for at in life.restarts if at < trial.began]
            if life.phase in ("launching", "waking") and life.version == trial.version:
                self._start_over(now, engine, f"version {trial.version} is bad", trial.version)

    def _on_added(self, now: Context) -> None:
        engine = now[self.added].engine
        if engine in self._lives:
            return
        self._lives[engine] = _Lifecycle()
        if self._must_sleep(engine):  # an external engine may be awake already
            self._outbox.unavailable.append(EngineUnavailable(engine, final=True, asleep=True))
            self._begin_sleep(now, engine, "it was added, and its node is not lent")
        else:
            self._outbox.unavailable.append(EngineUnavailable(engine, final=False))
            self._launch(now, engine, "it was added")

    def _on_wanted(self, now: Context) -> None:
        for wanted in now[self.wanted]:
            self._set_wanted(now, wanted, self._unlent)

    def _on_requested(self, now: Context) -> None:
        requested = now[self.requested]
        if requested.engine in self._lives:
            self._set_wanted(now, requested, self._paused)

    def _set_wanted(self, now: Context, wanted: Wanted, refused: set[str]) -> None:
        """Apply a request that an engine be awake or asleep. `refused`: engines that must sleep by requests of its source."""
        engine, life = wanted.engine, self._lives.get(wanted.engine)
        slept = self._must_sleep(engine)
        (refused.discard if wanted.awake else refused.add)(engine)
        sleeps = self._must_sleep(engine)
        if life is None or sleeps is slept:
            return
        if not sleeps and life.phase == "asleep":
            self._wake(now, engine, wanted.reason)
        elif sleeps and life.phase not in ("draining", "removing", "falling_asleep"):
            self._retire(now, engine, life, wanted.reason)

    def _must_sleep(self, engine: str) -> bool:
        return engine in self._unlent or engine in self._paused

    def _retire(self, now: Context, engine: str, life: _Lifecycle, reason: str) -> None:
        """Put an awake engine to sleep, and stop one that is starting or useless."""
        self._leave_trial(engine)
        self._outbox.unavailable.append(EngineUnavailable(engine, final=True, asleep=True))
        match life.phase:
            case "up" | "waking":
                self._begin_sleep(now, engine, reason)
            case "launching" | "given_up":
                self._stop(now, engine, reason)
            case "waiting":
                self._mark_asleep(engine)
            case _:
                pass  # the engine is being stopped, and is asleep afterwards

    def _on_step_result(self, now: Context) -> None:
        result = now[self.step_result]
        life = self._lives.get(result.engine)
        if life is None or life.version != result.version:
            return
        match life.phase, result.step:
            case "launching", "launch" if result.ok:
                life.phase, life.was_up, life.warm = "up", True, True
                launched = EngineLaunched(result.engine, result.version)
                now.set(self.launched, launched, why="its process responds")
            case "waking", "wake" if result.ok:
                life.phase = "up"
                now.set(self.launched, EngineLaunched(result.engine, result.version), why="it is awake")
            case ("launching", "launch") | ("waking", "wake"):
                self._on_failure(now, result.engine, result.detail, -1 if result.excused else life.version)
            case "falling_asleep", "sleep" if result.ok:
                self._mark_asleep(result.engine)
                if not self._must_sleep(result.engine):
                    self._wake(now, result.engine, "it is wanted again")
            case "falling_asleep", "sleep":
                self._stop(now, result.engine, f"it does not go to sleep: {result.detail}")
            case "draining", "drain":
                life.phase = "removing"
                self._begin_step(now, result.engine, "stop", "it was removed", self._settings.stop_s)
            case "removing", "stop":
                self._forget(result.engine)
            case "stopping", "stop" if self._must_sleep(result.engine):
                life.warm = False
                self._mark_asleep(result.engine)
            case "stopping", "stop":
                life.phase, life.warm = "waiting", False
                now.schedule(self.relaunch, Relaunch(result.engine, life.serial), after=self._backoff(life))
            case _:
                pass  # the step was withdrawn

    def _on_relaunch(self, now: Context) -> None:
        relaunch = now[self.relaunch]
        life = self._lives.get(relaunch.engine)
        if life is None or life.serial != relaunch.serial:
            return
        if life.phase == "waiting":
            self._launch(now, relaunch.engine, f"restart {len(life.restarts)}")
        elif life.phase == "given_up":
            self._stop(now, relaunch.engine, "it was given up a while ago")

    def _on_step_timeout(self, now: Context) -> None:
        timeout = now[self.step_timeout]
        life = self._lives.get(timeout.engine)
        if life is None or life.serial != timeout.serial:
            return
        if life.phase in ("launching", "waking"):
            limit = self._settings.start_s if life.phase == "launching" else self._settings.wake_s
            reason = f"step '{timeout.step}' was not done within {limit:g} s"
            self._on_failure(now, timeout.engine, reason, life.version)
        elif life.phase == "falling_asleep":
            reason = f"step 'sleep' was not done within {self._settings.sleep_s:g} s"
            self._stop(now, timeout.engine, reason)
        elif life.phase == "draining":
            life.phase = "removing"
            reason = f"step 'drain' was not done within {self._settings.drain_s:g} s"
            self._begin_step(now, timeout.engine, "stop", reason, self._settings.stop_s)
        elif life.phase in ("stopping", "removing"):
            self._stop_is_late(now, timeout.engine, life.phase)

    def _stop_is_late(self, now: Context, engine: str, phase: Phase) -> None:
        reason = f"step 'stop' was not done within {self._settings.stop_s:g} s"
        if phase == "stopping" and not self._must_sleep(engine):
            self._give_up(now, engine, reason)
            return
        self._outbox.commands.append(StepCommand(engine, "quarantine", self._version, reason))
        if phase == "stopping":  # the engine must sleep: it is launched when it may be awake again
            self._lives[engine].warm = False
            self._mark_asleep(engine)
        else:
            self._forget(engine)

    def _on_failed(self, now: Context) -> None:
        for failed in now[self.failed]:
            self._on_failure(now, failed.engine, failed.reason, failed.version)

    def _on_lost(self, now: Context) -> None:
        lost = now[self.lost]
        life = self._lives.get(lost.engine)
        starting = life is not None and life.phase in ("launching", "waking")
        self._on_failure(now, lost.engine, lost.reason, life.version if life is not None and starting else -1)

    def _on_removed(self, now: Context) -> None:
        engine = now[self.removed].engine
        life = self._lives.get(engine)
        if life is None or life.phase in ("draining", "removing"):
            return
        self._leave_trial(engine)
        self._outbox.unavailable.append(EngineUnavailable(engine, final=True, removed=True))
        if life.phase == "stopping":
            life.phase = "removing"  # the stop that has begun is the last step: there is no request to drain
        else:
            life.phase = "draining"
            self._begin_step(now, engine, "drain", "it was removed", self._settings.drain_s)

    def _emit(self, now: Context) -> None:
        self._outbox.send(now, self.commands, self.unavailable)
        if self._asleep:
            why = "; ".join(f"{a.engine} {'sleeps' if a.warm else 'has no process'}" for a in self._asleep)
            now.set(self.asleep, tuple(self._asleep), why=why)
        self._asleep = []
        self._emit_verdict(now)

    def _emit_verdict(self, now: Context) -> None:
        trial = self._trial
        suspected = trial is not None and bool(trial.failed)
        if trial is not None and trial.version == self._bad:
            self._trial, suspected = None, False
            verdict = Verdict(trial.version, "bad", trial.live, trial.why)
            now.set(self.verdict, verdict, why=f"version {trial.version} is bad: {trial.why}")
        elif trial is not None and suspected != self._suspected:
            why = "; ".join(f"{engine}: {reason}" for engine, reason in trial.failed.items())
            verdict = Verdict(trial.version, "suspected" if suspected else "cleared", trial.live, why)
            now.set(self.verdict, verdict, why=why or "the engine that failed with it is at fault")
        self._suspected = suspected

    def _on_failure(self, now: Context, engine: str, reason: str, version: int) -> None:
        """Handle the failure of an engine that is up or being started. `version`: the one it failed with; -1 if unknown."""
        life = self._lives.get(engine)
        if life is not None and (life.phase == "falling_asleep" or (life.phase == "asleep" and life.warm)):
            self._stop(now, engine, reason)
            return
        if life is None or life.phase not in ("up", "launching", "waking"):
            return
        trial = self._trial
        finding = (
            "engine_at_fault"
            if trial is None
            else trial.record_failure(engine, reason, version, life.started)
        )
        if finding != "engine_at_fault" or version == self._bad:
            self._start_over(now, engine, reason, version)
            return
        since = now.tag.time - int(self._settings.window_s * SECOND)
        life.restarts = [at for at in life.restarts if at > since]
        if not (life.was_up or self._settings.insist):
            self._give_up(now, engine, f"{reason} (it was never up)")
        elif len(life.restarts) >= self._settings.max_restarts:
            self._give_up(now, engine, f"{reason} (no restart is left of [engine] max_restarts)")
        else:
            life.restarts.append(now.tag.time)
            self._start_over(now, engine, reason)

    def _start_over(self, now: Context, engine: str, reason: str, version: int | None = None) -> None:
        """Restart an engine: stop its process, and launch one with the version that engines are launched with now."""
        self._outbox.unavailable.append(EngineUnavailable(engine, final=False))
        self._stop(now, engine, reason, version)

    def _leave_trial(self, engine: str) -> None:
        if self._trial is not None:
            self._trial.forget(engine)

    def _give_up(self, now: Context, engine: str, reason: str) -> None:
        life = self._lives[engine]
        self._leave_trial(engine)
        life.phase = "given_up"
        life.serial = next(self._serials)
        self._outbox.unavailable.append(EngineUnavailable(engine, final=True))
        self._outbox.commands.append(StepCommand(engine, "quarantine", self._version, reason))
        if life.was_up or self._settings.insist:
            after = int(self._settings.revive_s * SECOND)
            now.schedule(self.relaunch, Relaunch(engine, life.serial), after=after)

    def _stop(self, now: Context, engine: str, reason: str, version: int | None = None) -> None:
        self._lives[engine].phase = "stopping"
        self._begin_step(now, engine, "stop", reason, self._settings.stop_s, version)

    def _launch(self, now: Context, engine: str, reason: str) -> None:
        life = self._lives[engine]
        life.phase = "launching"
        self._begin_step(now, engine, "launch", reason, self._settings.start_s)
        life.started = life.version

    def _begin_sleep(self, now: Context, engine: str, reason: str) -> None:
        self._lives[engine].phase = "falling_asleep"
        self._begin_step(now, engine, "sleep", reason, self._settings.sleep_s)

    def _mark_asleep(self, engine: str) -> None:
        life = self._lives[engine]
        life.phase, life.serial = "asleep", next(self._serials)
        self._asleep.append(Asleep(engine, life.warm))

    def _wake(self, now: Context, engine: str, reason: str) -> None:
        if self._lives[engine].warm:
            self._lives[engine].phase = "waking"
            self._begin_step(now, engine, "wake", reason, self._settings.wake_s)
        else:
            self._launch(now, engine, reason)

    def _forget(self, engine: str) -> None:
        """Forget a removed engine, and free what it held."""
        del self._lives[engine]
        self._unlent.discard(engine)
        self._paused.discard(engine)
        self._asleep.append(Asleep(engine, warm=False))

    def _begin_step(
        self,
        now: Context,
        engine: str,
        step: Step,
        reason: str,
        deadline_s: float,
        version: int | None = None,
    ) -> None:
        """`version`: what the step is about, if it is not what engines are launched with."""
        if version is None:
            version = self._launch_version(engine)
        life = self._lives[engine]
        life.version, life.serial = version, next(self._serials)
        self._outbox.commands.append(StepCommand(engine, step, version, reason))
        now.schedule(
            self.step_timeout, StepTimeout(engine, step, life.serial), after=int(deadline_s * SECOND)
        )

    def _launch_version(self, engine: str) -> int:
        if self._canary is not None and engine not in self._canary.engines:
            return self._canary.live
        return self._version if self._trial is None else self._trial.launch_version

    def _backoff(self, life: _Lifecycle) -> int:
        exponent = len(life.restarts) - 2
        return int(self._settings.backoff_s * 2**exponent * SECOND) if exponent >= 0 else 0
