"""inspect-ai: evals through its `openai-api` and `anthropic` providers, with a solver that uses a tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inspect_ai
import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode


@tool
def get_weather() -> Any:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        assert city == "Tokyo"
        return SUNNY

    return execute


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request: pytest.FixtureRequest, episode: Episode) -> Any:
    return model_of(request.param, episode)


def model_of(kind: str, episode: Episode, name: str = MODEL, **config: Any) -> Any:
    settings = GenerateConfig(max_retries=0, **config)
    if kind == "anthropic":
        return get_model(
            f"anthropic/{name}",
            base_url=episode.root,
            api_key=episode.api_key,
            config=settings,
            memoize=False,
        )
    return get_model(
        f"openai-api/headgate/{name}",
        base_url=episode.base_url,
        api_key=episode.api_key,
        config=settings,
        memoize=False,
        responses_api=kind == "responses",
    )


def evaluated(task: Any, model: Any, folder: Path) -> Any:
    [log] = inspect_ai.eval(task, model=model, log_dir=str(folder), display="none", fail_on_error=False)
    return log


def test_an_eval_with_a_tool(model: Any, episode: Episode, tmp_path: Path) -> None:
    sample = Sample(input=WEATHER, target=SUNNY)
    task = Task([sample], solver=[use_tools(get_weather()), generate()], scorer=includes())
    log = evaluated(task, model, tmp_path)
    assert log.status == "success", log.error
    assert log.samples[0].error is None, log.samples[0].error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert log.samples[0].output.usage.output_tokens > 0
    episode.check(turns=2)


def test_an_eval_of_a_react_agent(model: Any, episode: Episode, tmp_path: Path) -> None:
    sample = Sample(input=WEATHER, target=SUNNY)
    task = Task([sample], solver=react(tools=[get_weather()]), scorer=includes(), message_limit=8)
    log = evaluated(task, model, tmp_path)
    assert log.status == "success", log.error
    assert log.samples[0].error is None, log.samples[0].error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    episode.check(turns=2)


async def test_a_reply_with_log_probabilities(episode: Episode) -> None:
    done = await model_of("chat", episode, logprobs=True, top_logprobs=2).generate("hello")
    assert done.completion == HELLO
    assert len(done.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_an_error_is_raised(episode: Episode) -> None:
    with pytest.raises(Exception, match="does not exist"):
        await model_of("chat", episode, "no-such-model").generate("hello")
