"""Large requests are read and rendered outside of the event loop: other streams continue.

Measured is the processor time of the loop's own thread between two turns of a timer, which the load of the machine does not
change, against what the whole request cost. `python -m bench.bodies` measures the lag itself. Whether one call in C lets others
run is shown by the Python code that runs during it (as in tests/unit/gateway/render/test_gil.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest
import pytest_asyncio

from gateway import app
from tests.harness.gateways import RunningGateway, run_gateway, settings_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER: dict[str, Any] = {"role": "user", "content": "hi"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    models = {"demo": {"path": str(tiny_model), "max_model_len": 2**20}}
    async with run_gateway(
        settings_for(tiny_model, tmp_path_factory.mktemp("lag"), models=models)
    ) as running:
        yield running


class Turns:
    """The longest that one turn of the loop took of its thread's time, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._at = time.thread_time()
        self._timer = asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> None:
        self._timer.cancel()

    def _turn(self) -> None:
        now = time.thread_time()
        self.longest = max(self.longest, now - self._at)
        self._at = now
        self._timer = asyncio.get_running_loop().call_later(0.001, self._turn)


@contextmanager
def turns() -> Iterator[Turns]:
    measured = Turns()
    try:
        yield measured
    finally:
        measured.stop()


def arguments(megabytes: float) -> str:
    count = int(megabytes * 1e6 / 64)
    return json.dumps(
        {"items": [{"id": i, "name": f"name {i}", "tags": ["a", "b"], "x": i / 7} for i in range(count)]}
    )


def tools(megabytes: float, each: int = 20) -> list[dict[str, Any]]:
    values = {
        f"p{j}": {"type": "string", "description": "what it is for, in a few words"} for j in range(each)
    }
    schema = {"type": "object", "properties": values}
    one = {"description": "Does things.", "parameters": schema}
    count = int(megabytes * 1e6 / len(json.dumps(one)))
    return [{"type": "function", "function": {"name": f"tool_{i}", **one}} for i in range(count)]


def history(text: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": text}
    call = {"id": "c", "type": "function", "function": function}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]


@cache
def requests() -> dict[str, tuple[str, dict[str, Any]]]:
    chat = "/v1/chat/completions"
    given = {"type": "tool_use", "id": "c", "name": "add", "input": json.loads(arguments(1.0))}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
    blocks = [USER, {"role": "assistant", "content": [given]}, {"role": "user", "content": [result]}]
    items = [
        USER,
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments(1.0)},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    thought = {"role": "assistant", "content": "x", "reasoning_content": "some words " * 100_000}
    many = [{"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(9_999)]
    return {
        "tools": (chat, {"messages": [USER], "tools": tools(1.0)}),
        "one tool": (chat, {"messages": [USER], "tools": tools(1.0, 12_000)}),
        "a call's arguments": (chat, {"messages": history(arguments(1.0))}),
        "reasoning": (chat, {"messages": [USER, thought, {**history("{}")[1]}, history("{}")[2]]}),
        "messages": (chat, {"messages": many}),
        "an item's arguments": ("/v1/responses", {"input": items}),
        "a block's input": ("/v1/messages", {"max_tokens": 4, "messages": blocks}),
    }


@pytest.mark.parametrize("name", list(requests()))
async def test_a_large_request_takes_little_of_the_loops_time(gateway: RunningGateway, name: str) -> None:
    path, values = requests()[name]
    body = json.dumps({"model": "m", **values}).encode()
    headers = {**(await gateway.open(mode="eval"))[1], "content-type": "application/json"}
    began = time.process_time()
    with turns() as measured:
        response = await gateway.http.post(path, content=body, headers=headers)
    took = time.process_time() - began
    assert response.status_code in (200, 400), response.text[:200]
    assert measured.longest < took / 4


READERS: dict[str, Callable[[str], Any]] = {"json": json.loads, "orjson": orjson.loads}


@pytest.mark.parametrize("reader", list(READERS))
async def test_others_run_while_a_large_body_is_read(gateway: RunningGateway, reader: str) -> None:
    """A collection, which Python code follows, comes after a number of objects; before that code other threads get their turn."""
    objects = 100_000
    text = json.dumps([{"a": [1]}] * (objects // 2))
    turns: list[str] = []

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == app.__file__:
            turns.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        read = READERS[reader](text)
    finally:
        sys.setprofile(None)
    assert len(read) == objects // 2
    assert len(turns) >= objects // 10_000
