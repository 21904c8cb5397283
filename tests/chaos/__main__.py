"""`python -m tests.chaos`: lets faults happen to a running system, and counts what they cost."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.report import finish, machine, show
from tests.chaos.checker import COUNTS, check
from tests.chaos.evidence import read, read_database, save_tables
from tests.chaos.faults import KINDS, inflict, schedule
from tests.chaos.journal import Journal
from tests.chaos.processes import has_vllm
from tests.chaos.report import page, summary
from tests.chaos.spoilt import SPOILT
from tests.chaos.system import Plan, System
from tests.harness.transports import TRANSPORTS

_ENGINES = {"mixed": ("vllm", "fake", "fake"), "fake": ("fake", "fake", "fake")}


def main(
    seconds: Annotated[float, typer.Option(min=5, help="How long faults come.")] = 900.0,
    seed: Annotated[int, typer.Option(help="What happens when is drawn from it.")] = 0,
    engines: Annotated[
        str, typer.Option(help="`mixed`: real vLLM (CPU) and two fake ones; `fake`: three fake ones.")
    ] = "mixed",
    gateways: Annotated[int, typer.Option(min=1, max=8, help="Gateway processes; 1: no cluster.")] = 2,
    agents: Annotated[int, typer.Option(min=1, help="Agents with the openai package.")] = 50,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two faults, on the average.")] = 6.0,
    transport: Annotated[
        str, typer.Option(help=f"How versions come to engines: {', '.join(TRANSPORTS)}.")
    ] = "filesystem",
    only: Annotated[str | None, typer.Option(help="Kinds of faults, with commas; default: all.")] = None,
    mutants: Annotated[bool, typer.Option(help="Instead: gateways that are wrong in one way each.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON report and the page (.html) go.")] = Path(
        "runs/chaos.json"
    ),
    work: Annotated[
        Path | None, typer.Option(help="Where evidence and logs go. [default: runs/chaos-SEED]")
    ] = None,
) -> None:
    """Prove that crashes lose and double nothing.

    Gateways, engines, PostgreSQL, Redis, a trainer and agents, all of them real processes; faults while they work; then a checker
    that imports nothing of headgate lays transcripts, engines' logs and the database beside one another.

    Examples:

      python -m tests.chaos --engines fake --seconds 60 --seed 7

      python -m tests.chaos --only kill_gateway,kill_coordinator --every 10
    """
    if mutants:
        raise typer.Exit(asyncio.run(_try_mutants(seed, out)))
    if engines not in _ENGINES:
        raise typer.BadParameter(", ".join(_ENGINES), param_hint="--engines")
    if engines == "mixed" and not has_vllm():
        raise typer.BadParameter("vLLM's CPU build is not there: run `make engine`", param_hint="--engines")
    if transport not in TRANSPORTS:
        raise typer.BadParameter(", ".join(TRANSPORTS), param_hint="--transport")
    if transport == "lora" and (gateways > 1 or engines != "fake"):
        raise typer.BadParameter(
            "lora needs --gateways 1 and --engines fake: adapters run without a cluster, and those that count are made for"
            " fake engines alone",
            param_hint="--transport",
        )
    kinds = tuple(only.split(",")) if only else ()
    if unknown := set(kinds) - {kind.name for kind in KINDS}:
        raise typer.BadParameter(f"no such faults: {', '.join(sorted(unknown))}", param_hint="--only")
    plan = Plan(
        seed=seed, seconds=seconds, every_s=every, gateways=gateways, engines=_ENGINES[engines],
        redis=gateways > 1, agents=agents, kinds=kinds, transport=transport,
    )  # fmt: skip
    folder = (work or Path(f"runs/chaos-{seed}")).resolve()
    values = asyncio.run(play(plan, folder, lambda said: print(said, file=sys.stderr, flush=True)))
    show("What was counted", ["", "found"], [(count, str(values[count])) for count in COUNTS])
    show("Faults that were survived", ["", "times"], [(kind, str(n)) for kind, n in values["faults"].items()])
    for kind, found in values["findings"].items():
        for said in found:
            print(f"{kind}: {said}")
    for problem in values["problems"]:
        print(problem)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".html").write_text(values.pop("page"))
    finish(
        {"command": " ".join(["python -m tests.chaos", *sys.argv[1:]]), **values, "machine": machine()}, out
    )
    raise typer.Exit(1 if values["problems"] or any(values[count] for count in COUNTS) else 0)


async def play(plan: Plan, folder: Path, say: Any) -> dict[str, Any]:
    """Lets it happen in a folder, which is emptied before, and answers the report; its `page` is the HTML page."""
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    system, started = System(plan, folder, say), time.monotonic()
    async with system.running():
        with Journal(system.evidence / "faults.jsonl") as journal:
            problems = await inflict(system, journal, schedule(plan))
            say("the faults are over")
            problems += await system.settle(journal)
        tables = await asyncio.to_thread(read_database, system.database)
        save_tables(tables, system.evidence / "database.json")
    evidence = await asyncio.to_thread(read, system.evidence)
    report = await asyncio.to_thread(check, evidence)
    if not report.facts["finished_replies"]:
        problems.append("no reply was whole: nothing is proved")
    values = summary(evidence, report) | {
        "problems": problems + system.unexpected(),
        "run_s": round(time.monotonic() - started, 1),
        "evidence": str(system.evidence),
    }
    return {**values, "page": page(evidence, values)}


async def _try_mutants(seed: int, out: Path) -> int:
    """Lets a small system run with each gateway that is wrong; 1 if one of them was not noticed."""
    rows, found = [], {}
    for name, spoilt in SPOILT.items():
        with tempfile.TemporaryDirectory(prefix="headgate-chaos-") as folder:
            plan = mutated(Plan(seed=seed, gateway=(sys.executable, "-m", "tests.chaos.spoilt", name)))
            values = await play(plan, Path(folder), lambda _: None)
        caught = values[spoilt.wrong] > 0
        found[name] = {"wrong": spoilt.wrong, "caught": caught, **{count: values[count] for count in COUNTS}}
        rows.append([name, "caught" if caught else "NOT CAUGHT", *(str(values[count]) for count in COUNTS)])
        print(f"{name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    show("Gateways that are wrong", ["", "", *COUNTS], rows)
    caught_all = sum(row["caught"] for row in found.values())
    finish({"mutants": len(found), "mutants_caught": caught_all, "trials": found}, out)
    return 0 if caught_all == len(found) else 1


def mutated(plan: Plan) -> Plan:
    """Enough for a gateway that is wrong to show it."""
    return replace(
        plan, gateways=1, store="sqlite", redis=False, engines=("fake", "fake"), agents=6, seconds=10.0, batch=2,
        tokens=16, delay_s=0.03, settle_s=15.0, every_s=1e6,
        leave_share=0.2, store_share=0.5, leak_share=0.5, train_s=0.2,
    )  # fmt: skip


def small(plan: Plan) -> Plan:
    """Half a minute, for CI: fake engines, few agents, faults close together."""
    return replace(
        plan,
        engines=("fake", "fake", "fake"),
        seconds=30.0,
        every_s=2.0,
        agents=8,
        turns=3,
        batch=3,
        settle_s=120.0,
    )


if __name__ == "__main__":
    typer.run(main)
