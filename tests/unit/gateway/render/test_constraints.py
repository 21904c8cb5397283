"""Grammars derived from requests. `tests/acceptance/test_constraints.py` tests that engines follow them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.forms import of_response_format
from gateway.render.constraints import ContentForm, constraint
from headgate.errors import BadRequest
from headgate.types import Grammar
from tests.families.conversation import TOOLS
from tests.families.family import renderer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def ask(name: str = "qwen3", **options: Any) -> Grammar | None:
    given = {
        "tools": TOOLS,
        "choice": "auto",
        "parallel": True,
        "response_format": None,
        "reasoning": False,
        **options,
    }
    given["form"] = of_response_format(given.pop("response_format"))
    return constraint(renderer(name), **given)


def tag(**options: Any) -> dict[str, Any]:
    grammar = ask(**options)
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.value)["format"]


@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize("form", [None, {"type": "text"}])
@pytest.mark.parametrize("reasoning", [False, True])
def test_most_replies_are_free(choice: str, form: Any, reasoning: bool) -> None:
    assert ask(choice=choice, response_format=form, reasoning=reasoning) is None


@pytest.mark.parametrize(
    ("form", "schema"), [({"type": "json_object"}, {"type": "object"}), (JSON_SCHEMA, SCHEMA)]
)
def test_content_in_json(form: dict[str, Any], schema: dict[str, Any]) -> None:
    grammar = ask(tools=[], response_format=form)
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.value)) == ("json", schema)
    none = ask(choice="none", response_format=form)
    assert none is not None
    assert (none.kind, json.loads(none.value)) == ("json", schema)


def test_content_in_json_or_a_call() -> None:
    either = tag(response_format=JSON_SCHEMA)
    assert either["type"] == "or"
    assert either["elements"][1]["json_schema"] == SCHEMA
    assert either["elements"][1]["excludes"] == ["<tool_call>", "</tool_call>"]


def test_open_reasoning_runs_freely_to_its_end() -> None:
    chat = renderer("qwen3")
    free, end, space, rest = tag(tools=[], response_format=JSON_SCHEMA, reasoning=True)["elements"]
    assert free["type"] == "any_tokens"
    assert {chat.marks.think_end, *chat.marks.stop} <= set(free["exclude_tokens"])
    assert end == {"type": "token", "token": chat.marks.think_end}
    assert space["type"] == "regex"
    assert rest["json_schema"] == SCHEMA


@pytest.mark.parametrize(
    ("kind", "value", "alone", "part"),
    [
        ("regex", "a+", ("regex", "a+"), {"type": "regex", "pattern": "a+"}),
        ("ebnf", 'root ::= "a"', ("ebnf", 'root ::= "a"'), {"type": "grammar", "grammar": 'root ::= "a"'}),
    ],
)
def test_content_in_a_form_that_is_not_json(kind: Any, value: str, alone: Any, part: Any) -> None:
    form = ContentForm(kind, value, "structured_outputs.regex")
    whole = constraint(renderer("qwen2.5"), (), "auto", True, form, False)
    assert whole is not None
    assert (whole.kind, whole.value) == alone
    assert whole.param == "structured_outputs.regex"
    with_calls = constraint(renderer("qwen2.5"), TOOLS, "auto", True, form, False)
    assert with_calls is not None
    assert json.loads(with_calls.value)["format"]["elements"][1] == part


@pytest.mark.parametrize(("texts", "kind"), [(["yes"], "const_string"), (["yes", "no."], "or")])
def test_one_of_several_texts(texts: list[str], kind: str) -> None:
    form = ContentForm("choice", texts, "guided_choice")
    grammar = constraint(renderer("qwen2.5"), (), "auto", True, form, False)
    assert grammar is not None
    part = json.loads(grammar.value)["format"]
    assert part["type"] == kind
    assert [each["value"] for each in part.get("elements", [part])] == texts


def test_a_named_function_is_the_only_one() -> None:
    text = json.dumps(tag(choice="function:look"))
    assert "look" in text
    assert "write" not in text
    assert '"star"' not in text


@pytest.mark.parametrize("parallel", [False, True])
def test_any_function_is_required(parallel: bool) -> None:
    text = json.dumps(tag(choice="required", parallel=parallel), ensure_ascii=False)
    assert "look" in text
    assert "write_é" in text
    assert ('"star"' in text) is parallel


@pytest.mark.parametrize(
    "name", ["qwen2.5", "llama3", "mistral v3", "mistral v7", "phi4-mini", "deepseek v3"]
)
def test_calls_are_demanded_in_the_familys_own_form(name: str) -> None:
    chat = renderer(name)
    text = json.dumps(tag(name=name, choice="required"))
    assert "look" in text
    assert (f'"token": {chat.marks.tool_start}' in text) is not chat.marks.bare_calls


@pytest.mark.parametrize("name", ["gemma3", "glm4.5", "phi3"])
def test_a_family_whose_calls_have_no_grammar_is_named(name: str) -> None:
    with pytest.raises(BadRequest, match="template") as raised:
        ask(name, choice="required")
    assert raised.value.param == "tool_choice"
    with pytest.raises(BadRequest, match="template") as raised:
        ask(name, response_format=JSON_SCHEMA)
    assert raised.value.param == "response_format"


@pytest.mark.parametrize(
    ("options", "param"),
    [({"choice": "required", "tools": []}, "tool_choice"), ({"choice": "nothing"}, "tool_choice")],
)
def test_what_cannot_be_demanded_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        ask(**options)
    assert raised.value.param == param
