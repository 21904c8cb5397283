"""`[elastic]` by what limits a run: its changes, and what they gave, with their figures."""

from __future__ import annotations

from typing import Any

from scheduler.cluster.autoscaler import Autoscaler
from scheduler.cluster.file import ElasticTable
from scheduler.policies.limits import FIGURES


class Run:
    """A trainer that waits for generation, which takes 8 s divided by the number of engines, and a second more."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.autoscaler = Autoscaler(ElasticTable(steps=1), 1, lambda row: self.records.append(dict(row)))
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.now, self.version = 0.0, 0

    def trains(self, count: int, engines: int) -> None:
        for _ in range(count):
            seconds = 1 + 8 / engines
            self.now, self.version = self.now + seconds, self.version + 1
            figures = dict.fromkeys(FIGURES, 0.0) | {
                "seconds/total": seconds,
                "seconds/idle": seconds - 1,
                "seconds/compute": 1.0,
                **dict.fromkeys(("rollout_s/watched", "rollout_s/filling", "rollout_s/sampling"), seconds),
                "rollout_s/one_more": seconds * engines / (engines + 1),
                "ranks": 1.0,
                "eta": 1.0,
            }
            self.steps.append((self.version, figures))
            names = [f"e{i}" for i in range(engines)]
            status = {
                "model": "m",
                "version": self.version,
                "batches": [{"state": "PENDING"}],
                "engines": [{"name": name, "model": "m", "state": "open"} for name in names],
                "trained": {"batch": self.version - 1, "busy_s": 1.0, "load_s": 0.0, "rest_s": 0.0},
            }
            assert self.autoscaler.observe(self.now, status, names) == ""
            if self.autoscaler.step is not None:
                later = [one for one in self.steps if one[0] > self.autoscaler.since]
                self.lines += filter(None, [self.autoscaler.decide(later, (1, 1), None)])


def test_a_node_is_added_by_its_prediction_which_is_compared_with_what_then_happens() -> None:
    run = Run()
    run.trains(10, engines=1)
    assert run.lines == [], "too few steps are known"
    run.trains(1, engines=1)
    (line,) = run.lines
    assert line.startswith("one more rollout node: 1.0 engines generate a batch in 9.0 s")
    assert "; one more engine: +100% predicted" in line
    assert run.autoscaler.spare == 1
    run.trains(10, engines=2)
    assert len(run.lines) == 1, "the first of these may have begun before"
    run.trains(1, engines=2)
    assert run.lines[1].startswith(
        "since one more rollout node a step takes 5.0 s in place of 9.0 s (+80%; one more engine: +100% predicted"
    )
    change, outcome, *_ = run.records
    assert (change["step_s"], change["predicted"]["gain"]) == (9.0, 1.0)
    assert (outcome["step_s"], outcome["gain"]) == (5.0, 0.8)
