"""The processes around a trainer: a gateway of its own, and the driver that runs episodes; both optional.

Invariant: what was started is stopped when the exit stack closes, and a child that ends early ends the trainer with its last
lines as the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from processes import ports
from processes.child import LocalProcess
from processes.errors import ChildDied
from scheduler.configuration import Unreadable, read_toml
from trainer.errors import ConfigError, GatewayUnreachable
from trainer.sections.run import GatewaySettings
from trainer.sections.state import WeightsSettings
from trainer.settings import Settings

T = TypeVar("T")
Say = Callable[[str], None]
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Watched:
    """Work that has to go on for as long as something else needs it."""

    name: str
    work: Coroutine[Any, Any, Any]


async def watch(work: Coroutine[Any, Any, T], *companions: Watched | None) -> T:
    """The result of `work`; if a companion ends first, `work` is cancelled and the companion's error raised."""
    main = asyncio.create_task(work, name="trainer: loop")
    tasks = [asyncio.create_task(c.work, name=f"trainer: {c.name}") for c in companions if c]
    try:
        done, _ = await asyncio.wait({main, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if main not in done:
            ended = done.pop()
            await ended
            raise RuntimeError(f"{ended.get_name()} ended although it was needed")
        return await main
    finally:
        for task in (main, *tasks):
            task.cancel()
        await asyncio.gather(main, *tasks, return_exceptions=True)


async def gateway_process(
    stack: AsyncExitStack, settings: GatewaySettings, directory: Path, say: Say = print
) -> tuple[str, Watched | None]:
    """The gateway's URL; starts one first if `[gateway] config` says so. `say` gets what takes long. Raises GatewayUnreachable,
    ChildDied, TimeoutError."""
    if settings.url is not None:
        return settings.url.rstrip("/"), None
    assert settings.config is not None
    url = url_of(settings.config)
    async with httpx.AsyncClient(base_url=url, timeout=5.0) as http:
        if await _answers(http, any_status=True):
            raise GatewayUnreachable(
                f"something listens at {url} already; to use it, set [gateway] url in place of config"
            )
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(settings.config)]
        env = {"HEADGATE_ADMIN_KEY": settings.key} if settings.key else None
        process = await LocalProcess.start("gateway", argv, directory / "gateway.log", env)
        stack.push_async_callback(process.stop, 20.0)
        await process.ready(lambda: _answers(http), settings.start_s, say)
    return url, Watched("gateway process", _needed(process))


async def rollout_process(stack: AsyncExitStack, settings: Settings, url: str) -> Watched | None:
    """Starts the driver that keeps `[rollout] agent` at work, if there is one."""
    rollout = settings.rollout
    if rollout is None:
        return None
    argv = [
        sys.executable, "-m", "gateway.cli", "episodes", "run", "--forever",
        "--gateway", url,
        "--group-size", str(rollout.group_size),
        "--spare", str(rollout.spare),
        "--concurrency", str(rollout.concurrency),
        "--max-failures", str(rollout.max_failures),
        "--timeout", str(rollout.timeout_s),
        "--seed", str(settings.run.seed),
    ]  # fmt: skip
    named = {
        "--agent": rollout.agent,
        "--tasks": rollout.tasks,
        "--env": rollout.env,
        "--env-args": json.dumps(rollout.env_args) if rollout.env else None,
        "--env-python": rollout.env_python,
        "--limit": rollout.env_tasks,
    }
    if settings.tasks.order == "difficulty":
        named |= {"--order": settings.tasks.order, "--order-floor": str(settings.tasks.floor)}
    named["--order-state"] = settings.run.dir / settings.tasks.state
    argv += [part for name, value in named.items() if value is not None for part in (name, str(value))]
    if settings.gateway.model is not None:
        argv += ["--model", settings.gateway.model]
    env = {"HEADGATE_ADMIN_KEY": settings.gateway.key} if settings.gateway.key else None
    process = await LocalProcess.start("rollout", argv, rollout_log(settings), env)
    stack.push_async_callback(process.stop, 10.0)
    return Watched("rollout process", _needed(process))


async def weights_process(
    stack: AsyncExitStack, settings: WeightsSettings, weights: Path, say: Say = print
) -> Watched | None:
    """Starts the server of published versions, if `[weights] transport` needs it. Raises ChildDied and TimeoutError."""
    if not settings.serves:
        return None
    host, _, port = settings.listen.rpartition(":")
    sends = settings.transport == "collective"
    argv = [
        *(sys.executable, "-m"),
        *(["trainer.publish.sender"] if sends else ["gateway.cli", "mirror"]),
        *("--dir", str(weights), "--host", host, "--port", port),
        *(["--reached-at", settings.reached_at] if sends else []),
    ]
    key = settings.key.get_secret_value() if settings.key else os.environ.get("HEADGATE_WEIGHTS_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    env = {"HEADGATE_WEIGHTS_KEY": key} if key else None
    process = await LocalProcess.start("weights server", argv, weights.parent / "weights-server.log", env)
    stack.push_async_callback(process.stop, 5.0)
    async with httpx.AsyncClient(base_url=ports.url_of(host, port), headers=headers, timeout=5.0) as http:
        await process.ready(lambda: _answers(http, path="/versions"), _START_S, say)
    return Watched("weights server", _needed(process))


def rollout_log(settings: Settings) -> Path:
    """Returns the path of the log of the agents' driver, whose last line says how they fare."""
    return settings.run.dir / "rollout.log"


def url_of(config: Path) -> str:
    """Where the gateway of a TOML file will listen. Raises ConfigError."""
    try:
        server = read_toml(config).get("server", {})
    except Unreadable as error:
        raise ConfigError(f"[gateway] config = {error}") from error
    host, port = server.get("host", "127.0.0.1"), server.get("port", 8000)
    if port == 0:
        raise ConfigError(f"{config}: [server] port = 0 leaves the trainer no way to find the gateway")
    return ports.url_of(host, port)


async def _needed(process: LocalProcess) -> None:
    await process.wait()
    raise ChildDied(process.exit_report())


async def _answers(http: httpx.AsyncClient, any_status: bool = False, path: str = "/readyz") -> bool:
    try:
        response = await http.get(path)
    except httpx.TransportError:
        return False
    return any_status or response.status_code == 200
