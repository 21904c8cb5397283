"""Programs of PostgreSQL and Redis are found on a machine that has none; a private folder is an error before the start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from examples.service import programs
from examples.service.programs import NotInstalled, check_unprivileged, find_program


@pytest.mark.parametrize(
    ("name", "version"), [("initdb", "PostgreSQL"), ("postgres", "PostgreSQL"), ("redis-server", "server v=")]
)
def test_a_machine_without_the_program_runs_the_packaged_one(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_system_program", lambda name: None)
    found = find_program(name)
    assert "site-packages" in found.parts
    assert version in subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout


def test_a_program_that_is_nowhere_is_named_with_what_to_install() -> None:
    with pytest.raises(NotInstalled, match="`no-such-server` is missing: run `make setup`"):
        find_program("no-such-server")


def test_root_gets_an_error_where_no_other_user_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "bin").mkdir(mode=0o700)
    with pytest.raises(NotInstalled, match="refuses to run as root"):
        check_unprivileged(tmp_path / "bin" / "postgres")
