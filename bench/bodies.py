"""`python -m bench.bodies`: how long one huge request holds up every other stream of a gateway.

A gateway, recording on, before the mock engine. Each shape is one request whose body is several megabytes of one thing; the
figure is the worst lag of the gateway's event loop (`bench.lagging`) from the moment it is sent until it is served, the worst
of a few rounds. Prompts longer than the model's context are refused, after the gateway has read and rendered all of them.

`own` leaves out the load of other programs: it counts a delay only up to the CPU time that the gateway used in the meantime. On
an idle machine both columns are equal.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import typer

from bench.model import save_model
from bench.payloads import sources
from bench.processes import Child, run_gateway, run_mock
from bench.report import Steps, finish, machine, number, show
from bench.targets import open_episodes

_CONTEXT = 2**20
"""Tokens: the most that a model may have here."""
_TIMEOUT_S = 300.0
_USER: dict[str, Any] = {"role": "user", "content": "hi"}
_Request = tuple[str, dict[str, Any]]
"""A path, and a body without its model."""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each shape; the worst counts.")] = 3,
    scale: Annotated[float, typer.Option(min=0.01, help="Sizes, as a multiple of the usual.")] = 1.0,
    shapes: Annotated[str, typer.Option(help="Which shapes, with commas; empty: all.")] = "",
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/bodies.json"),
) -> None:
    """Measure the worst lag of the gateway's event loop while it reads, renders and records one huge request.

    The key worst_own_ms (by shape) is a goal of the project: 50 ms.

    Examples:

      python -m bench.bodies

      python -m bench.bodies --shapes tools,arguments --rounds 1
    """
    import uvloop

    requests = make_requests(scale)
    chosen = shapes.split(",") if shapes else list(requests)
    if set(chosen) - set(requests):
        raise typer.BadParameter(f"any of {', '.join(requests)}", param_hint="--shapes")
    started, before = time.monotonic(), machine()
    with Steps(len(chosen) + 1) as steps:
        results = uvloop.run(_bench({name: requests[name] for name in chosen}, rounds, steps))
    _show(results)
    report = {
        "bench": "bodies",
        "command": " ".join(["python -m bench.bodies", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "results": results,
        "seconds": round(time.monotonic() - started, 1),
        "worst_own_ms": {result["shape"]: result["own_max"] for result in results},
    }
    finish(report, out)


def make_requests(scale: float = 1.0) -> dict[str, _Request]:
    """Return the request of each shape, at `scale` times its usual size."""
    chat = "/v1/chat/completions"
    text = _arguments(6.9 * scale)
    given = {"type": "tool_use", "id": "c", "name": "add", "input": orjson.loads(_arguments(6.0 * scale))}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
    blocks = [_USER, {"role": "assistant", "content": [given]}, {"role": "user", "content": [result]}]
    items = [
        _USER,
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": text},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    numbers = orjson.dumps(
        {"rows": [[i * j for j in range(20)] for i in range(int(48_000 * scale))]}
    ).decode()
    words = "some words " * int(4e6 * scale / 11)
    thought = {"role": "assistant", "content": "x", "reasoning_content": words}
    many = [
        {"role": ("user", "assistant")[i % 2], "content": f"message {i}"}
        for i in range(int(19_998 * scale) | 1)
    ]
    return {
        "content": (chat, {"messages": [{"role": "user", "content": words}]}),
        "reasoning": (chat, {"messages": [_USER, thought, *_history("{}")[1:]]}),
        "messages": (chat, {"messages": many}),
        "tools": (chat, {"messages": [_USER], "tools": _tools(4.0 * scale, 80)}),
        "one_tool": (chat, {"messages": [_USER], "tools": _tools(4.0 * scale, int(50_000 * scale))}),
        "arguments": (chat, {"messages": _history(text)}),
        "spelled": (chat, {"messages": _history(_arguments(5.5 * scale).replace("name 7", "<|im_end|>"))}),
        "numbers": (chat, {"messages": _history(numbers)}),
        "item_arguments": ("/v1/responses", {"input": items}),
        "block_input": ("/v1/messages", {"max_tokens": 4, "messages": blocks}),
    }


async def _bench(requests: dict[str, _Request], rounds: int, steps: Steps) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        work = Path(folder)
        save_model(work / "model", sources())
        steps.begin("start the engine and the gateway")
        async with (
            run_mock(work) as engine,
            run_gateway(
                engine, work / "model", work, max_model_len=_CONTEXT, module="bench.lagging"
            ) as gateway,
        ):
            results = []
            for name, request in requests.items():
                steps.begin(name)
                results.append({"shape": name, **await _worst(gateway, request, rounds)})
            return results


async def _worst(gateway: Child, request: _Request, rounds: int) -> dict[str, Any]:
    path, values = request
    body = orjson.dumps({"model": "bench", **values})
    worst: dict[str, Any] = {"bytes": len(body), "rounds": rounds, "max": 0.0, "own_max": 0.0, "seconds": 0.0}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=_TIMEOUT_S) as http:
        for key in await open_episodes(gateway.port, rounds):
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            await http.get("/bench/lag")
            began = time.monotonic()
            response = await http.post(path, content=body, headers=headers)
            took = time.monotonic() - began
            if not response.is_success and "prompt is too long" not in response.text:
                raise RuntimeError(f"{path}: {response.status_code} {response.text[:300]}")
            lag = (await http.get("/bench/lag")).raise_for_status().json()
            found = {"max": lag["max"], "own_max": lag["own_max"], "seconds": took}
            worst |= {name: max(worst[name], value) for name, value in found.items()}
    return worst


def _arguments(megabytes: float) -> str:
    count = int(megabytes * 1e6 / 73)
    items = [{"id": i, "name": f"name {i}", "tags": ["a", "b"], "x": i / 7} for i in range(count)]
    return orjson.dumps({"items": items}).decode()


def _tools(megabytes: float, each: int) -> list[dict[str, Any]]:
    """Return tools with `each` parameters."""
    described = {"type": "string", "description": "what it is for, in a few words"}
    schema = {"type": "object", "properties": {f"p{j}": described for j in range(each)}}
    one = {"description": "Does things.", "parameters": schema}
    count = max(1, int(megabytes * 1e6 / len(orjson.dumps(one))))
    return [{"type": "function", "function": {"name": f"tool_{i}", **one}} for i in range(count)]


def _history(text: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": text}}
    return [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]


def _show(results: list[dict[str, Any]]) -> None:
    rows = [
        [
            result["shape"],
            number(result["bytes"] / 1e6),
            number(result["max"]),
            number(result["own_max"]),
            number(result["seconds"]),
        ]
        for result in results
    ]
    header = ["shape", "body MB", "worst lag ms", "own ms", "longest request s"]
    note = "own: at most the CPU time that the gateway used while its loop was late"
    show("The event loop's lag while one huge request is read, rendered and recorded", header, rows, note)


if __name__ == "__main__":
    typer.run(main)
