"""Measures what the gateway costs, with recording on: compared with its peers, and with an engine reached directly.

`bench.peers` is the comparison with a pass-through, LiteLLM's proxy and routers, `bench.pair` that with the engine itself; this
is their command line and their report. Nothing is asserted: failed requests are counted and shown.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.model import save_model
from bench.pair import MAX_TOKENS, PairPlan, measure_pairs, show_pair
from bench.peer_servers import APIS, LITELLMS, ROUTERS, ROUTES, TARGETS
from bench.peers import PeerPlan, keys_of, measure_peers, show_peers
from bench.processes import ENGINE_PYTHON, EnginePython, check_installed
from bench.report import Steps, finish, machine
from bench.targets import Prompts

_ENGINES = {
    "mock": ["mock"],
    "fake": ["fake"],
    "vllm": ["vllm"],
    "both": ["fake", "vllm"],
    "all": ["mock", "fake", "vllm"],
}
_TARGETS = ",".join(name for name in TARGETS if name != ROUTES)


@dataclass(frozen=True, slots=True)
class Plan:
    """The two halves of the bench; either may be empty."""

    peers: PeerPlan | None
    pairs: PairPlan

    @property
    def steps(self) -> int:
        """Steps of the whole bench."""
        return self.pairs.steps + (self.peers.steps if self.peers else 0)


def main(
    engine: Annotated[
        str,
        typer.Option(
            help="`mock`: compared with a pass-through, LiteLLM and two routers. `fake`, `vllm` (real, on a tiny random model) or"
            " `both`: compared with the engine reached directly. `all`: everything."
        ),
    ] = "all",
    streams: Annotated[
        str, typer.Option(help="Numbers of streams with fake and vllm, with commas.")
    ] = "1,8,32,64",
    mock_streams: Annotated[str, typer.Option(help="The same with mock.")] = "64,256",
    targets: Annotated[str, typer.Option(help=f"With mock: which, with commas; also `{ROUTES}`.")] = _TARGETS,
    apis: Annotated[
        str, typer.Option(help="With mock: `chat` (OpenAI's), `messages` (Anthropic's) or both.")
    ] = ",".join(APIS),
    tools: Annotated[bool, typer.Option(help="With mock: also replies that think and call a tool.")] = True,
    logprobs: Annotated[
        bool,
        typer.Option(help="With mock: chats request log-probabilities. headgate records them anyway."),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds of one measurement; up to 4 times that for a slow target."),
    ] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each target under each load.")] = 3,
    engine_python: EnginePython = ENGINE_PYTHON,
    litellm: Annotated[
        Path,
        typer.Option(
            help="LiteLLM's command (`make bench NAME=gateway` installs it); without it LiteLLM is left out."
        ),
    ] = Path(".venv-litellm/bin/litellm"),
    routers: Annotated[
        Path,
        typer.Option(
            help="The folder of the routers' commands (`make bench NAME=gateway` installs them); missing ones are left out."
        ),
    ] = Path(".venv-routers/bin"),
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/gateway.json"),
) -> None:
    """Measure what the gateway costs, recording on.

    With `mock`, a bare engine that streams 64 tokens 5 ms apart: requests/s (32 connections and 1) and chunks/s (64 and 256
    streams) of the engine itself, headgate, a ten-line FastAPI pass-through, LiteLLM's proxy and the routers of vLLM and SGLang,
    which are compiled and record nothing, each with its CPU and memory.
    Then the same by Anthropic's messages, without the routers, and with LiteLLM twice: `litellm-rust` is its proxy started with
    LITELLM_RUST=1, and the last row reports whether it responded in Rust.
    The keys vs_litellm_requests, vs_litellm_chunks_64 and so on are headgate's rate over LiteLLM's, in the same round;
    vs_litellm_messages_requests, vs_litellm_rust_messages_chunks_64 and so on are those of messages;
    first_p99_ratio_64 is its p99 of the time to a first token over the pass-through's; idle_mib its memory before a call.

    With `fake` and `vllm`, every stream sends one request after another to the engine's own token API and to the gateway in turn.

    Read the ratios: engine, targets and load client share this machine's cores, so the absolute figures are of this machine and
    this hour. Tokens/s is the fair measure: lengths vary, and a gateway may put several tokens in a chunk.

    Examples:

      python -m bench.gateway --engine mock --seconds 5

      python -m bench.gateway --engine mock --targets headgate,passthrough --mock-streams 64 --no-tools

      python -m bench.gateway --engine mock --apis messages --mock-streams 64 --no-tools

      python -m bench.gateway --engine vllm --rounds 5
    """
    engines = _engines(engine, engine_python)
    pairs = PairPlan(
        [name for name in engines if name != "mock"],
        _numbers(streams, "--streams"),
        seconds,
        rounds,
        engine_python,
    )
    peers = None
    if "mock" in engines:
        programs = dict.fromkeys(LITELLMS, litellm) | {name: routers / name for name in ROUTERS}
        spoken, numbers = _apis(apis), _numbers(mock_streams, "--mock-streams")
        chosen = _targets(targets, spoken, programs)
        peers = PeerPlan(chosen, spoken, numbers, seconds, rounds, tools, logprobs, programs)
    import uvloop

    started, before = time.monotonic(), machine()
    plan = Plan(peers, pairs)
    with Steps(plan.steps) as steps:
        peers_results, pair_results, idle_mib = uvloop.run(_bench(plan, steps))
    show_peers(peers_results, logprobs)
    for name in pairs.engines:
        show_pair(name, [result for result in pair_results if result["engine"] == name])
    report = {
        "bench": "gateway",
        "command": " ".join(["python -m bench.gateway", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "window_s": seconds,
        "rounds": rounds,
        "max_tokens": MAX_TOKENS,
        "results": [*peers_results, *pair_results],
        "failed_requests": sum(
            sum(result["failures"].values()) for result in [*peers_results, *pair_results]
        ),
        "seconds": round(time.monotonic() - started, 1),
        **keys_of(peers_results),
        **({} if idle_mib is None else {"idle_mib": idle_mib}),
    }
    finish(report, out)


async def _bench(plan: Plan, steps: Steps) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float | None]:
    peers_results: list[dict[str, Any]] = []
    idle_mib = None
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        work = Path(folder)
        save_model(work / "model")
        prompts = Prompts.load(work / "model")
        gc.collect()
        gc.freeze()  # the tokenizer's library leaves a million objects that the load client need not walk
        if plan.peers is not None:
            peers_results, idle_mib = await measure_peers(plan.peers, work / "model", prompts, work, steps)
        pair_results = await measure_pairs(plan.pairs, work / "model", prompts, work, steps)
    return peers_results, pair_results, idle_mib


def _engines(name: str, python: Path) -> list[str]:
    names = _ENGINES.get(name)
    if names is None:
        raise typer.BadParameter(f"one of {', '.join(_ENGINES)}", param_hint="--engine")
    if "vllm" in names:
        check_installed(python)
    return names


def _apis(text: str) -> list[str]:
    names = text.split(",")
    if set(names) - set(APIS):
        raise typer.BadParameter(f"{' or '.join(APIS)}, or both with a comma", param_hint="--apis")
    return names


def _targets(text: str, apis: list[str], programs: Mapping[str, Path]) -> list[str]:
    """Return the installed targets that serve one of these APIs, and report those that are missing."""
    names = text.split(",")
    if set(names) - set(TARGETS) or "headgate" not in names:
        message = f"headgate and any of {', '.join(name for name in TARGETS if name != 'headgate')}"
        raise typer.BadParameter(message, param_hint="--targets")
    names = [name for name in names if any(name in APIS[api] for api in apis)]
    for name, program in programs.items():
        if name in names and not program.exists():
            message = f"{program} is missing (`make bench NAME=gateway` installs it): the comparison leaves out {name}"
            typer.echo(message, err=True)
            names.remove(name)
    return names


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 4096:
        raise typer.BadParameter("numbers from 1 to 4096, with commas: 1,8,32,64", param_hint=option)
    return numbers


if __name__ == "__main__":
    typer.run(main)
