"""Small scenarios, and how to run them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lab.simulate.combined import Combined
from lab.simulate.meter import ROLES, Meter
from lab.simulate.scenario import Scenario
from lab.simulate.world import World


def scenario(**changes: Any) -> Scenario:
    """A small cluster."""
    base: dict[str, Any] = {
        "name": "small",
        "gpus": 8,
        "model": "7B",
        "batch": 8,
        "group": 4,
        "eta": 1,
        "batches": 6,
        "warmup": 2,
        "lengths": {"kind": "lognormal", "median": 300, "sigma": 0.9, "longest": 6000},
    }
    return Scenario(**{**base, **changes})


class Watched(World):
    """After everything that happens, compares what the program believes with what is so."""

    checks = 0

    def _calm(self) -> None:
        super()._calm()
        policy = self.policy
        assert isinstance(policy, Combined)
        live = sum(group.state != "dropped" for group in self.rule.groups())
        assert live <= (self.scenario.eta + 1) * self.scenario.batch
        inside = sum(sample.host is not None for sample in policy._calls.values())
        assert len(policy._calls) - inside == policy._placement.waiting
        believed = Counter({name: len(runs) for name, runs in policy._placement._inside.items() if runs})
        held = {host.name: host.engine.load + len(host.kept) for host in self.hosts}
        assert believed == Counter({name: load for name, load in held.items() if load})
        for name, engine in policy._placement._engines.open.items():
            assert self.hosts[int(name[1:])].state == "open"
            assert self.hosts[int(name[1:])].version >= engine.version
        self.checks += 1


def run(given: Scenario, seed: int = 0, policy: Combined | None = None) -> tuple[Watched, Meter]:
    """One run, with its token balance, the GPUs' time and the bound checked."""
    world = Watched(given, policy or Combined(), given.workload(seed))
    meter = world.run()
    assert world.checks > 100
    assert meter.sampled == sum(meter.tokens) + meter.wasted + meter.underway
    assert meter.wasted == 0
    assert sum(meter.seconds[role] for role in ROLES) == pytest.approx(given.gpus * world.now)
    assert len(meter.tokens) == given.batches
    assert max(meter.group_staleness) <= given.eta
    assert max(max(ages) for ages in meter.staleness) <= given.eta
    return world, meter
