"""`gateway episodes run --worker`, as a person types it: a process that lives on, and returns rewards of tasks with rewards."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.harness.gateways import run_gateway, settings_for

WORKER = """
import json, os, sys, urllib.request

for line in sys.stdin:
    given = json.loads(line)
    body = {"model": "any", "max_tokens": 3, "messages": [{"role": "user", "content": given["task"]["question"]}]}
    headers = {"authorization": "Bearer " + given["api_key"], "content-type": "application/json"}
    request = urllib.request.Request(given["base_url"] + "/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()
    components = {"process": os.getpid()}
    print(json.dumps({"reward": given["task"]["worth"], "components": components}), flush=True)
"""
TASKS = [{"task_id": f"t{worth}", "question": "hi", "worth": worth} for worth in (0.25, 0.5, 0.75)]


async def run_command(*argv: str) -> tuple[int | None, str, str]:
    """The exit status of `gateway ...`, what it wrote to standard output, and what to standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli", *argv,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_one_process_serves_every_task_and_its_rewards_are_recorded(
    tiny_model: Path, tmp_path: Path
) -> None:
    worker, tasks = tmp_path / "worker.py", tmp_path / "tasks.jsonl"
    worker.write_text(WORKER)
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 3, "min_members": 1})
    async with run_gateway(values) as gateway:
        argv = ["episodes", "run", "--tasks", str(tasks), "--gateway", gateway.url, "--group-size", "2"]
        code, out, err = await run_command(
            *argv, "--concurrency", "1", "--worker", "--", sys.executable, str(worker)
        )
        assert code == 0, err
        rows: list[dict[str, Any]] = [
            await gateway.admin.episode(row["episode_id"]) for row in await gateway.admin.episodes()
        ]
    summary = json.loads(out.splitlines()[-1])
    assert (summary["episodes"], summary["failed"], summary["reward_mean"]) == (6, 0, 0.5)
    assert Counter((row["task_id"], row["reward"]) for row in rows) == {
        (task["task_id"], task["worth"]): 2 for task in TASKS
    }
    assert [len(row["calls"]) for row in rows] == [1] * 6
    assert len({row["components"]["process"] for row in rows}) == 1, "one process lived through all of them"


async def test_a_worker_that_reports_an_error_fails_its_episode_and_the_command(
    tiny_model: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t"}\n')
    program = 'import sys\nfor _ in sys.stdin: print(\'{"error": "no such tool"}\', flush=True)'
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        argv = ["episodes", "run", "--tasks", str(tasks), "--gateway", gateway.url, "--mode", "eval"]
        code, out, err = await run_command(
            *argv, "--max-failures", "1", "--worker", "--", sys.executable, "-c", program
        )
        (row,) = await gateway.admin.episodes()
    assert (code, json.loads(out.splitlines()[-1])["failed"]) == (1, 1), err
    assert (row["state"], row["reason"], row["reward"]) == ("closed", "agent_failed", None)
    assert "an agent worker reports: no such tool" in row["error"]
