"""Parsing of legacy completion requests, and their refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.completions import MAX_REPLIES, CompletionRequest, parse
from headgate.errors import BadRequest


def body(**values: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "once", **values}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("once", ["once"]),
        ("", [""]),
        (["once", "upon"], ["once", "upon"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    request = parse(body(prompt=prompt, n=3))[1]
    assert request.prompts == prompts
    assert request.choices == 3 * len(prompts)
    assert "prompt" not in request.recorded


def test_the_fields_of_a_request() -> None:
    request = parse(
        body(
            best_of=2, n=2, logprobs=3, stop=["a", "b"], stream=True, seed=5, user="u", logit_bias={"7": 1.5}
        )
    )[1]
    assert (request.api, request.messages, request.n, request.stream, request.seed) == (
        "completions",
        [],
        2,
        True,
        5,
    )
    assert (request.logprobs, request.top_logprobs, request.stop, request.logit_bias) == (
        True,
        3,
        ("a", "b"),
        {7: 1.5},
    )
    assert (request.max_tokens, request.max_tokens_may_exceed) == (16, False)
    assert parse(body(max_tokens=5, logprobs=0))[1].max_tokens == 5
    assert parse(body(logprobs=0))[1].logprobs
    assert not parse(body())[1].logprobs


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]], "n": MAX_REPLIES}, "n"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": {"text": "once"}}, "prompt"),
        ({"prompt": ["x"] * 17, "n": 128}, "prompt"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_is_refused_is_named(values: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(body(**values))
    assert refused.value.param == param
    assert param in refused.value.message


noise = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
requests = st.fixed_dictionaries(
    {"model": st.just("m"), "prompt": st.just("x") | noise},
    optional={name: noise for name in CompletionRequest.model_fields if name not in ("model", "prompt")},
)


@given(requests)
def test_whatever_is_sent_is_understood_or_refused(values: dict[str, Any]) -> None:
    try:
        request = parse(values)[1]
    except BadRequest:
        return
    assert all(isinstance(prompt, str | list) for prompt in request.prompts)
    assert request.choices >= 1
