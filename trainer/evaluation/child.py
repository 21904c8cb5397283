"""An evaluation as a process of its own, so that agents neither hold a trainer up nor end it.

`python -m trainer.evaluation.child REQUEST RESULT`: both are paths of JSON files; the result appears whole, at the end. The
admin key is in the environment (`HEADGATE_ADMIN_KEY`), the request holds the rest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headgate.client import (
    GatewayClient,
    GatewayRefused,
    GatewayUnreachable,
    RunStopped,
)
from headgate.configuration import Section
from headgate.processes.interrupts import run_interruptible
from trainer.errors import ConfigError
from trainer.evaluation.episodes import Evaluation, evaluate, tasks_of


class Request(Section):
    """The evaluation of one version."""

    url: str
    version: int
    step: int
    evaluation: Evaluation


async def run(request: Request, result: Path) -> None:
    """Run the evaluation and write its result."""
    async with GatewayClient(request.url, os.environ.get("HEADGATE_ADMIN_KEY") or None) as client:
        agent = request.evaluation.load()
        try:
            tasks = await tasks_of(request.evaluation, agent)
            evaluated = await evaluate(client, request.evaluation, agent, tasks)
        finally:
            await agent.close()
    evaluated.write(result)


def main(arguments: list[str]) -> None:
    """Run the process; print errors that a user can fix as one line."""
    request, result = map(Path, arguments)
    work = run(Request.model_validate_json(request.read_text()), result)
    try:
        run_interruptible(work, print, "interrupted: giving up open episodes")
    except (ConfigError, GatewayRefused, GatewayUnreachable, RunStopped, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
