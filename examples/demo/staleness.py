"""A demo's task under several bounds on staleness: what a looser bound buys in time, and what it costs in reward.

    python -m examples.demo.staleness   # what `make report NAME=staleness` does; about 45 minutes on two cores
    python -m examples.demo.staleness --etas 0,2 --seeds 1 --steps 10 --plot runs/staleness.png
    python -m examples.demo.staleness --etas 1 --bounds groups,tokens --concurrency 256 --plot runs/staleness.png
    python -m examples.demo.staleness --demo tools --etas 1 --bounds groups,tokens --dir runs/staleness-tools --plot runs/t.png

One run of the demo per bound and seed, one after the other, on real vLLM, each in a folder of its own. Definitions:

- *reward*: of the training batches, at temperature 1, smoothed, by step and by seconds since the training began;
- *bound*: on the age of groups, or of tokens (`rule = "verl"`, `late = "mask"`; docs/guide/staleness.md);
- *staleness*: of every trained token, the version that was trained less the version that sampled it;
- *masked*: tokens that were not trained as they were older than eta, to all sampled tokens of the batches;
- *trainer idle*: the share of the training's time in which the trainer computed neither gradients nor a step;
- *engine idle*: the share of samples (every `SAMPLE_S`) in which the gateway had no call in the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from examples.demo.report import failed_requests, smoothed
from examples.demo.run import SUMS, Demo, run_demos
from examples.tools_demo.run import SHOP
from headgate.client import GatewayClient

DEMOS = {"sums": SUMS, "tools": SHOP}
ETAS = (0, 1, 2, 4, 8)
SEEDS = (1, 2, 3)
STEPS = 30
CONCURRENCY = 128
"""Concurrent agents: one batch's worth. With twice this many, tokens become older."""
SAMPLE_S = 0.1
_LAST = 5
"""Batches whose mean is a run's last reward."""
BOUNDS = {"groups": "", "tokens": 'rule = "verl"\nlate = "mask"\n'}
"""The rows of `[staleness]` that bound the age of groups, or that of tokens."""
_COLUMNS = (
    ("eta, bound on", "bound"),
    ("reward, first and last five batches", "reward_training"),
    ("held out, greedy", "reward_heldout"),
    ("seconds", "seconds"),
    ("staleness, mean (max)", "staleness"),
    ("masked", "masked"),
    ("trainer idle", "trainer_idle"),
    ("engine idle", "engine_idle"),
)


@dataclass
class BoundedDemo(Demo):
    """The demo with a bound of its own, no evaluation before, and an eye on the engine."""

    eta: int = 2
    bound: str = "groups"
    steps: int = STEPS
    concurrency: int = CONCURRENCY
    samples: list[int] = field(default_factory=list)
    """Calls in the engine."""

    async def run(self) -> dict[str, Any]:
        """Train and evaluate; return the run's figures."""
        async with self.serving():
            watcher = asyncio.create_task(self._watch(), name="watch the engine")
            try:
                await self.command("trainer.cli", "run", self.path("trainer.toml"))
            finally:
                watcher.cancel()
                await asyncio.wait({watcher})
            after = await self.evaluate("after")
            facts = await self.gateway_facts()
        result = self._figures(after, facts)
        Path(self.path("result.json")).write_text(json.dumps(result))
        return result

    def configure(self) -> None:
        """Write also the bound and the number of steps."""
        super().configure()
        for name, old, new in (
            ("gateway.toml", "[staleness]\neta = 2 ", f"[staleness]\n{BOUNDS[self.bound]}eta = {self.eta} "),
            ("trainer.toml", "steps = 30\n", f"steps = {self.steps}\n"),
            ("trainer.toml", f"concurrency = {CONCURRENCY}\n", f"concurrency = {self.concurrency}\n"),
        ):
            file = Path(self.path(name))
            text = file.read_text()
            if old not in text:
                raise ValueError(f"{file} has no {old!r} to replace")
            file.write_text(text.replace(old, new))

    async def _watch(self) -> None:
        async with GatewayClient(self.url) as client:
            while True:
                try:
                    engines = (await client.status())["engines"]
                    self.samples.append(sum(engine["streams"] for engine in engines))
                except httpx.TransportError:
                    pass  # a sample that is missing is none
                await asyncio.sleep(SAMPLE_S)

    def _figures(self, after: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        lines = (self.directory / "trainer" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        began = records[0]["time"] - records[0]["seconds/total"]
        seconds = records[-1]["time"] - began
        staleness: Counter[int] = Counter()
        for record in records:
            staleness.update({age: int(n) for key, n in record.items() if (age := _age(key)) is not None})
        late = sum(record.get("masked_tokens/late", 0.0) for record in records)
        return {
            "eta": self.eta,
            "bound": self.bound,
            "masked": late / (late + staleness.total()),
            "seed": self.seed,
            "rewards": [record["reward_mean"] for record in records],
            "times": [round(record["time"] - began, 2) for record in records],
            "seconds": seconds,
            "reward_heldout": after["reward_mean"],
            "staleness_tokens": {str(s): n for s, n in sorted(staleness.items())},
            "trainer_idle": 1 - sum(record["seconds/compute"] for record in records) / seconds,
            "engine_idle": sum(not n for n in self.samples) / len(self.samples),
            "failed_requests": failed_requests(facts, after),
        }


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a bound: means over its seeds."""
    rows = []
    for eta, bound in sorted({(run["eta"], run["bound"]) for run in runs}):
        of = runs_of(runs, eta, bound)
        staleness = tokens_by_staleness(of)
        total = sum(staleness.values())
        rows.append(
            {
                "eta": eta,
                "bound": bound,
                "masked": _mean([run["masked"] for run in of]),
                "seeds": len(of),
                "reward_first": _mean([_mean(run["rewards"][:_LAST]) for run in of]),
                "reward_last": _mean([_mean(run["rewards"][-_LAST:]) for run in of]),
                "reward_heldout": _mean([run["reward_heldout"] for run in of]),
                "reward_heldout_all": [run["reward_heldout"] for run in of],
                "seconds": _mean([run["seconds"] for run in of]),
                "staleness_mean": sum(s * n for s, n in staleness.items()) / total,
                "staleness_max": max(staleness),
                "trainer_idle": _mean([run["trainer_idle"] for run in of]),
                "engine_idle": _mean([run["engine_idle"] for run in of]),
                "failed_requests": sum(run["failed_requests"] for run in of),
            }
        )
    return rows


def runs_of(runs: Sequence[dict[str, Any]], eta: int, bound: str) -> list[dict[str, Any]]:
    """Return the runs of one bound."""
    return [run for run in runs if (run["eta"], run["bound"]) == (eta, bound)]


def tokens_by_staleness(runs: Sequence[dict[str, Any]]) -> Counter[int]:
    """Return the number of trained tokens at each staleness, over some runs."""
    counts: Counter[int] = Counter()
    for run in runs:
        counts.update({int(s): n for s, n in run["staleness_tokens"].items()})
    return counts


def plot(path: Path, runs: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Plot reward by step and by time, staleness, and idle time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((by_step, by_time), (ages, idle)) = pyplot.subplots(2, 2, figsize=(11, 7.5))
    colors = pyplot.get_cmap("viridis")
    for place, row in enumerate(rows):
        color = colors(place / max(1, len(rows) - 0.5))
        for number, run in enumerate(runs_of(runs, row["eta"], row["bound"])):
            curve, label = smoothed(run["rewards"]), f"eta {_name(row)}" if number == 0 else None
            by_step.plot(range(1, len(curve) + 1), curve, color=color, label=label, alpha=0.8)
            by_time.plot(run["times"], curve, color=color, alpha=0.8)
    by_step.set(xlabel="step", ylabel="mean reward, smoothed")
    by_step.legend()
    by_time.set(xlabel="seconds since the training began", ylabel="mean reward, smoothed")
    places = range(len(rows))
    names = [_name(row) for row in rows]
    bottom = [0.0] * len(rows)
    counts = [tokens_by_staleness(runs_of(runs, row["eta"], row["bound"])) for row in rows]
    last = max(max(count) for count in counts)
    for age in range(last + 1):
        shares = [count[age] / sum(count.values()) for count in counts]
        ages.bar(
            places,
            shares,
            bottom=bottom,
            label=str(age),
            color=pyplot.get_cmap("magma")(0.9 - 0.8 * age / max(1, last)),
        )
        bottom = [b + s for b, s in zip(bottom, shares, strict=True)]
    ages.set(xlabel="eta", ylabel="share of trained tokens", xticks=list(places), xticklabels=names)
    ages.legend(title="staleness", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for shift, key in ((-0.2, "trainer_idle"), (0.2, "engine_idle")):
        idle.bar([p + shift for p in places], [row[key] for row in rows], 0.4, label=key.replace("_", " "))
    idle.set(xlabel="eta", ylabel="share of the time", ylim=(0, 1), xticks=list(places), xticklabels=names)
    idle.legend()
    for axes in (by_step, by_time, ages, idle):
        axes.grid(alpha=0.3)
    seeds = len({run["seed"] for run in runs})
    figure.suptitle(
        f"The demo under bounds on staleness, {seeds} seed{'s' * (seeds > 1)} each, real vLLM on two cores"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="The demo under bounds on staleness (means over seeds)")
    for title, _ in _COLUMNS:
        table.add_column(title, justify="right")
    for row in rows:
        shown = {
            "bound": _name(row),
            "masked": f"{row['masked']:.1%}",
            "reward_training": f"{row['reward_first']:.3f}, {row['reward_last']:.3f}",
            "reward_heldout": f"{row['reward_heldout']:.3f}",
            "seconds": f"{row['seconds']:.0f}",
            "staleness": f"{row['staleness_mean']:.2f} ({row['staleness_max']})",
            "trainer_idle": f"{row['trainer_idle']:.0%}",
            "engine_idle": f"{row['engine_idle']:.0%}",
        }
        table.add_row(*(shown[key] for _, key in _COLUMNS))
    console.print(table)


def _name(row: dict[str, Any]) -> str:
    return str(row["eta"]) + ("" if row["bound"] == "groups" else f", {row['bound']}")


def _age(key: str) -> int | None:
    prefix, _, age = key.partition("/")
    return int(age) if prefix == "staleness_tokens" else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bounds(text: str) -> list[str]:
    bounds = text.split(",")
    if unknown := [bound for bound in bounds if bound not in BOUNDS]:
        raise argparse.ArgumentTypeError(f"no bound on {unknown[0]}; there are: {', '.join(BOUNDS)}")
    return bounds


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Run what is missing in the folder, then reports all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", choices=DEMOS, default="sums", help="whose task: sums or tools")
    parser.add_argument("--etas", type=_numbers, default=list(ETAS), help="bounds, with commas")
    parser.add_argument(
        "--bounds",
        type=_bounds,
        default=["groups"],
        help="what is bounded: groups, tokens, or both, with commas",
    )
    parser.add_argument("--seeds", type=_numbers, default=list(SEEDS), help="with commas")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each run")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="concurrent agents")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/staleness"), help="a run that is there is not repeated"
    )
    parser.add_argument("--plot", type=Path, default=Path("docs/pictures/staleness.png"))
    options = parser.parse_args()
    console = Console()
    runs: list[dict[str, Any]] = []
    planned = list(product(options.seeds, options.etas, options.bounds))
    for seed, eta, bound in planned:
        suffix = "" if options.demo == "sums" else f"-{options.demo}"
        suffix += "" if bound == "groups" else f"-{bound}"
        suffix += "" if options.concurrency == CONCURRENCY else f"-agents-{options.concurrency}"
        demo = BoundedDemo(
            options.dir / f"eta-{eta}{suffix}-seed-{seed}-steps-{options.steps}",
            seed,
            job=DEMOS[options.demo],
            eta=eta,
            bound=bound,
            steps=options.steps,
            concurrency=options.concurrency,
        )
        result = demo.directory / "result.json"
        console.print(f"[bold]eta {eta} for {bound}, seed {seed}[/bold] ({len(runs) + 1} of {len(planned)})")
        runs += [json.loads(result.read_text())] if result.exists() else run_demos([demo])
    rows = summarize(runs)
    plot(options.plot, runs, rows)
    show(rows, console)
    console.print(f"Look next at {options.plot}", soft_wrap=True)
    report = {
        "report": "staleness",
        "demo": options.demo,
        "steps": options.steps,
        "seeds": options.seeds,
        "rows": rows,
    }
    (options.dir / "summary.json").write_text(json.dumps({**report, "runs": runs}) + "\n")
    console.file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
