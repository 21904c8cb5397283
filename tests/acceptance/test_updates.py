"""Weight updates on real vLLM behind open streams; the ground truth is computed by transformers, from the checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.models import logprobs, probe_of, save_model
from tests.harness.vllm import vllm_settings
from tests.harness.weights import publish

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

NOISE = 2e-3
"""Nats between two float32 implementations of the same weights."""
DISTINCT = 16
"""Spans of so many tokens cannot agree with two of these models by chance."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four models that have nothing in common; versions 1 to 3 with manifests."""
    root = tmp_path_factory.mktemp("versions")
    sources = [root / f"source-{v}" for v in range(4)]
    for seed, source in enumerate(sources):
        save_model(source, seed)
    published = [
        publish(sources[v], root / f"v{v}", v, v - 1, probe_of(sources[v], sources[v - 1]))
        for v in range(1, 4)
    ]
    return [sources[0], *published]


@pytest.fixture(scope="module", params=["abort", "keep"])
async def gateway(
    request: pytest.FixtureRequest, versions: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    """A gateway with real vLLM, in either mode of `[update]`."""
    work = tmp_path_factory.mktemp("work")
    update = {"mode": request.param}
    values = settings_for(versions[0], work, engine=vllm_settings(work / "engine.log"), update=update)
    async with run_gateway(values, in_process=False) as running:
        yield running


async def test_whole_and_streamed_replies_say_the_same_when_greedy(gateway: RunningGateway) -> None:
    opened = await gateway.admin.open_episode("greedy", mode="eval")
    async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key) as client:
        messages = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(
            model="gpt-4o", messages=messages, temperature=0, max_tokens=24
        )
        stream = await client.chat.completions.create(
            model="gpt-4o", messages=messages, temperature=0, max_tokens=24, stream=True
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    nodes = (await gateway.admin.trajectory(opened.episode_id))["nodes"]
    assert [node["sampled"] for node in nodes] == [False, True, True]
    assert set(nodes[1]["flags"]) == {"GREEDY"}


async def test_recorded_logprobs_are_those_of_the_sampling_distribution(
    gateway: RunningGateway, versions: list[Path]
) -> None:
    episode, headers = await gateway.open("sampled")
    response = await gateway.chat(headers, temperature=0.7, max_tokens=32)
    assert response.status_code == 200
    prompt, sampled = (await gateway.admin.trajectory(episode))["nodes"]
    ids = prompt["ids"] + sampled["ids"]
    truth = logprobs(versions[0], ids, temperature=0.7)[-len(sampled["ids"]) :]
    assert sampled["logprobs"] == pytest.approx(truth, abs=NOISE)
    assert sampled["temperature"] == pytest.approx(0.7)


async def test_streams_cross_three_updates_and_every_token_has_the_version_that_sampled_it(
    gateway: RunningGateway, versions: list[Path]
) -> None:
    done = asyncio.Event()
    agents = [asyncio.create_task(stream_until(gateway, done, i), name=f"agent-{i}") for i in range(48)]
    reports = []
    for version in (1, 2, 3):
        await until_streams(gateway, 12)
        record = await gateway.admin.publish(version, str(versions[version]), wait_s=60)
        assert record["state"] == "live"
        reports.append(record["report"][0])
    done.set()
    received = dict(await asyncio.gather(*agents))

    assert all(report["probe"]["verdict"] == "passed" for report in reports)
    assert all(report["failure"] == "" for report in reports)
    crossed, given_back = 0, 0
    for episode, counts in received.items():
        given_back += sum(call["pauses"] for call in (await gateway.admin.episode(episode))["calls"])
        nodes = (await gateway.admin.trajectory(episode))["nodes"]
        turns = [node for node in nodes if node["sampled"]]
        assert [len(turn["ids"]) for turn in turns] == counts
        for turn in turns:
            check_against_every_version(versions, prompt_of(nodes, turn), turn)
            crossed += len(turn["versions"]) > 1
    assert crossed >= 10, [report["streams"] for report in reports]
    # A frozen request is never given back: the engine alone can say where its versions part.
    assert (given_back == 0) == (gateway.settings.update.mode == "keep")


async def until_streams(gateway: RunningGateway, wanted: int) -> None:
    """Waits until so many streams are open in the engine."""
    async with asyncio.timeout(60):
        while (await gateway.admin.status())["engines"][0]["streams"] < wanted:
            await asyncio.sleep(0.05)


async def stream_until(gateway: RunningGateway, done: asyncio.Event, number: int) -> tuple[str, list[int]]:
    """An agent that asks again and again; answers how many tokens it received in each call."""
    opened = await gateway.admin.open_episode(f"long-{number}", mode="eval")
    counts: list[int] = []
    async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0) as client:
        while not done.is_set():
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": f"agent {number}, call {len(counts)}"}],
                max_tokens=200,
                stream=True,
                logprobs=True,
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
            counts.append(sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs))
    return opened.episode_id, counts


def prompt_of(nodes: list[dict], turn: dict) -> list[int]:
    """The token ids from the root to a turn."""
    ids: list[int] = []
    node = turn
    while node["parent"] >= 0:
        parent = nodes[node["parent"]]
        ids = parent["ids"][: node["at"]] + ids
        node = parent
    return ids


def check_against_every_version(versions: list[Path], prompt: list[int], turn: dict) -> None:
    """Each span agrees with its own version's weights, and clearly with no other's."""
    ids = prompt + turn["ids"]
    truths = [logprobs(path, ids)[len(prompt) - 1 :] for path in versions]
    start = 0
    for version, length in turn["versions"]:
        recorded = turn["logprobs"][start : start + length]
        gaps = [
            sum(abs(a - b) for a, b in zip(recorded, truth[start : start + length], strict=True)) / length
            for truth in truths
        ]
        assert gaps[version] < NOISE
        others = [gap for other, gap in enumerate(gaps) if other != version]
        assert length < DISTINCT or min(others) > 0.1, (gaps, length)
        start += length
    assert start == len(turn["ids"])


async def test_an_engine_with_tied_embeddings_is_caught_and_restarted(tmp_path: Path) -> None:
    """vLLM's CPU build leaves a tied output head stale on reload and says nothing: only the probe sees it."""
    sources = [tmp_path / "tied-0", tmp_path / "tied-1"]
    for seed, source in enumerate(sources):
        save_model(source, seed + 10, tied=True)
    new = publish(sources[1], tmp_path / "v1", 1, 0, probe_of(sources[1], sources[0]))
    values = settings_for(sources[0], tmp_path, engine=vllm_settings(tmp_path / "engine.log"))
    async with run_gateway(values, in_process=False) as gateway:
        record = await gateway.admin.publish(1, str(new), wait_s=180)
        assert record["state"] == "live"
        report = record["report"][0]
        assert "does not run version 1" in report["failure"]
        assert "launch" in report["seconds"]
        assert report["probe"]["verdict"] == "passed"
        episode, headers = await gateway.open("after")
        assert (await gateway.chat(headers, max_tokens=16)).status_code == 200
        prompt, turn = (await gateway.admin.trajectory(episode))["nodes"]
        truth = logprobs(sources[1], prompt["ids"] + turn["ids"])[-len(turn["ids"]) :]
        assert turn["logprobs"] == pytest.approx(truth, abs=NOISE)
        assert turn["versions"] == [[1, len(turn["ids"])]]
