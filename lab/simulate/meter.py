"""The measures of a run: tokens, their staleness, and the use of every GPU.

Owns the sums. A GPU second is one of four: `rollout` (its engine has a call), `train`, `switching` (weights load, the
node changes hands, the trainer waits for a transfer) or `idle`. A GPU that the trainer uses counts as what the trainer
does. Figures are taken between the end of batch `warmup` and that of the last one; tokens are counted over the
whole run, so that they add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from lab.simulate.entities import Group, Host, Layout
from lab.simulate.scenario import Scenario

Role = Literal["rollout", "train", "switching", "idle", "lent"]
ROLES = ("rollout", "train", "switching", "idle")


class Meter:
    """The sums of one run."""

    def __init__(self, scenario: Scenario, layout: Layout, engines: Sequence[int]) -> None:
        """Start the books of a run. `engines`: the GPUs of each."""
        self._warmup = scenario.warmup
        self._gpus = layout.rollout + layout.train + layout.both
        self._dedicated = layout.train
        self._lent = 0
        self._engines = engines
        self._hosts: list[tuple[str, float]] = [("idle", 0.0)] * len(engines)
        self._trainer = ("idle", 0.0)
        self.seconds: Counter[str] = Counter()
        """GPU seconds by role."""
        self.sampled = 0
        """Tokens that left an engine."""
        self.wasted = 0
        """Sampled tokens of groups and members that were given up."""
        self.tokens: list[int] = []
        """Trained, by batch."""
        self.ends: list[float] = []
        """The time at which each batch was trained."""
        self.staleness: list[Counter[int]] = []
        """Trained tokens by batch and by staleness (the batch's number less the version that sampled them)."""
        self.group_staleness: list[int] = []
        """The greatest staleness by batch, from the version under which a group was started."""
        self.underway = 0
        self.prefilled = 0
        self._marks: list[tuple[float, Counter[str], int, int]] = []

    # Events

    def host_is(self, now: float, number: int, gpus: int, role: str) -> None:
        """Book the role of an engine's GPUs from now on; `lent`: the trainer's."""
        before, since = self._hosts[number]
        if before == role:
            return
        self._hosts[number] = (role, now)
        if before == "lent" or role == "lent":
            self._book_trainer(now)
            self._lent += gpus if role == "lent" else -gpus
        if before != "lent":
            self.seconds[before] += gpus * (now - since)  # type: ignore[assignment]

    def trainer_is(self, now: float, role: str) -> None:
        """Book the role of the trainer's GPUs from now on."""
        self._book_trainer(now)
        self._trainer = (role, now)

    def trained(self, now: float, batch: int, groups: Sequence[Group]) -> None:
        """Count a trained batch."""
        ages: Counter[int] = Counter()
        for sample in [sample for group in groups for sample in group.samples]:
            if sample.dropped:
                self.wasted += sample.tokens
                continue
            for version, tokens in sample.spans:
                ages[batch - version] += tokens
        self.tokens.append(ages.total())
        self.ends.append(now)
        self.staleness.append(ages)
        self.group_staleness.append(max((batch - group.version for group in groups), default=0))
        self._book_trainer(now)
        self._marks.append((now, self._seconds(now), self.sampled, self.wasted))

    def end(self, now: float, underway: int, hosts: Sequence[Host]) -> None:
        """Close the books at the end of the run."""
        for host in hosts:
            role, _ = self._hosts[host.number]
            self.host_is(now, host.number, host.gpus, "over" if role != "lent" else "idle")
        self._book_trainer(now)
        self.underway = underway
        self.prefilled = sum(host.engine.prefilled for host in hosts)

    # Figures

    def figures(self) -> dict[str, Any]:
        """Return the figures of the run, all of them simulated."""
        first, last = (
            self._marks[self._warmup - 1] if self._warmup else (0.0, Counter(), 0, 0),
            self._marks[-1],
        )
        span = last[0] - first[0]
        roles = {role: last[1][role] - first[1][role] for role in ROLES}
        ages: Counter[int] = Counter()
        for counted in self.staleness[self._warmup :]:
            ages += counted
        trained, wasted = ages.total(), last[3] - first[3]
        return {
            "tokens_per_s": trained / span,
            "seconds_per_batch": span / (len(self._marks) - self._warmup),
            **{f"{role}_share": roles[role] / (span * self._gpus) for role in ROLES},
            "staleness_mean": sum(age * n for age, n in ages.items()) / trained,
            "staleness_max": max(self.group_staleness[self._warmup :]),
            "wasted_share": wasted / (wasted + trained),
            "prefilled_per_token": self.prefilled / max(self.sampled, 1),
        }

    # Internals

    def _seconds(self, now: float) -> Counter[str]:
        """Return the GPU seconds so far, present roles included."""
        seconds = Counter(self.seconds)
        for gpus, (role, since) in zip(self._engines, self._hosts, strict=True):
            if role != "lent":
                seconds[role] += gpus * (now - since)  # type: ignore[assignment]
        return seconds

    def _book_trainer(self, now: float) -> None:
        role, since = self._trainer
        self._trainer = (role, now)
        if (gpus := self._dedicated + self._lent) and now > since:
            self.seconds[role] += gpus * (now - since)  # type: ignore[assignment]
