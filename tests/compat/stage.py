"""A scripted engine and a gateway for clients, each a process of its own, as a user would start them.

Synchronous, as half of the clients are. Owns both processes; they die with this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes.child import die_with_parent
from processes.ports import free_port
from tests.compat.clients.gate import AGENT, AGENT_KEY
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
"""The names by which foreign programs ask for the model; a name that is not among them is no model."""


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
    engine = [sys.executable, "-m", "tests.compat.engine", "--model", str(model), "--port", str(ports[1])]
    serve = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    with (
        _process(engine, work / "engine.log", f"{there.engine}/health"),
        _process(serve, work / "gateway.log", f"{there.gateway}/readyz"),
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
def _process(argv: Sequence[str], log: Path, ready: str) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, preexec_fn=die_with_parent())
    try:
        deadline = time.monotonic() + START_S
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv[2]} did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(START_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
