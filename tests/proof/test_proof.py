"""The proof, run: no token is lost, doubled or mislabelled by updates and a death; and each mutant is caught for what it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.proof.__main__ import main
from tests.proof.mutants import MUTANTS, Mutant
from tests.proof.trial import run_trial, small
from tests.proof.world import Plan


@pytest.fixture(autouse=True)
def _as_loud_as_before() -> Iterator[None]:
    """The command silences the gateways that it runs."""
    gateways = logging.getLogger("gateway")
    level = gateways.level
    yield
    gateways.setLevel(level)


@pytest.mark.parametrize(
    ("mode", "order"), [("abort", "pull"), ("keep", "pull"), ("abort", "rolling"), ("keep", "rolling")]
)
async def test_eight_updates_and_a_death_lose_nothing_and_mislabel_nothing(mode: str, order: str) -> None:
    trial = await run_trial(Plan(mode=mode, order=order, seed=1), print)
    assert trial.problems == []
    assert trial.report.right
    assert trial.report.tokens_checked > 1000
    assert len(trial.outcome.updates) == 8


@pytest.mark.parametrize(
    ("mutant", "mode"),
    [(m, mode) for m in MUTANTS for mode in m.modes],
    ids=lambda v: str(getattr(v, "name", v)),
)
async def test_the_checker_catches(mutant: Mutant, mode: str) -> None:
    trial = await run_trial(small(Plan(mode=mode)), print, mutant)
    assert mutant.caught_by(trial.report), trial.report.to_json()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_two_real_engines_and_a_death_lose_nothing_and_mislabel_nothing(mode: str) -> None:
    trial = await run_trial(Plan(engine="vllm", mode=mode, tokens=1600), print)
    assert trial.problems == []
    assert trial.report.right


def test_the_command_ends_with_its_report(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    options = ["--engine", "fake", "--mode", "abort", "--updates", "1", "--streams", "2", "--agents", "1"]
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, [*options, "--no-mutants", "--out", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["tokens_checked"] > 0
    zero = ("wrong_version", "lost", "doubled", "failed_requests", "mutants", "mutants_caught")
    assert [report[key] for key in zero] == [0] * len(zero)
