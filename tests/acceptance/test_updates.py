"""Weight updates on real vLLM behind open streams; the ground truth is computed by transformers, from the checkpoints.

In mode `abort` the engine loads the published folder, in mode `keep` a copy that came over HTTP to its mirror; in
`collective`, of mode `abort` too, the trainer's server sends it straight into the engine.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import openai
import pytest

from gateway.generation.slot import Slot
from tests.harness.crossing import HOLD_S, crossed
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.mirrors import serving
from tests.harness.models import logprobs, probe_of, save_model
from tests.harness.programs import sender_of
from tests.harness.vllm import SharedEngine
from tests.harness.waiting import until, while_going_on
from tests.harness.weights import write_manifest_of_pieces

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

NOISE = 2e-3
"""Nats between two float32 implementations of the same weights."""
DISTINCT = 16
"""Spans of this length in tokens cannot agree with two of these models by chance."""
AGENTS, STREAMS = 8, 6
"""Streams, and how many of them are in their middle, at least, when an update begins."""
TOKENS, APART = 200, 20
"""The tokens of a stream, and those that it samples between two updates."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four models that have nothing in common; versions 1 to 3 with manifests."""
    root = tmp_path_factory.mktemp("versions")
    sources = [root / f"source-{v}" for v in range(4)]
    for seed, source in enumerate(sources):
        save_model(source, seed, endless=True)
    published = [root / f"v{v:06d}" for v in range(1, 4)]
    for v, folder in enumerate(published, 1):
        shutil.copytree(sources[v], folder)
        write_manifest_of_pieces(folder, v, v - 1, probe_of(sources[v], sources[v - 1]))
    return [sources[0], *published]


@pytest.fixture(scope="module", params=["abort", "keep", "collective"])
async def gateway(
    request: pytest.FixtureRequest,
    vllm: SharedEngine,
    versions: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[RunningGateway]:
    """A gateway with real vLLM, in either mode of `[update]`."""
    work = tmp_path_factory.mktemp("work")
    update = {"mode": "keep" if request.param == "keep" else "abort", "pause_timeout_s": HOLD_S}
    async with AsyncExitStack() as stack:
        engine, weights = vllm.settings, {}
        if request.param == "keep":
            mirror = await stack.enter_async_context(serving(work / "machine"))
            engine = {"launch": "external", "urls": [vllm.url], "mirrors": [mirror]}
            source = await stack.enter_async_context(serving(versions[1].parent))
            weights = {"sources": [source], "dir": str(work / "copies")}
        if request.param == "collective":
            sender = sender_of(versions[1].parent)
            stack.callback(sender.kill)
            await sender.start()
            engine = vllm.settings | {"transport": "collective"}
            weights = {"sources": [sender.url]}
        values = settings_for(versions[0], work, engine=engine, update=update, weights=weights)
        yield await stack.enter_async_context(run_gateway(values, in_process=False))


async def test_greedy_whole_and_streamed_replies_are_equal(gateway: RunningGateway) -> None:
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
    [(version, _)] = sampled["versions"]  # the updates may have come before
    truth = logprobs(versions[version], ids, temperature=0.7)[-len(sampled["ids"]) :]
    assert sampled["logprobs"] == pytest.approx(truth, abs=NOISE)
    assert sampled["temperature"] == pytest.approx(0.7)


async def test_streams_cross_three_updates_and_every_token_has_the_version_that_sampled_it(
    gateway: RunningGateway, vllm: SharedEngine, versions: list[Path]
) -> None:
    async def stop_in_the_middle(_slot: Slot) -> None:
        with vllm.barrier(STREAMS, DISTINCT) as stands_still:
            await stands_still()

    done = asyncio.Event()
    agents = asyncio.gather(*[stream_until(gateway, done, number) for number in range(AGENTS)])
    reports = []
    with crossed(stop_in_the_middle):
        for version in (1, 2, 3):
            sampled = await sampled_by(gateway)
            await until(partial(has_sampled_more, gateway, sampled), f"version {version - 1} samples", 300)
            publishing = gateway.admin.publish(version, **offered(gateway, versions[version]), wait_s=600)
            record = await while_going_on(publishing, agents, "no agent asks any more")
            assert record["state"] == "live"
            reports.append(record["report"][0])
    done.set()
    received = dict(await agents)

    assert all(report["probe"]["verdict"] == "passed" for report in reports)
    assert [report["failure"] for report in reports] == [""] * 3
    assert min(report["streams"] for report in reports) >= STREAMS
    crossings, given_back = Counter[int](), 0
    for episode, counts in received.items():
        given_back += sum(call["pauses"] for call in (await gateway.admin.episode(episode))["calls"])
        nodes = (await gateway.admin.trajectory(episode))["nodes"]
        turns = [node for node in nodes if node["sampled"]]
        assert [len(turn["ids"]) for turn in turns] == counts
        for turn in turns:
            check_against_every_version(versions, prompt_of(nodes, turn), turn)
            crossings.update(version for version, _ in turn["versions"][1:])
    assert all(crossings[version] >= STREAMS for version in (1, 2, 3)), crossings
    # A frozen request is never given back: only the engine knows where its versions change.
    assert (given_back == 0) == (gateway.settings.update.mode == "keep")


def offered(gateway: RunningGateway, version: Path) -> dict[str, str]:
    """Where the gateway gets a version from."""
    sources = gateway.settings.weights.sources
    return {"url": sources[0]} if sources else {"path": str(version)}


async def sampled_by(gateway: RunningGateway) -> int:
    """Tokens that the engine has sampled since its start."""
    load = await gateway.slot.engine.read_load()
    return 0 if load is None else load.sampled


async def has_sampled_more(gateway: RunningGateway, before: int) -> bool:
    return await sampled_by(gateway) >= before + APART * AGENTS


async def stream_until(gateway: RunningGateway, done: asyncio.Event, number: int) -> tuple[str, list[int]]:
    """Call again and again, and return the number of tokens that each call received."""
    opened = await gateway.admin.open_episode(f"long-{number}", mode="eval")
    counts: list[int] = []
    async with openai.AsyncOpenAI(
        base_url=opened.base_url, api_key=opened.api_key, max_retries=0, timeout=600
    ) as client:
        while not done.is_set():
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": f"agent {number}, call {len(counts)}"}],
                max_tokens=TOKENS,
                stream=True,
                logprobs=True,
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"
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
