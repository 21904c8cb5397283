"""The nodes of a Ray cluster: labels are tags, each process has an actor, and jobs of one start share a placement group.

Needs the extra `ray`. Facts that shape this file: a label selector that no node satisfies raises nothing and stays pending, so
placements are made among the present nodes (`tags`), and every placement group has a deadline. Each job is bound to its node by
`ray.io/node-id`. vLLM's control endpoints need no key, so engines listen only at their node's private address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import threading
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headgate.processes.supervised import ProcessEnded
from scheduler.cluster.errors import ClusterError, NodeLost, Refused, Unsatisfied
from scheduler.cluster.file import ClusterFile
from scheduler.cluster.launch import Job, Running, visible
from scheduler.cluster.ray_actor import NodeActor
from scheduler.cluster.tags import Capacity, DiscoveredNode

_NODE_ID = "ray.io/node-id"
_GIB = 2**30
_MODE, _TOKEN = "RAY_AUTH_MODE", "token"
_KILL_S = 10.0
_POLL_S = 5.0
"""The longest that one request waits for a placement group; a busy head takes more than half a second to respond."""
_RESPONSE_S = 60.0
T = TypeVar("T")


class RayRunning:
    """A process on a node of a Ray cluster."""

    def __init__(self, job: Job, actor: Any, group: Gang, port: int) -> None:
        self.name = job.placement.name
        self.host = job.placement.node.discovered.address
        self.port = port
        self._node = job.placement.node.name
        self._actor = actor
        self._group = group

    async def wait(self) -> ProcessEnded:
        try:
            status, last_lines = await self._actor.wait.remote()
        except RayError as error:
            return ProcessEnded(-9, f"node {self._node} or its actor is lost: {_first_line(error)}")
        return ProcessEnded(status, last_lines)

    async def stop(self, grace_s: float) -> None:
        try:
            await _within(self._actor.stop.remote(grace_s), grace_s + _KILL_S)
        except (RayError, TimeoutError):
            pass  # the node is lost, and the process with it
        finally:
            await asyncio.to_thread(self._group.leave, self._actor)


class Gang:
    """The placement group of some processes, removed when the last one ends."""

    def __init__(self, group: PlacementGroup, size: int) -> None:
        self._group = group
        self._remaining = size

    def leave(self, actor: Any) -> None:
        """End an actor."""
        ray.kill(actor)
        self._remaining -= 1
        if self._remaining <= 0:
            remove_placement_group(self._group)


class RayLauncher:
    """Starts processes on a Ray cluster. One per process, as Ray has one driver."""

    def __init__(self, file: ClusterFile) -> None:
        self._name = file.cluster.name
        self._settings = file.ray
        self._logs = file.cluster.dir.resolve()
        self._folder = os.getcwd()

    async def open(self) -> None:
        """Connect to Ray. Raise Refused without such a cluster, or if it needs no token."""
        address = self._settings.address
        if not self._settings.open and os.environ.get(_MODE, "").lower() != _TOKEN:
            raise Refused(
                f"Ray's token authentication is off, so every client can run programs there: set {_MODE}=token and the"
                " token (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH) here and on every node, or set [ray] open = true"
            )
        try:
            await asyncio.to_thread(
                ray.init,
                address=address,
                namespace=f"headgate-{self._name}",
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (AuthenticationError, RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise Refused(f"[ray] address: no Ray cluster at {address!r}: {_first_line(error)}") from error

    async def close(self) -> None:
        """Disconnect. A Ray that does not respond is left after `_KILL_S`: the end of this process ends the connection."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            ray.shutdown()
            with suppress(RuntimeError):  # the loop was closed after the deadline
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=shut_down, name="ray-shutdown", daemon=True).start()
        with suppress(TimeoutError):
            await _within(closed.wait(), _KILL_S)

    async def discover(self) -> list[DiscoveredNode]:
        rows: list[dict[str, Any]] = await asyncio.to_thread(ray.nodes)
        alive = [_discovered(row) for row in rows if row["Alive"]]
        return sorted(alive, key=lambda node: node.id)

    async def start(self, jobs: Sequence[Job]) -> list[Running]:
        """Start all jobs or none, with their reservations in one placement group."""
        for job in jobs:
            _check_private(job)
        group = await self._placed(jobs)
        gang = Gang(group, len(jobs))
        actors = [_actor(job, group, number) for number, job in enumerate(jobs)]
        try:
            return await self._started(jobs, actors, gang)
        except BaseException as error:
            for actor in actors:
                await asyncio.to_thread(gang.leave, actor)
            if isinstance(error, (RayError, TimeoutError)):
                names = ", ".join(dict.fromkeys(job.placement.node.name for job in jobs))
                raise NodeLost(f"starting processes on {names} failed: {_first_line(error)}") from error
            raise

    async def _placed(self, jobs: Sequence[Job]) -> PlacementGroup:
        """Return a placement group once Ray has reserved it. Raise Unsatisfied at the deadline. A group that is not used is
        removed."""
        bundles = [_resources(job.reserve) for job in jobs]
        nodes = [{_NODE_ID: job.placement.node.discovered.id} for job in jobs]
        name = f"{self._name}: {', '.join(job.placement.name for job in jobs)}"
        group = await asyncio.to_thread(placement_group, bundles, "PACK", name, bundle_label_selector=nodes)
        try:
            async with asyncio.timeout(self._settings.wait_s):
                while not await asyncio.to_thread(group.wait, _POLL_S):
                    pass  # each wait is short, since a thread cannot be cancelled
            return group
        except TimeoutError as error:
            message = await asyncio.to_thread(self._no_room, jobs, bundles)
            await asyncio.to_thread(remove_placement_group, group)
            raise Unsatisfied(message) from error
        except BaseException:
            remove_placement_group(group)
            raise

    def _no_room(self, jobs: Sequence[Job], bundles: Sequence[dict[str, float]]) -> str:
        """Return what jobs need, what is free on their nodes, and which placement groups hold the rest."""
        free, groups = available_resources_per_node(), placement_group_table().values()
        parts = []
        for job, bundle in zip(jobs, bundles, strict=True):
            node = job.placement.node.discovered
            left = {name: free.get(node.id, {}).get(name, 0.0) for name in bundle}
            holders = sorted({group["name"] or "unnamed" for group in groups if _holds(group, node.id)})
            parts.append(
                f"{job.placement.name} needs {_described(bundle)} on {job.placement.node.name}, where {_described(left)} is free"
                + (f"; the rest is held by the placement groups {'; '.join(holders)}" if holders else "")
            )
        return f"Ray had no room within {self._settings.wait_s:g} s: {'; '.join(parts)}"

    async def _started(self, jobs: Sequence[Job], actors: Sequence[Any], gang: Gang) -> list[Running]:
        opened = await asyncio.gather(
            *(
                _within(actor.open_folder.remote(self._folder), _RESPONSE_S + self._settings.wait_s)
                for actor in actors
            )
        )
        if wrong := [text for text in opened if text]:
            raise ClusterError(wrong[0])
        hosts = [job.placement.node.discovered.address for job in jobs]
        spare = await _within(actors[0].free_port.remote(hosts[0]), _RESPONSE_S)
        ports = [
            await _within(actor.free_port.remote(host), _RESPONSE_S)
            for actor, host in zip(actors, hosts, strict=True)
        ]
        devices = visible(jobs, [await _gpus(job, actor) for job, actor in zip(jobs, actors, strict=True)])
        first = {"first_host": hosts[0], "first_port": str(spare)}
        await asyncio.gather(
            *(
                _within(
                    actor.start.remote(
                        job.placement.name,
                        list(job.argv),
                        {**job.env, **visible_gpus},
                        str(self._logs / f"{job.placement.name}.log"),
                        {**first, "host": host, "port": str(port)},
                        job.trusted,
                    ),
                    _RESPONSE_S,
                )
                for job, actor, host, port, visible_gpus in zip(
                    jobs, actors, hosts, ports, devices, strict=True
                )
            )
        )
        return [
            RayRunning(job, actor, gang, port) for job, actor, port in zip(jobs, actors, ports, strict=True)
        ]


def _actor(job: Job, group: PlacementGroup, number: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    reserve = job.reserve
    options: dict[str, Any] = {
        "num_cpus": reserve.cpus,
        "num_gpus": reserve.gpus,
        "memory": int(reserve.memory_gb * _GIB) or None,
        "scheduling_strategy": strategy,
        "max_restarts": 0,
        "max_concurrency": 8,
    }
    return ray.remote(NodeActor).options(**options).remote()


def _resources(reserve: Capacity) -> dict[str, float]:
    """Return a bundle. Ray accepts no empty one: a byte of memory keeps no CPU from a rank that needs the whole node."""
    bundle = {"CPU": reserve.cpus, "GPU": float(reserve.gpus), "memory": float(int(reserve.memory_gb * _GIB))}
    return {name: value for name, value in bundle.items() if value} or {"memory": 1.0}


def _holds(group: dict[str, Any], node: str) -> bool:
    return group["state"] == "CREATED" and node in group["bundles_to_node_id"].values()


async def _gpus(job: Job, actor: Any) -> list[str]:
    """Return a job's GPUs: those that Ray has assigned, or those of its placement if it reserves none."""
    if job.reserve.gpus:
        return list(await _within(actor.gpus.remote(), _RESPONSE_S))
    return [str(device) for device in job.placement.devices]


def _check_private(job: Job) -> None:
    address = ipaddress.ip_address(job.placement.node.discovered.address)
    if address.is_global:
        raise Refused(
            f"node {job.placement.node.name} has the public address {address}: any client could pause, reload and read an engine"
            " there; start Ray with --node-ip-address on a private network"
        )


def _discovered(row: dict[str, Any]) -> DiscoveredNode:
    resources = row["Resources"]
    capacity = Capacity(
        resources.get("CPU", 0.0), int(resources.get("GPU", 0)), resources.get("memory", 0.0) / _GIB
    )
    return DiscoveredNode(row["NodeID"], dict(row["Labels"]), capacity, row["NodeManagerAddress"])


async def _within(work: Awaitable[T], limit_s: float) -> T:
    async with asyncio.timeout(limit_s):
        return await work


def _described(bundle: dict[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in bundle.items())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
