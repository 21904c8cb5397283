"""What clients send of a conversation, before every family's template: requests as agents send them, and odd messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects import responses_input
from gateway.dialects.responses_tools import Toolbox
from gateway.render.renderer import FAMILIES as LIBRARY
from tests.families.conversation import TOOLS
from tests.families.family import FAMILIES, of_library, renderer

RECORDED = Path(__file__).parents[3] / "integration" / "recorded"
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "first order"}
DEVELOPER = {"role": "developer", "content": "second order"}
CALLING = [family.name for family in FAMILIES if family.tools]


def prompt(name: str, messages: list[Any], tools: list[Any] | None = None) -> str:
    chat = of_library(name) if name in LIBRARY else renderer(name)
    return chat.decode(chat.render(messages, tools or []))


def called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": arguments}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call], **fields}
    return [USER, reply, {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "r"}]


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.json")), ids=lambda file: file.stem)
def test_an_agents_request_is_rendered_with_all_its_messages(name: str, file: Path) -> None:
    body = json.loads(file.read_text())
    messages = responses_input.messages(responses_input.items(body["input"]))
    text = prompt(name, messages, Toolbox.of(body["tools"], "drop").functions)
    assert all(message["content"].strip() in text for message in messages)


@pytest.mark.parametrize("name", [*LIBRARY, *(family.name for family in FAMILIES)])
@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, DEVELOPER, USER],
        [SYSTEM, USER, {"role": "assistant", "content": "yes"}, DEVELOPER, {"role": "user", "content": "go"}],
        [SYSTEM, USER, DEVELOPER],
    ],
    ids=["both first", "later", "last"],
)
def test_a_second_system_message_reaches_every_model(name: str, messages: list[Any]) -> None:
    text = prompt(name, messages)
    assert all(message["content"] in text for message in messages)


def test_a_later_system_message_that_a_template_refuses_joins_the_users() -> None:
    replied = [USER, {"role": "assistant", "content": "yes"}]
    joined = [*replied, {"role": "user", "content": "second order\n\ngo"}]
    assert prompt("qwen3.5", [*replied, DEVELOPER, {"role": "user", "content": "go"}]) == prompt(
        "qwen3.5", joined
    )
    two_users = [*replied, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert prompt("qwen3.5", [*two_users, DEVELOPER]).count("<|im_start|>user") == 3


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("arguments", ["", " ", "null", None])
def test_a_call_without_arguments_is_one_with_none(name: str, arguments: Any) -> None:
    assert prompt(name, called(arguments), TOOLS) == prompt(name, called("{}"), TOOLS)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.thinks])
@pytest.mark.parametrize("field", ["reasoning", "thinking"])
def test_reasoning_counts_under_each_of_its_names(name: str, field: str) -> None:
    expected = prompt(name, called("{}", reasoning_content="a plan"), TOOLS)
    assert prompt(name, called("{}", **{field: "a plan"}), TOOLS) == expected
    assert prompt(name, called("{}", **{field: "no", "reasoning_content": "a plan"}), TOOLS) == expected
