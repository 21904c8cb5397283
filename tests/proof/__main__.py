"""`python -m tests.proof`: proves that weight updates lose, double and mislabel no token, and that the proof would notice."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.report import Steps, finish, machine, show
from tests.harness.transports import TRANSPORTS
from tests.harness.vllm import PYTHON
from tests.proof.checker import COUNTS
from tests.proof.models import VERSIONS
from tests.proof.mutants import MUTANTS, Mutant
from tests.proof.trial import Trial, run_trial, small
from tests.proof.world import ORDERS, Plan

_ENGINES = {"fake": ["fake"], "vllm": ["vllm"], "both": ["fake", "vllm"]}
_MODES = {"abort": ["abort"], "keep": ["keep"], "both": ["abort", "keep"]}
_ORDERS = {**{name: [name] for name in ORDERS}, "all": [*ORDERS]}
_TOKENS = {"fake": 100, "vllm": 1600}
"""Tokens of a long stream, so that it takes some seconds."""
_SUMMED = ("tokens_checked", *COUNTS, "unconfirmed")


def main(
    engine: Annotated[str, typer.Option(help="`fake`, `vllm` (real, on the CPU) or `both`.")] = "both",
    seed: Annotated[int, typer.Option(help="What happens when is drawn from it.")] = 0,
    updates: Annotated[
        int, typer.Option(min=1, max=VERSIONS - 1, help="Weight updates in each run; an engine dies in one.")
    ] = VERSIONS - 1,
    mode: Annotated[str, typer.Option(help="How engines are paused: `abort`, `keep` or `both`.")] = "both",
    order: Annotated[str, typer.Option(help="`rolling`, `pull` or `all`.")] = "rolling",
    transport: Annotated[
        str, typer.Option(help=f"How versions come to engines: {', '.join(TRANSPORTS)} or `all`.")
    ] = "filesystem",
    streams: Annotated[int, typer.Option(min=1, help="Long streams.")] = 16,
    agents: Annotated[int, typer.Option(min=0, help="Agents that make short calls.")] = 8,
    mutants: Annotated[bool, typer.Option(help="Also put each mutant into the gateway.")] = True,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/proof.json"),
) -> None:
    """Prove that weight updates lose, double and mislabel no token.

    Two engines, long streams and short calls by the openai package, weights that name their version in every token, updates while
    all of that runs, and an engine that is killed in the middle. A checker that shares no code with the gateway reads the version
    of every token from the token. Then the gateway is made wrong in one way at a time, and the checker must notice each.

    Examples:

      python -m tests.proof --engine fake --seed 7

      python -m tests.proof --engine vllm --updates 3 --mode keep --no-mutants
    """
    engines = _choice("--engine", _ENGINES, engine)
    ways = _choice("--transport", {**{name: [name] for name in TRANSPORTS}, "all": [*TRANSPORTS]}, transport)
    if transport == "lora" and "vllm" in engines:
        raise typer.BadParameter(
            "adapters that count are made for fake engines alone: --engine fake", param_hint="--transport"
        )
    modes, orders = _choice("--mode", _MODES, mode), _choice("--order", _ORDERS, order)
    if "vllm" in engines and not PYTHON.exists():
        raise typer.BadParameter("vLLM's CPU build is not there: run `make engine`", param_hint="--engine")
    crossed = max(1, streams // 5)
    plans = [
        Plan(
            *(e, m, o, w, seed),
            updates=updates,
            streams=streams,
            agents=agents,
            tokens=_TOKENS[e],
            crossed=0 if w == "lora" else crossed,  # no call crosses a version that is loaded beside it
        )
        for e in engines
        for m in modes
        for o in orders
        for w in ways
        if (e, w) != ("vllm", "lora")
    ]
    logging.getLogger("gateway").setLevel(logging.CRITICAL)  # that an engine was killed is no news here
    runs = [(mutant, m) for mutant in MUTANTS for m in modes if mutants and m in mutant.modes]
    report = asyncio.run(_prove(plans, [(mutant, small(Plan(mode=m, seed=seed))) for mutant, m in runs]))
    finish({"command": " ".join(["python -m tests.proof", *sys.argv[1:]]), **report}, out)
    raise typer.Exit(1 if report["problems"] else 0)


async def _prove(plans: list[Plan], mutants: list[tuple[Mutant, Plan]]) -> dict[str, Any]:
    started = time.monotonic()
    with Steps(len(plans) + len(mutants)) as steps:
        trials = []
        for plan in plans:
            steps.begin(plan.name)
            trials.append(await run_trial(plan, steps.say))
        spoilt = []
        for mutant, plan in mutants:
            steps.begin(f"{mutant.name}: {plan.name}")
            spoilt.append((mutant, await run_trial(plan, lambda _: None, mutant)))
    _show(trials, spoilt)
    missed = [
        f"not caught: {m.name} ({trial.plan.name})" for m, trial in spoilt if not m.caught_by(trial.report)
    ]
    problems = [problem for trial in trials for problem in trial.problems] + missed
    for problem in problems:
        print(problem)
    found = [trial.report.to_json() for trial in trials]
    return {
        **{key: sum(report[key] for report in found) for key in _SUMMED},
        "mutants": len(spoilt),
        "mutants_caught": len(spoilt) - len(missed),
        "problems": problems,
        "machine": machine(),
        "trials": [trial.to_json() for trial in trials],
        "mutant_trials": [{"mutant": mutant.name, **trial.to_json()} for mutant, trial in spoilt],
        "seconds": round(time.monotonic() - started, 1),
    }


def _show(trials: list[Trial], spoilt: list[tuple[Mutant, Trial]]) -> None:
    header = [
        "",
        "updates",
        "calls",
        "tokens",
        "crossings",
        "unconfirmed",
        *(c.replace("_", " ") for c in COUNTS),
    ]
    rows = [[trial.plan.name, *map(str, _cells(trial)), f"{trial.seconds:.0f}"] for trial in trials]
    show("What was checked, and what was wrong with it", [*header, "seconds"], rows)
    caught = [
        [
            mutant.name,
            trial.plan.mode,
            "caught" if mutant.caught_by(trial.report) else "NOT CAUGHT",
            *(str(trial.report.counts[count]) for count in COUNTS),
        ]
        for mutant, trial in spoilt
    ]
    if caught:
        show("Gateways that are wrong", ["", "mode", "", *(c.replace("_", " ") for c in COUNTS)], caught)


def _cells(trial: Trial) -> list[int]:
    report = trial.report
    head = [len(trial.outcome.updates), report.calls, report.tokens_checked, report.crossings.total()]
    return [*head, report.unconfirmed, *(report.counts[count] for count in COUNTS)]


def _choice(option: str, choices: dict[str, list[str]], given: str) -> list[str]:
    if given not in choices:
        raise typer.BadParameter(", ".join(choices), param_hint=option)
    return choices[given]


if __name__ == "__main__":
    typer.run(main)
