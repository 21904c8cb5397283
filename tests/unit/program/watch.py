"""What must hold of whatever the control program says, checked at every word of it.

Written from the design (Weights): knows what was asked and answered, and nothing of the program's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scheduler.program.events import Do, Done, Ended, Step, Target

FLEET_STEPS = ("launch", "stop", "drain")
_REST = ("load", "label", "resume", "probe", "open")
_FRESH = ("launch", "label", "probe", "open")
_ROUTES = {
    ("abort", False): ("hold", "abort", "settle", *_REST),
    ("abort", True): ("hold", "handback", "freeze", *_REST),
    ("keep", False): ("hold", "freeze", *_REST),
    ("keep", True): ("hold", "freeze", *_REST),
}
_LIMITS = {
    "launch": "start_s",
    "stop": "stop_s",
    "drain": "drain_s",
    "load": "load_s",
    "label": "resume_s",
    "resume": "resume_s",
    "probe": "probe_s",
}


@dataclass(slots=True)
class _Engine:
    """An engine, as somebody sees it who hears what is asked and answered."""

    process: str = "none"
    """none, launching, up, stopping, stopped."""
    way: tuple[Step, ...] = ()
    """Steps that have ended since the last launch or hold."""
    to: int = -1
    pinned: bool = False
    runs: int = -1
    """The version it is open at; -1: it is not open."""
    asked: Step | None = None
    since: int = 0
    was_up: bool = False
    stopped: int = 0
    restarts: list[int] = field(default_factory=list)
    given_up: int | None = None
    """When, if nobody waits for it any more."""
    down: bool = False
    """Given up, and not yet tried again."""
    removed: int | None = None
    lost: int = -1


class Watch:
    """Engines by name; `published` and `ends` are the versions, in order."""

    def __init__(self, fleet: dict[str, Any], update: dict[str, Any]) -> None:
        self.engines: dict[str, _Engine] = {}
        self.published: list[int] = []
        self.ends: list[Ended] = []
        self.failures = 0
        """Steps that failed or were late, and engines that died or were removed."""
        self._limits: dict[str, int] = {**fleet, **update}
        self._update = update
        self._newest = 0
        self._began = -1
        self._up_at_begin: set[str] = set()
        self._open_at_begin = 0
        self._failures_at_begin = 0
        self._moving: set[str] = set()

    # What happens

    def added(self, engine: str) -> None:
        """Nothing changes where one of that name is there."""
        self.engines.setdefault(engine, _Engine())

    def removed(self, now: int, engine: str) -> None:
        """See `passed`."""
        found = self.engines.get(engine)
        self.failures += 1
        if found is not None and found.removed is None:
            found.removed, found.runs = now, -1
            self._moving.discard(engine)

    def lost(self, now: int, engine: str) -> None:
        """It may be restarted for that."""
        self.failures += 1
        if engine in self.engines:
            self.engines[engine].lost = now

    def done(self, now: int, done: Done) -> None:
        """An answer to what is asked."""
        engine = self.engines[done.engine]
        assert (engine.asked, engine.to) == (done.step, done.version)
        engine.asked = None
        self.failures += not done.ok
        if done.step == "stop":
            engine.process, engine.stopped = "stopped", now
            if engine.removed is not None:
                del self.engines[done.engine]
        elif done.ok:
            engine.way += (done.step,)
            if done.step == "launch":
                engine.process, engine.was_up, engine.given_up = "up", True, None
            engine.pinned = done.pinned > 0 if done.step == "hold" else engine.pinned
            if done.step == "open":
                engine.runs = done.version
                self._moving.discard(done.engine)

    def target(self, now: int, target: Target) -> None:
        """An update begins: the last one has ended, and engines that were given up get another chance."""
        assert target.version == self.published[len(self.ends)]
        self._newest, self._began = target.version, now
        self._moving = set()
        self._up_at_begin = {name for name, engine in self.engines.items() if engine.process == "up"}
        self._open_at_begin = sum(engine.runs >= 0 for engine in self.engines.values())
        self._failures_at_begin = self.failures

    def ended(self, ended: Ended) -> None:
        """Once for each version, in order; and then nobody is left behind. A failed version may be live after all."""
        if len(self.ends) == len(self.published):
            last = max(i for i, known in enumerate(self.ends) if known.version == ended.version)
            assert (self.ends[last].live, ended.live, ended.version) == (False, True, self._newest)
            self.ends[last] = ended
        else:
            assert ended.version == self.published[len(self.ends)]
            self.ends.append(ended)
        left = [engine for engine in self.engines.values() if engine.removed is None]
        assert ended.live == any(engine.runs == ended.version for engine in left)
        for engine in left:
            comes = engine.process in ("stopping", "stopped")
            comes = comes or (engine.process in ("launching", "up") and engine.to >= ended.version)
            if ended.live:
                assert engine.given_up is not None or comes
            else:
                assert engine.given_up is not None or ended.version < self._newest

    def passed(self, now: int) -> None:
        """All that was to happen until now has happened: no deadline was missed in silence."""
        for name, engine in self.engines.items():
            if engine.asked is not None:
                assert now < engine.since + self._limit(engine.asked), f"{name} was forgotten"
            if engine.removed is not None:
                longest = self._limits["drain_s"] + self._limits["stop_s"]
                assert now < engine.removed + longest, f"{name} is still there"

    # What is decided

    def do(self, now: int, do: Do) -> None:
        """A step is asked for."""
        engine = self.engines[do.engine]
        assert engine.asked != "stop" or do.step == "quarantine", "nothing cuts a stop short"
        if do.step in ("stop", "quarantine"):
            self._check_reason(now, engine, do)
        if engine.removed is not None:
            assert do.step in ("drain", "stop", "quarantine")
        match do.step:
            case "launch":
                assert do.version == self._newest
                self._launch(now, engine)
            case "stop":
                self._stop(now, engine)
            case "quarantine":
                self._quarantine(now, do.engine, engine)
            case "drain":
                assert engine.removed == now
            case _:
                self._update_step(do, engine)
        if do.step != "quarantine" and do.engine in self.engines:
            engine.asked, engine.since, engine.to = do.step, now, do.version

    def _check_reason(self, now: int, engine: _Engine, do: Do) -> None:
        """Whatever ends a late step says so."""
        assert do.reason
        if engine.asked is None or now < engine.since + self._limit(engine.asked):
            return
        if engine.removed is None or engine.asked in FLEET_STEPS:
            self.failures += 1
            limit = f"step '{engine.asked}' was not done within {self._limit(engine.asked)} s"
            assert limit in do.reason or engine.lost == now

    def _launch(self, now: int, engine: _Engine) -> None:
        assert engine.process in ("none", "stopped")
        if engine.process == "stopped":
            earlier = len(engine.restarts) - 2
            wait = self._limits["backoff_s"] * 2**earlier if earlier >= 0 else 0
            assert now == engine.stopped + wait
        engine.process, engine.way, engine.runs = "launching", (), -1

    def _stop(self, now: int, engine: _Engine) -> None:
        if engine.removed is None:
            assert engine.process in ("launching", "up", "stopping", "none")
            if engine.down:
                assert engine.given_up is not None
                assert now in (engine.given_up + self._limits["revive_s"], self._began)
                if now == self._began:
                    engine.restarts.clear()
                    engine.given_up = None
                engine.down = False
            else:
                self._prune(now, engine)
                assert engine.was_up
                assert len(engine.restarts) < self._limits["max_restarts"]
                engine.restarts.append(now)
        engine.process, engine.way, engine.runs = "stopping", (), -1

    def _quarantine(self, now: int, name: str, engine: _Engine) -> None:
        if engine.removed is not None:
            assert engine.asked == "stop"
            del self.engines[name]
            return
        if engine.asked != "stop":
            self._prune(now, engine)
            assert not engine.was_up or len(engine.restarts) >= self._limits["max_restarts"]
        engine.given_up, engine.down, engine.runs, engine.asked = now, True, -1, None
        self._moving.discard(name)

    def _update_step(self, do: Do, engine: _Engine) -> None:
        assert engine.process == "up"
        if do.step == "hold":
            assert engine.asked is None
            assert 0 <= engine.runs < do.version
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
