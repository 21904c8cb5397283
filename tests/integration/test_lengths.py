"""Predicted lengths of calls: set when they begin, learnt when they are over, and from the store at a start."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ConfigError, Settings
from gateway.generation.call import Call
from gateway.services import open_services
from scheduler.lengths import Features
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import until

LEARNT = {"ranker": "boosted"}
LONG, SHORT = "write a long story", "yes or no"


class Watched:
    """Every call of a gateway that begins, and whatever its ranker is shown."""

    def __init__(self, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.learnt: list[tuple[Features, int]] = []
        lengths = gateway.services.lengths
        self.ranker = ranker = lengths._models[gateway.model.name].ranker
        begin: Callable[..., Any] = lengths.begin
        learn: Callable[..., Any] = ranker.learn

        def watched(model: str, episode: Any, call: Call, *talk: Any) -> Any:
            self.calls.append(call)
            return begin(model, episode, call, *talk)

        def watched_learn(features: Features, length: int) -> None:
            self.learnt.append((features, length))
            learn(features, length)

        monkeypatch.setattr(lengths, "begin", watched)
        monkeypatch.setattr(ranker, "learn", watched_learn)


async def talk(gateway: RunningGateway, task: str, text: str, tokens: int, turns: int = 1) -> None:
    """Run a conversation in which every reply has `tokens` tokens."""
    await gateway.fake("faults", endless=True)
    episode, headers = await gateway.open(task, group_id=f"{task}-{text[:4]}", group_size=1024)
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": text})
        response = (await gateway.chat(headers, messages=messages, max_tokens=tokens)).json()
        messages.append(response["choices"][0]["message"])
    await gateway.admin.reward(episode, 0.0)


async def test_later_calls_are_predicted_from_earlier_ones(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings_for(tiny_model, tmp_path, lengths=LEARNT, staleness={"batch": 64})
    async with run_gateway(values) as gateway:
        seen = Watched(gateway, monkeypatch)
        await talk(gateway, "task", SHORT, 4, turns=2)
        assert [call.hints.expected for call in seen.calls] == [0, 4]
        first, second = (features for features, _ in seen.learnt)
        assert (first.task, first.turn, first.messages, first.most) == ("task", 0, 1, 4)
        assert (second.turn, second.messages, second.episode) == (1, 3, first.episode)
        assert [length for _, length in seen.learnt] == [len(call.turn.ids) for call in seen.calls]
        assert (await status(gateway))["tail_recall"] is None
        for features, _ in list(seen.learnt) * 32:
            seen.ranker.learn(features, 4)
        await until(lambda: seen.ranker._models._trees is not None, "it has been fitted", 60)
        await gateway.services.lengths.close()  # calls go on
        await talk(gateway, "task", SHORT, 4)
        assert 2 <= seen.calls[-1].hints.expected <= 4
        assert (await status(gateway))["calls"] == 2
        for features, _ in list(seen.learnt) * 32:
            seen.ranker.learn(features, 4)


async def test_a_start_learns_from_the_store(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 64})
    async with run_gateway(values) as gateway:
        for i in range(3):
            await talk(gateway, f"task-{i}", LONG, 12, turns=2)
        recorded = []
        for row in await gateway.admin.episodes():
            calls = (await gateway.admin.episode(row["id"]))["calls"]
            for i, call in enumerate(calls):
                tokens = call["prompt_tokens"], call["completion_tokens"]
                recorded.append((call["id"], row["task_id"], i, *tokens))
    shown: list[tuple[Any, ...]] = []

    def learn(_ranker: Any, f: Features, length: int) -> None:
        shown.append((f.call, f.task, f.turn, len(f.prompt), length))

    monkeypatch.setattr("scheduler.lengths.History.learn", learn)
    async with run_gateway(values | {"lengths": {"ranker": "history"}}):
        assert len(shown) == 6
        assert sorted(shown) == sorted(recorded)


async def test_without_a_ranker_nothing_is_expected(gateway: RunningGateway) -> None:
    assert gateway.services.lengths is None
    assert await status(gateway) is None
    assert "headgate_length" not in (await gateway.http.get("/metrics")).text


async def test_calls_that_were_not_sampled_to_their_end_teach_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings_for(tiny_model, tmp_path, lengths=LEARNT, staleness={"batch": 64})
    async with run_gateway(values) as gateway:
        seen = Watched(gateway, monkeypatch)
        await gateway.fake("faults", hold_after=2)
        episode, headers = await gateway.open("task")
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": LONG}],
            "max_tokens": 200,
            "stream": True,
        }
        url = "/v1/chat/completions"
        rewarded = False
        async with gateway.http.stream("POST", url, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:") and not rewarded:
                    await gateway.admin.reward(episode, 0.0)  # ends the episode, and what runs in it
                    rewarded = True
        assert rewarded
        assert len(seen.calls) == 1
        assert seen.learnt == []


async def status(gateway: RunningGateway) -> Any:
    return (await gateway.admin.status())["lengths"]


async def test_a_ranker_without_its_package_is_refused_at_the_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ConfigError, match=r"\[lengths\] ranker: .*\[lengths\]'"):
        async with open_services(Settings.model_validate(settings_for(tiny_model, tmp_path, lengths=LEARNT))):
            pass


async def test_the_gauges_show_how_good_predictions_were(tiny_model: Path, tmp_path: Path) -> None:
    """Five tasks whose calls have 2, 4, 6, 8 and 10 tokens; three calls of the first surprise with 20."""
    values = settings_for(tiny_model, tmp_path, lengths={"ranker": "history"}, staleness={"batch": 256})
    async with run_gateway(values) as gateway:
        for i in range(11):
            for task in range(5):
                await talk(gateway, f"task-{task}", SHORT, 20 if task == 0 and i >= 8 else 2 * task + 2)
        text = (await gateway.http.get("/metrics")).text
    shown = {
        name: float(value) for name, value in re.findall(r"^headgate_length_(\w+)\{.*\} (\S+)$", text, re.M)
    }
    expected = [expected_after([2] * 8 + [20] * more) for more in range(3)]
    assert shown["mean_error"] == pytest.approx(sum(20 - tokens for tokens in expected) / 50)
    # All ten of the last task were expected to be the longest ten; with three others, seven of them were, by lot.
    assert shown["tail_recall"] == pytest.approx(0.7)
    # From the 21st on, calls above the 80% quantile of those before: of the last task alone, and of it not the first ones.
    assert 0 < shown["tail_share"] <= 0.2


def expected_after(lengths: list[int]) -> float:
    """The mean of lengths in which each counts 0.97 of the next."""
    counts = [0.97**age for age in reversed(range(len(lengths)))]
    return sum(count * length for count, length in zip(counts, lengths, strict=True)) / sum(counts)
