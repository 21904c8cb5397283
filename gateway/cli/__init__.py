"""`gateway`: serve agents, run agents once per episode, and look at the results.

The commands' modules import what they need when they run, so that `gateway --help` is quick.
"""

from __future__ import annotations

import typer

from gateway.cli.canary import app as canary_app
from gateway.cli.console import console
from gateway.cli.database import export, migrate, prune
from gateway.cli.doctor import doctor
from gateway.cli.forget import forget
from gateway.cli.init import init
from gateway.cli.matches import run_matches
from gateway.cli.mirror import mirror
from gateway.cli.run import run_episodes
from gateway.cli.serve import engine, serve
from gateway.cli.show import list_episodes, show_episode, staleness, status, why
from gateway.cli.tail import tail, tail_episodes
from headgate.options import Debug, Version
from headgate.processes.program import run

app = typer.Typer(
    help="headgate's gateway: agents in front, engines behind, every token recorded.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # keeps text in brackets
)
episodes_app = typer.Typer(
    help="Run agents, once per episode; list episodes, show one, and explain why it was trained or not.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
_BEGIN, _LOOK, _OPERATE = "Start here", "Look at a gateway", "Operate"
for panel, commands in (
    (_BEGIN, (init, serve)),
    (_LOOK, (console, status, staleness, tail)),
    (_OPERATE, (doctor, engine, mirror, export, prune, forget, migrate)),
):
    for command in commands:
        app.command(rich_help_panel=panel)(command)
episodes_app.command("run")(run_episodes)
episodes_app.command("match")(run_matches)
episodes_app.command("list")(list_episodes)
episodes_app.command("show")(show_episode)
episodes_app.command("why")(why)
episodes_app.command("tail")(tail_episodes)
app.add_typer(episodes_app, name="episodes", rich_help_panel=_BEGIN)
app.add_typer(canary_app, name="canary", rich_help_panel=_OPERATE)


@app.callback()
def _options(version: Version = False, debug: Debug = False) -> None:
    """headgate's gateway."""


def main() -> None:
    """Run the console script."""
    run("gateway", app)
