"""The picture of the control program in the docs."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from scheduler.cli import app

PAGE = Path(__file__).parents[4] / "docs" / "topics" / "control.md"


def test_it_shows_the_program_as_it_is() -> None:
    """`scheduler graph --out docs/topics/control.md` updates it."""
    assert CliRunner().invoke(app, ["graph"]).stdout == PAGE.read_text(encoding="utf-8")
