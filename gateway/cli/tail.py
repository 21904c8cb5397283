"""`gateway tail`: what happens in a running gateway, line by line."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.options import AdminKey, Url, refused

if TYPE_CHECKING:
    from headgate.client.events import EventStream

_RETRY_S = (0.5, 1.0, 2.0, 5.0)
"""Seconds before each try to reach a gateway that went away; the last one again and again."""
_LATER = (429, 503)
_COLORS = {
    "episode": "cyan",
    "group": "blue",
    "batch": "magenta",
    "version": "green",
    "trainer": "yellow",
    "engine": "bright_black",
    "node": "white",
    "gap": "red",
}
_KINDS = tuple(kind for kind in _COLORS if kind != "gap")
_MOST = 160
"""Characters of one value in a line; `--json` has all of it."""
Last = Annotated[int, typer.Option(min=0, max=10_000, help="Show the last N events first.")]
OpenStream = Callable[[int | None], "EventStream"]
"""Return the stream of events after an id; None: from where the options start."""


def tail(
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    last: Last = 10,
    after: Annotated[
        int | None, typer.Option(min=0, help="Begin after the event with this id, instead; 0: with all.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only these: `episode`, or `episode.closed`. May be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only events of this model.")] = None,
    episode: Annotated[str | None, typer.Option(help="Only events of this episode.")] = None,
    group: Annotated[str | None, typer.Option(help="Only events of this group.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    follow: Annotated[bool, typer.Option(help="Follow new events, until interrupted.")] = True,
) -> None:
    """Show what happens in a running gateway: episodes, groups, batches, versions, engines, the trainer's steps.

    If the gateway goes away, the command waits for it and goes on after the last event that it showed.

    Examples:

      gateway tail --kind episode.closed --kind trainer

      gateway tail --after 0 --no-follow --json > events.jsonl
    """
    import httpx

    from headgate.client import GatewayClient, GatewayRefused

    for name in kind or ():
        if name.partition(".")[0] not in _KINDS:
            raise typer.BadParameter(f"{name!r} begins with none of {', '.join(_KINDS)}", param_hint="--kind")
    show = _show_json if as_json else _show_line

    async def watch() -> None:
        async with GatewayClient(gateway, admin_key) as client:
            wait_s = None if follow else 0.0
            events = partial(
                client.events, kinds=kind or (), model=model, episode=episode, group=group, wait_s=wait_s
            )

            def open_stream(place: int | None) -> EventStream:
                if place is None:
                    return events(after, last if after is None else None)
                return events(place)

            await _watch(open_stream, show, follow=follow)

    try:
        asyncio.run(watch())
    except (GatewayRefused, httpx.TransportError) as error:
        raise refused(gateway, error) from error
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def tail_episodes(
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    last: Last = 10,
    model: Annotated[str | None, typer.Option(help="Only events of this model.")] = None,
    group: Annotated[str | None, typer.Option(help="Only events of this group.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    follow: Annotated[bool, typer.Option(help="Follow new events, until interrupted.")] = True,
) -> None:
    """Show what becomes of episodes as it happens: `gateway tail --kind episode`.

    Example:

      gateway episodes tail --last 50
    """
    tail(
        gateway, admin_key, last, None, ["episode"], model=model, group=group, as_json=as_json, follow=follow
    )


async def _watch(open_stream: OpenStream, show: Callable[[dict[str, Any]], None], *, follow: bool) -> None:
    """Show one stream after the other, each from where the one before ended. Raises if not even the first begins."""
    import httpx

    from headgate.client import GatewayRefused

    place: int | None = None
    tries = 0
    while True:
        stream = open_stream(place)
        why = "it has ended the stream"
        try:
            async for event in stream:
                show(event)
        except (GatewayRefused, httpx.TransportError) as error:
            passing = not isinstance(error, GatewayRefused) or error.status in _LATER
            if not follow or not passing or (place is None and stream.last is None):
                raise
            why = str(error)
        if not follow:
            return
        if stream.last is not None:
            place, tries = stream.last, 0
        if not tries:
            typer.echo(
                f"the gateway went away ({why}); going on after event {place} once it is back", err=True
            )
        await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
        tries += 1


def _show_json(event: dict[str, Any]) -> None:
    typer.echo(json.dumps(event))


def _show_line(event: dict[str, Any]) -> None:
    typer.echo(line_of(event, colored=sys.stdout.isatty()))


def line_of(event: dict[str, Any], *, colored: bool) -> str:
    """Return an event as one line of text, in which agents' words cannot move the cursor."""
    at = datetime.fromtimestamp(event["at"]).strftime("%H:%M:%S") if "at" in event else " " * 8
    kind = f"{event['kind']:<18}"
    if colored:
        kind = typer.style(kind, fg=_COLORS.get(event["kind"].partition(".")[0]))
    subject = [event[name] for name in ("model", "group", "episode") if name in event]
    facts = [f"{name}={_value(value)}" for name, value in event["data"].items()]
    return "  ".join(
        [str(event["id"]).rjust(7), at, kind, *(_printable(str(s)) for s in subject), " ".join(facts)]
    )


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
