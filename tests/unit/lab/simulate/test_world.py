"""Clusters in virtual time: what holds for every policy, and the bounds of each."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from lab.simulate.baselines import BASELINES
from lab.simulate.engine import EngineCosts, PaperModel
from lab.simulate.entities import Group, Layout, Sample
from lab.simulate.hardware import TrainerCosts, coefficients
from lab.simulate.meter import ROLES, Meter
from lab.simulate.registry import RIVALS
from lab.simulate.scenario import Scenario
from lab.simulate.world import Policy, World
from tests.unit.lab.simulate.scenarios import scenario

BOUND: dict[str, Callable[[int], float]] = {
    "sync_colocated": lambda eta: 0,
    "sync_split": lambda eta: 0,
    "one_step": lambda eta: 1,
    "streamrl": lambda eta: 1,
    "roll_flash": lambda eta: eta,
    "staleflow": lambda eta: eta,
    "dora": lambda eta: eta,
    "heddle": lambda eta: eta,
    "areal": lambda eta: math.inf,
    "verl_async": lambda eta: math.inf,
    "seamlessflow": lambda eta: math.inf,
}
"""The most that a trained group's version may be behind, as lab/rules states it."""
LIVE: dict[str, Callable[[int], int]] = {
    **{name: lambda eta: eta + 1 for name in BASELINES},
    "sync_colocated": lambda eta: 1,
    "sync_split": lambda eta: 1,
    "one_step": lambda eta: 2,
    "streamrl": lambda eta: 2,
}
"""The most batches that may be live."""


BEFORE = "58c3743dd2524e48a4a666ec30aadbe2d7f52acc1f329f92eb63f5839e288a7c"


class Watched(World):
    """Looks at the rule after everything that happens."""

    live = 0

    def _calm(self) -> None:
        super()._calm()
        self.live = max(self.live, sum(group.state != "dropped" for group in self.rule.groups()))


def run(name: str, given: Scenario, seed: int = 0, policy: Policy | None = None) -> Meter:
    """One run, with its token balance and the GPUs' time checked."""
    world = Watched(given, policy or BASELINES[name](), given.workload(seed))
    meter = world.run()
    assert meter.sampled == sum(meter.tokens) + meter.wasted + meter.underway
    assert world.live <= LIVE[name](given.eta) * given.batch
    assert sum(meter.seconds[role] for role in ROLES) == pytest.approx(given.gpus * world.now)
    return meter


def started(given: Scenario, seed: int, batches: int) -> int:
    """Tokens of the first batches, as the workload has them."""
    workload = given.workload(seed)
    return sum(workload.task(n).sampled for n in range(batches * given.batch))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_a_policy_keeps_its_bounds_and_loses_no_token(name: str, eta: int) -> None:
    for shape in ({}, {"turns": {"mean": 3, "most": 5, "wait_s": 4.0}}):
        meter = run(name, scenario(eta=eta, **shape))
        assert len(meter.tokens) == 6
        assert max(meter.group_staleness) <= BOUND[name](eta)
        if math.isfinite(BOUND[name](eta)):
            assert max(max(ages) for ages in meter.staleness) <= BOUND[name](eta)
        assert meter.wasted == 0  # every group is rewarded, and none is superfluous


def test_tokens_older_than_eta_are_counted_apart() -> None:
    meter = Meter(scenario(eta=1, batches=2, warmup=1), Layout(1, 1), [])
    for batch, spans in enumerate([[(0, 100)], [(-1, 30), (0, 50), (1, 20)]]):
        group = Group("g", spans[0][0], 0.5)
        group.samples.append(Sample("g.0", group, (), spans=spans))
        meter.trained(10.0 * (batch + 1), batch, [group])
    figures = meter.figures()
    assert (figures["tokens_per_s"], figures["bounded_tokens_per_s"]) == (10.0, 7.0)


@pytest.mark.parametrize("name", BASELINES)
def test_a_trainer_that_takes_what_comes_breaks_no_bound(name: str) -> None:
    given = scenario(eta=1, stream=64, recompute=False, threshold=0.5)
    meter = run(name, given)
    assert max(meter.group_staleness) <= BOUND[name](1)
    assert meter.wasted == 0
    assert meter.ends[-1] <= run(name, scenario(eta=1, stream=0, recompute=True, threshold=0.5)).ends[-1]


def test_a_trainer_without_gpus_of_its_own_waits_for_the_batch() -> None:
    given = scenario()
    for name in ("sync_colocated", "seamlessflow"):
        assert run(name, given.model_copy(update={"stream": 64})).ends == run(name, given).ends
    split = run("sync_split", given.model_copy(update={"stream": 64}))
    assert split.ends[-1] < run("sync_split", given).ends[-1]


def test_the_threshold_of_a_scenario_applies_to_every_policy_with_verls_window() -> None:
    for name in ("verl_async", "seamlessflow"):
        narrow, wide = (run(name, scenario(eta=2, threshold=threshold)) for threshold in (0.25, 2.0))
        assert narrow.figures()["staleness_mean"] < wide.figures()["staleness_mean"]
        assert wide.ends == run(name, scenario(eta=2)).ends
    given = run("verl_async", scenario(eta=2), policy=RIVALS["verl_async_0.3"]())
    assert given.ends == run("verl_async", scenario(eta=2, threshold=0.3)).ends


@pytest.mark.parametrize("trigger", ["throughput", "cache", "queue"])
def test_every_trigger_of_a_pull_keeps_the_bound(trigger: str) -> None:
    given = scenario(batch=32, eta=1, lengths={"kind": "tail", "median": 500, "longest": 14000})
    meter = run("staleflow", given, policy=RIVALS[f"staleflow_{trigger}"]())
    assert max(meter.group_staleness) <= 1
    assert meter.ends != run("staleflow", given).ends, "the trigger decides something"


@pytest.mark.parametrize("name", ["roll_flash", "dora"])
def test_idle_conversations_lose_their_cache_only_where_it_is_short(name: str) -> None:
    def prefilled(capacity: int, idle_caches: bool) -> int:
        costs = EngineCosts(PaperModel(1e-8, 5e-3, 1e-4, 3e-3), 1e-5, capacity, 256)
        turns = {"mean": 4, "most": 6, "wait_s": 20.0}
        lengths = {"kind": "lognormal", "median": 300, "sigma": 0.5, "longest": 600}
        given = scenario(eta=1, engine_costs=costs, turns=turns, lengths=lengths, idle_caches=idle_caches)
        return run(name, given).prefilled

    assert prefilled(10**8, True) == prefilled(10**8, False)
    assert prefilled(6_000, True) > prefilled(6_000, False)


def test_attention_makes_training_longer_by_the_length_of_an_episode() -> None:
    def trained_s(attention: float) -> float:
        costs = TrainerCosts(token_s=1e-3, recompute_s=0.0, step_s=0.0, spread=0.0)
        lengths = {"kind": "constant", "median": 900}
        given = scenario(prompt=100, trainer_costs=costs, lengths=lengths, attention=attention)
        return run("sync_split", given).seconds["train"]

    assert trained_s(1e-4) == pytest.approx(1.1 * trained_s(0.0))


class Stays(Watched):
    """Notes which version sampled each trajectory, how many versions sample concurrently, and what moved within a turn."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spans: dict[str, set[int]] = {}
        self.at_once = 0
        self.turns: dict[tuple[str, int], set[int]] = {}

    def _left(self, sample: Sample) -> None:
        assert sample.host is not None
        self.turns.setdefault((sample.name, sample.at), set()).add(sample.host.number)
        super()._left(sample)
        self.spans.setdefault(sample.name, set()).update(version for version, _ in sample.spans)

    def _calm(self) -> None:
        super()._calm()
        busy = {host.version for host in self.hosts if host.state == "open" and host.engine.load}
        self.at_once = max(self.at_once, len(busy))


def stays(name: str, **shape: Any) -> Stays:
    """A run with long tails, looked at."""
    tails = {"kind": "tail", "median": 300, "longest": 6000}
    given = scenario(eta=2, gpus=16, train_share=0.5, lengths=tails, **shape)
    world = Stays(given, BASELINES[name](), given.workload(0))
    world.run()
    return world


def test_dora_samples_with_several_versions_at_once_and_each_trajectory_with_one() -> None:
    found = stays("dora")
    assert found.at_once == 3
    assert all(len(versions) == 1 for versions in found.spans.values())
    assert any(len(hosts) > 1 for hosts in found.turns.values()), "calls move to engines of their version"
    prompts = sum(sample.turns[0].prompt for sample in found._samples.values())
    assert sum(host.engine.prefilled for host in found.hosts) <= prompts, "what moves takes its cache along"


def test_heddle_moves_trajectories_while_their_tools_work_and_at_no_other_time() -> None:
    found = stays("heddle", turns={"mean": 3, "most": 5, "wait_s": 4.0})
    assert all(len(hosts) == 1 for hosts in found.turns.values())
    engines: dict[str, set[int]] = {}
    for (name, _), hosts in found.turns.items():
        engines.setdefault(name, set()).update(hosts)
    assert any(len(hosts) > 1 for hosts in engines.values())


@pytest.mark.parametrize("name", ["staleflow", "areal", "sync_split"])
def test_weights_that_cross_the_wide_network_are_late_for_every_policy(name: str) -> None:
    """With eta 0 nothing runs during the transfer."""
    near, far = (run(name, scenario(eta=0, sites=sites)).ends for sites in (1, 2))
    assert far[0] == near[0]
    across = scenario(sites=2).transfers(4).delay_s - scenario().transfers(4).delay_s
    assert far[1] - near[1] == pytest.approx(across, abs=1.0)  # StaleFlow looks once a second


@pytest.mark.parametrize("name", ["sync_colocated", "sync_split"])
def test_a_synchronous_policy_trains_the_workload_in_its_order(name: str) -> None:
    given = scenario()
    assert sum(run(name, given).tokens) == started(given, 0, given.batches)


@pytest.mark.parametrize("name", BASELINES)
def test_a_run_is_decided_by_its_seed(name: str) -> None:
    first, again, other = (run(name, scenario(), seed).figures() for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", ["areal", "roll_flash"])
def test_an_asynchronous_rule_with_eta_0_is_synchronous_disaggregated(name: str) -> None:
    given = scenario(eta=0)
    assert run(name, given).ends == run("sync_split", given).ends


@pytest.mark.parametrize(
    "name", ["sync_colocated", "sync_split", "one_step", "areal", "roll_flash", "seamlessflow"]
)
def test_twice_the_gpus_are_not_slower_where_all_replies_are_alike(name: str) -> None:
    plain = {"kind": "constant", "median": 500}
    times = [
        run(name, scenario(gpus=gpus, train_share=0.5, batch=64, lengths=plain)).ends[-1]
        for gpus in (4, 8, 16)
    ]
    assert times == sorted(times, reverse=True)


def test_the_hooks_for_the_combined_policy_changed_no_baseline() -> None:
    """The batches and times of each baseline before `Plain` had `on_left`, `on_opened` and `on_asleep` (see test_frozen.py).
    StaleFlow's are others since its weights travel; DORA and Heddle came later."""
    turns = {"mean": 3, "most": 5, "wait_s": 4.0}
    then = [name for name in BASELINES if name not in ("staleflow", "dora", "heddle")]
    meters = {name: run(name, scenario(turns=turns)) for name in then}
    did = {name: (meter.tokens, [f"{end:.9f}" for end in meter.ends]) for name, meter in meters.items()}
    assert hashlib.sha256(json.dumps(did).encode()).hexdigest() == BEFORE


def test_one_batch_takes_what_the_cost_models_predict() -> None:
    """Constant lengths on one engine each: generation, the switch, training and the switch back, by hand."""
    given = scenario(
        gpus=2, batch=1, group=2, batches=2, warmup=1, lengths={"kind": "constant", "median": 100}, prompt=50
    )
    meter = run("sync_colocated", given)
    model = given.engine.model
    steps = sum(model.step_s(1, 50 + i) for i in range(100))
    train = given.trainer.seconds(2 * 150, 2, True) + given.trainer.step_s
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
    assert found.delay_s == found.overlapped_s == pytest.approx((4e-9 + 0.5e-9 + 2 * 2e-9) * size)
    assert found.pull_s == pytest.approx(0.25 + 1e-9 * size)
    assert found.to_train_s == scenario(gpus=8).transfers(2).to_train_s
    slow = {"copy": 0.0, "write": 0.0, "check": 0.0, "send": 0.0, "swap": 0.0}
    bounded = scenario(gpus=8, transfer_costs=slow).transfers(2)
    assert bounded.delay_s == pytest.approx(2 * size / coefficients()["link"]["fabric"])


def test_lent_nodes_are_busier_than_a_split() -> None:
    given = scenario(batch=32, lengths={"kind": "lognormal", "median": 1000, "sigma": 0.5})
    split, lent = run("verl_async", given).figures(), run("seamlessflow", given).figures()
    assert lent["idle_share"] < split["idle_share"]


def test_more_asynchrony_helps_where_replies_are_skewed() -> None:
    given = {"batch": 16, "lengths": {"kind": "tail", "median": 500, "longest": 14000}}
    rates = [run("areal", scenario(eta=eta, **given)).figures()["tokens_per_s"] for eta in (0, 1, 4)]
    assert rates == sorted(rates)
    assert rates[1] > 1.3 * rates[0]


def test_all_stand_still_while_weights_are_sent_together() -> None:
    given = scenario(gpus=2, batch=1, group=2, batches=2, warmup=1, train_share=0.5)
    assert run("sync_split", given).seconds["switching"] == pytest.approx(2 * given.transfers(1).collective_s)
