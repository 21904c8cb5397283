"""Invariants of the control program's output, checked at every decision.

Written from the design (Weights): knows the commands and their results, and nothing of the program's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scheduler.program.events import Step, StepCommand, StepResult, Target, UpdateResult
from scheduler.program.nodes import RoleChange, Wanted

FLEET_STEPS = ("launch", "stop", "drain", "sleep", "wake")
_REST = ("load", "label", "resume", "probe", "open")
_FRESH = ("launch", "label", "probe", "open")
_WITH_WEIGHTS = ("launch", "wake", *_REST)
"""Steps that involve the weights that an engine loads."""
_ROUTES = {
    ("abort", False): ("hold", "abort", "settle", *_REST),
    ("abort", True): ("hold", "handback", "freeze", *_REST),
    ("keep", False): ("hold", "freeze", *_REST),
    ("keep", True): ("hold", "freeze", *_REST),
}
_LIMITS = {
    "launch": "start_s",
    "wake": "wake_s",
    "sleep": "sleep_s",
    "stop": "stop_s",
    "drain": "drain_s",
    "load": "load_s",
    "label": "resume_s",
    "resume": "resume_s",
    "probe": "probe_s",
}


@dataclass(slots=True)
class _Engine:
    """An engine, as its commands and their results show it."""

    process: str = "none"
    """none, launching, up, stopping, stopped, falling, asleep, waking."""
    way: tuple[Step, ...] = ()
    """Steps that have ended since the last launch or hold."""
    to: int = -1
    pinned: bool = False
    started: int = -1
    """The version that its process was started with."""
    runs: int = -1
    """The version it is open at; -1: it is not open."""
    pending: Step | None = None
    since: int = 0
    was_up: bool = False
    stopped: int = 0
    restarts: list[int] = field(default_factory=list)
    given_up: int | None = None
    """When, if no update waits for it any more."""
    down: bool = False
    """Given up, and not yet tried again."""
    removed: int | None = None
    lost: int = -1
    refused: set[str] = field(default_factory=set)
    """The sides that want it asleep: `node` and `person`; it may be awake once neither does."""
    unwanted_since: int = -1
    """When that was requested, or taken back, last."""
    sleeps: bool = False
    """Since it was unwanted it has been neither launched nor woken, nor was that tried in vain."""

    @property
    def unwanted(self) -> bool:
        """True if it should sleep."""
        return bool(self.refused)


@dataclass(slots=True)
class Node:
    """A node, by its reported roles."""

    engines: set[str] = field(default_factory=set)
    claimed: int | None = None
    """Since when it is claimed."""
    role: str = "idle"
    claimable: bool = False
    """Its trainer may claim it before its batch is whole."""


class Watch:
    """Engines by name; `published` and `ends` are the versions, in order."""

    def __init__(self, fleet: dict[str, Any], update: dict[str, Any], lending: dict[str, Any]) -> None:
        self.engines: dict[str, _Engine] = {}
        self.nodes: dict[str, Node] = {}
        self._early: set[str] = set()
        """Engines that should sleep and do not exist yet."""
        self._lending = lending
        self._contradicted = False
        """An engine has failed with the newest version."""
        self.published: list[int] = []
        self.ends: list[UpdateResult] = []
        self.failures = 0
        """Steps that failed or were late, and engines that died, were removed or were paused."""
        self._limits: dict[str, int] = {**fleet, **update}
        self._update = update
        self._newest = 0
        self._live = 0
        """The newest version that any engine was open at, or that was live while all slept."""
        self._doubters: list[str] = []
        """Those of `_tried` that failed once more in a process that was started with it, and not with the live one as well."""
        self._tried: set[str] = set()
        """Engines that failed with the newest version, while no engine was open at it."""
        self._bad = -1
        self._excused: set[str] = set()
        """Engines that may be stopped at no cost: they failed with a version on trial, or are on their way to a bad one."""
        self._began = -1
        self._up_at_begin: set[str] = set()
        self._open_at_begin = 0
        self._failures_at_begin = 0
        self._moving: set[str] = set()

    # What happens

    def added(self, engine: str) -> None:
        """Nothing changes where one of that name is there."""
        fresh = _Engine()
        fresh.sleeps = engine in self._early
        fresh.refused |= {"node"} if fresh.sleeps else set()
        self._early.discard(engine)
        self.engines.setdefault(engine, fresh)

    def removed(self, now: int, engine: str) -> None:
        found = self.engines.get(engine)
        self.failures += 1
        self._no_doubter(engine)
        if found is not None and found.removed is None:
            found.removed, found.runs = now, -1
            self._moving.discard(engine)

    def lost(self, now: int, engine: str) -> None:
        """Record the loss of an engine; it may be restarted."""
        self.failures += 1
        if (found := self.engines.get(engine)) is not None:
            found.lost = now
            if found.pending in ("launch", "wake"):
                self._fails(engine, found, found.pending, found.to)

    def wanted(self, now: int, wanted: Wanted, who: str = "node") -> None:
        """Check an order for an engine to sleep or to be awake."""
        engine = self.engines.get(wanted.engine)
        if engine is None and who == "node":
            (self._early.discard if wanted.awake else self._early.add)(wanted.engine)
        if engine is None or engine.removed is not None:
            return
        self.failures += who == "person"  # the others may not have been ordered to stay open for it
        before = engine.unwanted
        (engine.refused.discard if wanted.awake else engine.refused.add)(who)
        if engine.unwanted and not before:
            engine.sleeps, engine.runs, engine.given_up = True, -1, None
            self._moving.discard(wanted.engine)
            self._no_doubter(wanted.engine)
        if engine.unwanted is not before:
            engine.unwanted_since = now

    def claimed(self, now: int, node: str) -> None:
        """Record a claim by the node's trainer."""
        self.nodes[node].claimed = now if self.nodes[node].claimed is None else self.nodes[node].claimed

    def released(self, node: str) -> None:
        """Record a release by the node's trainer."""
        self.nodes[node].claimed = None

    def role(self, change: RoleChange) -> None:
        """Check a node's new role: `rollout` only while it is unclaimed, `train` only while it is claimed."""
        node = self.nodes[change.node]
        node.role, node.claimable = change.role, change.claimable
        assert change.reason
        assert change.role != "rollout" or node.claimed is None
        assert change.role != "train" or node.claimed is not None
        assert not change.claimable or (change.role in ("idle", "switching") and node.claimed is None)

    def done(self, now: int, done: StepResult) -> None:
        """Check and apply the result of a step."""
        engine = self.engines[done.engine]
        assert (engine.pending, engine.to) == (done.step, done.version)
        engine.pending = None
        self.failures += not done.ok
        if not done.ok:
            self._fails(done.engine, engine, done.step, -1 if done.excused else done.version)
        failed = not done.ok and not done.excused
        self._contradicted |= failed and done.step in ("load", "probe") and done.version == self._newest
        if done.step == "stop":
            engine.process, engine.stopped = "stopped", now
            if engine.removed is not None:
                del self.engines[done.engine]
        elif done.ok:
            engine.way += (done.step,)
            if done.step == "launch":
                engine.process, engine.was_up, engine.given_up = "up", True, None
                engine.sleeps = False
            if done.step == "sleep":
                engine.process = "asleep" if engine.was_up else "none"
            if done.step == "wake":
                engine.process, engine.way = "up", ("launch",)
                engine.sleeps = False
            engine.pinned = done.pinned > 0 if done.step == "hold" else engine.pinned
            if done.step == "open":
                engine.runs = done.version
                self._moving.discard(done.engine)
                self._opens(done.engine, done.version)

    def target(self, now: int, target: Target) -> None:
        """An update begins: the last one has ended, and engines that were given up get another chance."""
        assert target.version == self.published[len(self.ends)]
        self._newest, self._began, self._contradicted = target.version, now, False
        self._bad = -1
        self._doubters, self._excused, self._tried = [], set(), set()
        self._moving = set()
        self._up_at_begin = {name for name, engine in self.engines.items() if engine.process == "up"}
        self._open_at_begin = sum(engine.runs >= 0 for engine in self.engines.values())
        self._failures_at_begin = self.failures

    def ended(self, ended: UpdateResult) -> None:
        """Once for each version, in order; and then no engine is left behind. A failed version may be live after all."""
        self._live = max(self._live, ended.version) if ended.live else self._live
        assert bool(ended.bad) == (ended.version == self._bad)
        if len(self.ends) == len(self.published):
            last = max(i for i, known in enumerate(self.ends) if known.version == ended.version)
            assert (self.ends[last].live, ended.version) == (False, self._newest)
            assert ended.live or ended.bad
            self.ends[last] = ended
        else:
            assert ended.version == self.published[len(self.ends)]
            self.ends.append(ended)
        left = [engine for engine in self.engines.values() if engine.removed is None]
        runs = any(engine.runs == ended.version for engine in left)
        sleeps = any(engine.sleeps for engine in left) and not self._contradicted
        # an older one fails immediately, also where engines that were not ordered to pull run it
        assert ended.live == (ended.version == self._newest and not ended.bad and (runs or sleeps))
        if ended.bad:
            assert not runs
            return
        for engine in left:
            comes = engine.process in ("launching", "up") and engine.to >= ended.version
            comes = comes or engine.sleeps or engine.process in ("stopping", "stopped")
            if ended.live and self._update["order"] == "pull":
                continue  # the others load it when they are ordered to
            if ended.live:
                assert engine.given_up is not None or comes
            else:
                assert engine.given_up is not None or engine.sleeps or ended.version < self._newest

    def passed(self, now: int) -> None:
        """All that was to happen until now has happened: no deadline was missed in silence, and no claim was left unserved."""
        for name, node in self.nodes.items():
            if node.claimed is not None:
                ended = node.role == "train"
                assert ended or now < node.claimed + self._lending["deadline_s"], f"{name} is waited for"
            here = [engine for name, engine in self.engines.items() if name in node.engines]
            if node.claimable:
                assert all(engine.unwanted for engine in here if engine.removed is None)
            if node.role == "train":
                assert all(engine.runs == -1 for engine in here)
                assert all(engine.process not in ("launching", "waking") for engine in here)
        for name, engine in self.engines.items():
            if engine.pending is not None:
                assert now < engine.since + self._limit(engine.pending), f"{name} was forgotten"
            if engine.removed is not None:
                assert engine.pending in ("drain", "stop")
                longest = self._limits["drain_s"] + self._limits["stop_s"]
                assert now < engine.removed + longest, f"{name} is still there"

    # Versions on trial: published, and no engine was open at them yet

    @property
    def _on_trial(self) -> bool:
        return self._newest > self._live and self._newest != self._bad

    @property
    def _given(self) -> int:
        """The version that engines are to be launched with."""
        return self._newest if self._newest != self._bad and not self._doubters else self._live

    def _fails(self, name: str, engine: _Engine, step: Step, version: int) -> None:
        """An engine cannot do a step, in time."""
        if not self._on_trial or step not in _WITH_WEIGHTS:
            return
        if version == self._live:
            self._no_doubter(name)
        if version == self._newest:
            self._excused.add(name)
            if engine.started == version and name in self._tried and name not in self._doubters:
                self._doubters.append(name)
            self._tried.add(name)

    def _opens(self, name: str, version: int) -> None:
        if self._on_trial and version == self._live and name in self._doubters:
            self._found_bad()
        elif version == self._newest != self._bad:
            self._live, self._doubters, self._excused = version, [], set()

    def _found_bad(self) -> None:
        self._bad = self._newest
        self._doubters = []
        for engine in self.engines.values():
            engine.restarts = [at for at in engine.restarts if at < self._began]
        self._excused |= {
            name
            for name, engine in self.engines.items()
            if engine.pending not in (None, "stop") and engine.to == self._bad
        }

    def _no_doubter(self, name: str) -> None:
        if name in self._doubters:
            self._doubters.remove(name)

    # What is decided

    def do(self, now: int, do: StepCommand) -> None:
        """Check and apply a command."""
        engine = self.engines[do.engine]
        assert engine.pending != "stop" or do.step == "quarantine", "nothing cuts a stop short"
        if do.step in ("stop", "quarantine"):
            self._check_reason(now, engine, do)
        if engine.removed is not None:
            at_once = ("sleep", "wake", "launch") if engine.removed == now == engine.unwanted_since else ()
            assert do.step in ("drain", "stop", "quarantine", *at_once)  # `passed`: which was the last
        match do.step:
            case "launch":
                assert do.version == self._given
                self._check_free(now, do.engine)
                self._launch(now, engine)
                engine.started = do.version
            case "wake":
                assert engine.process == "asleep"
                assert do.version == self._given
                self._check_free(now, do.engine)
                engine.process, engine.way = "waking", ()
            case "sleep":
                assert engine.process in ("none", "up", "waking")
                engine.process, engine.way, engine.runs = "falling", (), -1
            case "stop":
                self._stop(now, do.engine, engine)
            case "quarantine":
                self._quarantine(now, do.engine, engine)
            case "drain":
                assert engine.removed == now
            case _:
                self._update_step(do, engine)
        if do.step != "quarantine" and do.engine in self.engines:
            engine.pending, engine.since, engine.to = do.step, now, do.version

    def _check_reason(self, now: int, engine: _Engine, do: StepCommand) -> None:
        """The reason of a command that ends a late step names the step."""
        assert do.reason
        if engine.pending is None or now < engine.since + self._limit(engine.pending):
            return
        if engine.removed is None or engine.pending in FLEET_STEPS:
            self.failures += 1
            limit = f"step '{engine.pending}' was not done within {self._limit(engine.pending)} s"
            unwanted = engine.unwanted and engine.unwanted_since == now
            if limit in do.reason:
                self._fails(do.engine, engine, engine.pending, engine.to)
                late = engine.pending in ("load", "probe") and engine.to == self._newest
                self._contradicted |= late
            assert limit in do.reason or engine.lost == now or unwanted

    def _check_free(self, now: int, engine: str) -> None:
        """Nothing wakes while a trainer has the node."""
        for node in self.nodes.values():
            assert engine not in node.engines or node.claimed in (None, now)

    def _launch(self, now: int, engine: _Engine) -> None:
        assert engine.process in ("none", "stopped")
        if engine.process == "stopped" and not engine.sleeps:
            earlier = len(engine.restarts) - 2
            wait = self._limits["backoff_s"] * 2**earlier if earlier >= 0 else 0
            assert now == engine.stopped + wait
        engine.process, engine.way, engine.runs = "launching", (), -1

    def _stop(self, now: int, name: str, engine: _Engine) -> None:
        if engine.removed is None and (engine.unwanted or engine.process in ("falling", "asleep")):
            if engine.down and now == self._began:  # a new version gives it another chance at the same moment
                engine.restarts.clear()
            engine.down, engine.given_up = False, None
        elif engine.removed is None:
            assert engine.process in ("launching", "waking", "up", "stopping", "none")
            if engine.down:
                assert engine.given_up is not None
                assert now in (engine.given_up + self._limits["revive_s"], self._began)
                if now == self._began:
                    engine.restarts.clear()
                    engine.given_up = None
                engine.down = False
            elif name in self._excused:
                engine.sleeps = False
            else:
                self._prune(now, engine)
                assert engine.was_up
                assert len(engine.restarts) < self._limits["max_restarts"]
                engine.restarts.append(now)
                engine.sleeps = False  # it was to be awake
        self._excused.discard(name)
        engine.process, engine.way, engine.runs = "stopping", (), -1

    def _quarantine(self, now: int, name: str, engine: _Engine) -> None:
        if engine.removed is not None:
            assert engine.pending == "stop"
            del self.engines[name]
            return
        if engine.pending == "stop" and engine.unwanted:
            engine.process, engine.stopped, engine.pending = "stopped", now, None
            return
        if engine.pending != "stop":
            self._prune(now, engine)
            assert not engine.was_up or len(engine.restarts) >= self._limits["max_restarts"]
        engine.given_up, engine.down, engine.runs, engine.pending = now, True, -1, None
        engine.sleeps = False  # it was to be awake
        self._moving.discard(name)
        self._no_doubter(name)

    def _update_step(self, do: StepCommand, engine: _Engine) -> None:
        assert engine.process == "up"
        if do.step == "hold":
            assert engine.pending is None
            assert 0 <= engine.runs < do.version
            assert not self._doubters, "no engine tries what another is going back from"
            assert do.version != self._bad
            engine.way, engine.runs, engine.to = (), -1, do.version
            self._moving.add(do.engine)
            if self._update["order"] == "rolling":
                self._check_rolling()
        assert do.version == engine.to
        route = _FRESH if engine.way[:1] == ("launch",) else _ROUTES[self._update["mode"], engine.pinned]
        assert (*engine.way, do.step) == route[: len(engine.way) + 1]

    def _check_rolling(self) -> None:
        assert len(self._moving & self._up_at_begin) <= 1
        if self._open_at_begin > 1 and self.failures == self._failures_at_begin:
            assert any(engine.runs >= 0 for engine in self.engines.values())

    def _prune(self, now: int, engine: _Engine) -> None:
        since = now - self._limits["window_s"]
        engine.restarts = [at for at in engine.restarts if at > since]

    def _limit(self, step: Step) -> int:
        return self._limits[_LIMITS.get(step, "hold_s")]
