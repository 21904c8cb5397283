"""StreamRL's elastic rule (arXiv 2504.15930), pure: decides whether one more rollout node is worth its cost.

With delta = T_gen - T_train, the seconds by which generating a batch takes longer than training on it, and delta' the seconds
that one more unit of rollout would save, a unit is added while delta >= delta': then nothing of what it saves is lost to waiting
for the trainer. Generation is divided evenly, so with n units delta' = T_gen / (n + 1).

Both times are measured at the trainer's end alone. Between one version and the next the trainer first waits for its batch, and
then trains: if it waits, generation was at work all the time, so T_gen is the whole step and T_train what is left of it. If it
does not wait, generation is no bottleneck, and T_gen is not known, only that it is no more than T_train. A batch that nobody saw
complete was trained between two looks: T_train is no more than that, and counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Measured:
    """One training step: seconds of generation and of training for one batch."""

    generation_s: float
    training_s: float

    @property
    def delta_s(self) -> float:
        """The seconds by which generation is the bottleneck."""
        return self.generation_s - self.training_s

    def gain_s(self, units: int) -> float:
        """Seconds that one more unit than these would save."""
        return self.generation_s / (units + 1)


@dataclass(frozen=True, slots=True)
class Watch:
    """Observations of the running step. Times are seconds of any one clock."""

    version: int = -1
    began: float | None = None
    """The time at which the version became live; None if nobody saw it."""
    ready: float | None = None
    """The time at which its batch was complete."""


def watched(watch: Watch, now: float, version: int, ready: bool) -> tuple[Watch, Measured | None]:
    """The next state, and the step that ended, if one did and its begin was seen.

    `ready`: the batch that the trainer at `version` trains is complete.
    """
    if version != watch.version:
        seen = watch.version >= 0 and version == watch.version + 1
        measured = _measured(watch, now) if seen else None
        return Watch(version, now if seen else None, now if ready else None), measured
    if ready and watch.ready is None:
        return replace(watch, ready=now), None
    return watch, None


def _measured(watch: Watch, now: float) -> Measured | None:
    if watch.began is None:
        return None
    whole = now - watch.began
    training = 0.0 if watch.ready is None else now - watch.ready
    return Measured(whole, training) if training < whole else Measured(training, training)


@dataclass(frozen=True, slots=True)
class Elastic:
    """`steps` in a row must say the same before a unit is added; after that, counting starts again."""

    steps: int = 3
    agreed: int = 0


def decide(state: Elastic, step: Measured, units: int) -> tuple[Elastic, bool]:
    """The next state, and whether one more unit shall be added to `units`."""
    worth = step.delta_s > 0 and step.delta_s >= step.gain_s(units)
    agreed = state.agreed + 1 if worth else 0
    if agreed >= state.steps:
        return replace(state, agreed=0), True
    return replace(state, agreed=agreed), False
