"""The measurements of a checkout's structure, on one that is written here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from bench import crossings
from bench.structure import circles, measure

LIMIT_S = 300.0


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / "gateway" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_circle_of_imports_is_found_wherever_they_stand(tmp_path: Path) -> None:
    write(
        tmp_path,
        a="def f():\n    from gateway.b import g\n",
        b="import gateway.c\n",
        c='"""Of a."""\nfrom gateway import a\n',
        d="from gateway.a import f\n",
    )
    (found,) = measure(tmp_path)
    assert circles(found.imports) == [{"gateway.a", "gateway.b", "gateway.c"}]
    assert (found.files, found.functions, found.first_words) == (4, [2], {"Of": 1})


def test_a_call_from_one_folder_into_another_is_a_crossing(tmp_path: Path) -> None:
    """The program says a line before each of the signals that it waits for, and crosses twice between them."""
    write(
        tmp_path,
        top="import signal\nfrom gateway.low.deep import f\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"
        "f()\nprint('ready', flush=True)\nsignal.sigwait({signal.SIGHUP})\n"
        "f()\nf()\nprint('done', flush=True)\nsignal.sigwait({signal.SIGHUP})\n",
        low__deep="def f():\n    g()\n\n\ndef g():\n    pass\n",
    )
    argv = [sys.executable, crossings.__file__, str(tmp_path / "out"), "--all", "--", "gateway.top"]
    with subprocess.Popen(
        argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        for said, number in (("ready", signal.SIGUSR1), ("done", signal.SIGUSR2)):
            assert process.stdout.readline().strip() == said
            process.send_signal(number)
            process.send_signal(signal.SIGHUP)
        assert process.wait(LIMIT_S) == 0
    (edge,) = json.loads((tmp_path / "out" / f"{process.pid}.json").read_text())["edges"]
    assert (edge["from"], edge["to"], edge["calls"]) == ("gateway", "gateway/low", 2)
