"""Reactors against Ray, on the workloads of the reactor paper (arXiv 2312.04704), and against a floor without either.

Each workload is done by a sealed program of reactors, recorded; by Ray's actors, as its documentation has them; and by a bare
Python loop (Gym, agents) or a bare pool of threads with buffers of its own (broadcast). They take turns within one run and must
come to the same results. What the paper's actors slept is left out: the overhead of a round is what counts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import reactor_broadcast, reactor_gym, reactor_marl, reactor_qlearning
from bench.reactor_sides import Result, Side, start_ray, stop_ray, take_turns
from bench.report import Steps, finish, machine, number, show

Sides = Callable[[bool], dict[str, Callable[[], Side]]]
GOALS = {
    "broadcast_16": 3.4,
    "gym": 1.2,
    "qlearning_time_saved": 31.0,
    "marl_10": 5.1,
    "loop_gym": 0.5,
    "loop_marl": 0.5,
    "pool_broadcast": 0.9,
}
"""At least: over Ray, percent for the third; the last three over the floor."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`rounds` in each of some turns; what it needs of Ray's store and of memory, in MiB."""

    name: str
    sides: Sides
    rounds: int
    store_mb: int = 256
    memory_mb: int = 512


@dataclass(slots=True)
class Run:
    """The options of a run, and its results."""

    ray: bool
    turns: int
    results: dict[str, Result] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def of(self, workload: Workload) -> None:
        """One workload, with a Ray of its own."""
        if _available_mb() < workload.memory_mb:
            self.left_out[workload.name] = f"needs {workload.memory_mb} MiB, {_available_mb()} are there"
            return
        try:
            if self.ray:
                start_ray(workload.store_mb)
            self.results[workload.name] = take_turns(workload.sides(self.ray), workload.rounds, self.turns)
        finally:
            if self.ray:
                stop_ray()


def workloads(scale: float, atari: bool) -> list[Workload]:
    """All of them; `scale` makes them shorter, and the arrays smaller below 0.1."""
    size = 1.0 if scale >= 0.1 else scale

    def rounds(count: int) -> int:
        return max(2, int(count * scale))

    def broadcast(mb: float, actors: int, count: int) -> Workload:
        need = int(mb * size * (actors + 2)) + 128
        return Workload(
            f"broadcast {mb:g} x {actors}",
            lambda ray: reactor_broadcast.sides(mb * size, actors, ray),
            rounds(count),
            store_mb=2 * need,
            memory_mb=2 * need + 1024,
        )

    def gym(name: str, count: int) -> Workload:
        return Workload(f"gym {name}", lambda ray: reactor_gym.sides(name, ray), rounds(count))

    def marl(agents: int) -> Workload:
        return Workload(f"agents {agents}", lambda ray: reactor_marl.sides(agents, ray), rounds(400))

    def qlearning(minibatch: int) -> Workload:
        name = f"qlearning {minibatch}"
        return Workload(name, lambda ray: reactor_qlearning.sides(minibatch, ray), rounds(20))

    return [
        *(broadcast(10, actors, 20) for actors in (2, 4, 8, 16)),
        broadcast(100, 16, 3),
        broadcast(300, 16, 2),
        *(gym(name, 200) for name in reactor_gym.NAMES),
        *((gym(name, 20) for name in reactor_gym.ATARI) if atari else ()),
        *(qlearning(minibatch) for minibatch in (500, 1000, 2000)),
        marl(4),
        marl(10),
    ]


def keys(results: dict[str, Result]) -> dict[str, float | None]:
    """The figures that have goals."""

    def mean(over: str) -> float | None:
        ratios = [
            results[f"gym {name}"].ratio(over) for name in reactor_gym.NAMES if f"gym {name}" in results
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        return statistics.mean(known) if known else None

    def of(name: str, over: str) -> float | None:
        return results[name].ratio(over) if name in results else None

    qlearning = of("qlearning 500", "ray")
    return {
        "broadcast_16": of("broadcast 10 x 16", "ray"),
        "gym": mean("ray"),
        "qlearning_time_saved": None if qlearning is None else 100 * (1 - 1 / qlearning),
        "marl_10": of("agents 10", "ray"),
        "loop_gym": mean("floor"),
        "loop_marl": of("agents 10", "floor"),
        "pool_broadcast": of("broadcast 10 x 16", "floor"),
    }


def _available_mb() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))


def _row(name: str, result: Result) -> list[str]:
    times = [
        number(1000 * result.median(side)) if side in result.seconds else "-"
        for side in ("headgate", "ray", "floor")
    ]
    return [name, *times, number(result.ratio("ray")), number(result.ratio("floor"))]


def main(
    turns: Annotated[int, typer.Option(min=1, help="How often each side plays its rounds.")] = 7,
    scale: Annotated[float, typer.Option(min=0.001, max=100, help="Of the numbers of rounds.")] = 1.0,
    ray: Annotated[bool, typer.Option(help="Whether Ray plays too.")] = True,
    only: Annotated[str, typer.Option(help="Workloads whose name begins like this.")] = "",
    atari: Annotated[bool, typer.Option(help="Three games of Atari too.")] = True,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/reactor.json"),
) -> None:
    """Measure reactors against Ray and against bare Python on the reactor paper's workloads.

    Example: python -m bench.reactor --only gym --turns 3
    """
    chosen = [workload for workload in workloads(scale, atari) if workload.name.startswith(only)]
    if not chosen:
        raise typer.BadParameter(f"no workload begins with {only!r}", param_hint="--only")
    before, run = machine(), Run(ray, turns)
    with Steps(len(chosen)) as steps:
        for workload in chosen:
            steps.begin(workload.name)
            run.of(workload)
    figures = keys(run.results)
    show(
        "Reactors against Ray and a floor, ms a round",
        ["workload", "headgate", "ray", "floor", "times Ray's speed", "times the floor's"],
        [_row(name, result) for name, result in run.results.items()],
        "medians of the turns; ratios are medians of the ratios within a turn; "
        + "; ".join(f"{name} left out: {why}" for name, why in run.left_out.items()),
    )
    show(
        "Goals", ["key", "value", "at least"], [[k, number(v), number(GOALS[k])] for k, v in figures.items()]
    )
    report: dict[str, Any] = {
        "bench": "reactor",
        "command": " ".join(["python -m bench.reactor", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "ray": _ray_version() if ray else None,
        "left_out": run.left_out,
        "ms": {
            name: {side: 1000 * result.median(side) for side in result.seconds}
            for name, result in run.results.items()
        },
        **figures,
    }
    finish(report, out)


def _ray_version() -> str:
    from importlib.metadata import version

    return version("ray")


if __name__ == "__main__":
    typer.run(main)
