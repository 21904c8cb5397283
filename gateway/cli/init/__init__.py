"""`gateway init`: one file for a new project, from a model, an agent, tasks and a reward."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import run_options as options

if TYPE_CHECKING:
    from gateway.cli.init.project import Environment, LiveAgent, OwnAgent

_MODEL = "Qwen/Qwen3-0.6B"


def init(
    model: Annotated[
        str | None,
        typer.Option(
            help=f"A checkpoint's folder, or an id of the Hugging Face hub, which is downloaded. [default: {_MODEL}]"
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="A command that runs it once per episode, such as 'python agent.py'; or an async module:function.",
            rich_help_panel=options.AGENT,
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="The agent is in daily use already, and calls the gateway with a lasting key (docs/guide/live.md).",
            rich_help_panel=options.AGENT,
        ),
    ] = False,
    env: options.Env = None,
    env_args: options.EnvArgs = "{}",
    env_python: options.EnvPython = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, one task each. [default: tasks.jsonl; written if it is missing]",
            rich_help_panel=options.AGENT,
        ),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Tasks for evaluation, which are never trained. [default: held-out.jsonl, if it exists]",
            rich_help_panel=options.AGENT,
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="agent: the last line that it prints, or what it returns; exit-code; or a grader, module:function or a URL."
            " [default: agent]",
            rich_help_panel=options.AGENT,
        ),
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="An engine that runs already. [default: the gateway starts vLLM]")
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option(help="The interpreter of vLLM's environment. [default: the first that is found]"),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora/--full", help="Train LoRA adapters, or all weights of the model.")
    ] = True,
    trial: Annotated[
        bool, typer.Option("--trial/--no-trial", help="Run the agent for one episode against a fake engine.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace a run.toml that is there.")] = False,
) -> None:
    """Write run.toml, which `trainer run` and `gateway serve` both read, for your model, agent or environment, and machine.

    It asks for what no option states; without a terminal, it uses defaults and prints them. Start it in the folder of the agent,
    which runs for one episode against a fake engine. If that fails, the files are written too, and the exit status is 1.

    Examples:

      gateway init --model models/Qwen3-0.6B --agent "python agent.py" --reward exit-code

      gateway init --model models/Qwen3-0.6B --env reasoning-gym:chain_sum

      gateway init --model models/Qwen3-0.6B --live --reward my_package.rewards:satisfied
    """
    from gateway.cli.init.checks import warnings
    from gateway.cli.init.inputs import (
        answer,
        checkpoint,
        engine_of,
        environment_of,
        live_agent,
        own_agent,
        project_of,
    )
    from gateway.cli.init.project import FILE, LiveAgent, run_toml
    from gateway.config.settings import ConfigError

    try:
        if Path(FILE).exists() and not force:
            raise ConfigError(f"{FILE}: there already in {Path.cwd()}; --force replaces it")
        model = model or answer("The model: a folder, or an id of the Hugging Face hub", "--model", _MODEL)
        source: OwnAgent | Environment | LiveAgent
        files: dict[Path, str] = {}
        if live:
            excluded = {"--agent": agent, "--env": env, "--tasks": tasks, "--held-out": held_out}
            source = live_agent(reward, excluded)
        elif env is None:
            source, files = own_agent(agent, reward, tasks, held_out)
        else:
            own = {"--agent": agent, "--reward": reward, "--tasks": tasks, "--held-out": held_out}
            source = environment_of(env, env_args, env_python, own)
        project = project_of(checkpoint(model), source, engine_of(engine_url, engine_python), lora)
        for path, text in {**files, Path(FILE): run_toml(project)}.items():
            path.write_text(text, encoding="utf-8")
    except (ConfigError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    problem = "" if isinstance(source, LiveAgent) or not trial else _try(source)
    for warning in warnings(project):
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"machine: {project.machine}")
    typer.echo(
        f"wrote:   {', '.join(map(str, [FILE, *files]))}{' (replace the example tasks)' if files else ''}"
    )
    if problem:
        typer.echo(f"fix the agent first: {problem}", err=True)
    if isinstance(source, LiveAgent):
        typer.echo(f"agent:   OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY={source.key}")
    typer.echo(f"next:    trainer run {FILE}")
    if problem:
        raise typer.Exit(1)


def _try(source: OwnAgent | Environment) -> str:
    """Run the agent once, print the result, and return what went wrong."""
    from gateway.cli.init.project import OwnAgent

    if isinstance(source, OwnAgent) and not source.is_function:
        program = shlex.split(source.agent)[0]
        if shutil.which(program) is None:
            return f"{program}: no such program"
    typer.echo("trial:   one episode of the agent against a fake engine, which replies with random words")
    from gateway.cli.init.trial import try_agent
    from headgate.processes.errors import ChildDied

    # Unlike `python -m`, a console script does not look for an agent's module in the current folder.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        result = asyncio.run(try_agent(source, lambda text: typer.echo(f"         {text}")))
    except (ValueError, ChildDied, TimeoutError) as error:
        return str(error)
    if not result.problem:
        typer.echo(f"         {result}")
    return result.problem
