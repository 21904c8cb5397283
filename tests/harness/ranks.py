"""Several processes that compute together, as torchrun would start them, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from processes.ports import free_port
from tests.harness.forks import LIMIT_S, forks

DIED = "died"
"""In place of what a rank would have returned that did not come to it."""


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The part of torchrun's environment that a trainer reads."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns the result of `work(*arguments)`, a function of a module, on each rank; `DIED` for one that was killed.

    Raises AssertionError with the traceback of the first rank that failed.
    """
    port = free_port()
    ends: dict[Any, tuple[BaseProcess, Connection]] = {}
    for rank in range(size):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process: BaseProcess = forks().Process(
            target=_main, args=(environment(rank, size, port), theirs, work, arguments), daemon=True
        )
        process.start()
        theirs.close()
        ends[ours] = (process, ours)
    results: dict[Any, Any] = {}
    try:
        while len(results) < size:
            ready = multiprocessing.connection.wait([end for end in ends if end not in results], LIMIT_S)
            assert ready, f"{size - len(results)} of {size} ranks gave no result"
            for end in ready:
                assert isinstance(end, Connection)
                results[end] = _received(end)
    finally:
        for process, _ in ends.values():
            process.kill()
            process.join()
    return [results[end] for end in ends]


def _received(end: Connection) -> Any:
    # By value: memory that a process shares is gone with it.
    try:
        failed, result = pickle.loads(end.recv_bytes())
    except EOFError:
        return DIED
    if failed:
        raise AssertionError(result)
    return result


def _main(
    environ: dict[str, str], end: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        end.send_bytes(pickle.dumps((False, work(*arguments))))
    except BaseException:
        end.send_bytes(pickle.dumps((True, traceback.format_exc())))
        raise
