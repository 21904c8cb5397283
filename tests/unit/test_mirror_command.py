"""`gateway mirror` refuses what it cannot do, or should not, in one sentence."""

from __future__ import annotations

import socket
from pathlib import Path

from typer.testing import CliRunner

import gateway.cli


def test_a_mirror_without_a_key_serves_this_machine_alone(tmp_path: Path) -> None:
    argv = ["mirror", "--dir", str(tmp_path), "--host", "0.0.0.0"]
    ended = CliRunner().invoke(gateway.cli.app, argv, env={"HEADGATE_WEIGHTS_KEY": "", "COLUMNS": "200"})
    assert ended.exit_code == 2
    assert "HEADGATE_WEIGHTS_KEY" in ended.output


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = CliRunner().invoke(gateway.cli.app, ["mirror", "--dir", str(tmp_path), "--port", port])
    assert ended.exit_code == 2
    assert f"cannot serve {tmp_path} at 127.0.0.1:{port}" in ended.output
    assert "Traceback" not in ended.output
