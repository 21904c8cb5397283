"""headgate beside the bare mock engine, a FastAPI pass-through, LiteLLM's proxy and two routers in Rust: one client, one process
each, one run.

All of them stand before the same mock engine and get the same requests. headgate records every call (SQLite), the others record
nothing. Rounds go through the targets in turn, each beginning with another one; every figure is the median of the rounds. Half of
the loads are plain text, in the other half every reply thinks and calls a tool. A reply that lost a word is a failed request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.engine import EngineSettings
from bench.figures import LATENCIES, RATES, describe, figures, median_of, ratio
from bench.load import Shape, Target, Window, measure
from bench.processes import Child, run_gateway, run_mock, run_server
from bench.replies import TOOL_TOKENS
from bench.report import Spread, Steps, number, show, spread
from bench.targets import ChatKind, ChatTarget, GatewayTarget, Prompts
from processes.errors import ChildDied
from processes.ports import free_port

ROUTERS = ("vllm-router", "sglang-router")
TARGETS = ("engine", "headgate", "passthrough", "litellm", *ROUTERS)
_FIGURES = (*RATES, *LATENCIES, "cpu_us_per_request", "cpu_us_per_chunk", "cpu_cores", "rss_mib")
_LITELLM_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "NO_DOCS": "True",
    "NO_PROXY": "127.0.0.1",
}
_WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """The load that every target gets."""

    shape: Shape
    tools: bool

    @property
    def name(self) -> str:
        """The load's name for people."""
        return describe(self.shape) + (", tools" if self.tools else "")

    @property
    def settings(self) -> EngineSettings:
        """The mock engine's settings for this load."""
        return EngineSettings(tools=self.tools)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """The measurements of a run."""

    targets: list[str]
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
        return [PeerLoad(s, False) for s in plain] + [PeerLoad(s, True) for s in tools if self.tools]

    @property
    def steps(self) -> int:
        """Steps of the whole, the start included."""
        return 1 + len(self.loads) * self.rounds * len(self.targets)


async def measure_peers(
    plan: PeerPlan, model: Path, prompts: Prompts, work: Path, steps: Steps
) -> tuple[list[dict[str, Any]], float]:
    """One result for each load, and headgate's resident memory (MiB) before its first call."""
    steps.begin("mock: start the targets")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(run_mock(work))
        children = {}
        for name in plan.targets:
            started = _start(name, plan, engine, model, work)
            try:
                children[name] = await stack.enter_async_context(started)
            except (ChildDied, TimeoutError, OSError) as error:
                if name == "headgate":
                    raise
                steps.say(f"{name} does not start, and is left out: {error}")
        idle_mib = children["headgate"].rss_mib()
        bench = _PeerBench(plan, engine, children, prompts, steps)
        return [await bench.measure(load) for load in plan.loads], idle_mib


@asynccontextmanager
async def _start(name: str, plan: PeerPlan, engine: Child, model: Path, work: Path) -> AsyncIterator[Child]:
    port = free_port()
    match name:
        case "engine":
            yield engine
        case "headgate":
            async with run_gateway(engine, model, work) as child:
                yield child
        case "passthrough":
            argv = [sys.executable, "-m", "bench.passthrough", "--port", str(port), "--engine", engine.url]
            async with run_server(name, argv, port, "/openapi.json", work) as child:
                yield child
        case "litellm":
            config = work / "litellm.yaml"
            config.write_text(_litellm_config(engine))
            argv = [str(plan.programs[name].absolute()), "--config", str(config), "--num_workers", "1"]
            argv += ["--host", "127.0.0.1", "--port", str(port)]
            async with run_server(name, argv, port, "/health/liveliness", work, _LITELLM_ENV) as child:
                yield child
        case _:
            argv = [str(plan.programs[name].absolute()), *_router_options(name, engine, port)]
            async with run_server(name, argv, port, "/health", work) as child:
                yield child


def _router_options(name: str, engine: Child, port: int) -> list[str]:
    """One worker, the engine, and nothing that a request waits for but it."""
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", engine.url]
    options += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    options += ["--log-level", "warning" if name == "vllm-router" else "warn"]
    return options if name == "vllm-router" else ["launch", *options]


def _litellm_config(engine: Child) -> str:
    """One model at the engine; no database, no key, no logging."""
    return (
        "model_list:\n"
        "  - model_name: bench\n"
        "    litellm_params:\n"
        "      model: openai/bench\n"
        f"      api_base: {engine.url}/v1\n"
        "      api_key: none\n"
        "litellm_settings:\n"
        "  telemetry: false\n"
        "  request_timeout: 120\n"
        "general_settings:\n"
        "  dangerously_permit_weak_or_unset_master_key: true\n"
    )


@dataclass(frozen=True, slots=True)
class _PeerBench:
    """The targets that run."""

    plan: PeerPlan
    engine: Child
    children: Mapping[str, Child]
    prompts: Prompts
    steps: Steps

    async def measure(self, load: PeerLoad) -> dict[str, Any]:
        """All targets by turns."""
        await self._set_engine(load.settings)
        targets = {name: await self._open(name, load) for name in self.children}
        for target in targets.values():
            warm_up = Shape(4, load.shape.max_tokens, load.shape.streamed)
            await measure(target, warm_up, min(_WARM_UP_S, self.plan.seconds), {})
        rounds = []
        names = list(targets)
        for i in range(self.plan.rounds):
            turn = names[i % len(names) :] + names[: i % len(names)]
            rounds.append({name: await self._one(targets[name], load, i) for name in turn})
        return _result(load, rounds)

    async def _one(self, target: Target, load: PeerLoad, round_: int) -> tuple[Window, float]:
        """A window, and the target's resident memory (MiB) after it."""
        self.steps.begin(f"mock: {load.name}, round {round_ + 1}, {target.name}")
        child = self.children[target.name]
        clocks = {"target": child.cpu_s, "client": time.process_time}
        window = await measure(target, load.shape, self.plan.seconds, clocks)
        for reason, times in window.failures.items():
            self.steps.say(f"{times} failed requests: {reason}")
        return window, child.rss_mib()

    async def _open(self, name: str, load: PeerLoad) -> ChatTarget:
        kind = ChatKind(load.tools, self.plan.logprobs, load.settings.reply)
        child = self.children[name]
        if name != "headgate":
            return ChatTarget(name, child.port, self.prompts, kind=kind)
        target = await GatewayTarget.open(child.port, self.prompts, kind)
        target.name = name
        return target

    async def _set_engine(self, settings: EngineSettings) -> None:
        async with httpx.AsyncClient(base_url=self.engine.url) as http:
            (await http.post("/bench/settings", json={"tools": settings.tools})).raise_for_status()


def _result(load: PeerLoad, rounds: list[dict[str, tuple[Window, float]]]) -> dict[str, Any]:
    """Gathers every target's figures, and headgate's ratios of rate, latency and CPU to each other target, round by round."""
    found = [{name: _figures(*measured) for name, measured in round_.items()} for round_ in rounds]
    names = list(found[0])
    failures: dict[str, int] = {}
    for name, (window, _) in (pair for round_ in rounds for pair in round_.items()):
        for reason, times in window.failures.items():
            failures[f"{name}: {reason}"] = failures.get(f"{name}: {reason}", 0) + times
    compared = (*RATES, "first_ms_p99", "cpu_us_per_request", "cpu_us_per_chunk")
    return {
        "engine": "mock",
        "load": load.name,
        "streams": load.shape.streams,
        "streamed": load.shape.streamed,
        "tools": load.tools,
        "targets": {
            name: {key: spread(figures_[name][key] for figures_ in found) for key in _FIGURES}
            | {"requests": sum(round_[name][0].requests for round_ in rounds)}
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
    """The keys that other programs read: `vs_PEER_requests` (with 32 connections; `_1`: with one), `vs_PEER_chunks_64` and so on;
    headgate's CPU a chunk; `first_p99_ratio_64`, its p99 of the time to a first token over the pass-through's.
    """
    keys: dict[str, float | None] = {}
    for result in results:
        end = "_tools" if result["tools"] else ""
        for peer, ratios in result["headgate_to"].items():
            if result["streamed"]:
                for what in ("chunks", "tokens"):
                    name = f"vs_{peer.replace('-', '_')}_{what}_{result['streams']}{end}"
                    keys[name] = _median(ratios[f"{what}_per_s"])
                if peer == "passthrough":
                    keys[f"first_p99_ratio_{result['streams']}{end}"] = _median(ratios["first_ms_p99"])
            else:
                one = "_1" if result["streams"] == 1 else ""
                keys[f"vs_{peer.replace('-', '_')}_requests{one}{end}"] = _median(ratios["requests_per_s"])
        own = result["targets"].get("headgate")
        if own and result["streamed"]:
            keys[f"cpu_us_per_chunk_{result['streams']}{end}"] = _median(own["cpu_us_per_chunk"])
    return keys


def show_peers(results: list[dict[str, Any]], logprobs: bool) -> None:
    """A table for each load: one column a target."""
    note = "medians of the rounds; chunks are events with text; a target's CPU is that of its process"
    note += "; the client asks for log-probabilities" if logprobs else ""
    for result in results:
        names = list(result["targets"])
        failed = sum(result["failures"].values())
        rows = [[label, *cells] for label, cells in _rows(result, names)]
        show(f"mock: {result['load']}", ["", *names], rows, f"{note}; failed requests: {failed}")


def _rows(result: dict[str, Any], names: list[str]) -> Iterator[tuple[str, list[str]]]:
    targets = result["targets"]
    yield "requests measured", [f"{targets[name]['requests']:,}" for name in names]
    for key in _FIGURES:
        yield key.replace("_per_s", "/s").replace("_", " "), [median_of(targets[n][key]) for n in names]
    for key in RATES:
        cells = [number(_median(result["headgate_to"].get(name, {}).get(key))) for name in names]
        yield f"headgate to it, {key.removesuffix('_per_s')}", cells


def _median(values: Spread | None) -> float | None:
    return values["median"] if values else None
