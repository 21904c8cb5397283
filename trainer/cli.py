"""The command `trainer`. Heavy imports are inside of its commands, so that `--help` is instant."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from processes.program import run as run_program
from scheduler.options import Debug, Version

if TYPE_CHECKING:
    from trainer.settings import Settings

app = typer.Typer(
    help="Learns from a gateway's episodes.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # keeps text in brackets
)

_EXTRA = ("PIL", "peft", "tensorboard", "torch", "transformers")
"""Packages of the extra `trainer`."""
Config = Annotated[Path, typer.Argument(help="The trainer's TOML file.", dir_okay=False)]


Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Override a setting of the file, such as optimizer.lr=1e-6; may be repeated.",
    ),
]


Memory = Annotated[
    str | None,
    typer.Option(help="The memory of one device, such as 80GiB: prints what to change until the run fits."),
]


@app.callback()
def _options(version: Version = False, debug: Debug = False) -> None:
    """headgate's trainer."""


@app.command("run")
def run_command(
    config: Config,
    changes: Changes = None,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Load everything, make one pass over random tokens, and print what it takes."
        ),
    ] = False,
    meta: Annotated[
        bool, typer.Option("--meta", help="With --dry-run: check shapes only; no weights are needed.")
    ] = False,
    memory: Memory = None,
    from_older: Annotated[
        bool,
        typer.Option(
            "--from-older",
            help="Where the newest checkpoint is damaged: go on from the newest that is whole.",
        ),
    ] = False,
) -> None:
    """Train: lease batches, update the model, publish the weights; stop with ctrl-c or a kill, go on with the same command.

    Forward and backward begin with a batch's first groups, before it is whole. A start goes on from the newest checkpoint under
    run.dir: it first trains the batches since then again, from the gateway's record, and compares the result with the weights
    that were published last: with run.deterministic = true nothing is lost. If they differ, or newer checkpoints were removed,
    the checkpoint's weights become a new version, and the versions between are orphaned.

    Several ranks, as `[parallel]` divides them: torchrun --nproc-per-node N -m trainer.cli run CONFIG on each machine.

    A dry run writes nothing and needs no gateway; its last line is one JSON object.

    Examples:

      trainer run trainer.toml

      trainer run trainer.toml --set optimizer.lr=1e-6 --dry-run --memory 80GiB
    """
    if (meta or memory) and not dry:
        raise typer.BadParameter("--meta and --memory are for --dry-run")
    with _plain_errors():
        from trainer.loop.run import follow_first, run
        from trainer.model.parallel import own_rank
        from trainer.settings import Settings

        settings = Settings.load(config, changes or ())
        if dry:
            _rehearse(settings, meta, memory)
        elif own_rank() == 0:
            _main(
                run(settings, from_older=from_older),
                "stopping, with a last checkpoint",
                "stopped; run again to resume",
            )
        else:
            follow_first(settings)


def _rehearse(settings: Settings, meta: bool, memory: str | None) -> None:
    from trainer.commands.dry_run import rehearse
    from trainer.commands.plan_memory import bytes_of
    from trainer.loop.run import follow_first
    from trainer.model.parallel import own_rank

    if own_rank() == 0:
        found = rehearse(settings, meta=meta, memory=bytes_of(memory) if memory else None)
        _tell(found.lines(), found.to_json(), found.fits)
    elif not meta:
        follow_first(settings)


def _tell(lines: Iterable[str], result: dict[str, Any], fits: bool | None) -> None:
    """A table for people, and the same for programs as the last line; what does not fit is a failure."""
    for line in (*lines, json.dumps(result)):
        typer.echo(line)
    if fits is False:
        raise typer.Exit(1)


@app.command("eval")
def eval_command(
    config: Config,
    tasks: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines, one task each; may be repeated. Without it, [eval] tasks.", dir_okay=False
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Episodes of each task. [default: 1]")
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            min=1,
            help="The k of pass@k and best@k; may be repeated. [default: powers of two, and samples]",
        ),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0, whatever the agent asks.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=2.0, help="The temperature of all calls. [default: as the agent asks]"),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the result and every outcome here.")
    ] = None,
    changes: Changes = None,
) -> None:
    """Evaluate the model that the gateway serves on tasks of their own, which are never trained; `[eval]` has the defaults.

    One row for each file: mean reward with its 95 % interval, pass@k (a reward of 1 solves a task: `--set eval.solved=0.5`) and
    best@k, and how many episodes failed. The last line of output is one JSON object.

    Examples:

      trainer eval trainer.toml --tasks held_out.jsonl --greedy

      trainer eval trainer.toml --tasks easy.jsonl --tasks hard.jsonl --samples 16 --k 1 --k 8 --temperature 0.8 --json out.json
    """
    if greedy and temperature:
        raise typer.BadParameter("--greedy means --temperature 0: give only one of them")
    given: dict[str, Any] = {
        "tasks": tasks and [str(path) for path in tasks],
        "samples": samples,
        # Those of the file may be above the samples of the command line.
        "k": k or (samples and []),
        "temperature": 0 if greedy else temperature,
    }
    named = [f"eval.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    with _plain_errors():
        from trainer.commands.evaluate import evaluate
        from trainer.settings import Settings

        evaluation = evaluate(Settings.load(config, [*(changes or ()), *named]), json_out)
        _main(evaluation, "stopping, and giving up open episodes", "stopped: no figures")


@app.command("sft")
def sft_command(
    config: Annotated[Path, typer.Argument(help="A TOML file with a table [sft].", dir_okay=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The directory to write the model to; it must not exist. [default: model in run.dir]",
            file_okay=False,
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Fine-tune on conversations, or on recorded episodes that earned enough; ends with a Hugging Face directory.

    Learnt is what the assistant says (`messages` and `tools` as JSON lines, rendered by the tokenizer's chat template), or what
    was sampled in the episodes of a `gateway export`. A start goes on from the newest checkpoint under run.dir.

    Examples:

      trainer sft sft.toml --set sft.epochs=3 --out tuned

      gateway export --config gateway.toml --out episodes.parquet --all && trainer sft sft.toml --set sft.min_reward=0.9
    """
    with _plain_errors():
        from trainer.commands.sft import sft
        from trainer.settings import SupervisedSettings

        try:
            sft(SupervisedSettings.load(config, changes or ()), out)
        except KeyboardInterrupt:
            typer.echo("stopped; run again to resume", err=True)
            raise typer.Exit(130) from None


@app.command("export")
def export_command(
    config: Config,
    out: Annotated[Path, typer.Option(help="The directory to write; it must not exist.", file_okay=False)],
    version: Annotated[
        int | None, typer.Option(min=0, help="A checkpoint's version; the newest, if none is named.")
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter/--merged",
            help="Of a run with [model.lora]: the adapter alone, or its sum with the weights.",
        ),
    ] = False,
    changes: Changes = None,
) -> None:
    """Write a checkpoint's weights as a Hugging Face directory, tokenizer included, which transformers and vLLM load.

    Example:

      trainer export trainer.toml --out tuned
    """
    with _plain_errors():
        from trainer.commands.export import export
        from trainer.settings import Settings

        exported = export(Settings.load(config, changes or ()), out, version, adapter=adapter)
        way = "the adapter alone, as peft reads it" if adapter else f"serve it with: vllm serve {out}"
        typer.echo(f"{out}: version {exported}; {way}")


@app.command("samples")
def samples_command(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="`[run] dir` of a run.", file_okay=False, exists=True)
    ],
    step: Annotated[
        int | None, typer.Option(min=1, help="A step that has samples; the newest, if none is named.")
    ] = None,
) -> None:
    """Print what agents were asked and answered in a step, and what that earned, as Markdown.

    `[report] samples_every` says which steps have samples.

    Example:

      trainer samples runs/sums --step 20
    """
    with _plain_errors():
        from trainer.report.markdown import as_markdown, newest, read

        typer.echo(as_markdown(read(newest(directory, step))), nl=False)


@app.command("plan-memory")
def plan_memory_command(
    config: Config,
    memory: Memory = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="The number of ranks. [default: as [parallel] needs, or 1]"),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="What an engine on the same device takes while it works: 32GiB, or a share of --memory such as 0.4. Says whether"
            " both fit together, or in turn ([gateway] nodes, offload)."
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Predict the memory of each rank by parts, from `config.json` of the model alone; the last line is one JSON object.

    Nothing is loaded and nothing computed: the shapes of one micro-batch of `[batch] tokens` go through the model.
    The exit status is 1 if the run does not fit.

    Example:

      trainer plan-memory trainer.toml --memory 80GiB --ranks 8
    """
    with _plain_errors():
        from trainer.commands.plan_memory import bytes_of, engine_bytes, plan
        from trainer.settings import Settings

        size = bytes_of(memory) if memory else None
        beside = engine_bytes(engine, size) if engine else None
        found = plan(Settings.load(config, changes or ()), ranks, size, beside)
        _tell(found.lines(), found.to_json(), found.fits)


@app.command("families")
def families_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Families to measure, such as qwen3. [default: all]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the matrix of all families as Markdown here.", dir_okay=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all findings as one JSON object in the last line.")
    ] = False,
) -> None:
    """Measure which families of models can be trained, how exactly, and whether what is written is read back.

    Tiny random models of each family; about ten minutes for all, on one core. Run it again when transformers, peft or torch
    changes.

    Examples:

      trainer families qwen3 phimoe

      trainer families --out docs/topics/models-matrix.md
    """
    with _plain_errors():
        from trainer.commands import families

        found = families.families(names or (), out, typer.echo)
        if as_json:
            typer.echo(json.dumps(families.as_json(found)))


@app.command("warmstart")
def warmstart_command(
    out: Annotated[Path, typer.Option(help="The directory to write the checkpoint to.", file_okay=False)],
    recipe: Annotated[Path, typer.Option(help="A recipe's TOML file.", dir_okay=False)] = Path(
        "examples/demo/warmstart.toml"
    ),
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="The dtype of the weights that are written.")
    ] = "float32",
) -> None:
    """Make a small model by a short supervised run; the same recipe is made once and cached.

    Example:

      trainer warmstart --recipe examples/demo/warmstart.toml --out runs/model
    """
    with _plain_errors():
        from rich.progress import Progress

        from trainer.commands.warmstart import Recipe, cache_root, warm_start

        loaded = Recipe.load(recipe)
        with Progress(transient=True) as progress:
            cached = warm_start(loaded, out, dtype=dtype, progress=progress)
        verb = "copied from the cache" if cached else "made, and cached"
        typer.echo(f"{out}: {verb} ({cache_root() / loaded.digest()})")


def main() -> None:
    """The console script."""
    # Unlike `python -m`, a console script does not look for an agent's module in the current folder.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    run_program("trainer", app)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Prints errors that a user can act on without a traceback."""
    from gateway.client import GatewayRefused, GatewayUnreachable, RunStopped
    from processes.errors import ChildDied
    from trainer.errors import ConfigError, TrainerError

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        typer.echo(
            f"the trainer needs {error.name}, which is not installed: pip install 'headgate[trainer]'",
            err=True,
        )
        raise typer.Exit(2) from error
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (
        TrainerError,
        ChildDied,
        GatewayRefused,
        GatewayUnreachable,
        RunStopped,
        TimeoutError,
    ) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


def _main(work: Coroutine[Any, Any, None], ending: str, end: str) -> None:
    from processes.interrupts import STATUS, Interrupted, interruptible

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        asyncio.run(interruptible(work, say, ending))
    except Interrupted:
        say(end)
        raise typer.Exit(STATUS) from None


if __name__ == "__main__":
    main()
