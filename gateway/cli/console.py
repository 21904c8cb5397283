"""`gateway console`: the page of a gateway that runs, or of a recorded run."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import AdminKey, Url, Verbose, configure_logging, fetch

if TYPE_CHECKING:
    from gateway.archive import RecordedRun

_HOST = "127.0.0.1"


def console(
    run: Annotated[
        Path | None,
        typer.Option("--run", help="The folder of a run, finished, dead or running; needs no engine."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="In place of --run: the URL of a run's store, such as postgresql://host/name"),
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
        fetch(gateway, admin_key, lambda client: client.status())
        _show(f"{gateway}/console/", browser)
        return
    from gateway.archive import RecordedRun, find_run
    from gateway.config.settings import ConfigError

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


def _serve(run: RecordedRun, port: int, browser: bool) -> None:
    """Serve a run until a signal comes. Raise ConfigError where it cannot be shown."""
    import asyncio

    import uvicorn

    from gateway.archive import create_archive, open_archive
    from gateway.connection import Connection
    from gateway.server import Server, bound
    from headgate.processes.ports import url_of

    async def check() -> None:
        async with open_archive(run):
            return

    def announce() -> None:
        typer.echo("a recorded run: nothing can be changed in it. Ctrl-C ends this.")
        url = f"{url_of(_HOST, listening.getsockname()[1])}/console/"
        # A browser in this terminal would hold the server's thread
        threading.Thread(target=_show, args=(url, browser), name="browser", daemon=True).start()

    (listening,) = bound(_HOST, port, False, "--port")
    asyncio.run(check())
    config = uvicorn.Config(
        create_archive(run), http=Connection, log_level="warning", timeout_graceful_shutdown=1
    )
    Server(config, announce).run([listening])
