"""What limits a run, and what one more engine, one more rank, larger engines or eta 1 would give. Pure.

Two programs measure. The gateway adds up once a second what its engines and episodes do (`RolloutSeconds`); the trainer has the
seconds of each step, and adds the gateway's to them. So `metrics.jsonl`, the gateway's steps and a tracker have the same figures,
and `advise` needs nothing else:

- T, a step; C, its part in which the trainer was busy; G, the part in which some batch that may be filled was not full. Where the
  trainer waited, the two overlap by the share w = (G + C - T) / min(G, C) of the shorter one. Other G' and C' would too, and
  take G' + C' - w min(G', C'): their sum without overlap (eta 0, or turns on one node), the longer one with it. Where it did not
  wait, generation was not longer, as a trainer takes groups before their batch is full.
- One more engine: the calls of each second, spread over one more, would have been faster by the engines' fitted speed
  (`throughput.py`). Of an episode's time only the share in calls gets faster; tools and rewards do not.
- Engines of twice the GPUs, half as many: each has the calls of two, and takes at best half as long for a step.
- One more rank divides the computation evenly, and nothing else of a step. At best: where the trainer did not wait, it is open
  how much faster generation could be.
- eta 1 in place of 0: G and C overlap, and up to twice as many calls run. A larger eta is not predicted: in simulations it gave
  0 to 46 %, and such a model far less.

The interval is of the spread over steps (a jackknife over at most ten parts of them); it does not know where the model is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from scheduler.policies.throughput import EngineModel

STEPS, LEAST, LEAST_S = 50, 5, 5.0
"""The newest steps that count; the steps, and the seconds in which the gateway watched, without which there is no advice."""
PREFIX = "rollout_s/"
_PARTS = 10
_NO_WAIT = 0.02
"""The share of a step that its trainer waits at least, between two requests."""
_SMALL = 0.01
"""A gain that is not worth naming."""
_NAMED = 3
_OUTSIDE = 0.5
"""The share of episodes' time outside of calls above which agents limit, and not engines."""
_GAP_S = 10.0
"""A longer time between two looks was not watched."""
Stage = Literal["generation", "agents", "training", "updates", "nothing"]
Figures = Mapping[str, float]


@dataclass(slots=True)
class RolloutSeconds:
    """Seconds since a gateway process became the coordinator, of one model."""

    watched: float = 0.0
    filling: float = 0.0
    """Some batch that may be filled was not full."""
    sampling: float = 0.0
    """Some call was in an engine or waited for one."""
    one_more: float = 0.0
    """What `sampling` would have been with one more engine, and the same tokens."""
    twice: float = 0.0
    """What it would have been with half as many engines of twice the GPUs, at best."""
    wider: float = 0.0
    """What it would have been with the calls of one more batch, at best."""
    calls: float = 0.0
    """Summed over calls."""
    episodes: float = 0.0
    """Summed over open episodes."""
    engines: float = 0.0
    """Summed over open engines."""

    def add(
        self,
        seconds: float,
        engines: Sequence[tuple[EngineModel, float, float]],
        waiting: int,
        episodes: int,
        filling: bool,
        more_calls: float = 1.0,
    ) -> None:
        """Count the seconds since the last look. `engines`: the speed, calls and cached tokens of each open one; `waiting`: calls
        without an engine; `more_calls`: the factor by which one more batch would make them more."""
        if not 0 < seconds <= _GAP_S:
            return
        running = sum(calls for _, calls, _ in engines)
        self.watched += seconds
        self.filling += seconds * filling
        self.calls += seconds * (running + waiting)
        self.episodes += seconds * episodes
        self.engines += seconds * len(engines)
        if running + waiting:
            self.sampling += seconds
            for name, share in _shorter(engines, running, waiting, more_calls).items():
                setattr(self, name, getattr(self, name) + seconds * share)


FIGURES = (
    *("seconds/total", "seconds/idle", "seconds/publish", "seconds/compute", "ranks", "eta"),
    *(f"{PREFIX}{field.name}" for field in fields(RolloutSeconds)),
)
"""The figures of a step that `advise` reads."""


def _shorter(
    engines: Sequence[tuple[EngineModel, float, float]], running: float, waiting: int, more_calls: float
) -> dict[str, float]:
    """Return the share of the time in which the tokens of now would be sampled after each change."""
    if not running:
        return {"one_more": 1.0, "twice": 1.0, "wider": 1.0}

    def rate(factor: float) -> float:
        return sum(model.rate(factor * calls, factor * kv) for model, calls, kv in engines)

    count, now = len(engines), rate(1.0)
    left = min(1.0, (running + waiting) / running * count / (count + 1))
    after = {
        "one_more": (count + 1) / count * rate(left),
        "twice": rate(2.0),  # half as many engines, each step in half the time
        "wider": now if waiting else rate(more_calls),
    }
    return {name: min(1.0, now / value) for name, value in after.items()}


def since(before: Figures, after: Figures) -> dict[str, float]:
    """Return the figures of a step from two readings of `RolloutSeconds`; none if another coordinator counts now."""
    grown = {f"{PREFIX}{name}": after[name] - before.get(name, 0.0) for name in after}
    return grown if grown and min(grown.values()) >= 0 else {}


@dataclass(frozen=True, slots=True)
class Change:
    """A change, and the share by which the run would be faster; `low` and `high` are 95 % of the spread over steps."""

    name: str
    gain: float
    low: float
    high: float
    most: bool = False
    """The gain is the most that is possible, not what is expected."""

    def __str__(self) -> str:
        """Return it in words."""
        if self.most:
            return f"{self.name}: at most +{self.gain:.0%} predicted"
        return f"{self.name}: +{self.gain:.0%} predicted (+{self.low:.0%} to +{self.high:.0%})"


@dataclass(frozen=True, slots=True)
class Advice:
    """The stage that limits, its share of the trainer's time, and what each change would give, the best first."""

    stage: Stage
    share: float
    steps: int
    changes: tuple[Change, ...]
    narrow: bool
    """Generation limits, and episodes wait for a place in a batch although eta is not 0."""

    @property
    def limits(self) -> str:
        """The stage and its share, in words."""
        subjects = {"agents": "agents' own time limits", "updates": "updates limit"}
        return f"{subjects.get(self.stage, f'{self.stage} limits')} {self.share:.0%} of the time"

    def __str__(self) -> str:
        """Return it in one line."""
        named = [str(change) for change in self.changes if change.gain >= _SMALL][:_NAMED]
        if self.narrow:
            named.append("episodes wait for a place: a larger eta may help (not predicted)")
        rest = "; ".join(named) or "no single change gives more than 1 %"
        return f"{self.limits}; {rest}"


def advise(steps: Sequence[Figures]) -> Advice | None:
    """Return the advice from the newest steps of a run; None if they are too few (`missing`).

    Each step has `seconds/total`, `seconds/idle`, `seconds/publish`, `seconds/compute`, `ranks`, `eta` and the gateway's seconds.
    """
    steps = _usable(steps)
    if missing(steps):
        return None
    run = _Run.of(steps)
    ways = [way for way in _WAYS if way[1] is not _with_eta or not run.eta]
    changes = sorted((_change(steps, *way) for way in ways), key=lambda one: -one.gain)
    waited, published, whole = (
        math.fsum(getattr(step, name) for step in run.steps) for name in ("waited", "published", "seconds")
    )
    stages: dict[Stage, tuple[float, float]] = {
        "generation": (run.gain(_with_one_more), waited),
        "training": (run.gain(_with_one_rank), whole - waited - published),
        "updates": (run.gain(_without_updates), published),
    }
    stage = max(stages, key=lambda name: stages[name])
    share = stages[stage][1] / whole
    if stage == "generation" and run.in_calls < 1 - _OUTSIDE:
        stage = "agents"
    narrow = stage == "generation" and run.eta > 0 and run.left["wider"] < 1
    return Advice(stage, share, len(steps), tuple(changes), narrow)


def missing(steps: Sequence[Figures]) -> str:
    """Return what is still missing for advice; empty if nothing is."""
    steps = _usable(steps)
    if len(steps) < LEAST:
        return f"{len(steps)} of {LEAST} steps seen"
    watched = sum(step.get(f"{PREFIX}watched", 0.0) for step in steps)
    if watched < LEAST_S:
        return f"the gateway watched {watched:.0f} of {LEAST_S:.0f} s"
    return ""


def line(steps: Sequence[Figures]) -> str:
    """Return in one line what limits the run and what would help, or what is missing to know it."""
    return str(advise(steps) or f"what limits the run is not known yet: {missing(steps)}")


def to_json(steps: Sequence[Figures]) -> dict[str, Any]:
    """Return the advice as JSON: the `line`, and without steps enough nothing else."""
    advice = advise(steps)
    return {"line": line(steps), **(asdict(advice) if advice is not None else {})}


def _usable(steps: Sequence[Figures]) -> Sequence[Figures]:
    return [step for step in steps if "seconds/total" in step][-STEPS:]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step, in seconds."""

    seconds: float
    waited: float
    published: float
    computed: float
    filling: float

    @property
    def busy(self) -> float:
        return self.seconds - self.waited

    @property
    def has_waited(self) -> bool:
        return self.waited > _NO_WAIT * self.seconds

    def takes(self, filling: float, busy: float) -> float:
        """Return what it would take with other seconds of its stages and the same overlap."""
        if not self.has_waited:
            return busy
        shorter = min(self.filling, self.busy)
        overlap = (self.filling + self.busy - self.seconds) / shorter if shorter > 0 else 1.0
        return filling + busy - min(1.0, max(0.0, overlap)) * min(filling, busy)


@dataclass(frozen=True, slots=True)
class _Run:
    """Steps, and what holds for all of them."""

    steps: tuple[_Step, ...]
    left: Mapping[str, float]
    """The share of generation's time that is left after each change of `RolloutSeconds`."""
    in_calls: float
    """The share of episodes' time that is in calls."""
    ranks: float
    eta: float

    @classmethod
    def of(cls, steps: Sequence[Figures]) -> _Run:
        def share(part: str, whole: str) -> float:
            sums = [math.fsum(step.get(PREFIX + name, 0.0) for step in steps) for name in (part, whole)]
            return min(1.0, sums[0] / sums[1]) if sums[1] > 0 else 1.0

        in_calls, filling = share("calls", "episodes"), share("filling", "watched")
        left = {name: 1 - in_calls * (1 - share(name, "sampling")) for name in ("one_more", "twice")}
        wider, eta = share("wider", "sampling"), steps[-1].get("eta", 0.0)
        left["wider"] = in_calls * wider + (1 - in_calls) * ((eta + 1) / (eta + 2) if wider < 1 else 1.0)
        parsed = tuple(_step(step, filling) for step in steps)
        return cls(parsed, left, in_calls, max(1.0, steps[-1].get("ranks", 1.0)), eta)

    def gain(self, way: _Way) -> float:
        """Return the share by which the run would be faster."""
        before = math.fsum(step.takes(step.filling, step.busy) for step in self.steps)
        after = math.fsum(way(self, step) for step in self.steps)
        return before / after - 1 if after > 0 else 0.0


def _step(figures: Figures, filling: float) -> _Step:
    """Parse a step. `filling`: its share of all steps, for one that is shorter than the gateway's interval."""
    seconds = figures["seconds/total"]
    watched = figures.get(f"{PREFIX}watched", 0.0)
    share = min(1.0, figures[f"{PREFIX}filling"] / watched) if watched > 0 else filling
    waited = min(max(0.0, figures.get("seconds/idle", 0.0)), seconds)
    published, computed = (figures.get(f"seconds/{name}", 0.0) for name in ("publish", "compute"))
    return _Step(seconds, waited, published, computed, max(waited, share * seconds))


_Way = Callable[[_Run, _Step], float]
"""Return what a step would take after a change."""


def _with_one_more(run: _Run, step: _Step) -> float:
    return step.takes(step.filling * run.left["one_more"], step.busy)


def _with_twice(run: _Run, step: _Step) -> float:
    return step.takes(step.filling * run.left["twice"], step.busy)


def _overlapping(_: _Run, step: _Step) -> float:
    return max(step.filling, step.busy) if step.has_waited else step.busy


def _with_eta(run: _Run, step: _Step) -> float:
    """Return it for eta 1 in place of 0."""
    return max(step.filling * run.left["wider"], step.busy) if step.has_waited else step.busy


def _with_one_rank(run: _Run, step: _Step) -> float:
    return step.takes(step.filling, step.busy - step.computed / (run.ranks + 1))


def _without_updates(_: _Run, step: _Step) -> float:
    return step.takes(step.filling, step.busy - step.published)


_WAYS: tuple[tuple[str, _Way, _Way | None], ...] = (
    ("one more engine", _with_one_more, _with_one_more),
    ("one more rank", _with_one_rank, None),
    ("half as many engines of twice the GPUs", _with_twice, None),
    ("eta 1", _with_eta, _overlapping),
)
"""The changes, and what each gives at worst; None: not known, and the change gives the first one at most."""


def _change(steps: Sequence[Figures], name: str, way: _Way, worst: _Way | None) -> Change:
    gain, spread = _estimate(steps, way)
    least, below = _estimate(steps, worst) if worst is not None else (0.0, 0.0)
    return Change(name, gain, max(0.0, least - below), gain + spread, worst is None)


def _estimate(steps: Sequence[Figures], way: _Way) -> tuple[float, float]:
    """Return the gain of a change, and half of its interval of 95 %."""
    parts = min(_PARTS, len(steps))
    part_of = [index * parts // len(steps) for index in range(len(steps))]
    without = [
        _Run.of([step for step, part in zip(steps, part_of, strict=True) if part != left]).gain(way)
        for left in range(parts)
    ]
    mean = math.fsum(without) / parts
    spread = math.sqrt((parts - 1) / parts * math.fsum((one - mean) ** 2 for one in without))
    t = 2.0 + 4.0 / parts  # Student's for 95 %, rounded up
    return _Run.of(steps).gain(way), t * spread
