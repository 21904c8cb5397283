"""`scheduler plan`: profiles that are read or refused, and what a recorded run says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scheduler.cli import app
from scheduler.planning import measured
from scheduler.planning.profile import BadProfile, Profile
from scheduler.policies.allocation import AS_MEASURED, Points, Sampling
from scheduler.policies.staleness_events import Consume, Leased
from scheduler.program.calls import Arrived, Demand, Fitted, Left, Opened, Placed
from scheduler.timeline import Timeline
from scheduler.timeline.recorded import Block, Written, timeline_of
from tests.unit.timeline.story import recorded

MEASURED: dict[str, Any] = {
    "generation": {"seconds": {"1": 60.0}},
    "training": {"seconds": {"1": 20.0}},
    "sites": {"here": {"nodes": 8}},
}


def test_a_measured_profile_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(
        "[generation]\nseconds = { 1 = 60.0 }\n[training]\nseconds = { 1 = 20.0 }\n[sites.here]\nnodes = 8\n"
    )
    result = CliRunner().invoke(app, ["plan", str(path), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output.splitlines()[-1])
    best = {"rollout": 6, "train": 2, "step_s": 10.0, "generation_s": 10.0, "training_s": 10.0, "cost": 8.0}
    assert said["best"] == best | {"site": "here"}
    assert said["sensitivity"]["length +20%"]["step_s"] == 12.0
    assert {(split["rollout"], split["train"]) for split in said["neighbours"]} == {
        (5, 3),
        (5, 2),
        (6, 1),
        (7, 1),
    }
    assert Path(said["png"]).read_bytes().startswith(b"\x89PNG")


def test_the_profile_of_the_documentation_is_one() -> None:
    text = Path(__file__).parents[3].joinpath("docs", "scheduler.md").read_text()
    block = text.partition("## Planning")[2].partition("```toml\n")[2].partition("```")[0]
    sites = Profile.parse(tomllib.loads(block)).sites_to_try()
    assert [site.best().step_s > 0 for site in sites.values()] == [True, True]


def test_two_sites_are_tried_both_ways() -> None:
    hardware = {"fast": {"cost": 3.0, "training": 10.0}}
    sites = {"a": {"nodes": 4}, "b": {"nodes": 2, "hardware": "fast"}}
    tried = Profile.parse(MEASURED | {"hardware": hardware, "sites": sites}).sites_to_try()
    best = {
        name: (site.best().rollout, site.best().train, site.best().step_s) for name, site in tried.items()
    }
    assert best == {
        "rollout in a, training in b": (4, 1, 15.0),  # 60 / 4 against 20 / 10: one node of b is enough
        "rollout in b, training in a": (2, 1, 30.0),  # 60 / 2 against 20
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"generation": {}}, "either `seconds`, or all of k1"),
        ({"generation": {"k1": 0.1}}, "all of k1"),
        ({"generation": {"k1": 0, "k2": 1, "k3": 1, "k4": 1}}, "`\\[batch\\]` is needed"),
        ({"training": {"seconds": {"1": 1.0}, "token_s": 1.0}}, "either `seconds`, or `token_s`"),
        ({"training": {"token_s": 1.0}}, "`\\[batch\\]` is needed"),
        ({"sites": {}}, "sites"),
        ({"sites": {"a": {"nodes": 4, "hardware": "none"}}}, "no \\[hardware.none\\]"),
        ({"sites": {"a": {"nodes": 0}}}, "sites.a.nodes"),
        ({"site": {}}, "site: Extra inputs"),
        ({"generation": {"seconds": {"0": 3.0}}}, "generation.seconds.0"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_names_of_its_keys(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadProfile, match=said):
        Profile.parse(MEASURED | changed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of the two"),
        (["a.toml", "--nodes", "4"], "are for --run"),
        (["nowhere.toml"], "No such file"),
        (["--run", "nowhere"], "No such file"),
    ],
)
def test_the_command_refuses(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert (result.exit_code, said in result.output) == (2, True)


WORK = Written((Block("train", 1006, 1008), Block("train", 1016, 1018)))


def calls(fitted: bool) -> tuple[list[Any], Timeline]:
    """Two steps of 10 s: in each an engine samples for 6 s, two calls of 100 + 50 and 100 + 150 tokens."""
    told: list[tuple[float, Any]] = [(0, Opened("e", 0)), (0, Leased(0))]
    if fitted:
        told.append((0, Fitted("e", 0.0, 0.02, 0.0, 0.02)))
    for start in (0, 10):
        for name, length in (("a", 150), ("b", 250)):
            call = f"{name}{start}"
            told += [(start, Demand(arrived=(Arrived(call, 0, 100),))), (start, Placed(call, "e"))]
            told.append((start + 6, Demand(left=(Left(call, length),))))
        told.append((start + 9.5, Consume(start // 10)))
    runs = recorded(*sorted(told, key=lambda one: one[0]), until=21)
    return runs, timeline_of(runs, {"actor": WORK}).within(0.0, 19.5)


def test_a_run_without_coefficients_is_divided_evenly() -> None:
    runs, timeline = calls(fitted=False)
    site, basis = measured.site_of(runs, timeline, nodes=4)
    assert (site.generation, site.training) == (Points(((1, 6.0),)), Points(((1, 2.0),), trains=True))
    assert (site.best().rollout, site.best().train) == (3, 1)
    assert "no coefficients" in " ".join(basis)


def test_a_run_with_coefficients_is_an_engines_model_made_to_fit() -> None:
    runs, timeline = calls(fitted=True)
    site, basis = measured.site_of(runs, timeline)
    model = site.generation
    assert isinstance(model, Sampling)
    assert (model.samples, model.prompt, model.reply, model.longest, model.most) == (
        2,
        100.0,
        100.0,
        150.0,
        2,
    )
    # The model says 150 steps of 40 ms for the longest, which is what the run took: 6 s.
    assert model.factor == pytest.approx(1.0)
    assert model.seconds(1, AS_MEASURED) == pytest.approx(6.0)
    assert site.rollout.nodes == 2
    assert "1.00 times" in " ".join(basis)


def test_a_run_without_training_is_refused() -> None:
    runs = recorded((0, Opened("e", 0)), until=4)
    with pytest.raises(BadProfile, match="no node trained"):
        measured.site_of(runs, timeline_of(runs))
