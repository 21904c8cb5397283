"""Scenarios, their command, and estimates over seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab.simulate.__main__ import main
from lab.simulate.errors import ScenarioError
from lab.simulate.scenario import Scenario
from lab.simulate.study import Estimate

SCENARIOS = sorted((Path(__file__).parents[4] / "lab/simulate/scenarios").glob("**/*.toml"))
SMALL = """
gpus = 4
batch = 4
group = 2
batches = 3
warmup = 1
[lengths]
median = 100
"""


def app() -> typer.Typer:
    """Return `python -m lab.simulate`."""
    program = typer.Typer()
    program.command()(main)
    return program


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_can_be_run(path: Path) -> None:
    scenario = Scenario.load(path)
    assert scenario.name == path.stem
    assert 0 < scenario.train_gpus < scenario.gpus
    assert scenario.train_gpus % scenario.engine_gpus == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gpu = 'H900'", "no gpu 'H900'"),
        ("gpuz = 3", "gpuz"),
        ("eta = -1", "eta"),
        ("model = '72B'", "leaves no room"),
        ("recorded = 'none.jsonl'", r"none\.jsonl"),
        ("engine_gpus = 3", "multiple of engine_gpus"),
        ("engines_of = { 80 = 1 }", "engines_of"),
        ("gpus = 4\ngpus = 5", "Cannot overwrite"),
    ],
)
def test_a_bad_scenario_is_refused_by_what_is_wrong(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(change + SMALL)
    with pytest.raises(ScenarioError, match=message):
        Scenario.load(path)


def test_the_command_prints_a_table_and_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(SMALL)
    result = CliRunner().invoke(
        app(), [str(path), "--policy", "dora", "--policy", "sync_colocated", "--seeds", "2"]
    )
    assert result.exit_code == 0
    assert "Simulated" in result.stdout
    reports = json.loads(result.stdout.splitlines()[-1])
    assert reports["simulated"] is True
    assert list(reports["policies"]) == ["dora", "sync_colocated"]
    assert reports["policies"]["dora"]["tokens_per_s"]["ci95"] > 0


def test_engines_of_another_size_are_fewer_and_have_the_times_of_that_size(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(SMALL)
    arguments = [str(path), "--policy", "dora", "--seeds", "1"]
    reports = []
    for more in ([], ["--engine-gpus", "2"]):
        result = CliRunner().invoke(app(), [*arguments, *more])
        reports.append(json.loads(result.stdout.splitlines()[-1]))
    assert [one["engine_gpus"] for one in reports] == [1, 2]
    path.write_text("engine_gpus = 2" + SMALL)
    result = CliRunner().invoke(app(), arguments)
    assert json.loads(result.stdout.splitlines()[-1]) == reports[1]


@pytest.mark.parametrize(
    ("sizes", "engines"), [("{}", [1] * 8), ("{ 2 = 1, 4 = 1 }", [4, 2, 1, 1]), ("{ 8 = 1 }", [8])]
)
def test_some_engines_may_have_another_size_than_most(tmp_path: Path, sizes: str, engines: list[int]) -> None:
    path = tmp_path / "s.toml"
    path.write_text(f"engines_of = {sizes}" + SMALL)
    scenario = Scenario.load(path)
    assert scenario.engines(8, 0) == engines
    assert scenario.engines(8, 4) == engines + [1] * 4
    if engines != [1] * 8:
        with pytest.raises(ScenarioError, match="engines_of has"):
            scenario.engines(4, 4)


def test_the_command_refuses_a_policy_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(SMALL)
    result = CliRunner().invoke(app(), [str(path), "--policy", "best"])
    assert result.exit_code == 2


def test_an_interval_is_students() -> None:
    found = Estimate.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert Estimate.of([1.0]).half == 0


def test_measured_costs_take_the_place_of_the_data_sheets(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    measured = """
[engine_costs]
prefill_s = 2.5e-5
capacity = 65536
slots = 64
model = { s_per_kv_token = 3e-7, s_per_batch = 3e-3, s_per_call = 2e-4, s_per_step = 2e-3 }
[trainer_costs]
token_s = 1e-3
step_s = 0.5
spread = 0
"""
    path.write_text(SMALL + "longest = 20000\n" + measured)
    scenario = Scenario.load(path)
    assert scenario.engine.model.step_s(10, 1000) == pytest.approx(3e-4 + 3e-3 + 2e-3)
    assert scenario.trainer.seconds(1000, 1) == pytest.approx(1.0)
    with pytest.raises(ScenarioError, match="does not cover engines of another size"):
        Scenario.load(path, engine_gpus=2)
    path.write_text(SMALL + "longest = 70000\n" + measured)
    with pytest.raises(ScenarioError, match="65536"):
        Scenario.load(path)
    path.write_text(SMALL + measured.replace("s_per_step = 2e-3", "k5 = 2e-3"))
    with pytest.raises(ScenarioError, match="k5"):
        Scenario.load(path)
