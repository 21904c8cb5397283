"""`gateway status`, `staleness` and `episodes list|show|why`: what a running gateway reports, as tables."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gateway.cli.options import AdminKey, Url, fetch

if TYPE_CHECKING:
    from headgate.client import GatewayClient

_URL = "http://127.0.0.1:8000"
_EVERY_S = 2.0
_SHOWN = 400
"""Characters of a node's text, without `--full`."""
_ID_LENGTH, _NAMED = len("ep-") + 20, 3
EpisodeId = Annotated[
    str,
    typer.Argument(metavar="EPISODE", help="The episode's id, or its first characters.", show_default=False),
]
Model = Annotated[str | None, typer.Option(help="A trained model. [default: the first]")]
Json = Annotated[bool, typer.Option("--json", help="Print the gateway's reply as JSON.")]


def status(
    gateway: Url = _URL,
    admin_key: AdminKey = None,
    model: Model = None,
    watch: Annotated[bool, typer.Option(help="Refresh every two seconds, until interrupted.")] = False,
    as_json: Json = False,
) -> None:
    """Show a running gateway on one screen: versions, engines, batches and episodes of a model.

    Examples:

      gateway status --watch

      gateway status --json | jq .engines
    """
    if watch and as_json:
        raise typer.BadParameter("use it without --watch", param_hint="--json")
    if watch:
        with suppress(KeyboardInterrupt):
            fetch(gateway, admin_key, lambda client: _watch(client, model))
        return
    found = fetch(gateway, admin_key, lambda client: client.status(model))
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.console import Console

    from gateway.cli.tables import status_view

    Console().print(status_view(found))


def staleness(gateway: Url = _URL, admin_key: AdminKey = None, model: Model = None) -> None:
    """Show a running gateway's batches, the groups in them, waiting groups and recent losses.

    Example:

      gateway staleness --model sums
    """
    from gateway.cli.tables import show_staleness

    show_staleness(fetch(gateway, admin_key, lambda client: client.staleness(model)))


def list_episodes(
    gateway: Url = _URL,
    admin_key: AdminKey = None,
    task: Annotated[str | None, typer.Option(help="Only episodes of this task.")] = None,
    group: Annotated[str | None, typer.Option(help="Only episodes of this group.")] = None,
    state: Annotated[
        Literal["open", "grading", "closed"] | None, typer.Option(help="Only episodes in this state.")
    ] = None,
    mode: Annotated[Literal["train", "eval"] | None, typer.Option(help="Only episodes of this mode.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Episodes, the newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """List the newest episodes with their rewards.

    Example:

      gateway episodes list --task task-7 --state closed
    """
    from gateway.cli.tables import show_episodes

    given = {"task_id": task, "group_id": group, "state": state, "mode": mode, "limit": limit}
    filters = {name: value for name, value in given.items() if value is not None}

    async def request(client: GatewayClient) -> dict[str, Any]:
        return {"episodes": await client.episodes(**filters)}

    found = fetch(gateway, admin_key, request)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show_episodes(found["episodes"])


def show_episode(
    episode_id: EpisodeId,
    gateway: Url = _URL,
    admin_key: AdminKey = None,
    model: Annotated[str | None, typer.Option(help="Another model that the episode called.")] = None,
    full: Annotated[
        bool, typer.Option(help=f"Whole texts, not the first {_SHOWN} characters of each.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what an episode's model read and sampled: each piece of text with its tokens, versions and log-probabilities.

    Example:

      gateway episodes show ep-2c4f --full
    """
    from gateway.cli.tables import show_trajectory

    async def request(client: GatewayClient) -> dict[str, Any]:
        whole = await whole_id(client, episode_id)
        return {**await client.episode(whole), **await client.trajectory(whole, model)}

    found = fetch(gateway, admin_key, request)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show_trajectory(found, None if full else _SHOWN)


def why(episode_id: EpisodeId, gateway: Url = _URL, admin_key: AdminKey = None) -> None:
    """Show what became of an episode and its group, step by step, and why it was trained or not.

    Example:

      gateway episodes why ep-2c4f
    """
    from gateway.cli.tables import show_why

    async def request(client: GatewayClient) -> dict[str, Any]:
        return await client.why(await whole_id(client, episode_id))

    show_why(fetch(gateway, admin_key, request))


async def whole_id(client: GatewayClient, typed: str) -> str:
    """Return the id of the only episode whose id begins with what was typed; without one, what was typed.

    Raise typer.BadParameter if there are several.
    """
    if len(typed) >= _ID_LENGTH:
        return typed
    ids = [episode["episode_id"] for episode in await client.episodes(text=typed, limit=1000)]
    found = [each for each in ids if each.startswith((typed, f"ep-{typed}"))]
    if len(found) > 1:
        some = ", ".join(found[:_NAMED])
        raise typer.BadParameter(f"{typed}: {len(found)} ids begin so, such as {some}: type more characters")
    return found[0] if found else typed


async def _watch(client: GatewayClient, model: str | None) -> dict[str, Any]:
    """End with Ctrl-C, or when the gateway does not respond."""
    from rich.live import Live

    from gateway.cli.tables import status_view

    view = status_view(await client.status(model))
    with Live(view, auto_refresh=False) as live:
        while True:
            if not live.console.is_terminal:
                live.console.print(view)
            await asyncio.sleep(_EVERY_S)
            view = status_view(await client.status(model))
            live.update(view, refresh=True)
