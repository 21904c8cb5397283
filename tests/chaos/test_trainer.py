"""The trainer of the chaos runs goes on after a version that the gateway found to be bad."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.client import GatewayClient
from gateway.types import Lease, LeasedGroups
from tests.chaos.journal import Journal
from tests.chaos.trainer import Trainer, number_of
from tests.chaos.weights import save_sources


class Gateway:
    """A gateway that has a batch for each acknowledged one, finds some versions bad, and keeps the parents of live ones."""

    def __init__(self, ill: set[int], batches: int) -> None:
        self.bad: set[int] = set()
        self.live: dict[int, int] = {}
        self.acked: list[int] = []
        self.over = asyncio.Event()
        self._ill = ill
        self._batches = batches

    async def lease(self, _name: str) -> Lease:
        if len(self.acked) == self._batches:
            self.over.set()
            await asyncio.Event().wait()
        return Lease(f"lease-{len(self.acked)}", len(self.acked), 1, 1, 600.0)

    async def leased_groups(self, _lease: Lease, _cursor: int, _wait_s: float) -> LeasedGroups:
        return LeasedGroups((), 0, True)

    async def status(self) -> dict[str, Any]:
        return {"bad_versions": [{"version": version, "why": "killed"} for version in sorted(self.bad)]}

    async def publish(self, version: int, path: str, *, wait_s: float) -> dict[str, Any]:
        manifest = json.loads((Path(path) / "manifest.json").read_text())
        assert manifest["version"] == version
        assert manifest["parent"] == max(self.live, default=0), "the newest of the versions that were live"
        if version in self._ill:
            self.bad.add(version)
            return {"state": "failed", "bad": True, "why": "killed"}
        self.live[version] = manifest["parent"]
        return {"state": "live", "bad": False, "why": ""}

    async def ack(self, lease: Lease, _checkpoint: str) -> None:
        self.acked.append(lease.buffer)


@pytest.mark.parametrize("ill", [set(), {1}, {2}, {2, 3}, {1, 3, 4}])
async def test_a_bad_version_is_followed_by_the_next_from_the_last_good_one(
    tmp_path: Path, ill: set[int]
) -> None:
    save_sources(tmp_path / "sources")
    folders = {name: str(tmp_path / name) for name in ("trainer", "weights", "sources")}
    gateway = Gateway(ill, batches=3)
    with Journal(tmp_path / "trainer.jsonl") as journal:
        plan = {**folders, "train_s": 0.0}
        training = asyncio.create_task(Trainer(plan, cast(GatewayClient, gateway), journal).train())
        over = asyncio.create_task(gateway.over.wait())
        done, _ = await asyncio.wait({training, over}, return_when=asyncio.FIRST_COMPLETED)
        training.cancel()
        assert done == {over}
    assert gateway.acked == [0, 1, 2]
    assert gateway.bad == ill
    assert sorted(gateway.live) == [n for n in range(1, 4 + len(ill)) if n not in ill][:3]


def test_bad_versions_had_their_numbers_in_vain() -> None:
    assert [number_of(n, set()) for n in range(4)] == [0, 1, 2, 3]
    assert [number_of(n, {2, 3, 5}) for n in range(5)] == [0, 1, 4, 6, 7]
