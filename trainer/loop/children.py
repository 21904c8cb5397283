"""The processes of a trainer: a gateway of its own, the driver that runs episodes, and the server of versions; all optional.

Invariant: what was started is stopped when the exit stack closes, and a child that ends early ends the trainer with its last
lines as the reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from headgate.configuration import Unreadable, read_toml
from headgate.http import Session, headers_with, responds
from headgate.processes import ports
from headgate.processes.child import LocalProcess
from headgate.processes.errors import ChildDied
from trainer.config.run import GatewaySettings
from trainer.config.settings import Settings
from trainer.config.state import PublishSettings
from trainer.errors import ConfigError, GatewayUnreachable
from trainer.loop.tasks import Companion

Notify = Callable[[str], None]
_GATEWAY_START_S = 1800.0
"""An engine may load a large model; a gateway that fails ends sooner."""
_WEIGHTS_START_S = 60.0
_REWARD_FLAGS = {"agent": [], "exit-code": ["--exit-code-reward"], "grader": ["--grade"]}
"""The options of the driver by `[rollout] reward`."""


async def gateway_process(
    stack: AsyncExitStack, settings: GatewaySettings, directory: Path, notify: Notify = print
) -> tuple[str, Companion | None]:
    """Return the gateway's URL; start the gateway first if `[gateway] config` names one.

    `notify` reports what takes long. Raise GatewayUnreachable, ChildDied or TimeoutError.
    """
    if settings.url is not None:
        return settings.url.rstrip("/"), None
    assert settings.config is not None
    url = url_of(settings.config)
    async with Session() as http:
        if await http.status_of(f"{url}/readyz") is not None:
            raise GatewayUnreachable(
                f"something listens at {url} already; to use it, set [gateway] url instead of config"
            )
    argv = ["gateway.cli", "serve", "--config", str(settings.config)]
    log, env = directory / "gateway.log", _with_key("HEADGATE_ADMIN_KEY", settings.key)
    process, companion = await _start(stack, "gateway", argv, log, env, stop_s=20.0)
    await process.ready(lambda: responds(f"{url}/readyz"), _GATEWAY_START_S, notify)
    return url, companion


async def rollout_process(stack: AsyncExitStack, settings: Settings, url: str) -> Companion | None:
    """Start the driver of `[rollout]`, if there is one."""
    rollout = settings.rollout
    if rollout is None:
        return None
    options = {
        "--gateway": url,
        "--group-size": rollout.group_size,
        "--spare": rollout.spare,
        "--concurrency": rollout.concurrency,
        "--max-failures": settings.run.max_failed_share,
        "--timeout": rollout.timeout_s,
        "--seed": settings.run.seed,
        "--agent": rollout.agent,
        "--tasks": rollout.tasks,
        "--env": rollout.env,
        "--env-args": json.dumps(rollout.env_args) if rollout.env else None,
        "--env-python": rollout.env_python,
        "--limit": rollout.env_tasks,
        "--order": rollout.order,
        "--order-state": settings.run.dir / rollout.order_state,
        "--model": settings.gateway.model,
    }
    argv = ["gateway.cli", "episodes", "run", "--forever"]
    argv += [part for name, value in options.items() if value is not None for part in (name, str(value))]
    argv += [*_REWARD_FLAGS[rollout.reward], *(["--", *rollout.command] if rollout.command else [])]
    env = _with_key("HEADGATE_ADMIN_KEY", settings.gateway.key)
    _, companion = await _start(stack, "rollout", argv, rollout_log(settings), env, stop_s=10.0)
    return companion


async def weights_process(
    stack: AsyncExitStack, settings: PublishSettings, weights: Path, notify: Notify = print
) -> Companion | None:
    """Start the server of published versions, if `[publish] transport` needs it. Raise ChildDied or TimeoutError."""
    if not settings.serves:
        return None
    host, _, port = settings.listen.rpartition(":")
    argv = ["gateway.cli", "mirror"]
    if settings.sends:
        argv = ["trainer.publish.sender", "--engine-facing-host", settings.engine_facing_host]
    argv += ["--dir", str(weights), "--host", host, "--port", port]
    key = settings.key.get_secret_value() if settings.key else os.environ.get("HEADGATE_WEIGHTS_KEY")
    log, env = weights.parent / "weights-server.log", _with_key("HEADGATE_WEIGHTS_KEY", key)
    process, companion = await _start(stack, "weights server", argv, log, env, stop_s=5.0)
    served = f"{ports.url_of(host, port)}/versions"
    await process.ready(lambda: responds(served, headers=headers_with(key)), _WEIGHTS_START_S, notify)
    return companion


async def _start(
    stack: AsyncExitStack,
    name: str,
    argv: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None,
    stop_s: float,
) -> tuple[LocalProcess, Companion]:
    """Start a Python module as a child that is stopped with the stack, and return it with the task that fails when it ends."""
    process = await LocalProcess.start(name, [sys.executable, "-m", *argv], log, env)
    stack.push_async_callback(process.stop, stop_s)
    return process, Companion(f"{name} process", _fail_when_it_ends(process))


def _with_key(name: str, key: str | None) -> dict[str, str] | None:
    return {name: key} if key else None


def rollout_log(settings: Settings) -> Path:
    """Return the path of the log of the agents' driver, whose last line is their state."""
    return settings.run.dir / "rollout.log"


def url_of(config: Path) -> str:
    """Return the URL at which the gateway of a TOML file will listen. Raise ConfigError."""
    try:
        server = read_toml(config).get("server", {})
    except Unreadable as error:
        raise ConfigError(f"[gateway] config = {error}") from error
    host, port = server.get("host", "127.0.0.1"), server.get("port", 8000)
    if port == 0:
        raise ConfigError(f"{config}: with [server] port = 0 the trainer cannot find the gateway")
    return ports.url_of(host, port)


async def _fail_when_it_ends(process: LocalProcess) -> None:
    await process.wait()
    raise ChildDied(process.exit_report())
