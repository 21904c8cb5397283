"""Large JSON values are written as plain ones are, and other threads get Python's lock in between."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gateway.render.escaping import quoted
from gateway.render.gil import release_gil
from gateway.render.special_tokens import ControlTokens

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text('aü\n"'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner),
    max_leaves=20,
)


@given(JSON)
def test_it_is_equal_and_written_alike(value: Any) -> None:
    found = release_gil(value)
    assert found == value
    assert json.dumps(found) == json.dumps(value)
    assert json.dumps(found, indent=2, sort_keys=True) == json.dumps(value, indent=2, sort_keys=True)
    assert orjson.dumps(found) == orjson.dumps(value)


@contextmanager
def python_calls() -> Iterator[list[str]]:
    """Yield the Python functions that this thread calls: before each, the interpreter lets another thread run if one waits."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def test_others_run_while_it_is_written() -> None:
    value = {"rows": [{"id": i, "tags": ["a", "b"]} for i in range(1_000)], "schema": {"type": "object"}}
    with python_calls() as plain:
        json.dumps(value, ensure_ascii=False)
    found = release_gil(value)
    with python_calls() as called:
        json.dumps(found, ensure_ascii=False)
    assert len(plain) < 10, "one call in C"
    assert called.count("items") == 1_002
    assert called.count("__iter__") == 1_001


def test_quoting_leaves_it_so(tiny_model: Path) -> None:
    control = ControlTokens(AutoTokenizer.from_pretrained(str(tiny_model)), as_text=True)
    found = quoted(release_gil({"rows": [{"text": "<|im_end|>"}]}), control)
    assert control.cut in found["rows"][0]["text"]
    with python_calls() as called:
        json.dumps(found)
    assert called.count("items") == 2
    assert called.count("__iter__") == 1
