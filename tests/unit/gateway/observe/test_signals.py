"""The checklist of health: what each value is of, and one judgment for Health and for the charts of a run."""

from __future__ import annotations

from typing import Any

from gateway.observe.signals import StepFigures, judge
from trainer.loop.episode_counts import FailedEpisodes


def signals(steps: StepFigures, fall: float | None = None, **reasons: int) -> dict[str, dict[str, Any]]:
    return {signal["name"]: signal for signal in judge(steps, reasons, 10, 1, 0, 0, {}, 0, fall)}


def test_a_figure_is_of_the_newest_step_that_has_it_and_names_that_step() -> None:
    newest = {"logprob_gap_mean": (4e-7, 27), "idle_share": (0.47, 30), "trained_tokens": (80.0, 30)}
    found = signals(
        StepFigures({**newest, "masked_tokens/late": (20.0, 29), "skipped_steps": (1.0, 12)}, True)
    )
    assert found["logprob_gap_mean"]["words"] == "4e-07 nats in step 27"
    assert (found["idle_share"]["state"], found["idle_share"]["in_step"]["state"]) == ("warn", "warn")
    assert found["late_share"]["value"] == 0.0, "a step without late tokens leaves the figure out"
    assert found["skipped_steps"]["value"] == 0.0
    assert found["kl_recorded_k3"]["words"] == "no step of this run has measured it"
    assert signals(StepFigures())["kl_recorded_k3"]["words"] == "no step of a trainer is known yet"


def test_equal_rewards_are_judged_before_the_filter_where_that_is_known() -> None:
    both = {"equal_reward_groups": (0.0, 3), "equal_reward_groups_all": (0.7, 3)}
    judged = signals(StepFigures(both, True))["equal_reward_groups"]
    assert (judged["value"], judged["state"]) == (0.7, "warn")
    assert judged["in_step"]["figure"] == "equal_reward_groups_all"
    old = signals(StepFigures({"equal_reward_groups": (0.2, 3)}, True))["equal_reward_groups"]
    assert (old["value"], old["state"]) == (0.2, "ok")


def test_a_fall_of_live_rewards_is_an_alarm_and_is_shown_where_it_is_known() -> None:
    assert "live_reward_fall" not in signals(StepFigures())
    states = [signals(StepFigures(), fall)["live_reward_fall"]["state"] for fall in (0.0, 0.2)]
    assert states == ["ok", "bad"]


def test_failures_of_all_time_and_of_a_step_are_two_values_with_one_range() -> None:
    found = signals(StepFigures({"excluded_share": (0.0, 9)}, True), rewarded=6, agent_failed=3, no_calls=1)
    excluded = found["excluded_share"]
    assert (excluded["value"], excluded["state"]) == (0.4, "bad")
    assert excluded["words"] == "40.0% of the episodes that were rewarded or failed"
    assert excluded["in_step"] == {"figure": "excluded_share", "value": 0.0, "step": 9, "state": "ok"}
    assert (found["no_calls"]["value"], found["no_calls"]["state"]) == (0.1, "bad")


def test_health_counts_as_failures_what_the_trainer_counts_and_links_to_the_commonest() -> None:
    ended = {
        "rewarded": 6,
        "time_limit": 3,
        "a reason of the agent's own": 1,
        "surplus": 40,
        "interrupted": 9,
    }
    excluded = FailedEpisodes(1.0)
    excluded.update({})
    excluded.update(ended)
    found = signals(StepFigures(), **ended)["excluded_share"]
    assert found["value"] == excluded.figures()["excluded_share"] == 0.4
    assert found["link"] == {"view": "episodes", "query": {"reason": "time_limit"}}
    assert signals(StepFigures(), rewarded=6)["excluded_share"]["link"] is None
