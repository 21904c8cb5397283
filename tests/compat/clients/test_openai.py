"""The openai SDK, 3.x and 2.x: chat completions, legacy completions, responses, models, and its exceptions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.compat.clients.gate import (
    ADA,
    AGENT,
    AGENT_KEY,
    CITY,
    HELLO,
    MODEL,
    PERSON,
    SUNNY,
    WEATHER,
    Episode,
    Gate,
)

GET_WEATHER: Any = {"name": "get_weather", "description": "The weather in a city.", "parameters": CITY}
CHAT_TOOL: Any = {"type": "function", "function": GET_WEATHER}
RESPONSE_TOOL: Any = {"type": "function", "strict": True, **GET_WEATHER}


class Person(BaseModel):
    name: str
    age: int


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest.fixture
def client(episode: Episode) -> Iterator[Any]:
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as opened:
        yield opened


def async_client(episode: Episode) -> Any:
    return openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


def test_one_client_and_key_name_the_episode_of_each_call_by_a_header(gate: Gate) -> None:
    """Both send the same, so only the header distinguishes their calls."""
    opened = [gate.open("named", AGENT) for _ in range(2)]
    with openai.OpenAI(base_url=opened[0].base_url, api_key=AGENT_KEY, max_retries=0) as client:
        for turns in (1, 2):
            for episode in opened:
                messages = [user("hello"), {"role": "assistant", "content": HELLO}, user("hello")]
                given: Any = {"model": MODEL, "messages": messages[: 2 * turns - 1]}
                raw = client.chat.completions.with_raw_response.create(**given, extra_headers=episode.header)
                assert raw.headers["x-headgate-episode"] == episode.id
                named = client.with_options(default_headers=episode.header)
                assert named.responses.create(model=MODEL, input="count to 5").output_text == "1, 2, 3, 4, 5"
                episode.check(turns=2 * turns)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(
                model=MODEL, messages=[user("hello")], extra_headers={"X-Headgate-Episode": "ep-of-another"}
            )


class TestChat:
    def test_a_reply_with_its_usage(self, client: Any, episode: Episode) -> None:
        response = client.chat.completions.create(model=MODEL, messages=[user("hello")])
        assert response.choices[0].message.content == HELLO
        assert response.choices[0].finish_reason == "stop"
        assert (
            response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens > 0
        )
        episode.check(turns=1)

    async def test_async(self, episode: Episode) -> None:
        async with async_client(episode) as client:
            response = await client.chat.completions.create(model=MODEL, messages=[user("hello")])
            stream = await client.chat.completions.create(model=MODEL, messages=[user("hello")], stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        assert response.choices[0].message.content == text == HELLO

    def test_a_stream_with_usage(self, client: Any) -> None:
        options: Any = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=[user("count to 5")], stream=True, stream_options=options
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "1, 2, 3, 4, 5"
        assert chunks[-1].usage.completion_tokens > 0
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"

    def test_the_helper_for_streams_gathers_the_reply(self, client: Any) -> None:
        with client.chat.completions.stream(
            model=MODEL, messages=[user(WEATHER)], tools=[CHAT_TOOL]
        ) as stream:
            kinds = {event.type for event in stream}
            whole = stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        [called] = whole.choices[0].message.tool_calls
        assert json.loads(called.function.arguments) == {"city": "Tokyo"}

    @pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
    def test_a_conversation_with_a_tool_is_one_trajectory(
        self, client: Any, episode: Episode, streamed: bool
    ) -> None:
        messages: list[Any] = [user(WEATHER)]
        for _ in range(2):
            if streamed:
                with client.chat.completions.stream(
                    model=MODEL, messages=messages, tools=[CHAT_TOOL]
                ) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                response = client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
                message = response.choices[0].message
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            for called in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": called.id, "content": SUNNY})
        assert messages[-1]["content"] == f"The answer is {SUNNY}."
        messages.append(user("thanks, hello"))
        client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
        episode.check(turns=3)
        assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2, 3, 4]

    def test_a_tool_can_be_required_or_named(self, client: Any) -> None:
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            response = client.chat.completions.create(
                model=MODEL, messages=[user("hello")], tools=[CHAT_TOOL], tool_choice=choice
            )
            [called] = response.choices[0].message.tool_calls
            assert called.function.name == "get_weather"
            assert set(json.loads(called.function.arguments)) == {"city"}

    def test_a_reply_in_a_schema(self, client: Any) -> None:
        wanted: Any = {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        }
        response = client.chat.completions.create(model=MODEL, messages=[user(ADA)], response_format=wanted)
        assert json.loads(response.choices[0].message.content) == {"name": "Ada", "age": 36}
        response = client.chat.completions.create(
            model=MODEL, messages=[user("JSON please")], response_format={"type": "json_object"}
        )
        assert isinstance(json.loads(response.choices[0].message.content), dict)

    def test_the_helper_parses_into_a_model(self, client: Any) -> None:
        response = client.chat.completions.parse(model=MODEL, messages=[user(ADA)], response_format=Person)
        assert response.choices[0].message.parsed == Person(name="Ada", age=36)

    def test_several_replies(self, client: Any, episode: Episode) -> None:
        response = client.chat.completions.create(model=MODEL, messages=[user("hello")], n=3)
        assert [choice.index for choice in response.choices] == [0, 1, 2]
        assert all(choice.message.content == HELLO for choice in response.choices)
        episode.check(turns=3)

    def test_log_probabilities_and_alternatives(self, client: Any) -> None:
        response = client.chat.completions.create(
            model=MODEL, messages=[user("hello")], logprobs=True, top_logprobs=3
        )
        entries = response.choices[0].logprobs.content
        assert entries[0].logprob == pytest.approx(-1 / 64)
        assert len(entries[0].top_logprobs) == 3

    def test_penalties_and_biases(self, client: Any) -> None:
        response = client.chat.completions.create(
            model=MODEL,
            messages=[user("hello")],
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={"65": -100},
            max_completion_tokens=5,
            stop=["never sampled"],
        )
        assert response.choices[0].finish_reason == "length"
        assert response.choices[0].message.content == HELLO[:5]

    def test_errors_are_the_sdks_own(self, client: Any) -> None:
        with pytest.raises(openai.NotFoundError) as found:
            client.chat.completions.create(model="no-such-model", messages=[user("hello")])
        assert found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=[user("hello")], temperature=9)
        assert refused.value.param == "temperature"
        image: Any = [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": image}])
        assert "image_url" in str(refused.value)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").chat.completions.create(
                model=MODEL, messages=[user("hello")]
            )


class TestModels:
    def test_the_list_and_one(self, client: Any) -> None:
        assert MODEL in [model.id for model in client.models.list()]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("no-such-model")


class TestCompletions:
    def test_text(self, client: Any, episode: Episode) -> None:
        response = client.completions.create(model=MODEL, prompt="hello", max_tokens=100)
        assert response.choices[0].text == HELLO
        assert response.usage.completion_tokens > 0
        episode.check(turns=1)

    def test_token_ids(self, client: Any) -> None:
        assert (
            client.completions.create(model=MODEL, prompt=[71, 68, 75, 75, 78], max_tokens=100)
            .choices[0]
            .text
            == HELLO
        )

    def test_a_stream(self, client: Any) -> None:
        stream = client.completions.create(model=MODEL, prompt="count to 5", stream=True)
        assert "".join(c.choices[0].text for c in stream if c.choices) == "1, 2, 3, 4, 5"

    def test_an_error(self, client: Any) -> None:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no-such-model", prompt="hello")


class TestResponses:
    def test_a_reply_with_its_usage(self, client: Any, episode: Episode) -> None:
        response = client.responses.create(model=MODEL, input="hello", instructions="Be short.")
        assert response.output_text == HELLO
        assert response.status == "completed"
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0
        episode.check(turns=1)

    async def test_async(self, episode: Episode) -> None:
        async with async_client(episode) as client:
            assert (await client.responses.create(model=MODEL, input="hello")).output_text == HELLO
            stream = await client.responses.create(model=MODEL, input="hello", stream=True)
            assert [event.type async for event in stream][-1] == "response.completed"

    def test_a_stream(self, client: Any) -> None:
        with client.responses.stream(model=MODEL, input="count to 5") as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            whole = stream.get_final_response()
        assert text == whole.output_text == "1, 2, 3, 4, 5"

    @pytest.mark.parametrize("remembered", [False, True], ids=["items", "previous_response_id"])
    def test_a_conversation_with_a_tool_is_one_trajectory(
        self, client: Any, episode: Episode, remembered: bool
    ) -> None:
        first = client.responses.create(model=MODEL, input=WEATHER, tools=[RESPONSE_TOOL])
        [called] = [item for item in first.output if item.type == "function_call"]
        assert json.loads(called.arguments) == {"city": "Tokyo"}
        result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": SUNNY}
        if remembered:
            second = client.responses.create(
                model=MODEL, input=[result], tools=[RESPONSE_TOOL], previous_response_id=first.id
            )
        else:
            items: Any = [
                user(WEATHER),
                *[item.model_dump(exclude_none=True) for item in first.output],
                result,
            ]
            second = client.responses.create(model=MODEL, input=items, tools=[RESPONSE_TOOL])
        assert second.output_text == f"The answer is {SUNNY}."
        episode.check(turns=2)
        assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]

    def test_a_streamed_tool_call(self, client: Any) -> None:
        with client.responses.stream(model=MODEL, input=WEATHER, tools=[RESPONSE_TOOL]) as stream:
            kinds = {event.type for event in stream}
            whole = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        assert [item.type for item in whole.output if item.type != "reasoning"] == ["function_call"]

    def test_the_helper_parses_into_a_model(self, client: Any) -> None:
        response = client.responses.parse(model=MODEL, input=ADA, text_format=Person)
        assert response.output_parsed == Person(name="Ada", age=36)

    def test_it_is_stored_and_can_be_deleted(self, client: Any) -> None:
        made = client.responses.create(model=MODEL, input="hello")
        assert client.responses.retrieve(made.id).output_text == HELLO
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)

    def test_errors_are_the_sdks_own(self, client: Any) -> None:
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="no-such-model", input="hello")
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=MODEL, input="hello", temperature=9)
