"""The bench runs, and its report has what readers and other programs look for. No figure is asserted: machines differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.load import RequestFailed, events_of
from bench.processes import session_cpu_s
from bench.report import number, percentile, spread
from bench.targets import DirectTarget, GatewayTarget, Prompts

ROOT = Path(__file__).parents[3]
PROMPTS = Prompts(["hi"], [[1, 2]], [258])


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench.gateway", *options]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=400)


@pytest.mark.long
def test_the_bench_ends_with_its_report(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = run_bench(
        "--engine", "fake", "--streams", "2", "--seconds", "1", "--rounds", "1", "--out", str(out)
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["failed_requests"] == 0
    assert {"bench", "command", "machine", "window_s", "rounds", "results", "seconds"} <= report.keys()
    streamed, plain = report["results"]
    assert (streamed["load"], streamed["streams"]) == ("stream", 2)
    assert (plain["load"], plain["streams"], plain["max_tokens"]) == ("plain", 32, 8)
    for key in ("requests_per_s", "chunks_per_s", "tokens_per_s", "gateway_cpu_s_per_1k_tokens"):
        assert streamed[key].keys() == {"direct", "gateway", "ratio"}
    for key in ("first_ms_p50", "first_ms_p99", "request_ms_p50", "request_ms_p99"):
        assert f"added_{key}" in streamed
    assert "gateway / direct" in done.stdout
    assert "fake: 2 streams, round 1, gateway" in done.stderr


def test_percentiles_and_spreads_of_nothing_are_nothing() -> None:
    assert percentile([], 99) is None
    assert spread([None]) is None


@pytest.mark.parametrize(("percent", "expected"), [(50, 2.0), (99, 4.0), (1, 1.0)])
def test_a_percentile_is_one_of_the_values(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.01234, "0.012"), (57.04, "57.0"), (16594.2, "16,594")]
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number(value) == text


def test_cpu_time_of_a_session_is_its_processes(tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", spin], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 0.25 <= session_cpu_s(child.pid) < 30
        child.kill()
    assert session_cpu_s(os.getpid() + 2**24) == 0


@pytest.mark.long
def test_headgate_compared_with_a_pass_through(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    small = ["--mock-streams", "4", "--seconds", "0.3", "--rounds", "1"]
    small += ["--litellm", str(tmp_path / "none"), "--routers", str(tmp_path)]
    done = run_bench("--engine", "mock", *small, "--out", str(out))
    assert done.returncode == 0, done.stderr
    for left_out in ("litellm", "litellm-rust", "vllm-router", "sglang-router"):
        assert f"goes on without {left_out}" in done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["failed_requests"] == 0, "every reply is the engine's"
    for key in ("requests", "chunks_4", "tokens_4", "requests_tools", "chunks_4_tools", "tokens_4_tools"):
        assert report[f"vs_passthrough_{key}"] > 0
        assert report[f"vs_passthrough_messages_{key}"] > 0
    for key in ("vs_passthrough_requests_1", "first_p99_ratio_4", "cpu_us_per_chunk_messages_4", "idle_mib"):
        assert report[key] > 0
    shapes = [(32, False, False), (1, False, False), (4, True, False), (32, False, True), (4, True, True)]
    assert [(r["api"], r["streams"], r["streamed"], r["tools"]) for r in report["results"]] == [
        (api, *shape) for api in ("chat", "messages") for shape in shapes
    ]
    for result in report["results"]:
        assert list(result["targets"]) == ["engine", "headgate", "passthrough"]
        for figures in result["targets"].values():
            assert figures["rss_mib"]["median"] > 1
            assert figures["first_ms_p99"]["median"] > 0
    assert "headgate to it, tokens" in done.stdout


LITELLM = """#!{python}
import argparse, os, re, sys
from pathlib import Path
import uvicorn
sys.path[0] = "{root}"
from bench.passthrough import create_app
parser = argparse.ArgumentParser()
for name in ("config", "num_workers", "host", "port"):
    parser.add_argument(f"--{{name}}")
options = parser.parse_args()
app = create_app(re.search(r"http://[^/\\s]+", Path(options.config).read_text()).group())
app.get("/health/liveliness")(lambda: "alive")
@app.middleware("http")
async def mark(request, call_next):
    answer = await call_next(request)
    if os.environ["LITELLM_RUST"] == "1" and "event-stream" in answer.headers["content-type"]:
        answer.headers["x-litellm-rust"] = "true"
    return answer
uvicorn.run(app, port=int(options.port), log_level="warning")
"""
"""A stand-in for LiteLLM whose part in Rust serves streams alone."""


@pytest.mark.long
def test_what_python_responded_is_not_reported_as_rusts(tmp_path: Path) -> None:
    program = tmp_path / "litellm"
    program.write_text(LITELLM.format(python=sys.executable, root=ROOT))
    program.chmod(0o755)
    small = ["--mock-streams", "2", "--seconds", "0.1", "--rounds", "1", "--no-tools", "--apis", "messages"]
    small += ["--targets", "headgate,litellm,litellm-rust,vllm-router", "--litellm", str(program)]
    done = run_bench("--engine", "mock", *small, "--out", str(tmp_path / "bench.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failed_requests"] == 0
    for result in report["results"]:
        assert result["targets"].keys() == {"headgate", "litellm", "litellm-rust"}, "a router has no messages"
        assert result["targets"]["litellm-rust"]["in_rust"] == result["streamed"]
        assert result["targets"]["litellm"]["in_rust"] is False
    versus = {key for key in report if key.startswith("vs_litellm")}
    streams = {
        f"vs_{name}_messages_{what}_2"
        for name in ("litellm", "litellm_rust")
        for what in ("chunks", "tokens")
    }
    assert versus == {"vs_litellm_messages_requests", "vs_litellm_messages_requests_1", *streams}
    assert done.stderr.count("litellm-rust answers without its part in Rust") == 2
    rows = [line.split() for line in done.stdout.splitlines() if "answers in Rust" in line]
    assert [[word for word in row if word in ("yes", "no")] for row in rows] == [
        ["no", "no"],
        ["no", "no"],
        ["no", "yes"],
    ]


def test_direct_responses_are_counted_by_token() -> None:
    body = b'data: {"choices":[{"token_ids":[1,2]}]}\n\ndata: {"choices":[{"token_ids":[3]}]}\n\ndata: [DONE]\n\n'
    assert DirectTarget(1, PROMPTS).count(events_of(body), True) == (2, 3)


def test_gateway_responses_are_counted_by_their_usage() -> None:
    body = (
        b": keep-alive\n\n"
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"ab"}}]}\n\n'
        b'data: {"choices":[{"delta":{}}]}\n\n'
        b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'
        b"data: [DONE]\n\n"
    )
    assert GatewayTarget(1, PROMPTS, ["key"]).count(events_of(body), True) == (1, 5)


@pytest.mark.parametrize("body", [b"", b'data: {"error":{"message":"gone"}}\n\n', b"data: [DONE]\n\n"])
def test_a_stream_that_ends_early_is_a_failure(body: bytes) -> None:
    for target in (DirectTarget(1, PROMPTS), GatewayTarget(1, PROMPTS, ["key"])):
        with pytest.raises(RequestFailed):
            target.count(events_of(body), True)
