"""magentic: prompts as functions, with a stream, a tool and a typed reply. It reads annotations, so they are not strings."""

import pytest
from magentic import OpenaiChatModel, StreamedStr, prompt, prompt_chain
from pydantic import BaseModel

from tests.compat.clients.gate import ADA, HELLO, MODEL, SUNNY, WEATHER, Episode


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Tokyo"
    return SUNNY


@pytest.fixture
def model(episode: Episode) -> OpenaiChatModel:
    return OpenaiChatModel(MODEL, api_key=episode.api_key, base_url=episode.base_url)


def test_a_reply(model: OpenaiChatModel, episode: Episode) -> None:
    @prompt("hello", model=model)
    def greet() -> str: ...

    assert greet() == HELLO
    episode.check(turns=1)


def test_a_stream(model: OpenaiChatModel) -> None:
    @prompt("count to 5", model=model)
    def count() -> StreamedStr: ...

    assert "".join(count()) == "1, 2, 3, 4, 5"


def test_a_tool_is_one_trajectory(model: OpenaiChatModel, episode: Episode) -> None:
    @prompt_chain(WEATHER, functions=[get_weather], model=model)
    def weather() -> str: ...

    assert weather() == f"The answer is {SUNNY}."
    episode.check(turns=2)


def test_a_typed_reply(model: OpenaiChatModel) -> None:
    @prompt(ADA, model=model)
    def made() -> Person: ...

    assert made() == Person(name="Ada", age=36)
