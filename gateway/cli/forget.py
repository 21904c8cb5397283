"""`gateway forget`: deletes the conversations of one agent or of one of its users."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gateway.cli.options import AdminKey, Url, fetch


def forget(
    agent: Annotated[str, typer.Option(help="The agent under whose key they were held ([agents.NAME]).")],
    user: Annotated[
        str | None,
        typer.Option(help="The user's id, as requests have it in `user` or `metadata`."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All conversations of the agent.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    url: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
) -> None:
    """Delete the conversations of one agent or of one of its users, and print which versions were trained from them.

    Example:

      gateway forget --agent helper --user u-1047
    """
    if (user is None) != everything:
        raise typer.BadParameter("name one: --user ID, or --all", param_hint="--user")
    report = fetch(url, admin_key, lambda client: client.delete_conversations(agent, user))
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"{report['id']}: {len(report['episodes'])} conversations are deleted")
    if report["waiting"]:
        typer.echo(f"{report['waiting']} are being graded, and are deleted afterwards")
    for row in report["versions"]:
        step = f", step {row['step']} of run {row['run']}" if row["step"] is not None else ""
        typer.echo(
            f"version {row['version']} of {row['model']} was trained from {row['episodes']} of them{step}"
        )
    for row in report["leased"]:
        typer.echo(
            f"batch {row['batch']} of {row['model']} is leased: version {row['version']} may be trained from what was read"
        )
    if not report["versions"] and not report["leased"]:
        typer.echo("no version was trained from them")
