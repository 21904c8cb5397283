"""`--help` shows every word of the commands' docstrings: text in brackets is not markup."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

import gateway.cli
import scheduler.cli
import trainer.cli

APPS = {"gateway": gateway.cli.app, "scheduler": scheduler.cli.app, "trainer": trainer.cli.app}


def commands(
    name: str, command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield name, path
    for child, below in getattr(command, "commands", {}).items():
        yield from commands(name, below, (*path, child))


CASES = [case for name, app in APPS.items() for case in commands(name, typer.main.get_command(app))]


@pytest.mark.parametrize(
    ("name", "path"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_help_shows_every_word(name: str, path: tuple[str, ...]) -> None:
    command: click.Command = typer.main.get_command(APPS[name])
    for part in path:
        command = command.commands[part]  # type: ignore[attr-defined]
    shown = CliRunner().invoke(APPS[name], [*path, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0
    texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    for text in texts:
        missing = set(words(text)) - set(words(shown.output))
        assert not missing, text
    if not hasattr(command, "commands"):
        assert re.search(rf"Examples?:\n\n *{' '.join((name, *path))}\b", command.help or ""), "no example"


@pytest.mark.parametrize(
    ("name", "path"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_no_name_is_cut_at_80_columns(name: str, path: tuple[str, ...]) -> None:
    command: click.Command = typer.main.get_command(APPS[name])
    for part in path:
        command = command.commands[part]  # type: ignore[attr-defined]
    shown = CliRunner().invoke(APPS[name], [*path, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert "…" not in shown, "rich's mark of a cut word"
    for option in (name for each in command.params for name in (*each.opts, *each.secondary_opts)):
        assert not option.startswith("--") or re.search(rf"(?<![\w-]){option}(?![\w-])", shown), option


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("gateway", ["init", "serve", "episodes"]),
        ("trainer", ["run", "eval", "export"]),
        ("scheduler", ["run", "replay", "plan"]),
    ],
)
def test_help_begins_with_three_commands(name: str, first: list[str]) -> None:
    shown = CliRunner().invoke(APPS[name], ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    panel = shown.partition("Start here")[2].partition("╰")[0]
    assert re.findall(r"^│ ([a-z-]+)", panel, re.MULTILINE) == first


@pytest.mark.parametrize(
    ("name", "typed", "found"),
    [
        ("gateway", "sta", {"status", "staleness"}),
        ("trainer", "sf", {"sft"}),
        ("scheduler", "re", {"replay"}),
    ],
)
def test_a_shell_completes_commands(name: str, typed: str, found: set[str]) -> None:
    environment = {
        f"_{name.upper()}_COMPLETE": "complete_bash",
        "COMP_WORDS": f"{name} {typed}",
        "COMP_CWORD": "1",
    }
    assert set(CliRunner().invoke(APPS[name], [], env=environment, prog_name=name).output.split()) == found


def words(text: str) -> list[str]:
    return re.findall(r"[^\s│]+", text.replace("`", ""))


def test_the_words_in_brackets_are_among_them() -> None:
    """The sentence whose middle was lost when brackets were read as markup."""
    shown = CliRunner().invoke(APPS["gateway"], ["engine", "--help"], env={"COLUMNS": "200"})
    assert "Become an engine, as [engine] configures it" in shown.output
