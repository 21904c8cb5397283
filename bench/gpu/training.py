"""Steps of training next to an engine: the gateway, `trainer run`, an agent, and what each of them reported.

Owns the files of a run, all in one folder: configuration, logs, the gateway's database, checkpoints, versions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.workload import THREADS, Workload, write_tasks
from bench.processes import run_server
from headgate.client import GatewayClient
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port

START_S = 1200.0
"""How long gateway and engine may take together; vLLM compiles kernels at its first start."""
_MARGIN = 3
"""Batches that agents may be ahead of the trainer (`eta`), and one."""


def _table(name: str, values: Mapping[str, Any]) -> str:
    """Return a table of a TOML file, and those in it."""
    rows = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    inner = [_table(f"{name}.{key}", value) for key, value in values.items() if isinstance(value, Mapping)]
    return "\n".join([f"[{name}]", *rows, "", *inner])


@dataclass(frozen=True, slots=True)
class Run:
    """The results of some steps."""

    steps: list[dict[str, Any]]
    """The trainer's record of each step (`trainer.report.metrics`)."""
    updates: list[dict[str, Any]]
    """The gateway's record of each version's update."""


async def train(
    workload: Workload, model: Path, folder: Path, engine: Mapping[str, Any], *, device: str, steps: int
) -> Run:
    """Train for some steps. Raise RuntimeError if the trainer fails, with the end of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    write_tasks(folder / "tasks.jsonl", workload, workload.groups * (steps + _MARGIN))
    config = folder / "gateway.toml"
    config.write_text(gateway_file(workload, model, folder, port, engine))
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    async with run_server("gateway", argv, port, "/readyz", folder, start_s=START_S) as gateway:
        (folder / "trainer.toml").write_text(
            _trainer_file(workload, model, folder, gateway.url, device, steps)
        )
        await _run_trainer(folder)
        async with GatewayClient(gateway.url) as client:
            updates = [await client.weights(version) for version in range(1, steps + 1)]
    lines = (folder / "trainer" / "metrics.jsonl").read_text().splitlines()
    return Run([record for record in map(json.loads, lines) if "batch" in record], updates)


async def _run_trainer(folder: Path) -> None:
    argv = [sys.executable, "-m", "trainer.cli", "run", str(folder / "trainer.toml")]
    process = await LocalProcess.start("trainer", argv, folder / "trainer.log")
    try:
        status = await process.wait()
    finally:
        await process.stop()
    if status:
        raise RuntimeError(f"the trainer ended with {status}; {process.log} ends with:\n{process.tail()}")


def gateway_file(workload: Workload, model: Path, folder: Path, port: int, engine: Mapping[str, Any]) -> str:
    """Return the gateway's configuration for one run; everything that it writes is in `folder`."""
    return f"""\
[server]
port = {port}

[models.policy]
path = {_toml(str(model))}
aliases = ["*"]
max_model_len = {workload.context}

[staleness]
eta = {_MARGIN - 1}
batch = {workload.groups}

[store]
url = {_toml(f"sqlite:///{folder}/gateway.db")}

[control]
recording = {_toml(str(folder / "control.jsonl"))}

{_table("engine", engine)}"""


def _trainer_file(workload: Workload, model: Path, folder: Path, url: str, device: str, steps: int) -> str:
    threads = THREADS[device]
    return f"""\
[run]
{"" if threads is None else f"threads = {threads}"}
dir = {_toml(str(folder / "trainer"))}
steps = {steps}
device = {_toml(device)}

[gateway]
url = {_toml(url)}

[model]
path = {_toml(str(model))}
dtype = {_toml(workload.dtype)}
activation_checkpointing = 1

[optimizer]
lr = 1e-5

[batch]
tokens = {workload.micro_batch}

[report]
trackers = []

[rollout]
agent = "bench.gpu.agent:solve"
tasks = {_toml(str(folder / "tasks.jsonl"))}
group_size = {workload.members}
concurrency = {workload.groups * workload.members * _MARGIN}
"""


def _toml(value: object) -> str:
    """Return TOML: strings, numbers and lists look the same in JSON."""
    return json.dumps(value)
