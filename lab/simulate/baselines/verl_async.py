"""verl fully asynchronous: a window of samples between two updates, streamed to the trainer, with partial rollout.

Source: verl's recipe fully_async_policy (its README and fully_async_rollouter.py). `staleness_threshold` beyond a batch
may be underway; the trainer takes samples in the order in which they finish, `require_batches` mini-batches at a time (4
of 16: quarters of what is trained between two updates); at an update (`trigger_parameter_sync_step` such takes) engines
are interrupted, load by NCCL while the trainer waits, and go on with what they had (`partial_rollout`). Log-probabilities
are the rollout's (`use_rollout_log_probs`), so `recompute` is False.

Left out: validation runs (`test_freq`). With threshold 0 it is verl's "stream off policy pipeline". Knobs:
staleness_threshold, 0.1 to 0.5 in its figures (`registry.RIVALS`); here the scenario's, or its eta, unless one is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.rules.verl import Verl
from lab.simulate.baselines.plain import Plain
from scheduler.policies.staleflow import LedgerSettings
from scheduler.policies.staleness_base import StalenessRule

if TYPE_CHECKING:
    from lab.simulate.scenario import Scenario


class VerlAsync(Plain):
    """A window, first finished, first trained."""

    name = "verl_async"
    stream = 4
    recompute = False

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold = threshold

    def rule(self, scenario: Scenario) -> StalenessRule:
        """verl's window, of a fraction of a batch where a threshold is given."""
        return window(scenario, self._threshold)


def window(scenario: Scenario, threshold: float | None = None) -> StalenessRule:
    """verl's rule, of the threshold that is given, else of the scenario's, else of its bound on staleness."""
    found = scenario.threshold if threshold is None else threshold
    settings = LedgerSettings(eta=scenario.eta, batch=scenario.batch, min_members=1)
    return _Window(settings, scenario.eta if found is None else found)


class _Window(Verl):
    def __init__(self, settings: LedgerSettings, threshold: float) -> None:
        super().__init__(settings)
        self._ahead = int(settings.batch * threshold)

    def quota(self) -> int:
        """`int(B * (1 + threshold))`, less what the counter would say."""
        return self.budget(1) + self._ahead
