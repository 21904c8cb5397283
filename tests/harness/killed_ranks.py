"""Ranks that a launcher starts, and that kill themselves with SIGKILL at the point of a plan.

The launcher's command stays what a user would give. Every Python process that inherits the environment of `planned` imports a
`sitecustomize`, which arms those that are ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tests
from tests.harness import trainer_process
from tests.harness.trainer_process import POINTS, RANKS

_FOLDER = "HEADGATE_TEST_KILLED_RANKS"
Victim = tuple[int, str]
"""A rank and the point at which it dies, one for each life of a run."""


def planned(folder: Path, victims: Sequence[Victim]) -> dict[str, str]:
    """Write a plan, and return the environment under which ranks follow it."""
    folder.mkdir()
    folder.joinpath("sitecustomize.py").write_text(
        "from tests.harness import killed_ranks\n\nkilled_ranks.arm()\n"
    )
    folder.joinpath("plan.json").write_text(json.dumps(victims))
    return {"PYTHONPATH": f"{folder}:{Path(tests.__file__).parents[1]}", _FOLDER: str(folder)}


def happened(folder: Path) -> list[Victim]:
    """Return the ranks that were killed as planned, in order."""
    noted = sorted(folder.glob("died-*"), key=lambda path: int(path.name.removeprefix("died-")))
    return [(int(rank), point) for rank, _, point in (path.read_text().partition(" ") for path in noted)]


def arm() -> None:
    """Make this process die at the point of the plan, if it is a rank and not a child of one."""
    if "RANK" not in os.environ or not {"trainer.cli"} & {*sys.orig_argv, *sys.argv[:1]}:
        return
    folder, rank = Path(os.environ[_FOLDER]), int(os.environ["RANK"])
    with folder.joinpath(f"lives-{rank}").open("a") as file:
        life = file.tell()  # codespell:ignore tell
        file.write("x")
    victims = json.loads(folder.joinpath("plan.json").read_text())
    if life >= len(victims) or victims[life][0] != rank:
        return
    name, die = victims[life][1], trainer_process.die

    def noted() -> None:
        folder.joinpath(f"died-{life}").write_text(f"{rank} {name}")
        die()

    trainer_process.die = noted
    trainer_process.arm({**POINTS, **RANKS}[name])
