"""When a node that a trainer has no use for is lent to rollout, and when it is called back before its batch is whole.

The idea is SeamlessFlow's (arXiv 2508.11553); the rule is headgate's. A trainer waits `wait_s` more for its batch, which is
`wait_s * awake` seconds of engines' work. Lent, a node works for the wait without the time to wake it, to put it to sleep and a
margin: with w = `wake_s`, s = `sleep_s`, m = `margin_s` and k lent engines beside E others the batch is whole after
(E * wait_s + k * (w + s + m)) / (E + k), which is sooner than `wait_s` if and only if

    wait_s > w + s + m

So that is the rule, and the measured w and s are its cost. A node is called back when what is left to wait is no more than what
calling it back takes, and the margin. While no other engine is awake it is called back by the claim alone: nobody else would fill
the batch. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LendingSettings:
    """Seconds."""

    enabled: bool = True
    """False: the engines of such a node never wake."""
    margin_s: float = 1.0
    min_stay_s: float = 5.0
    """A lent node is not called back sooner than this, unless it is claimed; one that was called back without a claim is not lent
    again sooner."""
    deadline_s: float = 30.0
    """A node is its trainer's so long after it was claimed, whatever its engines do."""
    claim_s: float = 30.0
    """A trainer that has a node and says nothing for so long has it no more."""
    smooth_s: float = 10.0
    """How far back the measured speed of filling reaches."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to do it, and why or why not."""

    yes: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Lendable:
    """A node that its trainer has no use for now."""

    wait_s: float
    """Predicted, until the batch is whole; infinite: nobody can say, or no trainer waits."""
    calls: int
    """That run or wait."""
    awake: int
    """Engines elsewhere that are open for them."""
    wake_s: float
    """What waking and putting to sleep took so far; 0: it was never done."""
    sleep_s: float
    called_back_s: float = math.inf
    """Since it was called back without being claimed."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A node whose engines are awake, or wake."""

    wait_s: float
    awake: int
    """Engines elsewhere that are open."""
    sleep_s: float
    lent_s: float
    """Since it was lent."""


def lend(node: Lendable, settings: LendingSettings) -> Verdict:
    """Whether a node is to be lent."""
    least = node.wake_s + node.sleep_s + settings.margin_s
    cost = f"waking takes {node.wake_s:.2f} s, putting to sleep {node.sleep_s:.2f} s, margin {settings.margin_s:g} s"
    if not settings.enabled:
        return Verdict(False, "[lending] enabled is false")
    if node.calls <= node.awake:
        return Verdict(False, f"{node.calls} calls have {node.awake} engines already")
    if node.called_back_s < settings.min_stay_s:
        return Verdict(False, f"it was called back {node.called_back_s:.1f} s ago")
    if node.wait_s <= least:
        return Verdict(False, f"the batch is whole in {node.wait_s:.1f} s: {cost}")
    return Verdict(
        True, f"{waiting(node.wait_s)}, {node.calls} calls have {node.awake} other engines: {cost}"
    )


def call_back(node: Lent, settings: LendingSettings) -> Verdict:
    """Whether a lent node is to be called back before it is claimed."""
    cost = f"putting to sleep takes {node.sleep_s:.2f} s, margin {settings.margin_s:g} s"
    if node.wait_s > node.sleep_s + settings.margin_s:
        return Verdict(False, f"{waiting(node.wait_s)}: {cost}")
    if node.awake == 0:
        return Verdict(False, "no other engine would fill the batch")
    if node.lent_s < settings.min_stay_s:
        return Verdict(False, f"it was lent {node.lent_s:.1f} s ago")
    return Verdict(True, f"the batch is whole in {node.wait_s:.1f} s: {cost}")


def waiting(wait_s: float) -> str:
    """A wait in words."""
    return "nobody can say how long the wait is" if math.isinf(wait_s) else f"the wait is {wait_s:.1f} s more"


@dataclass(slots=True)
class Pace:
    """How fast a trainer's batch fills: groups a second, exponentially weighted by age, without a bias to its beginning."""

    smooth_s: float
    left: int | None = None
    """Groups that the batch lacks; None: nothing is known yet."""
    _last: tuple[int, int, float] | None = None
    """Buffer, groups, seconds."""
    _sum: float = 0.0
    _weight: float = 0.0

    def seen(self, now_s: float, buffer: int, groups: int, size: int) -> None:
        """So many groups of `size` are there. Time in which the batch was whole already says nothing of the pace."""
        last, self._last = self._last, (buffer, groups, now_s)
        self.left = max(size - groups, 0)
        if last is None or last[0] != buffer or last[1] >= size or now_s <= last[2]:
            return
        passed_s = now_s - last[2]
        share = 1.0 - math.exp(-passed_s / self.smooth_s)
        self._sum += share * (max(groups - last[1], 0) / passed_s - self._sum)
        self._weight += share * (1.0 - self._weight)

    @property
    def groups_per_s(self) -> float:
        """0 if nothing is known."""
        return self._sum / self._weight if self._weight else 0.0

    @property
    def wait_s(self) -> float:
        """Until the batch is whole; infinite if nobody can say."""
        if self.left == 0:
            return 0.0
        pace = self.groups_per_s
        return self.left / pace if self.left is not None and pace > 0 else math.inf


@dataclass(slots=True)
class Mean:
    """An exponentially weighted mean of measured seconds."""

    share: float = 0.3
    """Of the newest value."""
    value: float = field(default=0.0)
    count: int = 0

    def measured(self, seconds: float) -> None:
        """One more."""
        self.value = seconds if not self.count else self.value + self.share * (seconds - self.value)
        self.count += 1
