"""The ways of a chat completion and of a batch through the program's folders, by a trace of a running gateway and trainer.

`python -m bench.ways [ROOT]` does so in another checkout, too. Its gateway has a fake engine, and its trainer a learning rate of
0, for what they compute does not matter. The chat is one streamed completion of 8 tokens. The batch is one group of two
episodes, from their rewards to the acknowledgement; its trace has what else runs meanwhile (health checks, renewals).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench.model import save_model
from bench.report import show
from processes.ports import free_port

_TRACE = Path(__file__).with_name("crossings.py")
_LIMIT_S = 300.0
_GATEWAY = """
[server]
port = {port}
[models.demo]
path = "{work}/model"
[engine]
launch = "fake"
log = "{work}/engine.log"
[store]
url = "sqlite:///{work}/{name}.db"
[update]
probe_tolerance = 5.0
[staleness]
batch = 1
eta = 1
"""
_TRAINER = """
[run]
dir = "{work}/run"
steps = 3
device = "cpu"
threads = 1
[gateway]
url = "http://127.0.0.1:{port}"
[model]
path = "{work}/model"
[algorithm]
type = "grpo"
[optimizer]
lr = 0.0
"""
Edges = dict[tuple[str, str], int]


class Traced:
    """A program of a checkout, under the trace."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def begin(self) -> None:
        """From now on, crossings are counted."""
        self._process.send_signal(signal.SIGUSR1)

    def end(self) -> Edges:
        """The crossings since `begin`, by the rooms of caller and called."""
        self._process.send_signal(signal.SIGUSR2)
        file = self._folder / f"{self._process.pid}.json"
        wait(file.exists, "a trace")
        return {(edge["from"], edge["to"]): edge["calls"] for edge in json.loads(file.read_text())["edges"]}


class Stage:
    """A checkout, a folder to work in, and a client of its gateway."""

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work = root, work
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    @contextmanager
    def traced(self, name: str, program: str, verb: str, config: str, every: bool) -> Iterator[Traced]:
        """Runs a program with a configuration. `every`: also what older tasks do is traced."""
        file, folder = self.work / f"{name}.toml", self.work / name
        file.write_text(config.format(port=self.port, work=self.work, name=name))
        argv = [sys.executable, str(_TRACE), str(folder), *(["--all"] if every else []), "--"]
        argv += [program, verb, *(["-c"] if verb == "serve" else []), str(file)]
        with (self.work / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                argv, cwd=self.root, env=os.environ | {"PYTHONPATH": str(self.root)}, stdout=log, stderr=log
            )
            try:
                if verb == "serve":
                    wait(lambda: self.http.get("/readyz").status_code == 200, "the gateway")
                yield Traced(process, folder)
            finally:
                process.terminate()
                process.wait()

    def group(self, name: str) -> list[dict[str, Any]]:
        """Two open episodes of a group, each with one call."""
        body = {"task_id": name, "group_id": name, "group_size": 2}
        episodes = [self.http.post("/admin/v1/episodes", json=body).raise_for_status().json() for _ in "ab"]
        for episode in episodes:
            self.chat(episode)
        return episodes

    def chat(self, episode: dict[str, Any], question: str = "what?") -> None:
        """One streamed completion."""
        said = {"role": "user", "content": question}
        body = {"model": "demo", "messages": [said], "max_tokens": 8, "stream": True}
        key = {"authorization": f"Bearer {episode['api_key']}"}
        self.http.post("/v1/chat/completions", json=body, headers=key).raise_for_status()

    def reward(self, episodes: list[dict[str, Any]]) -> None:
        """Ends episodes with rewards that differ."""
        for reward, episode in enumerate(episodes):
            path = f"/admin/v1/episodes/{episode['episode_id']}/reward"
            self.http.post(path, json={"reward": reward}).raise_for_status()

    def wait_for(self, version: int) -> None:
        """Waits until a version runs and its batch is acknowledged."""

        def there() -> bool:
            status = self.http.get("/admin/v1/status").json()
            return bool(status["version"] == version and status["consumed"] == version)

        wait(there, f"version {version}")


def wait(done: Callable[[], bool], what: str) -> None:
    """Asks until something is so. Raises RuntimeError."""
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until:
        try:
            if done():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{what} did not come in {_LIMIT_S:g} s")


def way_of_a_chat(stage: Stage) -> Edges:
    """The crossings of one streamed chat completion."""
    with stage.traced("chat", "gateway.cli", "serve", _GATEWAY, every=False) as gateway:
        first, _ = stage.group("a")
        gateway.begin()
        stage.chat(first, "and what else?")  # the same again would be a retry
        return gateway.end()


def way_of_a_batch(stage: Stage) -> tuple[Edges, Edges]:
    """The crossings in the gateway and in the trainer, from the rewards of a batch to its acknowledgement."""
    with (
        stage.traced("gateway", "gateway.cli", "serve", _GATEWAY, every=True) as gateway,
        stage.traced("trainer", "trainer.cli", "run", _TRAINER, every=True) as trainer,
    ):
        stage.reward(stage.group("a"))
        stage.wait_for(1)
        episodes = stage.group("b")
        gateway.begin()
        trainer.begin()
        stage.reward(episodes)
        stage.wait_for(2)
        return gateway.end(), trainer.end()


def row(name: str, edges: Edges) -> list[str]:
    """A way's row of the table."""
    rooms = {room for edge in edges for room in edge} - {"outside"}
    both = {frozenset(edge) for edge in edges if edge[::-1] in edges}
    return [name, str(len(rooms)), str(len(edges)), str(len(both)), str(sum(edges.values()))]


def main(
    root: Annotated[Path, typer.Argument(help="The checkout to trace.", file_okay=False, exists=True)] = Path(
        "."
    ),
    verbose: Annotated[bool, typer.Option(help="Also show each pair of rooms.")] = False,
) -> None:
    """Trace the ways of a chat completion and of a batch through a checkout's folders."""
    with tempfile.TemporaryDirectory(prefix="headgate-ways-") as folder:
        stage = Stage(root.resolve(), Path(folder))
        save_model(stage.work / "model")
        ways = {"a chat completion": way_of_a_chat(stage)}
        ways["a batch, gateway"], ways["a batch, trainer"] = way_of_a_batch(stage)
    header = ("way", "rooms", "pairs of rooms", "in both directions", "calls")
    show("Ways", header, [row(name, edges) for name, edges in ways.items()])
    if verbose:
        for name, edges in ways.items():
            print(name)
            for (caller, called), calls in edges.items():
                print(f"  {caller} -> {called}: {calls}")


if __name__ == "__main__":
    typer.run(main)
