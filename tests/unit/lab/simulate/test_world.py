"""Clusters in virtual time: what holds for every policy, and how the rivals work."""

from __future__ import annotations

from typing import Any

import pytest

from lab.simulate.dora import Dora
from lab.simulate.hardware import coefficients
from lab.simulate.meter import ROLES, Meter
from lab.simulate.scenario import Scenario
from lab.simulate.study import POLICIES
from lab.simulate.world import World
from tests.unit.lab.simulate.scenarios import scenario


class Watched(World):
    """Looks at the rule after everything that happens."""

    live = 0

    def _calm(self) -> None:
        super()._calm()
        self.live = max(self.live, sum(group.state != "dropped" for group in self.rule.groups()))


def run(name: str, given: Scenario, seed: int = 0) -> Meter:
    """One run, with its token balance and the GPUs' time checked."""
    world = Watched(given, POLICIES[name](), given.workload(seed))
    meter = world.run()
    assert meter.sampled == sum(meter.tokens) + meter.wasted + meter.underway
    assert world.live <= (1 if name == "sync_colocated" else given.eta + 1) * given.batch
    assert sum(meter.seconds[role] for role in ROLES) == pytest.approx(given.gpus * world.now)
    return meter


@pytest.mark.parametrize("name", ["sync_colocated", "dora"])
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_a_rival_keeps_its_bounds_and_loses_no_token(name: str, eta: int) -> None:
    for shape in ({}, {"turns": {"mean": 3, "most": 5, "wait_s": 4.0}}):
        meter = run(name, scenario(eta=eta, **shape))
        bound = 0 if name == "sync_colocated" else eta
        assert len(meter.tokens) == 6
        assert max(meter.group_staleness) <= bound
        assert max(max(ages) for ages in meter.staleness) <= bound
        assert meter.wasted == 0  # every group is rewarded, and none is superfluous


class Stays(Watched):
    """Notes which version sampled each trajectory, how many versions sample concurrently, and what moved within a turn."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spans: dict[str, set[int]] = {}
        self.concurrent = 0
        self.turns: dict[tuple[str, int], set[int]] = {}

    def _left(self, sample: Any) -> None:
        self.turns.setdefault((sample.name, sample.at), set()).add(sample.host.number)
        super()._left(sample)
        self.spans.setdefault(sample.name, set()).update(version for version, _ in sample.spans)

    def _calm(self) -> None:
        super()._calm()
        busy = {host.version for host in self.hosts if host.state == "open" and host.engine.load}
        self.concurrent = max(self.concurrent, len(busy))


def test_dora_samples_with_several_versions_concurrently_and_each_trajectory_with_one() -> None:
    given = scenario(eta=2, gpus=16, lengths={"kind": "tail", "median": 300, "longest": 6000})
    found = Stays(given, Dora(), given.workload(0))
    found.run()
    assert found.concurrent == 3
    assert all(len(versions) == 1 for versions in found.spans.values())
    assert any(len(hosts) > 1 for hosts in found.turns.values()), "calls move to engines of their version"
    prompts = sum(sample.turns[0].prompt for sample in found._samples.values())
    assert sum(host.engine.prefilled for host in found.hosts) <= prompts, "what moves takes its cache along"


def test_a_synchronous_policy_trains_the_workload_in_its_order() -> None:
    given = scenario()
    workload = given.workload(0)
    started = sum(workload.task(number).sampled for number in range(given.batches * given.batch))
    assert sum(run("sync_colocated", given).tokens) == started


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_is_decided_by_its_seed(name: str) -> None:
    first, again, other = (run(name, scenario(), seed).figures() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_twice_the_gpus_are_not_slower_where_all_replies_are_alike() -> None:
    plain = {"kind": "constant", "median": 500}
    times = [
        run("sync_colocated", scenario(gpus=gpus, batch=64, lengths=plain)).ends[-1] for gpus in (4, 8, 16)
    ]
    assert times == sorted(times, reverse=True)


def test_one_batch_takes_what_the_cost_models_predict() -> None:
    """Constant lengths on one engine each: generation, the switch, training and the switch back, by hand."""
    given = scenario(
        gpus=2, batch=1, group=2, batches=2, warmup=1, lengths={"kind": "constant", "median": 100}, prompt=50
    )
    meter = run("sync_colocated", given)
    model = given.engine.model
    steps = sum(model.step_s(1, 50 + i) for i in range(100))
    train = given.trainer.seconds(2 * 150, 2) + given.trainer.step_s
    switch = given.transfers(2)
    batch = 50 * given.engine.prefill_s + steps + switch.to_train_s + train
    assert meter.ends[0] == pytest.approx(batch)
    assert meter.ends[1] == pytest.approx(2 * batch + switch.to_rollout_s)


def test_a_version_takes_what_headgates_code_was_measured_to_take() -> None:
    """By hand: 7B's bytes, eight engines of which four receive concurrently, and links that are faster than the code."""
    measured = {"copy": 1e-9, "write": 4e-9, "check": 0.5e-9, "send": 2e-9, "swap": 1e-9, "fixed_s": 0.25}
    found = scenario(gpus=8, transfer_costs=measured).transfers(2)
    size = 2 * coefficients()["model"]["7B"]["parameters"]
    assert found.push_s == pytest.approx(1e-9 * size)
    assert found.delay_s == pytest.approx((4e-9 + 0.5e-9 + 2 * 2e-9) * size)
    assert found.pull_s == pytest.approx(0.25 + 1e-9 * size)
    assert found.to_train_s == scenario(gpus=8).transfers(2).to_train_s
    slow = {"copy": 0.0, "write": 0.0, "check": 0.0, "send": 0.0, "swap": 0.0}
    bounded = scenario(gpus=8, transfer_costs=slow).transfers(2)
    assert bounded.delay_s == pytest.approx(2 * size / coefficients()["link"]["fabric"])
