"""A trainer that went back: versions that the newest does not descend from, and what becomes of their tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gateway.store.ledger import insert_version
from gateway.training_feed.export import Selection, export
from headgate.arrow import groups_from_arrow
from headgate.client.admin import GatewayRefused
from headgate.types import Episode, TokenFlag
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.weights import fake_weights, publish
from trainer.data.tree import rows_of

PARENTS = {1: 0, 2: 1, 3: 1}
"""Version 3 was made of version 1, so 2 is orphaned."""


def values_for(model: Path, work: Path, **overrides: Any) -> dict[str, Any]:
    return settings_for(
        model, work, staleness={"batch": 1, "eta": 2, "min_members": 1}, update={}, **overrides
    )


async def push(gateway: RunningGateway, work: Path, version: int, parent: int) -> dict[str, Any]:
    source = fake_weights(work / f"source-{version}", f"weights {version}")
    path = publish(source, work / f"v{version}", version, parent)
    return await gateway.admin.publish(version, str(path), wait_s=60)


async def sampled_by_three_versions(gateway: RunningGateway, work: Path) -> str:
    """An episode with one turn by each version; it ends after the last was published."""
    assert (await push(gateway, work, 1, PARENTS[1]))["state"] == "live"
    episode, headers = await gateway.open("task")
    for version in (1, 2, 3):
        if version > 1:
            assert (await push(gateway, work, version, PARENTS[version]))["state"] == "live"
        message = {"role": "user", "content": f"at version {version}"}
        assert (await gateway.chat(headers, messages=[message], max_tokens=6)).status_code == 200
    await gateway.admin.reward(episode, 1.0)
    return episode


async def leased(gateway: RunningGateway) -> Episode:
    lease = await gateway.admin.lease("trainer")
    assert lease.batch == 3
    (group,) = (await gateway.admin.leased_groups(lease)).groups
    return group.episodes[0]


async def exported(gateway: RunningGateway, work: Path) -> Episode:
    """The episode as an exported file has it."""
    chosen = Selection("demo", everything=True)
    await asyncio.to_thread(export, gateway.settings, chosen, work / "out.parquet")
    (group,) = groups_from_arrow(pq.read_table(work / "out.parquet"))
    return group.episodes[0]


def flagged(episode: Episode) -> dict[int, bool]:
    """Return for every version whether all its tokens (or none) are flagged as orphans."""
    found: dict[int, bool] = {}
    for node in episode.nodes:
        orphans = (node.flags & int(TokenFlag.ORPHANED)) != 0
        for version in np.unique(node.versions).tolist():
            marks = set(orphans[node.versions == version].tolist())
            assert len(marks) == 1
            found[version] = marks.pop()
    return found


async def test_tokens_of_an_orphaned_version_are_flagged_masked_and_counted(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with run_gateway(values_for(tiny_model, tmp_path)) as gateway:
        await sampled_by_three_versions(gateway, tmp_path)
        status = await gateway.admin.status()
        assert (status["version"], status["newest_version"], status["orphaned_versions"]) == (3, 3, [2])
        assert flagged(await exported(gateway, tmp_path)) == {1: False, 2: True, 3: False}
        episode = await leased(gateway)
    assert flagged(episode) == {1: False, 2: True, 3: False}
    rows = rows_of([(episode, {})])
    of_two = sum(int((node.versions == 2).sum()) for node in episode.nodes)
    of_others = sum(int((node.versions != 2).sum()) for node in episode.nodes)
    assert dict(rows.masked) == {"orphaned": of_two}
    assert rows.trained == of_others > 0
    assert of_two > 0


async def test_a_version_that_never_went_live_orphans_nothing_in_an_export(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with run_gateway(values_for(tiny_model, tmp_path)) as gateway:
        await sampled_by_three_versions(gateway, tmp_path)
        failed = {"model": "demo", "version": 4, "parent": 0, "path": "v4", "state": "failed"}
        await gateway.services.database.submit(lambda c: insert_version(c, failed))
        assert flagged(await exported(gateway, tmp_path)) == {1: False, 2: True, 3: False}


async def test_orphans_may_be_left_to_the_correction(tiny_model: Path, tmp_path: Path) -> None:
    values = values_for(tiny_model, tmp_path) | {"update": {"orphans": "correct"}}
    async with run_gateway(values) as gateway:
        await sampled_by_three_versions(gateway, tmp_path)
        assert (await gateway.admin.status())["orphaned_versions"] == [2]
        assert flagged(await exported(gateway, tmp_path)) == {1: False, 2: False, 3: False}
        episode = await leased(gateway)
    assert flagged(episode) == {1: False, 2: False, 3: False}
    assert rows_of([(episode, {})]).masked == {}


async def test_a_restarted_gateway_knows_the_orphans(tiny_model: Path, tmp_path: Path) -> None:
    values = values_for(tiny_model, tmp_path)
    async with run_gateway(values) as gateway:
        await sampled_by_three_versions(gateway, tmp_path)
    async with run_gateway(values) as gateway:
        status = await gateway.admin.status()
        assert (status["version"], status["orphaned_versions"]) == (3, [2])
        assert status["weights"] == str(tmp_path / "v3")
        assert flagged(await leased(gateway)) == {1: False, 2: True, 3: False}
        assert (await push(gateway, tmp_path, 4, 3))["state"] == "live"
        assert (await gateway.admin.status())["orphaned_versions"] == [2]


async def test_a_parent_that_was_never_live_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(values_for(tiny_model, tmp_path)) as gateway:
        await gateway.fake("faults", stale_reload=True)
        for version in (1, 2):  # 1 fails as the engine does not load it; 7 and 9 were never published
            source = fake_weights(tmp_path / f"source-{version}", f"weights {version}")
            probe = {"sequences": [[5, 9]], "new_logprobs": [[-9.0]], "parent_logprobs": [[-8.0]]}
            publish(source, tmp_path / f"v{version}", version, 0 if version == 1 else 7, probe)
        record = await gateway.admin.publish(1, str(tmp_path / "v1"), wait_s=60)
        assert record["state"] == "failed"
        await gateway.fake("faults", stale_reload=False)
        with pytest.raises(GatewayRefused) as refused:
            await gateway.admin.publish(2, str(tmp_path / "v2"))
        assert (refused.value.status, refused.value.code) == (422, "unknown_parent")
        with pytest.raises(GatewayRefused) as refused:
            await push(gateway, tmp_path / "child-of-a-failure", 2, 1)
        assert (refused.value.status, refused.value.code) == (422, "unknown_parent")
        assert (await push(gateway, tmp_path / "child-of-0", 2, 0))["state"] == "live"
        status = await gateway.admin.status()
        assert (status["version"], status["orphaned_versions"]) == (2, [1])


async def test_a_number_that_skips_batches_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """A version that failed explains a gap; a number that was never published does not."""
    async with run_gateway(values_for(tiny_model, tmp_path)) as gateway:
        wrong = {"sequences": [[5, 9]], "new_logprobs": [[-9.0]], "parent_logprobs": [[-8.0]]}
        bad = publish(fake_weights(tmp_path / "bad", "bad"), tmp_path / "v1", 1, 0, wrong)
        assert (await gateway.admin.publish(1, str(bad), wait_s=60))["state"] == "failed"
        assert (await push(gateway, tmp_path / "child-of-0", 2, 0))["state"] == "live"
        with pytest.raises(GatewayRefused, match=r"never published \(3 to 8\).*publish version 3") as refused:
            await push(gateway, tmp_path, 9, 2)
        assert (refused.value.status, refused.value.code) == (409, "version_skips_batches")
        assert (await gateway.admin.status())["consumed"] == 2
        record = await gateway.admin.publish(9, str(tmp_path / "v9"), wait_s=60, skip_batches=True)
        assert record["state"] == "live"
