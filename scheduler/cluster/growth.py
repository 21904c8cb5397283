"""Decides when a cluster takes a spare node or gives one back, and when a node goes over to training or comes back
(`scheduler.policies.elastic`, with its state).

One node is changed at a time; while its engines or ranks are on their way, steps are not counted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from scheduler.cluster.file import ElasticTable
from scheduler.cluster.tags import Node
from scheduler.policies.elastic import (
    Change,
    Elastic,
    Look,
    Measured,
    Shift,
    Trained,
    Units,
    Watch,
    decide,
    watched,
)

_READY = ("READY", "READY_WITH_CAPACITY")
_AT_WORK = ("open", "held")
_SILENT = (
    "[elastic] counts no step of which the trainer does not say how long it was busy (busy_s, with the release of its node), as"
    " it did not of batch {batch}"
)


class Growth:
    """The number of spare nodes that are used, the one that is on its way out, and how many ranks the trainer shall have."""

    def __init__(self, settings: ElasticTable, ranks: int = 1) -> None:
        self.ranks = ranks
        self.spare = 0
        """How many nodes beyond those that the file asks for may be used now."""
        self.leaving: Node | None = None
        """The node whose engines leave the gateway, after which their processes are ended."""
        self._watch = Watch()
        self._elastic = Elastic(settings.steps)
        self._seen: set[str] = set()
        """Engines that have been ready."""
        self._complained = False

    def look(
        self,
        now: float,
        status: dict[str, Any],
        engines: Collection[str],
        more: tuple[int, int],
        last: Node | None,
        wider: Shift | None = None,
        narrower: Shift | None = None,
    ) -> str:
        """Answers what is changed now and why, in words; or what is amiss; or nothing.

        `status` is the gateway's; `engines` are those that it should have. `more`: how many spare nodes would bring how many
        engines. `last`: the node that would be given back. `wider`, `narrower`: how training can be given a node more or fewer.
        """
        before = self._watch.over
        self._watch, step = watched(self._watch, _look(now, status))
        ready = {row["name"] for row in status["engines"] if row["state"] != "starting"}
        self._seen = (self._seen | ready) & set(engines)
        if step is None:
            after = self._watch.over
            missed = before is not None and after != before
            if not missed or self._complained:
                return ""
            self._complained = True
            assert before is not None
            return _SILENT.format(batch=before.batch)
        if self._seen != set(engines):
            self._elastic = Elastic(self._elastic.steps)
            return ""
        fewer = last.group.engines if last is not None else 0
        units = Units(more[1], fewer, wider, narrower)
        self._elastic, change = decide(self._elastic, step, units)
        if change == "add":
            self.spare += more[0]
        elif change == "give back":
            self.leaving = last
        elif change is not None:
            shift = wider if change == "train on more" else narrower
            assert shift is not None
            self.ranks = shift.after
            self.forget()
            return _shifted(step, shift)
        return _told(step, change, more[1], last)

    def left(self, spare: int) -> None:
        """No node is leaving any more; `spare` are used that no group needs."""
        self.leaving = None
        self.spare = min(self.spare, spare)
        self.forget()

    def forget(self) -> None:
        """Some time passed unseen: the running step does not count."""
        self._watch = Watch()


def _look(now: float, status: dict[str, Any]) -> Look:
    said = status["trained"]
    trained = (
        Trained(said["batch"], said["busy_s"] + said["load_s"] + said["rest_s"]) if said is not None else None
    )
    at_work = [
        row for row in status["engines"] if row["model"] == status["model"] and row["state"] in _AT_WORK
    ]
    filling = any(row["state"] not in _READY for row in status["buffers"])
    return Look(now, status["version"], filling, len(at_work), trained)


def _told(step: Measured, change: Change | None, more: int, last: Node | None) -> str:
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
