r"""The end of an episode as a state machine. Pure: the driver (`closing`) does a phase's work and retries it.

    open --> stopping --> finishing --> grading --> closing --> closed
                   \________________________________/

The run is over from `stopping` on. In `finishing` the ledger learns that the episode is being graded; `closing` stores the end,
in one transaction with its effect on the ledger. Every phase but `open` and `closed` has work that leads to the next one, and
failed work is repeated, so no episode stays half-way. If the ledger drops the episode first, its end is stored without
another effect on the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

UNTRAINED = "untrained_late"
"""The reason stored for an episode whose group the ledger had given up, but let run on."""


class Phase(Enum):
    """The phases of an episode's end."""

    OPEN = "open"
    STOPPING = "stopping"
    FINISHING = "finishing"
    GRADING = "grading"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an episode, as it is stored."""

    reason: str
    values: Mapping[str, Any]
    """The columns stored with the reason: reward and components of a rewarded episode, error of one whose grading failed."""

    @property
    def reward(self) -> float | None:
        """The final reward; None if the episode is dropped."""
        return self.values.get("reward")


@dataclass(frozen=True, slots=True)
class ClosingState:
    """An episode's progress to its end."""

    phase: Phase = Phase.OPEN
    outcome: Outcome | None = None
    """The end to be stored; None until it is known: the episode is to be graded first."""
    given_up: bool = False
    """True if the ledger has given the episode up, and needs no more news of it."""

    def end(self, outcome: Outcome | None) -> ClosingState:
        """End the run; without an outcome, the episode is graded. Raise ValueError if the run was over before."""
        if self.phase is not Phase.OPEN:
            raise ValueError(f"an episode ends once, and this one is {self.phase.value}")
        return ClosingState(Phase.STOPPING, outcome)

    def abort(self, reason: str) -> ClosingState:
        """Take note that the ledger has given the episode up."""
        if self.given_up or self.phase is Phase.CLOSED:
            return self
        values = self.outcome.values if self.outcome else {}
        over = replace(self, outcome=Outcome(reason, values), given_up=True)
        match self.phase:
            case Phase.OPEN:
                return replace(over, phase=Phase.STOPPING)
            case Phase.FINISHING | Phase.GRADING:
                return replace(over, phase=Phase.CLOSING)
        return over

    @property
    def rewards(self) -> bool:
        """True if the episode is going to be rewarded: a reward is given, or will be computed."""
        return not self.given_up and (self.outcome is None or self.outcome.reward is not None)

    def stopped(self, unused: Outcome | None = None) -> ClosingState:
        """Go on once everything that ran in the episode is recorded.

        `unused`: the end that stands in place of a reward if the policy had no part in the episode.
        """
        self._be(Phase.STOPPING)
        outcome = unused if unused is not None and self.rewards else self.outcome
        return replace(self, outcome=outcome, phase=Phase.CLOSING if outcome else Phase.FINISHING)

    def stored(self) -> ClosingState:
        """Go on once everything that the phase was to store is committed."""
        if self.phase is Phase.FINISHING:
            return replace(self, phase=Phase.GRADING)
        self._be(Phase.CLOSING)
        return replace(self, phase=Phase.CLOSED)

    def graded(self, outcome: Outcome) -> ClosingState:
        """Continue once the reward has arrived, or never will."""
        self._be(Phase.GRADING)
        return replace(self, phase=Phase.CLOSING, outcome=outcome)

    def refused(self) -> ClosingState:
        """Go on after the ledger refused the episode, whose group is over. Nothing was stored; it will not be trained."""
        outcome = self.outcome
        if outcome is None or outcome.reward is not None:
            outcome = Outcome(UNTRAINED, {**outcome.values} if outcome else {})
        return ClosingState(Phase.CLOSING, outcome, given_up=True)

    def _be(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise ValueError(f"an episode that is {self.phase.value} cannot have been {phase.value}")


RUNNING = ClosingState()
"""An episode whose run is not over."""
