"""The demo for three seeds, listed here beforehand, and a control run whose weights are frozen.

python -m examples.demo.seeds               # what `make demo NAME=seeds` does; about 25 minutes on two cores
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo.run import Demo, run_demos

SEEDS = (1, 2, 3)
COLUMNS = ("reward_before", "reward_after", "updates", "streams_across_updates", "failed_requests", "seconds")


def main() -> None:
    """Run all, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/demo-seeds"))
    directory = parser.parse_args().dir
    runs = [Demo(directory / f"seed-{seed}", seed) for seed in SEEDS]
    runs.append(Demo(directory / "control", SEEDS[0], frozen=True))
    show(run_demos(runs), directory)


def show(summaries: list[dict[str, Any]], directory: Path) -> None:
    """Print a table, and one JSON object as the last line."""
    console = Console()
    table = Table(title="headgate demo, three seeds and a control")
    table.add_column("run")
    for column in COLUMNS:
        table.add_column(column.replace("_", " "), justify="right")
    for summary in summaries:
        name = "control (frozen)" if summary["frozen"] else f"seed {summary['seed']}"
        table.add_row(name, *(f"{summary[column]:.4g}" for column in COLUMNS))
    console.print(table)
    trained = [s for s in summaries if not s["frozen"]]
    control = next(s for s in summaries if s["frozen"])
    result = {
        "rise_mean": sum(s["reward_after"] - s["reward_before"] for s in trained) / len(trained),
        "rise_control": control["reward_after"] - control["reward_before"],
        "failed_requests": sum(s["failed_requests"] for s in summaries),
        "runs": summaries,
    }
    (directory / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Look next at {directory}/*/reward.png", soft_wrap=True)
    console.file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
