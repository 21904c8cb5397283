"""`scheduler`: draw the control program, and replay what it decided."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headgate.options import Debug, Version
from headgate.processes.program import run as run_program

if TYPE_CHECKING:
    from scheduler.reactor.clock import Tag
    from scheduler.reactor.reading import Run
    from scheduler.reactor.recording import Entry
    from scheduler.reactor.replay import Difference, RunReport
    from scheduler.reactor.topology import Program

app = typer.Typer(
    help="headgate's decisions: a program of reactors, drawn and replayed.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # keeps text in brackets
)

_BEGIN, _MORE = "Start here", "More commands"
RECORDING = "control.jsonl"
"""The recording's name in the folder of a run."""
_VALUE, _WHY = 72, 120


@app.callback()
def _options(version: Version = False, debug: Debug = False) -> None:
    """headgate's scheduler."""


@app.command(rich_help_panel=_BEGIN)
def run(
    cluster: Annotated[Path, typer.Argument(help="A cluster's TOML file.", dir_okay=False)],
    check: Annotated[bool, typer.Option("--check", help="Show the plan only; start nothing.")] = False,
) -> None:
    """Start a cluster and tend it: gateway, engines and trainer, on this machine or on Ray (docs/topics/scheduler.md).

    Examples:

      scheduler run cluster.toml --check

      scheduler run cluster.toml
    """
    from scheduler.cluster.command import run as run_cluster
    from scheduler.cluster.errors import ClusterError

    try:
        status = run_cluster(cluster, check)
    except ClusterError as error:
        raise _usage_error(str(error)) from error
    raise typer.Exit(status)


@app.command(rich_help_panel=_MORE)
def graph(
    program: Annotated[str, typer.Option(help="The program to draw.")] = "control",
    format: Annotated[
        Literal["markdown", "mermaid"],
        typer.Option(help="A page with the diagram and every reaction, or the diagram alone."),
    ] = "markdown",
    out: Annotated[
        Path | None, typer.Option(help="A file to write to, instead of the standard output.")
    ] = None,
) -> None:
    """Draw a program's reactors, reactions and connections from its declarations, in Mermaid.

    Example:

      scheduler graph --out control.md
    """
    from scheduler.reactor.draw import markdown, mermaid

    found = _builder(program)({})
    text = markdown(found) if format == "markdown" else mermaid(found)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


@app.command(rich_help_panel=_BEGIN)
def replay(
    run: Annotated[Path, typer.Argument(help=f"A recording, or the folder of a run, with its {RECORDING}.")],
) -> None:
    """Decide everything in a recording again, in virtual time, and compare. Exit status 0: all equal; 2: no recording.

    Example:

      scheduler replay runs/sums
    """
    from scheduler.reactor.reading import BadRecording, read
    from scheduler.reactor.replay import ReplayReport

    path = run / RECORDING if run.is_dir() else run
    try:
        runs = read(path)
    except (OSError, BadRecording) as error:
        raise _usage_error(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    reports: list[RunReport] = []
    for number, recorded in enumerate(runs, 1):
        reports.append(_replayed(recorded, f"{path}: run {number}"))
        _show(reports[-1], f"run {number} of {len(runs)}: {recorded.header.program}")
    report = ReplayReport(tuple(reports))
    summary = {
        "runs": len(report.runs),
        "events": report.events,
        "decisions": report.decisions,
        "equal": report.equal,
        "graph_changed": report.graph_changed,
        "full": sum(run.run.full for run in report.runs),
    }
    typer.echo(json.dumps(summary))
    raise typer.Exit(0 if report.equal else 1)


@app.command(rich_help_panel=_BEGIN)
def plan(
    profile: Annotated[
        Path | None, typer.Argument(help="A profile in TOML (docs/topics/scheduler.md).")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Instead of a profile: a recording, or a run's folder.")
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="With --run: a trainer's metrics.jsonl, or MODEL=FILE.")
    ] = None,
    number: Annotated[
        int | None, typer.Option(help="With --run: only one of the recording's runs, from 1.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=2, help="With --run: for this many nodes, instead of the run's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for cluster.toml and plan.png.")] = None,
) -> None:
    """Find the best split of nodes between rollout and training, and what it depends on. Exit status 2: nothing to plan from.

    Examples:

      scheduler plan profile.toml --out plan

      scheduler plan --run runs/sums --nodes 16
    """
    from scheduler.planning import command
    from scheduler.planning.profile import BadProfile
    from scheduler.planning.runs import BadRun

    if (profile is None) == (run is None):
        raise _usage_error("give a profile, or a run with --run: one of the two")
    if profile is not None and (metrics or number is not None or nodes is not None):
        raise _usage_error("--metrics, --number and --nodes are for --run; a profile has all of it")
    try:
        summary = command.plan(profile, run, metrics or (), number, nodes, out)
    except (BadProfile, BadRun) as error:
        raise _usage_error(str(error)) from error
    typer.echo(json.dumps(summary))


def _builder(name: str) -> Callable[[dict[str, Any]], Program]:
    from scheduler.program import PROGRAMS

    if name not in PROGRAMS:
        raise _usage_error(f"no program {name!r}; there are: {', '.join(sorted(PROGRAMS))}")
    return PROGRAMS[name]


def _replayed(run: Run, where: str) -> RunReport:
    from scheduler.reactor.elements import TopologyError
    from scheduler.reactor.recording import build
    from scheduler.reactor.replay import replay_run
    from scheduler.reactor.snapshot import BadState

    builder, by = _builder(run.header.program), f"recorded by {_build(run)}, replayed by {build()}"
    try:
        program = builder(run.header.settings)
    except (ValueError, TypeError, KeyError, AttributeError, TopologyError) as error:
        raise _usage_error(f"{where}: its settings build no program: {error!r} ({by})") from error
    try:
        return replay_run(run, lambda _: program)
    except BadState as error:
        raise _usage_error(f"{where}: {error} ({by})") from error


def _build(run: Run) -> str:
    return run.header.build or "a build that did not report itself"


def _show(report: RunReport, title: str) -> None:
    from scheduler.reactor.recording import build

    changed = "; the graph has changed since" if report.graph_changed else ""
    goes_on = ", it goes on from an earlier file" if report.run.header.state is not None else ""
    typer.echo(f"{title}, {report.events} events from outside{goes_on}{changed}")
    if report.run.header.build != build():
        typer.echo(f"recorded by {_build(report.run)}; this is {build()}")
    rows = [row for entry in report.run.entries if (row := _row(entry)) is not None]
    width = max((len(row[1]) for row in rows), default=0)
    for tag, name, what, why in rows:
        at = _since(report.run, tag.time) + (f" +{tag.microstep}" if tag.microstep else "")
        typer.echo(f"{at:>14}  {name:<{width}}  {what}" + (f"\n{'':>16}{why}" if why else ""))
    if report.run.full:
        typer.echo(f"the file ends at {_since(report.run, report.run.last.time)}: it was full")
    if report.difference is None:
        typer.echo(f"equal: {len(report.decisions)} decisions were made again, bit for bit")
    else:
        typer.echo(_difference_text(report.run, report.difference))


def _row(entry: Entry) -> tuple[Tag, str, str, str] | None:
    from scheduler.reactor.recording import Decision, Failure

    match entry:
        case Decision():
            triggers = ", ".join(entry.triggers)
            why = f"{entry.reaction} on {triggers}" + (f": {entry.why}" if entry.why else "")
            return entry.tag, entry.port, _short(_plain(entry.value, entry.type), _VALUE), _short(why, _WHY)
        case Failure():
            return entry.tag, entry.reaction, f"raised {entry.error}; the run ended", ""
    return None


def _since(run: Run, time: int) -> str:
    return f"{(time - run.header.start) / 1e9:.3f} s"


def _plain(value: Any, name: str = "") -> str:
    """Return a value for people: the `name` of its class, and the fields that are not empty."""
    if isinstance(value, list):
        return ", ".join(_plain(item, name) for item in value)
    if isinstance(value, dict):
        return f"{name}({' '.join(_plain(field) for field in value.values() if field not in ('', [], None))})"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _difference_text(run: Run, difference: Difference) -> str:
    note = f": {difference.note}" if difference.note else ""
    recorded, replayed = (
        "nothing" if line is None else json.dumps(line) for line in (difference.recorded, difference.replayed)
    )
    at = f"{_since(run, difference.tag.time)}, microstep {difference.tag.microstep}"
    return f"different, first at {at}{note}\n  recorded: {recorded}\n  replayed: {replayed}"


def _usage_error(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(2)


def main() -> None:
    """Run the console script."""
    run_program("scheduler", app)


if __name__ == "__main__":
    main()
