"""Identification of callers: keys of episodes and of agents, named episodes, and conversations that are distinguished."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.callers import KEYS, Stage, assistant, chat, code, notice_of, send, user
from tests.harness.records import nodes_of, path_to
from tests.harness.scripted import TOOL_CALL, TOOLS, USER, scripted_gateway
from tests.harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
async def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    agents: dict[str, Any] = {name: {"key": key} for name, key in KEYS.items()}
    agents["few"]["max_episodes"] = 2
    agents["brief"]["idle_s"] = 100.0
    work = tmp_path_factory.mktemp("callers")
    models = {"demo": {"path": str(tiny_model), "thinking": False}}
    async with scripted_gateway(tiny_model, work, agents=agents, models=models) as running:
        yield running


async def test_conversations_that_share_a_key_are_episodes_of_their_own(stage: Stage) -> None:
    ones, others = [user("one")], [user("other")]
    first = await chat(stage, "ann", ones, "1")
    second = await chat(stage, "ann", others, "2")
    assert first != second
    for turn in range(3):
        ones += [assistant("1" * (turn + 1)), user("go on")]
        others += [assistant("2" * (turn + 1)), user("go on")]
        assert await chat(stage, "ann", ones, "1" * (turn + 2)) == first
        assert await chat(stage, "ann", others, "2" * (turn + 2)) == second
    for episode, own in ((first, 0), (second, 1)):
        row = await stage[0].admin.episode(episode)
        assert (row["agent"], row["mode"], row["notice"], len(row["calls"])) == ("ann", "eval", "", 4)
        nodes = await nodes_of(stage[0], episode)
        given = [request["token_ids"] for request in stage[1].requests[-8:]][own::2]
        assert [path_to(nodes, node) for node in nodes if node["sampled"]] == given
        assert [node["parent"] for node in nodes] == [-1, *range(7)]


async def test_a_call_without_an_earlier_reply_always_opens_an_episode(stage: Stage) -> None:
    same = [user("the same question")]
    first = await chat(stage, "ann", same, "x")
    second = await chat(stage, "ann", same, "y")
    third = await chat(stage, "ann", [*same, user("and another")], "z")
    assert len({first, second, third}) == 3
    assert {await notice_of(stage, episode) for episode in (second, third)} <= {"", "unknown_conversation"}


async def test_a_match_needs_a_turn_that_was_sampled_here(stage: Stage) -> None:
    question = [user("what was it?")]
    first = await chat(stage, "ann", question, "this")
    made_up = await chat(stage, "ann", [*question, assistant("that"), user("why?")])
    assert made_up != first
    assert await notice_of(stage, made_up) == "unknown_conversation"
    assert await chat(stage, "ann", [*question, assistant("this"), user("why?")]) == first


async def test_the_longest_recorded_beginning_decides(stage: Stage) -> None:
    """A conversation that was edited or shortened goes back to the one that it comes from."""
    begin = [user("begin"), assistant("one"), user("two?")]
    first = await chat(stage, "ann", begin[:1], "one")
    assert await chat(stage, "ann", begin, "two") == first
    edited = [*begin, assistant("not two"), user("three?")]
    assert await chat(stage, "ann", edited, "three") == first
    assert await chat(stage, "ann", [*edited, assistant("three"), user("four?")], "four") == first


async def test_a_reply_that_another_key_was_given_is_unknown(stage: Stage) -> None:
    question = [user("a secret")]
    first = await chat(stage, "ann", question, "for ann alone")
    other = await chat(stage, "bob", [*question, assistant("for ann alone"), user("what?")])
    assert other != first
    assert await notice_of(stage, other) == "unknown_conversation"
    assert (await stage[0].admin.episode(other))["agent"] == "bob"


async def test_a_conversation_that_two_episodes_have_opens_a_third(stage: Stage) -> None:
    same = [user("ambiguous")]
    both = {await chat(stage, "ann", same, "equal"), await chat(stage, "ann", same, "equal")}
    assert len(both) == 2
    longer = [*same, assistant("equal"), user("which?")]
    third = await chat(stage, "ann", longer, "neither")
    assert third not in both
    assert await notice_of(stage, third) == "ambiguous_conversation"
    why = await stage[0].admin.why(third)
    assert "several open episodes" in why["notice_words"]
    assert await chat(stage, "ann", [*longer, assistant("neither"), user("go on")]) == third


async def test_ids_of_tool_calls_distinguish_equal_conversations(stage: Stage) -> None:
    same, calls = [user("add")], {}
    for _ in range(2):
        stage[1].replies.append(TOOL_CALL)
        response = await send(stage, "ann", same, tools=TOOLS)
        calls[response.headers["x-headgate-episode"]] = response.json()["choices"][0]["message"]
    assert len(calls) == 2
    for episode, message in calls.items():
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        unnamed = {**message, "tool_calls": [{**call, "id": "forgotten"}]}
        assert await chat(stage, "ann", [*same, message, result], tools=TOOLS) == episode
        third = await chat(
            stage, "ann", [*same, unnamed, {**result, "tool_call_id": "forgotten"}], tools=TOOLS
        )
        assert third not in calls
        assert await notice_of(stage, third) == "ambiguous_conversation"
        await stage[0].admin.abandon(third, "done")


async def test_a_call_that_forbids_its_tools_goes_on_with_its_conversation(stage: Stage) -> None:
    messages = [user("look it up")]
    first = await chat(stage, "ann", messages, "no", tools=TOOLS, tool_choice="none")
    messages += [assistant("no"), user("look it up now")]
    assert await chat(stage, "ann", messages, "found", tools=TOOLS) == first
    messages += [assistant("found"), user("now answer")]
    assert await chat(stage, "ann", messages, "answered", tools=TOOLS, tool_choice="none") == first
    messages += [assistant("answered"), user("thanks")]
    assert await chat(stage, "ann", messages, "welcome", tools=TOOLS) == first


async def test_a_closed_episode_is_not_opened_again(stage: Stage) -> None:
    messages = [user("a short one")]
    first = await chat(stage, "ann", messages, "done")
    await stage[0].admin.reward(first, 1.0)
    messages += [assistant("done"), user("really?")]
    second = await chat(stage, "ann", messages, "yes")
    assert second != first
    assert await notice_of(stage, second) == "unknown_conversation"
    assert (await stage[0].admin.episode(first))["reward"] == 1.0


@pytest.mark.parametrize("how", ["path", "header"])
async def test_a_request_names_its_episode(stage: Stage, how: str) -> None:
    def naming(episode: str) -> dict[str, Any]:
        return {"path": f"/e/{episode}"} if how == "path" else {"headers": {"X-Headgate-Episode": episode}}

    gateway = stage[0]
    first = await chat(stage, "ann", [USER])
    assert await chat(stage, "ann", [USER], **naming(first)) == first, "without any turn that would match"
    opened, other = await gateway.admin.open_episode("t", mode="eval"), naming(first)
    assert await chat(stage, opened.api_key, [USER], **naming(opened.episode_id)) == opened.episode_id
    for agent, named in (
        (opened.api_key, other),
        ("bob", other),
        ("ann", naming(opened.episode_id)),
        ("ann", naming("ep-none")),
    ):
        response = await send(stage, agent, [USER], **named)
        assert code(response) == (404, "no_episode")
        assert "no episode" in response.json()["error"]["message"]
    await gateway.admin.abandon(first, "enough")
    assert code(await send(stage, "ann", [USER], **naming(first))) == (409, "episode_closed")
    assert code(await send(stage, "bob", [USER], **naming(first))) == (404, "no_episode")


async def test_an_agents_key_reaches_the_episodes_that_were_opened_for_it(stage: Stage) -> None:
    gateway = stage[0]
    opened = await gateway.admin.open_episode("t", mode="eval", agent="ann")
    path = {"path": f"/e/{opened.episode_id}"}
    assert await chat(stage, "ann", [USER], "r", **path) == opened.episode_id
    assert await chat(stage, opened.api_key, [USER], "s") == opened.episode_id, "its own key opens it too"
    assert code(await send(stage, "bob", [USER], **path)) == (404, "no_episode")
    response = await gateway.http.post("/admin/v1/episodes", json={"task_id": "t", "agent": "unknown"})
    assert code(response) == (400, "unknown_agent")


async def test_a_wrong_key_or_name_is_refused_with_the_reason(stage: Stage) -> None:
    gateway = stage[0]
    response = await gateway.http.post("/v1/chat/completions", json={"model": "m", "messages": [USER]})
    assert code(response) == (401, "missing_api_key")
    assert "Authorization" in response.json()["error"]["message"]
    assert code(await send(stage, "the-key-of-no-agent-at-all", [USER])) == (401, "invalid_api_key")
    assert (await send(stage, "ann", [USER], path="/e/")).status_code == 404
    both = await send(stage, "ann", [USER], path="/e/ep-1", headers={"X-Headgate-Episode": "ep-2"})
    assert both.status_code == 400


async def test_an_agent_has_so_many_episodes_open_and_no_more(stage: Stage) -> None:
    first = await chat(stage, "few", [USER], "a")
    await chat(stage, "few", [USER], "b")
    refused = await send(stage, "few", [USER])
    assert code(refused) == (429, "too_many_episodes")
    assert int(refused.headers["retry-after"]) >= 1
    assert await chat(stage, "few", [USER, assistant("a"), user("more")]) == first, "those that run go on"
    await stage[0].admin.abandon(first, "done")
    assert await chat(stage, "few", [USER], "c") != first


async def test_an_idle_conversation_is_closed(stage: Stage) -> None:
    gateway = stage[0]
    silent, rewarded = await chat(stage, "brief", [USER], "p"), await chat(stage, "brief", [USER], "q")
    kept = await chat(stage, "ann", [user("not brief")])
    await gateway.admin.reward(rewarded, 0.5, final=False)
    for live in gateway.services.episodes.live():
        live.last_used_at -= 200.0  # longer than this agent's silence, shorter than others'

    async def over(episode: str) -> bool:
        await gateway.services.episodes.sweep()
        return (await gateway.admin.episode(episode))["state"] == "closed"

    await until(lambda: over(silent), "silence ends it")
    await until(lambda: over(rewarded), "silence ends it")
    assert (await gateway.admin.episode(silent))["reason"] == "idle_deadline"
    ended = await gateway.admin.episode(rewarded)
    assert (ended["reason"], ended["reward"]) == ("rewarded", 0.5)
    assert (await gateway.admin.episode(kept))["state"] == "open"


async def test_a_refused_call_leaves_no_open_episode(stage: Stage) -> None:
    gateway = stage[0]
    before = gateway.services.episodes.open_count
    response = await send(stage, "ann", [USER], max_tokens=10**9)
    assert response.status_code == 400
    assert gateway.services.episodes.open_count == before
    closed = (await gateway.admin.episodes(agent="ann", state="closed"))[0]
    assert closed["reason"] == "nothing_sampled"


async def test_each_prompt_without_messages_opens_a_conversation(stage: Stage) -> None:
    gateway, engine = stage
    engine.replies += ["u", "v"]
    headers = {"Authorization": f"Bearer {KEYS['ann']}"}
    responses = [
        await gateway.http.post("/v1/completions", json={"model": "m", "prompt": p}, headers=headers)
        for p in ("once", "twice")
    ]
    rows = [await gateway.admin.episode(a.headers["x-headgate-episode"]) for a in responses]
    assert rows[0]["task_id"] != rows[1]["task_id"]


async def test_conversations_survive_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    agents = {name: {"key": key} for name, key in KEYS.items()}
    messages = [user("before")]
    async with scripted_gateway(tiny_model, tmp_path, agents=agents) as stage:
        first = await chat(stage, "ann", messages, "remembered")
    messages += [assistant("remembered"), user("after")]
    async with scripted_gateway(tiny_model, tmp_path, agents=agents) as stage:
        assert await chat(stage, "ann", messages, "yes") == first
        nodes = await nodes_of(stage[0], first)
        turns = [node for node in nodes if node["sampled"]]
        assert path_to(nodes, turns[1]) == stage[1].requests[0]["token_ids"]
        assert await chat(stage, "bob", messages) != first


async def test_keys_are_shown_nowhere(stage: Stage) -> None:
    gateway = stage[0]
    assert not any(
        key in repr(gateway.settings) + gateway.settings.model_dump_json() for key in KEYS.values()
    )
    shown = (await gateway.http.get("/admin/v1/episodes")).text
    assert not any(key in shown for key in KEYS.values())
