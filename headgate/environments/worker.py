"""The process in which an environment lives; `headgate.client.environment` starts it with the arguments `KIND:NAME ARGS`.

Lines in, lines out, one JSON object each. At first it writes `{"ready": true}`, or `{"error": "..."}` and ends. It reads

    {"id": 1, "tasks": {"split": "train", "limit": 100}}         and writes {"id": 1, "task": {...}} for each,
                                                                 and {"id": 1, "end": true}
    {"id": 2, "play": {...}, "base_url": ..., "api_key": ...}    and writes {"id": 2, "reward", "components", "calls"}
                                                                 or {"id": 2, "error": "...", "reason": "..."}
    {"id": 2, "cancel": true}                                    and writes nothing for 2 from then on.

It ends when there is nothing more to read, and with its parent. What an environment prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from typing import IO, Any

from headgate.environments import NotInstalled, load
from headgate.environments.base import (
    Environment,
    PlayFailed,
    chosen,
)
from headgate.processes.streams import private_streams

_QUOTED = 4000
"""Characters of a traceback."""
_LINE_BYTES = 2**24


def main(arguments: list[str]) -> int:
    """Serve until the input ends. Return the exit status."""
    name, args = arguments
    questions, responses = private_streams()
    try:
        environment = load(name, json.loads(args))
    except NotInstalled as error:
        _write(responses, {"error": str(error)})
        return 1
    except BaseException:
        _write(responses, {"error": traceback.format_exc()[-_QUOTED:]})
        return 1
    asyncio.run(_Worker(name, environment, responses).serve(questions))
    return 0


class _Worker:
    """Handles the requests for one environment, many concurrently."""

    def __init__(self, name: str, environment: Environment, responses: IO[bytes]) -> None:
        self._name = name
        self._environment = environment
        self._responses = responses
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self, questions: IO[bytes]) -> None:
        """Open the environment, and respond until the input ends."""
        try:
            await self._environment.open()
        except Exception:
            self._write({"error": traceback.format_exc()[-_QUOTED:]})
            return
        self._write({"ready": True})
        lines = asyncio.StreamReader(limit=_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), questions
        )
        try:
            async for line in lines:
                self._accept(json.loads(line))
        finally:
            playing, self._playing = list(self._playing.values()), {}
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            await self._environment.close()

    def _accept(self, question: dict[str, Any]) -> None:
        number = question["id"]
        if "cancel" in question:
            if task := self._playing.pop(number, None):
                task.cancel()
            return
        work = self._play(question) if "play" in question else self._list(number, question["tasks"])
        task = self._playing[number] = asyncio.create_task(work, name=f"question {number}")
        task.add_done_callback(lambda _: self._playing.pop(number, None))

    async def _list(self, number: int, wanted: dict[str, Any]) -> None:
        try:
            for listed, (place, found) in enumerate(chosen(self._environment.tasks(), wanted["split"])):
                if listed == wanted["limit"]:
                    break
                self._write({"id": number, "task": {"task_id": f"{self._name}/{place}", **found.data}})
            self._write({"id": number, "end": True})
        except Exception:
            self._write({"id": number, "error": traceback.format_exc()[-_QUOTED:]})

    async def _play(self, question: dict[str, Any]) -> None:
        number = question["id"]
        try:
            played = await self._environment.play(question["play"], question["base_url"], question["api_key"])
        except PlayFailed as failed:
            self._write({"id": number, "error": str(failed), "reason": failed.reason})
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and number not in self._playing:
                raise  # it was requested; any other is the environment's own, which the reply must report
            message = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-_QUOTED:]}"
            self._write({"id": number, "error": message, "reason": "environment_failed"})
        else:
            self._write({
                "id": number, "reward": played.reward, "components": played.components, "calls": played.calls
            })  # fmt: skip

    def _write(self, response: dict[str, Any]) -> None:
        _write(self._responses, response)


def _write(responses: IO[bytes], response: dict[str, Any]) -> None:
    responses.write(json.dumps(response).encode() + b"\n")
    responses.flush()
