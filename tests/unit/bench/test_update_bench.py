"""The bench of weight updates runs, and its report has what readers look for; what it computes from arrivals is as defined."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.streams import OpenStreams, Request
from bench.targets import GatewayTarget, Prompts
from bench.update import Plan, Run, Update

ROOT = Path(__file__).parents[3]
PLAN = Plan("fake", "keep", 2, 1, 1.0, 1.0, 0.1, Path("python"))


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench.update", *options]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=400)


@pytest.mark.long
def test_the_bench_ends_with_its_report(tmp_path: Path) -> None:
    out = tmp_path / "update.json"
    size = ["--streams", "4", "--updates", "1", "--every-s", "0.5", "--load-s", "2.0", "--delay-s", "0.2"]
    done = run_bench("--engine", "fake", "--mode", "keep", *size, "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["failed_requests"] == 0
    assert {"stall_ratio_p99", "min_tokens_per_s", "machine", "results"} <= report.keys()
    (result,) = report["results"]
    (update,) = result["updates"]
    assert (update["version"], update["state"], update["streams"]) == (2, "live", 4)
    assert {"freeze", "load", "probe"} <= update["seconds"]["bench-0"].keys()
    assert result["own_s"] >= 2.0, "a load takes as long as configured"
    assert result["own_direct_s"] >= 2.0
    assert result["stall_s"]["max"] >= 1.0, "frozen streams stall"
    assert "pause and load" in done.stdout


def measured(*streams: list[float]) -> Run:
    """An update from 10 to 12 by an engine that needed 1.5 s, and when the chunks of each stream came."""
    found = OpenStreams(GatewayTarget(1, Prompts(["hi"], [[1]], []), ["key"]), len(streams))
    found.requests = [[Request(f"call-{i}", [(at, 2) for at in times])] for i, times in enumerate(streams)]
    seconds: dict[str, Any] = {"freeze": 0.5, "load": 1.0, "probe": 9.0}
    reports = [
        {"engine": "one", "seconds": seconds},
        {"engine": "other", "seconds": {"abort": 0.5, "load": 2.5}},
    ]
    record = {"version": 1, "state": "live", "report": reports}
    return Run(PLAN, found, [Update(10.0, 12.0, record, {"call-0": "one", "call-1": "other"})])


def test_a_stall_is_the_longest_gap_that_touches_the_update_less_the_usual_one() -> None:
    steady = [8.0, 8.5, 9.0, 9.5, 12.5, 13.0, 13.5, 19.0]
    run = measured(steady, [9.9, 10.1, 10.3, 10.5])
    assert list(run.stalls(run.updates[0])) == [(2.5, 1.5), (pytest.approx(0.0, abs=1e-9), 3.0)]


def test_a_stream_that_was_not_open_in_the_update_has_no_stall() -> None:
    run = measured([1.0, 2.0, 3.0], [12.5, 13.0], [])
    assert list(run.stalls(run.updates[0])) == []


def test_windows_without_a_token_count() -> None:
    run = measured([9.9, 10.0, 10.1, 11.9, 12.1])
    assert run.rates() == [16.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.0]
