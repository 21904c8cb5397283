"""headgate's own policy: the gateway's reactors in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lab.simulate.combined import Combined, Knobs
from lab.simulate.foresight import Foresight
from lab.simulate.world import World
from scheduler.program import PROGRAMS
from scheduler.reactor import replay
from tests.unit.lab.simulate.scenarios import run, scenario

SHAPES: list[dict[str, Any]] = [
    {},
    {"turns": {"mean": 3, "most": 5, "wait_s": 4.0}},
    {"slots": 4, "batch": 16, "lengths": {"kind": "tail", "median": 300, "longest": 8000}},
]
ETAS = [0, 1, 3]
KNOBS = [
    Knobs(),
    Knobs(lend=False),
    Knobs(recall_ahead_share=0.0),
    Knobs(min_gain_share=0.6, migrate=False),
    Knobs(admit="engine"),
]


def combinations() -> Iterator[Any]:
    """All of them; those without which every two values still meet are long."""
    for (k, knobs), (s, shape), (e, eta) in product(enumerate(KNOBS), enumerate(SHAPES), enumerate(ETAS)):
        marks = () if (k + s + e) % 3 == 0 else pytest.mark.long
        yield pytest.param(knobs, shape, eta, marks=marks, id=f"knobs{k}-shape{s}-{eta}")


@pytest.mark.parametrize(("knobs", "shape", "eta"), combinations())
def test_the_bound_holds_no_token_is_lost_and_the_program_knows_what_is_so(
    knobs: Knobs, shape: dict[str, Any], eta: int
) -> None:
    run(scenario(eta=eta, **shape), policy=Combined(knobs=knobs))


def test_where_every_entry_is_taken_at_once_the_engine_that_admits_changes_nothing() -> None:
    """A place opens with a version, and lies where only that one's bound reaches."""
    newest, engine = (
        run(scenario(eta=2), policy=Combined(knobs=Knobs(admit=admit)))[1].figures()
        for admit in ("newest", "engine")
    )
    assert newest == engine


def test_a_run_is_decided_by_its_seed() -> None:
    first, again, other = (run(scenario(), seed)[1].figures() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_recorded_run_replays_and_has_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "simulated.jsonl"
    policy = Combined(path)
    given = scenario(**SHAPES[1])
    world, _ = run(given, policy=policy)
    policy.close()
    report = replay(path, PROGRAMS["control"])
    assert report.equal
    decisions = report.runs[0].decisions
    ports = {decision.port for decision in decisions}
    assert {"placement_model.placed", "update_model.opened", "lending.roles"} <= ports
    placed = sum(len(d.value) for d in decisions if d.port == "placement_model.placed")
    assert placed >= len(world.groups) * given.group
    assert report.runs[0].run.last.time <= round(world.now * 1e9)


def test_nodes_are_lent_while_the_trainer_waits_and_given_back_before_it_trains() -> None:
    given = scenario(
        batch=32, batches=4, warmup=1, lengths={"kind": "lognormal", "median": 1500, "sigma": 0.7}
    )
    kept = run(given, policy=Combined(knobs=Knobs(lend=False)))[1].figures()
    figures = run(given)[1].figures()
    assert figures["idle_share"] < kept["idle_share"]
    assert figures["rollout_share"] > kept["rollout_share"]


def test_the_trainer_claims_its_nodes_before_the_batch_is_whole_if_it_recalls_ahead() -> None:
    """Most of the batch is computed when the last group arrives. One run scatters by a percent, so there are three."""
    given = scenario(batch=64, eta=1, lengths={"kind": "tail", "median": 1000, "longest": 28000})
    late, early = (
        sum(
            run(given, seed, policy=Combined(knobs=Knobs(recall_ahead_share=lead)))[1].ends[-1]
            for seed in range(3)
        )
        for lead in (0.0, 1.0)
    )
    assert early < late


def test_between_sites_weights_are_on_their_way() -> None:
    one, two = (run(scenario(sites=sites))[1] for sites in (1, 2))
    assert two.ends[0] == one.ends[0]
    assert two.ends[-1] > one.ends[-1]


def test_a_call_that_was_given_up_teaches_nothing_about_lengths() -> None:
    given = scenario()
    policy = Combined()
    world = World(given, policy, given.workload(0))
    policy.on_room(world)
    sample = next(iter(policy._calls.values()))
    policy.on_left(world, [(sample, 0, sample.call.context)])
    assert sample not in policy._calls.values()
    assert not policy._foresight._newest


def test_foresight_knows_what_has_ended_and_nothing_else() -> None:
    foresight = Foresight(least=3, window=5)
    assert foresight.expect(0.99) == 0
    for tokens in (10, 20, 30):
        foresight.learn(tokens)
    assert foresight.expect(0.0) == 10
    assert foresight.expect(0.5) == 20
    assert foresight.expect(1.0) == 30
    for tokens in (100, 200, 300, 400, 500):
        foresight.learn(tokens)
    assert foresight.expect(0.0) == 100
    assert foresight.expect(0.8) == 500
