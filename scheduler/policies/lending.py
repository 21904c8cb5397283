"""Lends an idle trainer's node to rollout, and calls it back before its batch is whole.

The idea is SeamlessFlow's (arXiv 2508.11553); the rule is headgate's. A trainer that takes groups as they come (StreamRL, arXiv
2504.15930) wants its node some time before the batch is whole: l * t seconds, where t = `train_s` is how long it computed on the
groups of a batch, measured, and l is `recall_ahead_share`. The step after the last group is in no t: nothing can go on during it.

**To lend.** The batch is whole in `wait_s`, which is `wait_s * awake` seconds of engines' work. Lent, a node works for the wait
without the time to wake it, to put it to sleep, to bring the trainer's weights back, a margin, and the trainer's lead: with
w = `wake_s`, s = `sleep_s`, o = `load_s`, m = `margin_s`, c = w + s + o + m + l * t and k lent engines and E others the batch
is whole after (E * wait_s + k * c) / (E + k), which is sooner than `wait_s` if and only if

    wait_s > c

So that is the rule, and the measured w, s, o and t are its cost. A trainer's weights leave before it offers its node: what that
took is past at this point, and the wait is what is left. With l = 1 a lent trainer has computed on all groups but the last
ones when the batch is whole, as one that kept its node has, so the step is over sooner by as much. (With less it is (1 - l) * t
behind, which the rule leaves out.) A node that is not lent because the wait is short is the trainer's now (`Verdict.near`).

**To call back.** A node is called back when what is left to wait is no more than s + o + m + l * t. The trainer is then done
after the longer of t and what is left once the k engines are asleep; best is that these are equal. If the last groups are
stragglers, what is left takes as long as before, and l = 1 is best; if all engines are full, it takes (E + k) / E times as
long, and l = E / (E + k) is. Batches mostly wait for stragglers, so 1 is the default. A trainer that begins with the whole
batch wants 0.

**The wait** is what the batch lacks over the pace at which groups come (`Pace`), as long as any group will do. Where staleness is
bounded, some can be in no later batch, and the batch waits for the longest of them, which a pace does not predict. So where
lengths are predicted, the wait is theirs (`batch_wait_s`), from what each call still takes (`remaining`) in its engine.

While no other engine is awake, only this node can fill the batch: it is lent however short the wait is, and called back only by
the claim. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_OUTLIVED = 0.5
"""The share of its context that a call goes on for once it is longer than was expected."""


@dataclass(frozen=True, slots=True)
class LendingSettings:
    """All in seconds, except for `recall_ahead_share`."""

    enabled: bool = True
    """False: the engines of such a node never wake."""
    margin_s: float = 1.0
    min_stay_s: float = 5.0
    """A lent node is not called back sooner than this, unless it is claimed; one that was called back without a claim is not lent
    again sooner."""
    deadline_s: float = 30.0
    """A node is its trainer's this long after it was claimed, whatever its engines do."""
    claim_s: float = 30.0
    """Seconds without a renewal after which a trainer loses its node."""
    smooth_s: float = 10.0
    """Seconds that the measured speed of filling reaches back."""
    recall_ahead_share: float = 1.0
    """The time before its batch is whole at which a trainer wants its node, as a share of the time in which it computes on a
    batch: 1 if it takes groups as they come and batches wait for stragglers (above), 0 if it begins when the batch is whole.
    """


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision to act or not, with its reason."""

    yes: bool
    reason: str
    near: bool = False
    """The node is not lent and the trainer may have it immediately: the wait is too short, or it is never lent."""


@dataclass(frozen=True, slots=True)
class Lendable:
    """A node that its trainer has no use for now."""

    wait_s: float
    """Predicted seconds until the batch is whole; infinite: unknown, or no trainer waits."""
    calls: int
    """Calls that run or wait."""
    awake: int
    """Engines elsewhere that are open for them."""
    wake_s: float
    """Seconds that waking and putting to sleep took so far; 0 before the first time."""
    sleep_s: float
    called_back_s: float = math.inf
    """Since it was called back without being claimed."""
    train_s: float = 0.0
    """Seconds that the trainer computes on the groups of a batch; 0 while unknown."""
    load_s: float = 0.0
    """Seconds that its weights take to come back to the device; 0 if they never leave, or before the first time."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A node whose engines are awake, or wake."""

    wait_s: float
    awake: int
    """Engines elsewhere that are open."""
    sleep_s: float
    lent_s: float
    """Since it was lent."""
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
        return Verdict(False, "[lending] enabled is false", near=True)
    if node.calls <= node.awake:
        return Verdict(False, f"{node.calls} calls have {node.awake} engines already", short)
    if node.called_back_s < settings.min_stay_s:
        return Verdict(False, f"it was called back {node.called_back_s:.1f} s ago", short)
    if short:
        return Verdict(False, f"the batch is whole in {node.wait_s:.1f} s: {cost}", near=True)
    return Verdict(
        True, f"{waiting(node.wait_s)}, {node.calls} calls have {node.awake} other engines: {cost}"
    )


def call_back(node: Lent, settings: LendingSettings) -> Verdict:
    """Decide whether a lent node is called back before its trainer claims it."""
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

    buffer: int
    groups: int
    whole: bool
    ahead: int


@dataclass(slots=True)
class Pace:
    """The rate of groups: groups a second, exponentially weighted by age, without a bias to its beginning.

    It is the rate of the first batch that is not whole: groups that come while the trainer computes fill the next one, and count,
    so the rate goes on when the trainer takes that. Groups of later batches do not count: they do not help a batch that waits
    for its own. It may be that none can come while the trainer computes, because as many wait as staleness allows. So while the
    batch is whole, time counts once another group has come; the rest of it is not counted when the batch changes.
    """

    smooth_s: float
    left: int | None = None
    """Groups that the batch lacks; None: nothing is known yet."""
    _last: _Fill | None = None
    _since: float = 0.0
    """The time until which everything was counted, or excluded."""
    _came: int = 0
    """Groups since then."""
    _sum: float = 0.0
    _weight: float = 0.0

    def update(self, now_s: float, buffer: int, groups: int, size: int, ahead: int = 0) -> None:
        """Count the groups of `size` that are there, and those of the next batch (0 if unknown: they come with their batch)."""
        last, self._last = self._last, _Fill(buffer, groups, groups >= size, ahead)
        self.left = max(size - groups, 0)
        follows = last is not None and last.whole and last.buffer == buffer - 1
        if last is None or (last.buffer != buffer and not follows):
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


def remaining(expected: float, sampled: float, context: float, longest: float) -> float:
    """Return the tokens that a call of `context` tokens still takes, of which it has `sampled` since `expected` was predicted.

    One that has outlived what was expected of it goes on for a share of what it has, but not beyond the longest that ever ended.
    """
    if sampled < expected:
        return expected - sampled
    return max(min(_OUTLIVED * context, longest - context), 0.0)


def batch_wait_s(pace_s: float, missing: int, due: int, longest_s: float) -> float:
    """Return the predicted wait of a batch that lacks `missing` groups.

    `due` of those that run can be in no later batch, and the last of them is over in `longest_s` (0: unknown). If they are
    all that is missing, the batch waits for that one, however fast groups came before; else for the slower of it and the pace.
    """
    if not missing or not due or not longest_s:
        return pace_s
    return longest_s if due >= missing else max(pace_s, longest_s)


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
