"""headgate's own policy: the gateway's reactors in virtual time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.simulate.combined import Combined
from scheduler.planning.recorded import timeline_of
from scheduler.program import PROGRAMS
from scheduler.reactor import Limit, Recording, replay
from scheduler.reactor.reading import read
from scheduler.reactor.recording import Entry, Full
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


def test_the_last_files_of_a_recording_replay_and_have_what_a_whole_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: dict[str, list[Entry]] = {}
    open_recording = Recording.open
    for name, size in (("whole", 10**9), ("last", 100_000)):
        monkeypatch.setattr(Recording, "open", partial(open_recording, limit=Limit(size)))
        policy = Combined(tmp_path / name)
        run(scenario(**SHAPES[1]), policy=policy)
        policy.close()
        runs = read(tmp_path / name)
        recorded[name] = [entry for run in runs for entry in run.entries if not isinstance(entry, Full)]
    assert len(runs) == 2
    assert 0 < len(recorded["last"]) < len(recorded["whole"]) / 2
    assert recorded["last"] == recorded["whole"][-len(recorded["last"]) :]
    assert replay(tmp_path / "last", PROGRAMS["control"]).equal
    whole, last = (timeline_of(read(tmp_path / name)) for name in ("whole", "last"))
    begin = last.began - whole.began
    assert begin > 0
    for node, seconds in whole.within(begin, whole.end_s).by_kind().items():
        assert last.by_kind()[node] == pytest.approx(seconds, abs=1e-6)


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
