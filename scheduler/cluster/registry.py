"""Registers nodes and engines with the gateway, and reads the state of training.

Owns one connection pool to the admin API, and the names of the engines that it has registered. The gateway's records are compared
with those that it should have, so a restarted gateway gets everything again. A gateway that does not answer is tried again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from headgate.processes.supervised import Report
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.tags import TRAIN, NodeInUse

_ADMIN = "/admin/v1"
_ANSWER_S = 10.0
_IDLE = "none"
"""The tag of a node without tags: the gateway requires one."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an engine."""

    url: str
    node: str


class Registry:
    """The admin API of the cluster's gateway."""

    def __init__(self, gateway: GatewayFile, report: Report, unlent: frozenset[str] = frozenset()) -> None:
        """`unlent`: tags that are not sent to the gateway."""
        headers = {"Authorization": f"Bearer {gateway.key}"} if gateway.key else {}
        self._http = httpx.AsyncClient(base_url=gateway.admin_url, headers=headers, timeout=_ANSWER_S)
        self._model = gateway.model
        self._report = report
        self._unlent = unlent
        self._ours: dict[str, Address] = {}
        self._nodes: set[str] = set()
        self._refused: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answers(self, path: str = "/healthz") -> bool:
        """Return True if the gateway answers at `path`; at `/readyz`, if it can serve calls."""
        try:
            return (await self._http.get(path)).is_success
        except httpx.HTTPError:
            return False

    async def update(
        self,
        nodes: Sequence[NodeInUse],
        engines: Mapping[str, Address],
        claimed: Collection[str] | None = None,
    ) -> bool:
        """Register these nodes and engines. Return True once the gateway has exactly these.

        `claimed`: the names of the trainer's nodes; others are registered without the tag `train`, since no trainer would release
        them. None: every node with the tag may be a trainer's.
        """
        try:
            await self._update_nodes(nodes, claimed)
            return await self._update_engines(engines)
        except httpx.HTTPError:
            return False

    async def has_none(self, engines: Collection[str]) -> bool:
        """Return True if the gateway has none of these engines; False also if it does not answer."""
        try:
            return not (await self._known()).keys() & set(engines)
        except httpx.HTTPError:
            return False

    async def status(self) -> dict[str, Any] | None:
        """Return the state of training, or None if the gateway does not answer."""
        try:
            answer = await self._http.get(f"{_ADMIN}/status", params={"model": self._model})
            found: dict[str, Any] = answer.json()
            return found if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    async def _update_nodes(self, nodes: Sequence[NodeInUse], claimed: Collection[str] | None) -> None:
        answer = await self._http.get(f"{_ADMIN}/nodes")
        answer.raise_for_status()
        known = {row["name"]: set(row["tags"]) for row in answer.json()["nodes"]}
        for node in nodes:
            free = claimed is not None and node.name not in claimed
            tags = node.tags - self._unlent - ({TRAIN} if free else set()) or {_IDLE}
            if known.get(node.name) != tags:
                self._check(node.name, await self._http.post(f"{_ADMIN}/nodes", json=_row(node, tags)))
        names = {node.name for node in nodes}
        for left in self._nodes - names:
            await self._http.delete(f"{_ADMIN}/nodes/{left}")
        self._nodes = names

    async def _update_engines(self, engines: Mapping[str, Address]) -> bool:
        known = await self._known()
        moved = [name for name in self._ours if name in known and engines.get(name) != self._ours[name]]
        # An engine that is restarted elsewhere keeps its name, so the dead one must be removed first.
        await asyncio.gather(*(self._remove(name) for name in moved))
        known = await self._known() if moved else known
        missing = [name for name in engines if name not in known]
        await asyncio.gather(*(self._add(name, engines[name]) for name in missing))
        return not missing and not moved and not self._refused & set(engines)

    async def _known(self) -> dict[str, str]:
        answer = await self._http.get(f"{_ADMIN}/engines")
        answer.raise_for_status()
        return {row["name"]: row["url"] for row in answer.json()["engines"]}

    async def _add(self, name: str, address: Address) -> None:
        body = {"name": name, "url": address.url, "model": self._model, "node": address.node}
        if self._check(name, await self._http.post(f"{_ADMIN}/engines", json=body)):
            self._ours[name] = address

    async def _remove(self, name: str) -> None:
        answer = await self._http.delete(f"{_ADMIN}/engines/{name}", params={"wait": 5.0})
        if answer.status_code == 404 or (answer.is_success and answer.json().get("removed")):
            self._ours.pop(name, None)

    def _check(self, name: str, answer: httpx.Response) -> bool:
        """Return True if the gateway accepted the request. Report each refusal once."""
        if answer.is_success:
            self._refused.discard(name)
            return True
        if name not in self._refused:
            self._refused.add(name)
            self._report(f"the gateway refuses {name}: {answer.status_code} {answer.text[:300]}")
        return False


def _row(node: NodeInUse, tags: Collection[str]) -> dict[str, Any]:
    capacity = node.discovered.capacity
    return {
        "name": node.name,
        "tags": sorted(tags),
        "zone": node.group.zone,
        "hardware": node.group.hardware,
        "capacity": {"cpus": capacity.cpus, "gpus": capacity.gpus, "memory_gb": round(capacity.memory_gb, 1)},
    }
