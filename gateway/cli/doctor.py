"""`gateway doctor`: examine what a configuration names, and advise how to fix what is wrong."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gateway.config.settings import Settings
    from gateway.doctor import Finding

_COLORS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    config: Annotated[Path, typer.Argument(help="The gateway's TOML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Examine what a gateway's file names: checkpoints, engines, database, bus, disk. Nothing is changed.

    Each finding has its fix. A few tokens are requested of external engines. The exit status is 1 if there is a problem, and 2 if
    the file itself is wrong.

    Example:

      gateway doctor gateway.toml
    """
    from gateway.config.settings import ConfigError, Settings
    from headgate.processes.slow import in_progress

    try:
        settings = Settings.load(config)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    logging.getLogger("gateway").addHandler(logging.NullHandler())  # the findings report it
    with in_progress(lambda text: typer.echo(text, err=True), "examining what the file names"):
        found = asyncio.run(_examine(settings, show=not as_json))
    if as_json:
        typer.echo(json.dumps({part: [asdict(one) for one in ones] for part, ones in found.items()}))
    levels = [one.level for ones in found.values() for one in ones]
    if not as_json:
        typer.echo(f"{levels.count('problem')} problems, {levels.count('warning')} warnings")
    raise typer.Exit(1 if "problem" in levels else 0)


async def _examine(settings: Settings, *, show: bool) -> dict[str, list[Finding]]:
    from rich.console import Console
    from rich.text import Text

    from gateway.doctor.checks import examine

    console, found = Console(), {}
    async for part, ones in examine(settings):
        found[part] = ones
        for one in ones if show else ():
            line = Text.assemble((f"{one.level:>8} ", _COLORS[one.level]), (f"{part}: ", "bold"), one.what)
            console.print(line, soft_wrap=True)
            if one.fix:
                console.print(Text(f"         -> {one.fix}"), soft_wrap=True)
    return found
