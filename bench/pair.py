"""An engine reached directly, and through the gateway: what the gateway costs.

Rounds alternate between the two ways, so that the noise of a shared machine hits both; every figure is the median of the rounds,
with the least and the greatest. Nothing is asserted: failed requests are counted and shown.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import LATENCIES, RATES, describe, difference, figures, median_of, ratio
from bench.load import Shape, Target, Window, measure
from bench.processes import Child, run_engine, run_gateway
from bench.report import Steps, ranged, show, spread
from bench.targets import DirectTarget, GatewayTarget, Prompts

MAX_TOKENS = 64
_PLAIN = Shape(streams=32, max_tokens=8, streamed=False)
_WARM_UP = Shape(streams=8, max_tokens=MAX_TOKENS, streamed=True)
_CPU = ("gateway_cpu_s_per_1k_tokens", "engine_cpu_s_per_1k_tokens", "client_cpu_s_per_1k_tokens")
_SHOWN_CPU = ((_CPU[0], "gateway"), *((key, side) for key in _CPU[1:] for side in ("direct", "gateway")))


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The measurements with each engine."""

    engines: list[str]
    streams: list[int]
    seconds: float
    rounds: int
    python: Path

    @property
    def shapes(self) -> list[Shape]:
        """The loads, one after another."""
        return [Shape(n, MAX_TOKENS, True) for n in self.streams] + [_PLAIN]

    @property
    def steps(self) -> int:
        """Steps of all engines, the start of each included."""
        return len(self.engines) * (1 + len(self.shapes) * self.rounds * 2)


async def measure_pairs(
    plan: PairPlan, model: Path, prompts: Prompts, work: Path, steps: Steps
) -> list[dict[str, Any]]:
    """Return one result for each engine and load."""
    results = []
    for name in plan.engines:
        steps.begin(f"{name}: start and warm up")
        async with (
            run_engine(name, model, work, plan.python) as engine,
            run_gateway(engine, model, work) as gateway,
        ):
            bench = _EngineBench(name, engine, gateway, prompts, plan, steps)
            results += [result async for result in _each(bench)]
    return results


@dataclass(frozen=True, slots=True)
class _EngineBench:
    """One engine, with and without the gateway in front of it."""

    name: str
    engine: Child
    gateway: Child
    prompts: Prompts
    plan: PairPlan
    steps: Steps

    async def warm_up(self) -> None:
        """Send some calls: the first ones are slow in every component."""
        for target in await self._targets():
            await measure(target, _WARM_UP, min(1.0, self.plan.seconds), {})

    async def measure(self, shape: Shape) -> dict[str, Any]:
        """Measure both targets by turns; each round begins with the target that ended the last one."""
        direct, gateway = await self._targets()
        windows: dict[str, list[Window]] = {"direct": [], "gateway": []}
        clocks = {"gateway": self.gateway.cpu_s, "engine": self.engine.cpu_s, "client": time.process_time}
        for i in range(self.plan.rounds):
            order: Sequence[Target] = (direct, gateway) if i % 2 == 0 else (gateway, direct)
            for target in order:
                self.steps.begin(f"{self.name}: {describe(shape)}, round {i + 1}, {target.name}")
                window = await measure(target, shape, self.plan.seconds, clocks)
                windows[target.name].append(window)
                for reason, times in window.failures.items():
                    self.steps.log(f"{times} failed requests: {reason}")
        return _result(self.name, shape, windows["direct"], windows["gateway"])

    async def _targets(self) -> tuple[DirectTarget, GatewayTarget]:
        return (
            DirectTarget(self.engine.port, self.prompts),
            await GatewayTarget.open(self.gateway.port, self.prompts),
        )


async def _each(bench: _EngineBench) -> AsyncIterator[dict[str, Any]]:
    await bench.warm_up()
    for shape in bench.plan.shapes:
        yield await bench.measure(shape)


def _result(engine: str, shape: Shape, direct: list[Window], gateway: list[Window]) -> dict[str, Any]:
    """Return one line of the report: each figure of both ways, the ratio gateway / direct, and the difference of latencies."""
    sides = [figures(window) for window in direct], [figures(window) for window in gateway]
    rounds = list(zip(*sides, strict=True))
    result: dict[str, Any] = {
        "engine": engine,
        "load": "stream" if shape.streamed else "plain",
        "streams": shape.streams,
        "max_tokens": shape.max_tokens,
        "requests": {"direct": _responses(direct), "gateway": _responses(gateway)},
    }
    for key in (*RATES, *LATENCIES, *_CPU):
        result[key] = {
            "direct": spread(d[key] for d, _ in rounds),
            "gateway": spread(g[key] for _, g in rounds),
            "ratio": spread(ratio(g[key], d[key]) for d, g in rounds),
        }
    for key in LATENCIES:
        result[f"added_{key}"] = spread(difference(g[key], d[key]) for d, g in rounds)
    failures = [failure for window in (*direct, *gateway) for failure in window.failures.items()]
    result["failures"] = {reason: sum(n for r, n in failures if r == reason) for reason, _ in failures}
    return result


def show_pair(engine: str, results: list[dict[str, Any]]) -> None:
    """Print a table: one column a load, one row a figure."""
    title = f"{engine}: the gateway, recording on, against the engine reached directly"
    shapes = [Shape(r["streams"], r["max_tokens"], r["load"] == "stream") for r in results]
    failed = sum(sum(result["failures"].values()) for result in results)
    note = f"medians of the rounds, (min..max); failed requests: {failed}"
    rows = [[label, *cells] for label, cells in _rows(results)]
    show(title, ["", *map(describe, shapes)], rows, note)


def _rows(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for side in ("direct", "gateway"):
        yield f"requests measured, {side}", [f"{result['requests'][side]:,}" for result in results]
    for key in RATES:
        name = key.replace("_per_s", "/s")
        for side in ("direct", "gateway"):
            yield f"{name}, {side}", [median_of(result[key][side]) for result in results]
        yield f"{name}, gateway / direct", [ranged(result[key]["ratio"], 2) for result in results]
    for key, side in _SHOWN_CPU:
        name = f"{key.partition('_')[0]} CPU-s/1k tokens, {side}"
        yield name, [ranged(result[key][side]) for result in results]
    for key, name in (("first", "first token"), ("request", "whole request")):
        for percent in ("p50", "p99"):
            figure = f"{key}_ms_{percent}"
            yield f"{name} {percent}, direct, ms", [median_of(result[figure]["direct"]) for result in results]
            yield f"{name} {percent}, added, ms", [ranged(result[f"added_{figure}"]) for result in results]


def _responses(windows: list[Window]) -> int:
    return sum(window.requests for window in windows)
