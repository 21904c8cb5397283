"""Every block of shell and Python in the pages runs as it stands there, or names the reason why no test can run it.

The blocks of a page run one after the other in one folder, as a reader would type them. Put in their place are the gateway's
address, and the names of an episode, its key and a call (`ep-…`, `hg-…`, `CALL`); a group has one episode, for each starts
Python. curl fails where the gateway refuses. README.md runs the installed program `gateway`; for the other pages it is forked.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.harness.agents import ONE_CALL
from tests.harness.fences import ROOT, Fence, fences, pages
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import LONG_S, result_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

KINDS = {"sh", "python", "js", "toml", "json", "jsonl", "mermaid", "text"}
REASONS = {
    "needs a GPU",
    "needs vLLM",
    "needs a service",
    "needs another program",
    "takes minutes",
    "installs software",
    "starts the gateway",
}
ADDRESS = "http://127.0.0.1:8000"
AGENT = f"{ONE_CALL}\nprint(0.5)\n"
FUNCTION = """
from tests.harness.agents import one_call

async def solve(task, base_url, api_key):
    await one_call(base_url, api_key)
    return 0.5
"""
WORKER = """
import asyncio, json, sys
from tests.harness.agents import one_call

for line in sys.stdin:
    job = json.loads(line)
    asyncio.run(one_call(job["base_url"], job["api_key"]))
    print(json.dumps({"reward": 0.5}), flush=True)
"""
PAGES = [page for page in pages() if any(f.kind in ("sh", "python") and not f.why_not for f in fences(page))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
async def test_a_block_has_a_kind_and_a_reason_if_it_is_not_run(page: Path) -> None:
    for fence in fences(page):
        assert fence.kind in KINDS, f"{fence}: one of {', '.join(sorted(KINDS))} is needed"
        assert fence.why_not in REASONS | {""}, (
            f"{fence}: {fence.why_not!r} is none of {', '.join(sorted(REASONS))}"
        )
        assert not fence.why_not or fence.kind in ("sh", "python"), f"{fence} would not be run anyway"
        assert ("gateway serve" in fence.body and fence.kind == "sh" and not fence.title) == (
            fence.why_not == "starts the gateway"
        ), f"{fence}: what serves is the gateway that the others ask"
        if fence.kind == "toml":
            tomllib.loads(fence.body)
        if fence.title:
            assert page.read_text().count(fence.title) > 1, f"{fence}: nothing uses this file"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
async def test_the_code_of_a_page_runs(
    page: Path, demo: RunningGateway, typed_commands: Path, tmp_path: Path
) -> None:
    furnish(tmp_path, demo)
    programs = [Path(sys.executable).parent]
    if page.name != "README.md":
        programs.insert(0, typed_commands)
    for fence in fences(page):
        if fence.title:
            (tmp_path / fence.title).write_text(fence.body)
        elif fence.kind in ("sh", "python") and not fence.why_not:
            await run(fence, demo, tmp_path, programs)


def furnish(folder: Path, demo: RunningGateway) -> None:
    """Files that the pages take for granted."""
    agents = folder / "examples" / "agents"
    agents.mkdir(parents=True)
    for path in (ROOT / "examples" / "agents").iterdir():
        if path.name.endswith("_sdk.py"):  # test_examples.py runs those; the SDKs' imports take seconds
            (agents / path.name).write_text(AGENT)
        else:
            (agents / path.name).symlink_to(path)
    one_task = (agents / "tasks.jsonl").read_text().splitlines()[0]  # every episode starts Python
    (agents / "tasks.jsonl").unlink()
    (agents / "tasks.jsonl").write_text(one_task + "\n")
    (folder / "my_package").mkdir()
    for name, text in {
        "my_agent.py": AGENT,
        "my_worker.py": WORKER,
        "my_package/agent.py": FUNCTION,
        "tasks.jsonl": '{"task_id": "t1"}\n',
        ".curlrc": "fail-with-body\nshow-error\n",
    }.items():
        (folder / name).write_text(text)
    database = Path(demo.settings.store.url.removeprefix("sqlite:///"))
    (folder / "runs").mkdir()
    # A copy, because pages have files of that name
    (folder / "gateway.toml").write_text(database.with_name("gateway.toml").read_text())
    (folder / "runs" / "control.jsonl").symlink_to(database.with_name("control.jsonl"))


async def run(fence: Fence, demo: RunningGateway, folder: Path, programs: list[Path]) -> None:
    """Run a block, with these folders first in PATH. Fail with what it printed if its status is not 0."""
    code = await filled_in(fence.body, demo)
    argv = ["bash", "-euo", "pipefail", "-c", code] if fence.kind == "sh" else [sys.executable, "-c", code]
    env = {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "CURL_HOME": str(folder),
        "HEADGATE_GATEWAY": demo.url,
        "COLUMNS": "120",
    }
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=folder,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await result_of(process.communicate(), f"the end of {fence}", LONG_S)
    assert process.returncode == 0, f"{fence} ended with {process.returncode}:\n{code}\n{printed.decode()}"


async def filled_in(code: str, demo: RunningGateway) -> str:
    """The code with this gateway's address, and with an open episode's names where it has places for them."""
    code = re.sub(r"--group-size \d+", "--group-size 1", code.replace(ADDRESS, demo.url))
    if not re.search("ep-…|hg-…|CALL", code):
        return code
    opened = await demo.admin.open_episode("snippet")
    await demo.chat({"Authorization": f"Bearer {opened.api_key}"}, max_tokens=4)
    [call] = (await demo.http.get(f"/admin/v1/episodes/{opened.episode_id}")).json()["calls"]
    names = {"ep-…": opened.episode_id, "hg-…": opened.api_key, "CALL": call["call_id"]}
    for name, value in names.items():
        code = code.replace(name, value)
    return code
