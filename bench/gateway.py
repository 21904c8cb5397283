"""What the gateway costs: through it, with recording on, against the same engine reached directly.

Rounds alternate between the two ways, so that the noise of a shared machine hits both; every figure is the median of the rounds,
with the least and the greatest. Nothing is asserted: failed requests are counted and shown.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.load import Shape, Target, Window, measure
from bench.model import save_model
from bench.processes import Child, run_engine, run_gateway
from bench.report import Spread, Steps, finish, machine, number, percentile, ranged, show, spread
from bench.targets import DirectTarget, GatewayTarget, Prompts

_MAX_TOKENS = 64
_PLAIN = Shape(streams=32, max_tokens=8, streamed=False)
_WARM_UP = Shape(streams=8, max_tokens=_MAX_TOKENS, streamed=True)
_RATES = ("requests_per_s", "chunks_per_s", "tokens_per_s")
_CPU = ("gateway_cpu_s_per_1k_tokens", "engine_cpu_s_per_1k_tokens", "client_cpu_s_per_1k_tokens")
_SHOWN_CPU = ((_CPU[0], "gateway"), *((key, side) for key in _CPU[1:] for side in ("direct", "gateway")))
_LATENCIES = ("first_ms_p50", "first_ms_p99", "request_ms_p50", "request_ms_p99", "token_ms_p50")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    engines: list[str]
    streams: list[int]
    seconds: float
    rounds: int
    python: Path

    @property
    def shapes(self) -> list[Shape]:
        """The loads, one after another."""
        return [Shape(n, _MAX_TOKENS, True) for n in self.streams] + [_PLAIN]

    @property
    def steps(self) -> int:
        """Steps of the whole bench, the start of each engine included."""
        return len(self.engines) * (1 + len(self.shapes) * self.rounds * 2)


def main(
    engine: Annotated[
        str, typer.Option(help="`fake`, `vllm` (real, on a tiny random model) or `both`.")
    ] = "both",
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams, with commas.")] = "1,8,32,64",
    seconds: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds of one measurement; up to 4 times that for a slow engine."),
    ] = 4.0,
    rounds: Annotated[
        int, typer.Option(min=1, help="Pairs of measurements (direct, gateway) for each number of streams.")
    ] = 3,
    engine_python: Annotated[
        Path, typer.Option(help="The interpreter of vLLM's environment (`make engine`).")
    ] = Path(".venv-engine/bin/python"),
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/gateway.json"),
) -> None:
    """Measure what the gateway costs, recording on, against the same engine reached directly.

    Every stream sends one request after another, for up to 64 tokens each, to the engine's own API and to the gateway in turn.
    Read the ratios (gateway / direct): engine, gateway and load client share this machine's cores, so the absolute figures
    are of this machine and this hour. With the fake engine, which costs little, the gateway itself is what limits; with vLLM
    it shows beside a (tiny) model. Tokens/s is the fair measure: lengths vary, and a gateway may put several tokens in a chunk.

    Examples:

      python -m bench.gateway --engine fake --streams 1,64 --seconds 2

      python -m bench.gateway --engine vllm --rounds 5
    """
    plan = Plan(_engines(engine, engine_python), _numbers(streams), seconds, rounds, engine_python)
    import uvloop

    started, before = time.monotonic(), machine()
    with Steps(plan.steps) as steps:
        results = uvloop.run(_bench(plan, steps))
    for name in plan.engines:
        _show(name, [result for result in results if result["engine"] == name])
    report = {
        "bench": "gateway",
        "command": " ".join(["python -m bench.gateway", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "window_s": seconds,
        "rounds": rounds,
        "max_tokens": _MAX_TOKENS,
        "results": results,
        "failed_requests": sum(sum(result["failures"].values()) for result in results),
        "seconds": round(time.monotonic() - started, 1),
    }
    finish(report, out)


async def _bench(plan: Plan, steps: Steps) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        work = Path(folder)
        save_model(work / "model")
        prompts = Prompts.load(work / "model")
        gc.collect()
        gc.freeze()  # the tokenizer's library leaves a million objects that the load client need not walk
        for name in plan.engines:
            steps.begin(f"{name}: start and warm up")
            async with (
                run_engine(name, work / "model", work, plan.python) as engine,
                run_gateway(engine, work / "model", work) as gateway,
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
    plan: Plan
    steps: Steps

    async def warm_up(self) -> None:
        """The first batches of an engine are slow, and so are first calls of anything."""
        for target in await self._targets():
            await measure(target, _WARM_UP, min(1.0, self.plan.seconds), {})

    async def measure(self, shape: Shape) -> dict[str, Any]:
        """Both ways by turns; each round begins with the way that the last one ended with."""
        direct, gateway = await self._targets()
        windows: dict[str, list[Window]] = {"direct": [], "gateway": []}
        clocks = {"gateway": self.gateway.cpu_s, "engine": self.engine.cpu_s, "client": time.process_time}
        for i in range(self.plan.rounds):
            order: Sequence[Target] = (direct, gateway) if i % 2 == 0 else (gateway, direct)
            for target in order:
                self.steps.begin(f"{self.name}: {_describe(shape)}, round {i + 1}, {target.name}")
                window = await measure(target, shape, self.plan.seconds, clocks)
                windows[target.name].append(window)
                for reason, times in window.failures.items():
                    self.steps.say(f"{times} failed requests: {reason}")
        return _result(self.name, shape, windows["direct"], windows["gateway"])

    async def _targets(self) -> tuple[DirectTarget, GatewayTarget]:
        return (
            DirectTarget(self.engine.port, self.prompts),
            await GatewayTarget.open(self.gateway.port, self.prompts),
        )


async def _each(bench: _EngineBench) -> Any:
    await bench.warm_up()
    for shape in bench.plan.shapes:
        yield await bench.measure(shape)


def _result(engine: str, shape: Shape, direct: list[Window], gateway: list[Window]) -> dict[str, Any]:
    """One line of the report: each figure of both ways, the ratio gateway / direct, and the difference of latencies."""
    sides = [_figures(window) for window in direct], [_figures(window) for window in gateway]
    rounds = list(zip(*sides, strict=True))
    result: dict[str, Any] = {
        "engine": engine,
        "load": "stream" if shape.streamed else "plain",
        "streams": shape.streams,
        "max_tokens": shape.max_tokens,
        "requests": {"direct": _answers(direct), "gateway": _answers(gateway)},
    }
    for key in (*_RATES, *_LATENCIES, *_CPU):
        result[key] = {
            "direct": spread(d[key] for d, _ in rounds),
            "gateway": spread(g[key] for _, g in rounds),
            "ratio": spread(_ratio(g[key], d[key]) for d, g in rounds),
        }
    for key in _LATENCIES:
        result[f"added_{key}"] = spread(_difference(g[key], d[key]) for d, g in rounds)
    failures = [failure for window in (*direct, *gateway) for failure in window.failures.items()]
    result["failures"] = {reason: sum(n for r, n in failures if r == reason) for reason, _ in failures}
    return result


def _figures(window: Window) -> dict[str, float | None]:
    """Rates per second, latencies in milliseconds, CPU-seconds per 1,000 tokens."""
    answers = window.answers
    tokens = sum(answer.tokens for answer in answers)
    counts = (len(answers), sum(answer.chunks for answer in answers), tokens)
    figures: dict[str, float | None] = {
        key: n / window.seconds for key, n in zip(_RATES, counts, strict=True)
    }
    for name, values in (
        ("first", [answer.first_s for answer in answers]),
        ("request", [answer.whole_s for answer in answers]),
        ("token", [answer.whole_s / answer.tokens for answer in answers if answer.tokens]),
    ):
        for percent in (50, 99):
            value = percentile(values, percent)
            figures[f"{name}_ms_p{percent}"] = None if value is None else value * 1000
    for name, seconds in window.cpu_s.items():
        figures[f"{name}_cpu_s_per_1k_tokens"] = seconds / tokens * 1000 if tokens else None
    return figures


def _show(engine: str, results: list[dict[str, Any]]) -> None:
    """One column a load, one row a figure."""
    title = f"{engine}: the gateway, recording on, against the engine reached directly"
    shapes = [Shape(r["streams"], r["max_tokens"], r["load"] == "stream") for r in results]
    failed = sum(sum(result["failures"].values()) for result in results)
    note = f"medians of the rounds, (min..max); failed requests: {failed}"
    rows = [[label, *cells] for label, cells in _rows(results)]
    show(title, ["", *map(_describe, shapes)], rows, note)


def _rows(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for side in ("direct", "gateway"):
        yield f"requests measured, {side}", [f"{result['requests'][side]:,}" for result in results]
    for key in _RATES:
        name = key.replace("_per_s", "/s")
        for side in ("direct", "gateway"):
            yield f"{name}, {side}", [_median(result[key][side]) for result in results]
        yield f"{name}, gateway / direct", [ranged(result[key]["ratio"], 2) for result in results]
    for key, side in _SHOWN_CPU:
        name = f"{key.partition('_')[0]} CPU-s/1k tokens, {side}"
        yield name, [ranged(result[key][side]) for result in results]
    for key, name in (("first", "first token"), ("request", "whole request")):
        for percent in ("p50", "p99"):
            figure = f"{key}_ms_{percent}"
            yield f"{name} {percent}, direct, ms", [_median(result[figure]["direct"]) for result in results]
            yield f"{name} {percent}, added, ms", [ranged(result[f"added_{figure}"]) for result in results]


def _median(values: Spread | None) -> str:
    return number(values["median"] if values else None)


def _describe(shape: Shape) -> str:
    if not shape.streamed:
        return f"{shape.streams} plain, {shape.max_tokens} tokens"
    return f"{shape.streams} stream{'s' if shape.streams > 1 else ''}"


def _answers(windows: list[Window]) -> int:
    return sum(len(window.answers) for window in windows)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _difference(value: float | None, base: float | None) -> float | None:
    return value - base if value is not None and base is not None else None


def _engines(name: str, python: Path) -> list[str]:
    names = {"fake": ["fake"], "vllm": ["vllm"], "both": ["fake", "vllm"]}.get(name)
    if names is None:
        raise typer.BadParameter("fake, vllm or both", param_hint="--engine")
    if "vllm" in names and not python.exists():
        raise typer.BadParameter(f"{python} is not there: run `make engine`", param_hint="--engine-python")
    return names


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 4096:
        raise typer.BadParameter("numbers from 1 to 4096, with commas: 1,8,32,64", param_hint="--streams")
    return numbers


if __name__ == "__main__":
    typer.run(main)
