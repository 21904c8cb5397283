"""The options that headgate's three programs share; `headgate/processes/program.py` acts on `--debug`."""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.processes.program import DEBUG


def _show(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headgate {version('headgate')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_show, is_eager=True, help="Print headgate's version.")
]
Debug = Annotated[bool, typer.Option(DEBUG, help="Show tracebacks of unexpected errors.")]
