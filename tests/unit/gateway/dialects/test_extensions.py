"""Fields of vLLM's clients and of aggregators that mean what headgate has under another name."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects import chat, completions
from gateway.dialects.extensions import EXTENSIONS
from gateway.render.constraints import ContentForm

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parsed(**values: Any) -> Any:
    return chat.parse({**BODY, **values})[1]


@pytest.mark.parametrize(
    "values",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False, "enable_thinking": None}},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
    ],
)
def test_thinking_is_turned_off_by_each_of_its_names(values: dict[str, Any]) -> None:
    assert parsed(**values).thinking is False
    assert parsed().thinking is None


@pytest.mark.parametrize(
    "values", [{"reasoning": {"effort": "low"}}, {"chat_template_kwargs": {"reasoning_effort": "low"}}]
)
def test_effort_is_set_by_each_of_its_names(values: dict[str, Any]) -> None:
    assert parsed(**values).effort == parsed(reasoning_effort="low").effort == "low"


@pytest.mark.parametrize(
    ("values", "kind", "value"),
    [
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "ebnf", "root ::= 'a'"),
        ({"guided_json": '{"type": "object"}'}, "json", {"type": "object"}),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
    ],
)
def test_vllms_forms_are_demanded_in_both_apis(values: dict[str, Any], kind: Any, value: Any) -> None:
    name = next(iter(values))
    part = f".{next(iter(values[name]))}" if name == "structured_outputs" else ""
    expected = ContentForm(kind, value, name + part)
    assert parsed(**values).form == expected
    assert completions.parse({"model": "m", "prompt": "hi", **values})[1].form == expected


def test_openrouters_usage_asks_for_it_at_the_end_of_a_stream() -> None:
    request, _ = chat.parse({**BODY, "stream": True, "usage": {"include": True}})
    assert request.usage_streamed
    assert not chat.parse({**BODY, "stream": True})[0].usage_streamed


def test_fields_that_ask_for_nothing_are_taken() -> None:
    neutral = {name: values[0] for name, (values, _) in EXTENSIONS.items() if values}
    assert len(neutral) > 15
    parsed(**neutral)
    completions.parse({"model": "m", "prompt": "hi", **neutral})
    parsed(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
