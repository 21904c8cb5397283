"""`gateway canary`: the version that a share of the new conversations tries, and a person's decision about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from gateway.cli.options import AdminKey, Url, fetch
from gateway.cli.show import Json, Model

if TYPE_CHECKING:
    from typing import Literal

_URL = "http://127.0.0.1:8000"
app = typer.Typer(
    help="Show the version that a share of the new conversations tries; hold, promote or return it (docs/guide/live.md).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
def show(gateway: Url = _URL, admin_key: AdminKey = None, model: Model = None, as_json: Json = False) -> None:
    """Show the running trial with the figures of both versions, and the newest trials that have ended.

    Example:

      gateway canary show
    """
    found = fetch(gateway, admin_key, lambda client: client.canary(model))
    _print(found, as_json)


@app.command()
def hold(gateway: Url = _URL, admin_key: AdminKey = None, model: Model = None, as_json: Json = False) -> None:
    """Keep the running trial as it is, whatever its test finds, until you promote, return or resume it.

    Example:

      gateway canary hold
    """
    _act("hold", gateway, admin_key, model, as_json)


@app.command()
def resume(
    gateway: Url = _URL, admin_key: AdminKey = None, model: Model = None, as_json: Json = False
) -> None:
    """Leave the running trial to its test again.

    Example:

      gateway canary resume
    """
    _act("resume", gateway, admin_key, model, as_json)


@app.command()
def promote(
    gateway: Url = _URL, admin_key: AdminKey = None, model: Model = None, as_json: Json = False
) -> None:
    """Make the version on trial live for all conversations.

    Example:

      gateway canary promote
    """
    _act("promote", gateway, admin_key, model, as_json)


@app.command()
def rollback(
    gateway: Url = _URL, admin_key: AdminKey = None, model: Model = None, as_json: Json = False
) -> None:
    """Return the version on trial: it is bad, no engine loads it again, and its tokens are not trained.

    Example:

      gateway canary rollback
    """
    _act("rollback", gateway, admin_key, model, as_json)


def _act(
    action: Literal["hold", "resume", "promote", "rollback"],
    gateway: str,
    admin_key: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    _print(fetch(gateway, admin_key, lambda client: client.decide_canary(action, model)), as_json)


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.console import Console

    from gateway.cli.tables import canary_view

    Console().print(canary_view(found))
