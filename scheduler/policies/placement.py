"""Places calls in engines (StaleFlow, arXiv 2601.12784): in the best of those whose version is at least the call's `min_version`.

Two rules, which `open_engines.py` applies, decide which is best, and whether there is room for the call or it waits
(`waterfall.py`):

- `cached` (`cached.py`): where its prefix is cached, if that outweighs the load there, else where least is running; any open
  engine has room.
- `gain`: where its coming adds most tokens a second (`throughput.py`), less what the prefill of tokens that are not cached takes
  from the others; an engine has room while the gain is above `min_gain_share` of what the call would add to an empty engine, and
  while nothing waits in the engine's own queue. A call most of which an engine has in its cache, such as a later turn, stays
  there until another engine adds `BETTER` times as much, prefill included: the turns after it would have no cache there either.
  So an agent that fans out gets several engines. To an engine of another zone than the process's own a call costs `far_s`, which
  only the call itself loses.

*Late calls* (headgate's addition to `gain`). A group that began under `min_version` is trained by `min_version` + eta: its
calls that still run once newer versions exist hold up a batch; other calls do not. So a call weighs
`late_call_weight` times as much for each version that its `min_version` is behind the newest, and the sum over the calls of
weight times speed is maximized. A late call then gets the fastest engine, and the others stay out of that while they gain about
as much elsewhere. With a `late_call_weight` of 1 all calls weigh the same, and the sum is tokens a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from scheduler.policies.cached import cached_key
from scheduler.policies.throughput import EngineModel

Rule = Literal["cached", "gain"]
_STAY = 256
"""The assumed number of tokens that a call still samples."""
_MOST_LATE = 4
"""A call that is more versions behind counts no more for that: it may be of a model that has no versions."""
_FULL = float("inf")


class EngineRequest(Protocol):
    """A call's requirements (`scheduler.program.calls.Arrived`)."""

    @property
    def call(self) -> str:
        """Its name."""
        ...

    @property
    def version(self) -> int:
        """No older version may sample it."""
        ...

    @property
    def length(self) -> int:
        """Tokens of its prompt and of what was sampled so far."""
        ...

    @property
    def cached_in(self) -> str:
        """The engine that has `cached` of its tokens."""
        ...

    @property
    def cached(self) -> int: ...

    @property
    def avoid(self) -> tuple[str, ...]:
        """Engines to avoid while there is another."""
        ...

    @property
    def preferred(self) -> str:
        """The engine to use, if that may sample it."""
        ...


@dataclass(slots=True, eq=False)
class OpenEngine:
    """An engine that takes calls, and what runs in it as far as is known now."""

    name: str
    version: int
    model: EngineModel
    far_s: float = 0.0
    """Seconds that a call takes longer there than in an engine of this process's own zone."""
    running: int = 0
    """Calls in it, its own queue included: those placed here, and `foreign`."""
    foreign: int = 0
    """Calls in it that other processes placed, by the last snapshot."""
    kv: int = 0
    """Tokens in its cache that belong to calls in it."""
    floor: int = 0
    """Tokens of the calls placed here, at their placement: a lower bound of `kv`, whatever a snapshot reports."""
    waiting: int = 0
    """Calls in its own queue, by the last snapshot, less those that have left."""
    calls_by_version: dict[int, int] = field(default_factory=dict)
    """Calls that were placed here, by `min_version`."""
    peer_calls: tuple[tuple[int, int], ...] = ()
    """The same of other processes, by the last snapshot: `min_version`, and how many."""
    extra: float = 0.0
    """The weight of its calls beyond one each."""
    stamp: int = 0
    """The stamp of the engine's newest entries in its heaps."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.model.rate(self.running, self.kv)

    def step_s(self, more: int = 0) -> float:
        """Return the seconds of a step, with this many more calls that have no tokens yet."""
        return self.model.step_s(self.running + more, self.kv)

    def steps_s(self, length: int) -> tuple[float, float]:
        """Return the seconds of a step now, and with one more call of `length` tokens."""
        model, running, kv = self.model, self.running, self.kv
        return model.step_s(running, kv), model.step_s(running + 1, kv + length)

    def adds(self, length: int, weight: float = 1.0) -> float:
        """Return the gain of a call that is already in the engine, computed as if it arrived now."""
        kv, extra = max(0, self.kv - length), self.extra - (weight - 1)
        return self.model.gain(self.running - 1, kv, length, extra, weight)

    def gain(self, length: int, weight: float = 1.0) -> float:
        """Return the tokens a second that one more call of `length` tokens adds, each call's times what it counts."""
        return self.model.gain(self.running, self.kv, length, self.extra, weight)


Key = tuple[float, int, int, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule. `min_gain_share`: the share of its ideal gain that a call must add to enter an engine. `late_call_weight`: see
    the module.

    The defaults of this class, of `MigrationSettings` and of `SyncSettings` are what the gateway and the simulator have; no
    setting changes them but `rule` and `MigrationSettings.on`. How they were chosen: lab/notes/simulation.md.
    """

    rule: Rule = "gain"
    min_gain_share: float = 0.2
    late_call_weight: float = 64.0

    @property
    def weighs(self) -> bool:
        """True if late calls count more than others."""
        return self.rule == "gain" and self.late_call_weight > 1

    def weight(self, behind: int) -> float:
        """Return the weight of a call whose oldest allowed version is `behind` versions behind the newest."""
        return self.late_call_weight ** min(max(behind, 0), _MOST_LATE) if self.weighs else 1.0

    def key(
        self, engine: OpenEngine, length: int, cached: int, weight: float = 1.0, stay: int = _STAY
    ) -> Key:
        """Return the engines in their order, the best first, for a call of which `cached` tokens are cached there and which still
        samples `stay`.

        Among equals the older version: the newer engine may have calls that no other may.
        """
        if self.rule == "cached":
            return (*cached_key(engine.running, cached), 0, engine.name)
        return self.key_at(engine, engine.steps_s(length), length, cached, weight, stay)

    def key_at(
        self,
        engine: OpenEngine,
        steps_s: tuple[float, float],
        length: int,
        cached: int,
        weight: float,
        stay: int = _STAY,
    ) -> Key:
        """Return the same under `gain`, where `steps_s` is known. It runs thousands of times a second, so it is one function."""
        now_s, then_s = steps_s
        running, model = engine.running, engine.model
        if not self.pays(engine, length, weight, steps_s):
            return (_FULL, running, engine.version, engine.name)
        inside = running + engine.extra
        prefill_s = model.s_per_call * (length - cached)
        lost = (inside + weight) / then_s * prefill_s / (stay * then_s)
        lost += weight / then_s * engine.far_s / (stay * then_s)
        gain = (inside + weight) / then_s - (inside / now_s if running else 0.0)
        return (lost - gain, running, engine.version, engine.name)

    def has_room(self, engine: OpenEngine, length: int, weight: float = 1.0) -> bool:
        """Return true if it is better for a call to run in the engine than to wait: by tokens a second, whatever the others
        count. A call with more weight waits for less."""
        return self.rule == "cached" or self.pays(engine, length, weight)

    def pays(
        self,
        engine: OpenEngine,
        length: int,
        weight: float = 1.0,
        steps_s: tuple[float, float] | None = None,
    ) -> bool:
        """Return true if a call adds enough tokens a second to the engine, by `min_gain_share`, and nothing waits there. An empty
        engine accepts any call. `steps_s`: as `OpenEngine.steps_s`, where it is known."""
        if not engine.running:
            return True
        now_s, then_s = steps_s or engine.steps_s(length)
        gain = (engine.running + 1) / then_s - engine.running / now_s
        return not engine.waiting and gain > self.min_gain_share / weight * engine.model.alone(length)
