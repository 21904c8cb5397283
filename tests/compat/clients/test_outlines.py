"""outlines: text, a stream and typed replies, as an OpenAI client and as one of vLLM."""

from __future__ import annotations

from typing import Any

import openai
import outlines
import pytest
from pydantic import BaseModel

from tests.compat.clients.gate import ADA, HELLO, MODEL, Episode


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=[outlines.from_openai, outlines.from_vllm], ids=["openai", "vllm"])
def model(request: pytest.FixtureRequest, episode: Episode) -> Any:
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    return request.param(client, MODEL)


def test_a_reply(model: Any, episode: Episode) -> None:
    assert model("hello") == HELLO
    episode.check(turns=1)


def test_a_stream(model: Any) -> None:
    assert "".join(model.stream("count to 5")) == "1, 2, 3, 4, 5"


def test_a_typed_reply(model: Any) -> None:
    assert Person.model_validate_json(model(ADA, Person)) == Person(name="Ada", age=36)
