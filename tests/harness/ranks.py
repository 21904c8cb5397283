"""Several processes that compute together, as torchrun would start them, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from headgate.processes.ports import free_port
from tests.harness.forks import LIMIT_S, fork

DIED = "died"
"""In place of what a rank would have returned that ended before it."""


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the part of torchrun's environment that a trainer reads."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the result of `work(*arguments)`, a function of a module, on each rank.

    The processes stay for the next call, which finds their caches warm. Raises AssertionError with the traceback of the first
    rank that failed.
    """
    while len(_idle) < size:
        _idle.append(_Rank())
    ranks = [_idle.pop() for _ in range(size)]
    results = _results(ranks, work, arguments)
    assert DIED not in results, f"{work.__name__}: a rank died"
    _idle.extend(ranks)
    return results


def on_new_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`on_ranks` in processes of its own, for work that ends them or measures them; `DIED` for a rank that was killed."""
    ranks = [_Rank() for _ in range(size)]
    results = _results(ranks, work, arguments)
    for rank in ranks:
        rank.end()
    return results


class _Rank:
    """A process that does what it is sent, one after the other."""

    def __init__(self) -> None:
        self.results, theirs = multiprocessing.Pipe()
        self._process = fork(_serve, theirs)
        theirs.close()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.results.close()


_idle: list[_Rank] = []
"""Ranks without work. They end with the process that tests."""


def _results(ranks: list[_Rank], work: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    port, size = free_port(), len(ranks)
    for number, rank in enumerate(ranks):
        rank.results.send_bytes(pickle.dumps((environment(number, size, port), work, arguments)))
    results: dict[Any, Any] = {}
    try:
        while len(results) < size:
            missing = [rank.results for rank in ranks if rank.results not in results]
            ready = multiprocessing.connection.wait(missing, LIMIT_S)
            assert ready, f"{len(missing)} of {size} ranks gave no result"
            for end in ready:
                assert isinstance(end, Connection)
                results[end] = _received(end)
    except BaseException:
        for rank in ranks:
            rank.end()
        raise
    return [results[rank.results] for rank in ranks]


def _received(end: Connection) -> Any:
    # By value: memory that a process shares is gone with it.
    try:
        failed, result = pickle.loads(end.recv_bytes())
    except (EOFError, ConnectionResetError):
        return DIED
    if failed:
        raise AssertionError(result)
    return result


def _serve(end: Connection) -> None:
    import torch
    from torch import distributed
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    random = torch.get_rng_state()
    while True:
        try:
            environ, work, arguments = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        if distributed.is_initialized():  # until now another rank may have needed it
            distributed.destroy_process_group()
        _clear_sharding_prop_cache()  # it names groups that are gone
        os.environ.update(environ)
        torch.set_num_threads(1)
        torch.set_rng_state(random)
        torch.use_deterministic_algorithms(False)
        try:
            end.send_bytes(pickle.dumps((False, work(*arguments))))
        except BaseException:
            end.send_bytes(pickle.dumps((True, traceback.format_exc())))
            raise
