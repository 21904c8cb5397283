"""The options that several commands share, and what they do before anything else: logging, and requests to a running gateway."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx

    from headgate.client import GatewayClient, GatewayRefused

WORKER = "HEADGATE_WORKER"
"""The environment variable that holds the name of one of several workers."""


def _root(url: str) -> str:
    """Return a gateway's root URL, from what people have at hand: without a scheme, or with the path that agents are given."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


Url = Annotated[
    str,
    typer.Option(
        "--gateway",
        envvar="HEADGATE_GATEWAY",
        callback=_root,
        metavar="URL",
        help="The gateway's URL.",
        rich_help_panel="Gateway",
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        "--admin-key",
        envvar="HEADGATE_ADMIN_KEY",
        metavar="KEY",
        help="The gateway's admin key.",
        rich_help_panel="Gateway",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log events, and not only warnings and errors.")
]


def configure_logging(verbose: bool) -> None:
    from gateway.cli.logs import Formatter

    level = logging.INFO if verbose else logging.WARNING
    worker = f" {os.environ[WORKER]}" if WORKER in os.environ else ""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(f"%(asctime)s %(levelname)s{worker} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx would log every URL
    for name in ("gateway.app", "gateway.workers", "gateway.engines.process"):
        logging.getLogger(name).setLevel(logging.INFO)


def fetch(
    url: str, admin_key: str | None, request: Callable[[GatewayClient], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Return what a running gateway returns for a request; a refusal or silence ends the command."""
    import httpx

    from headgate.client import GatewayClient, GatewayRefused
    from headgate.processes.slow import reported

    async def send() -> dict[str, Any]:
        async with GatewayClient(url, admin_key) as client:
            with reported(lambda text: typer.echo(text, err=True), f"a response of the gateway at {url}"):
                return await request(client)

    try:
        return asyncio.run(send())
    except (GatewayRefused, httpx.TransportError) as error:
        raise refused(url, error) from error


def refused(url: str, error: GatewayRefused | httpx.TransportError) -> typer.Exit:
    """Explain why a gateway gave no reply and how to fix it, and end the command."""
    from headgate.client import GatewayRefused
    from headgate.client.refusal import no_gateway

    if not isinstance(error, GatewayRefused):
        text = no_gateway(url, error)
    elif error.status == HTTPStatus.UNAUTHORIZED:
        text = f"{error} (--admin-key, or HEADGATE_ADMIN_KEY in the environment)"
    else:
        text = str(error)
    typer.echo(text, err=True)
    return typer.Exit(1)
