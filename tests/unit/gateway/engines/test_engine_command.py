"""`gateway engine`: the command line that the process becomes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app


@pytest.mark.parametrize(
    ("engine", "options", "wanted"),
    [
        ('quantization = "fp8_per_channel"', [], "fp8_per_channel"),
        ('launch = "fake"\nquantization = "fp8_per_channel"', [], "`quantization` is for vLLM"),
        ('args = ["--speculative-config", "{}"]', [], "'--speculative-config' is refused"),
        ("tensor_parallel = 2", [], "2"),
        ("tensor_parallel = 2", ["--tensor-parallel", "4"], "4"),
        ("tensor_parallel = 2", ["--tensor-parallel", "1"], ""),
        ('launch = "fake"', ["--tensor-parallel", "2"], "only vLLM is spread"),
    ],
)
def test_an_engine_is_spread_and_quantized_as_the_file_and_its_options_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, options: list[str], wanted: str
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _program, argv, _env: became.append(argv))
    config = tmp_path / "gateway.toml"
    config.write_text(f'[models.demo]\npath = "{tmp_path}"\n[engine]\ncount = 0\n{engine}\n')
    result = CliRunner().invoke(app, ["engine", "--config", str(config), "--port", "8200", *options])
    if not became:
        assert (result.exit_code, wanted in result.output) == (2, True)
        return
    (argv,) = became
    options = ["--tensor-parallel-size", "--quantization"]
    given = [value for option, value in itertools.pairwise(argv) if option in options]
    assert given == ([wanted] if wanted else [])
