"""Real vLLM behind unmodified clients: the openai SDK, anthropic's and openai-agents each make a call and a stream.

A random model samples nothing that makes sense; the clients must accept it, and the record must be what they got.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import agents
import anthropic
import openai
import pytest

from headgate.types import EpisodeOpened
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.models import save_model
from tests.harness.vllm import SharedEngine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

LONGEST = 40
MODEL = "demo"


@pytest.fixture(scope="module")
async def gateway(
    vllm: SharedEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    """A gateway with real vLLM."""
    work = tmp_path_factory.mktemp("work")
    save_model(work / "model", 5, scale=2.0)
    values = settings_for(work / "model", work, engine=vllm.settings)
    async with run_gateway(values, in_process=False) as running:
        yield running


async def turns_of(gateway: RunningGateway, opened: EpisodeOpened) -> list[dict[str, Any]]:
    """The turns of an episode; each is of one version, and every token has its log-probability."""
    nodes = (await gateway.admin.trajectory(opened.episode_id))["nodes"]
    turns = [node for node in nodes if node["sampled"]]
    for turn in turns:
        assert len(turn["logprobs"]) == len(turn["ids"]) <= LONGEST
        assert all(value <= 0 for value in turn["logprobs"])
        assert [version for version, _ in turn["versions"]] == [0]
    return turns


async def test_openai_chat_completions_and_responses(gateway: RunningGateway) -> None:
    opened = await gateway.admin.open_episode("openai", mode="eval")
    user: Any = {"role": "user", "content": "hello"}
    async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=[user], max_tokens=LONGEST)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[user],
            max_tokens=LONGEST,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        response = await client.responses.create(model=MODEL, input="hello", max_output_tokens=LONGEST)
        events = [
            event
            async for event in await client.responses.create(
                model=MODEL, input="hello", max_output_tokens=LONGEST, stream=True
            )
        ]
    used = [
        whole.usage and whole.usage.completion_tokens,
        chunks[-1].usage and chunks[-1].usage.completion_tokens,
        response.usage and response.usage.output_tokens,
        events[-1].response.usage.output_tokens,
    ]
    assert [len(turn["ids"]) for turn in await turns_of(gateway, opened)] == used


async def test_anthropic_messages(gateway: RunningGateway) -> None:
    opened = await gateway.admin.open_episode("anthropic", mode="eval")
    user: Any = {"role": "user", "content": "hello"}
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key=opened.api_key, max_retries=0
    ) as client:
        whole = await client.messages.create(model=MODEL, messages=[user], max_tokens=LONGEST)
        async with client.messages.stream(model=MODEL, messages=[user], max_tokens=LONGEST) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model=MODEL, messages=[user])
    used = [whole.usage.output_tokens, streamed.usage.output_tokens]
    assert [len(turn["ids"]) for turn in await turns_of(gateway, opened)] == used
    assert counted.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
async def test_openai_agents_with_a_tool_that_must_be_called(gateway: RunningGateway, kind: Any) -> None:
    """A grammar makes even a random model call the tool; the agent ends with the result of the tool."""
    agents.set_tracing_disabled(True)
    requests: list[bool] = []

    @agents.function_tool
    def toss(heads: bool) -> str:
        """Tosses a coin."""
        requests.append(heads)
        return "heads"

    opened = await gateway.admin.open_episode("agents", mode="eval")
    async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0) as client:
        agent = agents.Agent(
            name="tosser",
            model=kind(model=MODEL, openai_client=client),
            tools=[toss],
            tool_use_behavior="stop_on_first_tool",
            model_settings=agents.ModelSettings(
                tool_choice="toss", parallel_tool_calls=False, temperature=0.0, max_tokens=200
            ),
        )
        done = await agents.Runner.run(agent, "toss a coin")
        streamed = agents.Runner.run_streamed(agent, "toss a coin")
        events = [event.type async for event in streamed.stream_events()]
    assert done.final_output == streamed.final_output == "heads"
    assert len(requests) == 2
    assert "raw_response_event" in events
    nodes = (await gateway.admin.trajectory(opened.episode_id))["nodes"]
    assert len([node for node in nodes if node["sampled"]]) == 2
