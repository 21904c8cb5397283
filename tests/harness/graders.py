"""Functions that grade, for tests: what they are to do is in the episode's metadata."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

print('{"reward": 99}')  # a module may print when it is imported

Episode = dict[str, Any]


def constant(episode: Episode) -> float:
    """Return the number in the metadata."""
    return episode["metadata"]["value"]


def length(episode: Episode) -> int:
    """Rewards the length of the last reply."""
    return len(episode["final_text"])


async def slowly(episode: Episode) -> float:
    """Do what `constant` does, but async."""
    await asyncio.sleep(0)
    return episode["metadata"]["value"]


def process(episode: Episode) -> int:
    """Return this process's id as the reward."""
    return os.getpid()


def together(episode: Episode) -> int:
    """Return this process's id, once as many processes as the metadata names have an episode."""
    folder = Path(episode["metadata"]["folder"])
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < episode["metadata"]["workers"]:
        time.sleep(0.01)
    return os.getpid()


def noisy(episode: Episode) -> float:
    """Send everything that could be taken for a response, and read all that could be taken for a question."""
    lie = '{"reward": 98}'
    print(lie, flush=True)
    sys.stdout.write(lie + "\n")
    os.write(1, lie.encode() + b"\n")
    subprocess.run([sys.executable, "-c", f"print('{lie}')"], check=True)
    assert sys.stdin.read() == ""
    assert os.read(0, 10) == b""
    return episode["metadata"]["value"]


def behave(episode: Episode) -> Any:
    """Do what the metadata names, one word for each episode."""
    given = episode["metadata"]
    if "pid" in given:
        Path(given["pid"]).write_text(str(os.getpid()))
    match given["do"]:
        case "raise":
            raise LookupError("no idea")
        case "cancel":
            raise asyncio.CancelledError
        case "exit":
            sys.stderr.write("last words\n")
            sys.exit(3)
        case "die":
            os.kill(os.getpid(), 9)
        case "hang":
            threading.Event().wait()
        case "text":
            return "1.0"
        case "nothing":
            return None
        case "nan":
            return float("nan")
    return 1.0


def gated(episode: Episode) -> float:
    """Record the call, and wait for the file `gate`, if one is named."""
    given = episode["metadata"]
    with Path(given["begun"]).open("a") as file:
        file.write(json.dumps(episode) + "\n")
    while "gate" in given and not Path(given["gate"]).exists():
        time.sleep(0.01)
    return given.get("value", 1.0)


def thanked(episode: Episode) -> dict[str, float | None]:
    """Reward the thanks of a user; have no opinion if nobody has replied to the model."""
    answers = [turn["next_text"] for turn in episode["turns"] if turn["next_text"]]
    return {"reward": float(any("thanks" in answer for answer in answers)) if answers else None}
