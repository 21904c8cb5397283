"""`scheduler plan`: profiles that are read or refused, and what is derived from a recorded run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scheduler.cli import app
from scheduler.cluster.file import ClusterFile
from scheduler.planning import measured, report
from scheduler.planning.profile import BadProfile, Profile
from scheduler.planning.recorded import Block, TrainerRecord, timeline_of
from scheduler.planning.timeline import Timeline
from scheduler.policies.allocation import AS_MEASURED, Points, Sampling, Site, Training
from scheduler.policies.staleness_events import Consume, Leased
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import Arrived, CallDeparted, Demand, Opened, Placed, SpeedFitted
from scheduler.program.nodes import Hosted, NodeAdded
from tests.unit.scheduler.planning.story import recorded

MEASURED: dict[str, Any] = {
    "generation": {"seconds": {"1": 60.0}},
    "training": {"seconds": {"1": 20.0}},
    "sites": {"here": {"nodes": 8}},
}


def test_a_measured_profile_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(
        "[generation]\nseconds = { 1 = 60.0 }\n[training]\nseconds = { 1 = 20.0 }\n[sites.here]\nnodes = 8\n"
        "[memory]\ngpu_gb = 80\nengine_gb = 70\ntrainer_gb = 60\n"
    )
    result = CliRunner().invoke(app, ["plan", str(path), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output.splitlines()[-1])
    best = {"rollout": 6, "train": 2, "step_s": 10.0, "generation_s": 10.0, "training_s": 10.0, "cost": 8.0}
    assert plan["best"] == best | {"site": "here"}
    assert plan["memory"]["kind"] == "in turn" and "engine and trainer on one GPU: in turn" in result.output
    assert plan["sensitivity"]["length +20%"]["step_s"] == 12.0
    assert {(split["rollout"], split["train"]) for split in plan["neighbors"]} == {
        (5, 3),
        (5, 2),
        (6, 1),
        (7, 1),
    }
    file = ClusterFile.load(Path(plan["cluster"]))
    assert file.trainer is not None and file.trainer.ranks == 2
    assert [file._engines(node.engines, node.tags) for node in file.nodes.values()] == [1] * 6 + [0] * 2
    assert Path(plan["png"]).read_bytes().startswith(b"\x89PNG")


def test_the_profile_of_the_documentation_is_one() -> None:
    text = Path(__file__).parents[4].joinpath("docs", "topics", "scheduler.md").read_text()
    block = text.partition("## Plan a cluster")[2].partition("```toml\n")[2].partition("```")[0]
    sites = Profile.parse(tomllib.loads(block)).sites_to_try()
    assert sites and all(site.best().step_s > 0 for site in sites.values())


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


def test_engines_of_each_size_are_tried_and_a_longest_reply_may_take_eta_more_batches() -> None:
    """A step takes 10 ms, or 4 in engines of twice the GPUs, of which a node has half as many; 3 nodes sample 16 replies of 100
    tokens, the longest of 1,000, and training takes no time to speak of. The seconds are computed by hand."""
    small = {"s_per_kv_token": 0, "s_per_batch": 0.01, "s_per_call": 0, "s_per_step": 0, "engines": 2}
    changed = {
        "generation": small,
        "sizes": {"large": small | {"s_per_batch": 0.004, "engines": 1, "max_running": 2}},
        "training": {"token_s": 1e-9},
        "sites": {"here": {"nodes": 4}},
    }

    def steps(**batch: float) -> dict[str, float]:
        work = {"samples": 16, "reply_tokens": 100, **batch}
        tried = Profile.parse(MEASURED | changed | {"batch": work}).sites_to_try()
        return {name: site.best().step_s for name, site in tried.items()}

    assert steps() == pytest.approx(
        {"here": 1.0, "here, engines large": 1.2}
    )  # 6 replies an engine, 2 concurrently
    assert steps(longest_tokens=1000) == pytest.approx({"here": 10.0, "here, engines large": 4.0})
    assert steps(longest_tokens=1000, eta=3) == pytest.approx({"here": 2.5, "here, engines large": 1.2})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sizes": {"large": {"s_per_kv_token": 0.1}}}, "sizes.large"),
        ({"generation": {}}, "either `seconds`, or all of s_per_kv_token"),
        ({"generation": {"s_per_kv_token": 0.1}}, "all of s_per_kv_token"),
        (
            {"generation": {"s_per_kv_token": 0, "s_per_batch": 1, "s_per_call": 1, "s_per_step": 1}},
            "`\\[batch\\]` is needed",
        ),
        ({"training": {"seconds": {"1": 1.0}, "token_s": 1.0}}, "either `seconds`, or `token_s`"),
        ({"training": {"token_s": 1.0}}, "`\\[batch\\]` is needed"),
        ({"sites": {}}, "sites"),
        ({"sites": {"a": {"nodes": 4, "hardware": "none"}}}, "no \\[hardware.none\\]"),
        ({"sites": {"a": {"nodes": 0}}}, "sites.a.nodes"),
        ({"site": {}}, "site: there is no such key; did you mean `sites`"),
        ({"generation": {"seconds": {"0": 3.0}}}, "generation.seconds.0"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_names_of_its_keys(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadProfile, match=message):
        Profile.parse(MEASURED | changed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the two"),
        (["a.toml", "--nodes", "4"], "are for --run"),
        (["nowhere.toml"], "No such file"),
        (["--run", "nowhere"], "No such file"),
        (["{small}"], "a split needs a node that samples and one that trains"),
    ],
)
def test_the_command_refuses(tmp_path: Path, arguments: list[str], message: str) -> None:
    small = tmp_path / "small.toml"
    small.write_text(
        "[generation]\nseconds = { 1 = 6.0 }\n[training]\nseconds = { 1 = 2.0 }\n[sites.a]\nnodes = 1\n"
    )
    result = CliRunner().invoke(app, ["plan", *(one.format(small=small) for one in arguments)])
    assert (result.exit_code, message in result.output) == (2, True)


WORK = TrainerRecord((Block("train", 1006, 1008), Block("train", 1016, 1018)))


def calls(fitted: bool, engines: tuple[str, str] = ("e", "e")) -> tuple[list[Any], Timeline]:
    """Two steps of 10 s: in each an engine samples for 6 s, two calls of 100 + 50 and 100 + 150 tokens; or two engines do."""
    events: list[tuple[float, Any]] = [
        *((0, Opened(engine, 0)) for engine in dict.fromkeys(engines)),
        (0, Leased(0)),
    ]
    if fitted:
        events.append((0, SpeedFitted("e", EngineModel(0.0, 0.02, 0.0, 0.02))))
    for start in (0, 10):
        for name, engine, length in zip("ab", engines, (150, 250), strict=True):
            call = f"{name}{start}"
            events += [(start, Demand(arrived=(Arrived(call, 0, 100),))), (start, Placed(call, engine))]
            events.append((start + 6, Demand(left=(CallDeparted(call, length),))))
        events.append((start + 9.5, Consume(start // 10)))
    runs = recorded(*sorted(events, key=lambda one: one[0]), until=21)
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
    # The model predicts 150 steps of 40 ms for the longest, which is what the run took: 6 s.
    assert model.factor == pytest.approx(1.0)
    assert model.seconds(1, AS_MEASURED) == pytest.approx(6.0)
    assert site.rollout.nodes == 2
    assert "1.00 times" in " ".join(basis)


def test_a_run_without_training_is_refused() -> None:
    runs = recorded((0, Opened("e", 0)), until=4)
    with pytest.raises(BadProfile, match="no node trained"):
        measured.site_of(runs, timeline_of(runs))


def test_what_is_counted_of_a_runs_calls() -> None:
    """Calls without tokens or ended later do not count; prompts count as first sent, lengths as the longest of each step."""
    events: list[tuple[float, Any]] = [(0, NodeAdded("r0", ("rollout",))), (0, Leased(0))]
    for engine, s_per_batch in (("e", 0.01), ("f", 0.02), ("g", 0.09)):
        events += [
            (0, Hosted(engine, "r0")),
            (0, Opened(engine, 0)),
            (0, SpeedFitted(engine, EngineModel(0.0, s_per_batch, 0.0, 0.02))),
        ]
    for start, end, name, engine, length in (
        (1, 6, "a", "e", 250),
        (1, 5, "b", "f", 150),
        (7, 7, "nothing", "g", 100),
        (11, 16, "c", "g", 150),
        (12, 16, "d", "e", 130),
        (18, 20, "late", "e", 900),
    ):
        events += [(start, Demand(arrived=(Arrived(name, 0, 100),))), (start, Placed(name, engine))]
        events.append((end, Demand(left=(CallDeparted(name, length),))))
    events += [(3, Demand(arrived=(Arrived("a", 0, 120),))), (9.5, Consume(0)), (19.5, Consume(1))]
    runs = recorded(*sorted(events, key=lambda one: one[0]), until=21)
    timeline = timeline_of(runs, {"actor": WORK}).within(0.0, 19.5)
    site, _ = measured.site_of(runs, timeline)
    model = site.generation
    assert isinstance(model, Sampling)
    assert (model.samples, model.prompt, model.reply, model.longest) == (2, 100.0, 70.0, 100.0)
    assert (model.engine.s_per_batch, model.engines, model.most) == (0.02, 3, 1)


def test_engines_on_nodes_of_their_own_are_one_a_node() -> None:
    runs, timeline = calls(fitted=True, engines=("e", "f"))
    model = measured.site_of(runs, timeline)[0].generation
    assert isinstance(model, Sampling)
    assert (model.engines, model.most) == (1, 1)


def test_a_run_without_calls_or_without_rollout_shows_less() -> None:
    fitted = [(0, SpeedFitted("e", EngineModel(0.0, 0.02, 0.0, 0.02))), (0, Opened("e", 0))]
    runs = recorded(*fitted, (0, Leased(0)), (9.5, Consume(0)), until=21)
    site, basis = measured.site_of(runs, timeline_of(runs, {"actor": WORK}).within(0.0, 9.5))
    assert isinstance(site.generation, Points)
    assert "no calls" in " ".join(basis)
    runs = recorded((0, Leased(0)), (9.5, Consume(0)), until=21)
    with pytest.raises(BadProfile, match="no node sampled"):
        measured.site_of(runs, timeline_of(runs, {"actor": WORK}))


def test_the_stages_are_those_of_the_profile() -> None:
    batch = {"samples": 8, "prompt_tokens": 5.0, "reply_tokens": 20.0, "longest_tokens": 90.0}
    generation = {
        "s_per_kv_token": 0.0,
        "s_per_batch": 0.02,
        "s_per_call": 0.01,
        "s_per_step": 0.03,
        "engines": 2,
        "max_running": 4,
    }
    given = {"batch": batch, "generation": generation, "sites": {"here": {"nodes": 4}}}
    (site,) = Profile.parse(given | {"training": {"token_s": 0.5, "fixed_s": 3.0}}).sites_to_try().values()
    engine = EngineModel(0.0, 0.02, 0.01, 0.03)
    assert site.generation == Sampling(engine, 8, 20.0, 90.0, prompt=5.0, engines=2, most=4)
    assert site.training == Training(8, reply=20.0, prompt=5.0, token_s=0.5, fixed_s=3.0)
    points = {"generation": {"seconds": {"4": 1.0, "1": 4.0}}, "training": {"seconds": {"2": 3.0, "1": 5.0}}}
    (site,) = Profile.parse(MEASURED | points).sites_to_try().values()
    assert site.generation == Points(((1, 4.0), (4, 1.0)))
    assert site.training == Points(((1, 5.0), (2, 3.0)), trains=True)
    nothing = given | {
        "generation": dict.fromkeys(("s_per_kv_token", "s_per_batch", "s_per_call", "s_per_step"), 0.0),
        "training": {"token_s": 0.5},
    }
    with pytest.raises(BadProfile, match="generation: "):
        Profile.parse(nothing).sites_to_try()


def test_the_table_of_a_plan_by_hand() -> None:
    """60 s of sampling and 20 s of training on eight nodes, of which training has twice the speed and three times the cost."""
    hardware = {"fast": {"cost": 3.0, "training": 2.0}}
    sites = {"a": {"nodes": 2}, "b": {"nodes": 2, "hardware": "fast"}}
    plans = report.plans_of(Profile.parse(MEASURED | {"hardware": hardware, "sites": sites}).sites_to_try())
    assert [plan.name for plan in plans] == ["rollout in a, training in b", "rollout in b, training in a"]
    first, *others, last = report.rows(plans[0])
    assert first == (
        *("2 + 1 (best)", "30.00", "10.00", "30.00"),
        *("24.00", "36.00", "30.00", "30.00", "5.00", "24.00"),
    )
    assert [row[0] for row in others] == ["1 + 2", "1 + 1", "2 + 2"]
    assert last[:5] == ("the best there", "", "", "30.00", "24.00 (2 + 1)")
    summary = report.summary(plans, ["this test"])
    assert (summary["best"]["site"], [one["site"] for one in summary["others"]]) == (
        plans[0].name,
        [plans[1].name],
    )


def test_the_cost_of_another_load_is_reported() -> None:
    """At 6 + 2 both stages take 10 s, and both have as much to do as replies are long."""
    site = Site(
        Points(((1, 60.0),)),
        Points(((1, 20.0),), trains=True),
        Profile.parse(MEASURED).sites_to_try()["here"].rollout,
    )
    loads = report.summary(report.plans_of({"here": site}), [])["sensitivity"]
    slower = {name: one["step_s"] for name, one in loads.items()}
    assert slower == {"length -20%": 8.0, "length +20%": 12.0, "training -20%": 10.0, "training +20%": 12.0}
    assert all(one["loss"] == round(one["step_s"] / one["best"]["step_s"] - 1, 4) for one in loads.values())


def test_a_recorded_run_is_planned_from_its_folder(tmp_path: Path) -> None:
    """Only its steps count, one of its runs can be selected, and the plan may be for another number of nodes."""
    idle = recorded((0, Opened("x", 0)), until=3)
    runs, _ = calls(fitted=True)
    lines = [
        line for run in (*idle, *runs) for line in (run.header.to_json(), *(e.to_json() for e in run.entries))
    ]
    (tmp_path / "control.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [
        {"time": end, "batch": n, "spans": [["compute", begin, begin + 2.0]]}
        for n, (begin, end) in enumerate(((1006.0, 1009.5), (1016.0, 1019.5)))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = CliRunner().invoke(app, ["plan", "--run", str(tmp_path), "--number", "2", "--nodes", "5"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output.splitlines()[-1])
    assert plan["best"]["rollout"] + plan["best"]["train"] <= 5
    assert "2 steps, each 6.00 node-seconds of rollout and 2.00 of training" in " ".join(plan["basis"])
    assert plan["limits"] == {"line": "what limits the run is not known yet: 0 of 5 steps seen"}
    more = CliRunner().invoke(app, ["plan", "--run", str(tmp_path), "--number", "2"])
    own = json.loads(more.output.splitlines()[-1])["best"]
    assert (own["rollout"], own["train"]) == (1, 1)
