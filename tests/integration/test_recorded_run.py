"""A recorded run is shown from its store alone: its curves, tokens, history and health; nothing in it can be changed."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.archive import RecordedRun, create_archive, find_run
from gateway.config.settings import ConfigError
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from tests.harness.gateways import serve
from tests.harness.recorded_run import ADMIN_KEY, RUN, STEPS, Recorded, figures, figures_of, record
from tests.harness.waiting import LONG_S


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return asyncio.run(record(tmp_path_factory.mktemp("run")))


@pytest.fixture
async def page(run: Recorded) -> AsyncIterator[httpx.AsyncClient]:
    """The run, shown."""
    port = free_port()
    async with serve(create_archive(find_run(run.folder)), port):
        url = f"http://127.0.0.1:{port}/admin/v1"
        async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as client:
            yield client


async def get(page: httpx.AsyncClient, route: str, **params: Any) -> dict[str, Any]:
    response = await page.get(route, params=params)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_runs_curves_and_list_are_as_they_were_recorded(
    page: httpx.AsyncClient, run: Recorded
) -> None:
    (known,) = (await get(page, "/runs"))["runs"]
    assert (known["run"], known["model"], known["last_step"]) == (RUN, "demo", STEPS)
    curves = await get(page, "/steps")
    steps = list(range(1, STEPS + 1))
    assert curves["step"] == steps
    assert curves["figures"]["loss"] == [figures(step)["loss"] for step in steps]
    assert curves["figures"]["eval/reward_mean"] == [pytest.approx(0.5 + step / 20) for step in steps]
    listed = await get(page, "/episodes", total=True, limit=100)
    assert listed["total"] == len(listed["episodes"]) == len(run.trained) + 4
    assert (await get(page, f"/episodes/{run.open}"))["state"] == "open"
    (shown,) = (await get(page, "/episodes", text=run.trained[0], preview=True))["episodes"]
    assert shown["group"] == {"rewards": 4, "mean": 0.375, "std": pytest.approx(0.3125**0.5 / 2)}
    assert "Count the boats on the river." in shown["prompt_end"]
    assert shown["reply_start"]
    assert "ZeroDivisionError" in (await get(page, f"/episodes/{run.failed}/why"))["error"]


async def test_every_trained_token_has_the_figures_of_its_position(
    page: httpx.AsyncClient, run: Recorded
) -> None:
    episode = run.trained[3]  # it has a branch
    found = await get(page, f"/episodes/{episode}/tokens")
    trained, nodes = found["trained"], found["nodes"]
    assert (trained["run"], trained["step"], trained["version"]) == (RUN, 1, 1)
    assert {node["lineage"] for node in nodes if node["sampled"]} == {0, 1}
    depths: dict[int, int] = {}
    for node in nodes:
        depths[node["index"]] = depths.get(node["parent"], 0) + node["at"]
        for i in range(node["tokens"]):
            row, position = node["start"] + i, depths[node["index"]] + i
            reason = found["mask_reasons"][found["mask"][row]]
            if not node["sampled"]:
                assert (reason, trained["entropy"][row], found["logprob"][row]) == ("prompt", None, None)
                continue
            expected = figures_of(position)
            assert trained["entropy"][row] == pytest.approx(expected["entropy"], rel=1e-5)
            assert trained["advantage"][row] == expected["advantage"]
            assert trained["clipped"][row] == expected["clipped"]
            assert reason == ("ratio" if position % 13 == 0 else "")
            assert found["version"][row] == 0
    trajectory = await get(page, f"/episodes/{episode}/trajectory")
    texts = ["".join(found["text"][n["start"] : n["start"] + n["tokens"]]) for n in nodes]
    assert texts == [node["text"] for node in trajectory["nodes"]]
    controls = {found["text"][place] for place in found["control"]}
    assert {"<|im_start|>", "<|im_end|>"} <= controls


async def test_later_nodes_alone_and_nothing_twice_are_sent_to_who_asks_so(
    page: httpx.AsyncClient, run: Recorded
) -> None:
    route = f"/episodes/{run.trained[3]}/tokens"
    whole, rest = await get(page, route), await get(page, route, from_node=4)
    start = next(node["start"] for node in whole["nodes"] if node["index"] == 4)
    assert rest["text"] == whole["text"][start:]
    assert rest["trained"]["advantage"] == whole["trained"]["advantage"][start:]
    first = await page.get(route)
    again = await page.get(route, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_an_episode_without_figures_has_the_reason(page: httpx.AsyncClient, run: Recorded) -> None:
    found = await get(page, f"/episodes/{run.evaluated}/tokens")
    assert (found["trained"], found["untrained_why"]) == (None, "no batch was trained on this episode")
    moved = run.folder / "trainer" / "tokens"
    renamed = moved.rename(moved.with_name("elsewhere"))
    try:
        found = await get(page, f"/episodes/{run.trained[0]}/tokens")
    finally:
        renamed.rename(moved)
    assert found["trained"] is None
    assert "[report] tokens_every" in found["untrained_why"]


async def test_versions_timeline_and_health_come_from_the_store(
    page: httpx.AsyncClient, run: Recorded
) -> None:
    versions = (await get(page, "/versions"))["versions"]
    assert [(v["version"], v["state"]) for v in versions] == [(n, "live") for n in range(STEPS + 1)]
    assert all(v["live_at"] for v in versions)
    drawn = await get(page, "/timeline")
    (engine,) = drawn["engines"]
    assert engine["spans"][-1]["state"] == "open"
    with sqlite3.connect(run.folder / "gateway.db") as database:
        assert drawn["to"] == database.execute("SELECT max(at) FROM events").fetchone()[0]
    for earlier, later in zip(engine["spans"], engine["spans"][1:], strict=False):
        assert earlier["to"] == later["from"]
    health = await get(page, "/health")
    assert health["limits"] == {"line": "what limits the run is not known yet: 3 of 5 steps seen"}
    judged = {signal["name"]: signal for signal in health["signals"]}
    assert judged["excluded_share"]["value"] == pytest.approx(2 / (len(run.trained) + 2))
    assert judged["excluded_share"]["state"] == "warn"
    assert judged["equal_reward_groups"]["value"] == 0.25
    assert judged["unparsed_tool_calls"]["state"] == "ok"
    slowest = (await get(page, "/staleness"))["slowest"]
    assert [group["episodes"] for group in slowest] == [[run.open]]


async def test_its_settings_and_logs_are_those_of_its_folders(page: httpx.AsyncClient, run: Recorded) -> None:
    programs = {one["program"]: one for one in (await get(page, "/settings"))["programs"]}
    shown = {name: {row["name"]: row for row in one["settings"]} for name, one in programs.items()}
    assert shown["gateway"]["staleness.batch"] | {"default": 0} == {
        "name": "staleness.batch", "value": 2, "default": 0, "changed": True
    }  # fmt: skip
    assert (shown["trainer"]["run.steps"]["value"], shown["trainer"]["report.tokens_every"]["changed"]) == (
        40,
        False,
    )
    assert shown["trainer"]["gateway.admin_key"]["value"] == "***"
    for path in run.folder.rglob("*-settings.json"):
        assert ADMIN_KEY not in path.read_text()
    listed = await get(page, "/logs")
    names = {Path(log["path"]).name: log for log in listed["logs"]}
    assert [*names] == ["gateway.log"]
    assert [one["program"] for one in listed["missing"]] == ["trainer", "engine"]
    log = names["gateway.log"]["path"]
    end = await get(page, "/logs/tail", log=log, limit=1024)
    assert end["text"].endswith("WARNING engine demo-0 was slow\n")
    assert (len(end["text"]) <= 1024, end["text"].startswith("INFO")) == (True, True)
    for other in (run.folder / "gateway.db", run.folder / "model/../gateway.log", "/etc/passwd"):
        response = await page.get("/logs/tail", params={"log": str(other)})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "no_log")


async def test_its_page_is_ready(page: httpx.AsyncClient) -> None:
    assert (await page.get(str(page.base_url.copy_with(path="/readyz")))).json() == {"status": "ready"}


async def test_nothing_is_changed_by_looking_and_nothing_can_be(
    page: httpx.AsyncClient, run: Recorded
) -> None:
    def digest() -> str:
        with sqlite3.connect(run.folder / "gateway.db") as database:
            return hashlib.sha256("\n".join(database.iterdump()).encode()).hexdigest()

    before = digest()
    for route in (
        "/console",
        "/status",
        "/staleness",
        "/engines",
        "/nodes",
        "/calls",
        "/batches",
        "/timeline",
    ):
        await get(page, route)
    refused = [
        await page.delete(f"/episodes/{run.failed}"),
        await page.post("/episodes", json={"task_id": "t"}),
        await page.post("/steps", json={"step": 9}),
    ]
    assert [(r.status_code, r.json()["error"]["code"]) for r in refused] == [(405, "recorded_run")] * 3
    async with GatewayClient(str(page.base_url).removesuffix("/admin/v1/")) as client:
        events = [event["kind"] async for event in client.events(after=0, wait_s=0)]
    assert events.count("trainer.step") == events.count("trainer.evaluated") == STEPS
    assert digest() == before


def test_a_run_is_found_in_its_folder_and_in_that_of_its_trainer(run: Recorded, tmp_path: Path) -> None:
    assert find_run(run.folder).store == find_run(run.folder / "trainer").store
    for folder, reason in (
        (run.folder / "nowhere", "no such folder"),
        (tmp_path, "is not a run"),
        (run.folder / "model", "is not a run"),
    ):
        with pytest.raises(ConfigError, match=reason):
            find_run(folder)
    for name in ("a.db", "b.db"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="several stores"):
        find_run(tmp_path)


async def test_a_run_without_its_tokenizer_is_shown_as_ids(run: Recorded, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "moved")
    with sqlite3.connect(tmp_path / "moved" / "gateway.db") as database:
        database.execute("UPDATE versions SET path = '/gone'")
    shown = RecordedRun(f"sqlite:///{tmp_path}/moved/gateway.db", (tmp_path / "moved" / "trainer",))
    port = free_port()
    async with serve(create_archive(shown), port), httpx.AsyncClient(timeout=LONG_S) as client:
        url = f"http://127.0.0.1:{port}/admin/v1/episodes/{run.trained[0]}/tokens"
        found = (await client.get(url)).json()
    assert found["text"] == [f"{token} " for token in found["ids"]]
    assert found["trained"]["step"] == 1
