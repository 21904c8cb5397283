"""Runs of a trainer that is killed, the world around them, and what an uninterrupted run learns of the same batches."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.models import logprobs
from tests.unit.trainer.rollouts import episodes
from trainer.config.settings import Settings
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

BATCH = 3
TRAINER = """
[run]
dir = "{work}/run"
steps = {steps}
device = "cpu"
threads = 1
deterministic = true
[gateway]
url = "{url}"
[model]
path = "{model}"
[optimizer]
lr = 1e-3
[batch]
tokens = 64
[checkpoint]
every = {every}
[report]
trackers = []
"""
"""No tracker: each life of a trainer would start a process for it, and no test here looks at what that does."""


class ScoringEngine(FakeEngine):
    """Samples as the fake does, but scores the probe as the weights do that it was given, and keeps what it was given."""

    def __init__(self, weights: str) -> None:
        self.given: dict[str, str] = {}
        """The manifest of every version's directory when it was loaded."""
        super().__init__(weights)

    def _install(self, weights: str) -> None:
        super()._install(weights)
        self.weights = Path(weights)
        note_manifest(self.weights, self.given)

    async def score(self, ids: Sequence[int], model: str | None = None) -> list[dict[str, Any] | None]:
        values = await asyncio.to_thread(logprobs, self.weights, list(ids))
        found = zip(ids[1:], values, strict=True)
        return [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in found)]


def note_manifest(weights: Path, noted: dict[str, str]) -> None:
    """Note the manifest of a version, and fail if the version had another one before."""
    if not (weights / "manifest.json").exists():
        return
    manifest = (weights / "manifest.json").read_text()
    assert noted.setdefault(weights.name, manifest) == manifest, f"{weights.name} has two contents"


@asynccontextmanager
async def world(
    model: Path, work: Path, *sources: str, agents: bool = True
) -> AsyncIterator[tuple[RunningGateway, ScoringEngine]]:
    """Yield a gateway, its engine, and agents that go on whatever becomes of the trainer."""
    async with AsyncExitStack() as stack:
        engine, port = ScoringEngine(str(model)), free_port()
        await stack.enter_async_context(serve(create_fake_app(engine), port))
        values = settings_for(
            model,
            work,
            engine={"launch": "external", "url": f"http://127.0.0.1:{port}"},
            staleness={"batch": BATCH, "eta": 1, "min_members": 1},
            weights={"sources": sources, "dir": str(work / "copies")},
        )
        gateway = await stack.enter_async_context(run_gateway(values, in_process=False))
        if agents:
            await stack.enter_async_context(episodes(gateway, open_wait_s=20.0))
        yield gateway, engine


def straight_on_two(settings: Settings, work: Path, batches: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Files and probe of every version of an uninterrupted run on the recorded batches."""
    trainer = RankTrainer.open(
        settings.model_copy(update={"run": settings.run.model_copy(update={"dir": work})})
    )
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return []
    written, found = WeightsDirectory(work, settings.model.path), []
    for version, batch in enumerate(batches, start=1):
        trainer.train(batch)
        path = written.write(version, version - 1, trainer.model, trainer.probe, trainer.gather_weights())
        manifest = json.loads((path / "manifest.json").read_text())
        found.append((manifest["files"], manifest["probe"]))
    shutdown_ranks(trainer)
    return found


if __name__ == "__main__":
    model, port = sys.argv[1:]
    uvicorn.run(create_fake_app(ScoringEngine(model)), port=int(port), log_level="warning")
