"""Matching of conversations to recorded replies, and of turns to conversations."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config.settings import ConfigError, Settings
from gateway.episodes.conversations import chosen, ends, messages_before_reply
from gateway.store.episodes import RecordedReply, opened_by, opener
from gateway.trajectories.conversation import tool_call_id

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}
KEY = "sixteen letters!"


def calling(*ids: str) -> dict[str, Any]:
    calls = [{"id": name, "function": {"name": "add", "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": "3"}


def reply(number: int, episode: str = "") -> RecordedReply:
    return RecordedReply(episode or f"ep-{number}", f"call-{number}", b"")


def test_a_match_ends_in_a_reply_and_the_longest_is_looked_for_first() -> None:
    assert ends([USER, REPLY, USER, REPLY, USER]) == [4, 2]
    assert ends([USER, USER]) == []
    assert ends([USER, REPLY]) == [2]


def test_a_task_is_the_messages_before_the_first_reply() -> None:
    assert messages_before_reply([USER, USER, REPLY, USER]) == [USER, USER]
    assert messages_before_reply([USER]) == [USER]
    assert messages_before_reply([REPLY, USER]) == []


def test_one_episode_is_meant_however_often_it_replied_so() -> None:
    match = chosen([reply(1), reply(2, "ep-1")], [USER, REPLY, USER], 2)
    assert (match.episodes, match.notice) == ({"ep-1"}, "")


@pytest.mark.parametrize("second", [0, 1])
def test_ids_of_tool_calls_choose(second: int) -> None:
    """Named in the reply or in the results alone; the first id of several, or the second."""
    name = tool_call_id("call-2", second)
    for messages in (
        [USER, calling("x", name), result("x")],
        [USER, calling("x", "y"), result("x"), result(name)],
    ):
        match = chosen([reply(1), reply(2)], messages, 2)
        assert (match.episodes, match.notice) == ({"ep-2"}, "")
    later = [USER, calling("x", "y"), result("x"), USER, result(name)]
    assert chosen([reply(1), reply(2)], later, 2).notice == "ambiguous_conversation"


def test_unknown_ids_choose_nothing() -> None:
    match = chosen([reply(1), reply(2)], [USER, calling("x"), result("x")], 2)
    assert (match.episodes, match.notice) == ({"ep-1", "ep-2"}, "ambiguous_conversation")
    assert chosen([reply(1)], [USER, calling("x"), result("x")], 2).notice == "", "one is one"


def test_who_opened_an_episode_is_stored_in_place_of_a_key() -> None:
    request = "0123456789abcdef" * 2
    stored = {opened_by(request) for _ in range(100)}
    assert len(stored) == 100
    assert {len(value) for value in stored} == {64}
    assert {opener(value) for value in stored} == {request}
    assert opener("ab" * 32) == ""


def parsed(**agents: Any) -> Settings:
    return Settings.parse(
        {"models": {"a": {"path": "a"}, "f": {"path": "f", "train": False}}, "agents": agents}
    )


def test_an_agent_is_about_the_first_trained_model_and_evaluates() -> None:
    settings = parsed(ann={"key": KEY})
    assert settings.model_of("ann") == "a"
    assert settings.agents["ann"].mode == "eval"
    assert KEY not in repr(settings) + settings.model_dump_json()


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_AGENT_KEY_SWE_BENCH", KEY)
    assert parsed(**{"swe-bench": {}}).agents["swe-bench"].key.get_secret_value() == KEY


@pytest.mark.parametrize(
    ("agents", "where"),
    [
        ({"ann": {}}, "agents.ann.key"),
        ({"ann": {"key": "short"}}, "agents.ann.key"),
        ({"ann": {"key": KEY, "mode": "train"}}, "agents.ann: `group_size`"),
        ({"ann": {"key": KEY, "group_size": 2}}, "agents.ann: `group_size`"),
        ({"ann": {"key": KEY, "model": "f"}}, "[agents.ann] model"),
        ({"ann": {"key": KEY}, "bob": {"key": KEY}}, "two of the keys in [admin], [agents]"),
        ({"a-b": {"key": KEY}, "a_b": {"key": KEY + "2"}}, "[agents]: two names"),
        ({"an n": {"key": KEY}}, "agents.an n"),
    ],
)
def test_wrong_agents_are_named(agents: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**agents)
    assert where in str(caught.value)
    assert KEY not in str(caught.value)
