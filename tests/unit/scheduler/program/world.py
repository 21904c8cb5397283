"""A world for the control program, in virtual time: engines that do a step in the time that a test sets, fail it, or are silent.

Plays the gateway's part (`gateway.control.host`): one step an engine at a time, a new one ends the last, each end is sent as a
`Done`. Every decision of the program is written down as a line ("12 a hold 1": at second 12), and watched (`watch.py`).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from scheduler.program import ControlProgram
from scheduler.program.calls import Closed, Opened, Snapshot
from scheduler.program.events import (
    Added,
    EngineLost,
    Published,
    Removed,
    Started,
    StepCommand,
    StepResult,
    Target,
    UpdateResult,
)
from scheduler.program.nodes import Claimed, Filling, Hosted, NodeAdded, Released, RoleChange, Wanted
from scheduler.reactor import SECOND, Limit, Recording, Runtime, Tag, VirtualClock, replay
from scheduler.reactor.elements import PhysicalAction
from tests.unit.scheduler.program.watch import FLEET_STEPS, Node, Watch

T = TypeVar("T")

MODEL = "actor"
FLEET = {
    "start_s": 8,
    "stop_s": 5,
    "drain_s": 4,
    "max_restarts": 2,
    "window_s": 60,
    "backoff_s": 3,
    "revive_s": 30,
    "sleep_s": 5,
    "wake_s": 7,
}
UPDATE = {"mode": "abort", "order": "rolling", "hold_s": 4, "load_s": 9, "probe_s": 6, "resume_s": 3}

LENDING = {"margin_s": 1, "min_stay_s": 2, "deadline_s": 11, "claim_s": 50, "smooth_s": 10}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one step of an engine."""

    ok: bool = True
    after_s: int | None = 1
    """None: it never responds."""
    pinned: int = 0
    stubborn: bool = False
    """The result comes also when it is no longer awaited."""
    excused: bool = False
    """Where it fails, the version did not reach it."""


@dataclass(slots=True)
class _Step:
    do: StepCommand
    outcome: Outcome
    ends: int | None


@dataclass(slots=True)
class _Late:
    """The response to a step that something else followed."""

    ends: int
    done: StepResult


class _Kept(io.BytesIO):
    """A file that can be read after it was closed."""

    def close(self) -> None:
        """Nothing to do."""


@dataclass(slots=True)
class World:
    """One model and its engines. Times are whole seconds."""

    outcome: Callable[[StepCommand], Outcome] = field(default=lambda do: Outcome())
    fleet: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    lending: dict[str, Any] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    """On which node engines live; each has both tags."""
    ends_first: bool = True
    """Puts a response and a deadline of one time at one tag; otherwise the deadline's tag comes first."""
    lines: list[str] = field(default_factory=list)
    watch: Watch = field(init=False)
    _runtime: Runtime = field(init=False)
    _clock: VirtualClock = field(default_factory=VirtualClock)
    size: int = sys.maxsize
    """The size of a file of the recording that is full."""
    _files: list[_Kept] = field(default_factory=list)
    _recording: Recording = field(init=False)
    _program: ControlProgram = field(init=False)
    _steps: dict[str, _Step] = field(default_factory=dict)
    _late: list[_Late] = field(default_factory=list)
    _ended: list[StepResult] = field(default_factory=list)
    _wanted: tuple[Wanted, ...] = ()
    """Sent at the last tag: the fleet receives it at the next, and so does the watch."""

    def __post_init__(self) -> None:
        self.fleet, self.update = {**FLEET, **self.fleet}, {**UPDATE, **self.update}
        self.lending = {**LENDING, **self.lending}
        settings = {"models": {MODEL: {"fleet": self.fleet, "update": self.update}}, "lending": self.lending}
        self.watch = Watch(self.fleet, self.update, self.lending)
        self._program = ControlProgram(settings)
        self._recording = Recording(self._new_file(), settings, Limit(self.size), self._new_file)
        self._runtime = Runtime(self._program, self._clock, self._recording)
        fleet, update = self._program.fleets[MODEL], self._program.updates[MODEL]
        self._runtime.observe(update.target, self._on_target)
        for reactor in (fleet, update):
            self._runtime.observe(reactor.commands, self._on_commands)
        self._runtime.observe(update.ended, self._on_ended)
        self._runtime.observe(self._program.lending.wanted, self._on_wanted)
        self._runtime.observe(self._program.lending.roles, self._on_roles)
        self._runtime.start()
        self._runtime.inject(fleet.started, Started(0))
        self._runtime.inject(update.started, Started(0))
        self._runtime.inject(self._program.placements[MODEL].started, Started(0))
        for node in sorted(set(self.homes.values())):
            self.watch.nodes[node] = Node({e for e, home in self.homes.items() if home == node})
            self._runtime.inject(self._program.lending.added, NodeAdded(node, ("rollout", "train")))
        self._advance()

    @property
    def now(self) -> int:
        """Seconds."""
        return self._clock.now() // SECOND

    # What happens

    def add(self, *engines: str) -> World:
        """Each is added, at this moment."""
        for engine in engines:
            if engine in self.homes and engine not in self.watch.engines:
                self._happens(self._program.lending.hosted, Hosted(engine, self.homes[engine]))
            observe = partial(self.watch.added, engine)
            self._happens(self._program.fleets[MODEL].added, Added(engine), observe)
        return self

    def remove(self, engine: str) -> World:
        """Remove an engine that is no longer wanted."""
        observe = partial(self.watch.removed, self.now, engine)
        self._happens(self._program.fleets[MODEL].removed, Removed(engine), observe)
        return self

    def lose(self, engine: str, reason: str = "it died") -> World:
        """Lose an engine that died."""
        observe = partial(self.watch.lost, self.now, engine)
        self._happens(self._program.fleets[MODEL].lost, EngineLost(engine, reason), observe)
        return self

    def pause(self, engine: str) -> World:
        """Have a person pause an engine."""
        return self._request(Wanted(engine, awake=False, reason="a person has paused it"))

    def resume(self, engine: str) -> World:
        """Have a person resume an engine."""
        return self._request(Wanted(engine, awake=True, reason="a person has resumed it"))

    def _request(self, request: Wanted) -> World:
        observe = partial(self.watch.wanted, self.now, request, "person")
        self._happens(self._program.fleets[MODEL].requested, request, observe)
        return self

    def claim(self, *nodes: str) -> World:
        """Their trainer wants them, or still has them."""
        for node in nodes:
            observe = partial(self.watch.claimed, self.now, node)
            self._happens(self._program.lending.claimed, Claimed(node, MODEL), observe)
        return self

    def release(self, *nodes: str, busy_s: float = 0.0, load_s: float = 0.0) -> World:
        """Their trainer waits; it computed for so long, and its weights had taken so long to come back."""
        for node in nodes:
            observe = partial(self.watch.released, node)
            self._happens(self._program.lending.released, Released(node, MODEL, busy_s, load_s), observe)
        return self

    def fill(self, groups: int, running: int = 9, batch: int = 0, size: int = 10, ahead: int = 0) -> World:
        """Report the fill of the batch and of later ones."""
        self._happens(self._program.lending.filling, Filling(MODEL, batch, groups, size, running, ahead))
        return self

    def publish(self, *versions: int) -> World:
        """Each is published, at this moment."""
        for version in versions:
            self.watch.published.append(version)
            self._happens(self._program.updates[MODEL].published, Published(version))
        return self

    def _happens(
        self, action: PhysicalAction[T], value: T, observe: Callable[[], None] = lambda: None
    ) -> None:
        """The program receives it, and so does the watch; what follows at the next tag is left, to meet the next event."""
        tag = self._runtime.inject(action, value)
        while self._runtime._tags[0] < tag:
            self._step()
        self._forward_wanted()
        observe()
        assert self._step()

    def _step(self) -> bool:
        self._forward_wanted()
        return self._runtime.step()

    def _advance(self) -> None:
        while self._step():
            pass

    def _forward_wanted(self) -> None:
        sent, self._wanted = self._wanted, ()
        for wanted in sent:
            self.watch.wanted(self.now, wanted)

    def run(self, seconds: int = 0) -> World:
        """Lets time pass; what is due now is done in any case."""
        until = self._clock.now() + seconds * SECOND
        self._settle()
        while (due := self._next()) is not None and due <= until:
            self._clock.advance_to(due)
            self._settle()
        self._clock.advance_to(until)
        return self

    def repeat_results(self) -> None:
        """Send every result again, but those of pending steps. Nothing may follow."""
        self.run()
        for done in self._ended:
            self._send_late(done)

    def story(self) -> list[str]:
        """The lines since the last call."""
        lines, self.lines[:] = list(self.lines), []
        return lines

    def recorded(self) -> list[str]:
        """Ends the run: the lines of all files of its recording."""
        self._recording.close()
        return b"".join(file.getvalue() for file in self._files).decode().splitlines()

    def _new_file(self) -> _Kept:
        self._files.append(_Kept())
        return self._files[-1]

    def check_replay(self) -> None:
        """Ends the run, and replays it."""
        report = replay(self.recorded(), ControlProgram)
        assert report.difference is None
        assert not report.graph_changed

    # Time

    def _next(self) -> int | None:
        """The time of the next event. With `pull`, placement is also evaluated every second."""
        due = self._soonest()
        if self.update["order"] != "pull":
            return due
        second = (self.now + 1) * SECOND
        return second if due is None else min(second, due)

    def _soonest(self) -> int | None:
        ends = [step.ends for step in self._steps.values() if step.ends is not None]
        ends += [late.ends for late in self._late]
        due = self._runtime.next_time()
        return min([*ends, due] if due is not None else ends, default=None)

    def _settle(self) -> None:
        """Does what is due now, until nothing is."""
        if not self.ends_first:
            self._advance()
        while self._outcome_due():
            self._advance()
        self._advance()
        if self.update["order"] == "pull":
            self._happens(self._program.placements[MODEL].snapshot, Snapshot(()))
            self._advance()
        while self._outcome_due():
            self._advance()
        for late in [late for late in self._late if late.ends <= self._clock.now()]:
            self._late.remove(late)
            self._send_late(late.done)
        self.watch.passed(self.now)

    def _outcome_due(self) -> bool:
        """Send the result of every step that ends now, one after the other. Return whether there was one.

        The watch receives each when the program does: what that decides on one result, or on a deadline, may end a step before
        its own result arrives.
        """
        now = self._clock.now()
        due = [step for step in self._steps.values() if step.ends is not None and step.ends <= now]
        for step in due:
            self._send(step)
        return bool(due)

    def _send(self, step: _Step) -> None:
        done = _done(step)
        if self._steps.get(done.engine) is step:
            del self._steps[done.engine]
            self._ended.append(done)
            self._happens(self._hears(done), done, partial(self._ends, done))
        # Later than the response, which may be due at the time of its deadline
        if done.ok and done.step == "open":
            self._happens(self._program.placements[MODEL].opened, Opened(done.engine, done.version))

    def _ends(self, done: StepResult) -> None:
        """Unless it crosses a decision."""
        engine = self.watch.engines.get(done.engine)
        if engine is not None and (engine.pending, engine.to) == (done.step, done.version):
            self.watch.done(self.now, done)

    def _send_late(self, done: StepResult) -> None:
        pending = self._steps.get(done.engine)
        key = (done.step, done.version)
        if pending is not None and (pending.do.step, pending.do.version) == key:
            return  # the gateway never has two such: a step is begun when the last has ended
        before = list(self.lines)
        self._happens(self._hears(done), done)
        self._advance()
        assert self.lines == before, f"{done} changed something"

    def _hears(self, done: StepResult) -> PhysicalAction[StepResult]:
        fleet, update = self._program.fleets[MODEL], self._program.updates[MODEL]
        return fleet.step_result if done.step in FLEET_STEPS else update.step_result

    # What is decided

    def _on_commands(self, _tag: Tag, commands: tuple[StepCommand, ...]) -> None:
        for do in commands:
            self.lines.append(f"{self.now} {do.engine} {do.step} {do.version}")
            self.watch.do(self.now, do)
            self._begin(do)

    def _begin(self, do: StepCommand) -> None:
        if do.step in ("hold", "drain", "stop", "quarantine"):
            self._runtime.inject(self._program.placements[MODEL].closed, Closed(do.engine))
        before = self._steps.pop(do.engine, None)
        if before is not None and before.ends is not None and before.outcome.stubborn:
            self._late.append(_Late(before.ends, _done(before)))
        if do.step != "quarantine":
            outcome = self.outcome(do)
            ends = None if outcome.after_s is None else self._clock.now() + outcome.after_s * SECOND
            self._steps[do.engine] = _Step(do, outcome, ends)

    def _on_wanted(self, _tag: Tag, wanted: tuple[Wanted, ...]) -> None:
        self._wanted += wanted

    def _on_roles(self, _tag: Tag, roles: tuple[RoleChange, ...]) -> None:
        for role in roles:
            self.lines.append(f"{self.now} {role.node} is {role.role}")
            self.watch.role(role)

    def _on_target(self, _tag: Tag, target: Target) -> None:
        self.watch.target(self.now, target)

    def _on_ended(self, _tag: Tag, ended: UpdateResult) -> None:
        failures = f" ({', '.join(ended.failures)} given up)" if ended.failures else ""
        became = "live" if ended.live else "bad" if ended.bad else "failed"
        self.lines.append(f"{self.now} version {ended.version} {became}{failures}")
        self.watch.ended(ended)


def _done(step: _Step) -> StepResult:
    do, outcome = step.do, step.outcome
    pinned = outcome.pinned if do.step == "hold" else 0
    why = "" if outcome.ok else "it cannot"
    return StepResult(do.engine, do.step, do.version, outcome.ok, why, pinned, outcome.excused)
