"""Every other bench runs, small, and ends with the keys that others look for. No figure is asserted."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gateway.api.console import BUILT
from tests.families.family import FAMILIES
from tests.unit.bench.reports import ROOT, report_of


@pytest.mark.long
def test_payloads(tmp_path: Path) -> None:
    small = ["--seconds", "0.2", "--sessions", "8", "--session-ms", "10", "--conversations", "2"]
    shapes = ["--turns", "4", "--streams", "4", "--prompts", "prompt_1k"]
    report = report_of("payloads", tmp_path / "payloads.json", *small, *shapes)
    names = ["prompt_1k", "sessions", "conversation", "streams_4", "burst_4"]
    assert list(report["lag_p99_ms"]) == names
    assert {"first_added_p99_4_ms", "first_added_p99_4_burst_ms"} <= report.keys()
    by_shape = {result["shape"]: result for result in report["results"]}
    assert by_shape["conversation"]["requests"] == 8, "every conversation has all its turns"
    assert by_shape["conversation"]["prompt_tokens_last"] > 3 * 48, "the whole history is sent"
    assert all(result["lag_ms"]["samples"] > 0 for result in report["results"])


@pytest.mark.long
def test_memory(tmp_path: Path) -> None:
    size = ["--calls", "120", "--base", "40", "--connections", "4"]
    report = report_of("memory", tmp_path / "memory.json", *size)
    assert 0.5 < report["rss_growth"] < 1.5
    assert report["series"]["calls"][-1] == 120
    assert len({len(values) for values in report["series"].values()}) == 1


@pytest.mark.long
def test_publish(tmp_path: Path) -> None:
    few = ["--models", "demo", "--engines", "1,2"]
    report = report_of("publish", tmp_path / "publish.json", "--mib", "4", "--rounds", "1", *few)
    assert report["collective_vs_gloo"] > 0
    for way, last in report["seconds_to_last_engine"].items():
        assert 0 < report["seconds_to_first_engine"][way]["2"] <= last["2"]
    assert report["bytes_per_step"]["collective"]["2"] == 2 * report["models"][0]["bytes"]
    assert 0 < report["delta_share"] < 0.2
    assert 0 < report["changed_share"] < 0.2
    (size,) = report["sizes"]
    assert all(found["median"] > 0 for found in size["seconds"].values())


@pytest.mark.long
def test_rules(tmp_path: Path) -> None:
    size = ["--batches", "2", "--batch", "2", "--group", "2", "--concurrency", "8", "--median", "8"]
    quick = ["--rules", "synchronous,staleflow", "--delay-s", "0.002", "--train-s", "0"]
    report = report_of("rules", tmp_path / "rules.json", *quick, *size)
    assert [result["rule"] for result in report["results"]] == ["synchronous", "staleflow"]
    assert report["results"][0]["staleness_max"] == 0


@pytest.mark.long
def test_trainer(tmp_path: Path) -> None:
    """Without TRL, whose environment `make bench-trainer` alone has."""
    report = report_of("trainer", tmp_path / "trainer.json", "--small", "--rounds", "1", "--trl", "none")
    assert report["vs_trl_long_tail"] is None
    assert report["tree_efficiency"] > 0
    assert report["padding_share"] == 0
    assert report["two_rank_error"] < 1e-9
    assert report["head_peak_ratio"] > 0


@pytest.mark.long
def test_ledger(tmp_path: Path) -> None:
    size = ["--groups", "20", "--seconds", "1", "--calls", "1", "--concurrency", "4"]
    report = report_of("ledger", tmp_path / "ledger.json", *size)
    assert report["alone_events"] > 0
    assert report["cpu_ms_per_event"] > 0


@pytest.mark.long
def test_console(tmp_path: Path) -> None:
    if shutil.which("chromium") is None or not (BUILT / "index.html").is_file():
        pytest.skip("the page is measured in Chromium, and built by `make console`")
    size = ["--watchers", "5", "--rate", "40", "--seconds", "1", "--pairs", "1", "--episodes", "16"]
    size += ["--listed", "100", "--tokens", "1000"]
    report = report_of("console", tmp_path / "console.json", *size)
    assert report["watcher_bytes_per_s"] > 0
    assert report["events_in_a_window"] > 40
    assert {"watchers_cpu_share", "alone_cpu_share"} <= report.keys()
    assert all(report[name] > 0 for name in ("bundle_kb", "open_10k_tokens_s", "scroll_fps", "list_100k_s"))
    assert all(found["statement_ms"] > 0 for found in report["inserts"].values())


@pytest.mark.long
@pytest.mark.vllm
def test_costs(tmp_path: Path) -> None:
    report = report_of("costs", tmp_path / "costs.json", "--rounds", "1", "--seconds", "3", timeout_s=1000.0)
    assert report["k"].keys() == {"k1", "k2", "k3", "k4"}
    assert len(report["cells"]) > report["disturbed"]
    assert all(cell["step_s"] > 0 and cell["kv"] > 0 for cell in report["cells"])
    assert report["loop_s"] > 0 and report["loop_simulated_s"] > 0
    assert [load["streams"] for load in report["live_loads"] if load["unseen"]] == [2, 5, 12, 24, 40]
    assert all(load["tokens_per_s"] > 0 for load in report["live_loads"])


@pytest.mark.long
def test_prefix() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.prefix"], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout.splitlines()[-1])["prefix_kept"]
    assert kept.keys() == {family.name for family in FAMILIES}
    for family in FAMILIES:
        found = kept[family.name]
        assert [found[kind] is not None for kind in ("plain", "tools", "thinking, tools")] == [
            True,
            family.tools,
            family.tools and family.thinks,
        ]
        shares = [share for share in found.values() if share is not None]
        assert all(0 <= share["kept"] <= share["possible"] <= 1 for share in shares), family.name
    assert kept["qwen2.5"]["plain"] == {"kept": 1.0, "possible": 1.0}


@pytest.mark.long
@pytest.mark.vllm
def test_vllm_chat(tmp_path: Path) -> None:
    size = ["--streams", "4", "--seconds", "0.5", "--rounds", "1"]
    report = report_of("vllm_chat", tmp_path / "chat.json", *size, timeout_s=900.0)
    for key in ("cpu_vs_vllm_chat", "cpu_vs_vllm_chat_plain", "own_cores_ratio"):
        assert report[key] > 0
    for result in report["results"][:2]:
        assert result["api_server_cpu_s_per_1k_tokens"]["direct"]["median"] > 0
        assert result["gateway_cpu_s_per_1k_tokens"]["gateway"]["median"] > 0


@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("payloads", ["--prompts", "prompt_1m"], "--prompts"),
        ("memory", ["--calls", "100", "--base", "100"], "--base"),
        ("vllm_chat", ["--engine-python", "nowhere"], "--engine-python"),
        ("gateway", ["--engine", "none"], "--engine"),
        ("gateway", ["--engine", "mock", "--targets", "litellm"], "--targets"),
        ("gateway", ["--engine", "mock", "--apis", "responses"], "--apis"),
    ],
)
def test_wrong_options_are_named(name: str, options: list[str], wrong: str) -> None:
    bench = typer.Typer()
    bench.command()(importlib.import_module(f"bench.{name}").main)
    done = CliRunner().invoke(bench, options)
    assert done.exit_code == 2
    assert wrong in done.stderr


@pytest.mark.long
def test_store(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="headgate-stores-") as folder:
        Path(folder).chmod(
            0o755
        )  # PostgreSQL, which is another user's where this is root's, must come through
        check_store(tmp_path, folder)


def check_store(tmp_path: Path, folder: str) -> None:
    size = ["--turns", "2000", "--samples", "3", "--seconds", "0.2", "--folder", folder]
    report = report_of("store", tmp_path / "store.json", *size)
    for kind in ("sqlite", "postgresql"):
        assert report[f"{kind}_worst_p99_ms"] > 0
        assert set(report[f"{kind}_p99_ms"]) == set(report["results"][kind]["beside_writers"])
        assert report["results"][kind]["commits_beside_queries"]["per_s"] > 0


@pytest.mark.long
def test_service(tmp_path: Path) -> None:
    size = ["--streams", "4", "--seconds", "0.5", "--rounds", "1", "--repeats", "1"]
    report = report_of("service", tmp_path / "service.json", *size)
    assert set(report["recovery_s"]) == {"gateway", "coordinator", "engine", "redis", "postgresql"}
    assert all(len(values) == 1 for values in report["recovery_s"].values())
    assert set(report["cost_of_durability_percent"]) == {"sqlite", "postgresql"}
    ratio = report["workers_2_ratio"]
    assert ratio is None or ratio > 0, "none where no request ended within half a second"


def test_following(tmp_path: Path) -> None:
    """The engines are more even by the plan than when processes choose alone."""
    small = ["--processes", "2", "--engines", "8", "--ticks", "40", "--calls", "8", "--mean-ticks", "20"]
    alone, plan = report_of("following", tmp_path / "following.json", *small)["results"]
    assert (alone["kind"], plan["kind"], alone["calls"], plan["calls"]) == ("alone", "plan", 320, 320)
    assert 1 < plan["fullest_to_mean"] < alone["fullest_to_mean"]
    assert plan["table_bytes"] > 0


@pytest.mark.long
def test_routing(tmp_path: Path) -> None:
    """Calls that come in turn are spread evenly, and every arm trains the same tokens a task."""
    size = [
        "--rounds",
        "1",
        "--batches",
        "2",
        "--batch",
        "2",
        "--group",
        "2",
        "--concurrency",
        "8",
        "--engines",
        "2",
    ]
    quick = ["--arms", "round_robin,gain_pull_v", "--median", "8", "--slower", "2"]
    report = report_of("routing", tmp_path / "routing.json", *size, *quick)
    assert list(report["arms"]) == ["round_robin", "gain_pull_v"]
    for (run,) in report["results"].values():
        assert run["trained_tokens"] > 0
        assert run["staleness_max"] <= 2
        assert run["prefilled_share"] >= run["recomputed_share"] >= 0
        assert run["call_s_p99"] >= run["call_s_p50"] > 0
