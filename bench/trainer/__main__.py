"""The trainer's step compared with TRL's GRPOTrainer: the same model, batch and loss, on the CPU, in turns within one run.

Before anything is timed, the clipped gradients of a first step are compared. Batches are made from a seed (`bench.trainer.load`):

- long_tail: `vs_trl_long_tail`, how many times TRL's trained tokens a second; and `padding_share`, the share of the tokens that
  went through the model needlessly.
- trees: `vs_trl_trees`, the same on episodes that branch; and `tree_efficiency`, how much faster our trainer is with the tree
  than with a row for each path, as a share of how many fewer tokens the tree has.
- head: `head_peak_ratio`, the most memory that the output head uses in addition to its weights and their gradient, with a
  vocabulary of 151,936 over one with 8,192, at equal tokens.
- replay: `replay_cost`, a mixture's step with recorded experts over that with its own choice; and `mixture_cost`, the latter over
  the step of a dense model that multiplies as many numbers for a token.

TRL is in an environment of its own (`make bench NAME=trainer` makes it); without one (`--trl none`) its keys are null.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench.report import Steps, finish, machine, number, ranged, show, spread
from bench.trainer import load as workloads
from bench.trainer.load import Rollout, Sizes
from bench.trainer.model import Shape, write_model

GOALS = {
    "vs_trl_long_tail": 2.0,
    "vs_trl_trees": 3.0,
    "tree_efficiency": 0.8,
    "padding_share": 0.02,
    "head_peak_ratio": 1.3,
}
"""At least; the last two at most."""
SMALL, LARGE = 8192, 151_936
"""Vocabularies."""
_HEAD_TOKENS = 4096
"""Enough to fill a chunk of the head with either vocabulary."""
_FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""glibc gives freed tensors back to the kernel; by default it keeps fragments, more of them for more chunks."""
TOLERANCE = 2e-3
"""The most that the gradients of two sides may differ, as a share of their norm: float32, other orders of sums."""


class Side:
    """A process that trains on one batch at each request."""

    def __init__(self, python: str, module: str, folder: Path, name: str, *options: str) -> None:
        self.gradient = folder / f"{name}.npz"
        self.answers: list[dict[str, Any]] = []
        self._log = (folder / f"{name}.log").open("w")
        argv = [python, "-m", module, *options, "--gradient", str(self.gradient)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=self._log, text=True)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._log.close()

    def step(self) -> dict[str, Any]:
        """Make one optimizer step, and return what the process reports. Raise RuntimeError if it dies."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(Path(self._log.name).read_text()[-3000:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self) -> None:
        """Make a step that counts."""
        self.answers.append(self.step())

    @property
    def seconds(self) -> list[float]:
        """The duration of each step that counts."""
        return [answer["seconds"] for answer in self.answers]


@dataclass(slots=True)
class Load:
    """A workload, and the sides that have it."""

    batch: list[Rollout]
    sides: dict[str, Side] = field(default_factory=dict)

    def rate(self, name: str) -> list[float]:
        """Return the trained tokens a second of each step."""
        trained = workloads.trained_tokens(self.batch)
        return [trained / seconds for seconds in self.sides[name].seconds]

    def times(self, name: str, other: str) -> float | None:
        """Return the median rate of one side over another's; None without that side."""
        if other not in self.sides:
            return None
        return statistics.median(self.rate(name)) / statistics.median(self.rate(other))

    def slower(self, name: str, other: str) -> float:
        """Return the CPU seconds of one side over another's, the median of the rounds."""
        sides = (self.sides[each].answers for each in (name, other))
        return statistics.median(mine["cpu_s"] / theirs["cpu_s"] for mine, theirs in zip(*sides, strict=True))

    def times_of_cpu(self, name: str, other: str) -> float | None:
        """Return the same by the CPU seconds of a step."""
        if other not in self.sides:
            return None
        mine, theirs = (
            statistics.median(a["cpu_s"] for a in self.sides[side].answers) for side in (name, other)
        )
        return theirs / mine

    def gap(self, name: str, other: str) -> float | None:
        """Return the norm of the difference of two sides' first gradients, as a share of the norm."""
        if other not in self.sides:
            return None
        mine, theirs = (np.load(self.sides[side].gradient) for side in (name, other))
        if set(mine.files) != set(theirs.files):
            raise RuntimeError(f"{name} and {other} have not the same parameters")
        squares = [float(np.square(mine[p].astype(np.float64)).sum()) for p in mine.files]
        gaps = [float(np.square(mine[p].astype(np.float64) - theirs[p]).sum()) for p in mine.files]
        return (sum(gaps) / sum(squares)) ** 0.5


@dataclass(frozen=True, slots=True)
class Bench:
    """The options of a run."""

    folder: Path
    trl: str
    """The Python of an environment with TRL; empty for none."""
    rows: int
    """The rows of a micro-batch on TRL's side."""
    threads: int
    rounds: int

    def side(self, name: str, batch: Path, *options: str, model: str = "model") -> Side:
        """Return a side that trains a model of the folder on the batch in a file."""
        module = "bench.trainer.trl" if name == "trl" else "bench.trainer.headgate"
        python = self.trl if name == "trl" else sys.executable
        shared = [
            "--model",
            str(self.folder / model),
            "--batch",
            str(batch),
            "--threads",
            str(self.threads),
        ]
        return Side(python, module, self.folder, f"{batch.stem}-{name}", *shared, *options)

    def run(self, name: str, batch: list[Rollout], steps: Steps, *, by_path: bool) -> Load:
        """Step of each side in turns, after one that is not timed and whose gradients must agree."""
        path = self.folder / f"{name}.npz"
        workloads.save(batch, path)
        longest = max(len(_ids(row)) for row in workloads.paths_of(batch))
        tokens = ["--tokens", str(self.rows * longest)]
        load = Load(batch, {"headgate": self.side("headgate", path, *tokens)})
        if by_path:
            load.sides["paths"] = self.side("paths", path, *tokens, "--paths")
        if self.trl:
            load.sides["trl"] = self.side("trl", path, "--rows", str(self.rows))
        self._measure(name, load, steps)
        return load

    def _measure(self, name: str, load: Load, steps: Steps) -> None:
        """Step the sides in turns. Raise RuntimeError unless all gradients are those of the side `headgate`, if there is one."""
        try:
            steps.begin(f"{name}: the first step")
            for side in load.sides.values():
                side.step()
            for other in load.sides.keys() - {"headgate"} if "headgate" in load.sides else ():
                gap = load.gap("headgate", other)
                if gap is None or not gap < TOLERANCE:
                    raise RuntimeError(
                        f"{name}: the gradients of headgate and {other} differ by {gap} of their norm"
                    )
            for turn in range(self.rounds):
                steps.begin(f"{name}: round {turn + 1}")
                for side in load.sides.values():
                    side.measure()
        finally:
            for side in load.sides.values():
                side.close()

    def long_tail(self, steps: Steps, sizes: Sizes) -> tuple[dict[str, Any], list[list[str]]]:
        """Measure lengths with a long tail: rates, and the padding on our side."""
        batch = workloads.long_tail(sizes, 1, prompt=32, median=48.0, sigma=1.0, most=1024)
        load = self.run("long_tail", batch, steps, by_path=False)
        computed = load.sides["headgate"].answers[0]["tokens"]
        ideal = workloads.shared_tokens(batch)
        padding = (computed - ideal) / computed
        figures = {"vs_trl_long_tail": load.times("headgate", "trl"), "padding_share": padding}
        return figures, self.rows_of("long-tailed lengths", load)

    def trees(self, steps: Steps, sizes: Sizes) -> tuple[dict[str, Any], list[list[str]]]:
        """Measure episodes of four paths that share 70 %: rates with the tree, without it, and TRL's."""
        batch = workloads.branches(sizes, 2, path=400, shared=0.7, fan=4)
        load = self.run("trees", batch, steps, by_path=True)
        fewer = (
            load.sides["paths"].answers[0]["tokens"] / load.sides["headgate"].answers[0]["tokens"]
        )  # the ideal, by token count
        gained = load.times("headgate", "paths")
        efficiency = None if gained is None else gained / fewer
        figures = {"vs_trl_trees": load.times("headgate", "trl"), "tree_efficiency": efficiency}
        return figures, self.rows_of("branching episodes", load)

    def replay(self, steps: Steps, sizes: Sizes) -> tuple[dict[str, Any], list[list[str]]]:
        """Measure a dense model, a mixture, and the mixture with recorded experts."""
        batch, path = workloads.branches(sizes, 3, path=200, shared=0.5, fan=2), self.folder / "replay.npz"
        workloads.save(batch, path)
        tokens = ["--tokens", "1024"]
        load = Load(batch, {"dense": self.side("dense", path, *tokens)})
        load.sides["mixture"] = self.side("mixture", path, *tokens, model="mixture")
        load.sides["replay"] = self.side("replay", path, *tokens, "--replay", model="mixture")
        self._measure("replay", load, steps)
        figures = {
            "replay_cost": load.slower("replay", "mixture"),
            "mixture_cost": load.slower("mixture", "dense"),
        }
        return figures, self.rows_of("router replay", load)

    def rows_of(self, what: str, load: Load) -> list[list[str]]:
        """Return the table's rows of a workload."""
        return [
            [
                f"{what}: {name}",
                ranged(spread(load.rate(name))),
                number(statistics.median(answer["cpu_s"] for answer in side.answers)),
                number(load.times(name, "trl"), 2),
                number(load.times_of_cpu(name, "trl"), 2),
                f"{load.gap('headgate', name):.0e}" if name != "headgate" in load.sides else "-",
            ]
            for name, side in load.sides.items()
        ]


def head_peak_ratio(steps: Steps, tokens: int) -> float:
    """Return the head's peak memory with the large vocabulary over that with the small one."""
    peaks = []
    for vocabulary in (SMALL, LARGE):
        steps.begin(f"head: a vocabulary of {vocabulary:,}")
        argv = [sys.executable, "-m", "bench.trainer.head", "--vocabulary", str(vocabulary)]
        argv += ["--hidden", "64", "--tokens", str(tokens)]
        head = subprocess.run(
            argv, check=True, capture_output=True, text=True, env=os.environ | _FREED_AT_ONCE
        )
        peaks.append(int(head.stdout))
    return peaks[1] / peaks[0]


def main(
    trl: Annotated[
        str, typer.Option(help="The Python of an environment with TRL; `none`: without it.")
    ] = ".venv-trl/bin/python",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each side that count.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="PyTorch's threads on each side.")] = 1,
    small: Annotated[bool, typer.Option(help="A batch that only shows that everything works.")] = False,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/bench-trainer.json"),
) -> None:
    """Measure the trainer's step and that of TRL's GRPOTrainer: the same model, batch and loss, on the CPU."""
    trl = "" if trl == "none" else trl
    if trl and not Path(trl).exists():
        raise typer.BadParameter(
            "no such file: run `make bench NAME=trainer`, or give `none`", param_hint="--trl"
        )
    few = Sizes(groups=2, members=2, vocabulary=SMALL)
    # A tail is long only among many episodes; of those that branch, each has four paths.
    tailed, branching = (few, few) if small else (Sizes(4, 8, SMALL), Sizes(3, 4, SMALL))
    figures: dict[str, Any] = {}
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder, Steps(3 * (1 + rounds) + 2) as steps:
        bench = Bench(Path(folder), trl, 2 if small else 4, threads, rounds)
        shape = Shape(hidden=64, layers=1) if small else Shape()
        write_model(Path(folder) / "model", shape)
        write_model(Path(folder) / "mixture", replace(shape, experts=8))
        sides = ((bench.long_tail, tailed), (bench.trees, branching), (bench.replay, branching))
        for measure, sizes in sides:
            found, shown = measure(steps, sizes)
            figures |= found
            rows += shown
        figures["head_peak_ratio"] = head_peak_ratio(steps, _HEAD_TOKENS)
    header = ("side", "trained tokens/s", "CPU s a step", "x TRL", "x TRL by CPU", "gradient's gap")
    show("A trainer's step", header, rows, "medians of the rounds (least..most)")
    goals = [
        [key, _short(value), f"{GOALS[key]:g}" if key in GOALS else "-"] for key, value in figures.items()
    ]
    show("Figures", ("key", "measured", "goal"), goals)
    finish({"bench": "trainer", **figures, "small": small, "rounds": rounds, "machine": machine()}, out)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ids(row: Rollout) -> list[int]:
    return [token for turn in row.turns for token in turn.ids.tolist()]


if __name__ == "__main__":
    typer.run(main)
