"""The gateway's CPU against that of vLLM's own chat front end, for the same work on real vLLM with a tiny model.

Two ways to the same engine, in turn: (a) the client asks vLLM's `/v1/chat/completions`; (b) the client asks the gateway, which
records and asks vLLM's `/inference/v1/generate`. Both stream. CPU-seconds per 1,000 tokens of each process: vLLM's API server,
its EngineCore, the gateway, the client. `cpu_vs_vllm_chat` is the gateway's in (b) over the API server's in (a) while the client
asks for log-probabilities; `cpu_vs_vllm_chat_plain` is the same where it does not: then vLLM makes none, and the gateway still
records them. What the API server spends in (b) comes on top of the gateway, and is reported beside it.

Then the engine gets a core of its own, and the gateway and the client another: `own_cores_ratio` is the tokens/s through the
gateway over those of `/inference/v1/generate` called directly.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.figures import figures, ratio
from bench.load import Shape, Target, Window, measure
from bench.model import save_model
from bench.processes import ENGINE_PYTHON, Child, EnginePython, check_installed, run_engine, run_gateway
from bench.report import Spread, Steps, finish, machine, ranged, show, spread
from bench.targets import ChatKind, ChatTarget, DirectTarget, GatewayTarget, Prompts

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The prompt that the gateway renders for a plain message, so that both ways give the engine the same prompts."""
_MAX_TOKENS = 64
_CORE = {"core": "EngineCore"}
_PROCESSES = ("api_server", "engine_core", "gateway", "client")


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a run."""

    streams: int
    seconds: float
    rounds: int
    python: Path

    @property
    def shape(self) -> Shape:
        """The load."""
        return Shape(self.streams, _MAX_TOKENS, True)

    @property
    def steps(self) -> int:
        """Steps of the whole."""
        return 1 + 3 * 2 * self.rounds


def main(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of one measurement.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of measurements.")] = 3,
    engine_python: EnginePython = ENGINE_PYTHON,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path(
        "runs/bench/vllm_chat.json"
    ),
) -> None:
    """Compare the gateway's CPU with that of vLLM's own chat front end. The goal: at most as much, and own_cores_ratio 0.97.

    Example: python -m bench.vllm_chat --streams 16 --rounds 5
    """
    check_installed(engine_python)
    import uvloop

    plan = Plan(streams, seconds, rounds, engine_python)
    started, before = time.monotonic(), machine()
    with Steps(plan.steps) as steps:
        results = uvloop.run(_bench(plan, steps))
    _show(results)
    asked, plain, apart = results
    report = {
        "bench": "vllm_chat",
        "command": " ".join(["python -m bench.vllm_chat", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "streams": streams,
        "results": results,
        "failed_requests": sum(sum(result["failures"].values()) for result in results),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_vs_vllm_chat": _median(asked["gateway_to_api_server_cpu"]),
        "cpu_vs_vllm_chat_plain": _median(plain["gateway_to_api_server_cpu"]),
        "own_cores_ratio": _median(apart["tokens_ratio"]),
    }
    finish(report, out)


async def _bench(plan: Plan, steps: Steps) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        work = Path(folder)
        save_model(work / "model")
        template = work / "template.jinja"
        template.write_text(_TEMPLATE)
        prompts = Prompts.load(work / "model")
        gc.collect()
        gc.freeze()
        steps.begin("start vLLM and the gateway")
        args = ["--chat-template", str(template)]
        async with (
            run_engine("vllm", work / "model", work, plan.python, args) as engine,
            run_gateway(engine, work / "model", work) as gateway,
        ):
            bench = _Bench(plan, engine, gateway, prompts, steps)
            results = [await bench.compare(logprobs) for logprobs in (True, False)]
            return [*results, await bench.own_cores()]


class _Bench:
    """One vLLM, and the gateway before it."""

    def __init__(self, plan: Plan, engine: Child, gateway: Child, prompts: Prompts, steps: Steps) -> None:
        self._plan = plan
        self._engine = engine
        self._gateway = gateway
        self._prompts = prompts
        self._steps = steps

    async def compare(self, logprobs: bool) -> dict[str, Any]:
        """vLLM's chat API and the gateway's."""
        kind = ChatKind(logprobs=logprobs)
        chat = ChatTarget("vLLM's chat", self._engine.port, self._prompts, kind=kind)
        through = await GatewayTarget.open(self._gateway.port, self._prompts, kind)
        name = "with log-probabilities" if logprobs else "without log-probabilities"
        rounds = await self._rounds(name, [chat, through])
        ours, theirs = "gateway_cpu_s_per_1k_tokens", "api_server_cpu_s_per_1k_tokens"
        return {
            **_result(name, rounds),
            "gateway_to_api_server_cpu": spread(ratio(b[ours], a[theirs]) for a, b in _figures(rounds)),
        }

    async def own_cores(self) -> dict[str, Any]:
        """The engine on one core; gateway and client on the other."""
        direct = DirectTarget(self._engine.port, self._prompts)
        through = await GatewayTarget.open(self._gateway.port, self._prompts)
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            self._steps.say(
                "one core alone: nothing can be pinned, and own_cores_ratio is that of a shared core"
            )
        with _on({cpus[-1]}):
            self._engine.pin({cpus[0]})
            self._gateway.pin({cpus[-1]})
            rounds = await self._rounds("cores of their own", [direct, through])
        self._engine.pin(set(cpus))
        self._gateway.pin(set(cpus))
        return _result("cores of their own", rounds)

    async def _rounds(self, name: str, targets: Sequence[Target]) -> list[tuple[Window, Window]]:
        rounds = []
        for target in targets:
            await measure(target, self._plan.shape, min(1.0, self._plan.seconds), {})
        for i in range(self._plan.rounds):
            windows: dict[str, Window] = {}
            for target in targets if i % 2 == 0 else reversed(targets):
                self._steps.begin(f"{name}, round {i + 1}: {target.name}")
                window = await measure(target, self._plan.shape, self._plan.seconds, self._clocks())
                windows[target.name] = window
                for reason, times in window.failures.items():
                    self._steps.say(f"{times} failed requests: {reason}")
            rounds.append((windows[targets[0].name], windows[targets[1].name]))
        return rounds

    def _clocks(self) -> dict[str, Callable[[], float]]:
        return {
            "api_server": lambda: self._engine.cpu_by_role(_CORE)["main"],
            "engine_core": lambda: self._engine.cpu_by_role(_CORE)["core"],
            "gateway": self._gateway.cpu_s,
            "client": time.process_time,
        }


@contextmanager
def _on(cpus: set[int]) -> Iterator[None]:
    """This process on these CPUs, and afterwards where it was."""
    before = os.sched_getaffinity(0)
    try:
        _pin_own(cpus)
        yield
    finally:
        _pin_own(before)


def _pin_own(cpus: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)


def _figures(rounds: list[tuple[Window, Window]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(figures(a), figures(b)) for a, b in rounds]


def _result(name: str, rounds: list[tuple[Window, Window]]) -> dict[str, Any]:
    """Measures tokens/s and every process's CPU, directly and through the gateway."""
    found = _figures(rounds)
    keys = ["tokens_per_s", "first_ms_p50", "first_ms_p99"]
    keys += [f"{process}_cpu_s_per_1k_tokens" for process in _PROCESSES]
    failures: dict[str, int] = {}
    for window in (window for pair in rounds for window in pair):
        for reason, times in window.failures.items():
            failures[reason] = failures.get(reason, 0) + times
    return {
        "name": name,
        **{
            key: {"direct": spread(a[key] for a, _ in found), "gateway": spread(b[key] for _, b in found)}
            for key in keys
        },
        "tokens_ratio": spread(ratio(b["tokens_per_s"], a["tokens_per_s"]) for a, b in found),
        "failures": failures,
    }


def _show(results: list[dict[str, Any]]) -> None:
    """A row for each way under each load."""
    header = ["", "tokens/s", "first p50, ms", "p99, ms", "API server", "EngineCore", "gateway", "client"]
    rows = []
    for result, way in zip(results, ("vLLM's chat", "vLLM's chat", "vLLM's generate"), strict=True):
        for side, label in (("direct", way), ("gateway", "the gateway")):
            cells = [
                ranged(result[key][side], 2) for key in result if key.endswith(("_per_s", "_p50", "_p99"))
            ]
            cells += [ranged(result[f"{process}_cpu_s_per_1k_tokens"][side], 2) for process in _PROCESSES]
            rows.append([f"{label}, {result['name']}", *cells])
    failed = sum(sum(result["failures"].values()) for result in results)
    note = f"processes: CPU-seconds per 1,000 tokens; medians of the rounds, (min..max); failed requests: {failed}"
    show("The gateway and vLLM's own chat front end, streaming", header, rows, note)


def _median(values: Spread | None) -> float | None:
    return values["median"] if values else None


if __name__ == "__main__":
    typer.run(main)
