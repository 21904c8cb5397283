"""Measures how long an update stalls open streams, compared with the time that the engine itself needs.

Two engines, a gateway of their own, and streams that stay open while one version after another is published. Definitions:

- a stream's *stall* in an update: the longest gap between two of its chunks that touches the update, less its usual (median) gap;
- the *engine's own time*: its pause and its load, as the update's report has them, because the stall contains that very pause and
  load. To check the report, the engines are also driven directly in the same run, without the gateway and with the streams open
  (`direct`);
- *ratio*: a stall over the own time of the engine that had the stream when the update began; *added*: the stall less that time,
  which is the better measure of short loads. With `--transport collective` a load copies tensors that the engine has received
  before, and engines are not driven directly, since they load no folder;
- *tokens/s*: of all streams together, in windows of `WINDOW_S`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer

from bench.endless import Versions
from bench.processes import (
    ENGINE_PYTHON,
    Child,
    EnginePython,
    check_installed,
    run_server,
    serve_gateway,
)
from bench.report import Steps, finish, machine, number, percentile, show
from bench.streams import OpenStreams
from bench.targets import GatewayTarget, Prompts
from bench.vllm_cpu import VLLM_CPU
from headgate.client import GatewayClient
from headgate.processes.ports import free_port

WINDOW_S = 0.25
_PAUSES = ("abort", "handback", "freeze")
_DIRECT_ROUNDS = 2
_WARM_UP = 1
"""Updates that are not counted: an engine's first batch with all streams is slow."""
_UPDATE_S = 300.0
_ENGINES = {"fake": ["fake"], "vllm": ["vllm"], "both": ["fake", "vllm"]}
_PLAN = ("engine", "mode", "transport", "streams", "every_s")
_TRANSPORTS = ("filesystem", "collective")
_MODES = {"abort": ["abort"], "keep": ["keep"], "both": ["abort", "keep"]}


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a run."""

    engine: str
    mode: str
    streams: int
    updates: int
    every_s: float
    load_s: float
    delay_s: float
    python: Path
    transport: str = "filesystem"

    @property
    def versions(self) -> int:
        """The newest version that is published."""
        return self.updates + _WARM_UP

    @property
    def name(self) -> str:
        """The scenario's name for people."""
        return f"{self.engine}, {self.mode}, {self.transport}, {self.streams} streams"

    def config(self, sender: str, work: Path) -> str:
        """Return the tables of the gateway's file. `sender`: the URL of the trainer's server; empty without one."""
        if self.engine == "fake":
            engine = f"args = ['--delay-s', '{self.delay_s}']\n"
        else:
            env = ", ".join(f"{name} = '{value}'" for name, value in VLLM_CPU["env"].items())
            engine = f"python = '{self.python}'\nargs = {json.dumps(VLLM_CPU['args'])}\nenv = {{{env}}}\n"
        if sender:
            engine += (
                f"transport = 'collective'\n[weights]\nsources = ['{sender}']\ndir = '{work / 'copies'}'\n"
            )
        return (
            f"[update]\nmode = '{self.mode}'\norder = 'rolling'\nprobe = false\n"
            f"[engine]\nlaunch = '{self.engine}'\ncount = 2\n{engine}"
        )


@dataclass(slots=True)
class Update:
    """One update, as measured from outside and as the gateway reports it."""

    began: float
    ended: float
    record: dict[str, Any]
    engine_of: dict[str, str | None]
    """The engine of each call when the update began."""

    @property
    def own_s(self) -> dict[str, float]:
        """Each engine's pause and load."""
        return {
            report["engine"]: sum(report["seconds"].get(step, 0.0) for step in (*_PAUSES, "load"))
            for report in self.record["report"]
        }


@dataclass(slots=True)
class Run:
    """The results of one scenario."""

    plan: Plan
    streams: OpenStreams
    updates: list[Update] = field(default_factory=list)
    direct_s: list[float] = field(default_factory=list)

    def stalls(self, update: Update) -> Iterator[tuple[float, float]]:
        """Return the stall and the engine's own time of every stream that was open in an update."""
        own_s = update.own_s
        for requests in self.streams.requests:
            gaps = [(a, b) for request in requests for a, b in request.gaps()]
            calls = [r.call for r in requests if r.chunks and r.chunks[0][0] < update.began]
            touching = [b - a for a, b in gaps if b > update.began and a < update.ended]
            if touching and calls:
                stall = max(0.0, max(touching) - median(b - a for a, b in gaps))
                yield stall, own_s.get(update.engine_of.get(calls[-1]) or "", max(own_s.values()))

    def rates(self) -> list[float]:
        """Return tokens/s in every window from the first update's begin to the last one's end."""
        began, ended = self.updates[0].began, self.updates[-1].ended
        windows = [0] * max(1, int((ended - began) / WINDOW_S))
        chunks = (c for requests in self.streams.requests for r in requests for c in r.chunks)
        for at, tokens in chunks:
            window = int((at - began) // WINDOW_S)
            if 0 <= window < len(windows):
                windows[window] += tokens
        return [tokens / WINDOW_S for tokens in windows]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        updates = [self._update_json(update) for update in self.updates]
        stalls = [pair for update in self.updates for pair in self.stalls(update)]
        rates = self.rates()
        return {
            **{name: getattr(self.plan, name) for name in _PLAN},
            "updates": updates,
            **_stall_figures(stalls),
            "own_s": median(own for update in self.updates for own in update.own_s.values()),
            "own_direct_s": median(self.direct_s) if self.direct_s else None,
            "tokens_per_s": {"median": median(rates), "min": min(rates)},
            "failures": dict(self.streams.failures),
        }

    def _update_json(self, update: Update) -> dict[str, Any]:
        stalls = list(self.stalls(update))
        return {
            "version": update.record["version"],
            "state": update.record["state"],
            "seconds": {report["engine"]: report["seconds"] for report in update.record["report"]},
            "own_s": update.own_s,
            "streams": len(stalls),
            **_stall_figures(stalls),
        }


def main(
    engine: Annotated[str, typer.Option(help="`fake`, `vllm` (real, on a tiny model) or `both`.")] = "both",
    mode: Annotated[str, typer.Option(help="[update] mode: `abort`, `keep` or `both`.")] = "both",
    transport: Annotated[str, typer.Option(help="`filesystem` or `collective`.")] = "filesystem",
    streams: Annotated[str, typer.Option(help="Open streams with the fake engine and with vLLM.")] = "500,32",
    updates: Annotated[int, typer.Option(min=1, max=8, help="Updates in each run.")] = 5,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 3.0,
    load_s: Annotated[float, typer.Option(min=0.01, help="Seconds of a load of the fake engine.")] = 2.0,
    delay_s: Annotated[float, typer.Option(min=0.001, help="Seconds per token of the fake engine.")] = 0.2,
    engine_python: EnginePython = ENGINE_PYTHON,
    out: Annotated[Path, typer.Option(help="The file of the JSON report.")] = Path("runs/bench/update.json"),
) -> None:
    """Measure how long updates stall open streams, compared with the time that the engines themselves need.

    Two engines behind a gateway, streams that stay open, and an update every few seconds. The goal: a stall of at most 1.2 times
    the engine's own pause and load, and, where engines are updated one after the other, never a moment without tokens.

    Examples:

      python -m bench.update --engine fake --mode keep --streams 100

      python -m bench.update --engine vllm --transport collective
    """
    engines, modes = _ENGINES.get(engine), _MODES.get(mode)
    if engines is None or modes is None or transport not in _TRANSPORTS:
        raise typer.BadParameter("see --help", param_hint="--engine, --mode or --transport")
    if "vllm" in engines:
        check_installed(engine_python)
    counts = dict(zip(("fake", "vllm"), _two_numbers(streams), strict=True))
    rest = every_s, load_s, delay_s, engine_python.absolute(), transport
    plans = [Plan(e, m, counts[e], updates, *rest) for e in engines for m in modes]
    import uvloop

    started, before = time.monotonic(), machine()
    with Steps(sum(plan.versions + 2 for plan in plans)) as steps:
        results = uvloop.run(_bench(plans, steps))
    _show(results)
    report = {
        "bench": "update",
        "command": " ".join(["python -m bench.update", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "window_s": WINDOW_S,
        "results": results,
        "stall_ratio_p99": max(result["ratio"]["p99"] for result in results),
        "failed_requests": sum(sum(result["failures"].values()) for result in results),
        "min_tokens_per_s": min(result["tokens_per_s"]["min"] for result in results),
        "seconds": round(time.monotonic() - started, 1),
    }
    finish(report, out)


async def _bench(plans: Sequence[Plan], steps: Steps) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        for number_, plan in enumerate(plans):
            work = Path(folder) / str(number_)
            versions = Versions(work / "models")
            for version in range(1, plan.versions + 1):
                versions.path(version)
            prompts = Prompts.load(versions.first)
            gc.collect()
            gc.freeze()  # the tokenizer's library leaves a million objects that the load client need not walk
            steps.begin(f"{plan.name}: start")
            async with (
                _sender(plan.transport, versions.folder, work) as sender,
                serve_gateway(versions.first, plan.config(sender, work), work) as gateway,
            ):
                run = await _Scenario(plan, versions, gateway, prompts, steps).run()
            results.append(run.to_json())
    return results


@asynccontextmanager
async def _sender(transport: str, folder: Path, work: Path) -> AsyncIterator[str]:
    """Run the trainer's server of a folder of versions, if the transport needs one. Return its URL."""
    if transport != "collective":
        yield ""
        return
    port = free_port()
    argv = [sys.executable, "-m", "trainer.publish.sender", "--dir", str(folder)]
    argv += ["--engine-facing-host", "127.0.0.1", "--port", str(port)]
    async with run_server("sender", argv, port, "/versions", work) as child:
        yield child.url


class _Scenario:
    """One gateway, its streams and its updates."""

    def __init__(
        self, plan: Plan, versions: Versions, gateway: Child, prompts: Prompts, steps: Steps
    ) -> None:
        self._plan = plan
        self._versions = versions
        self._gateway = gateway
        self._prompts = prompts
        self._steps = steps

    async def run(self) -> Run:
        plan, url = self._plan, self._gateway.url
        target = await GatewayTarget.open(self._gateway.port, self._prompts)
        async with GatewayClient(url) as admin, httpx.AsyncClient(timeout=_UPDATE_S) as http:
            engines = [engine["url"] for engine in (await admin.status())["engines"]]
            if plan.engine == "fake":
                for engine in engines:
                    await _post(http, f"{engine}/fake/faults", {"load_s": plan.load_s})
            async with OpenStreams(target, plan.streams) as streams:
                run = Run(plan, streams)
                for version in range(1, plan.versions + 1):
                    await asyncio.sleep(plan.every_s)
                    self._steps.begin(f"{plan.name}: version {version}")
                    run.updates.append(await self._update(admin, http, version))
                del run.updates[:_WARM_UP]
                await asyncio.sleep(plan.every_s)
                self._steps.begin(f"{plan.name}: the engines alone")
                for engine in engines * _DIRECT_ROUNDS if plan.transport == "filesystem" else ():
                    run.direct_s.append(await _drive(http, engine, str(self._versions.path(plan.versions))))
        for reason, times in streams.failures.items():
            self._steps.log(f"{times} failed requests: {reason}")
        return run

    async def _update(self, admin: GatewayClient, http: httpx.AsyncClient, version: int) -> Update:
        calls = (await http.get(f"{self._gateway.url}/admin/v1/calls")).raise_for_status().json()["calls"]
        began = time.perf_counter()
        record = await admin.publish(version, str(self._versions.path(version)), wait_s=_UPDATE_S)
        ended = time.perf_counter()
        if record["state"] != "live":
            raise RuntimeError(f"version {version} is {record['state']}: {record['report']}")
        return Update(began, ended, record, {call["call_id"]: call["engine"] for call in calls})


async def _drive(http: httpx.AsyncClient, engine: str, weights: str) -> float:
    """Return the seconds of pause and load. The engine has the same weights before and after."""
    began = time.perf_counter()
    await _post(http, f"{engine}/pause?mode=keep&clear_cache=true", {})
    body = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
    await _post(http, f"{engine}/collective_rpc", body)
    seconds = time.perf_counter() - began
    await _post(http, f"{engine}/resume", {})
    return seconds


async def _post(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    (await http.post(url, json=body)).raise_for_status()


def _stall_figures(stalls: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "stall_s": _spread([stall for stall, _ in stalls]),
        "added_s": _spread([stall - own for stall, own in stalls]),
        "ratio": _spread([stall / own for stall, own in stalls]),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percent}": percentile(values, percent) for percent in (50, 99)} | {
        "max": max(values, default=None)
    }


def _show(results: Sequence[dict[str, Any]]) -> None:
    """Print a column for each scenario and a row for each figure."""
    header = [f"{r['engine']}, {r['mode']}, {r['transport']}, {r['streams']} streams" for r in results]
    steps = dict.fromkeys(
        s for r in results for u in r["updates"] for engine in u["seconds"].values() for s in engine
    )
    rows = [[f"step '{step}', s", *(number(_step(r, step)) for r in results)] for step in steps]
    rows += [
        ["pause and load, s", *(number(r["own_s"]) for r in results)],
        ["the same, engine driven directly, s", *(number(r["own_direct_s"]) for r in results)],
    ]
    for key, name in (("stall_s", "stall, s"), ("added_s", "added, s"), ("ratio", "ratio")):
        for which in ("p50", "p99", "max"):
            rows.append([f"{name}, {which}", *(number(r[key][which]) for r in results)])
    for which in ("median", "min"):
        rows.append([f"tokens/s, {which}", *(number(r["tokens_per_s"][which]) for r in results)])
    rows.append(["failed requests", *(str(sum(r["failures"].values())) for r in results)])
    note = f"steps: medians over engines and updates; tokens/s: windows of {WINDOW_S:g} s"
    show("Weight updates behind open streams, two engines", ["", *header], rows, note)


def _step(result: dict[str, Any], step: str) -> float | None:
    seconds = [e[step] for u in result["updates"] for e in u["seconds"].values() if step in e]
    return median(seconds) if seconds else None


def _two_numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    numbers = numbers * 2 if len(numbers) == 1 else numbers
    if len(numbers) != 2 or min(numbers) < 1 or max(numbers) > 4096:
        raise typer.BadParameter("one or two numbers from 1 to 4096: 500,32", param_hint="--streams")
    return numbers


if __name__ == "__main__":
    typer.run(main)
