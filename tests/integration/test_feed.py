"""`headgate.client.Feed`: a foreign trainer, its restarts and its mistakes.

The trainer of docs/topics/feed.md runs as it stands there, on an engine that computes from the weights.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.engines.fake import create_fake_app
from headgate.client import Feed, GatewayClient, GatewayRefused, LeaseLost, OldGateway
from headgate.client.versions import write_version
from headgate.feed_version import FEED_HEADER, FEED_VERSION
from headgate.processes.ports import free_port
from headgate.types import Probe
from headgate.weights.manifest import MANIFEST
from tests.harness.fences import ROOT, fences
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.model_engine import ModelEngine
from tests.harness.models import logprobs as true_logprobs
from tests.harness.models import save_model
from tests.harness.waiting import result_of

PROBE = Probe(((1, 2),), ((-1.0,),), ((-1.0,),))


async def finished(gateway: RunningGateway, task: str) -> None:
    """Reward two members of a group."""
    for reward in (0.0, 1.0):
        episode, headers = await gateway.open(task, group_id=task, group_size=2)
        await gateway.sample(headers, max_tokens=6)
        await gateway.admin.reward(episode, reward)


def zeros(sequences: list[list[int]]) -> list[list[float]]:
    """Return the scores of a trainer whose versions are never probed."""
    return [[0.0] * (len(ids) - 1) for ids in sequences]


async def in_feed(gateway: RunningGateway, work: Callable[[Feed], Any]) -> Any:
    """Run a trainer that blocks, in a thread."""

    def trainer() -> Any:
        with Feed(gateway.url, score=zeros) as feed:
            return work(feed)

    return await result_of(asyncio.to_thread(trainer), "the trainer ends")


@pytest.fixture
async def computed(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway whose engine samples from the weights that it loaded."""
    save_model(tmp_path / "model", 0)
    port = free_port()
    async with serve(create_fake_app(ModelEngine(str(tmp_path / "model"))), port):
        engine = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
        values = settings_for(tmp_path / "model", tmp_path, engine=engine, staleness={"batch": 2, "eta": 1})
        async with run_gateway(values, in_process=False) as gateway:
            yield gateway


async def test_the_trainer_of_the_page_publishes_versions_that_pass_their_probes(
    computed: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in "abcd":
        await finished(computed, task)
    (loop,) = (block for block in fences(ROOT / "docs/topics/feed.md") if "with Feed" in block.body)
    assert len(loop.body.splitlines()) <= 45
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["my_trainer.py", computed.url, "2"])
    code = compile(loop.body, str(loop), "exec")
    await result_of(asyncio.to_thread(exec, code, {"__name__": "__main__"}), "the trainer ends")
    folders = [tmp_path / "model", tmp_path / "versions" / "v000001", tmp_path / "versions" / "v000002"]
    for version in (1, 2):
        record = await computed.admin.weights(version)
        (report,) = record["report"]
        assert (record["state"], report["probe"]["verdict"]) == ("live", "passed")
        old, new = (load_file(folder / "model.safetensors") for folder in folders[version - 1 : version + 1])
        assert any((old[name] != new[name]).any() for name in old)
    await finished(computed, "e")
    newest = (await computed.admin.leased_groups(await computed.admin.lease("trainer"))).groups[0]
    prompt, sampled = newest.episodes[0].nodes
    assert set(sampled.versions.tolist()) == {2}
    whole = [*prompt.ids.tolist(), *sampled.ids.tolist()]
    np.testing.assert_allclose(
        sampled.logprobs, true_logprobs(folders[2], whole)[len(prompt.ids) - 1 :], atol=1e-4
    )


async def test_a_batch_that_is_in_a_live_version_is_not_trained_again(
    gateway: RunningGateway, versions: dict[int, Path]
) -> None:
    for task in "abcd":
        await finished(gateway, task)

    def killed(feed: Feed) -> int:
        batch = feed.batch()
        feed.run(feed.publish(1, str(versions[1])))
        return batch.number

    assert await in_feed(gateway, killed) == 0
    assert (await gateway.admin.status())["consumed"] == 0, "the acknowledgement is missing"
    number, groups = await in_feed(gateway, lambda feed: (lambda it: (it.number, it.groups))(feed.batch()))
    assert (number, [group.group_id for group in groups]) == (1, ["c", "d"])
    assert [batch["batch"] for batch in await gateway.admin.batches()] == [0]


async def test_a_batch_that_was_not_published_is_given_again(gateway: RunningGateway) -> None:
    for task in "ab":
        await finished(gateway, task)

    def fails(feed: Feed) -> list[list[int]]:
        rows: list[list[int]] = []

        def step() -> None:
            with feed.batch() as batch:
                rows.extend(row.ids.tolist() for row in batch.rows())
                raise MemoryError

        with pytest.raises(MemoryError):
            step()
        with feed.batch() as batch:
            assert [row.ids.tolist() for row in batch.rows()] == rows
            assert batch.arrow().num_rows == 2 * len(rows)
        return rows

    assert len(await in_feed(gateway, fails)) == 4


async def test_a_lease_outlives_a_long_step(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 1}, feed={"lease_s": 1.5})
    async with run_gateway(values) as gateway:
        await finished(gateway, "a")
        renewals: asyncio.Queue[str] = asyncio.Queue()
        renew = gateway.model.leases.renew

        async def counted(lease_id: str, fence: int) -> None:
            await renew(lease_id, fence)
            renewals.put_nowait(lease_id)

        gateway.model.leases.renew = counted
        loop = asyncio.get_running_loop()

        def steps(feed: Feed) -> None:
            with feed.batch() as batch:
                for _ in range(4):  # more than a lease lives
                    asyncio.run_coroutine_threadsafe(renewals.get(), loop).result()
                batch.ack("trained")

        await in_feed(gateway, steps)
        assert (await gateway.admin.status())["consumed"] == 1


async def test_nothing_is_published_of_a_batch_that_another_trainer_has(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    for task in "ab":
        await finished(gateway, task)

    def superseded(feed: Feed) -> None:
        batch = feed.batch()
        feed.run(feed.client.lease("trainer"))
        with pytest.raises(LeaseLost, match="lease again"):
            batch.publish({}, tmp_path / "versions")

    await in_feed(gateway, superseded)
    assert not (tmp_path / "versions").exists()


def state_of(model: Path) -> dict[str, Any]:
    return load_file(model / "model.safetensors")


Mistake = Callable[[RunningGateway, Path, Path], Awaitable[Any]]


def publishes(change: Callable[[dict[str, Any]], dict[str, Any]], version: int = 1) -> Mistake:
    """Return the mistake of a trainer that publishes changed tensors."""

    async def publish(gateway: RunningGateway, model: Path, work: Path) -> None:
        state = change(state_of(model))
        path = await asyncio.to_thread(write_version, work / "versions", version, state, PROBE, 0, model)
        await gateway.admin.publish(version, str(path))

    return publish


async def no_probe(gateway: RunningGateway, model: Path, work: Path) -> None:
    path = await asyncio.to_thread(write_version, work / "versions", 1, state_of(model), PROBE, 0, model)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "probe": None}))
    await gateway.admin.publish(1, str(path))


async def acknowledges_anothers(gateway: RunningGateway, model: Path, work: Path) -> None:
    lease = await gateway.admin.lease("another")
    await gateway.admin.ack(replace(lease, fence=lease.fence - 1), "mine")


async def acknowledges_its_old_one(gateway: RunningGateway, model: Path, work: Path) -> None:
    old = await gateway.admin.lease("trainer")
    await gateway.admin.nack(old, "restart")
    await gateway.admin.lease("another")
    await gateway.admin.ack(old, "mine")


async def lets_it_lapse(gateway: RunningGateway, model: Path, work: Path) -> None:
    lease = await gateway.admin.lease("trainer")
    gateway.model.leases._current.deadline = 0.0
    await gateway.admin.ack(lease, "late")


async def leases_anothers(gateway: RunningGateway, model: Path, work: Path) -> None:
    await gateway.admin.lease("another")
    await gateway.admin.lease("trainer")


async def acknowledges_early(gateway: RunningGateway, model: Path, work: Path) -> None:
    await gateway.admin.ack(await gateway.admin.lease("trainer"), "early")


async def is_two_versions_older(gateway: RunningGateway, model: Path, work: Path) -> None:
    gateway.admin._http.headers[FEED_HEADER] = str(FEED_VERSION - 2)
    try:
        await gateway.admin.lease("trainer")
    finally:
        gateway.admin._http.headers[FEED_HEADER] = str(FEED_VERSION)


MISTAKES: dict[str, tuple[Mistake, int, str, str]] = {
    "no probe": (no_probe, 422, "no_probe", "path"),
    "other names": (
        publishes(lambda state: {f"module.{name}": value for name, value in state.items()}),
        *(422, "wrong_tensors", "path"),
    ),
    "other dtypes": (
        publishes(lambda state: {name: value.astype(np.int32) for name, value in state.items()}),
        *(422, "wrong_tensors", "path"),
    ),
    "not finite": (
        publishes(lambda state: {name: value * np.float32("nan") for name, value in state.items()}),
        *(422, "not_finite", "path"),
    ),
    "a step's number": (publishes(dict, version=9), 409, "version_skips_batches", "version"),
    "another's lease": (acknowledges_anothers, 409, "fenced", "fence"),
    "an old lease": (acknowledges_its_old_one, 404, "no_lease", "lease_id"),
    "lapsed": (lets_it_lapse, 409, "lease_expired", "lease_id"),
    "two trainers": (leases_anothers, 409, "lease_held", "consumer"),
    "incomplete": (acknowledges_early, 409, "batch_not_ready", "lease_id"),
    "an old client": (is_two_versions_older, 400, "feed_version", FEED_HEADER),
}


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_is_refused_with_its_field_and_loses_nothing(
    name: str, gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    mistake, status, code, param = MISTAKES[name]
    tasks = "a" if name == "incomplete" else "ab"
    for task in tasks:
        await finished(gateway, task)
    with pytest.raises(GatewayRefused) as refused:
        await mistake(gateway, tiny_model, tmp_path)
    error = refused.value
    assert (error.status, error.code, error.param) == (status, code, param)
    assert "\n" not in error.message
    state = await gateway.admin.status()
    assert (state["version"], state["newest_version"], state["consumed"]) == (0, 0, 0)
    gateway.model.leases._current = None
    groups = (await gateway.admin.leased_groups(await gateway.admin.lease("trainer"))).groups
    assert [group.group_id for group in groups] == list(tasks)


def test_the_page_lists_these_mistakes() -> None:
    page = (ROOT / "docs/topics/feed.md").read_text()
    assert {code for _, _, code, _ in MISTAKES.values() if f"{code}`" not in page} == set()


async def test_a_gateway_that_is_too_old_is_named() -> None:
    async def lease(request: Request) -> Response:
        return JSONResponse({"lease_id": "l", "batch": 0, "size": 1, "fence": 1, "deadline_s": 1.0})

    port = free_port()
    app = Starlette(routes=[Route("/admin/v1/leases", lease, methods=["POST"])])
    async with serve(app, port), GatewayClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(OldGateway, match="serves no version of the feed, and this client reads 2 to 3"):
            await client.lease("trainer")
