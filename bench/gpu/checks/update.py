"""Two versions in an engine behind a gateway: the right one goes live, and one with its parent's weights does not."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from bench.gpu.batches import branching, settings_of
from bench.gpu.checks.place import Figures, Place, require
from bench.gpu.training import START_S, gateway_file
from bench.processes import run_server
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from headgate.weights.manifest import MANIFEST, entry_of
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

_WAIT_S = 400.0
"""For one version: an engine that fails with it starts again, and tries once more."""


def measure(place: Place) -> Figures:
    """Return both versions' states, verdicts, and the seconds of the first one's update."""
    model = place.model()
    versions = WeightsDirectory(place.folder / "versions", model)
    dtype: dict[str, dict[str, Any]] = {
        "model": {"dtype": place.workload.dtype},
        "optimizer": {"lr": 1e-3, "eps": 1e-8},
    }
    trainer = RankTrainer.open(settings_of(model, place.folder / "run", place.device, **dtype))
    for _ in range(2):
        trainer.train(branching())
        state = trainer.gather_weights()
        versions.write(trainer.version, trainer.parent, trainer.model, trainer.probe, state)
    shutdown_ranks(trainer)
    del trainer
    _put_parents_weights(versions.path(2), versions.path(1))
    figures = asyncio.run(_publish(place, model, versions))
    require(figures["right"]["state"] == "live", "the right version is not live", figures)
    return require(
        figures["stale"]["state"] != "live", "the parent's weights went live as version 2", figures
    )


def _put_parents_weights(folder: Path, parent: Path) -> None:
    """Give a version its parent's weights, and a manifest that is true of these files: only the probe can find it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for file in parent.glob("*.safetensors"):
        shutil.copy(file, folder / file.name)
        manifest["files"][file.name] = entry_of(folder / file.name)
    (folder / MANIFEST).write_text(json.dumps(manifest))


async def _publish(place: Place, model: Path, versions: WeightsDirectory) -> Figures:
    port = free_port()
    config = place.folder / "gateway.toml"
    config.write_text(gateway_file(place.workload, model, place.folder, port, place.engine))
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    figures: Figures = {}
    async with (
        run_server("gateway", argv, port, "/readyz", place.folder, start_s=START_S) as gateway,
        GatewayClient(gateway.url) as client,
    ):
        for number, name in enumerate(("right", "stale"), start=1):
            record = await client.publish(number, str(versions.path(number)), wait_s=_WAIT_S)
            figures[name] = {
                "state": record["state"],
                "probes": [report["probe"] for report in record["report"]],
                "seconds": [report["seconds"] for report in record["report"]],
                "failures": [report["failure"] for report in record["report"] if report["failure"]],
            }
    return figures
