"""A scripted engine and a gateway for clients, each a process of its own.

Synchronous, as half of the clients are. Owns both processes; they end with this one.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headgate.processes.ports import free_port
from tests.compat.clients.gate import AGENT, AGENT_KEY
from tests.compat.engine import serve
from tests.harness.forks import fork
from tests.harness.models import save_tokenizer

START_S = 600.0
NAMES = [
    *(
        "gpt-4o",
        "gpt-4o-mini",
        "gpt-4.1",
        "gpt-5.4",
        "gpt-6-astra",
        "model",
        "gpt-3.5-turbo-instruct",
        "string",
    ),
    *("claude-sonnet-4-5", "claude-opus-4-5", "openai/demo", "policy"),
]
"""The names that foreign programs use for the model; any other name is unknown."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The URLs of the two."""

    gateway: str
    engine: str


@contextmanager
def stage(work: Path) -> Iterator[Stage]:
    """Both, ready; their logs lie in `work`."""
    model = work / "model"
    model.mkdir(parents=True)
    save_tokenizer(model)
    ports = free_port(), free_port()
    there = Stage(*(f"http://127.0.0.1:{port}" for port in ports))
    config = work / "gateway.toml"
    config.write_text(_config(work, model, there, ports[0]))
    with (
        _process(serve, (model, ports[1]), work / "engine.log", f"{there.engine}/health"),
        _process(_gateway, (config,), work / "gateway.log", f"{there.gateway}/readyz"),
    ):
        yield there


def _config(work: Path, model: Path, there: Stage, port: int) -> str:
    return f"""
[server]
port = {port}
[models.demo]
path = "{model}"
aliases = {json.dumps(NAMES)}
max_model_len = 1048576
[engine]
launch = "external"
url = "{there.engine}"
[store]
url = "sqlite+aiosqlite:///{work}/gateway.db"
[control]
recording = "{work}/control.jsonl"
[episodes]
idle_s = 3600
[agents.{AGENT}]
key = "{AGENT_KEY}"
"""


@contextmanager
def _process(
    target: Callable[..., None], arguments: tuple[object, ...], log: Path, ready: str
) -> Iterator[None]:
    process = fork(target, *arguments, log=log)
    try:
        deadline = time.monotonic() + START_S
        while not _responds(ready):
            if not process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"{log.stem} did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.join(START_S)


def _gateway(config: Path) -> None:
    from gateway.cli import app

    app(("serve", "--config", str(config)))


def _responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
