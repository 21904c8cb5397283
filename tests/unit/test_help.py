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
Case = tuple[str, tuple[str, ...], click.Command]


def commands(name: str, command: click.Command, path: tuple[str, ...] = ()) -> Iterator[Case]:
    yield name, path, command
    for child, below in getattr(command, "commands", {}).items():
        yield from commands(name, below, (*path, child))


def shown(name: str, path: tuple[str, ...], columns: int) -> str:
    """Return the help of a command in a terminal of this width."""
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    result = CliRunner().invoke(APPS[name], [*path, "--help"], env=environment)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(
    ("name", "path", "command"),
    [
        pytest.param(*case, id="-".join((case[0], *case[1])))
        for name, app in APPS.items()
        for case in commands(name, typer.main.get_command(app))
    ],
)
def test_help_shows_every_word_and_cuts_no_option(
    name: str, path: tuple[str, ...], command: click.Command
) -> None:
    wide, narrow = shown(name, path, 200), shown(name, path, 80)
    for text in (command.help or "", *(getattr(each, "help", None) or "" for each in command.params)):
        assert not set(words(text)) - set(words(wide)), text
    if not hasattr(command, "commands"):
        assert re.search(rf"Examples?:\n\n *{' '.join((name, *path))}\b", command.help or ""), "no example"
    assert "…" not in narrow, "rich's mark of a cut word"
    for option in (name for each in command.params for name in (*each.opts, *each.secondary_opts)):
        assert not option.startswith("--") or re.search(rf"(?<![\w-]){option}(?![\w-])", narrow), option


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("gateway", ["init", "serve", "episodes"]),
        ("trainer", ["run", "eval", "export"]),
        ("scheduler", ["run", "replay", "plan"]),
    ],
)
def test_help_begins_with_three_commands(name: str, first: list[str]) -> None:
    panel = shown(name, (), 200).partition("Start here")[2].partition("╰")[0]
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
