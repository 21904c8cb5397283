"""`gateway engine`: the command line that the process becomes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app


@pytest.mark.parametrize(
    ("engine", "options", "spread"),
    [
        ("tensor_parallel = 2", [], "2"),
        ("tensor_parallel = 2", ["--tensor-parallel", "4"], "4"),
        ("tensor_parallel = 2", ["--tensor-parallel", "1"], ""),
        ('launch = "fake"', ["--tensor-parallel", "2"], "only vLLM is spread"),
    ],
)
def test_the_option_for_tensor_parallelism_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, options: list[str], spread: str
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _program, argv, _env: became.append(argv))
    config = tmp_path / "gateway.toml"
    config.write_text(f'[models.demo]\npath = "{tmp_path}"\n[engine]\ncount = 0\n{engine}\n')
    result = CliRunner().invoke(app, ["engine", "--config", str(config), "--port", "8200", *options])
    if not became:
        assert (result.exit_code, spread in result.output) == (2, True)
        return
    (argv,) = became
    sizes = [value for option, value in itertools.pairwise(argv) if option == "--tensor-parallel-size"]
    assert sizes == ([spread] if spread else [])
