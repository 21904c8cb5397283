"""`gateway console`: the page of a gateway that runs, or of a recorded run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import AdminKey, Url, Verbose, ask, configure_logging


def console(
    run: Annotated[
        Path | None,
        typer.Option("--run", help="The folder of a run, finished, dead or running; needs no engine."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="In place of --run: the URL of a run's store, such as postgresql://…")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="With --run: the port of the page; 0: a free one.")
    ] = 8090,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    verbose: Verbose = False,
) -> None:
    """Open the console: of the gateway that runs at --gateway, or with --run of a recorded run.

    Examples:

      gateway console

      gateway console --run runs/demo
    """
    if run is None and store is None:
        ask(gateway, admin_key, lambda client: client.status())
        _show(f"{gateway}/console/", browser)
        return
    from gateway.archive import RecordedRun, find_run
    from gateway.settings import ConfigError

    configure_logging(verbose)
    try:
        if store is None:
            assert run is not None
            found = find_run(run.resolve())
        else:
            found = RecordedRun(store, (run,) if run is not None else ())
        _serve(found, port, browser)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


def _show(url: str, browser: bool) -> None:
    typer.echo(f"the console is at {url}")
    if browser:
        webbrowser.open(url)


def _serve(run: object, port: int, browser: bool) -> None:
    """Serves a run until a signal comes. Raises ConfigError where it cannot be shown."""
    import asyncio
    import socket

    import uvicorn

    from gateway.archive import RecordedRun, create_archive, open_archive
    from gateway.connection import Connection
    from gateway.settings import ConfigError
    from processes.ports import free_port, url_of

    assert isinstance(run, RecordedRun)

    async def check() -> None:
        async with open_archive(run):
            return

    asyncio.run(check())
    port = port or free_port()
    config = uvicorn.Config(
        create_archive(run), http=Connection, log_level="warning", timeout_graceful_shutdown=1
    )
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
            listening.listen()
        except OSError as error:
            raise ConfigError(
                f"--port: {port} cannot be listened on ({error.strerror}); name another"
            ) from error
        _show(f"{url_of('127.0.0.1', port)}/console/", browser)
        typer.echo("This is a recorded run: nothing in it can be changed. Ctrl-C stops the console.")
        uvicorn.Server(config).run(sockets=[listening])
