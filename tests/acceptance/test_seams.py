"""Real vLLM: a call that is broken again and again keeps the distribution that its parameters ask for, token by token."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.models import distribution, save_model
from tests.harness.vllm import SharedEngine
from tests.harness.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

NOISE = 2e-3
EDGE = 1e-4
"""Probability by which two implementations may differ on what a set of tokens holds together."""
TOKENS, BREAKS = 800, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that never ends a reply, so every call lasts until it was broken."""
    directory = tmp_path_factory.mktemp("model") / "a"
    save_model(directory, 5, scale=2.0, endless=True)
    return directory


@pytest.fixture(scope="module")
async def gateway(
    vllm: SharedEngine, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    """A gateway with real vLLM."""
    work = tmp_path_factory.mktemp("work")
    values = settings_for(model, work, engine=vllm.settings)
    async with run_gateway(values, in_process=False) as running:
        yield running


async def broken(gateway: RunningGateway, **body: Any) -> tuple[list[int], dict[str, Any]]:
    """A call that its engine gave back BREAKS times in its middle, and which went on: its prompt and its turn.

    The engine may end a call before a late break: then another one is made.
    """
    for seed in range(20):
        prompt, turn, breaks = await _broken(gateway, seed, **body)
        if breaks == BREAKS:
            return prompt, turn
    raise AssertionError(f"no call was long enough to be broken {BREAKS} times")


async def _broken(gateway: RunningGateway, seed: int, **body: Any) -> tuple[list[int], dict[str, Any], int]:
    """A call that is broken after the number of tokens that the seed draws."""
    due = sorted(random.Random(seed).sample(range(1, TOKENS // 4), BREAKS))
    episode, headers = await gateway.open("broken", mode="eval")
    task = asyncio.create_task(gateway.chat(headers, max_tokens=TOKENS, stream=True, **body), name="call")
    for at in due:
        await until(lambda at=at: task.done() or _sampled(gateway) >= at, f"{at} tokens", 120)
        if gateway.slot.runs:
            await gateway.slot.engine.abort(list(gateway.slot.runs))
    assert (await task).status_code == 200
    prompt, turn = (await gateway.admin.trajectory(episode))["nodes"]
    (call,) = (await gateway.admin.episode(episode))["calls"]
    return prompt["ids"], turn, call["pauses"]


def _sampled(gateway: RunningGateway) -> int:
    """Tokens that a call has while it runs in the engine."""
    return max((len(run.call.turn.ids) for run in gateway.slot.runs.values()), default=0)


def nuclei(logits: list[float], temperature: float, top_p: float) -> list[dict[int, float]]:
    """The log-probability of each token that can be drawn: temperature first, then the smallest set that holds `top_p`.

    Where a set's mass is `top_p` but for noise, the next larger set is right too.
    """
    scaled = [value / temperature for value in logits]
    peak = max(scaled)
    total = sum(math.exp(value - peak) for value in scaled)
    ranked = sorted(((math.exp(v - peak) / total, i) for i, v in enumerate(scaled)), reverse=True)
    masses = list(accumulate(chance for chance, _ in ranked))
    fewest = next((n for n, mass in enumerate(masses, 1) if mass >= top_p - EDGE), len(ranked))
    most = next((n for n, mass in enumerate(masses, 1) if mass >= top_p + EDGE), len(ranked))
    return [
        {token: math.log(chance / masses[size - 1]) for chance, token in ranked[:size]}
        for size in range(fewest, most + 1)
    ]


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (1.3, 0.9)], ids=lambda value: str(value)
)
async def test_every_token_is_drawn_from_the_requested_distribution(
    gateway: RunningGateway, model: Path, temperature: float, top_p: float
) -> None:
    prompt, turn = await broken(gateway, temperature=temperature, top_p=top_p)
    rows = distribution(model, prompt + turn["ids"])[len(prompt) - 1 : -1]
    strange = []
    for at, (token, recorded, logits) in enumerate(zip(turn["ids"], turn["logprobs"], rows, strict=True)):
        found = nuclei(logits, temperature, top_p if top_p < 1 else math.inf)
        if not any(abs(nucleus.get(token, math.inf) - recorded) < NOISE for nucleus in found):
            strange.append((at, token, recorded, [nucleus.get(token) for nucleus in found]))
    assert strange == []


async def test_a_greedy_call_samples_the_same_however_often_it_is_broken(gateway: RunningGateway) -> None:
    _, turn = await broken(gateway, temperature=0)
    episode, headers = await gateway.open("whole", mode="eval")
    assert (await gateway.chat(headers, max_tokens=TOKENS, temperature=0)).status_code == 200
    nodes = (await gateway.admin.trajectory(episode))["nodes"]
    assert nodes[-1]["ids"] == turn["ids"]


async def test_a_seeded_call_stays_in_its_engine_and_samples_the_same_again(gateway: RunningGateway) -> None:
    replies = []
    for _ in range(2):
        episode, headers = await gateway.open("seeded", mode="eval")
        assert (await gateway.chat(headers, max_tokens=60, seed=11)).status_code == 200
        replies.append((await gateway.admin.trajectory(episode))["nodes"][-1]["ids"])
    assert replies[0] == replies[1]
