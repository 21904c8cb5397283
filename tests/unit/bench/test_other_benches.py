"""The other benches run, small, and their reports have the keys. No figure is asserted."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.unit.bench.reports import report_of


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
def test_bytecodes(tmp_path: Path) -> None:
    options = ["--connections", "2", "--functions", str(tmp_path / "functions.json")]
    report = report_of("bytecodes", tmp_path / "bytecodes.json", "--requests", "8", *options)
    assert report["instructions"] > report["calls"] > 0


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
def test_trainer(tmp_path: Path) -> None:
    """Without TRL, which has an environment of its own."""
    report = report_of("trainer", tmp_path / "trainer.json", "--small", "--rounds", "1", "--trl", "none")
    assert report["vs_trl_long_tail"] is None
    assert report["tree_efficiency"] > 0
    assert report["padding_share"] == 0
    assert report["head_peak_ratio"] > 0


@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("payloads", ["--prompts", "prompt_1m"], "--prompts"),
        ("memory", ["--calls", "100", "--base", "100"], "--base"),
        ("update", ["--engine", "vllm", "--engine-python", "nowhere"], "--engine-python"),
        ("update", ["--engine", "fake", "--streams", "1,none"], "--streams"),
        ("update", ["--engine", "fake", "--mode", "stop"], "--mode"),
        ("update", ["--engine", "fake", "--updates", "9"], "--updates"),
        ("gateway", ["--engine", "fake", "--streams", "1,none"], "--streams"),
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
        assert set(report[f"{kind}_p99_ms"]) == set(report["results"][kind]["during_writes"])
        assert report["results"][kind]["commits_during_queries"]["per_s"] > 0


@pytest.mark.long
def test_routing(tmp_path: Path) -> None:
    """Every arm trains, within the bound on staleness."""
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
