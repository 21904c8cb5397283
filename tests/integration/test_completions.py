"""Legacy completions as the openai SDK requests them: texts and token ids, several in one request, streamed, recorded."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.harness.agents import client_of
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import check_sampled_by_the_fake, nodes_of, path_to
from tests.harness.scripted import ScriptedEngine, scripted_gateway
from tests.harness.upstream import Elsewhere

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ["once upon", "a time"]


@pytest.fixture(scope="module")
async def gateway(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    values = settings_for(tiny_model, tmp_path_factory.mktemp("completions"), staleness={"batch": 64})
    async with run_gateway(values) as running:
        yield running


@pytest.fixture(scope="module")
async def scripted(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RunningGateway, ScriptedEngine]]:
    work = tmp_path_factory.mktemp("scripted")
    async with scripted_gateway(tiny_model, work, staleness={"batch": 64}) as found:
        yield found


async def ask(client: openai.AsyncOpenAI, prompt: Any, **values: Any) -> Any:
    return await client.completions.create(**{"model": "m", "prompt": prompt, "max_tokens": 12, **values})


def turns(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [node for node in nodes if node["sampled"]]


def check(gateway: RunningGateway, nodes: list[dict[str, Any]], seed: int | None = None) -> None:
    for turn in turns(nodes):
        check_sampled_by_the_fake(nodes, turn, {0: gateway.settings.model.path.resolve()}, seed)


async def test_a_text_goes_on_where_its_reply_ended(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = scripted
    engine.replies += [" upon a", "time"]
    async with client_of(gateway) as (client, episode):
        first = await ask(client, "once")
        await ask(client, "once" + first.choices[0].text + " long")
    prompt, turn, more, last = await nodes_of(gateway, episode)
    assert gateway.model.renderer.decode(prompt["ids"]) == "once"
    assert (more["parent"], more["at"]) == (1, len(turn["ids"]) - 1)  # the token that ended it has no text
    assert gateway.model.renderer.decode(more["ids"]) == " long"
    assert (last["parent"], last["at"]) == (2, len(more["ids"]))
    assert first.object == "text_completion"
    assert first.usage.prompt_tokens == len(prompt["ids"])
    assert first.usage.completion_tokens == len(turn["ids"])


async def test_ids_go_on_where_their_reply_ended(gateway: RunningGateway) -> None:
    async with client_of(gateway) as (client, episode):
        await ask(client, [70, 71])
        (_, turn) = await nodes_of(gateway, episode)
        await ask(client, [70, 71, *turn["ids"], 72])
    nodes = await nodes_of(gateway, episode)
    check(gateway, nodes)
    assert (nodes[2]["parent"], nodes[2]["at"], nodes[2]["ids"]) == (1, len(turn["ids"]), [72])


async def test_texts_and_ids_are_the_same(gateway: RunningGateway) -> None:
    encoded = [gateway.model.renderer.encode(prompt) for prompt in PROMPTS]
    responses = []
    for prompt in (PROMPTS, encoded, PROMPTS[0], encoded[0]):
        async with client_of(gateway) as (client, _):
            responses.append([choice.text for choice in (await ask(client, prompt)).choices])
    assert responses[0] == responses[1] == [*responses[2], responses[0][1]]
    assert responses[2] == responses[3]
    assert responses[0][0] != responses[0][1]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_replies_to_several_prompts(gateway: RunningGateway, stream: bool) -> None:
    """Choice i * n + j is of prompt i; a seed makes the repetitions different, and each prompt's the same as alone."""
    async with client_of(gateway, mode="eval") as (client, episode):
        values: dict[str, Any] = {"n": 2, "seed": 7, "stream": stream}
        if stream:
            texts = ["", "", "", ""]
            options = {"include_usage": True}
            async for chunk in await ask(client, PROMPTS, stream_options=options, **values):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                usage = chunk.usage
        else:
            response = await ask(client, PROMPTS, **values)
            assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
            texts, usage = [choice.text for choice in response.choices], response.usage
        alone = await ask(client, PROMPTS[1], n=2, seed=7)
    nodes = await nodes_of(gateway, episode)
    paths = [gateway.model.renderer.decode(path_to(nodes, turn)) for turn in turns(nodes)[:4]]
    assert sorted(paths) == sorted([*PROMPTS, *PROMPTS])
    assert texts[2:] == [choice.text for choice in alone.choices]
    assert len({*texts}) == 4
    assert usage.prompt_tokens == len("".join(PROMPTS))
    assert usage.completion_tokens == sum(len(turn["ids"]) for turn in turns(nodes)[:4])


@pytest.mark.parametrize("encoded", [False, True])
async def test_each_choice_echoes_its_own_prompt(gateway: RunningGateway, encoded: bool) -> None:
    prompts = [gateway.model.renderer.encode(text) for text in PROMPTS] if encoded else PROMPTS
    async with client_of(gateway) as (client, _):
        response = await ask(client, prompts, n=2, echo=True)
    for choice, prompt in zip(response.choices, [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, strict=True):
        assert choice.text.startswith(prompt)


async def test_a_retry_of_several_prompts_samples_nothing_again(gateway: RunningGateway) -> None:
    async with client_of(gateway) as (client, episode):
        headers = {"idempotency-key": "k"}
        first = await ask(client, PROMPTS, n=2, extra_headers=headers)
        again = await ask(client, PROMPTS, n=2, extra_headers=headers)
    assert again == first
    assert len(turns(await nodes_of(gateway, episode))) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities(gateway: RunningGateway, stream: bool) -> None:
    async with client_of(gateway) as (client, episode):
        response = await ask(client, "once", logprobs=2, stream=stream)
        parts = [chunk.choices[0] async for chunk in response] if stream else [response.choices[0]]
    found = [part.logprobs for part in parts if part.logprobs]
    (turn,) = turns(await nodes_of(gateway, episode))
    tokens = [token for part in found for token in part.tokens]
    assert tokens == [gateway.model.renderer.decode([token]) for token in turn["ids"]]
    logprobs = [logprob for part in found for logprob in part.token_logprobs]
    assert logprobs == turn["logprobs"]
    tops = [top for part in found for top in part.top_logprobs]
    assert [top[token] for top, token in zip(tops, tokens, strict=True)] == logprobs
    offsets = [offset for part in found for offset in part.text_offset]
    assert offsets == whole_characters(gateway, turn["ids"])


def whole_characters(gateway: RunningGateway, ids: list[int]) -> list[int]:
    """Return the number of whole characters before each token, by the byte-level alphabet. A mark counts its letters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
    decoder, counts = codecs.getincrementaldecoder("utf-8")("replace"), [0]
    for token in ids:
        letters = gateway.model.renderer.backend.id_to_token(token)
        counts.append(counts[-1] + len(decoder.decode(bytes(alphabet[letter] for letter in letters))))
    return counts[:-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_what_the_model_wrote(
    scripted: tuple[RunningGateway, ScriptedEngine], stream: bool
) -> None:
    gateway, engine = scripted
    text = '\n<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>\n'
    for echo in (False, True):
        engine.replies.append(text)
        async with client_of(gateway) as (client, _):
            response = await ask(client, "so: ", max_tokens=500, echo=echo, stream=stream)
            parts = [chunk.choices[0] async for chunk in response] if stream else [response.choices[0]]
        assert "".join(part.text for part in parts) == ("so: " if echo else "") + text
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]


async def test_stop_strings_and_the_default_length(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = scripted
    engine.replies += ["one two three", "x" * 40]
    async with client_of(gateway) as (client, episode):
        stopped = (await ask(client, "count", stop=" three", max_tokens=100)).choices[0]
        short = (await client.completions.create(model="m", prompt="count")).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("one two", "stop")
    assert (short.text, short.finish_reason) == ("x" * 16, "length")
    assert len(turns(await nodes_of(gateway, episode))[1]["ids"]) == 16


@pytest.mark.parametrize(
    ("values", "code", "param"),
    [
        ({"prompt": [5, 1_000_000]}, "invalid_value", "prompt"),
        ({"prompt": ["fine", "x" * 5000]}, "context_length_exceeded", "prompt"),
        ({"prompt": "x", "temprature": 1}, "unknown_parameter", "temprature"),
    ],
)
async def test_what_is_refused_is_named_and_nothing_is_sampled(
    gateway: RunningGateway, values: dict[str, Any], code: str, param: str
) -> None:
    episode, headers = await gateway.open("bad", mode="eval")
    sampled = gateway.engine.sampled
    response = await gateway.http.post("/v1/completions", json={"model": "m", **values}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert param in error["message"]
    assert await nodes_of(gateway, episode) == []
    assert gateway.engine.sampled == sampled


@pytest.mark.asyncio(loop_scope="function")
async def test_a_request_to_an_upstream_model_is_relayed_unchanged(
    relayed: tuple[RunningGateway, Elsewhere],
) -> None:
    gateway, _ = relayed
    episode, headers = await gateway.open("task")
    body = {"model": "gpt-4o", "prompt": "x", "logprobs": 9}
    response = await gateway.http.post("/v1/completions", json=body, headers=headers)
    assert (response.status_code, response.text) == (404, "Not Found")  # that API has no such path
    (call,) = (await gateway.admin.episode(episode))["calls"]
    exchange = await gateway.admin.exchange(episode, call["id"])
    assert (call["api"], exchange["request"]["logprobs"], exchange["status"]) == ("completions", 9, 404)
