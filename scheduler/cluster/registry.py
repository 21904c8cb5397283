"""Registers nodes and engines with the gateway, and reads the state of training.

Owns one connection pool to the admin API, and the names of the engines that it has registered. The gateway's records are compared
with those that it should have, so a restarted gateway gets everything again. One that does not respond is tried again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

import httpx

from headgate.client.admin import GatewayClient, GatewayRefused
from headgate.http import responds
from headgate.processes.supervised import Report
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.tags import TRAIN, NodeInUse
from scheduler.policies.limits import FIGURES, Figures

_RESPONSE_S = 10.0
_REMOVAL_S = 5.0
_NO_RESPONSE = (GatewayRefused, httpx.HTTPError)
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
        self._client = GatewayClient(gateway.admin_url, gateway.key, _RESPONSE_S)
        self._model = gateway.model
        self._report = report
        self._unlent = unlent
        self._ours: dict[str, Address] = {}
        self._nodes: set[str] = set()
        self._refused: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def responds(self, path: str = "/healthz") -> bool:
        """Return True if the gateway responds at `path`; at `/readyz`, if it can serve calls."""
        return await responds(self._client.url + path, _RESPONSE_S)

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
        except _NO_RESPONSE:
            return False

    async def has_none(self, engines: Collection[str]) -> bool:
        """Return True if the gateway has none of these engines; False also if it does not respond."""
        try:
            return not await self._known() & set(engines)
        except _NO_RESPONSE:
            return False

    async def status(self) -> dict[str, Any] | None:
        """Return the state of training, or None if the gateway does not respond."""
        try:
            return await self._client.status(self._model)
        except _NO_RESPONSE:
            return None

    async def steps(self, after: int) -> Sequence[tuple[int, Figures]] | None:
        """Return the trainer's later steps, with what `limits` needs, or None if the gateway does not respond."""
        try:
            return await self._client.steps(after, FIGURES, self._model)
        except _NO_RESPONSE:
            return None

    async def _update_nodes(self, nodes: Sequence[NodeInUse], claimed: Collection[str] | None) -> None:
        known = {row["name"]: set(row["tags"]) for row in await self._client.nodes()}
        for node in nodes:
            free = claimed is not None and node.name not in claimed
            tags = node.tags - self._unlent - ({TRAIN} if free else set()) or {_IDLE}
            if known.get(node.name) != tags:
                await self._accepted(node.name, self._add_node(node, tags))
        names = {node.name for node in nodes}
        for left in self._nodes - names:
            with suppress(GatewayRefused):
                await self._client.remove_node(left)
        self._nodes = names

    async def _add_node(self, node: NodeInUse, tags: Collection[str]) -> None:
        await self._client.add_node(node.name, sorted(tags), node.group.zone)

    async def _update_engines(self, engines: Mapping[str, Address]) -> bool:
        known = await self._known()
        moved = [name for name in self._ours if name in known and engines.get(name) != self._ours[name]]
        # An engine that is restarted elsewhere keeps its name, so the dead one must be removed first.
        await asyncio.gather(*(self._remove(name) for name in moved))
        known = await self._known() if moved else known
        missing = [name for name in engines if name not in known]
        await asyncio.gather(*(self._add(name, engines[name]) for name in missing))
        return not missing and not moved and not self._refused & set(engines)

    async def _known(self) -> set[str]:
        return {row["name"] for row in await self._client.engines()}

    async def _add(self, name: str, address: Address) -> None:
        request = self._client.add_engine(name, address.url, self._model, node=address.node)
        if await self._accepted(name, request):
            self._ours[name] = address

    async def _remove(self, name: str) -> None:
        try:
            removed = (await self._client.remove_engine(name, _REMOVAL_S))["removed"]
        except GatewayRefused as refused:
            removed = refused.status == HTTPStatus.NOT_FOUND
        if removed:
            self._ours.pop(name, None)

    async def _accepted(self, name: str, request: Awaitable[object]) -> bool:
        """Send a request; return True if the gateway accepted it. Report each refusal once."""
        try:
            await request
        except GatewayRefused as refused:
            if name not in self._refused:
                self._refused.add(name)
                self._report(f"the gateway refuses {name}: {refused}")
            return False
        self._refused.discard(name)
        return True
