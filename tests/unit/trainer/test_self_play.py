"""Two trained models in one game: each learns from episodes of its own, whose rewards come from one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from examples.self_play.duel import play
from gateway.engines.fake import create_fake_app
from headgate.client.agents import read_tasks
from headgate.client.matches import Matches, Player
from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.model_engine import ModelEngine
from tests.harness.models import save_model
from tests.unit.trainer.runs import loop_of
from trainer.config.settings import Settings
from trainer.model import pretrained

SEATS = {"first": "red", "second": "blue"}
TASKS = Path(__file__).parents[3] / "examples" / "self_play" / "tasks.jsonl"
STEPS = 12
GROUP = 16


@asynccontextmanager
async def two_models(work: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with two models whose engines sample from their weights."""
    models: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for seed, name in enumerate(SEATS.values()):
            save_model(work / name, seed)
            port = free_port()
            await stack.enter_async_context(serve(create_fake_app(ModelEngine(str(work / name))), port))
            engine = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
            models[name] = {"path": str(work / name), "engine": engine}
        values = settings_for(work / "red", work, staleness={"batch": 2, "eta": 1})
        values["models"] = models
        yield await stack.enter_async_context(run_gateway(values, in_process=False))


def settings_of(gateway: RunningGateway, work: Path, model: str) -> Settings:
    return Settings.parse({
        "run": {"dir": work / f"run-{model}", "steps": STEPS, "device": "cpu", "threads": 1},
        "gateway": {"url": gateway.url, "timeout_s": 60, "model": model},
        "model": {"path": work / model},
        "optimizer": {"lr": 2e-2},
    })  # fmt: skip


@pytest.mark.long
async def test_both_learn_the_duel_although_what_one_wins_the_other_loses(tmp_path: Path) -> None:
    earned: list[float] = []

    async def watched(task: dict[str, Any], players: dict[str, Player]) -> Mapping[str, Any]:
        outcome = await play(task, players)
        earned.append(sum(player["reward"] for player in outcome.values()))
        return outcome

    stop = asyncio.Event()
    async with two_models(tmp_path) as gateway, AsyncExitStack() as stack:
        loops = [
            await stack.enter_async_context(loop_of(gateway, settings_of(gateway, tmp_path, model)))
            for model in SEATS.values()
        ]
        matches = Matches(gateway.admin, watched, SEATS, group_size=GROUP, concurrency=GROUP, open_wait_s=0.5)
        playing = asyncio.create_task(matches.run(read_tasks(TASKS), stop), name="matches")
        await asyncio.gather(*(loop.train() for loop in loops))
        stop.set()
        await playing
        learned = {model: loop.trainer.model for model, loop in zip(SEATS.values(), loops, strict=True)}
        rows = await gateway.admin.episodes(mode="train", limit=1000)
    assert set(earned) == {1.0}
    for name, trained in learned.items():
        model = pretrained.load(tmp_path / name)
        before = last_character(model, tmp_path / name)
        model.load_state_dict(trained.state_dict())
        assert last_character(model, tmp_path / name) > before + 0.2, (name, before)
    assert {counts["failed"] for counts in matches.summary().values()} == {0}
    assert {row["model"] for row in rows} == set(SEATS.values())


PROMPT = "<|im_start|>user\nReply with one character.<|im_end|>\n<|im_start|>assistant\n"


@torch.inference_mode()
def last_character(model: Any, folder: Path) -> float:
    """How probable it is that a model samples part of a character alone: it is shown as one that is later than all others."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = [token for token in range(256) if tokenizer.decode([token]) == "\ufffd"]
    ids = torch.tensor([tokenizer.encode(PROMPT, add_special_tokens=False).ids])
    return float(model(input_ids=ids).logits[0, -1].softmax(-1)[parts].sum())
