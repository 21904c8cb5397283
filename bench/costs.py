"""Measures a decode step and a prefill of real vLLM in the simulator's form, and how well that form predicts a run.

A step of n calls with kv tokens in the cache takes k1 kv + max(k2, k3 n) + k4 (`scheduler.policies.throughput`). It is measured
for pairs of n and kv: n calls at once sample `_FEW` tokens each, then n others `_MANY`; what the second round takes longer is
the time of the steps between. Prompts are random, so none is cached. Every other pair fits the coefficients, the others tell the
error. A prefill is the slope of the seconds to one token over the length of a prompt. Of repeated measurements the least counts:
what else the machine does only adds to them.

Then two things are compared with figures that nothing was fitted to: a closed loop of calls of log-normal lengths, with the
simulator's engine (`lab.simulate.engine`); and what the gateway has learnt from the engine's live metrics under some loads
(`gateway.control.speed_model`; streams, gateway and client share the cores with the engine then) with its tokens/s under others.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from bench.load import Shape, measure
from bench.model import save_model
from bench.processes import ENGINE_PYTHON, Child, EnginePython, check_installed, run_engine, run_gateway
from bench.report import Steps, finish, machine, number, show
from bench.targets import GatewayTarget, Prompts
from gateway.control.speed_model import Sample, fit
from gateway.engines.figures import label, samples
from lab.simulate.engine import Call, Engine, EngineCosts
from scheduler.policies.throughput import EngineModel

_RUNNING, _PROMPT = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64), (16, 512, 1536)
_FEW, _MANY = 8, 72
_SURE = 0.25
"""A share of the seconds for `_FEW` tokens. Where more tokens took less than this beyond them, the measurement was disturbed."""
_SLOTS = 64
_MOST_KV = 64 * 1024
"""Pairs with more tokens than this are left out: the engine's cache holds no more."""
_PREFILLS = (128, 512, 1024, 1536, 1920)
_TEXT = 256
"""Token ids below this are text."""
_CALLS, _AT_ONCE, _MEDIAN, _SIGMA, _LONGEST = 160, 24, 60.0, 0.9, 600
_STREAMS, _UNSEEN = (1, 3, 8, 16, 32, 48), (2, 5, 12, 24, 40)
_TOKENS, _TYPICAL = 256, 24
"""Tokens that a call through the gateway samples, and of its prompt, about."""
_AGAIN = 8
"""How often the loads are played again, at most, until the gateway has fitted something."""
_PRIOR = EngineModel()
_OFF = ("live_off_median", "live_off_worst", "live_off_ran_median", "live_off_ran_worst")
"""How many times more or less than foretold, of loads that the gateway had not seen. `ran`: foretold of the calls of a step,
which are fewer than the streams while requests and answers are on their way."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A measured step: n calls, the mean of the tokens in the cache, seconds."""

    running: int
    kv: float
    step_s: float

    @property
    def sample(self) -> Sample:
        """The measurement as a sample for the fit."""
        return Sample(self.running, self.kv, self.step_s)


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """A load through the gateway."""

    streams: int
    unseen: bool
    """The gateway had learnt nothing from it."""
    tokens_per_s: float
    calls: float
    """Calls of a step, by the engine's own counts."""

    def foretold(self, model: EngineModel, calls: float) -> float:
        """Tokens/s of a model with so many calls."""
        return model.rate(calls, calls * (_TYPICAL + _TOKENS / 2))

    def off(self, model: EngineModel, calls: float) -> float:
        """How many times more or less than foretold it was."""
        ratio = self.foretold(model, calls) / self.tokens_per_s
        return max(ratio, 1 / ratio)


@dataclass(frozen=True, slots=True)
class Job:
    """A call of the closed loop."""

    prompt: int
    sampled: int


class Client:
    """Asks an engine for tokens, in one piece each."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._random = Random(5)
        self._number = 0

    async def ask(self, prompt: int, tokens: int) -> None:
        """One call: so many tokens after so many. Raises httpx.HTTPError, and ValueError for another count."""
        self._number += 1
        params = {
            "temperature": 1.0,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }
        body = {
            "request_id": f"costs-{self._number}",
            "token_ids": [self._random.randrange(_TEXT) for _ in range(prompt)],
            "sampling_params": params,
            "stream": False,
        }
        answer = await self._http.post("/inference/v1/generate", json=body)
        answer.raise_for_status()
        found = len(answer.json()["choices"][0]["token_ids"])
        if found != tokens:
            raise ValueError(f"asked for {tokens} tokens, got {found}")

    async def together(self, running: int, prompt: int, tokens: int) -> float:
        """Seconds until so many calls at once have ended."""
        began = time.perf_counter()
        await asyncio.gather(*(self.ask(prompt, tokens) for _ in range(running)))
        return time.perf_counter() - began

    async def step(self, running: int, prompt: int, rounds: int) -> Cell | None:
        """A step, from `rounds` measurements; None if all of them were disturbed too much."""
        few, many = [], []
        for _ in range(rounds):
            few += [await self.together(running, prompt, _FEW) for _ in range(2)]
            many.append(await self.together(running, prompt, _MANY))
        spent = min(many) - min(few)
        if spent < _SURE * min(few):
            return None
        return Cell(running, running * (prompt + (_FEW + _MANY) / 2), spent / (_MANY - _FEW))

    async def prefill(self, rounds: int) -> float:
        """Seconds a token of a prompt: the slope by least squares."""
        await self.ask(64, 1)
        seconds = [
            min([await self.together(1, prompt, 1) for _ in range(3 * rounds)]) for prompt in _PREFILLS
        ]
        return max(statistics.linear_regression(_PREFILLS, seconds).slope, 0.0)

    async def capacity(self) -> int:
        """Tokens that its cache holds."""
        page = (await self._http.get("/metrics")).text
        blocks, size = (
            label(page, "vllm:cache_config_info", key) for key in ("num_gpu_blocks", "block_size")
        )
        if blocks is None or size is None:
            raise ValueError("the engine does not say how large its cache is")
        return int(blocks) * int(size)

    async def loop(self, jobs: Sequence[Job]) -> float:
        """Seconds of the closed loop: `_AT_ONCE` calls at a time, in order."""
        left = iter(jobs)

        async def stream() -> None:
            for job in left:
                await self.ask(job.prompt, job.sampled)

        began = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(_AT_ONCE)))
        return time.perf_counter() - began


def jobs() -> list[Job]:
    """The calls of the closed loop: the same every time."""
    random = Random(11)
    return [
        Job(
            random.randrange(32, 512),
            min(_LONGEST, max(1, round(random.lognormvariate(0, _SIGMA) * _MEDIAN))),
        )
        for _ in range(_CALLS)
    ]


def simulated(costs: EngineCosts, calls: Sequence[Job]) -> float:
    """Seconds of the closed loop in the simulator's engine."""
    engine, left, now = Engine(costs), iter(calls), 0.0

    def begin(at: float) -> None:
        if (job := next(left, None)) is not None:
            engine.add(at, Call(job, job.prompt, job.sampled))

    for _ in range(_AT_ONCE):
        begin(now)
    while (event := engine.next_event()) is not None:
        now = max(now, event)
        for _ in engine.settle(now):
            begin(now)
    return now


def error(model: EngineModel, cells: Sequence[Cell]) -> float:
    """The median relative error of a step."""
    return statistics.median(abs(model.step_s(cell.running, cell.kv) / cell.step_s - 1) for cell in cells)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each step.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Of each load, for the live fit.")] = 12.0,
    engine_python: EnginePython = ENGINE_PYTHON,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/costs.json"),
) -> None:
    """Measure real vLLM's steps, fit the simulator's coefficients to them, and compare.

    Example: python -m bench.costs --rounds 3
    """
    check_installed(engine_python)
    began, before = time.monotonic(), machine()
    with Steps(len(list(_pairs())) + 3 + len(_STREAMS) + len(_UNSEEN)) as steps:
        found = asyncio.run(_bench(rounds, seconds, engine_python, steps))
    _show(found)
    _say(found)
    report = {
        "bench": "costs",
        "command": " ".join(["python -m bench.costs", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "seconds": round(time.monotonic() - began, 1),
        **found,
    }
    finish(report, out)


def _pairs() -> Iterator[tuple[int, int]]:
    return (
        (running, prompt)
        for prompt in _PROMPT
        for running in _RUNNING
        if running * (prompt + _MANY) <= _MOST_KV
    )


async def _bench(rounds: int, seconds: float, python: Path, steps: Steps) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        work = Path(folder)
        save_model(work / "model")
        steps.begin("start vLLM")
        async with run_engine(
            "vllm", work / "model", work, python, ["--max-num-seqs", str(_SLOTS)]
        ) as engine:
            async with httpx.AsyncClient(base_url=engine.url, timeout=120.0) as http:
                client = Client(http)
                await client.together(64, 64, 16)
                found = await _direct(client, rounds, steps)
            return {**found, **await _live(engine, work, seconds, steps)}


async def _direct(client: Client, rounds: int, steps: Steps) -> dict[str, Any]:
    measured = []
    for running, prompt in _pairs():
        steps.begin(f"{running} calls, prompts of {prompt} tokens")
        measured.append(await client.step(running, prompt, rounds))
    cells = [cell for cell in measured if cell is not None]
    steps.begin("prefill")
    prefill_s = await client.prefill(rounds)
    fitted = fit([cell.sample for cell in cells[::2]], _PRIOR).model
    capacity = await client.capacity()
    steps.begin("a closed loop of calls of log-normal lengths")
    calls = jobs()
    real = min([await client.loop(calls) for _ in range(rounds)])
    told = simulated(EngineCosts(fitted, prefill_s, capacity, _SLOTS), calls)
    return {
        "cells": [asdict(cell) for cell in cells],
        "disturbed": len(measured) - len(cells),
        "k": {key: getattr(fitted, key) for key in ("k1", "k2", "k3", "k4")},
        "prefill_s": prefill_s,
        "capacity": capacity,
        "step_error_held_out": error(fitted, cells[1::2]),
        "loop_s": real,
        "loop_simulated_s": told,
        "loop_error": told / real - 1,
    }


async def _speed(gateway: str) -> dict[str, Any]:
    """The gateway's speed model of its engine, from the admin API."""
    async with httpx.AsyncClient(base_url=gateway) as http:
        engines = (await http.get("/admin/v1/engines")).raise_for_status().json()["engines"]
    found: dict[str, Any] = engines[0]["speed"] or {"error": None}
    return found


async def _counts(http: httpx.AsyncClient) -> tuple[float, float]:
    """The engine's own counts: tokens that it sampled, and steps."""
    names = ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
    found = samples((await http.get("/metrics")).text, names)
    return sum(found[names[0]]), sum(found[names[1]])


async def _live(engine: Child, work: Path, seconds: float, steps: Steps) -> dict[str, Any]:
    """Fits the engine's speed from its live metrics under load, and predicts other loads with it."""
    async with (
        run_gateway(engine, work / "model", work) as gateway,
        httpx.AsyncClient(base_url=engine.url) as http,
    ):
        target = await GatewayTarget.open(gateway.port, Prompts.load(work / "model"))

        async def load(streams: int, said: Callable[[str], None] = steps.begin) -> LiveLoad:
            said(f"through the gateway, {streams} streams")
            tokens, made = await _counts(http)
            window = await measure(target, Shape(streams, _TOKENS, True), seconds, {})
            tokens, made = (
                now - before for now, before in zip(await _counts(http), (tokens, made), strict=True)
            )
            return LiveLoad(streams, streams in _UNSEEN, window.tokens / window.seconds, tokens / made)

        loads = [await load(n) for n in _STREAMS]
        speed = await _speed(gateway.url)
        for _ in range(_AGAIN):  # a fit needs more seconds than short loads have
            if speed["error"] is not None:
                break
            for n in _STREAMS:
                await load(n, steps.say)
            speed = await _speed(gateway.url)
        loads += [await load(n) for n in _UNSEEN]
    if speed["error"] is None:
        raise RuntimeError(f"the gateway has not fitted anything: {speed}")
    model = EngineModel(*(speed[key] for key in ("k1", "k2", "k3", "k4")))
    off = [load.off(model, load.streams) for load in loads if load.unseen]
    ran = [load.off(model, load.calls) for load in loads if load.unseen]
    foretold = [(load.foretold(model, load.streams), load.foretold(model, load.calls)) for load in loads]
    return {
        "live": speed,
        "live_loads": [
            {**asdict(load), "foretold": whole, "foretold_ran": part}
            for load, (whole, part) in zip(loads, foretold, strict=True)
        ],
        **dict(zip(_OFF, (statistics.median(off), max(off), statistics.median(ran), max(ran)), strict=True)),
    }


def _show(found: dict[str, Any]) -> None:
    model = EngineModel(**found["k"])
    rows = [
        [
            str(cell["running"]),
            number(cell["kv"]),
            number(1000 * cell["step_s"]),
            number(1000 * model.step_s(cell["running"], cell["kv"])) + ("" if n % 2 else " *"),
        ]
        for n, cell in enumerate(found["cells"])
    ]
    show(
        "A decode step of vLLM here, ms",
        ["calls", "tokens in the cache", "measured", "fitted"],
        rows,
        "* a pair that was fitted to",
    )
    figures = ("step_error_held_out", "disturbed", "loop_s", "loop_simulated_s", "loop_error", *_OFF)
    shown = [["prefill, us a token", number(1e6 * found["prefill_s"])]]
    shown += [[key, number(found[key])] for key in figures]
    for load in found["live_loads"]:
        keys = ("calls", "tokens_per_s", "foretold", "foretold_ran")
        shown.append([f"{load['streams']} streams *", " / ".join(number(load[key]) for key in keys)])
    note = (
        "* calls of a step / tokens/s through the gateway / foretold of the streams / foretold of those calls"
    )
    show("Beside what was fitted", ["figure", "value"], shown, note)


def _say(found: dict[str, Any]) -> None:
    """The coefficients as a scenario of the simulator takes them."""
    k = ", ".join(f"{key} = {value:.4g}" for key, value in found["k"].items())
    typer.echo("For a scenario of `scheduler simulate`:\n[engine_costs]")
    typer.echo(f"prefill_s = {found['prefill_s']:.4g}\ncapacity = {found['capacity']}\nslots = {_SLOTS}")
    typer.echo(f"model = {{ {k} }}")


if __name__ == "__main__":
    typer.run(main)
