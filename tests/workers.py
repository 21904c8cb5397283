"""`--workers N`: run tests in processes that are forked once everything is collected.

A process that starts by itself imports and collects all tests, 20 seconds of a core; a fork has done so, and shares the memory.
A worker gets one module of tests after the other, so that fixtures of a module are set up once; when no module is left, half of
what another worker has left. Tests with vLLM share one engine, so one more worker runs all of them first. A worker that dies
fails its test, and another is forked in its place.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.harness.forks import share_server

_GONE: Any = object()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--workers`."""
    parser.addoption("--workers", type=int, default=1, help="how many processes run tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, unless one is enough or a module could not be collected."""
    workers = session.config.getoption("workers")
    if workers < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # one for all workers
    _Run(session, workers).to_end()
    return True


class Shares:
    """Which worker runs which test. Even workers take modules from the front and odd ones from the back, to mix folders."""

    def __init__(self, modules: Iterable[Sequence[int]], workers: int, first: Iterable[int] = ()) -> None:
        """Worker 0 runs the tests `first`."""
        self._first = deque(first)
        self._modules = deque(modules)
        self._left = [deque[int]() for _ in range(workers)]

    def take(self, worker: int) -> int | None:
        """Return a worker's next test, or None if there is none for it."""
        own = self._left[worker]
        if worker == 0 and self._first:
            return self._first.popleft()
        if not own and self._modules:
            own.extend(self._modules.pop() if worker % 2 else self._modules.popleft())
        elif not own:
            most = max(self._left, key=len)
            own.extendleft([most.pop() for _ in range((len(most) + 1) // 2)])
        return own.popleft() if own else None

    def give_back(self, worker: int, tests: Iterable[int]) -> None:
        """Let a worker take these again before all others."""
        self._left[worker].extendleft(tests)


class _Worker:
    """A forked process, and the tests that were sent to it; the first of them runs."""

    def __init__(self, session: pytest.Session, others: Iterable[_Worker]) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        inherited = [self.pipe, *(other.pipe for other in others)]
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_work, args=(session, theirs, inherited))
        self.process.start()
        theirs.close()
        self.sent = deque[int]()

    def send(self, test: int | None) -> None:
        """Send a test; None follows the last one."""
        if test is not None:
            self.sent.append(test)
        self.pipe.send(test)


def _work(session: pytest.Session, pipe: Connection, inherited: Iterable[Connection]) -> None:
    """Run the tests that come through a pipe, until None comes or the process that sends them is gone."""
    for end in inherited:
        end.close()
    share_server()
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into files of its own
    session.config.pluginmanager.register(_Sender(pipe))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        test = pipe.recv()
        while test is not None:
            following = pipe.recv()
            item, nextitem = (None if i is None else session.items[i] for i in (test, following))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            pipe.send(None)
            test = following


class _Sender:
    """Runs tests in a worker, and sends their results instead of showing them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            self._pipe.send(item.config.hook.pytest_report_to_serializable(config=item.config, report=report))
        return True


class _Run:
    """All workers, from the first test to the last."""

    def __init__(self, session: pytest.Session, workers: int) -> None:
        self._session = session
        numbered = range(len(session.items))
        vllm = [index for index in numbered if session.items[index].get_closest_marker("vllm")]
        others = sorted({*numbered} - {*vllm})
        modules = ([*tests] for _, tests in groupby(others, key=lambda index: session.items[index].path))
        self._shares = Shares(modules, workers + bool(vllm), vllm)
        self._workers = dict[int, _Worker]()
        for number in range(workers + bool(vllm)):
            self._start(number)

    def to_end(self) -> None:
        """Show results until all tests have run, or enough of them have failed."""
        try:
            while self._workers:
                by_pipe = {worker.pipe: number for number, worker in self._workers.items()}
                for pipe in wait([*by_pipe]):
                    self._receive(by_pipe[pipe])  # type: ignore[index]
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        finally:
            for worker in self._workers.values():
                worker.pipe.close()
            for worker in self._workers.values():
                worker.process.join()

    def _start(self, number: int) -> None:
        worker = self._workers[number] = _Worker(self._session, [*self._workers.values()])
        for _ in range(2):  # it must know the next test while it runs one: the fixtures of both stay
            worker.send(self._shares.take(number))

    def _receive(self, number: int) -> None:
        worker, hook, data = self._workers[number], self._session.config.hook, _GONE
        with suppress(EOFError, ConnectionResetError):
            data = worker.pipe.recv()
        if data is _GONE:
            self._end(number)
        elif data is not None:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        else:
            done = self._session.items[worker.sent.popleft()]
            hook.pytest_runtest_logfinish(nodeid=done.nodeid, location=done.location)
            if worker.sent:
                worker.send(self._shares.take(number))

    def _end(self, number: int) -> None:
        worker = self._workers.pop(number)
        worker.process.join()
        worker.pipe.close()
        if not worker.sent:
            return
        died, *others = worker.sent
        item, why = self._session.items[died], f"its process ended with status {worker.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._shares.give_back(number, others)
        self._start(number)
