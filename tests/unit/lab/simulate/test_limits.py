"""What limits a run (`scheduler.policies.limits`), held against simulated runs with the change that it predicts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from lab.simulate.dora import Dora
from lab.simulate.scenario import LengthsTable, Scenario
from lab.simulate.world import World
from scheduler.policies import limits
from scheduler.policies.limits import Change, RolloutSeconds

_FULL = ("READY", "READY_WITH_CAPACITY")
_WARMUP = 3


class Watched(Dora):
    """Measures what a gateway and a trainer do. Engines and GPUs that train are separate."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []
        self._rollout = RolloutSeconds()
        self._before = (0.0, 0.0, asdict(self._rollout))

    def on_second(self, world: World) -> None:
        super().on_second(world)
        hosts = world.open_hosts()
        engines = [(h.engine.costs.model, float(world.look(h).running), float(h.engine.kv)) for h in hosts]
        waiting = len(world.held) + sum(len(host.engine.waiting) + len(host.kept) for host in world.hosts)
        episodes = sum(not sample.over for group in world.groups.values() for sample in group.samples)
        filling = any(row.state not in _FULL for row in world.rule.batches())
        eta = world.scenario.eta
        self._rollout.add(1.0, engines, waiting, episodes, filling, (eta + 2) / (eta + 1))

    def on_trained(self, world: World) -> None:
        at, trained, seconds = self._before
        gpus = world.layout.train_gpus
        self._before = (world.now, world.meter.seconds["train"] / gpus, asdict(self._rollout))
        total, busy = world.now - at, self._before[1] - trained
        own = {"seconds/total": total, "seconds/idle": total - busy, "seconds/compute": busy}
        own |= {"ranks": float(gpus), "eta": float(world.scenario.eta)}
        self.steps.append(own | limits.since(seconds, self._before[2]))
        super().on_trained(world)


def run(engines: int, train: int, eta: int) -> tuple[dict[str, Change], float]:
    """Return what is predicted after a run, and its trained tokens per second."""
    gpus, lengths = engines + train, LengthsTable(median=1000, sigma=0.6, longest=8000)
    sizes: dict[str, Any] = {"batch": 16, "batches": 11, "warmup": _WARMUP, "lengths": lengths}
    given = Scenario(gpus=gpus, model="1.5B", train_share=train / gpus, eta=eta, **sizes)
    policy = Watched()
    meter = World(given, policy, given.workload(0)).run()
    found = limits.advise(policy.steps[_WARMUP:])
    assert found is not None
    return {change.name: change for change in found.changes}, meter.figures()["tokens_per_s"]


@pytest.mark.parametrize(
    ("before", "name", "after"),
    [
        ((1, 2, 1), "one more engine", (2, 2, 1)),
        ((1, 2, 0), "eta 1", (1, 2, 1)),
        ((4, 1, 1), "one more engine", (5, 1, 1)),
        ((4, 1, 1), "one more rank", (4, 2, 1)),
    ],
)
def test_a_prediction_is_within_a_fifth_of_what_then_happens(
    before: tuple[int, int, int], name: str, after: tuple[int, int, int]
) -> None:
    predicted, speed = run(*before)
    change, gained = predicted[name], run(*after)[1] / speed - 1
    nearest = min(max(gained, change.low), change.high)
    assert 1 + gained == pytest.approx(1 + nearest, rel=0.2)
    assert gained < change.high + 0.01 or not change.most
