"""langchain-openai: `langchain-tests`' standard suites for chat models, with ChatOpenAI pointed at the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from tests.compat.clients.gate import HELLO, Episode

NAME = "gpt-4o"


class Standard:
    """The model's abilities, for both suites: no images, no audio, no documents; all else."""

    chat_model_params: dict[str, Any] = {}  # noqa: RUF012
    """Filled by the fixture: langchain's suites read the model's parameters from the class."""

    @pytest.fixture(autouse=True)
    def _episode(self, episode: Episode) -> None:
        self.chat_model_params.update(
            model=NAME, base_url=episode.base_url, api_key=episode.api_key, max_retries=0, stream_usage=True
        )
        return

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI


class TestChatUnit(Standard, ChatModelUnitTests):
    """No call is made."""


class TestChatStandard(Standard, ChatModelIntegrationTests):
    """Chat completions."""

    chat_model_params: dict[str, Any] = {"use_responses_api": False}  # noqa: RUF012

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "gpt-4o-mini"


class TestResponsesStandard(TestChatStandard):
    """Responses."""

    chat_model_params: dict[str, Any] = {"use_responses_api": True}  # noqa: RUF012


def test_log_probabilities_reach_the_message(episode: Episode) -> None:
    model = ChatOpenAI(model=NAME, base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    reply = model.bind(logprobs=True).invoke("hello")
    assert reply.content == HELLO
    assert len(reply.response_metadata["logprobs"]["content"]) == len(HELLO) + 1
