"""Models behind the gateway that judge episodes: their prompts, what is recorded, and the rewards of their replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from gateway.grading import grading as gateway_grading
from gateway.grading import judge as gateway_judge
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway, serve
from tests.harness.records import nodes_of
from tests.harness.upstream import WHOLE, Elsewhere, behind
from tests.harness.waiting import TimeLimits

WAIT_S = 60.0


@asynccontextmanager
async def judged(
    model: Path, work: Path, reply_of: Callable[[str], str | Response], finish: str = "stop", **grader: Any
) -> AsyncIterator[tuple[RunningGateway, list[str]]]:
    """Run a gateway whose grader `good` calls `oracle`, which replies by `reply_of`; yield it and the questions.

    `grader`: its settings; `gateway`, if it is there, those of the gateway."""
    elsewhere, port, questions = Elsewhere(), free_port(), []

    async def respond(body: dict[str, Any]) -> Response:
        questions.append(body["messages"][0]["content"])
        reply = reply_of(questions[-1])
        if isinstance(reply, Response):
            return reply
        message = {"role": "assistant", "content": reply}
        return JSONResponse({**WHOLE, "choices": [{"index": 0, "message": message, "finish_reason": finish}]})

    elsewhere.respond = respond
    overrides = grader.pop("gateway", {})
    graders = {"good": {"judge": "oracle", "retries": 0, **grader}}
    staleness = {"batch": 1, "eta": 0}
    async with (
        serve(elsewhere.app(), port),
        behind(model, work, port, graders=graders, staleness=staleness, **overrides) as gateway,
    ):
        yield gateway, questions


async def close(gateway: RunningGateway, metadata: dict[str, Any], turns: int = 1) -> tuple[str, Any]:
    """Run an episode of the group g with `turns` turns, and return it with its end."""
    episode, headers = await gateway.open("t", group_id="g", group_size=2, metadata=metadata)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for _ in range(turns):
        response = (await gateway.chat(headers, messages=messages, max_tokens=4)).json()
        messages += [response["choices"][0]["message"], {"role": "user", "content": "and?"}]
    return episode, await gateway.admin.close_episode(episode, WAIT_S)


async def test_a_rubric_rewards_each_turn_and_its_own_calls_are_recorded_and_never_trained(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The engine replies the same to equal prompts, so the second episode gets the judgment of the first."""
    criteria = {"short": "It is short.", "kind": "It is kind."}
    reply_of = lambda question: "1: 10\n2: 5" if "and?" in question else "1: 1/10\n2. 2"  # noqa: E731
    async with judged(tiny_model, tmp_path, reply_of, criteria=criteria, each_turn=True) as (
        gateway,
        questions,
    ):
        (first, fate), (second, same) = [await close(gateway, {}, turns=2) for _ in range(2)]
        assert fate["reward"] == same["reward"] == pytest.approx((0.15 + 0.75) / 2)
        assert fate["components"] == {"good": fate["reward"], "calls": fate["reward"]}
        assert len(questions) == 2
        assert all(f"{n}: {text}" in questions[0] for n, text in enumerate(criteria.values(), 1))
        lease = await gateway.admin.lease("trainer")
        (group,) = (await gateway.admin.leased_groups(lease, wait_s=WAIT_S)).groups
        assert {episode.episode_id for episode in group.episodes} == {first, second}
        for episode in group.episodes:
            rewards = [node.reward for node in episode.nodes if node.sampled]
            assert rewards == pytest.approx([0.15 / 2, 0.75 / 2])
        judging = await gateway.admin.episodes(mode="eval")
        assert sorted(row["reward"] for row in judging) == pytest.approx([0.15, 0.75])
        for row in judging:
            whole = await gateway.admin.episode(row["id"])
            assert (whole["task_id"], whole["group_id"]) == ("judge/good", f"judge/{first}")
            assert [call["model"] for call in whole["calls"]] == ["oracle"]
            assert not await nodes_of(gateway, row["id"])


async def test_a_rubric_of_the_next_turn_leaves_out_the_last_one(tiny_model: Path, tmp_path: Path) -> None:
    options = {"criteria": {"kind": "It is kind."}, "each_turn": True, "next_turn": True}
    async with judged(tiny_model, tmp_path, lambda _question: "1: 5", **options) as (gateway, questions):
        _, fate = await close(gateway, {}, turns=2)
        assert (fate["reason"], fate["reward"], len(questions)) == ("rewarded", 0.5, 1)
        assert "and?" in questions[0].partition("<next>")[2]


@pytest.mark.parametrize(
    ("reply_of", "reward"),
    [
        (lambda question: "I prefer A", 0.5),
        (lambda question: "B" if question.index("the other") > question.index("<reply B>") else "A", 0.0),
        (lambda question: "A" if question.index("the other") > question.index("<reply B>") else "B", 1.0),
        (lambda question: "tie", 0.5),
    ],
    ids=["the first place", "the other", "the own", "neither"],
)
async def test_a_comparison_is_made_both_ways_round(
    reply_of: Callable[[str], str], reward: float, tiny_model: Path, tmp_path: Path
) -> None:
    async with judged(tiny_model, tmp_path, reply_of, reference_key="reference") as (gateway, questions):
        _, fate = await close(gateway, {"reference": "the other"})
        assert (fate["reason"], fate["reward"], len(questions)) == ("rewarded", reward, 2)


async def test_a_reply_without_a_score_is_requested_again_and_leaves_the_episode_out(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_grading, "_FIRST_BACKOFF_S", 0.01)
    criteria = {"short": "It is short."}
    reply_of = lambda question: "I would rather not."  # noqa: E731
    async with judged(tiny_model, tmp_path, reply_of, criteria=criteria, retries=1) as (gateway, questions):
        episode, fate = await close(gateway, {})
        assert (fate["reason"], fate["reward"]) == ("grading_failed", None)
        row = await gateway.admin.episode(episode)
        assert "no score from 0 to 10 for criterion 1: 'I would rather not.'" in row["error"]
        assert len(questions) == 2
        judging = await gateway.admin.episodes(mode="eval")
        assert {row["reason"] for row in judging} == {"judgment_unreadable"}


@pytest.mark.parametrize(
    ("turns", "reason", "error"),
    [(1, "grading_failed", "cut after max_tokens = 1024"), (0, "no_calls", "the agent called no model")],
)
async def test_a_cut_judgment_and_nothing_to_judge_give_no_reward(
    turns: int, reason: str, error: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The judge would have written 10: the 1 at which it was cut is not its score."""
    criteria = {"short": "It is short."}
    async with judged(tiny_model, tmp_path, lambda question: "1: 1", "length", criteria=criteria) as (
        gateway,
        questions,
    ):
        episode, fate = await close(gateway, {}, turns)
        assert (fate["reason"], fate["reward"], len(questions)) == (reason, None, turns)
        assert error in (await gateway.admin.episode(episode))["error"]


@pytest.mark.parametrize(
    ("reply_of", "reason", "error"),
    [
        (None, "judge_late", "was not done within 60 s"),
        (lambda question: PlainTextResponse("overloaded", 503), "judge_failed", "503"),
        (lambda question: JSONResponse({"choices": []}), "judgment_unreadable", "no chat completion"),
    ],
    ids=["late", "refused", "empty"],
)
async def test_a_judge_that_gives_no_reply_ends_its_own_episode_with_the_reason(
    reply_of: Callable[[str], Response] | None,
    reason: str,
    error: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = TimeLimits(monkeypatch, gateway_judge)

    def late(question: str) -> Response:
        """The time is over when the judge has the request, and no sooner, however slow the machine is."""
        limits.end()
        return StreamingResponse(never())

    grader = {"criteria": {"short": "It is short."}, "timeout_s": 60}
    async with judged(tiny_model, tmp_path, reply_of or late, **grader) as (gateway, _):
        episode, fate = await close(gateway, {})
        assert fate["reason"] == "grading_failed"
        assert error in (await gateway.admin.episode(episode))["error"]
        (judging,) = await gateway.admin.episodes(mode="eval")
        assert (judging["state"], judging["reason"]) == ("closed", reason)
        assert error in (await gateway.admin.episode(judging["id"]))["error"]


async def never() -> AsyncIterator[bytes]:
    """The body of a response that does not begin."""
    await asyncio.Event().wait()
    yield b""


async def test_a_project_sees_what_judged_its_episodes(tiny_model: Path, tmp_path: Path) -> None:
    """The gateway opens judges' episodes under its root key, of the model that is judged."""
    key = "the-key-of-the-team-that-is-judged"
    given = {
        "admin": {"key": "the-root-key-of-the-test"},
        "projects": {"team": {"key": key, "models": ["demo"]}},
    }
    criteria = {"short": "It is short."}
    async with (
        judged(tiny_model, tmp_path, lambda question: "1: 10", criteria=criteria, gateway=given) as (
            gateway,
            _,
        ),
        GatewayClient(gateway.url, key) as team,
    ):
        episode, _ = await close(gateway, {})
        (judging,) = await team.episodes(mode="eval")
        whole = await team.episode(judging["id"])
        assert (whole["task_id"], whole["group_id"], whole["reward"]) == (
            "judge/good",
            f"judge/{episode}",
            1.0,
        )
        (call,) = whole["calls"]
        assert (await team.exchange(judging["id"], call["id"]))["response"]
