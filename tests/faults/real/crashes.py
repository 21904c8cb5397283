"""Crashes under load: run the system, do faults to it, let it settle, and check the evidence."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from tests.faults import mutants
from tests.faults.checker import Report, check
from tests.faults.evidence import Journal, read, read_database, save_tables
from tests.faults.mutants import Mutant
from tests.faults.real.faults import inflict, schedule
from tests.faults.real.plan import Plan
from tests.faults.real.system import System
from tests.faults.report import summary

ENGINES = {"mixed": ("vllm", "fake", "fake"), "fake": ("fake", "fake", "fake")}
Log = Callable[[str], None]


async def play(plan: Plan, folder: Path, log: Log) -> tuple[dict[str, Any], Report]:
    """Run a plan in a folder, which is emptied before; return the summary and the checker's report."""
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    system, started = System(plan, folder, log), time.monotonic()
    async with system.running():
        with Journal(system.evidence / "faults.jsonl") as journal:
            problems = await inflict(system, journal, schedule(plan))
            log("the faults are over")
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
    return values, report


async def try_mutants(seed: int, log: Log) -> list[tuple[Mutant, str, Report]]:
    """Run a small system with each mutant."""
    trials = []
    for mutant in mutants.of("crashes"):
        log(mutant.name)
        command = (sys.executable, "-m", "tests.faults.mutants", mutant.name)
        with tempfile.TemporaryDirectory(prefix="headgate-crashes-") as folder:
            _, report = await play(mutated(Plan(seed=seed, gateway=command)), Path(folder), lambda _: None)
        trials.append((mutant, "", report))
    return trials


def mutated(plan: Plan) -> Plan:
    """Return a plan that is enough to notice a mutant: ten seconds without faults."""
    return replace(
        plan, gateways=1, store="sqlite", redis=False, engines=("fake", "fake"), agents=6, seconds=10.0, batch=2,
        tokens=16, delay_s=0.03, settle_s=15.0, every_s=1e6,
        leave_share=0.2, store_share=0.5, leak_share=0.5, train_s=0.2,
    )  # fmt: skip


def small(plan: Plan) -> Plan:
    """Return a plan of half a minute, for CI: fake engines, few agents, faults close together."""
    return replace(
        plan, engines=ENGINES["fake"], seconds=30.0, every_s=2.0, agents=8, turns=3, batch=3, settle_s=120.0
    )  # fmt: skip


async def record(target: Path, log: Log) -> dict[str, Any]:
    """Write the small evidence that the checker's tests use."""
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(mutated(Plan()), seconds=12.0, agents=4, delay_s=0.02, settle_s=240.0)
        values, _ = await play(plan, Path(folder), log)
        evidence = Path(folder) / "evidence"
        kept = orjson.loads((evidence / "plan.json").read_bytes())
        for name in ("url", "admin_key", "evidence", "trainer", "sources", "weights"):
            kept.pop(name)
        (evidence / "plan.json").write_bytes(orjson.dumps(kept))
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(evidence.rglob("*.json*")):
                archive.writestr(str(file.relative_to(evidence)), file.read_text().replace(folder, ""))
    return values
