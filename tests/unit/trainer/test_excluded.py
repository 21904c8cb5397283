"""Episodes that fail are counted beside the reward, and too many of them end a run, whoever runs the agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.gateways import RunningGateway
from tests.harness.waiting import within
from tests.unit.trainer.runs import settings_of, trainer_of
from trainer.errors import TooManyExcluded
from trainer.loop.excluded import Excluded

OLD = {"rewarded": 1000, "agent_failed": 500}


def test_the_share_is_of_what_ended_since_the_step_before_and_of_failures_alone() -> None:
    excluded = Excluded(0.5)
    excluded.look(OLD)
    assert excluded.figures() == {}
    excluded.look(
        {"rewarded": 1006, "agent_failed": 501, "tool_failed": 1, "surplus": 40, "driver_stopped": 9}
    )
    assert excluded.figures() == {
        "excluded_share": 0.25, "excluded/agent_failed": 1.0, "excluded/tool_failed": 1.0
    }  # fmt: skip
    excluded.look({"rewarded": 1010, "agent_failed": 3, "tool_failed": 1})
    assert excluded.figures() == {"excluded_share": 0.0}, "retention deleted some"


def test_the_bound_waits_for_twenty_episodes_and_names_the_reasons() -> None:
    excluded = Excluded(0.5)
    excluded.look({})
    excluded.look({"tool_failed": 12})
    with pytest.raises(
        TooManyExcluded, match=r"13 of the last 20 .*\(12 tool_failed, 1 grading_failed\).*is 0.5"
    ):
        excluded.look({"tool_failed": 12, "grading_failed": 1, "rewarded": 7})
    never = Excluded(1.0)
    never.look({})
    never.look({"tool_failed": 100})


async def test_a_run_whose_episodes_fail_ends_although_others_run_them(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    async with trainer_of(gateway, settings) as trainer, within("the trainer is through", 60):
        await trainer._look_at_failures()
        for number in range(20):
            episode, _ = await gateway.open("task", group_id=f"g{number}")
            await gateway.admin.abandon(episode, "tool_failed")
        with pytest.raises(TooManyExcluded, match="20 tool_failed"):
            await trainer.train()
