"""Decides when a cluster uses a spare node or gives one back, and when a node moves to training or back.

Owns the state of the rule (`scheduler.policies.elastic`). One node is changed at a time; steps count only when all its engines or
ranks have started.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from scheduler.cluster.file import ElasticTable
from scheduler.cluster.tags import NodeInUse
from scheduler.policies.elastic import (
    Change,
    Elastic,
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

    def __init__(self, settings: ElasticTable, ranks: int = 1) -> None:
        self.ranks = ranks
        self.spare = 0
        """The number of nodes that may be used beyond those that the file requests."""
        self.leaving: NodeInUse | None = None
        """The node whose engines leave the gateway; their processes end afterwards."""
        self._progress = StepProgress()
        self._elastic = Elastic(settings.steps)
        self._started: set[str] = set()
        """Engines that have been ready."""
        self._warned = False

    def update(
        self,
        now: float,
        status: dict[str, Any],
        engines: Collection[str],
        more: tuple[int, int],
        last: NodeInUse | None,
        more_ranks: Shift | None = None,
        fewer_ranks: Shift | None = None,
    ) -> str:
        """Return a message with the change and its reason, or a warning, or "".

        `status`: the gateway's. `engines`: those that it should have. `more`: the spare nodes and their engines that could be
        added. `last`: the node that would be given back. `more_ranks`, `fewer_ranks`: the possible changes of training.
        """
        before = self._progress.over
        self._progress, step = observe(self._progress, _observation(now, status))
        ready = {row["name"] for row in status["engines"] if row["state"] != "starting"}
        self._started = (self._started | ready) & set(engines)
        if step is None:
            after = self._progress.over
            missed = before is not None and after != before
            if not missed or self._warned:
                return ""
            self._warned = True
            assert before is not None
            return _NO_BUSY_TIME.format(batch=before.batch)
        if self._started != set(engines):
            self._elastic = Elastic(self._elastic.steps)
            return ""
        fewer = last.group.engines if last is not None else 0
        units = Units(more[1], fewer, more_ranks, fewer_ranks)
        self._elastic, change = decide(self._elastic, step, units)
        if change == "add":
            self.spare += more[0]
        elif change == "give back":
            self.leaving = last
        elif change is not None:
            shift = more_ranks if change == "train on more" else fewer_ranks
            assert shift is not None
            self.ranks = shift.after
            self.reset()
            return _shifted(step, shift)
        return _reason(step, change, more[1], last)

    def finish_leaving(self, spare: int) -> None:
        """Record that the leaving node has left, and that `spare` nodes beyond the groups' counts are in use."""
        self.leaving = None
        self.spare = min(self.spare, spare)
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


def _reason(step: Measured, change: Change | None, more: int, last: NodeInUse | None) -> str:
    if change is None:
        return ""
    if change == "add":
        what, after = "one more rollout node", step.generation_with(more)
    else:
        assert last is not None
        what, after = f"{last.name} is given back", step.generation_with(-last.group.engines)
    return (
        f"{what}: {step.engines:.1f} engines generate a batch in {step.generation_s:.1f} s, and then would in {after:.1f} s;"
        f" the trainer is busy for {step.training_s:.1f} s"
    )


def _shifted(step: Measured, shift: Shift) -> str:
    return (
        f"the trainer goes on with {shift.after} rank{'s' * (shift.after > 1)} in place of {shift.before}: a batch is generated"
        f" in {step.generation_s:.1f} s, and then would be in {shift.generation_s(step):.1f} s; the trainer is busy for"
        f" {step.training_s:.1f} s, and then would be for {shift.training_s(step):.1f} s"
    )
