"""`python -m tests.faults`: let faults happen to the product, and count what they lose, double and mix up."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from bench.report import Steps, finish, machine, show
from tests.faults import mutants as table
from tests.faults.checker import COUNTS, Report
from tests.faults.mutants import Mutant
from tests.faults.real import crashes, seam, updates
from tests.faults.real.faults import KINDS
from tests.faults.real.plan import Plan
from tests.faults.real.processes import has_vllm
from tests.faults.real.tags import COUNTS as SEAM_COUNTS
from tests.faults.report import show_counts, show_mutants
from tests.faults.routes import WRONG
from tests.faults.weights import VERSIONS
from tests.harness.transports import TRANSPORTS

app = typer.Typer(no_args_is_help=True, help=__doc__)
Trials = list[tuple[Mutant, str, Report]]
_ENGINES = {"fake": ["fake"], "vllm": ["vllm"], "both": ["fake", "vllm"]}
_MODES = {"abort": ["abort"], "keep": ["keep"], "both": ["abort", "keep"]}
_ORDERS = {**{name: [name] for name in updates.ORDERS}, "all": [*updates.ORDERS]}
_TRANSPORTS = {**{name: [name] for name in TRANSPORTS}, "all": [*TRANSPORTS]}
_SHOWN = 20
"""The number of lines of progress of the fuzzer."""
Seed = Annotated[int, typer.Option(help="All chance is drawn from it.")]
Mutants = Annotated[bool, typer.Option(help="Also run each mutant.")]


@app.command("chaos")
def run_crashes(
    seconds: Annotated[float, typer.Option(min=5, help="Seconds in which faults occur.")] = 900.0,
    seed: Seed = 0,
    engines: Annotated[
        str, typer.Option(help="`mixed`: real vLLM (CPU) and two fake ones; `fake`: three fake ones.")
    ] = "mixed",
    gateways: Annotated[int, typer.Option(min=1, max=8, help="Gateway processes; 1: no cluster.")] = 2,
    agents: Annotated[int, typer.Option(min=1, help="Agents with the openai package.")] = 50,
    every: Annotated[float, typer.Option(min=0.5, help="The mean seconds between two faults.")] = 6.0,
    transport: Annotated[str, typer.Option(help=f"One of {', '.join(TRANSPORTS)}.")] = "filesystem",
    only: Annotated[str | None, typer.Option(help="Kinds of faults, with commas; default: all.")] = None,
    mutants: Annotated[bool, typer.Option(help="Instead: each mutant in a small system.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON report.")] = Path("runs/chaos.json"),
    work: Annotated[
        Path | None, typer.Option(help="The folder of evidence and logs. [default: runs/chaos-SEED]")
    ] = None,
) -> None:
    """Prove that crashes lose and double nothing.

    Gateways, engines, PostgreSQL, Redis, a trainer and agents, all of them real processes; faults while they work; then a checker
    that imports nothing of headgate compares transcripts, engines' logs and the database.

    Examples:

      python -m tests.faults chaos --engines fake --seconds 60 --seed 7

      python -m tests.faults chaos --only kill_gateway,kill_coordinator --every 10
    """
    if mutants:
        _finish({}, asyncio.run(crashes.try_mutants(seed, _log)), COUNTS, out)
    chosen = _choice("--engines", crashes.ENGINES, engines)
    _need_vllm("--engines", [*chosen])
    if transport == "lora" and (gateways > 1 or engines != "fake"):
        why = "lora needs --gateways 1 and --engines fake: adapters run without a cluster, and count in fake engines alone"
        raise typer.BadParameter(why, param_hint="--transport")
    kinds = tuple(only.split(",")) if only else ()
    if unknown := set(kinds) - {kind.name for kind in KINDS}:
        raise typer.BadParameter(f"unknown faults: {', '.join(sorted(unknown))}", param_hint="--only")
    _choice("--transport", {name: name for name in TRANSPORTS}, transport)
    plan = Plan(
        seed=seed, seconds=seconds, every_s=every, gateways=gateways, engines=chosen,
        redis=gateways > 1, agents=agents, kinds=kinds, transport=transport,
    )  # fmt: skip
    folder = (work or Path(f"runs/chaos-{seed}")).resolve()
    values, report = asyncio.run(crashes.play(plan, folder, _log))
    show_counts(report.counts)
    show("Faults that were survived", ["", "times"], [(kind, str(n)) for kind, n in values["faults"].items()])
    values["problems"] += [text for texts in report.findings.values() for text in texts]
    _finish(values, [], COUNTS, out)


@app.command("prove")
def run_updates(
    engine: Annotated[str, typer.Option(help="`fake`, `vllm` (real, on the CPU) or `both`.")] = "both",
    seed: Seed = 0,
    count: Annotated[
        int, typer.Option("--updates", min=1, max=VERSIONS - 1, help="Updates; an engine is killed in one.")
    ] = VERSIONS - 1,
    mode: Annotated[str, typer.Option(help="How engines are paused: `abort`, `keep` or `both`.")] = "both",
    order: Annotated[str, typer.Option(help="`rolling`, `pull` or `all`.")] = "rolling",
    transport: Annotated[str, typer.Option(help=f"One of {', '.join(TRANSPORTS)}; or `all`.")] = "filesystem",
    streams: Annotated[int, typer.Option(min=1, help="Long streams.")] = 16,
    agents: Annotated[int, typer.Option(min=0, help="Agents that make short calls.")] = 8,
    mutants: Mutants = True,
    out: Annotated[Path, typer.Option(help="The JSON report.")] = Path("runs/proof.json"),
) -> None:
    """Prove that weight updates lose, double and mislabel no token, nor its experts.

    Two engines, long streams and short calls by the openai package, weights that name their version in every token, updates while
    all of that runs, and an engine that is killed in the middle. A checker that imports nothing of headgate reads the version of
    every token from the token. Then each mutant is put into the gateway, and the checker must catch it.

    Examples:

      python -m tests.faults prove --engine fake --seed 7

      python -m tests.faults prove --engine vllm --updates 3 --mode keep --no-mutants
    """
    engines, modes = _choice("--engine", _ENGINES, engine), _choice("--mode", _MODES, mode)
    orders, ways = _choice("--order", _ORDERS, order), _choice("--transport", _TRANSPORTS, transport)
    _need_vllm("--engine", engines)
    if transport == "lora" and "vllm" in engines:
        why = "adapters count in fake engines alone: --engine fake"
        raise typer.BadParameter(why, param_hint="--transport")
    crossed = max(1, streams // 5)
    plans = [
        updates.Plan(e, m, o, w, seed, count, streams, agents, tokens=updates.TOKENS[e], crossed=crossed)
        for e in engines
        for m in modes
        for o in orders
        for w in ways
        if (e, w) != ("vllm", "lora")
    ]
    spoilt = [(mutant, m) for mutant in table.of("updates") for m in modes if mutants and m in mutant.modes]
    logging.getLogger("gateway").setLevel(logging.CRITICAL)  # a killed engine is expected here
    trials, mutated = asyncio.run(_run_updates(plans, spoilt, seed))
    show(
        "Weight updates",
        [
            "",
            "updates",
            "calls",
            "tokens",
            "crossings",
            "unconfirmed",
            "routed",
            *(c.replace("_", " ") for c in (*COUNTS, WRONG)),
            "s",
        ],
        [_row(trial) for trial in trials],
    )
    found = [trial.to_json() for trial in trials]
    summed = {
        key: sum(row[key] for row in found)
        for key in ("tokens_checked", *COUNTS, WRONG, "routed", "unrouted", "unconfirmed")
    }
    problems = [problem for trial in trials for problem in trial.problems]
    _finish({**summed, "problems": problems, "trials": found}, mutated, COUNTS, out)


async def _run_updates(
    plans: list[updates.Plan], mutants: list[tuple[Mutant, str]], seed: int
) -> tuple[list[updates.Trial], Trials]:
    with Steps(len(plans) + len(mutants)) as steps:
        trials, mutated = [], []
        for plan in plans:
            steps.begin(plan.name)
            trials.append(await updates.run_trial(plan, steps.log))
        for mutant, mode in mutants:
            steps.begin(f"{mutant.name}: {mode}")
            small = updates.small(updates.Plan(mode=mode, seed=seed))
            trial = await updates.run_trial(small, lambda _: None, mutant)
            mutated.append((mutant, mode, trial.report))
    return trials, mutated


def _row(trial: updates.Trial) -> list[str]:
    facts, report = trial.report.facts, trial.report
    head = [len(trial.updates), facts["finished_replies"], facts["tokens"], report.crossings.total()]
    found = (report.counts[kind] for kind in (*COUNTS, WRONG))
    counts = [facts["unconfirmed"], facts["routed"], *found, round(trial.seconds)]
    return [trial.plan.name, *map(str, [*head, *counts])]


@app.command("seam")
def run_seam(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds without a mutant.")] = 600.0,
    seed: Seed = 0,
    clients: Annotated[int, typer.Option(min=1, help="Ordinary clients, with keys of all kinds.")] = 6,
    hostile: Annotated[int, typer.Option(min=0, help="Concurrent hostile connections.")] = 24,
    mutants: Mutants = True,
    out: Annotated[Path, typer.Option(help="The JSON report.")] = Path("runs/seam.json"),
) -> None:
    """Fuzz the HTTP seam between two gateway processes.

    Two gateways in a cluster, with a fake engine. Raw sockets send the follower what no HTTP library sends: bodies with every
    method, false lengths, chunks, pipelined requests, `Expect`, connections that end early, under keys of all kinds and none. In
    the meantime ordinary clients send requests with tags. Every response must be its request's own, and nothing without a good
    key may reach the coordinator. Then each mutant is put into the gateways, and must be caught.

    Examples:

      python -m tests.faults seam --seconds 60 --seed 7

      python -m tests.faults seam --seconds 20 --no-mutants --hostile 2
    """
    # Invalid requests and closed connections are expected here; a failure of the gateway is served with 500.
    logging.disable(logging.ERROR)
    spoilt = table.of("seam") if mutants else []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, Steps(_SHOWN) as steps:
        progress = _progress(steps, seconds / _SHOWN)
        report, trials = runner.run(seam.run(seed, seconds, clients, hostile, spoilt, progress))
    facts = dict(sorted(report.facts.items()))
    show("Facts", ["", "times"], [(fact, str(number)) for fact, number in facts.items()])
    show_counts(report.counts, SEAM_COUNTS)
    problems = [text for texts in report.findings.values() for text in texts]
    if not (facts.get("requests") and facts.get("connections")):
        problems.append("no request was sent: nothing is proved")
    counts = {kind: report.counts[kind] for kind in SEAM_COUNTS}
    _finish({**counts, "facts": facts, "seed": seed, "problems": problems}, trials, SEAM_COUNTS, out)


def _progress(steps: Steps, every_s: float) -> Any:
    """Return a function that shows a report now and then."""
    due, left = 0.0, _SHOWN

    def progress(report: Report) -> None:
        nonlocal due, left
        due = due or time.monotonic()  # the clients have just begun
        if left and time.monotonic() >= due:
            due, left, facts = due + every_s, left - 1, report.facts
            found = report.counts.total()
            steps.begin(
                f"{facts['requests']} requests, {facts['connections']} hostile connections, {found} found"
            )

    return progress


@app.command("machines", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_machines(context: typer.Context) -> None:
    """Run the state machines under the virtual clock; further arguments are pytest's.

    HEADGATE_MACHINES=N runs N times as many examples.
    """
    argv = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("virtual")), *context.args]
    raise typer.Exit(subprocess.run(argv, check=False).returncode)


@app.command("record")
def record() -> None:
    """Record the evidence that the checker's tests use."""
    values = asyncio.run(crashes.record(Path(__file__).with_name("recorded.zip"), _log))
    raise typer.Exit(1 if values["problems"] else 0)


def _finish(values: dict[str, Any], trials: Trials, kinds: tuple[str, ...], out: Path) -> None:
    """Show the mutants and the problems, write the report and exit."""
    missed = show_mutants(trials, kinds)
    problems = values.get("problems", []) + missed
    for problem in problems:
        print(problem)
    caught = {f"{mutant.name} {mode}".rstrip(): mutant.caught_by(report) for mutant, mode, report in trials}
    report = {
        "command": " ".join(["python -m tests.faults", *sys.argv[1:]]),
        **values,
        "mutants": len(trials),
        "mutants_caught": len(trials) - len(missed),
        "trials_of_mutants": caught,
        "problems": problems,
        "machine": machine(),
    }
    finish(report, out)
    raise typer.Exit(1 if problems else 0)


def _choice(option: str, choices: dict[str, Any], given: str) -> Any:
    if given not in choices:
        raise typer.BadParameter(", ".join(choices), param_hint=option)
    return choices[given]


def _need_vllm(option: str, engines: list[str]) -> None:
    if "vllm" in engines and not has_vllm():
        raise typer.BadParameter("vLLM's CPU build is not installed: run `make engine`", param_hint=option)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
