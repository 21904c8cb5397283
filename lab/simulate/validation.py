"""`python -m lab.simulate.validation`: the simulator compared with published tables, with its errors.
lab/notes/simulation.md discusses them.

What is fitted, and to what:

- verl's recipe (its README, three sizes and four thresholds): the trainer's seconds a batch are the
  table's own (`update_actor` and `old_log_prob`, row by row), because its trainer scales as no simple model does. The median of
  the reply lengths is fitted to `gen` of the three synchronous rows. Steps of the asynchronous rows are predictions; so are
  the speed-ups, which are over the simulated synchronous rows.
- AReaL's tokens/s over eta: the spread of the lengths is fitted to eta = 0; the trainer is the roofline's. Median (6,000) and
  batch (64 groups of 16) are not published, and were set so that a rollout has several waves. eta = 1, 4 and 16 are predictions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import typer

from lab.simulate.baselines.areal import Areal
from lab.simulate.baselines.sync_colocated import SyncColocated
from lab.simulate.baselines.verl_async import VerlAsync
from lab.simulate.hardware import TrainerCosts
from lab.simulate.scenario import Scenario
from lab.simulate.study import simulate
from lab.simulate.world import Policy

SYNC = {
    32: (790.10, 357.41, 107.71, 269.80),
    64: (365.28, 150.72, 70.26, 133.41),
    128: (356.30, 177.85, 53.92, 113.81),
}
"""GPUs: seconds of a step, of them generation, old log-probabilities, update."""
ASYNC = {32: (294.77, 313.81), 64: (189.26, 156.98), 128: (150.63, 113.16)}
"""GPUs: seconds of a step (as printed: shorter than its update at 32), and of the update."""
TOTAL = {32: 2.66, 64: 1.92, 128: 2.35}
"""GPUs: speed-up over the whole training."""
THRESHOLDS = {0.0: (231.34, 98.77), 0.1: (171.30, 109.12), 0.3: (146.11, 103.22)}
"""On 128 GPUs: seconds of a step, and of the update. The table's 0.5 is the row of 128 GPUs in ASYNC."""
AREAL = {0: 27.1e3, 1: 47.8e3, 4: 49.0e3, 16: 52.0e3}
"""eta: tokens a second."""
MEDIAN, SPREAD = 450.0, 0.3
"""Fitted: the median of verl's lengths (tokens), and the sigma of AReaL's."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and ours."""

    what: str
    published: float
    simulated: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """The error as a share of the published figure."""
        return self.simulated / self.published - 1


def verl(gpus: int, update_s: float, recompute_s: float, train_gpus: int) -> Scenario:
    """Return verl's experiment, with the trainer's seconds a batch as given."""
    base: dict[str, Any] = {
        "gpus": gpus,
        "gpu": "H20",
        "model": "7B",
        "train_share": 0.5,
        "batch": 512,
        "group": 16,
        "eta": 1,
        "batches": 5,
        "warmup": 2,
        "prompt": 200,
        "name": f"verl-{gpus}",
        "lengths": {"kind": "tail", "median": MEDIAN, "longest": 28000},
    }
    tokens = Scenario(**base).contexts_mean * 512 * 16
    costs = TrainerCosts(
        update_s * train_gpus / tokens, recompute_s * train_gpus / tokens, step_s=0.0, spread=0.0
    )
    return Scenario(**base, trainer_costs=costs)


def areal(eta: int) -> Scenario:
    """Return AReaL's experiment: 1.5B on 8 GPUs, a quarter of which train."""
    return Scenario(
        gpus=8,
        gpu="H800",
        model="1.5B",
        train_share=0.25,
        batch=64,
        group=16,
        eta=eta,
        batches=6 + eta // 2,
        warmup=2 + eta // 2,
        prompt=200,
        name=f"areal-{eta}",
        lengths={"kind": "lognormal", "median": 6000, "sigma": SPREAD, "longest": 27000},
    )


def rows() -> list[Row]:
    """Return every published figure with its simulated one."""
    found: list[Row] = []
    sync: dict[int, float] = {}
    for gpus, (_, generation, recompute, update) in SYNC.items():
        sync[gpus] = _seconds(verl(gpus, update, recompute, gpus), SyncColocated())
        found.append(
            Row(
                f"verl sync, {gpus} GPUs: generation, s",
                generation,
                sync[gpus] - recompute - update,
                fitted=True,
            )
        )
    for gpus, (step, update) in ASYNC.items():
        seconds = _seconds(verl(gpus, update, 0.0, gpus // 2), VerlAsync(0.5))
        found.append(Row(f"verl async, {gpus} GPUs: step, s", step, seconds))
        found.append(Row(f"verl async over sync, {gpus} GPUs", TOTAL[gpus], sync[gpus] / seconds))
    for threshold, (step, update) in THRESHOLDS.items():
        seconds = _seconds(verl(128, update, 0.0, 64), VerlAsync(threshold))
        found.append(Row(f"verl async, staleness {threshold}: step, s", step, seconds))
    for eta, rate in AREAL.items():
        found.append(
            Row(
                f"AReaL, eta {eta}: tokens/s",
                rate,
                simulate(areal(eta), Areal(), _SEED)["tokens_per_s"],
                eta == 0,
            )
        )
    return found


def main() -> None:
    """Print the rows, and a JSON line."""
    typer.echo("Simulated compared with published; F: fitted to this figure")
    found = rows()
    for row in found:
        mark = "F" if row.fitted else " "
        typer.echo(
            f"{mark} {row.what:<48} {row.published:>10,.2f} {row.simulated:>10,.2f} {row.error:>+8.1%}"
        )
    predicted = [abs(row.error) for row in found if not row.fitted]
    mean, worst = sum(predicted) / len(predicted), max(predicted)
    typer.echo(f"{len(predicted)} predictions: error {mean:.0%} in the mean, {worst:.0%} at worst")
    summary = {
        "simulated": True,
        "rows": [
            {"what": r.what, "published": r.published, "simulated": r.simulated, "fitted": r.fitted}
            for r in found
        ],
        "predicted_error_mean": mean,
        "predicted_error_max": worst,
    }
    typer.echo(json.dumps(summary))


def _seconds(scenario: Scenario, policy: Policy) -> float:
    return float(simulate(scenario, policy, _SEED)["seconds_per_batch"])


if __name__ == "__main__":
    main()
