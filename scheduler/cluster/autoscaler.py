"""Decides when a cluster uses a spare node or gives one back, and when a node moves to training or back.

Owns the state of the rule (`scheduler.policies.elastic`). One node is changed at a time; steps count only when all its engines or
ranks have started. What limits the run (`scheduler.policies.limits`) predicts what a change gives, and the steps after it show
what it gave; no other change begins before that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from math import fsum
from typing import Any

from scheduler.cluster.file import ElasticTable
from scheduler.cluster.tags import NodeInUse
from scheduler.policies import limits
from scheduler.policies.elastic import (
    HELD,
    PREDICTED,
    Change,
    Elastic,
    Made,
    Measured,
    Observation,
    Shift,
    StepProgress,
    Trained,
    Units,
    decide,
    observe,
)

_READY = ("READY", "READY_WITH_CAPACITY")
_AT_WORK = ("open", "held")
_NO_BUSY_TIME = (
    "[elastic] ignores steps for which the trainer does not report busy_s (with the release of its node), such as that of batch"
    " {batch}"
)


class Autoscaler:
    """The number of spare nodes in use, the node that leaves, and the number of the trainer's ranks."""

    def __init__(
        self, settings: ElasticTable, ranks: int, record: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """`record` gets each change with what it is based on, and later what it gave."""
        self.ranks = ranks
        self.spare = 0
        """The number of nodes that may be used beyond those that the file requests."""
        self.leaving: NodeInUse | None = None
        """The node whose engines leave the gateway; their processes end afterwards."""
        self.step: Measured | None = None
        """A step that has ended, until `decide`."""
        self.since = -1
        """The last of the trainer's steps that ran before the present engines and ranks."""
        self._record = record
        self._progress = StepProgress()
        self._elastic = Elastic(settings.steps)
        self._started: set[str] = set()
        """Engines that have been ready."""
        self._changing = False
        """The next step still ran with other engines or ranks."""
        self._reports_steps = False
        self._made: Made | None = None
        """The last change, until it is compared with its prediction."""
        self._warned = False

    def observe(self, now: float, status: dict[str, Any], engines: Collection[str]) -> str:
        """Look at the gateway's `status`; `engines`: those that it should have. Set `step` if one has ended. Return a warning,
        or ""."""
        before = self._progress.over
        self._progress, self.step = observe(self._progress, _observation(now, status))
        ready = {row["name"] for row in status["engines"] if row["state"] != "starting"}
        self._started = (self._started | ready) & set(engines)
        if self._started != set(engines):
            self._changing = True
            if self.step is not None:
                self.step, self._elastic = None, Elastic(self._elastic.steps)
        elif self.step is None and before is not None and before != self._progress.over and not self._warned:
            self._warned = True
            return _NO_BUSY_TIME.format(batch=before.batch)
        return ""

    def decide(
        self,
        steps: Sequence[tuple[int, limits.Figures]],
        more: tuple[int, int],
        last: NodeInUse | None,
        more_ranks: Shift | None = None,
        fewer_ranks: Shift | None = None,
    ) -> str:
        """Return a message with the change and its reason, or with what the last one gave, or "".

        `steps`: the trainer's after `since`. `more`: the spare nodes and their engines that could be added. `last`: the node that
        would be given back. `more_ranks`, `fewer_ranks`: the possible changes of training.
        """
        step, self.step = self.step, None
        assert step is not None
        figures = self._figures(steps)
        if figures is None:
            return ""
        advice = limits.advise(figures)
        if advice is None and self._reports_steps:
            return ""
        outcome, before_s = self._compared(figures), _mean_s(figures)
        predicted = {one.name: one for one in advice.changes} if advice is not None else {}
        gains = {name: one.gain for name, one in predicted.items()} if advice is not None else None
        fewer = last.group.engines if last is not None else 0
        units = Units(more[1], fewer, more_ranks, fewer_ranks)
        self._elastic, change = decide(self._elastic, step, units, gains)
        if change is None:
            return outcome
        shift = more_ranks if change == "train on more" else fewer_ranks
        what, why = _described(step, change, more[1], last, shift)
        found = predicted.get(PREDICTED.get(change, ""))
        self._apply(change, more[0], last, shift)
        self._made = Made(what, found, before_s) if figures else None
        self._record(
            {
                "change": what,
                "measured": asdict(step),
                "step_s": before_s,
                "predicted": asdict(found) if found else None,
            }
        )
        reason = f"{what}: {why}" + (f"; {found}" if found else "")
        return f"{outcome}\n{reason}" if outcome else reason

    def _figures(self, steps: Sequence[tuple[int, limits.Figures]]) -> list[limits.Figures] | None:
        """Return the steps with the present engines and ranks; empty: the trainer reports none; None: too few yet."""
        usable = [one for one in steps if limits.FIGURES[0] in one[1]]
        if usable and (self._changing or not self._reports_steps):
            # The first step of all has the starts of engines and trainer in it.
            self.since, usable = (usable[-1][0], []) if self._changing else (usable[0][0], usable[1:])
            self._reports_steps = True
        self._changing = False
        enough = len(usable) >= HELD
        return [figures for _, figures in usable] if enough or not self._reports_steps else None

    def _compared(self, figures: Sequence[limits.Figures]) -> str:
        """Return what the last change gave, once, or ""."""
        made, self._made = self._made, None
        if made is None:
            return ""
        after_s = _mean_s(figures)
        self._record({"outcome": made.what, "step_s": after_s, "gain": made.before_s / after_s - 1})
        return made.outcome(after_s)

    def _apply(self, change: Change, more: int, last: NodeInUse | None, shift: Shift | None) -> None:
        self._changing = True
        if change == "add":
            self.spare += more
        elif change == "give back":
            self.leaving = last
        else:
            assert shift is not None
            self.ranks = shift.after
            self.reset()

    def finish_leaving(self, spare: int) -> None:
        """Record that the leaving node has left, and that `spare` nodes beyond the groups' counts are in use."""
        self.leaving = None
        self.spare = min(self.spare, spare)
        self._changing = True
        self.reset()

    def reset(self) -> None:
        """Ignore the running step, of which a part was not observed."""
        self._progress = StepProgress()


def _observation(now: float, status: dict[str, Any]) -> Observation:
    report = status["trained"]
    trained = None
    if report is not None:
        trained = Trained(report["batch"], report["busy_s"] + report["load_s"] + report["rest_s"])
    at_work = [
        row for row in status["engines"] if row["model"] == status["model"] and row["state"] in _AT_WORK
    ]
    filling = any(row["state"] not in _READY for row in status["batches"])
    return Observation(now, status["version"], filling, len(at_work), trained)


def _mean_s(figures: Sequence[limits.Figures]) -> float:
    """Return the mean seconds of a step; 0 without steps."""
    return fsum(one["seconds/total"] for one in figures) / max(1, len(figures))


def _described(
    step: Measured, change: Change, more: int, last: NodeInUse | None, shift: Shift | None
) -> tuple[str, str]:
    """Return a change, and its reason."""
    if change in ("add", "give back"):
        what, engines = "one more rollout node", more
        if change == "give back":
            assert last is not None
            what, engines = f"{last.name} is given back", -last.group.engines
        return what, (
            f"{step.engines:.1f} engines generate a batch in {step.generation_s:.1f} s, and then would in"
            f" {step.generation_with(engines):.1f} s; the trainer is busy for {step.training_s:.1f} s"
        )
    assert shift is not None
    what = f"the trainer goes on with {shift.after} rank{'s' * (shift.after > 1)} in place of {shift.before}"
    return what, (
        f"a batch is generated in {step.generation_s:.1f} s, and then would be in {shift.generation_s(step):.1f} s; the trainer"
        f" is busy for {step.training_s:.1f} s, and then would be for {shift.training_s(step):.1f} s"
    )
