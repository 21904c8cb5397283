"""Images on real vLLM: the gateway's tokens are those of the engine's processor, what it records is what the model computes, and
the trainer, before and after its updates, computes the same.

Truth is the engine's own render endpoint for the tokens, and the model's forward pass in transformers for log-probabilities.
vLLM runs with a stand-in for torchvision (`tests/harness/torchvision_stub`), of which there is no build for torch's CPU build.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gateway.config import ModelSettings
from gateway.render.images import unkeyed
from gateway.render.renderer import ChatRenderer
from gateway.store import turns
from gateway.trajectories.tree import TokenTree, TreePosition
from headgate.types import Node
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.vision_model import image_part, png, save_vision_model, vision_logprobs
from tests.harness.vllm import LENGTH, SharedEngine
from trainer.config.settings import Settings
from trainer.loop.training_loop import TrainingLoop
from trainer.rank_trainer import RankTrainer
from trainer.report.metrics import Clock, Metrics

# An engine of its own starts for it, of which the other tests need none.
pytestmark = [pytest.mark.vllm, pytest.mark.long]

STUB = Path(__file__).parents[1] / "harness" / "torchvision_stub"
LIMITS = ["--limit-mm-per-prompt", '{"image": 8, "video": 0}']
TOLERANCE = 1e-3
RED, BLUE = png(56, 84, (255, 0, 0)), png(97, 41, (0, 30, 255))
GREEN = png(56, 84, (0, 255, 0))
HI = {"type": "text", "text": "hi"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "model"
    save_vision_model(directory, seed=1, length=LENGTH)
    return directory


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    shared = SharedEngine(model, tmp_path_factory.mktemp("log") / "vllm.log", path=STUB, args=LIMITS)
    yield shared
    shared.kill()


@pytest.fixture
async def gateway(engine: SharedEngine, model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    own = {"path": str(model), "family": "template", "images": True}
    values = settings_for(model, tmp_path, models={"demo": own}, engine=engine.settings)
    async with run_gateway(values, in_process=False) as running:
        yield running


async def tree_of(gateway: RunningGateway, episode: str) -> tuple[TokenTree, list[Node]]:
    database = gateway.services.database
    nodes = (await database.read(lambda c: turns.nodes(c, "demo", [episode])))[episode]
    return TokenTree(nodes), nodes


async def test_prompts_have_the_tokens_of_the_engines_own_processor(
    engine: SharedEngine, model: Path
) -> None:
    renderer = ChatRenderer.load(ModelSettings(path=model, family="template", images=True))
    seen = {"type": "image", "image": "ab" * 32, "width": 97, "height": 41}
    small = {"type": "image", "image": "cd" * 32, "width": 56, "height": 84}
    for ours, theirs in (
        ([seen, HI], [image_part(BLUE), HI]),
        ([HI, small, HI, seen], [HI, image_part(RED), HI, image_part(BLUE)]),
    ):
        ids = np.asarray(renderer.render([{"role": "user", "content": ours}], []), np.int32)
        found, images = unkeyed(ids, [seen["image"], small["image"]], renderer.vision)
        body = {"messages": [{"role": "user", "content": theirs}], "max_tokens": 1}
        async with httpx.AsyncClient(base_url=engine.url, timeout=300) as client:
            response = (await client.post("/v1/chat/completions/render", json=body)).json()
        assert found.tolist() == response["token_ids"]
        places = response["features"]["mm_placeholders"]["image"]
        assert [(image.offset, image.length) for image in images] == [
            (p["offset"], p["length"]) for p in places
        ]


async def test_the_recorded_log_probabilities_are_those_of_the_model(
    gateway: RunningGateway, model: Path
) -> None:
    episode, headers = await gateway.open("talk")
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(RED), HI]}]
    for new in ([image_part(BLUE), HI], [HI]):
        response = await gateway.chat(headers, messages=messages, max_tokens=12)
        assert response.status_code == 200, response.text
        messages += [response.json()["choices"][0]["message"], {"role": "user", "content": new}]
    await gateway.slot.engine.pause()  # empties the engine's caches: it has no image any more
    await gateway.slot.engine.resume()
    assert (await gateway.chat(headers, messages=messages, max_tokens=12)).status_code == 200
    tree, nodes = await tree_of(gateway, episode)
    last = TreePosition(5, len(nodes[5].ids), sum(len(node.ids) for node in nodes))
    ids, images = tree.path(last), tree.images(last)
    assert [image.length for image in images] == [6, 3]
    files = {image.hash: data for image, data in zip(images, (RED, BLUE), strict=True)}
    expected = vision_logprobs(model, ids.tolist(), files, images)
    other = vision_logprobs(model, ids.tolist(), {**files, images[0].hash: GREEN}, images)
    start = 0
    for node in nodes:
        if node.sampled:
            at = slice(start - 1, start - 1 + len(node.ids))
            assert np.abs(node.logprobs - expected[at]).max() < TOLERANCE
            assert np.abs(node.logprobs - other[at]).max() > 10 * TOLERANCE
        start += len(node.ids)


async def test_an_image_goes_to_the_engine_once(gateway: RunningGateway) -> None:
    posted: list[str] = []
    http = gateway.slot.engine._http
    post = http.post

    async def noted(path: str, *given: Any, **more: Any) -> bytes:
        posted.append(path)
        return await post(path, *given, **more)

    http.post = noted
    for task in ("one", "two"):
        _, headers = await gateway.open(task)
        content = [image_part(RED), HI]
        response = await gateway.chat(headers, messages=[{"role": "user", "content": content}], max_tokens=4)
        assert response.status_code == 200, response.text
    assert posted.count("/v1/chat/completions/render") == 1


async def play(gateway: RunningGateway, name: str) -> None:
    """A group of two episodes that see an image before each of their two turns, of which one is better."""
    for reward in (0.0, 1.0):
        episode, headers = await gateway.open(name, group_id=name, group_size=2)
        messages: list[dict[str, Any]] = []
        for seen in (RED, BLUE):
            messages.append({"role": "user", "content": [image_part(seen), HI]})
            response = await gateway.chat(headers, messages=messages, max_tokens=12)
            assert response.status_code == 200, response.text
            messages.append(response.json()["choices"][0]["message"])
        await gateway.admin.reward(episode, reward)


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(how, marks=pytest.mark.long) for how in ("full", "adapters")), "with its vision tower"],
)
async def test_trainer_and_engine_agree_on_images_after_each_update(
    engine: SharedEngine, model: Path, tmp_path: Path, how: str
) -> None:
    own = {"path": str(model), "family": "template", "images": True}
    staleness = {"batch": 1, "eta": 0, "min_members": 1}
    values = settings_for(model, tmp_path, models={"demo": own}, engine=engine.settings, staleness=staleness)
    more: dict[str, dict[str, Any]] = {
        "full": {},
        "adapters": {"lora": {}},
        "with its vision tower": {"vision": "trained"},
    }
    async with run_gateway(values, in_process=False) as gateway:
        settings = Settings.parse({
            "run": {"dir": tmp_path / "run", "steps": 3, "device": "cpu", "threads": 1},
            "gateway": {"url": gateway.url},
            "model": {"path": model, "attention": "rows", **more[how]},
            "optimizer": {"lr": 1e-2},
        })  # fmt: skip
        with Metrics(settings.run.dir, settings.run.steps) as metrics:
            loop = TrainingLoop(settings, RankTrainer.open(settings), gateway.admin, metrics)
            await loop.check_versions()
            for version in range(3):
                await play(gateway, f"{how}-{version}")
                await loop.feed.lease()
                measured = loop.trainer.step(await loop.stream(Clock()))
                assert 0 < measured["same_version_tokens"] == measured["trained_tokens"]
                assert measured["logprob_gap_max"] < 2 * TOLERANCE
                await loop.checkpoints.write()
                await loop.publication.publish()
                await loop.ack()
            await loop.publication.close()
        reports = [await gateway.admin.weights(version) for version in (1, 2, 3)]
    assert [report["state"] for report in reports] == ["live"] * 3
    assert [report["report"][0]["probe"]["verdict"] for report in reports] == ["passed"] * 3
