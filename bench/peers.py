"""headgate compared with the bare mock engine, a FastAPI pass-through, LiteLLM's proxy and two routers in Rust: one client,
one process each, one run.

All of them stand before the same mock engine and get the same requests. headgate records every call (SQLite), the others record
nothing. Rounds go through the targets in turn, each beginning with another one; every figure is the median of the rounds. Half of
the loads are plain text, in the other half every reply thinks and calls a tool. A reply that lost a word is a failed request.

The same loads come by OpenAI's chat completions and by Anthropic's messages. With `LITELLM_RUST=1` LiteLLM serves messages in
Rust, but falls back to Python silently; so each load ends with a request whose header reports the language, and the report has
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.engine import EngineSettings
from bench.figures import LATENCIES, RATES, describe, figures, median_of, ratio
from bench.frames import routes_of
from bench.load import Shape, Target, Window, measure
from bench.peer_servers import APIS, LITELLM_RUST, LITELLMS, ROUTES, model_of, start_peer
from bench.processes import Child, run_mock
from bench.replies import TOOL_TOKENS
from bench.report import Spread, Steps, number, show, spread
from bench.targets import ChatKind, ChatTarget, MessagesTarget, Prompts, open_episodes
from headgate.processes.errors import ChildDied

_FIGURES = (*RATES, *LATENCIES, "cpu_us_per_request", "cpu_us_per_chunk", "cpu_cores", "rss_mib")
_WARM_UP_S = 0.5
_PROBE_S = 120.0
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """The load that every target gets."""

    shape: Shape
    tools: bool
    api: str
    """One of `APIS`."""

    @property
    def name(self) -> str:
        """The load's name for people."""
        return f"{self.api}, {describe(self.shape)}{', tools' if self.tools else ''}"

    @property
    def settings(self) -> EngineSettings:
        """The mock engine's settings for this load."""
        return EngineSettings(tools=self.tools)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """The measurements of a run."""

    targets: list[str]
    apis: list[str]
    streams: list[int]
    seconds: float
    rounds: int
    tools: bool
    logprobs: bool
    programs: Mapping[str, Path]
    """The commands of the peers that have environments of their own, by their names."""

    @property
    def loads(self) -> list[PeerLoad]:
        """One after another."""
        plain = [Shape(32, 8, False), Shape(1, 8, False), *(Shape(n, 64, True) for n in self.streams)]
        tools = [Shape(32, TOOL_TOKENS, False), *(Shape(n, TOOL_TOKENS, True) for n in self.streams)]
        # The mock engine that reports experts replies without tools.
        with_tools = self.tools and ROUTES not in self.targets
        shapes = [(s, False) for s in plain] + [(s, True) for s in tools if with_tools]
        return [PeerLoad(*shape, api) for api in self.apis for shape in shapes]

    def targets_of(self, api: str) -> list[str]:
        """Return the targets that serve an API."""
        return [name for name in self.targets if name in APIS[api]]

    @property
    def steps(self) -> int:
        """Steps of the whole, the start included."""
        return 1 + self.rounds * sum(len(self.targets_of(load.api)) for load in self.loads)


async def measure_peers(
    plan: PeerPlan, model: Path, prompts: Prompts, work: Path, steps: Steps
) -> tuple[list[dict[str, Any]], float]:
    """Return one result for each load, and headgate's resident memory (MiB) before its first call."""
    steps.begin("mock: start the targets")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(run_mock(work))
        children = {}
        for name in plan.targets:
            started = start_peer(name, plan.programs, engine, model, work)
            try:
                children[name] = await stack.enter_async_context(started)
            except (ChildDied, TimeoutError, OSError) as error:
                if name == "headgate":
                    raise
                steps.log(f"{name} does not start, and is left out: {error}")
        idle_mib = children["headgate"].rss_mib()
        bench = _PeerBench(plan, engine, children, prompts, steps)
        return [await bench.measure(load) for load in plan.loads], idle_mib


@dataclass(frozen=True, slots=True)
class _PeerBench:
    """The targets that run."""

    plan: PeerPlan
    engine: Child
    children: Mapping[str, Child]
    prompts: Prompts
    steps: Steps

    async def measure(self, load: PeerLoad) -> dict[str, Any]:
        """Measure all targets by turns."""
        await self._set_engine(load.settings)
        names = [name for name in self.plan.targets_of(load.api) if name in self.children]
        targets = {name: await self._open(name, load) for name in names}
        for target in targets.values():
            warm_up = Shape(4, load.shape.max_tokens, load.shape.streamed)
            await measure(target, warm_up, min(_WARM_UP_S, self.plan.seconds), {})
        rounds = []
        for i in range(self.plan.rounds):
            turn = names[i % len(names) :] + names[: i % len(names)]
            rounds.append({name: await self._one(targets[name], load, i) for name in turn})
        proxies = [targets[name] for name in names if name in LITELLMS and load.api == "messages"]
        in_rust = {target.name: await self._in_rust(target, load) for target in proxies}
        return _result(load, rounds, in_rust)

    async def _in_rust(self, target: ChatTarget, load: PeerLoad) -> bool:
        """Return whether LiteLLM's part in Rust serves such a request, by the head of a response."""
        request = target.request(0, load.shape.max_tokens, load.shape.streamed)
        try:
            async with httpx.AsyncClient(base_url=self.children[target.name].url, timeout=_PROBE_S) as http:
                body = request.partition(b"\r\n\r\n")[2]
                head = (await http.post("/v1/messages", content=body, headers=_JSON)).headers
        except httpx.HTTPError as error:
            self.steps.log(f"{target.name} does not report whether it answers in Rust: {error}")
            return False
        found = head.get("x-litellm-rust") == "true"
        if found != (target.name == LITELLM_RUST):
            self.steps.log(f"{target.name} answers {'with' if found else 'without'} its part in Rust")
        return found

    async def _one(self, target: Target, load: PeerLoad, round_: int) -> tuple[Window, float]:
        """Return a window, and the target's resident memory (MiB) after it."""
        self.steps.begin(f"mock: {load.name}, round {round_ + 1}, {target.name}")
        child = self.children[target.name]
        clocks = {"target": child.cpu_s, "client": time.process_time}
        window = await measure(target, load.shape, self.plan.seconds, clocks)
        for reason, times in window.failures.items():
            self.steps.log(f"{times} failed requests: {reason}")
        return window, child.rss_mib()

    async def _open(self, name: str, load: PeerLoad) -> ChatTarget:
        port, model = self.children[name].port, model_of(name, load.api)
        kind = ChatKind(load.tools, self.plan.logprobs, load.settings.reply, model)
        keys = await open_episodes(port) if name in ("headgate", ROUTES) else ()
        kind_of_target = MessagesTarget if load.api == "messages" else ChatTarget
        return kind_of_target(name, port, self.prompts, keys, kind)

    async def _set_engine(self, settings: EngineSettings) -> None:
        async with httpx.AsyncClient(base_url=self.engine.url) as http:
            (await http.post("/bench/settings", json={"tools": settings.tools})).raise_for_status()


def _result(
    load: PeerLoad, rounds: list[dict[str, tuple[Window, float]]], in_rust: Mapping[str, bool]
) -> dict[str, Any]:
    """Gather every target's figures, and headgate's ratios of rate, latency and CPU to each other target, round by round."""
    found = [{name: _figures(*measured) for name, measured in round_.items()} for round_ in rounds]
    names = list(found[0])
    failures: dict[str, int] = {}
    for name, (window, _) in (pair for round_ in rounds for pair in round_.items()):
        for reason, times in window.failures.items():
            failures[f"{name}: {reason}"] = failures.get(f"{name}: {reason}", 0) + times
    compared = (*RATES, "first_ms_p99", "cpu_us_per_request", "cpu_us_per_chunk")
    return {
        "engine": "mock",
        "api": load.api,
        "load": load.name,
        "streams": load.shape.streams,
        "streamed": load.shape.streamed,
        "tools": load.tools,
        "targets": {
            name: {key: spread(figures_[name][key] for figures_ in found) for key in _FIGURES}
            | {"requests": sum(round_[name][0].requests for round_ in rounds)}
            | ({"in_rust": in_rust[name]} if name in in_rust else {})
            for name in names
        },
        "headgate_to": {
            name: {key: spread(ratio(f["headgate"][key], f[name][key]) for f in found) for key in compared}
            for name in names
            if name != "headgate" and "headgate" in names
        },
        "failures": failures,
    }


def _figures(window: Window, rss_mib: float) -> dict[str, float | None]:
    found = figures(window)
    seconds = window.cpu_s["target"]
    found["cpu_us_per_request"] = ratio(seconds * 1e6, window.requests)
    found["cpu_us_per_chunk"] = ratio(seconds * 1e6, window.chunks)
    found["cpu_cores"] = seconds / window.seconds
    found["rss_mib"] = rss_mib
    return found


def keys_of(results: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the keys that other programs read: `vs_PEER_requests` (with 32 connections; `_1`: with one), `vs_PEER_chunks_64`
    and so on; headgate's CPU a chunk; `routes_cpu_per_chunk_64`, that with the experts of all tokens over that without, and
    `routes_bytes_per_token` of the engine's response; `first_p99_ratio_64`, its p99 of the time to a first token over the
    pass-through's. Those of messages are `vs_PEER_messages_requests` and so on; `litellm-rust` has none where Python responded.
    """
    keys: dict[str, float | None] = {}
    for result in results:
        api = "_messages" if result["api"] == "messages" else ""
        tools = "_tools" if result["tools"] else ""
        load = f"{result['streams']}{tools}"
        for peer, ratios in result["headgate_to"].items():
            if peer == LITELLM_RUST and not result["targets"][peer]["in_rust"]:
                continue
            versus = f"vs_{peer.replace('-', '_')}{api}"
            if result["streamed"]:
                for what in ("chunks", "tokens"):
                    keys[f"{versus}_{what}_{load}"] = _median(ratios[f"{what}_per_s"])
                if peer == ROUTES:
                    off_to_on = _median(ratios["cpu_us_per_chunk"])
                    keys[f"routes_cpu_per_chunk_{load}"] = ratio(1.0, off_to_on)
                    keys["routes_bytes_per_token"] = len(routes_of(1000)) / 1000
                if peer == "passthrough":
                    keys[f"first_p99_ratio{api}_{load}"] = _median(ratios["first_ms_p99"])
            else:
                one = "_1" if result["streams"] == 1 else ""
                keys[f"{versus}_requests{one}{tools}"] = _median(ratios["requests_per_s"])
        own = result["targets"].get("headgate")
        if own and result["streamed"]:
            keys[f"cpu_us_per_chunk{api}_{load}"] = _median(own["cpu_us_per_chunk"])
    return keys


def show_peers(results: list[dict[str, Any]], logprobs: bool) -> None:
    """Print a table for each load: one column a target."""
    note = "medians of the rounds; chunks are events with text; a target's CPU is that of its process"
    for result in results:
        names = list(result["targets"])
        failed = sum(result["failures"].values())
        rows = [[label, *cells] for label, cells in _rows(result, names)]
        note_logprobs = (
            "; the client requests log-probabilities" if logprobs and result["api"] == "chat" else ""
        )
        show(
            f"mock: {result['load']}", ["", *names], rows, f"{note}{note_logprobs}; failed requests: {failed}"
        )


def _rows(result: dict[str, Any], names: list[str]) -> Iterator[tuple[str, list[str]]]:
    targets = result["targets"]
    yield "requests measured", [f"{targets[name]['requests']:,}" for name in names]
    for key in _FIGURES:
        yield key.replace("_per_s", "/s").replace("_", " "), [median_of(targets[n][key]) for n in names]
    for key in RATES:
        cells = [number(_median(result["headgate_to"].get(name, {}).get(key))) for name in names]
        yield f"headgate to it, {key.removesuffix('_per_s')}", cells
    if any("in_rust" in targets[name] for name in names):
        words = {True: "yes", False: "no", None: ""}
        yield "answers in Rust", [words[targets[name].get("in_rust")] for name in names]


def _median(values: Spread | None) -> float | None:
    return values["median"] if values else None
