"""Agents in bubblewrap: what they reach, what they may take, and what is left of them."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.client import EpisodeRunner, Task
from headgate.client.agents import CommandAgent
from headgate.client.sandboxes import sandbox_of
from headgate.client.sandboxes.base import Limits, SandboxUnavailable
from headgate.client.sandboxes.runner import SandboxRunner
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import until

LOOKS_AROUND = """
import json, os, socket, urllib.request
task = json.loads(os.environ["HEADGATE_TASK"])
body = json.dumps({"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
assert reply["usage"]["completion_tokens"] == 3
for address in (("127.0.0.1", task["port"]), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 5)
    except OSError:
        continue
    raise SystemExit(f"reached {address}")
assert "HEADGATE_ADMIN_KEY" not in os.environ
assert not os.path.exists(task["secret"])
assert open("pyproject.toml").read()
for place in ("written", "/written", "/usr/written", "/run/headgate/written"):
    try:
        open(place, "w")
    except OSError:
        continue
    raise SystemExit(f"wrote {place}")
assert "written" not in os.listdir(os.environ["HOME"])
open(os.path.expanduser("~/written"), "w").write("mine")
print(1.0)
"""
TAKES_TOO_MUCH = """
import json, os, subprocess, sys, time
left = [sys.executable, "-c", "import time; time.sleep(3600)", sys.argv[1]]
subprocess.Popen(left, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
match json.loads(os.environ["HEADGATE_TASK"])["do"]:
    case "memory":
        kept = bytearray(400 * 2**20)
    case "cpu":
        while True:
            pass
    case "processes":
        for _ in range(40):
            if not os.fork():
                break
    case "disk":
        open("/tmp/large", "wb").write(bytes(8 * 2**20))
    case "nothing":
        sys.exit(print(0.5))
time.sleep(3600)
"""


@asynccontextmanager
async def sandboxed(program: str, *argv: str, **limits: int) -> AsyncIterator[CommandAgent]:
    runner = SandboxRunner(sandbox_of("bwrap", Limits(**limits)))
    agent = CommandAgent([sys.executable, "-c", program, *argv], 300.0, runner=runner)
    try:
        await agent.open()
    except SandboxUnavailable as error:
        pytest.skip(f"{error}")
    try:
        yield agent
    finally:
        await agent.close()


async def rows_of(gateway: RunningGateway, agent: CommandAgent, tasks: list[dict[str, Any]]) -> list[Any]:
    runner = EpisodeRunner(gateway.admin, agent, concurrency=len(tasks), retries=0, mode="eval")
    outcomes = await runner.run([Task(str(number), task) for number, task in enumerate(tasks)])
    return [await gateway.admin.episode(str(outcome.episode_id)) for outcome in outcomes]


async def test_an_agent_reaches_its_episode_and_nothing_else_and_writes_to_its_home_alone(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "secret")
    (tmp_path / "secret").touch()
    task = {"port": gateway.settings.server.port, "secret": str(tmp_path / "secret")}
    async with sandboxed(LOOKS_AROUND) as agent:
        rows = await rows_of(gateway, agent, [task] * 2)  # the second finds nothing of the first
    for row in rows:
        assert (row["reason"], row["error"], len(row["calls"])) == ("rewarded", "", 1)


async def test_one_that_takes_too_much_is_killed_for_a_reason_and_nothing_is_left_of_any(
    gateway: RunningGateway,
) -> None:
    marker = uuid.uuid4().hex
    kinds = ("memory", "cpu", "processes", "disk", "nothing")
    async with sandboxed(TAKES_TOO_MUCH, marker, memory_mib=300, cpu_s=2, processes=30, disk_mib=4) as agent:
        rows = await rows_of(gateway, agent, [{"do": kind} for kind in kinds])
    assert [row["reason"] for row in rows] == [
        "memory_limit", "cpu_limit", "process_limit", "agent_failed", "no_calls"
    ]  # fmt: skip
    memory, cpu, processes, disk, _ = [json.dumps(row["error"]) for row in rows]
    assert "MiB of memory, of 300 that it may" in memory
    assert "s of CPU time, of 2 that it may" in cpu
    assert "processes, of 30 that it may" in processes
    assert "No space left on device" in disk
    await until(lambda: not processes_with(marker), "what was killed is gone")


def processes_with(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in argv and path.parent.name != str(os.getpid()):
            found.append(path.parent.name)
    return found
