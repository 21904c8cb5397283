"""`gateway serve` and `gateway engine`: the commands that become a server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import WORKER, Verbose, configure_logging

if TYPE_CHECKING:
    from socket import socket

    from gateway.config.settings import Settings

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, or some would be used just as they close."""
_SWITCH_S = 0.001
"""Seconds that a thread may keep Python's lock from the event loop. The default, 5 ms, is as long as a token may take in all."""

log = logging.getLogger("gateway.cli")


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The gateway's TOML file.")] = None,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Serve a fake engine that replies with random words; needs no file."),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="With --demo: the port to listen on. [default: 8000]"),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Gateway processes, restarted when they end; 2 or more need PostgreSQL."
        ),
    ] = 1,
    targets: Annotated[
        Path | None,
        typer.Option(
            help="With --workers: write where Prometheus finds each process to this file (file_sd)."
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Serve agents at /v1 and the admin API at /admin/v1, and start the engine that the configuration names.

    Examples:

      gateway serve --demo

      gateway serve --config gateway.toml
    """
    if targets is not None and workers == 1:
        raise typer.BadParameter(
            "only for --workers 2 or more; a single process serves its metrics at its own port",
            param_hint="--targets",
        )
    if demo:
        _serve_demo(port or 8000, verbose, alone=config is None and workers == 1)
        return
    if config is None:
        raise typer.BadParameter("name your file, or try `gateway serve --demo`", param_hint="--config")
    if port is not None:
        raise typer.BadParameter(
            "only for --demo; with --config, set [server] port in the file", param_hint="--port"
        )
    from gateway.config.settings import ConfigError, Settings
    from gateway.server import listening

    try:
        settings = Settings.load(config)
        for name, model in settings.models.items():
            if model.path is not None and not model.path.is_dir():
                raise ConfigError(f"{config}:\n  models.{name}.path: no such folder: {model.path}")
        from gateway.services import check_start

        if workers > 1:
            from gateway.workers import check

            check(settings, workers, targets)
        asyncio.run(check_start(settings))
        configure_logging(verbose)
        if workers > 1:
            from gateway.workers import Supervisor

            supervisor = Supervisor(settings, config, workers, verbose, targets)
            raise typer.Exit(asyncio.run(supervisor.run()))
        _serve(settings, listening(settings, WORKER in os.environ), verbose)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.status) from error


def _serve_demo(port: int, verbose: bool, *, alone: bool) -> None:
    """Serve the fake engine of `gateway/cli/demo.py`."""
    if not alone:
        raise typer.BadParameter("cannot be combined with --config or --workers", param_hint="--demo")
    from gateway.cli.demo import demo_settings, introduction
    from gateway.config.settings import ConfigError, Settings
    from gateway.server import listening

    folder = Path("runs/serve-demo") / str(port)
    try:
        settings = Settings.parse(demo_settings(folder, port), "--demo")
        configure_logging(verbose)
        sockets = listening(settings, False)
        _serve(settings, sockets, verbose, introduction(folder, settings.server.url))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


def _serve(settings: Settings, sockets: list[socket], verbose: bool, banner: str = "") -> None:
    """Serve at bound sockets until a signal comes, in this process; print `banner` once it listens. Raise ConfigError if it
    cannot start."""
    import uvicorn

    from gateway.app import create_app, end_calls, leave
    from gateway.config.settings import ConfigError
    from gateway.connection import Connection
    from gateway.server import GatewayServer

    shared = WORKER in os.environ
    sys.setswitchinterval(_SWITCH_S)
    gateway = create_app(settings)
    config = uvicorn.Config(
        gateway,
        http=Connection,
        loop="uvloop",
        log_level="info" if verbose else "warning",
        access_log=False,
        log_config=None,  # uvicorn's lines are formatted like ours
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,  # the client's address has no meaning here
    )
    server = GatewayServer(
        config,
        lambda: typer.echo(banner) if banner else None,
        gateway.state.drain,
        lambda: end_calls(gateway.state.services),
        lambda: leave(gateway.state.services),
        shutdown_s=settings.server.shutdown_s,
        shared=shared,
    )
    logging.getLogger("uvicorn.error").addFilter(lambda _: gateway.state.refusal is None)
    try:
        server.run(sockets)
    except SystemExit:
        if (refusal := gateway.state.refusal) is None:
            raise
        log.info("why the start has failed", exc_info=refusal)
        raise ConfigError(f"the gateway cannot start: {refusal}") from refusal


def engine(
    config: Annotated[Path, typer.Option("--config", "-c", help="The gateway's TOML file.")],
    port: Annotated[int, typer.Option(min=1, max=65_535, help="The address to listen on.")],
    host: Annotated[
        str, typer.Option(help="An address that only gateways reach: an engine requires no key.")
    ] = "127.0.0.1",
    model: Annotated[
        str | None, typer.Option(help="The model whose weights it loads. [default: the first trained]")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="GPUs over which it is spread. [default: as in the file]"),
    ] = None,
) -> None:
    """Become an engine, as [engine] configures it, for a gateway elsewhere: this process is the engine from then on.

    Only [models] and [engine] are read. The gateway's secrets are not in the engine's environment.

    Example:

      gateway engine --config gateway.toml --port 8200
    """
    from gateway.config import refused_place
    from gateway.config.environment import SECRETS
    from gateway.config.settings import ConfigError, Settings
    from gateway.engines.process import command

    try:
        settings = Settings.load(config, only=("models", "engine"))
        name = model or settings.model_name
        given = settings.models.get(name)
        if given is None or given.path is None:
            raise ConfigError(f"{config}: no model {name!r} runs on engines")
        kind = settings.engine_of(name)
        if kind.launch == "external":
            raise ConfigError(f"{config}: [engine] launch is 'external': there is nothing to start")
        if refused := refused_place(host, host, allow_public=kind.allow_public):
            raise ConfigError(f"--host: {refused[1]}")
        if tensor_parallel not in (None, kind.tensor_parallel):
            if kind.launch != "vllm":
                raise ConfigError(
                    f"--tensor-parallel: only vLLM is spread, and [engine] launch is {kind.launch!r}"
                )
            kind = kind.model_copy(update={"tensor_parallel": tensor_parallel})
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    argv, own = command(kind, given, name, str(given.path.resolve()), host, port)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(SECRETS)}
    try:
        os.execvpe(argv[0], argv, kept | own)
    except OSError as error:
        typer.echo(f"{config}: [engine] python: {argv[0]}: {error.strerror}", err=True)
        raise typer.Exit(2) from error
