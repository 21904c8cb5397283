"""`gateway`: serve agents, run agents once per episode, and look at what became of them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gateway.client import Agent, EpisodeRunner, GatewayClient, Task
    from gateway.settings import Settings
    from gateway.types import EpisodeMode

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep theirs, or some would be used just as they close."""
WORKER = "HEADGATE_WORKER"
"""Set in the environment of one of several workers: its name."""
_SWITCH_S = 0.001
"""How long a thread keeps Python's lock from the event loop: the default, 5 ms, is what a token's whole way should take."""

log = logging.getLogger("gateway.cli")
_LONELY = (
    "warning: groups of one episode. An algorithm that compares the episodes of a group, as GRPO does, learns nothing from them:"
    " name a --group-size of 2 or more"
)

app = typer.Typer(
    help="headgate's gateway: agents in front, engines behind, every token recorded.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # keeps text in brackets
)
episodes_app = typer.Typer(
    help="Run agents, once per episode; ask what became of one.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(episodes_app, name="episodes")

Url = Annotated[str, typer.Option("--gateway", help="The gateway's URL.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="HEADGATE_ADMIN_KEY", help="The gateway's admin key.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, not only what goes wrong.")]


@app.callback()
def _options() -> None:
    """headgate's gateway."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The gateway's TOML file.")] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Needs no file: a fake engine that answers with words in no order.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="With --demo: where to listen. [default: 8000]")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes, kept running by one more; they need PostgreSQL.")
    ] = 1,
    targets: Annotated[
        Path | None,
        typer.Option(help="With --workers: a file that says where Prometheus finds each (file_sd)."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Serve agents at /v1 and the admin API at /admin/v1, and start the engine that the configuration names."""
    if targets is not None and workers == 1:
        raise typer.BadParameter("one process is found at its own port", param_hint="--targets")
    if demo:
        _serve_demo(port or 8000, verbose, alone=config is None and workers == 1)
        return
    if config is None:
        raise typer.BadParameter("name your file, or try `gateway serve --demo`", param_hint="--config")
    if port is not None:
        raise typer.BadParameter("[server] port in the file says it", param_hint="--port")
    from gateway.settings import ConfigError, Settings

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
        _configure_logging(verbose)
        if workers > 1:
            from gateway.workers import Supervisor

            supervisor = Supervisor(settings, config, workers, verbose, targets)
            raise typer.Exit(asyncio.run(supervisor.run()))
        _serve(settings, verbose)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


def _serve_demo(port: int, verbose: bool, *, alone: bool) -> None:
    """Serves the fake engine of `gateway/demo.py`."""
    if not alone:
        raise typer.BadParameter("it takes neither --config nor --workers", param_hint="--demo")
    from gateway.demo import demo_settings, introduction
    from gateway.settings import ConfigError, Settings

    folder = Path("runs/serve-demo")
    try:
        settings = Settings.parse(demo_settings(folder, port), "--demo")
        _configure_logging(verbose)
        typer.echo(introduction(folder, settings.server.url))
        _serve(settings, verbose)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


def _serve(settings: Settings, verbose: bool) -> None:
    """Serves until a signal comes, in this process. Raises ConfigError if it cannot start."""
    import uvicorn

    from gateway.app import create_app, end_calls
    from gateway.server import GatewayServer, listening
    from gateway.settings import ConfigError

    shared = WORKER in os.environ
    sockets = listening(settings, shared)
    sys.setswitchinterval(_SWITCH_S)
    gateway = create_app(settings)
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        log_level="info" if verbose else "warning",
        access_log=False,
        log_config=None,  # uvicorn's lines are formatted like ours
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,  # the client's address has no meaning here
    )
    server = GatewayServer(
        config,
        gateway.state.drain,
        lambda: end_calls(gateway.state.services),
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


@app.command()
def engine(
    config: Annotated[Path, typer.Option("--config", "-c", help="The gateway's TOML file.")],
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Where it listens.")],
    host: Annotated[
        str, typer.Option(help="An address that only gateways reach: an engine asks for no key.")
    ] = "127.0.0.1",
    model: Annotated[str | None, typer.Option(help="Whose weights. [default: the first trained]")] = None,
) -> None:
    """Become an engine, as [engine] says, for a gateway elsewhere: this process is the engine from then on.

    Only [models] and [engine] are read. The gateway's secrets are not in the engine's environment.
    """
    from gateway.engines.process import command
    from gateway.sections import is_public, public_engine
    from gateway.settings import SECRETS, ConfigError, Settings

    try:
        settings = Settings.load(config, only=("models", "engine"))
        name = model or settings.model_name
        given = settings.models.get(name)
        if given is None or given.path is None:
            raise ConfigError(f"{config}: no model {name!r} runs on engines")
        kind = settings.engine_of(name)
        if kind.launch == "external":
            raise ConfigError(f"{config}: [engine] launch is 'external': there is nothing to start")
        if is_public(host) and not kind.allow_public:
            raise ConfigError(f"--host: {public_engine(host)}")
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


@app.command()
def staleness(
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    model: Annotated[str | None, typer.Option(help="A trained model. [default: the first]")] = None,
) -> None:
    """Show a running gateway's batches, the groups in them, who waits, and what was lost of late."""
    from gateway.tables import show_staleness

    show_staleness(_asked(gateway, admin_key, lambda client: client.staleness(model)))


@episodes_app.command("why")
def why(
    episode_id: Annotated[str, typer.Argument(help="An episode, opened or refused.")],
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
) -> None:
    """Tell what became of an episode and its group, step by step, and why it was trained or not."""
    from gateway.tables import show_why

    show_why(_asked(gateway, admin_key, lambda client: client.why(episode_id)))


@app.command()
def export(
    config: Annotated[Path, typer.Option("--config", "-c", help="The gateway's TOML file.")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    model: Annotated[str | None, typer.Option(help="A trained model. [default: the first]")] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="A:B", help="Batches A up to but without B; either may be left out.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every rewarded training episode, trained or not.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="parquet is the only one.")] = "parquet",
) -> None:
    """Write the groups that were trained to a Parquet file, from the database; no gateway need run.

    The schema is the feed's (gateway.types.FEED_SCHEMA): one row per node of a token tree. Read it with pandas, pyarrow, or
    datasets.load_dataset("parquet", data_files=FILE).
    """
    from gateway.feed.export import ExportError, Selection
    from gateway.feed.export import export as write
    from gateway.progress import GroupProgress
    from gateway.settings import ConfigError, Settings

    if format_ != "parquet":
        raise typer.BadParameter("parquet is the only one", param_hint="--format")
    if everything and batches is not None:
        raise typer.BadParameter("--all takes every batch", param_hint="--batches")
    first, until = _range(batches)
    try:
        settings = Settings.load(config)
        name = model or settings.model_name
        if name not in settings.models or not settings.models[name].train:
            raise ConfigError(f"{config}: no trained model {name!r}")
        with GroupProgress() as progress:
            written = write(settings, Selection(name, first, until, everything), out, progress.show)
    except (ConfigError, ExportError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{out}: {written} groups")


@app.command()
def prune(
    config: Annotated[Path, typer.Option("--config", "-c", help="The gateway's TOML file.")],
    older_than: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="DAYS", help="Days since its end. [default: as in [retention]]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    vacuum: Annotated[
        bool,
        typer.Option(help="Then give the space back to the file system. SQLite: nothing may run meanwhile."),
    ] = False,
) -> None:
    """Delete old episodes that nothing needs any more; a gateway may run meanwhile. `gateway export` keeps them elsewhere."""
    from rich.console import Console

    from gateway.episodes.retention import in_words, prune_store
    from gateway.settings import ConfigError, Settings

    try:
        settings = Settings.load(config)
        with Console(stderr=True).status("looking for old episodes") as status:
            swept = asyncio.run(
                prune_store(
                    settings,
                    older_than,
                    dry=dry_run,
                    vacuum=vacuum,
                    told=lambda swept: status.update(in_words(swept)),
                )
            )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(("would delete " if dry_run else "deleted ") + in_words(swept))


def _range(batches: str | None) -> tuple[int, int | None]:
    first, colon, until = (batches or ":").partition(":")
    try:
        if not colon:
            raise ValueError
        return int(first or 0), int(until) if until else None
    except ValueError as error:
        raise typer.BadParameter("two numbers, as in 3:7", param_hint="--batches") from error


def _asked(
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


@episodes_app.command("run")
def run_episodes(
    tasks: Annotated[Path, typer.Option(help='Tasks: one JSON object a line, each with a "task_id".')],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: the command to run once per episode. Its last line is its reward."),
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Instead of a command: an async module:function.")] = None,
    worker: Annotated[
        bool, typer.Option(help="The command lives on: it reads tasks and writes rewards as JSON lines.")
    ] = False,
    gateway: Annotated[str, typer.Option(help="The gateway's URL.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[
        str | None, typer.Option(envvar="HEADGATE_ADMIN_KEY", help="The gateway's admin key.")
    ] = None,
    grade: Annotated[
        bool,
        typer.Option(help="What the command prints is no reward: the gateway's graders compute it."),
    ] = False,
    exit_code_reward: Annotated[
        bool,
        typer.Option(
            help="A command that prints no number is rewarded by its exit status: 0 is 1.0, 1 is 0.0."
        ),
    ] = False,
    group_size: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    spare: Annotated[
        int,
        typer.Option(
            min=0, help="More episodes per task, which race: for spare_members in the staleness settings."
        ),
    ] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once (and workers).")] = 8,
    mode: Annotated[str, typer.Option(help="train, or eval: recorded, never trained.")] = "train",
    model: Annotated[
        str | None, typer.Option(help="The trained model that the episodes are about. [default: the first]")
    ] = None,
    forever: Annotated[
        bool, typer.Option(help="Go through the tasks again and again, until interrupted.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one run of a command may take.")
    ] = 600.0,
    max_failures: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Stop when a greater share of the last episodes failed; 1: never."
        ),
    ] = 0.5,
    verbose: Verbose = False,
) -> None:
    """Run an agent once per episode, with OPENAI_BASE_URL and OPENAI_API_KEY of its own, and post its reward.

    A command's reward is a number, or an object with "reward", in its last line. One that ends with another status than 0, or
    prints no number, has failed: its episode is not trained, and what it wrote to standard error is kept (`episodes why`).

    An agent that has no reward (a function that returns None, a worker that writes {"reward": null}, a command with --grade) is
    graded by the gateway.

    Examples:

      gateway episodes run --tasks tasks.jsonl --group-size 8 --concurrency 16 -- python my_agent.py

      gateway episodes run --tasks tasks.jsonl --mode eval --agent my_package.agent:solve
    """
    from gateway.client import GatewayRefused, GatewayUnreachable, RunStopped
    from gateway.client.agents import read_tasks

    _configure_logging(verbose)
    try:
        found = read_tasks(tasks)
        chosen = _agent(agent, command or [], worker, concurrency, timeout, grade, exit_code_reward)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if spare and mode == "eval":
        raise typer.BadParameter("spare episodes are for training: every evaluation counts")
    kind = {
        "group_size": group_size,
        "spare": spare,
        "concurrency": concurrency,
        "mode": _mode(mode),
        "model": model,
        "max_failures": max_failures,
    }
    if group_size == 1 and mode == "train":
        typer.echo(_LONELY, err=True)
    try:
        summary = asyncio.run(_run(gateway, admin_key, chosen, found, forever, kind))
    except (GatewayUnreachable, GatewayRefused, RunStopped) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(summary))
    raise typer.Exit(1 if summary["failed"] and not forever else 0)


async def _run(
    url: str, admin_key: str | None, agent: Agent, tasks: list[Task], forever: bool, kind: dict[str, Any]
) -> dict[str, float]:
    """`kind`: of the EpisodeRunner, what it is called with."""
    from gateway.client import EpisodeRunner, GatewayClient
    from gateway.progress import EpisodeProgress

    total = None if forever else len(tasks) * (kind["group_size"] + kind["spare"])
    async with GatewayClient(url, admin_key) as client:
        with EpisodeProgress(total) as progress:
            runner = EpisodeRunner(client, agent, on_outcome=progress.add, on_wait=progress.wait, **kind)
            try:
                await _drive(runner, tasks, forever)
            finally:
                await agent.close()
    return progress.summary()


async def _drive(runner: EpisodeRunner, tasks: list[Task], forever: bool) -> None:
    if not forever:
        await runner.run(tasks)
        return
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await runner.run_forever(tasks, stop)


def _agent(
    name: str | None,
    command: list[str],
    worker: bool,
    workers: int,
    timeout_s: float,
    grade: bool,
    exit_code_reward: bool,
) -> Agent:
    from gateway.client.agents import CommandAgent, WorkerAgent, load_agent

    if (name is None) == (not command):
        raise ValueError("name an agent with --agent, or a command after `--`: one of the two")
    if grade and (worker or name is not None):
        raise ValueError(
            '--grade is for a command: a function asks to be graded by None, a worker by {"reward": null}'
        )
    if exit_code_reward and (worker or name is not None):
        raise ValueError("--exit-code-reward is for a command: functions and workers state a number")
    if name is not None:
        return load_agent(name)
    if worker:
        return WorkerAgent(command, workers, timeout_s)
    return CommandAgent(command, timeout_s, grade=grade, exit_code_reward=exit_code_reward)


def _mode(value: str) -> EpisodeMode:
    if value not in ("train", "eval"):
        raise typer.BadParameter("train or eval", param_hint="--mode")
    return "eval" if value == "eval" else "train"


def _configure_logging(verbose: bool) -> None:
    from gateway.logs import Formatter

    level = logging.INFO if verbose else logging.WARNING
    worker = f" {os.environ[WORKER]}" if WORKER in os.environ else ""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(f"%(asctime)s %(levelname)s{worker} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx would log every URL
    for name in ("gateway.app", "gateway.workers"):
        logging.getLogger(name).setLevel(logging.INFO)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
