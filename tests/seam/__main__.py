"""`python -m tests.seam`: talks to two gateways as no client should, and looks for answers that reach another request."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from bench.report import Steps, finish, machine, show
from tests.harness.models import save_model
from tests.harness.servers import postgres_server
from tests.harness.stores import postgres_store
from tests.seam.checker import COUNTS, Report
from tests.seam.mutants import MUTANTS
from tests.seam.world import fuzz, seam

_SHOWN = 20
"""The number of times that the state is shown."""
_MUTANT_S = 60.0


def main(
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 600.0,
    seed: Annotated[int, typer.Option(help="What is said is drawn from it.")] = 0,
    clients: Annotated[int, typer.Option(min=1, help="Ordinary clients, with keys of all kinds.")] = 6,
    hostile: Annotated[int, typer.Option(min=0, help="Hostile connections at once.")] = 24,
    mutants: Annotated[bool, typer.Option(help="Also put each mutant into the gateway.")] = True,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/seam.json"),
) -> None:
    """Fuzz the HTTP seam between two gateway processes.

    Two gateways in a cluster, before a fake engine. Raw sockets say to the one that follows what no HTTP library says: bodies
    with every method, lengths that lie, chunks, requests at once, `Expect`, connections that end early, under keys of all kinds
    and none. Ordinary clients make requests with tags meanwhile. Every answer must be its request's own, and nothing without a
    good key may reach the coordinator. Then the gateway is made wrong in one way at a time, and that must be noticed.

    Examples:

      python -m tests.seam --seconds 60 --seed 7

      python -m tests.seam --seconds 20 --no-mutants --hostile 2
    """
    # That requests are invalid and connections gone is no news here; what fails in the gateway is answered 500.
    logging.disable(logging.ERROR)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(_run(seconds, seed, clients, hostile, mutants))
    finish(
        {"command": " ".join(["python -m tests.seam", *sys.argv[1:]]), **report, "machine": machine()}, out
    )
    raise typer.Exit(1 if report["problems"] else 0)


async def _run(seconds: float, seed: int, clients: int, hostile: int, mutants: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headgate-seam-") as folder, postgres_server() as postgres:
        model, work = Path(folder) / "model", Path(folder) / "work"
        work.mkdir()
        await asyncio.to_thread(save_model, model, seed=1)
        async with seam(postgres_store(postgres), model, work) as cluster:
            started = time.monotonic()
            with Steps(_SHOWN) as steps:
                say = _shown(steps, seconds / _SHOWN)
                report = await fuzz(cluster, seed, seconds, clients=clients, hostile=hostile, say=say)
            took = time.monotonic() - started
        caught = {}
        for mutant in MUTANTS if mutants else ():
            async with seam(postgres_store(postgres), model, work) as cluster:
                with mutant.put_in():
                    spoilt = await fuzz(cluster, seed, _MUTANT_S, until=mutant.caught_by)
                caught[mutant.name] = mutant.caught_by(spoilt)
    _show(report, caught)
    missed = [f"not caught: {name}" for name, found in caught.items() if not found]
    proved = [] if report.requests and report.connections else ["nothing was asked: nothing is proved"]
    return {
        **{count: report.counts[count] for count in COUNTS},
        "requests": report.requests,
        "hostile_connections": report.connections,
        "forwarded": report.forwarded,
        "mutants": len(caught),
        "mutants_caught": sum(caught.values()),
        "problems": report.findings + missed + proved,
        "answers": dict(sorted(report.answers.items())),
        "seed": seed,
        "seconds": round(took, 1),
    }


def _shown(steps: Steps, every_s: float) -> Any:
    """Shows a report now and then."""
    due, left = time.monotonic(), _SHOWN

    def say(report: Report) -> None:
        nonlocal due, left
        if left and time.monotonic() >= due:
            due, left = due + every_s, left - 1
            steps.begin(
                f"{report.requests} requests, {report.connections} hostile connections, {report.found} found"
            )

    return say


def _show(report: Report, caught: dict[str, bool]) -> None:
    rows = [(kind, str(count)) for kind, count in sorted(report.answers.items())]
    show("Answers", ["", "times"], rows)
    show("What was found", ["", "times"], [(count, str(report.counts[count])) for count in COUNTS])
    if caught:
        show(
            "Gateways that are wrong",
            ["", ""],
            [(n, "caught" if f else "NOT CAUGHT") for n, f in caught.items()],
        )
    for finding in report.findings:
        print(finding)


if __name__ == "__main__":
    typer.run(main)
