"""Episodes are deleted when they are old, or on request, unless something may still need them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config import RetentionSettings
from gateway.episodes import retention
from gateway.store.retention import Ages
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import within

LATER = time.time() + 1_000_000
EVERYTHING = Ages(LATER, LATER, LATER)

_BALLAST = 1_000_000
"""Bytes of a deleted episode, which the file must lose."""


async def sampled(gateway: RunningGateway, group: str, mode: Any = "train", **given: Any) -> str:
    """An episode with one call."""
    episode, headers = await gateway.open(group, group_id=group, mode=mode, **given)
    assert (await gateway.chat(headers, max_tokens=5)).status_code == 200
    return episode


async def rewarded(gateway: RunningGateway, *groups: str) -> list[str]:
    """Rewarded episodes, each a group of its own."""
    episodes = [await sampled(gateway, group) for group in groups]
    for episode in episodes:
        await gateway.admin.reward(episode, 0.5)
    return episodes


async def trained(gateway: RunningGateway, batch: int, checkpoint: str) -> None:
    lease = await gateway.admin.lease("trainer")
    assert lease.batch == batch
    await gateway.admin.ack(lease, checkpoint)


async def there(gateway: RunningGateway) -> set[str]:
    response = await gateway.http.get("/admin/v1/episodes")
    return {row["id"] for row in response.json()["episodes"]}


async def delete(gateway: RunningGateway, episode: str, **query: str) -> tuple[int, dict[str, Any]]:
    response = await gateway.http.delete(f"/admin/v1/episodes/{episode}", params=query)
    return response.status_code, response.json()


async def code_of(gateway: RunningGateway, episode: str, **query: str) -> tuple[int, str]:
    status, body = await delete(gateway, episode, **query)
    return status, body["error"]["code"]


@pytest.fixture
def values(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Two groups of one episode make a batch."""
    return settings_for(tiny_model, tmp_path, staleness={"batch": 2, "eta": 2})


async def test_what_may_still_be_trained_or_trained_again_stays(values: dict[str, Any]) -> None:
    async with run_gateway(values) as gateway:
        first, waiting = await rewarded(gateway, "a", "b", "c"), await sampled(gateway, "open")
        single = first[2]
        evaluation = await sampled(gateway, "e", "eval")
        await gateway.admin.reward(evaluation, 1.0)
        await trained(gateway, 0, "checkpoint-1")
        swept = await retention.prune(gateway.services.database, EVERYTHING)
        assert swept.deleted == {"eval": 1}
        assert swept.needed == {"checkpoint": 2, "group": 1}
        assert await there(gateway) == {*first, waiting}
        await gateway.admin.abandon(waiting, "gone")
        others = await rewarded(gateway, "d")
        lease = await gateway.admin.lease("trainer")
        await retention.prune(gateway.services.database, EVERYTHING)
        assert await there(gateway) == {*first, *others}, "what is leased is read by a trainer"
        groups = await gateway.admin.leased_groups(lease, 0)
        assert {episode.episode_id for group in groups.groups for episode in group.episodes} == {
            single,
            *others,
        }
        await gateway.admin.ack(lease, "checkpoint-2")
        await retention.prune(gateway.services.database, EVERYTHING)
        assert await there(gateway) == {single, *others}, "the batch before is in a checkpoint"


async def test_the_batches_since_the_newest_checkpoint_can_be_trained_again(values: dict[str, Any]) -> None:
    async with run_gateway(values) as gateway:
        episodes = [await rewarded(gateway, f"{n}-a", f"{n}-b") for n in range(3)]
        for batch, checkpoint in enumerate(("old", "new", "new")):
            await trained(gateway, batch, checkpoint)
        await retention.prune(gateway.services.database, EVERYTHING)
        assert await there(gateway) == {*episodes[1], *episodes[2]}
        for batch in (1, 2):
            response = await gateway.http.get(f"/admin/v1/batches/{batch}/groups")
            assert response.status_code == 200
        response = await gateway.http.get("/admin/v1/batches/0/groups")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "episodes_deleted")
        batches = (await gateway.http.get("/admin/v1/batches")).json()["batches"]
        assert [batch["groups"] for batch in batches] == [2, 2, 2], "that they were trained stays known"


async def test_each_kind_has_its_own_age(values: dict[str, Any]) -> None:
    async with run_gateway(values) as gateway:
        kept = await rewarded(gateway, "a", "b")
        dropped, evaluation = await sampled(gateway, "c"), await sampled(gateway, "e", "eval")
        await gateway.admin.abandon(dropped, "gone")
        await gateway.admin.reward(evaluation, 1.0)
        await trained(gateway, 0, "")
        for settings, left in (
            (RetentionSettings(), {*kept, dropped, evaluation}),
            (RetentionSettings(keep_days=2), {*kept, dropped, evaluation}),
            (RetentionSettings(keep_eval_days=1), {*kept, dropped}),
            (RetentionSettings(keep_days=3, keep_untrained_days=1), set(kept)),
            (RetentionSettings(keep_days=1), set()),
        ):
            now = time.time() + 1.5 * 86_400
            await retention.prune(gateway.services.database, retention.ages(settings, now))
            assert await there(gateway) == left, settings


async def test_the_coordinator_looks_for_old_episodes_itself(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.coordinator._RETENTION_EVERY_S", 0.05)
    values["retention"] = {"keep_days": 1e-9}
    async with run_gateway(values) as gateway:
        await gateway.admin.abandon(await sampled(gateway, "a"), "gone")
        async with within("the old episode is deleted"):
            while await there(gateway):
                pass


async def test_an_episode_is_deleted_on_request(values: dict[str, Any]) -> None:
    async with run_gateway(values) as gateway:
        assert await code_of(gateway, "ep-nowhere") == (404, "no_episode")
        first = await sampled(gateway, "a")
        assert await code_of(gateway, first, force="true") == (409, "episode_open")
        await gateway.admin.reward(first, 1.0)
        assert await code_of(gateway, first, force="true") == (409, "episode_needed")
        second = (await rewarded(gateway, "b"))[0]
        await trained(gateway, 0, "checkpoint-1")
        assert await code_of(gateway, first, force="true") == (409, "episode_needed")
        await rewarded(gateway, "c", "d")
        await trained(gateway, 1, "checkpoint-2")
        assert await code_of(gateway, first) == (409, "episode_trained")
        assert await delete(gateway, first, force="true") == (
            200, {"episode_id": first, "was": "trained", "calls": 1},
        )  # fmt: skip
        assert await code_of(gateway, first) == (404, "no_episode")
        assert (await gateway.http.get(f"/admin/v1/episodes/{first}/trajectory")).status_code == 404
        assert second in await there(gateway)


async def test_the_end_of_a_deleted_episode_is_kept(values: dict[str, Any]) -> None:
    async with run_gateway(values) as gateway:
        first, _ = await rewarded(gateway, "a", "b")
        dropped, evaluation = await sampled(gateway, "c"), await sampled(gateway, "e", "eval")
        await gateway.admin.abandon(dropped, "gone")
        await gateway.admin.reward(evaluation, 1.0)
        await trained(gateway, 0, "")
        now = time.time()
        await retention.prune(gateway.services.database, Ages(now, now, now))
        stories = {episode: await gateway.admin.why(episode) for episode in (first, dropped, evaluation)}
        assert [why["verdict"] for why in stories.values()] == [
            "deleted; it was trained in batch 0 as version 1",
            "deleted; it was not trained, and ended as 'gone'",
            "deleted; it was an evaluation episode",
        ]
        assert [[step["kind"] for step in why["story"]] for why in stories.values()] == [["deleted"]] * 3
        assert stories[first]["story"][0]["words"] == (
            "it was deleted with all that was recorded in it, because it was older than [retention] keeps episodes"
        )
        database = gateway.services.database
        await retention.prune(database, EVERYTHING)
        assert (await gateway.http.get(f"/admin/v1/episodes/{first}/why")).status_code == 404


async def test_counts_follow_what_happens(values: dict[str, Any]) -> None:
    async with run_gateway(values) as gateway:

        async def counts() -> dict[str, int]:
            return (await gateway.http.get("/admin/v1/status")).json()["episodes"]

        one, two = await sampled(gateway, "a"), await sampled(gateway, "e", "eval")
        assert await counts() == {"eval/open": 1, "train/open": 1}
        await gateway.admin.abandon(one, "gone")
        await gateway.admin.reward(two, 1.0)
        assert await counts() == {"eval/closed/rewarded": 1, "train/closed/gone": 1}
        await retention.prune(gateway.services.database, EVERYTHING)
        assert await counts() == {}


def config_of(values: dict[str, Any], tmp_path: Path) -> Path:
    """The same settings as a file."""
    path = tmp_path / "gateway.toml"
    tables = {**values, "models": None}
    lines = [f"[models.demo]\npath = '{values['models']['demo']['path']}'\n"]
    for section, given in tables.items():
        lines += [
            f"[{section}]\n",
            *(f"{key} = {json.dumps(value)}\n" for key, value in (given or {}).items()),
        ]
    path.write_text("".join(line for line in lines if line != "[models]\n"))
    return path


async def test_prune_reports_what_it_would_delete_and_deletes_it(
    values: dict[str, Any], tmp_path: Path
) -> None:
    async with run_gateway(values) as gateway:
        kept = await rewarded(gateway, "a")
        await gateway.admin.abandon(await sampled(gateway, "b", metadata={"ballast": "x" * _BALLAST}), "gone")
        database = Path(gateway.services.settings.store.url.removeprefix("sqlite:///"))
    config = str(config_of(values, tmp_path))

    def pruned(*options: str) -> str:
        result = CliRunner().invoke(app, ["prune", "--config", config, *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    async def left() -> int:
        with sqlite3.connect(database) as connection:
            return connection.execute("SELECT count(*) FROM episodes").fetchone()[0]

    summary = (
        "1 episodes (1 untrained) with 1 calls; kept, though old enough: 1 because its group is not over"
    )
    assert await asyncio.to_thread(pruned, "--older-than", "0", "--dry-run") == (
        f"would delete {summary}, so it may still be trained\n"
    )
    assert await left() == 2
    size = database.stat().st_size
    assert (await asyncio.to_thread(pruned, "--older-than", "0", "--vacuum")).startswith(f"deleted {summary}")
    assert await left() == len(kept)
    assert database.stat().st_size < size - _BALLAST / 2
    refused = await asyncio.to_thread(CliRunner().invoke, app, ["prune", "--config", config])
    assert refused.exit_code == 2
    assert "--older-than" in refused.output
