"""`gateway mirror`: published weights on this machine's disk, and served to others."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import Verbose, configure_logging


def mirror(
    directory: Annotated[Path, typer.Option("--dir", help="The directory of versions, a folder for each.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; without a key, a loopback address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port to listen on.")] = 8100,
    key: Annotated[
        str | None,
        typer.Option(
            envvar="HEADGATE_WEIGHTS_KEY",
            help="The key that requests to this server need, and that it sends to other servers.",
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=2, help="How many versions to keep after a fetch. [default: all]")
    ] = None,
    limit_mb_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Megabytes to fetch per second, at most. [default: no limit]"),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Keep copies of published weights on the machines of engines, and serve them to other mirrors.

    Start one on each machine of external engines, and name it in the gateway's [engine] mirrors.

    Example:

      gateway mirror --dir /var/lib/headgate/versions --host 0.0.0.0 --port 8100 --keep 3
    """
    from gateway.config.cross_checks import is_loopback

    if not key and not is_loopback(host):
        raise typer.BadParameter(
            "any client that reaches this address could read the weights: set --key or HEADGATE_WEIGHTS_KEY",
            param_hint="--host",
        )
    configure_logging(verbose)
    limit = limit_mb_s * 1e6 if limit_mb_s else None
    try:
        asyncio.run(_serve(directory, host, port, key or None, keep, limit))
    except OSError as error:
        typer.echo(f"cannot serve {directory} at {host}:{port}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from error


async def _serve(
    directory: Path, host: str, port: int, key: str | None, keep: int | None, limit: float | None
) -> None:
    """Serve until a signal comes."""
    from aiohttp import web

    from headgate.processes.ports import url_of
    from headgate.weights.mirror import Mirror
    from headgate.weights.server import create_server

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Mirror(directory, key, limit) as mirrored:
        runner = web.AppRunner(create_server(mirrored, key, keep), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            url = url_of(host, runner.addresses[0][1])
            typer.echo(f"versions in {directory} are served at {url}/versions", err=True)
            await stop.wait()
        finally:
            await runner.cleanup()
