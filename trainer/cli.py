"""The command `trainer`. Heavy imports are inside of its commands, so that `--help` is instant."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headgate.options import Debug, Version
from headgate.processes.program import run as run_program
from trainer.program import exit_without_trackers, in_progress, plain_errors, run_interruptible

if TYPE_CHECKING:
    from trainer.config.settings import Settings

app = typer.Typer(
    help="Trains models on a gateway's episodes.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # keeps text in brackets
)

_BEGIN, _MORE = "Start here", "More commands"

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
    typer.Option(help="The memory of one device, such as 80GiB: print what to change until the run fits."),
]


@app.callback()
def _options(version: Version = False, debug: Debug = False) -> None:
    """headgate's trainer."""


@app.command("run", rich_help_panel=_BEGIN)
def run_command(
    config: Config,
    changes: Changes = None,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Load everything, compute one pass over random tokens, and print time and memory.",
        ),
    ] = False,
    meta: Annotated[
        bool, typer.Option("--meta", help="With --dry-run: check only shapes; no weights are needed.")
    ] = False,
    memory: Memory = None,
    from_older: Annotated[
        bool,
        typer.Option(
            "--from-older",
            help="If the newest checkpoint is damaged, continue from the newest whole one.",
        ),
    ] = False,
) -> None:
    """Train: lease batches, update the model, publish versions. Stop with Ctrl-C or a kill; continue with the same command.

    A file that has the gateway's tables too, as `gateway init` writes it, starts the gateway.

    Forward and backward begin with a batch's first groups, before it is complete. A start continues from the newest checkpoint
    under run.dir: it trains the batches since then again, from the gateway's record, and compares the result with the weights
    that were published last; with run.deterministic = true nothing is lost. Otherwise, training resumes from the checkpoint as a
    new version, and the versions in between are marked orphaned.

    Several ranks, as `[parallel]` divides them: torchrun --nproc-per-node N -m trainer.cli run CONFIG on each machine.

    A dry run writes nothing and needs no gateway; its last line is one JSON object.

    Examples:

      trainer run run.toml

      trainer run trainer.toml --set optimizer.lr=1e-6 --dry-run --memory 80GiB
    """
    if (meta or memory) and not dry:
        raise typer.BadParameter("--meta and --memory are for --dry-run")
    with plain_errors():
        with in_progress("loading PyTorch"):
            from trainer.config.settings import Settings
            from trainer.loop.run import run, run_other_rank
            from trainer.model.process_group import own_rank

            settings = Settings.load(config, changes or ())
        if dry:
            _rehearse(settings, meta, memory)
        elif own_rank() == 0:
            run_interruptible(
                run(settings, from_older=from_older),
                "stopping, with a last checkpoint",
                "stopped; run again to resume",
            )
        else:
            run_other_rank(settings)


def _rehearse(settings: Settings, meta: bool, memory: str | None) -> None:
    from trainer.commands.dry_run import rehearse
    from trainer.commands.plan_memory import bytes_of
    from trainer.loop.run import run_other_rank
    from trainer.model.process_group import own_rank

    if own_rank() == 0:
        with in_progress("loading the model, and computing one step"):
            result = rehearse(settings, meta=meta, memory=bytes_of(memory) if memory else None)
        _print_result(result.lines(), result.to_json(), result.fits)
    elif not meta:
        run_other_rank(settings)


def _print_result(lines: Iterable[str], result: dict[str, Any], fits: bool | None) -> None:
    """Print a table, and the result as one JSON object in the last line; exit with status 1 if the run does not fit."""
    for line in (*lines, json.dumps(result)):
        typer.echo(line)
    if fits is False:
        raise typer.Exit(1)


@app.command("eval", rich_help_panel=_BEGIN)
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
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Temperature 0, whatever the agent requests.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=2.0, help="The temperature of all calls. [default: as the agent requests]"),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the result and every outcome here.")
    ] = None,
    changes: Changes = None,
) -> None:
    """Evaluate the model that the gateway serves on separate tasks, which are never trained; `[eval]` has the defaults.

    One row for each file: mean reward with its 95 % interval, pass@k (a reward of 1 solves a task: `--set eval.solved=0.5`) and
    best@k for powers of two up to the samples, and how many episodes failed. The last line of output is one JSON object.

    Examples:

      trainer eval trainer.toml --tasks held_out.jsonl --greedy

      trainer eval trainer.toml --tasks easy.jsonl --tasks hard.jsonl --samples 16 --temperature 0.8 --json out.json
    """
    if greedy and temperature:
        raise typer.BadParameter("--greedy means --temperature 0: give only one of them")
    given: dict[str, Any] = {
        "tasks": tasks and [str(path) for path in tasks],
        "samples": samples,
        "temperature": 0 if greedy else temperature,
    }
    named = [f"eval.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    with plain_errors():
        with in_progress("loading PyTorch"):
            from trainer.commands.evaluate import evaluate
            from trainer.config.settings import Settings

        evaluation = evaluate(Settings.load(config, [*(changes or ()), *named]), json_out)
        run_interruptible(evaluation, "stopping, and abandoning open episodes", "stopped: no figures")


@app.command("sft", rich_help_panel=_MORE)
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
    """Fine-tune on conversations, or on recorded episodes with a high reward; the result is a Hugging Face directory.

    The assistant's messages are learned (`messages` and `tools` as JSON lines, rendered by the tokenizer's chat template), or the
    sampled tokens of the episodes of a `gateway export`. A start continues from the newest checkpoint under run.dir.

    Examples:

      trainer sft sft.toml --set sft.epochs=3 --out tuned

      gateway export --config gateway.toml --out episodes.parquet --all && trainer sft sft.toml --set sft.min_reward=0.9
    """
    with plain_errors():
        with in_progress("loading PyTorch"):
            from trainer.commands.sft import sft
            from trainer.config.settings import SupervisedSettings

        try:
            sft(SupervisedSettings.load(config, changes or ()), out)
        except KeyboardInterrupt:
            typer.echo("stopped; run again to resume", err=True)
            raise typer.Exit(130) from None


@app.command("export", rich_help_panel=_BEGIN)
def export_command(
    config: Config,
    out: Annotated[Path, typer.Option(help="The directory to write; it must not exist.", file_okay=False)],
    version: Annotated[
        int | None, typer.Option(min=0, help="A checkpoint's version. [default: the newest]")
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter/--merged",
            help="LoRA runs only: export the adapter, or merge it into the weights.",
        ),
    ] = False,
    changes: Changes = None,
) -> None:
    """Write a checkpoint's weights as a Hugging Face directory, tokenizer included, which transformers and vLLM load.

    Example:

      trainer export trainer.toml --out tuned
    """
    with plain_errors():
        with in_progress("loading the model, and writing its weights"):
            from trainer.commands.export import export
            from trainer.config.settings import Settings

            exported = export(Settings.load(config, changes or ()), out, version, adapter=adapter)
        hint = "the adapter, in peft's form" if adapter else f"serve it with: vllm serve {out}"
        typer.echo(f"{out}: version {exported}; {hint}")


@app.command("samples", rich_help_panel=_MORE)
def samples_command(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="`[run] dir` of a run.", file_okay=False, exists=True)
    ],
    step: Annotated[
        int | None, typer.Option(min=1, help="A step that has samples. [default: the newest]")
    ] = None,
) -> None:
    """Print a step's samples as Markdown: the calls' prompts and replies, and their rewards.

    `[report] samples_every` determines which steps have samples.

    Example:

      trainer samples runs/sums --step 20
    """
    with plain_errors():
        from trainer.report.samples import as_markdown, newest, read

        typer.echo(as_markdown(read(newest(directory, step))), nl=False)


@app.command("plan-memory", rich_help_panel=_MORE)
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
            help="The memory of an engine on the same device: 32GiB, or a share of --memory such as 0.4. Report whether both fit"
            " at the same time, or in turn ([gateway] nodes, offload)."
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Predict the memory of each rank by parts, from the model's `config.json`; the last line is one JSON object.

    No weights are loaded: the shapes of one micro-batch of `[batch] tokens` are propagated through the model.
    The exit status is 1 if the run does not fit.

    Example:

      trainer plan-memory trainer.toml --memory 80GiB --ranks 8
    """
    with plain_errors():
        with in_progress("propagating shapes through the model"):
            from trainer.commands.plan_memory import bytes_of, engine_bytes, plan
            from trainer.config.settings import Settings

            size = bytes_of(memory) if memory else None
            shared = engine_bytes(engine, size) if engine else None
            result = plan(Settings.load(config, changes or ()), ranks, size, shared)
        _print_result(result.lines(), result.to_json(), result.fits)


@app.command("warmstart", rich_help_panel=_MORE)
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
    with plain_errors():
        from rich.progress import Progress

        from trainer.commands.warmstart import Recipe, cache_root, warm_start

        loaded = Recipe.load(recipe)
        with Progress(transient=True) as progress:
            cached = warm_start(loaded, out, dtype=dtype, progress=progress)
        verb = "copied from the cache" if cached else "made, and cached"
        typer.echo(f"{out}: {verb} ({cache_root() / loaded.digest()})")


def main() -> None:
    """Run the console script."""
    # Unlike `python -m`, a console script does not look for an agent's module in the current folder.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        run_program("trainer", app)
    except SystemExit as end:
        exit_without_trackers(end)
        raise


if __name__ == "__main__":
    main()
