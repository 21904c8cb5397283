"""Episodes that fail are counted next to the reward, and too many of them end a run, whichever process runs the agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.grading import grading as gateway_grading
from headgate.client import AgentCrashed, EpisodeRunner, Task, driver
from headgate.client.agents import FunctionAgent
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import within
from tests.unit.trainer.runs import loop_of, settings_of
from trainer.errors import TooManyFailed
from trainer.loop.episode_counts import FailedEpisodes

OLD = {"rewarded": 1000, "agent_failed": 500}


def test_the_share_is_of_what_ended_since_the_step_before_and_of_failures_alone() -> None:
    excluded = FailedEpisodes(0.5)
    excluded.update(OLD)
    assert excluded.figures() == {}
    excluded.update(
        {"rewarded": 1006, "agent_failed": 501, "tool_failed": 1, "surplus": 40, "driver_stopped": 9}
    )
    assert excluded.figures() == {
        "excluded_share": 0.25, "excluded/agent_failed": 1.0, "excluded/tool_failed": 1.0
    }  # fmt: skip
    excluded.update({"rewarded": 1010, "agent_failed": 3, "tool_failed": 1})
    assert excluded.figures() == {"excluded_share": 0.0}, "retention deleted some"


def test_the_bound_waits_for_twenty_episodes_and_names_the_reasons() -> None:
    excluded = FailedEpisodes(0.5)
    excluded.update({})
    excluded.update({"tool_failed": 12})
    with pytest.raises(
        TooManyFailed, match=r"13 of the last 20 .*\(12 tool_failed, 1 grading_failed\).*is 0.5"
    ):
        excluded.update({"tool_failed": 12, "grading_failed": 1, "rewarded": 7})
    never = FailedEpisodes(1.0)
    never.update({})
    never.update({"tool_failed": 100})


async def test_a_run_whose_episodes_fail_ends_although_others_run_them(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    async with loop_of(gateway, settings) as loop, within("the trainer is through", 60):
        await loop._check_failures()
        for number in range(20):
            episode, _ = await gateway.open("task", group_id=f"g{number}")
            await gateway.admin.abandon(episode, "tool_failed", f"boom {number}\nat the end")
        with pytest.raises(TooManyFailed, match=r"20 tool_failed.*the last error: boom 19: at the end$"):
            await loop.train()


async def test_each_kind_of_failure_is_left_out_by_its_reason_and_its_tokens_are_not_trained(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group: two that earn, one of them at its second start; an agent that dies, a tool that is down, a grader that errs."""
    monkeypatch.setattr(gateway_grading, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(driver, "pause_s", lambda failures, jitter: 0.0)
    graders = {
        "broken": {"function": "tests.harness.graders:constant", "retries": 0}
    }  # no `value` in the metadata
    staleness = {"batch": 1, "eta": 0}
    values = settings_for(tiny_model, tmp_path, staleness=staleness, graders=graders, update={"probe": False})
    async with run_gateway(values) as gateway:
        settings = settings_of(gateway, tiny_model, tmp_path, steps=1)
        async with loop_of(gateway, settings) as loop, within("the trainer is through", 60):
            await loop._check_failures()
            runner = EpisodeRunner(gateway.admin, FunctionAgent(OneOfEach()), group_size=5, concurrency=1)
            outcomes = await runner.run([Task("t", {})])
            await loop.train()
        rows = [await gateway.admin.episode(str(outcome.episode_id)) for outcome in outcomes]
    assert [(row["reason"], row["reward"]) for row in rows] == [
        ("rewarded", 1.0),
        ("rewarded", 0.0),
        ("agent_failed", None),
        ("tool_failed", None),
        ("grading_failed", None),
    ]
    (step,) = map(json.loads, (settings.run.dir / "metrics.jsonl").read_text().splitlines())
    assert step["excluded_share"] == 3 / 5
    reasons = {name: count for name, count in step.items() if name.startswith("excluded/")}
    assert reasons == {"excluded/agent_failed": 1, "excluded/grading_failed": 1, "excluded/tool_failed": 1}
    assert (step["reward_mean"], step["episodes"]) == (0.5, 2)
    assert (step["trained_tokens"], step["masked_tokens/crashed_attempt"]) == (2 * TOKENS, TOKENS)


TOKENS = 3


class OneOfEach:
    """An agent whose episodes end differently, in the order in which they are started."""

    def __init__(self) -> None:
        self._started = 0

    async def __call__(self, task: dict[str, Any], base_url: str, api_key: str) -> float | None:
        number, self._started = self._started, self._started + 1
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            message: Any = {"role": "user", "content": "hi"}
            await client.chat.completions.create(model="m", messages=[message], max_tokens=TOKENS)
        match number:
            case 0:
                return 1.0
            case 1 | 3 | 4:  # the second episode's first start, and both of the third
                raise LookupError("the agent has died")
            case 2:
                return 0.0
            case 5 | 6:
                raise AgentCrashed("the tool server is down", "tool_failed")
        return None
