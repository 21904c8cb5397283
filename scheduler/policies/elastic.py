"""StreamRL's elastic rule (arXiv 2504.15930) and its reverse, pure: decides whether to add a unit of rollout, whether a unit
can be given back at no cost, and whether a node should change between rollout and training.

Generation and training of successive batches overlap, so a step takes as long as the longer of T_gen and T_train. Generation is
divided evenly: with n engines a batch is W = n T_gen seconds of engines, and m more make it W / (n + m). StreamRL adds a unit
while delta >= delta', where delta = T_gen - T_train and delta' = T_gen - W / (n + m) is what the unit saves. Where the trainer's
steps are known, what limits the run (`limits.py`) decides in its place, because generation is seldom divided evenly:

    add a unit of m engines while           T_gen > T_train and one more engine is predicted to gain `WORTH`; without steps,
                                            W / (n + m) >= T_train: all that it saves is saved, as training is still no longer;
    give back a unit of m engines while     W / (n - m) <  T_train: T_train - T_gen is more than that adds to generation,
                                            so training still takes longer, and a step takes no longer than before.

At constant W and T_train the two never alternate if the unit that was added last is the first to be given back. After an addition
there are N = n + m engines, and W / (N - m) = W / n = T_gen > T_train of then: not given back. Once one is given back W / n <
T_train for the n that are left, and a unit of any size makes that less: none is added. Between the two lies a whole unit.

A node that can do both can switch to training, so that r ranks become r' > r, and training takes T_train r / r' if it is divided
evenly; or switch back. It does if the other stage is still not longer afterwards, so that the whole saving is real:

    train on a node of m engines more while      W / (n - m) <= T_train r / r'
    train on one fewer (r' < r) while            W / (n + m) >= T_train r / r'

and if one more rank (back: one more engine) is predicted to gain `WORTH`. These two do not alternate either: after the first
W / n' <= T' with n' = n - m and T' = T_train r / r', so that W / (n' + m) is less than T_train, which is T' r' / r. Where
training is divided less well than evenly, it stays longer still. Nor does any of the four undo another: an addition needs
T_gen > T_train with n engines, and neither giving it back nor training there leaves more than these n, while T_train is not
longer than before.

T_train is how long the trainer reports that it was busy with the batch, not what waiting leaves of the step: a trainer that takes
groups as they come trains while it waits. T_gen is the part of the step, from one version to the next, in which some batch that
may be filled was not full; once all that the bound of staleness admits are full, engines wait for the trainer. n is the mean
number of engines in that part, so an engine on a lent node counts for the share in which it samples. That share grows when others
are given back and shrinks when some are added, so the above holds all the more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.policies import limits

Change = Literal["add", "give back", "train on more", "train on fewer"]
WORTH = 0.05
"""The least predicted gain for which a node is added or moved."""
PREDICTED: dict[Change, str] = {
    "add": "one more engine",
    "train on more": "one more rank",
    "train on fewer": "one more engine",
}
"""The name of the gain that is predicted for a change (`limits.Change`)."""


HELD = 10
"""Steps with the same engines and ranks by which a change is predicted, and by which the last one is compared with its
prediction."""


@dataclass(frozen=True, slots=True)
class Made:
    """A change that was made, what was predicted for it, and the mean seconds of a step before."""

    what: str
    predicted: limits.Change | None
    before_s: float

    def outcome(self, after_s: float) -> str:
        """Return in words what it gave. `after_s`: the mean seconds of a step since."""
        predicted = f"; {self.predicted}" if self.predicted is not None else ""
        return (
            f"since {self.what} a step takes {after_s:.1f} s in place of {self.before_s:.1f} s"
            f" ({self.before_s / after_s - 1:+.0%}{predicted})"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: seconds of generation and of training for one batch, and the mean number of engines that generated."""

    generation_s: float
    training_s: float
    engines: float

    def generation_with(self, more: int) -> float:
        """Return the seconds of generation with `more` engines added, or removed if negative."""
        return self.generation_s * self.engines / (self.engines + more)


@dataclass(frozen=True, slots=True)
class Shift:
    """A node moves to training or back: its engines, and the trainer's ranks before and after."""

    engines: int
    before: int
    after: int

    def training_s(self, step: Measured) -> float:
        """Return the seconds of training after it."""
        return step.training_s * self.before / self.after

    def generation_s(self, step: Measured) -> float:
        """Return the seconds of generation after it."""
        return step.generation_with(-self.engines if self.after > self.before else self.engines)


@dataclass(frozen=True, slots=True)
class Units:
    """The possible changes: engines of the unit that can be added, and of the one that can be given back (0: none); the shifts by
    which training gets a node more or fewer (None: none)."""

    more: int = 0
    fewer: int = 0
    more_ranks: Shift | None = None
    fewer_ranks: Shift | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """The busy time of the trainer with a batch."""

    batch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Observation:
    """The state at one time. `now` is in seconds of any clock."""

    now: float
    version: int
    filling: bool
    """A batch that may be filled is not full."""
    engines: int
    """Engines that sample, or could."""
    trained: Trained | None = None
    """The newest batch for which the trainer reported its busy time."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished step: the trainer made the next version from its batch."""

    batch: int
    seconds: float
    engines: float


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The observations of the running step."""

    last: Observation | None = None
    whole: bool = False
    """True if the start of the step was observed."""
    filling_s: float = 0.0
    engine_s: float = 0.0
    """Seconds of engines in `filling_s`."""
    over: Generated | None = None
    """The previous step, until the trainer reports its time."""


def observe(progress: StepProgress, current: Observation) -> tuple[StepProgress, Measured | None]:
    """Return the next state, and a step once its start, its end and the trainer's time are known."""
    last = progress.last
    if last is None:
        return StepProgress(current), None
    if last.filling:
        passed = current.now - last.now
        progress = replace(
            progress,
            filling_s=progress.filling_s + passed,
            engine_s=progress.engine_s + passed * last.engines,
        )
    if current.version != last.version:
        follows = current.version == last.version + 1
        over = _over(progress, last) if follows and progress.whole else None
        progress = StepProgress(current, whole=follows, over=over)
    progress = replace(progress, last=current)
    if progress.over is None or current.trained is None or current.trained.batch != progress.over.batch:
        return progress, None
    step = Measured(progress.over.seconds, current.trained.seconds, progress.over.engines)
    return replace(progress, over=None), step


def _over(progress: StepProgress, last: Observation) -> Generated:
    """Return the finished step. Its version is the number of its batch."""
    engines = progress.engine_s / progress.filling_s if progress.filling_s else float(last.engines)
    return Generated(last.version, progress.filling_s, engines)


@dataclass(frozen=True, slots=True)
class Elastic:
    """Changes need the same result for `steps` steps in a row; afterwards counting starts again."""

    steps: int = 3
    change: Change | None = None
    agreed: int = 0


def decide(
    state: Elastic, step: Measured, units: Units, gains: Mapping[str, float] | None = None
) -> tuple[Elastic, Change | None]:
    """Return the next state, and the change or None. `gains`: the predicted ones by name; None: the trainer reports no steps."""
    change = _wanted(step, units, gains)
    if gains is not None and change is not None and gains.get(PREDICTED.get(change, ""), WORTH) < WORTH:
        change = None
    agreed = state.agreed + 1 if change == state.change else 1
    if change is None or agreed >= state.steps:
        return Elastic(state.steps), change
    return Elastic(state.steps, change, agreed), None


def _wanted(step: Measured, units: Units, gains: Mapping[str, float] | None) -> Change | None:
    if step.generation_s > step.training_s:
        if (back := units.fewer_ranks) and back.generation_s(step) >= back.training_s(step):
            return "train on fewer"
        whole = gains is not None or step.generation_with(units.more) >= step.training_s
        return "add" if units.more and whole else None
    more_ranks = units.more_ranks
    left = more_ranks is not None and more_ranks.engines < step.engines
    if more_ranks and left and more_ranks.generation_s(step) <= more_ranks.training_s(step) < step.training_s:
        return "train on more"
    if 0 < units.fewer < step.engines and step.generation_with(-units.fewer) < step.training_s:
        return "give back"
    return None
