"""Replies with tool calls that no agent gets, or that none can run."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, Counter

from gateway.render.tool_alarm import EVERY_S, ToolAlarm
from gateway.render.tool_faults import tool_faults

NAMES = {"add", "search"}


@pytest.mark.parametrize(
    ("content", "cut", "faults"),
    [
        ("The sum is 3.", False, []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>', False, ["unparsed"]),
        ('<tool_call>\n{"name": "add", "argu', True, ["cut"]),
        ('[TOOL_CALLS][{"name": "add"', True, ["cut"]),
        ('```json\n{"name": "search", "parameters": {"q": "x"}}\n```', False, ["unparsed"]),
        ('{"name": "somebody", "arguments": "against"}', False, []),
        ("<function=add>{}</function>", False, ["unparsed"]),
        ('<invoke name="search"><parameter name="q">x</parameter></invoke>', False, ["unparsed"]),
        ("In HTML, <function=other> is nothing.", False, []),
    ],
)
def test_text_that_is_meant_as_a_call(content: str, cut: bool, faults: list[str]) -> None:
    assert tool_faults(content, [], NAMES, cut=cut) == faults
    assert tool_faults(content, [], set(), cut=cut) == [], "a request without tools"


@pytest.mark.parametrize(
    ("name", "arguments", "faults"),
    [
        ("add", '{"a": 1}', []),
        ("add", "a = 1", ["not_json"]),
        ("add", "[1]", ["not_json"]),
        ("add", '{"a": NaN}', ["not_json"]),
        ("add", '{"a": 1e999}', ["not_json"]),
        ("subtract", "{}", ["unknown_tool"]),
        ("subtract", "", ["not_json", "unknown_tool"]),
    ],
)
def test_calls_that_no_agent_can_run(name: str, arguments: str, faults: list[str]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    assert tool_faults("", [call], NAMES, cut=False) == faults


def test_each_fault_is_warned_of_once_a_minute_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    counter = Counter("faults", "", ["fault"], registry=CollectorRegistry())
    alarm = ToolAlarm(counter, lambda: now)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            alarm.report(f"call-{number}", ["unparsed"], "x" * 1000)
        assert [record.message.count("call-") for record in caplog.records] == [1]
        assert len(caplog.records[0].message) < 400
        alarm.report("call-5", ["cut"], "y")
        now = EVERY_S
        alarm.report("call-6", ["unparsed"], "z")
    assert [record.message.rpartition(" (")[2] for record in caplog.records[1:]] == [
        "call-5, 1 since the last such warning): y", "call-6, 5 since the last such warning): z"
    ]  # fmt: skip
    assert counter.labels("unparsed")._value.get() == 6
