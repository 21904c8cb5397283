"""The trackers of `[report] to`, each with a process that sends it what `metrics.jsonl` says.

A tracker that fails, hangs or crashes costs its process and nothing else: the trainer writes a byte to it, if there is room, and
never waits for it before the end of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.report.secrets import without_secrets
from trainer.report.sender import Bookmark
from trainer.settings import LearnerSettings

_GRACE_S = 2.0


class Senders:
    """The processes of one run."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._senders: list[Sender] = []

    def start(self, say: Callable[[str], None]) -> None:
        """Starts them; a warning of theirs is said with `say`, from another thread."""
        for name in dict.fromkeys(self._settings.report.to):
            self._senders.append(Sender(name, self._settings, say))

    def wake(self) -> None:
        """There is something new in `metrics.jsonl`."""
        for sender in self._senders:
            sender.tell("new")

    def finish(self, failed: bool) -> None:
        """Waits up to `[report] finish_s` for all of them, and ends those that are not through."""
        for sender in self._senders:
            sender.tell(f"end {int(failed)}")
        deadline = time.monotonic() + self._settings.report.finish_s + _GRACE_S
        for sender in self._senders:
            sender.wait(deadline)


class Sender:
    """The process of one tracker."""

    def __init__(self, name: str, settings: LearnerSettings, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._ending = False
        directory = settings.run.dir.resolve()
        folder, metrics = directory / "trackers", directory / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        task = {
            "settings": settings.report.model_dump(mode="json"),
            "config": without_secrets(settings.model_dump(mode="json")),
        }
        Bookmark.begin(folder / f"{name}.json", metrics.stat().st_size if metrics.exists() else 0)
        with (folder / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.report.sender", str(directory), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={k: v for k, v in os.environ.items() if k != "HEADGATE_ADMIN_KEY"},
                start_new_session=True,  # ctrl-c is for the trainer, which then tells it to end
            )
        self._write((json.dumps(task) + "\n").encode())
        os.set_blocking(self._stdin, False)
        threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True).start()

    @property
    def _stdin(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def tell(self, line: str) -> None:
        """Tells the process, if it reads."""
        self._ending = line.startswith("end")
        self._write(f"{line}\n".encode())

    def _write(self, data: bytes) -> None:
        # Full or broken: it hangs, and has enough to wake up for; or it is gone, which the thread that listens says.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._stdin, data)

    def wait(self, deadline: float) -> None:
        """Closes its input, and waits for its end or kills it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        if code:
            self._say(
                f"warning: {self._name} has not taken all figures; the next start of this run sends the rest"
            )

    def _listen(self) -> None:
        stdout: Any = self._process.stdout
        for line in stdout:
            self._say(f"warning: {self._name}: {line.decode(errors='replace').rstrip()}")
        if self._process.wait() and not self._ending:
            self._say(
                f"warning: the process that sends figures to {self._name} ended with {self._process.returncode}; see"
                f" trackers/{self._name}.log; the next start of this run sends what is missing"
            )
