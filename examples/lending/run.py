"""Measures what lending gains on this machine: the same training under three assignments of tags to two nodes.

    python -m examples.lending.run                    # what `make report NAME=lending` does
    python -m examples.lending.run --engine fake --steps 3 --only mixed

A node is a core (see cluster.py). Figures are of the steps after the first, in which everything is warmed up. Each topology has
a folder with the recording, the trainer's metrics and logs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import finish, machine, show
from examples.lending.cluster import TOPOLOGIES, Run
from headgate.processes.child import LocalProcess
from headgate.processes.errors import ChildDied
from headgate.processes.interrupts import run_interruptible
from scheduler.planning.runs import timeline_from
from scheduler.planning.timeline import Timeline

STEPS = 14
TASKS = 2000


async def prepare(directory: Path, seed: int, engine: str) -> None:
    """Make the model (from the cache if it was made before) and the tasks. A fake engine needs no trained model.

    Raise ChildDied.
    """
    recipe, text = str(directory / "warmstart.toml"), Path(__file__).with_name("warmstart.toml").read_text()
    if engine == "fake":
        text = text.replace("steps = 300", "steps = 1")
    Path(recipe).write_text(text)
    tasks = ["--count", str(TASKS), "--seed", str(seed), "--out", str(directory / "tasks.jsonl")]
    for module, arguments in {
        "trainer.cli": ["warmstart", "--recipe", recipe, "--out", str(directory / "model")],
        "examples.lending.tasks": tasks,
    }.items():
        process = await LocalProcess.start(module, [sys.executable, "-m", module, *arguments], None)
        try:
            if await process.wait():
                raise ChildDied(process.exit_report())
        finally:
            await process.stop()


async def run(options: argparse.Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    """Run the topologies that are wanted, one after the other, and return their figures."""
    await prepare(directory, options.seed, options.engine)
    figures = {}
    for topology in TOPOLOGIES:
        if options.only and topology.name not in options.only:
            continue
        print(f"{topology.name}: {topology.about}", file=sys.stderr, flush=True)
        parts = directory / topology.name, directory / "model", directory / "tasks.jsonl"
        await Run(topology, *parts, options.engine, options.steps).run()
        figures[topology.name] = measured(parts[0])
    return figures


def measured(directory: Path) -> dict[str, Any]:
    """Return the figures of one run, from its recording and its trainer's metrics."""
    whole = timeline_from(directory)
    steady = whole.within(whole.steps[0].end_s, whole.steps[-1].end_s)
    records = [
        json.loads(line) for line in (directory / "trainer" / "metrics.jsonl").read_text().splitlines()
    ]
    counted = [record for record in records if record["batch"] > whole.steps[0].number]
    tokens = sum(record["trained_tokens"] for record in counted)
    return {
        "steps": len(counted),
        "seconds": round(steady.seconds, 2),
        "trained_tokens": int(tokens),
        "tokens_per_s": round(tokens / steady.seconds, 2),
        "staleness": round(sum(r["staleness_mean"] for r in counted) / max(1, len(counted)), 3),
        "reward": round(sum(r["reward_mean"] for r in counted) / max(1, len(counted)), 3),
        "shares": {node: _shares(steady, node) for node in steady.nodes},
    }


def _shares(timeline: Timeline, node: str) -> dict[str, float]:
    seconds = timeline.by_kind()[node]
    return {kind: round(value / timeline.seconds, 4) for kind, value in seconds.items()}


def report(figures: dict[str, dict[str, Any]], directory: Path, engine: str, seconds: float) -> None:
    """Print the table and the JSON line."""
    rows = [
        (
            name,
            str(found["steps"]),
            f"{found['seconds']:.1f}",
            str(found["trained_tokens"]),
            f"{found['tokens_per_s']:.1f}",
            *(_shown(found["shares"].get(node)) for node in ("r0", "t0")),
            f"{found['staleness']:.2f}",
        )
        for name, found in figures.items()
    ]
    kinds = "rollout / train / switching / idle"
    header = (
        "topology",
        "steps",
        "s",
        "trained tokens",
        "tokens/s",
        f"r0: {kinds}",
        f"t0: {kinds}",
        "staleness",
    )
    note = f"engine: {engine}; a node is a core: r0 has engine, gateway and agents, t0 the trainer and what is lent of it"
    show("What lending is worth here", header, rows, note)
    result: dict[str, Any] = {}
    if {"disaggregated", "mixed"} <= figures.keys():
        without, with_lending = figures["disaggregated"], figures["mixed"]
        result = {
            "idle_without": without["shares"]["t0"]["idle"],
            "idle_with": with_lending["shares"]["t0"]["idle"],
            "tokens_ratio": round(with_lending["tokens_per_s"] / without["tokens_per_s"], 3),
        }
    run = {"engine": engine, "topologies": figures, "minutes": round(seconds / 60, 1), "machine": machine()}
    finish(result | run, directory / "report.json")


def _shown(shares: dict[str, float] | None) -> str:
    return "-" if shares is None else " / ".join(f"{share:.0%}" for share in shares.values())


def main() -> None:
    """Run the topologies, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["vllm", "fake"], default="vllm")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches of each run, the first not counted")
    parser.add_argument("--seed", type=int, default=1, help="of the tasks")
    parser.add_argument("--only", choices=[t.name for t in TOPOLOGIES], action="append", help="not all three")
    parser.add_argument("--dir", type=Path, default=Path("runs/lending"), help="emptied first")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: at least 2, since the first is not counted")
    started, directory = time.monotonic(), options.dir.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    figures = run_interruptible(run(options, directory), print, "stopping the processes of this run")
    report(figures, directory, options.engine, time.monotonic() - started)


if __name__ == "__main__":
    main()
