"""`gateway export`, `gateway prune` and `gateway migrate`: commands on the database, whether a gateway runs or not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def export(
    config: Annotated[Path, typer.Option("--config", "-c", help="The gateway's TOML file.")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    model: Annotated[str | None, typer.Option(help="A trained model. [default: the first]")] = None,
    batches: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Batch range A:B, B exclusive; either end may be omitted."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every rewarded training episode, trained or not.")
    ] = False,
    format_: Annotated[
        str, typer.Option("--format", help="The format of the file; only parquet exists.")
    ] = "parquet",
) -> None:
    """Write the groups that were trained to a Parquet file, from the database; no gateway need run.

    The schema is the feed's (headgate.arrow.FEED_SCHEMA): one row per node of a token tree. Read it with pandas, pyarrow, or
    datasets.load_dataset("parquet", data_files=FILE).

    Examples:

      gateway export --config gateway.toml --out trained.parquet

      gateway export --config gateway.toml --out all.parquet --all
    """
    from gateway.cli.progress import GroupProgress
    from gateway.config.settings import ConfigError, Settings
    from gateway.training_feed.export import ExportError, Selection
    from gateway.training_feed.export import export as write

    if format_ != "parquet":
        raise typer.BadParameter("the only format is parquet", param_hint="--format")
    if everything and batches is not None:
        raise typer.BadParameter(
            "--all exports every batch: leave out --batches or --all", param_hint="--batches"
        )
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


def prune(
    config: Annotated[Path, typer.Option("--config", "-c", help="The gateway's TOML file.")],
    older_than: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="DAYS",
            help="Delete episodes that ended this long ago. [default: as in [retention]]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    vacuum: Annotated[
        bool,
        typer.Option(
            help="Then return the free space to the file system. With SQLite, stop the gateway first."
        ),
    ] = False,
) -> None:
    """Delete old episodes that nothing needs any more; a gateway may be running. `gateway export` keeps them elsewhere.

    Example:

      gateway prune --config gateway.toml --older-than 30 --dry-run
    """
    from rich.console import Console

    from gateway.config.settings import ConfigError, Settings
    from gateway.episodes.retention import in_words, prune_store

    try:
        settings = Settings.load(config)
        with Console(stderr=True).status("looking for old episodes") as status:
            swept = asyncio.run(
                prune_store(
                    settings,
                    older_than,
                    dry=dry_run,
                    vacuum=vacuum,
                    report=lambda swept: status.update(in_words(swept)),
                )
            )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(("would delete " if dry_run else "deleted ") + in_words(swept))


def migrate(
    config: Annotated[Path, typer.Option("--config", "-c", help="The gateway's TOML file.")],
    to: Annotated[
        str, typer.Option(metavar="REVISION", help="A revision, such as 0012; `head` is this build's newest.")
    ] = "head",
    check: Annotated[
        bool,
        typer.Option("--check", help="Change nothing; exit with 1 if a start of this build would migrate."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Go back without a prompt.")] = False,
) -> None:
    """Bring the database's tables to this build's form, or back to an older one.

    Each start of a gateway does the first by itself. Going back drops what newer revisions added, with its contents, and wants
    all gateways stopped. It is seldom needed: an older build works on newer tables, and logs that when it starts.

    Example:

      gateway migrate -c gateway.toml --check
    """
    from gateway.config.settings import ConfigError, Settings
    from gateway.store import schema
    from headgate.processes.slow import in_progress

    try:
        store = Settings.load(config).store
        if check:
            found, newest = schema.revision(store) or "none", str(schema.newest_revision())
            typer.echo(f"tables: {found}; this build: {newest}")
            if found == "none" or found < newest:
                raise typer.Exit(1)
            schema.check_form(store)
            return
        if not yes and schema.is_back(store, to):
            typer.confirm(f"drop what was added after revision {to}, with its contents?", abort=True)
        with in_progress(lambda text: typer.echo(text, err=True), "migrating the tables"):
            schema.migrate(store, to)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(f"tables: {schema.revision(store)}")


def _range(batches: str | None) -> tuple[int, int | None]:
    first, colon, until = (batches or ":").partition(":")
    try:
        if not colon:
            raise ValueError
        return int(first or 0), int(until) if until else None
    except ValueError as error:
        raise typer.BadParameter(
            "must be two batch numbers, such as 3:7; either may be left out", param_hint="--batches"
        ) from error
