"""An unexpected error ends a program with one paragraph, and its traceback is not lost."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.processes.program import run

Capture = pytest.CaptureFixture[str]


def ended(monkeypatch: pytest.MonkeyPatch, app: Callable[[], object], *argv: str) -> int:
    """Run a program with these arguments, and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["trainer", *argv])
    with pytest.raises(SystemExit) as end:
        run("trainer", app)
    return int(end.value.code or 0)


def failing() -> None:
    raise KeyError("a\nb")


def test_the_paragraph_names_the_error_its_place_and_where_the_traceback_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert ended(monkeypatch, failing, "run") == 1
    (paragraph,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"^trainer .*KeyError: 'a\\nb' \(headgate/processes/test_program\.py, line \d+\)", paragraph
    )
    found = re.search(r"The traceback is in (\S+);", paragraph)
    assert found is not None
    traced = Path(found[1])
    assert "Traceback" in traced.read_text() and "in failing" in traced.read_text()
    traced.unlink()


@pytest.mark.parametrize("argv", [("--debug", "run"), ("run", "--debug"), ("run", "--debug", "--", "x")])
def test_debug_raises_it_wherever_it_stands(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer", *argv])
    with pytest.raises(KeyError):
        run("trainer", failing)
    assert sys.argv[1:3] == ["--debug", "run"]


def test_what_follows_two_dashes_is_an_agents_own(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert ended(monkeypatch, failing, "run", "--", "agent", "--debug") == 1
    assert sys.argv[1:] == ["run", "--", "agent", "--debug"]
    Path(capsys.readouterr().err.partition("traceback is in ")[2].partition(";")[0]).unlink()


def test_a_file_that_cannot_be_opened_is_named_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    missing = tmp_path / "no" / "file"
    assert ended(monkeypatch, missing.read_text) == 2
    assert capsys.readouterr().err == f"{missing}: No such file or directory\n"
