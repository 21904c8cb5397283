"""What all commands of the program `trainer` share: errors as one line, interrupts, and an exit that no tracker delays."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import typer

_EXTRA = ("PIL", "peft", "tensorboard", "torch", "transformers")
"""Packages of the extra `trainer`."""


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that a user can fix without a traceback, and exit with status 1, or 2 if the next start would fail too."""
    from headgate.client import (
        GatewayRefused,
        GatewayUnreachable,
        RunStopped,
    )
    from headgate.extras import install_command
    from headgate.processes.errors import ChildDied
    from trainer.errors import ConfigError, TrainerError

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        typer.echo(
            f"the trainer needs {error.name}, which is not installed: {install_command('trainer')}",
            err=True,
        )
        raise typer.Exit(2) from error
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (
        TrainerError,
        ChildDied,
        GatewayRefused,
        GatewayUnreachable,
        RunStopped,
        TimeoutError,
    ) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, TrainerError) and error.lasts else 1) from error


def in_progress(what: str) -> contextlib.AbstractContextManager[None]:
    """Print what a block does if it takes longer than two seconds."""
    from headgate.processes import slow

    return slow.in_progress(lambda text: typer.echo(text, err=True), what)


def run_interruptible(work: Coroutine[Any, Any, None], ending: str, end: str) -> None:
    """Run `work`; at an interrupt print `ending`, let it finish, and exit after printing `end`."""
    from headgate.processes.interrupts import (
        STATUS,
        Interrupted,
        interruptible,
    )

    def notify(text: str) -> None:
        typer.echo(text, err=True)

    try:
        asyncio.run(interruptible(work, notify, ending))
    except Interrupted:
        notify(end)
        raise typer.Exit(STATUS) from None


def exit_without_trackers(end: SystemExit) -> None:
    """Exit immediately if a tracker hangs, whose package could delay the normal exit."""
    if "trainer.report.tracking" in sys.modules:
        from trainer.report.tracking import exit_if_stuck

        exit_if_stuck(end.code if isinstance(end.code, int) else int(end.code is not None))
