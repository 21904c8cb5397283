"""Images, from each dialect to the tree and the feed: which tokens stand for them, what the engine is given, and what is stored.

The fake engine draws tokens by the images it was sent, so a reply under another image would be another reply.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.store import turns
from headgate.arrow import groups_to_arrow, read_stream, write_stream
from headgate.types import Episode, Group, ImageSpan, Node
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.vision_model import END, PAD, START, data_url, image_part, png, save_without_weights

RED, BLUE = png(56, 84, (255, 0, 0)), png(56, 84, (0, 0, 255))
TOKENS = 6
"""An image of 56 x 84 pixels is 2 x 3 patches, two by two merged."""
HI = {"type": "text", "text": "hi"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights, which the fake engine does not read."""
    directory = tmp_path_factory.mktemp("vision")
    save_without_weights(directory)
    return directory


def values_of(model: Path, work: Path, **given: Any) -> dict[str, Any]:
    own = {"path": str(model), "family": "template", "images": True}
    return settings_for(model, work, models={"demo": own}, **given)


@pytest.fixture
async def gateway(model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with run_gateway(values_of(model, tmp_path)) as running:
        yield running


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def nodes_of(gateway: RunningGateway, episode: str) -> list[Node]:
    database = gateway.services.database
    return (await database.read(lambda c: turns.nodes(c, "demo", [episode])))[episode]


async def sampled_after(gateway: RunningGateway, content: list[dict[str, Any]]) -> list[int]:
    """The tokens of a reply of six in an episode of its own: a fake reply may end at its first token, under each image."""
    episode, headers = await gateway.open("greedy")
    response = await gateway.chat(
        headers, messages=[{"role": "user", "content": content}], max_tokens=6, min_tokens=6, seed=1
    )
    assert response.status_code == 200, response.text
    return (await nodes_of(gateway, episode))[-1].ids.tolist()


async def test_the_reply_depends_on_the_image_and_a_known_image_goes_by_name(gateway: RunningGateway) -> None:
    red = await sampled_after(gateway, [image_part(RED), HI])
    assert await sampled_after(gateway, [image_part(BLUE), HI]) != red
    assert gateway.engine is not None
    assert gateway.engine.images == {name_of(RED), name_of(BLUE)}
    assert await sampled_after(gateway, [image_part(RED), HI]) == red  # sent by name alone
    gateway.engine.clear_cache()
    assert await sampled_after(gateway, [image_part(RED), HI]) == red  # the engine had it no more


async def test_a_conversation_goes_on_from_its_recorded_tokens(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("talk")
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(RED), HI]}]
    for new in ([image_part(BLUE), HI], [HI]):
        response = await gateway.chat(headers, messages=messages, max_tokens=5)
        assert response.status_code == 200, response.text
        messages += [response.json()["choices"][0]["message"], {"role": "user", "content": new}]
    assert (await gateway.chat(headers, messages=messages, max_tokens=5)).status_code == 200
    nodes = await nodes_of(gateway, episode)
    assert [node.parent for node in nodes] == [-1, 0, 1, 2, 3, 4]
    assert [node.at for node in nodes[1:]] == [len(node.ids) for node in nodes[:-1]]
    images = [node.images for node in nodes]
    assert [[image.hash for image in some] for some in images] == [
        [name_of(RED)],
        [],
        [name_of(BLUE)],
        [],
        [],
        [],
    ]
    for node in nodes:
        for _, offset, length in node.images:
            around = node.ids[offset - 1 : offset + length + 1].tolist()
            assert (length, around) == (TOKENS, [START, *[PAD] * TOKENS, END])


async def test_another_image_is_a_branch_though_its_tokens_are_the_same(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("branch")
    for data in (RED, BLUE, RED):
        messages = [{"role": "user", "content": [image_part(data), HI]}]
        assert (await gateway.chat(headers, messages=messages, max_tokens=3)).status_code == 200
    prompts = [node for node in await nodes_of(gateway, episode) if not node.sampled]
    first, second = prompts
    start = first.images[0].offset
    assert first.images == (ImageSpan(name_of(RED), start, TOKENS),)
    assert (second.parent, second.at) == (first.index, start)
    assert second.images == (ImageSpan(name_of(BLUE), 0, TOKENS),)


def responses_body(data: bytes) -> dict[str, Any]:
    content = [{"type": "input_image", "image_url": data_url(data)}, {"type": "input_text", "text": "hi"}]
    return {"model": "demo", "input": [{"role": "user", "content": content}], "max_output_tokens": 4}


def messages_body(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    content = [{"type": "image", "source": source}, HI]
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def chat_body(data: bytes) -> dict[str, Any]:
    content = [image_part(data), HI]
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


BODIES = {"/v1/chat/completions": chat_body, "/v1/responses": responses_body, "/v1/messages": messages_body}


async def test_every_dialect_makes_the_same_prompt(gateway: RunningGateway) -> None:
    prompts = []
    for path, body in BODIES.items():
        episode, headers = await gateway.open(path)
        response = await gateway.http.post(path, json=body(RED), headers=headers)
        assert response.status_code == 200, response.text
        prompt = (await nodes_of(gateway, episode))[0]
        prompts.append((prompt.ids.tolist(), prompt.images))
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[0][1] == (ImageSpan(name_of(RED), prompts[0][0].index(PAD), TOKENS),)


async def test_a_response_goes_on_with_the_image_of_the_one_before(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("responses")
    first = await gateway.http.post("/v1/responses", json=responses_body(RED), headers=headers)
    more = {
        "model": "demo",
        "input": "and?",
        "previous_response_id": first.json()["id"],
        "max_output_tokens": 4,
    }
    assert (await gateway.http.post("/v1/responses", json=more, headers=headers)).status_code == 200
    nodes = await nodes_of(gateway, episode)
    assert [(node.parent, len(node.images)) for node in nodes] == [(-1, 1), (0, 0), (1, 0), (2, 0)]


async def test_a_tool_may_return_an_image(gateway: RunningGateway) -> None:
    _, headers = await gateway.open("tool")
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    source = messages_body(BLUE)["messages"][0]["content"][0]
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "see:"}, source],
    }
    body = messages_body(RED) | {
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    }
    response = await gateway.http.post("/v1/messages", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert gateway.engine is not None
    assert gateway.engine.images == {name_of(BLUE)}


BAD_IMAGES = [
    ("https://example.com/a.png", "unsupported_content", "fetches none"),
    ("data:image/png;base64,AAAA", "invalid_value", "not a PNG"),
    ("data:image/tiff;base64,AAAA", "invalid_value", "image/webp"),
    (data_url(RED)[:-3] + "#==", "invalid_value", "cannot be read"),
    (data_url(RED + bytes(5000)), "too_large", "4096 bytes"),
    (data_url(png(10_000, 28, (0, 0, 0))), "invalid_value", "200 times"),
]


async def test_a_wrong_image_is_refused_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.v1.images._MAX_BYTES", 4096)
    async with run_gateway(values_of(model, tmp_path)) as gateway:
        _, headers = await gateway.open("bad")
        for url, code, message in BAD_IMAGES:
            content = [HI, {"type": "image_url", "image_url": {"url": url}}]
            response = await gateway.chat(headers, messages=[{"role": "user", "content": content}])
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, code), error
            assert error["param"] == "messages.0.content.1"
            assert message in error["message"]


async def test_the_bytes_of_an_episodes_images_are_bounded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.v1.images._EPISODE_BYTES", 1024)
    large = png(56, 84, (255, 0, 0)) + bytes(800)
    async with run_gateway(values_of(model, tmp_path)) as gateway:
        _, headers = await gateway.open("full")
        for data, status in ((large, 200), (BLUE + bytes(800), 400), (large, 200)):
            response = await gateway.chat(
                headers, messages=[{"role": "user", "content": [image_part(data), HI]}], max_tokens=3
            )
            assert response.status_code == status, response.text
            if status == 400:
                error = response.json()["error"]
                assert (error["code"], error["param"]) == ("too_large", "messages")
                assert "may have 1024" in error["message"]
        _, headers = await gateway.open("another")
        content = [image_part(BLUE + bytes(800)), HI]
        assert (await gateway.chat(headers, messages=[{"role": "user", "content": content}])).is_success


async def test_a_model_without_images_is_named(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        _, headers = await gateway.open("blind")
        for path, body in BODIES.items():
            response = await gateway.http.post(path, json=body(RED), headers=headers)
            assert response.status_code == 400
            assert "the model 'demo' is given no images" in response.json()["error"]["message"]


async def test_a_file_is_stored_once_and_goes_with_its_last_episode(gateway: RunningGateway) -> None:
    episodes = []
    for task in ("one", "two"):
        episode, headers = await gateway.open(task, mode="eval")
        assert (
            await gateway.http.post("/v1/chat/completions", json=chat_body(RED), headers=headers)
        ).is_success
        await gateway.admin.reward(episode, 1.0)
        episodes.append(episode)
    path = f"/admin/v1/images/{name_of(RED)}"
    for episode in episodes:
        found = await gateway.http.get(path)
        assert (found.content, found.headers["content-type"]) == (RED, "image/png")
        assert (await gateway.http.delete(f"/admin/v1/episodes/{episode}")).is_success
    assert (await gateway.http.get(path)).json()["error"]["code"] == "no_image"


async def test_the_feed_names_the_images_of_a_node(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("feed")
    assert (await gateway.http.post("/v1/chat/completions", json=chat_body(RED), headers=headers)).is_success
    nodes = await nodes_of(gateway, episode)
    group = Group("g", "t", 0, (Episode(episode, 1.0, tuple(nodes)),))
    stream = write_stream([group])
    assert groups_to_arrow([group]).schema.metadata == {
        b"headgate_feed": b"3"
    }  # which an older trainer refuses
    (read,) = read_stream(stream)
    assert [node.images for node in read.episodes[0].nodes] == [node.images for node in nodes]
    assert nodes[0].images
