"""Lends an idle trainer's node to rollout, and recalls it before its batch is whole.

The idea is SeamlessFlow's (arXiv 2508.11553); the rule is headgate's. A trainer that reads groups as they arrive (StreamRL, arXiv
2504.15930) needs its node before the batch is whole, by l * t seconds: t = `train_s` is the measured time of its computation on
the groups of a batch, and l is `recall_ahead_share`. The step after the last group is not part of t, because nothing can be
computed ahead of it.

**To lend.** The batch is whole in `wait_s`, which is `wait_s * awake` seconds of engines' work. A lent node works during the
wait, except for the time to wake it, to put it to sleep, to load the trainer's weights, a margin, and l * t. With w = `wake_s`,
s = `sleep_s`, o = `load_s`, m = `margin_s`, c = w + s + o + m + l * t, k lent engines and E others, the batch is whole after
(E * wait_s + k * c) / (E + k), which is less than `wait_s` if and only if

    wait_s > c

So that is the rule, and the measured w, s, o and t are its cost. A trainer unloads its weights before it offers its node, so that
time is already part of the past. With l = 1 a lent trainer has computed on all groups but the last ones when the batch is whole,
as a trainer that kept its node has. (With less it is (1 - l) * t behind, which the rule leaves out.) A node that is not lent
because the wait is short may be claimed by its trainer now (`Verdict.claimable`).

**To recall.** A node is recalled when the rest of the wait is at most s + o + m + l * t. The trainer is then done after the
longer of t and the rest of the wait once the k engines are asleep; best is that these are equal. If the last groups are
stragglers, the rest takes as long as before, and l = 1 is best; if all engines are full, it takes (E + k) / E times as long,
and l = E / (E + k) is. Batches mostly wait for stragglers, so 1 is the default. A trainer that begins with the whole batch
needs 0.

**The wait** is the number of missing groups divided by the rate at which groups arrive (`Pace`).

While no other engine is awake, only this node can fill the batch: it is lent however short the wait is, and recalled only by
a claim. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LendingSettings:
    """All in seconds, except for `recall_ahead_share`."""

    enabled: bool = True
    """False: the engines of a trainer's node never wake."""
    margin_s: float = 1.0
    min_stay_s: float = 5.0
    """A lent node is not recalled sooner than this, unless it is claimed; one that was recalled without a claim is not lent
    again sooner."""
    deadline_s: float = 30.0
    """Seconds after a claim within which the trainer gets its node, whatever the engines do."""
    claim_s: float = 30.0
    """Seconds without a renewal after which a trainer loses its node."""
    smooth_s: float = 10.0
    """The time constant (s) of the measured rate of groups."""
    recall_ahead_share: float = 1.0
    """The time before its batch is whole at which a trainer wants its node, as a share of the time in which it computes on a
    batch: 1 if it takes groups as they come and batches wait for stragglers (above), 0 if it begins when the batch is whole.
    """


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision to act or not, with its reason."""

    yes: bool
    reason: str
    claimable: bool = False
    """The node is not lent and the trainer may have it immediately: the wait is too short, or it is never lent."""


@dataclass(frozen=True, slots=True)
class Lendable:
    """A node that its trainer does not need now."""

    wait_s: float
    """Predicted seconds until the batch is whole; infinite: unknown, or no trainer waits."""
    calls: int
    """Calls that run or wait."""
    awake: int
    """Open engines on other nodes that can run them."""
    wake_s: float
    """The measured seconds of waking the engines; 0 before the first time. So are `sleep_s` and `load_s`."""
    sleep_s: float
    recalled_s: float = math.inf
    """Seconds since it was recalled without being claimed."""
    train_s: float = 0.0
    """Seconds that the trainer computes on the groups of a batch; 0 while unknown."""
    load_s: float = 0.0
    """Seconds of loading the trainer's weights to the device; 0 if they never leave it."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A node whose engines are awake or waking."""

    wait_s: float
    awake: int
    """Open engines on other nodes."""
    sleep_s: float
    lent_s: float
    """Seconds since it was lent."""
    train_s: float = 0.0
    """The same as `Lendable.train_s`."""
    load_s: float = 0.0
    """The same as `Lendable.load_s`."""


def lend(node: Lendable, settings: LendingSettings) -> Verdict:
    """Decide whether a node is lent."""
    least = (
        node.wake_s
        + node.sleep_s
        + node.load_s
        + settings.margin_s
        + settings.recall_ahead_share * node.train_s
    )
    cost = (
        f"waking takes {node.wake_s:.2f} s, putting to sleep {node.sleep_s:.2f} s, {_early(node, settings)}"
    )
    short = node.wait_s <= (least if node.awake else 0.0)
    if not settings.enabled:
        return Verdict(False, "[lending] enabled is false", claimable=True)
    if node.calls <= node.awake:
        return Verdict(False, f"{node.calls} calls have {node.awake} engines already", short)
    if node.recalled_s < settings.min_stay_s:
        return Verdict(False, f"it was recalled {node.recalled_s:.1f} s ago", short)
    if short:
        return Verdict(False, f"the batch is whole in {node.wait_s:.1f} s: {cost}", claimable=True)
    return Verdict(
        True, f"{waiting(node.wait_s)}, {node.calls} calls have {node.awake} other engines: {cost}"
    )


def recall(node: Lent, settings: LendingSettings) -> Verdict:
    """Decide whether a lent node is recalled before its trainer claims it."""
    cost = f"putting to sleep takes {node.sleep_s:.2f} s, {_early(node, settings)}"
    if (
        node.wait_s
        > node.sleep_s + node.load_s + settings.margin_s + settings.recall_ahead_share * node.train_s
    ):
        return Verdict(False, f"{waiting(node.wait_s)}: {cost}")
    if node.awake == 0:
        return Verdict(False, "no other engine would fill the batch")
    if node.lent_s < settings.min_stay_s:
        return Verdict(False, f"it was lent {node.lent_s:.1f} s ago")
    return Verdict(True, f"the batch is whole in {node.wait_s:.1f} s: {cost}")


def _early(node: Lendable | Lent, settings: LendingSettings) -> str:
    """Return in words how much earlier a trainer needs its node."""
    load = f"bringing the weights back {node.load_s:.2f} s, " if node.load_s else ""
    margin, lead_s = f"{load}margin {settings.margin_s:g} s", settings.recall_ahead_share * node.train_s
    return f"{margin}, lead {lead_s:.2f} s of {node.train_s:.2f} s training" if lead_s else margin


def waiting(wait_s: float) -> str:
    """Return a wait in words."""
    return "the wait is unknown" if math.isinf(wait_s) else f"the wait is {wait_s:.1f} s more"


@dataclass(frozen=True, slots=True)
class _Fill:
    """The fill of the batches at one time."""

    batch: int
    groups: int
    whole: bool
    ahead: int


@dataclass(slots=True)
class Pace:
    """The rate of groups per second, exponentially weighted by age, without a bias to its beginning.

    It is the rate of the first batch that is not whole. Groups that arrive while the trainer computes fill the next batch, so
    they count. Groups of later batches do not, since they do not help a batch that waits for its own. Possibly no group can
    arrive while the trainer computes, because the bound on staleness is reached. So while the batch is whole, time counts only
    once another group has arrived; the rest is not counted when the batch changes.
    """

    smooth_s: float
    left: int | None = None
    """The number of missing groups; None: nothing is known yet."""
    _last: _Fill | None = None
    _since: float = 0.0
    """The time up to which everything was counted or excluded."""
    _came: int = 0
    """Groups that arrived since then."""
    _sum: float = 0.0
    _weight: float = 0.0

    def update(self, now_s: float, batch: int, groups: int, size: int, ahead: int = 0) -> None:
        """Count the rewarded groups, of `size`, and those of the next batch (`ahead`; 0 if unknown, then they count with their
        batch)."""
        last, self._last = self._last, _Fill(batch, groups, groups >= size, ahead)
        self.left = max(size - groups, 0)
        follows = last is not None and last.whole and last.batch == batch - 1
        if last is None or (last.batch != batch and not follows):
            self._since, self._came = now_s, 0  # the first group of the batch, or one was missed
            return
        if last.whole:
            self._came += max((groups if follows else ahead) - last.ahead, 0)
        else:
            self._came += max(groups - last.groups, 0)
        if not self._came and last.whole:
            self._since = now_s if follows else self._since
        elif now_s > self._since:
            self._measured(now_s - self._since)
            self._since, self._came = now_s, 0

    def _measured(self, passed_s: float) -> None:
        share = 1.0 - math.exp(-passed_s / self.smooth_s)
        self._sum += share * (self._came / passed_s - self._sum)
        self._weight += share * (1.0 - self._weight)

    @property
    def groups_per_s(self) -> float:
        """0 if nothing is known."""
        return self._sum / self._weight if self._weight else 0.0

    @property
    def wait_s(self) -> float:
        """Return the seconds until the batch is whole; infinite if that is unknown."""
        if self.left == 0:
            return 0.0
        pace = self.groups_per_s
        return self.left / pace if self.left is not None and pace > 0 else math.inf


@dataclass(slots=True)
class Mean:
    """An exponentially weighted mean of measured seconds."""

    share: float = 0.3
    """The weight of the newest value."""
    value: float = field(default=0.0)
    count: int = 0

    def measured(self, seconds: float) -> None:
        """Add a measurement."""
        self.value = seconds if not self.count else self.value + self.share * (seconds - self.value)
        self.count += 1
