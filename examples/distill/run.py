"""The demo's model learns its sums from a teacher alone, from rewards alone, and from both, on real vLLM.

    python -m examples.distill.run                           # what `make demo NAME=distill` does
    python -m examples.distill.run --seeds 1 --updates 5

Tasks, agent, gateway and runner are those of `examples.demo`. The teacher is the student's model
after some more steps on replies without slips; a vLLM of its own serves it. Definitions:

- *way*: the source of a run's advantages; the ways of a seed have the same model, tasks and number of episodes;
- *before*, *after*, *teacher*: mean reward of greedy replies to the held-out tasks;
- *tokens*: those sampled for the trained batches; *tokens/s*: from the end of the first step to that of the last;
- *waiting for the teacher*: the share of that time in which the trainer waited for scores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from examples.demo import agent
from examples.demo.report import failed_requests
from examples.demo.run import GATEWAY_START_S, Demo, console
from examples.demo.seeds import SEEDS
from headgate.processes.child import LocalProcess
from headgate.processes.interrupts import run_interruptible
from headgate.processes.ports import free_port

UPDATES = 20
WAYS = {"reward": None, "distill": 0.0, "both": 1.0}
"""The `[distill] reward_weight` of each way; None: without a teacher."""
_ENGINE = {
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class DistillDemo(Demo):
    """A run of the demo that learns in one of `WAYS`."""

    way: str = "reward"
    updates: int = UPDATES
    start: Path = field(kw_only=True)
    """A folder with the student's `model` and the `heldout.jsonl`."""
    teacher_url: str = field(kw_only=True)
    measures_before: bool = False

    async def run(self) -> dict[str, Any]:
        """Train and evaluate; return the run's figures."""
        async with self.serving():
            before = await self.evaluate("before") if self.measures_before else None
            await self.command("trainer.cli", "run", self.path("trainer.toml"))
            after = await self.evaluate("after")
            facts = await self.gateway_facts()
        lines = (self.directory / "trainer" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        timed = records[1:]
        seconds = timed[-1]["time"] - records[0]["time"]
        return {
            "seed": self.seed,
            "way": self.way,
            "before": None if before is None else before["reward_mean"],
            "after": after["reward_mean"],
            "rewards": [record["reward_mean"] for record in records],
            "kl_teacher": [record["kl_teacher_k1"] for record in records if "kl_teacher_k1" in record],
            "tokens": sum(map(_sampled, records)),
            "tokens_per_s": sum(map(_sampled, timed)) / seconds,
            "teacher_share": sum(record.get("seconds/teacher", 0.0) for record in timed) / seconds,
            "failed_requests": failed_requests(facts, *filter(None, (before, after))),
        }

    async def prepare(self) -> None:
        """Copy the model and the held-out tasks, and write the tasks of this seed."""
        shutil.copytree(self.start / "model", self.path("model"))
        shutil.copy(self.start / "heldout.jsonl", self.path("heldout.jsonl"))
        await self.write_tasks("train")

    def configure(self) -> None:
        """Write also the number of updates and the teacher."""
        super().configure()
        file = Path(self.path("trainer.toml"))
        text = file.read_text().replace("steps = 30\n", f"steps = {self.updates}\n")
        weight = WAYS[self.way]
        if weight is not None:
            table = {"url": self.teacher_url, "model": "teacher", "reward_weight": weight}
            text += "\n[distill]\n" + "".join(
                f"{name} = {json.dumps(value)}\n" for name, value in table.items()
            )
        file.write_text(text)


def _sampled(record: dict[str, Any]) -> float:
    """Return the tokens of a batch that may be trained, those of groups without advantage included."""
    return float(record["trained_tokens"] + record["skipped_tokens"])


async def run_ways(directory: Path, seeds: Sequence[int], updates: int) -> dict[str, Any]:
    """Make student and teacher, and run every way for every seed; return the summary."""
    student = Demo(directory / "start")
    shutil.rmtree(directory, ignore_errors=True)
    student.directory.mkdir(parents=True)
    await student.prepare()
    recipe = str(Path(__file__).parent / "warmstart.toml")
    await student.command("trainer.cli", "warmstart", "--recipe", recipe, "--out", student.path("teacher"))
    async with serve_teacher(student.directory) as url:
        teacher = await greedy_reward(student.directory / "heldout.jsonl", url)
        console.print(f"the teacher's greedy replies earn {teacher:.3f}")
        runs: list[dict[str, Any]] = []
        for seed, way in itertools.product(seeds, WAYS):
            demo = DistillDemo(
                directory / f"{way}-seed-{seed}",
                seed,
                way=way,
                updates=updates,
                start=student.directory,
                teacher_url=url,
                measures_before=not runs,
            )
            runs.append(await demo.run())
    return summarize(runs, teacher, updates)


@asynccontextmanager
async def serve_teacher(directory: Path) -> AsyncIterator[str]:
    """Run a vLLM with the `teacher` in `directory`; yield its base URL."""
    port = free_port()
    # fmt: off
    argv = [
        ".venv-engine/bin/python", "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(directory / "teacher"), "--served-model-name", "teacher", agent.MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--enforce-eager", "--dtype", "float32",
        "--block-size", "32", "--generation-config", "vllm",
    ]
    # fmt: on
    process = await LocalProcess.start("teacher", argv, directory / "teacher.log", env=_ENGINE)
    try:
        async with httpx.AsyncClient() as http:

            async def is_ready() -> bool:
                try:
                    return (await http.get(f"http://127.0.0.1:{port}/health")).is_success
                except httpx.TransportError:
                    return False

            with console.status("starting the teacher's vLLM"):
                await process.ready(is_ready, GATEWAY_START_S)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await process.stop()


async def greedy_reward(heldout: Path, url: str) -> float:
    """Return the mean reward of the demo's agent with a server that samples as requested."""
    given = [json.loads(line) for line in heldout.read_text().splitlines()]
    rewards = await asyncio.gather(*(agent.solve(task, url, "none") for task in given))
    return sum(rewards) / len(rewards)


def summarize(runs: Sequence[dict[str, Any]], teacher: float, updates: int) -> dict[str, Any]:
    """Return the means over the seeds by way, and all runs."""

    def mean(way: str, name: str) -> float:
        values: list[float] = [run[name] for run in runs if run["way"] == way]
        return sum(values) / len(values)

    return {
        "before": runs[0]["before"],
        **{f"{way}_after": mean(way, "after") for way in WAYS},
        "teacher": teacher,
        "failed_requests": sum(run["failed_requests"] for run in runs),
        "tokens": {way: mean(way, "tokens") for way in WAYS},
        "tokens_per_s_with_teacher_over_without": mean("both", "tokens_per_s")
        / mean("reward", "tokens_per_s"),
        "share_waiting_for_teacher": mean("both", "teacher_share"),
        "updates": updates,
        "runs": runs,
    }


def show(summary: dict[str, Any], directory: Path) -> None:
    """Print a table, and one JSON object as the last line."""
    table = Table(title=f"from {summary['before']:.3f}; the teacher has {summary['teacher']:.3f}")
    columns = ("after", "tokens", "tokens_per_s", "teacher_share", "failed_requests")
    for name in ("seed", "way", *columns):
        table.add_column(name.replace("_", " "), justify="right")
    for run in summary["runs"]:
        table.add_row(str(run["seed"]), run["way"], *(f"{run[name]:.4g}" for name in columns))
    console.print(table)
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    console.file.write(json.dumps(summary) + "\n")


def main() -> None:
    """Run all, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_numbers, default=SEEDS, help="with commas")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of each run")
    parser.add_argument("--dir", type=Path, default=Path("runs/distill"), help="it is emptied first")
    options = parser.parse_args()
    summary = run_interruptible(
        run_ways(options.dir, options.seeds, options.updates),
        console.print,
        "stopping the trainer, the gateway, the teacher and vLLM",
    )
    show(summary, options.dir)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
