"""What real vLLM holds of a version, bit by bit, at rates whose steps are below the rounding of bf16.

Versions are those of headgate's own trainer. Right ones never fail, and no wrong one passes: the parent's weights, two swapped
matrices, one flipped bit, a head that was not loaded again, an adapter that is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.config import EngineSettings, UpdateSettings, WeightsSettings
from gateway.engines.base import Engine
from gateway.generation.slot import Slot
from gateway.updates.distribution import Distribution
from gateway.updates.verification import UpdateReport, Verifier
from gateway.updates.weights_check import Weights, read_weights
from headgate.errors import ProbeFailed
from tests.harness.models import save_model
from tests.harness.vllm import SharedEngine
from tests.unit.trainer.rank_trainers import groups_of, settings_of
from trainer.config.settings import Settings
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import RankTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

RATES = (1e-6, 1e-5, 1e-4)
FEW, MANY = 2, 20
counts = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
DAMAGED = ["--worker-extension-cls", "tests.harness.vllm_damage.DamagedWorker"]
LORA = {"lora": {"rank": 8, "alpha": 16}}


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """The dtype of engine and trainer."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def models(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The first version: with a head of its own, and with tied embeddings."""
    root = tmp_path_factory.mktemp(dtype)
    return {tied: first_version(root / str(tied), dtype, tied) for tied in (False, True)}


def first_version(path: Path, dtype: str, tied: bool = False) -> Path:
    """Write a checkpoint in `path`."""
    save_model(path, 0, tied=tied)
    file = path / "model.safetensors"
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def engines(
    dtype: str, models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[bool, SharedEngine]]:
    """An engine for either, of which the first runs adapters too; each starts at its first use."""
    log, args = tmp_path_factory.mktemp("engines"), [*DAMAGED, "--dtype", dtype, "--max-model-len", "2048"]
    found = {
        tied: SharedEngine(model, log / f"{tied}.log", args=args, transport="collective" if tied else "lora")
        for tied, model in models.items()
    }
    yield found
    for engine in found.values():
        engine.kill()


class Run:
    """A trainer, the engine that gets its versions, and the verdicts over them."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.trainer = RankTrainer.open(settings)
        self.engine = engine
        self.slot = Slot(engine.name, "http://engine")
        self.slot.engine = engine
        self.rank = 8 if settings.model.lora is not None else None
        self._weights = WeightsDirectory(settings.run.dir / "weights", settings.model.path)
        base = EngineSettings(launch="fake")
        distribution = Distribution("demo", WeightsSettings(), base, settings.model.path)
        self._verifier = Verifier(UpdateSettings(), distribution, {})

    def publish(self) -> Weights:
        """Train a step, and write the version."""
        trainer, adapters = self.trainer, None
        trainer.train(groups_of(trainer.version))
        state = trainer.gather_weights()
        if self.rank is not None:
            adapters, state = trainer.policy.adapters, trainer.gather_adapter()
        state_of = trainer.version, trainer.parent, trainer.model, trainer.probe
        path = self._weights.write(*state_of, state, adapters)
        return read_weights(path, trainer.version, max_lora_rank=self.rank)

    async def load(self, weights: Weights) -> None:
        """What an update does, without its order."""
        if weights.adapter:
            await self.engine.load_adapter(weights.adapter, weights.path)
            return
        await self.engine.pause()
        await self.engine.load(weights.path)
        await self.engine.resume()

    async def verdict(self, weights: Weights) -> str:
        """The verdict of the log-probabilities where everything is proven; `found` if the engine fails."""
        report = UpdateReport("engine", weights.version)
        try:
            await self._verifier.verify(self.engine, self.slot, weights, report)
        except ProbeFailed:
            return "found"
        assert report.proof is not None
        assert report.probe is not None
        assert report.proof.verdict == "proven", report.proof
        return report.probe.verdict


@asynccontextmanager
async def running(
    engine: SharedEngine, model: Path, work: Path, rate: float, **more: Any
) -> AsyncIterator[Run]:
    values = settings_of(model, work, {"type": "grpo"}, dtype_of(model), more)
    optimizer = values.optimizer.model_copy(update={"lr": rate, "schedule": "constant", "warmup_steps": 0})
    settings = values.model_copy(update={"optimizer": optimizer})
    async with engine.running(model) as connected:
        run = Run(settings, connected)
        await connected.prove(0, str(model))  # what every start of an engine does
        yield run


def dtype_of(model: Path) -> str:
    """The dtype of a checkpoint."""
    return str(load_file(model / "model.safetensors")["model.norm.weight"].dtype).removeprefix("torch.")


async def damaged(engine: Engine, how: str, seed: int) -> None:
    await engine._http.post("/collective_rpc", {"method": how, "args": [seed]})  # type: ignore[attr-defined]


@counts
async def test_right_versions_never_fail(
    count: int, engines: dict[bool, SharedEngine], models: dict[bool, Path], tmp_path: Path
) -> None:
    verdicts = Counter[str]()
    for rate in RATES:
        async with running(engines[False], models[False], tmp_path / str(rate), rate) as run:
            for _ in range(count):
                weights = run.publish()
                await run.load(weights)
                verdicts[await run.verdict(weights)] += 1
    assert verdicts == {"passed": count * len(RATES)}


@counts
@pytest.mark.parametrize("how", ["kept", "damage_swapped", "damage_one_bit"])
async def test_wrong_weights_are_always_found(
    count: int, how: str, engines: dict[bool, SharedEngine], models: dict[bool, Path], tmp_path: Path
) -> None:
    async with running(engines[False], models[False], tmp_path, RATES[0]) as run:
        for seed in range(count):
            weights = run.publish()
            if how != "kept":
                await run.load(weights)
                await damaged(run.engine, how, seed)
            assert await run.verdict(weights) == "found", seed
            await run.load(weights)
            assert await run.verdict(weights) == "passed", "loaded again, it is right"


@pytest.mark.long  # it starts an engine of its own
@counts
async def test_a_tied_head_that_stays_stale_is_always_found(
    count: int, engines: dict[bool, SharedEngine], models: dict[bool, Path], tmp_path: Path
) -> None:
    """vLLM's CPU build does not load it again, at a rate whose steps no log-probability shows."""
    async with running(engines[True], models[True], tmp_path, RATES[0]) as run:
        for _ in range(count):
            weights = run.publish()
            await run.load(weights)
            assert await run.verdict(weights) == "found"


@counts
async def test_an_adapter_that_is_not_there_is_always_found(
    count: int, engines: dict[bool, SharedEngine], models: dict[bool, Path], tmp_path: Path
) -> None:
    async with running(engines[False], models[False], tmp_path, RATES[0], **LORA) as run:
        try:
            for seed in range(count):
                await run.engine.forget_adapters()
                weights = run.publish()
                await run.load(weights)
                assert await run.verdict(weights) == "passed"
                await damaged(run.engine, "damage_adapters", seed)
                assert await run.verdict(weights) == "found"
        finally:
            await run.engine.forget_adapters()


@pytest.mark.long
async def test_a_quantized_engine_holds_the_rounding_of_what_was_published(tmp_path: Path) -> None:
    model = first_version(tmp_path / "model", "bfloat16")
    args = [*DAMAGED, "--dtype", "bfloat16", "--max-model-len", "2048", "--quantization", "fp8_per_channel"]
    engine = SharedEngine(model, tmp_path / "engine.log", args=args)
    try:
        async with running(engine, model, tmp_path / "run", 1e-3) as run:
            for seed in range(4):
                weights = run.publish()
                assert await run.verdict(weights) == "found", "it holds the parent's"
                await run.load(weights)
                assert await run.verdict(weights) == "passed"
                await damaged(run.engine, "damage_quantized", seed)
                assert await run.verdict(weights) == "found"
    finally:
        engine.kill()
