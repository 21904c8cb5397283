"""The options that several commands share, and what they do before anything else: logging, and asking a running gateway."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gateway.client import GatewayClient

WORKER = "HEADGATE_WORKER"
"""The environment variable that holds the name of one of several workers."""

Url = Annotated[str, typer.Option("--gateway", help="The gateway's URL.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="HEADGATE_ADMIN_KEY", help="The gateway's admin key.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, not only what goes wrong.")]


def configure_logging(verbose: bool) -> None:
    from gateway.logs import Formatter

    level = logging.INFO if verbose else logging.WARNING
    worker = f" {os.environ[WORKER]}" if WORKER in os.environ else ""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(f"%(asctime)s %(levelname)s{worker} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx would log every URL
    for name in ("gateway.app", "gateway.workers"):
        logging.getLogger(name).setLevel(logging.INFO)


def ask(
    url: str, admin_key: str | None, ask: Callable[[GatewayClient], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Asks a running gateway; a refusal or silence ends the command."""
    import httpx

    from gateway.client import GatewayClient, GatewayRefused

    async def asked() -> dict[str, Any]:
        async with GatewayClient(url, admin_key) as client:
            return await ask(client)

    try:
        return asyncio.run(asked())
    except GatewayRefused as error:
        typer.echo(str(error), err=True)
    except httpx.TransportError as error:
        typer.echo(f"no gateway answers at {url}: {error}", err=True)
    raise typer.Exit(1)
