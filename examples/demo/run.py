"""The demo: makes a small model, starts real vLLM and the gateway, trains behind an unmodified agent, and shows the reward rise.

    python -m examples.demo.run                 # what `make demo` does
    python -m examples.demo.run --seed 2 --dir runs/other
    python -m examples.demo.run --frozen        # the control: the same, with a learning rate of 0
    python -m examples.demo.run --dtype bfloat16 --lora     # engine and trainer in bf16; adapters alone travel
    python -m examples.demo.run --dtype bfloat16 --quantization fp8_per_channel     # the engine samples from float8

Everything is done with the commands that a user would type; each is printed before it runs. What it leaves: `summary.json`,
`reward.png`, the configuration, logs, checkpoints and the gateway's database, all in one folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import httpx
from rich.console import Console

from examples.demo import report
from headgate.client import GatewayClient
from headgate.processes.child import LocalProcess
from headgate.processes.interrupts import run_interruptible
from headgate.processes.ports import free_port

T = TypeVar("T")
Dtype = Literal["float32", "bfloat16"]

HELDOUT = 200
TRAIN = 2000
EVALUATION_SEED = 99
"""The held-out tasks are the same for every seed of the training."""
GATEWAY_START_S = 600.0

console = Console()


@dataclass(frozen=True)
class Job:
    """A demo's package, with `tasks`, `gateway.toml`, `trainer.toml` and `warmstart.toml`."""

    package: str
    title: str
    """Over the plot."""
    runs: str
    """The folder that the package's TOML files name."""

    @property
    def folder(self) -> Path:
        """The package's folder."""
        return Path(__file__).parents[2].joinpath(*self.package.split("."))


SUMS = Job("examples.demo", "A model trained behind an unmodified agent", "runs/demo")


LORA_LR = 2e-3
"""Of adapters, in place of a job's rate: ten times the sums'."""


@dataclass
class Demo:
    """One run of a job, in one folder."""

    directory: Path
    seed: int = 1
    frozen: bool = False
    job: Job = SUMS
    dtype: Dtype = "float32"
    """The precision of the model, the engine and the trainer."""
    lr: float | None = None
    """In place of the job's learning rate."""
    lora: bool = False
    """Train adapters, which engines load next to the first version's weights."""
    quantization: str | None = None
    """The rounding of the engine's weights; needs bfloat16."""
    correction: str = "tis_token"
    """`[algorithm] correction`."""
    port: int = field(default_factory=free_port)
    seconds: dict[str, float] = field(default_factory=dict)
    variables: ClassVar[dict[str, str]] = {}
    """Environment variables of the commands, in addition to those of the shell."""

    @property
    def url(self) -> str:
        """The gateway's root."""
        return f"http://127.0.0.1:{self.port}"

    async def run(self) -> dict[str, Any]:
        """Run the whole job, and return the summary."""
        started = time.monotonic()
        async with self.serving():
            await self.try_out()
            before = await self.timed("evaluate before", self.evaluate("before"))
            await self.timed("train", self.command("trainer.cli", "run", self.path("trainer.toml")))
            after = await self.timed("evaluate after", self.evaluate("after"))
            facts = await self.gateway_facts()
        self.seconds["total"] = time.monotonic() - started
        return report.summarize(
            self.directory,
            seed=self.seed,
            frozen=self.frozen,
            before=before,
            after=after,
            facts=facts,
            seconds=self.seconds,
            title=self.job.title,
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Prepare the run in its folder, which is emptied first, and run its gateway around the block."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        await self.timed("prepare", self.prepare())
        self.configure()
        gateway = await self.timed("start engine and gateway", self.start_gateway())
        try:
            yield
        finally:
            await gateway.stop()

    async def prepare(self) -> None:
        """Write the tasks of both splits, and make the model or copy it from the cache."""
        await self.write_tasks("train")
        await self.write_tasks("heldout")
        recipe = str(self.job.folder / "warmstart.toml")
        made = ["--out", self.path("model"), "--dtype", self.dtype]
        await self.command("trainer.cli", "warmstart", "--recipe", recipe, *made)

    async def write_tasks(self, split: Literal["train", "heldout"]) -> None:
        """Write the tasks of one split."""
        count, seed = (TRAIN, self.seed) if split == "train" else (HELDOUT, EVALUATION_SEED)
        arguments = ["--split", split, "--count", str(count), "--seed", str(seed)]
        await self.command(f"{self.job.package}.tasks", *arguments, "--out", self.path(f"{split}.jsonl"))

    def configure(self) -> None:
        """Write the job's TOML files, with this run's folder, port and seed."""
        folder = {rf"{self.job.runs}/": f"{self.directory}/"}
        gateway = {**folder, r"^port = 8000$": f"port = {self.port}"}
        trainer = {**folder, r"^seed = 1$": f"seed = {self.seed}", r"^config = .*$": f'url = "{self.url}"'}
        if self.dtype != "float32":
            gateway['"--dtype", "float32"'] = f'"--dtype", "{self.dtype}"'
            trainer[r"^\[model\]$"] = f'[model]\ndtype = "{self.dtype}"'
        if self.lora:
            gateway[r'^launch = "vllm"$'] = 'launch = "vllm"\ntransport = "lora"'
            trainer[r"\Z"] = '\n[model.lora]\nrank = 16\nalpha = 32\n\n[publish]\ntransport = "lora"\n'
        if self.quantization is not None:
            gateway[r"^\[engine\]$"] = f'[engine]\nquantization = "{self.quantization}"'
        if self.correction != "tis_token":
            trainer[r"^\[algorithm\]$"] = f'[algorithm]\ncorrection = "{self.correction}"'
        lr = LORA_LR if self.lora and self.lr is None else self.lr
        if self.frozen or lr is not None:
            trainer[r"^lr = .*$"] = f"lr = {0.0 if self.frozen else lr}"
        for name, changes in (("gateway.toml", gateway), ("trainer.toml", trainer)):
            text = (self.job.folder / name).read_text()
            for old, new in changes.items():
                text, found = re.subn(old, new, text, flags=re.MULTILINE)
                if not found:
                    raise ValueError(f"{self.job.folder / name} has no {old!r} to replace")
            Path(self.path(name)).write_text(text)

    async def start_gateway(self) -> LocalProcess:
        """Return the gateway, which starts vLLM; ready when both are."""
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", self.path("gateway.toml")]
        console.print(f"[bold]$ {_shown(argv)}[/bold]   (vLLM takes about 40 s to start)")
        process = await LocalProcess.start("gateway", argv, Path(self.path("gateway.log")))
        try:
            async with GatewayClient(self.url) as client:
                with console.status("starting vLLM and the gateway"):
                    await process.ready(client.is_ready, GATEWAY_START_S)
        except BaseException:
            await process.stop()
            raise
        return process

    async def try_out(self) -> None:
        """Try the demo's gateway before the first evaluation; a demo may override it."""

    async def evaluate(self, name: str) -> dict[str, Any]:
        """Evaluate greedy replies to the held-out tasks, in eval episodes, which are never trained."""
        out = self.path(f"eval-{name}.json")
        tasks = self.path("heldout.jsonl")
        await self.command("trainer.cli", "eval", self.path("trainer.toml"), "--tasks", tasks, "--json", out)
        result: dict[str, Any] = json.loads(Path(out).read_text())
        return result

    async def gateway_facts(self) -> dict[str, Any]:
        """Save the gateway's status, every update's report, and its Prometheus metrics."""
        async with GatewayClient(self.url) as client:
            status = await client.status()
            versions = [await client.weights(v) for v in range(1, status["version"] + 1)]
        async with httpx.AsyncClient() as http:
            metrics = (await http.get(f"{self.url}/metrics")).text
        return {"status": status, "versions": versions, "metrics": metrics}

    async def command(self, module: str, *arguments: str) -> None:
        """Run `python -m module ...` on this terminal. Raise SystemExit if it fails."""
        argv = [sys.executable, "-m", module, *arguments]
        set_first = "".join(f"{name}={value} " for name, value in self.variables.items())
        console.print(f"[bold]$ {set_first}{_shown(argv)}[/bold]")
        # On busy cores OpenMP's threads, which spin while they wait, take ten times as long.
        process = await asyncio.create_subprocess_exec(
            *argv, env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **self.variables}
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        if code:
            raise SystemExit(f"{_shown(argv)} ended with {code}; the logs are in {self.directory}")

    async def timed(self, step: str, work: Awaitable[T]) -> T:
        """Note how long a step took."""
        started = time.monotonic()
        try:
            return await work
        finally:
            self.seconds[step] = round(time.monotonic() - started, 1)

    def path(self, name: str) -> str:
        """Return a file in the run's folder."""
        return str(self.directory / name)


def run_demos(demos: Iterable[Demo]) -> list[dict[str, Any]]:
    """Run demos, one after the other, and return their summaries. Exit at Ctrl-C, when what they started has ended."""

    async def run() -> list[dict[str, Any]]:
        return [await demo.run() for demo in demos]

    return run_interruptible(run(), console.print, "stopping the trainer, the gateway and vLLM")


def _shown(argv: list[str]) -> str:
    return shlex.join(["python", *argv[1:]])


def main(job: Job = SUMS, description: str | None = __doc__) -> None:
    """Run a job once."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the tasks' order and the training")
    parser.add_argument(
        "--dir", type=Path, default=Path(job.runs), help="everything goes here; it is emptied first"
    )
    parser.add_argument("--frozen", action="store_true", help="the control run: a learning rate of 0")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of engine and trainer"
    )
    parser.add_argument("--lr", type=float, help="the learning rate, in place of the demo's")
    parser.add_argument("--lora", action="store_true", help="train adapters, which engines load")
    parser.add_argument(
        "--quantization", help="the rounding of the engine's weights, such as fp8_per_channel"
    )
    parser.add_argument(
        "--correction", default="tis_token", help="of the difference between engine and trainer"
    )
    given = vars(parser.parse_args())
    directory = given.pop("dir")
    (summary,) = run_demos([Demo(directory, job=job, **given)])
    report.show(summary, directory, console)


if __name__ == "__main__":
    main()
