"""Payloads as reinforcement learning has them: long prompts, many sessions, long conversations; and whether the loop stays free.

A gateway, recording on, before the mock engine. Shapes:

- `prompt_1k`, `prompt_16k`, `prompt_128k`: requests with prompts of this many tokens (this project's own sources, in pieces),
  each in an episode that did not see it, so that every one is rendered and tokenized whole;
- `sessions`: many concurrent streams, each of them slow;
- `conversation`: agents that talk for many turns, and send their whole history with every one;
- `streams_64` and `streams_256`: this many streams, tokens 5 ms apart; `burst_...`: the same number that all begin at the same
  moment.

For each: the lag of the gateway's event loop (`bench.lagging`), and the time to the first token, less that of the engine reached
directly under the same load. Gateway, engine and client share the machine: lag contains the others' use of its cores.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import orjson
import typer

from bench.figures import difference
from bench.load import RequestFailed, Response, Shape, Target, Window, connect, events_of, measure
from bench.model import save_model
from bench.processes import Child, run_gateway, run_mock
from bench.replies import plain
from bench.report import Steps, finish, machine, number, percentile, show
from bench.targets import ChatTarget, DirectTarget, GatewayTarget, Prompts, open_episodes, post

PROMPTS = {"prompt_1k": (1_000, 32), "prompt_16k": (16_000, 8), "prompt_128k": (128_000, 2)}
"""Tokens of a prompt, and concurrent requests."""
_LONGEST = 2**18
_MANY = 24
"""Different prompts of each length."""
_TURN_TOKENS = 48
_WARM_UP = Shape(1, 4, True)
_SOURCES = ("gateway", "scheduler", "trainer", "headgate", "tests", "docs")


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a run."""

    seconds: float
    sessions: int
    session_ms: float
    conversations: int
    turns: int
    streams: tuple[int, ...]
    prompts: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Steps of the whole."""
        return 1 + len(self.prompts) + 2 + 2 * len(self.streams)


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each shape but the conversations.")] = 8.0,
    sessions: Annotated[int, typer.Option(min=1, max=8192, help="Concurrent slow streams.")] = 1000,
    session_ms: Annotated[
        float, typer.Option(min=1.0, help="Milliseconds between two tokens of theirs.")
    ] = 200.0,
    conversations: Annotated[int, typer.Option(min=1, help="Concurrent conversations.")] = 8,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each.")] = 200,
    streams: Annotated[str, typer.Option(help="Simultaneous streams, with commas.")] = "64,256",
    prompts: Annotated[str, typer.Option(help="Which prompts, with commas.")] = ",".join(PROMPTS),
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/payloads.json"),
) -> None:
    """Measure the lag of the gateway's event loop, and the time to the first token, under payloads as RL has them.

    The keys lag_p99_ms (by shape), first_added_p99_64_ms and first_added_p99_256_ms are the goals of the project: 50 ms, 100 ms.

    Examples:

      python -m bench.payloads

      python -m bench.payloads --prompts prompt_128k --turns 20 --seconds 3
    """
    chosen, numbers = tuple(prompts.split(",")), tuple(int(part) for part in streams.split(","))
    if set(chosen) - set(PROMPTS):
        raise typer.BadParameter(f"any of {', '.join(PROMPTS)}", param_hint="--prompts")
    import uvloop

    plan = Plan(seconds, sessions, session_ms, conversations, turns, numbers, chosen)
    started, before = time.monotonic(), machine()
    with Steps(plan.steps) as steps:
        results = uvloop.run(_bench(plan, steps))
    _show(results)
    by_shape = {result["shape"]: result for result in results}
    report = {
        "bench": "payloads",
        "command": " ".join(["python -m bench.payloads", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "results": results,
        "failed_requests": sum(sum(result["failures"].values()) for result in results),
        "seconds": round(time.monotonic() - started, 1),
        "lag_p99_ms": {name: result["lag_ms"]["p99"] for name, result in by_shape.items()},
    }
    for streams_ in numbers:
        for name, key in ((f"streams_{streams_}", ""), (f"burst_{streams_}", "_burst")):
            report[f"first_added_p99_{streams_}{key}_ms"] = by_shape[name]["first_added_ms"]["p99"]
    finish(report, out)


async def _bench(plan: Plan, steps: Steps) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        work, corpus = Path(folder), sources()
        save_model(work / "model", corpus)
        short = Prompts.load(work / "model")
        gc.collect()
        gc.freeze()
        steps.begin("start the engine and the gateway")
        async with (
            run_mock(work) as engine,
            run_gateway(
                engine, work / "model", work, max_model_len=_LONGEST, module="bench.lagging"
            ) as gateway,
        ):
            shapes = _Shapes(plan, engine, gateway, short, corpus, steps)
            shapes.characters_each = _characters_each(work / "model", corpus)
            results = [await shapes.prompt(name) for name in plan.prompts]
            results += [await shapes.sessions(), await shapes.conversation()]
            for streams in plan.streams:
                results += [await shapes.streams(streams), await shapes.burst(streams)]
            return results


def sources() -> str:
    """Return this project's own text, ASCII alone."""
    root = Path(__file__).parent.parent
    files = [
        file
        for name in _SOURCES
        for kind in ("py", "md")
        for file in sorted((root / name).rglob(f"*.{kind}"))
    ]
    text = "".join(file.read_text() for file in files)
    return text.encode("ascii", "ignore").decode()


def _characters_each(model: Path, corpus: str) -> float:
    from tokenizers import Tokenizer

    return len(corpus) / len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(corpus).ids)


def pieces(corpus: str, characters: int, number: int) -> list[str]:
    """Yield different texts of one length, each begun at another place."""
    random, text = Random(0), corpus * (1 + characters // len(corpus))
    return [
        f"{n}: {text[(at := random.randrange(len(corpus) // 2)) : at + characters]}" for n in range(number)
    ]


class _Shapes:
    """The shapes of load, on one gateway."""

    def __init__(
        self, plan: Plan, engine: Child, gateway: Child, short: Prompts, corpus: str, steps: Steps
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._gateway = gateway
        self._short = short
        self._corpus = corpus
        self._steps = steps
        self.characters_each = 1.0
        """To a token."""

    async def prompt(self, name: str) -> dict[str, Any]:
        """Measure prompts of a length."""
        tokens, streams = PROMPTS[name]
        texts = pieces(self._corpus, int(tokens * self.characters_each), _MANY)
        prompts = replace(self._short, texts=texts, ids=[[n] * tokens for n in range(2, 2 + _MANY)])
        return await self._measure(name, Shape(streams, 16, True), prompts)

    async def sessions(self) -> dict[str, Any]:
        """Measure many slow streams."""
        shape = Shape(self._plan.sessions, 64, True)
        return await self._measure("sessions", shape, self._short, chunk_ms=self._plan.session_ms)

    async def streams(self, streams: int) -> dict[str, Any]:
        """Measure streams that begin at any time."""
        return await self._measure(f"streams_{streams}", Shape(streams, 64, True), self._short)

    async def burst(self, streams: int) -> dict[str, Any]:
        """Measure streams that begin together, again and again."""

        async def work(target: Target) -> tuple[list[Response], dict[str, int]]:
            return await _bursts(target, streams, self._plan.seconds)

        return await self._both(f"burst_{streams}", streams, self._short, work)

    async def conversation(self) -> dict[str, Any]:
        """Measure conversations; the engine knows none, so no direct time is subtracted."""
        plan = self._plan
        self._steps.begin(f"{plan.conversations} conversations of {plan.turns} turns")
        await self._set_engine(1.0, _TURN_TOKENS)
        keys = await open_episodes(self._gateway.port, plan.conversations)
        cpu = self._gateway.cpu_s()
        await self._lag()
        talks = [_Conversation(self._gateway.port, key, self._corpus, n) for n, key in enumerate(keys)]
        await asyncio.gather(*(talk.run(plan.turns) for talk in talks))
        lag, some = await self._lag(), max(1, plan.turns // 10)
        return {
            "shape": "conversation",
            "streams": plan.conversations,
            "turns": plan.turns,
            "requests": sum(len(talk.firsts) for talk in talks),
            "lag_ms": lag,
            "first_ms": _spread([first for talk in talks for first in talk.firsts]),
            "first_ms_first_turns": _spread([first for talk in talks for first in talk.firsts[:some]]),
            "first_ms_last_turns": _spread([first for talk in talks for first in talk.firsts[-some:]]),
            "gateway_cpu_s": self._gateway.cpu_s() - cpu,
            "prompt_tokens_last": max(talk.prompt_tokens for talk in talks),
            "failures": {},
        }

    async def _measure(
        self, name: str, shape: Shape, prompts: Prompts, chunk_ms: float = 5.0
    ) -> dict[str, Any]:
        async def work(target: Target) -> tuple[list[Response], dict[str, int]]:
            window: Window = await measure(target, shape, self._plan.seconds, {})
            return window.responses, window.failures

        return await self._both(name, shape.streams, prompts, work, chunk_ms)

    async def _both(
        self, name: str, streams: int, prompts: Prompts, work: _Work, chunk_ms: float = 5.0
    ) -> dict[str, Any]:
        """Return the engine alone, then the gateway; the lag is of the gateway's part."""
        self._steps.begin(name)
        await self._set_engine(chunk_ms, 64)
        own, own_failures = await work(DirectTarget(self._engine.port, prompts))
        target: ChatTarget = await GatewayTarget.open(self._gateway.port, prompts)
        await measure(target, _WARM_UP, 0.1, {})
        await self._lag()
        responses, failures = await work(target)
        lag = await self._lag()
        first, own_first = (_spread([a.first_s for a in found]) for found in (responses, own))
        return {
            "shape": name,
            "streams": streams,
            "requests": len(responses),
            "lag_ms": lag,
            "first_ms": first,
            "first_own_ms": own_first,
            "first_added_ms": {key: difference(first[key], own_first[key]) for key in first},
            "failures": {**own_failures, **failures},
        }

    async def _lag(self) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self._gateway.url, timeout=60.0) as http:
            found: dict[str, Any] = (await http.get("/bench/lag")).raise_for_status().json()
            return found

    async def _set_engine(self, chunk_ms: float, chunks: int) -> None:
        async with httpx.AsyncClient(base_url=self._engine.url) as http:
            settings = {"chunk_ms": chunk_ms, "chunks": chunks, "tools": False}
            (await http.post("/bench/settings", json=settings)).raise_for_status()


_Work = Callable[[Target], Awaitable[tuple[list[Response], dict[str, int]]]]


async def _bursts(target: Target, streams: int, seconds: float) -> tuple[list[Response], dict[str, int]]:
    """Send all requests of a burst together, again and again. The first burst is warm-up and is not counted."""
    connections = [await connect(target.port) for _ in range(streams)]
    responses: list[Response] = []
    failures: dict[str, int] = {}

    async def one(index: int) -> None:
        try:
            status, body, first_s, whole_s = await connections[index].post(
                target.request(index, 64, True), lambda body: target.begins(body, True)
            )
            if status != 200:
                raise RequestFailed(f"{status} {body[:200].decode(errors='replace')}")
            responses.append(Response(first_s, whole_s, *target.count(events_of(body), True), 0.0, [], []))
        except (RequestFailed, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            failures[reason] = failures.get(reason, 0) + 1
            connections[index] = await connect(target.port)

    until = 0.0
    for number_ in count():
        if number_ == 1:
            responses.clear()
            until = time.perf_counter() + seconds
        elif number_ > 1 and time.perf_counter() >= until:
            break
        await asyncio.gather(*(one(index) for index in range(streams)))
    for connection in connections:
        connection.close()
    return responses, failures


class _Conversation:
    """An agent that sends its whole history every time."""

    def __init__(self, port: int, key: str, corpus: str, seed: int) -> None:
        self.firsts: list[float] = []
        """Seconds to the first token, turn by turn."""
        self.prompt_tokens = 0
        self._port = port
        self._key = key
        self._texts = self._observations(corpus, seed)
        self._reply = plain(_TURN_TOKENS, True).joined("content")

    async def run(self, turns: int) -> None:
        """Talk for some turns. Raise RequestFailed when a turn has no complete response."""
        messages: list[dict[str, str]] = []
        connection = await connect(self._port)
        for _ in range(turns):
            messages.append({"role": "user", "content": next(self._texts)})
            body = {"model": "bench", "messages": messages, "max_tokens": 2 * _TURN_TOKENS, "stream": True}
            request = post(
                "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}, self._key
            )
            status, response, first_s, _ = await connection.post(request, lambda body: b'"content":"' in body)
            if status != 200:
                raise RequestFailed(f"{status} {response[:300].decode(errors='replace')}")
            self.firsts.append(first_s)
            messages.append({"role": "assistant", "content": self._reply_of(events_of(response))})
        connection.close()

    def _reply_of(self, events: list[bytes]) -> str:
        text = ""
        for event in events[:-1]:
            value = orjson.loads(event)
            if value.get("usage"):
                self.prompt_tokens = value["usage"]["prompt_tokens"]
            text += "".join(choice["delta"].get("content") or "" for choice in value["choices"])
        if text != self._reply:
            raise RequestFailed(f"another reply than the engine's: {text[:100]!r}")
        return text

    @staticmethod
    def _observations(corpus: str, seed: int) -> Iterator[str]:
        """Yield tools' responses of some hundred characters, each different."""
        random = Random(seed)
        for n in count():
            at = random.randrange(len(corpus) - 1000)
            yield f"{n}: {corpus[at : at + random.randrange(100, 600)]}"


def _spread(seconds: list[float]) -> dict[str, float | None]:
    """Return p50 and p99, in milliseconds."""
    found = {f"p{percent}": percentile(seconds, percent) for percent in (50, 99)}
    return {key: None if value is None else value * 1000 for key, value in found.items()}


def _show(results: list[dict[str, Any]]) -> None:
    rows = []
    for result in results:
        added = result.get("first_added_ms", {"p50": None, "p99": None})
        cells = [result["lag_ms"]["p50"], result["lag_ms"]["p99"], result["lag_ms"]["max"]]
        cells += [result["first_ms"]["p50"], result["first_ms"]["p99"], added["p50"], added["p99"]]
        failed = str(sum(result["failures"].values()))
        rows.append(
            [result["shape"], str(result["streams"]), str(result["requests"]), *map(number, cells), failed]
        )
    header = [
        "shape",
        "concurrent",
        "requests",
        "lag p50",
        "p99",
        "max",
        "first p50",
        "p99",
        "added p50",
        "p99",
        "failed",
    ]
    note = "milliseconds; added: to the engine's own time to the first token under the same load"
    show("Payloads of reinforcement learning through the gateway, recording on", header, rows, note)


if __name__ == "__main__":
    typer.run(main)
