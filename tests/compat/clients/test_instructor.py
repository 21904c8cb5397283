"""instructor: typed replies by tools and by JSON schema, and what it does with one that does not fit."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from pydantic import BaseModel

from tests.compat.clients.gate import ADA, MODEL, Episode


class Person(BaseModel):
    name: str
    age: int


def client_of(episode: Episode, mode: Any) -> Any:
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def extract(client: Any, text: str, retries: int = 0) -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": text}]
    person = client.chat.completions.create(
        model=MODEL, response_model=Person, messages=messages, max_retries=retries
    )
    assert isinstance(person, Person)
    return person.model_dump()


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_a_typed_reply(mode: Any, episode: Episode) -> None:
    assert extract(client_of(episode, mode), ADA) == {"name": "Ada", "age": 36}
    episode.check(turns=1)


def test_a_reply_that_does_not_fit_is_requested_again(episode: Episode) -> None:
    text = f"""{ADA}
SCRIPT: Person {{"name": "Ada", "age": "unknown"}}
SCRIPT: Person {{"name": "Ada", "age": 36}}"""
    assert extract(client_of(episode, instructor.Mode.TOOLS), text, 2) == {"name": "Ada", "age": 36}
    episode.check(turns=2)
