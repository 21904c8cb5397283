"""headgate's own policy: the gateway's reactors in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.simulate.combined import Combined
from scheduler.program import PROGRAMS
from scheduler.reactor import replay
from tests.unit.lab.simulate.scenarios import run, scenario

SHAPES: list[dict[str, Any]] = [
    {"eta": 0},
    {"eta": 1, "turns": {"mean": 3, "most": 5, "wait_s": 4.0}},
    {"eta": 3, "slots": 4, "batch": 16, "lengths": {"kind": "tail", "median": 300, "longest": 8000}},
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"lending": {"enabled": False}},
    {"lending": {"recall_ahead_share": 0.0}},
    {"placement": {"choice": {"min_gain_share": 0.6}, "migration": {"on": False}}},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"eta{shape['eta']}")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "defaults")
def test_the_bound_holds_no_token_is_lost_and_the_program_knows_what_is_so(
    settings: dict[str, Any], shape: dict[str, Any]
) -> None:
    run(scenario(**shape), policy=Combined(**settings))


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
    kept = run(given, policy=Combined(lending={"enabled": False}))[1].figures()
    figures = run(given)[1].figures()
    assert figures["idle_share"] < kept["idle_share"]
    assert figures["rollout_share"] > kept["rollout_share"]


def test_the_trainer_claims_its_nodes_before_the_batch_is_whole_if_it_recalls_ahead() -> None:
    """Most of the batch is computed when the last group arrives. One run scatters by a percent, so there are three."""
    given = scenario(batch=64, eta=1, lengths={"kind": "tail", "median": 1000, "longest": 28000})
    late, early = (
        sum(
            run(given, seed, policy=Combined(lending={"recall_ahead_share": lead}))[1].ends[-1]
            for seed in range(3)
        )
        for lead in (0.0, 1.0)
    )
    assert early < late
