"""Decides when a cluster takes a spare node: once generation is the bottleneck (`scheduler.policies.elastic`, with its
state).

Nodes are added one at a time and stay: StreamRL's rule has no way back, and a node that is lent
(`scheduler.policies.lending`) does.
"""

from __future__ import annotations

from typing import Any

from scheduler.cluster.file import ElasticTable
from scheduler.policies.elastic import Elastic, Measured, Watch, decide, watched

_READY = ("READY", "READY_WITH_CAPACITY")


class Growth:
    """`spare`: how many nodes beyond those that the file asks for may be used now."""

    def __init__(self, settings: ElasticTable) -> None:
        self.spare = 0
        self._watch = Watch()
        self._elastic = Elastic(settings.steps)

    def look(self, now: float, status: dict[str, Any], units: int, free: bool) -> str:
        """`status` is the gateway's. Answers why one more node is used, or nothing. `free`: there is one."""
        version: int = status["version"]
        ready = any(row["buffer"] == version and row["state"] in _READY for row in status["buffers"])
        self._watch, step = watched(self._watch, now, version, ready)
        if step is None or not units or not free:
            return ""
        self._elastic, more = decide(self._elastic, step, units)
        if not more:
            return ""
        self.spare += 1
        return _told(step, units)


def _told(step: Measured, units: int) -> str:
    return (
        f"one more rollout node: generation takes {step.generation_s:.1f} s a step and training {step.training_s:.1f} s;"
        f" beside {units} engines one more saves {step.gain_s(units):.1f} s"
    )
