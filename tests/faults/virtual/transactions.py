"""Real transactions in threads that stop before each statement which may wait, until a test continues them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Float, literal_column

from gateway.store import coordination

_PATIENCE_S = 60.0
_here = threading.local()


CLOCK = """
CREATE TABLE IF NOT EXISTS machine_clock (now float8);
DELETE FROM machine_clock; INSERT INTO machine_clock VALUES (0);
CREATE OR REPLACE FUNCTION machine_clock() RETURNS float8 VOLATILE LANGUAGE sql AS 'SELECT now FROM machine_clock';
"""


class MachineClock:
    """The clock in place of the database's own. Others may run before a statement that reads the time."""

    def __add__(self, seconds: float) -> Any:
        return self.__clause_element__() + seconds

    def label(self, name: str) -> Any:
        return self.__clause_element__().label(name)

    def __clause_element__(self) -> Any:
        hand = getattr(_here, "hand", None)
        if hand is not None:
            hand.pause()
        return literal_column("machine_clock()", Float)


class Wrote(int):
    """The fence under which something was written."""


class Killed(BaseException):
    """The process is gone, in the middle of a transaction."""


class Hand:
    """A thread that runs one transaction, from pause to pause."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._killed = False
        self.pid = 0
        self.inside = False
        """True in a transaction that has written something."""
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def begin(self, work: Callable[[Connection], Any]) -> None:
        """Start a transaction, paused."""
        self.done, self.result, self.error, self._killed = False, None, None, False
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def pause(self) -> None:
        """Block the thread until `step`."""
        self._stopped.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def step(self, waits: Callable[[int], bool]) -> None:
        """Continue to the next pause, to the end, or to a wait in the database."""
        self._go.release()
        self.look(waits)

    def look(self, waits: Callable[[int], bool]) -> bool:
        """Return true if it is paused or has ended, false if it waits in the database."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._stopped.acquire(timeout=0.0005):
            if waits(self.pid):
                return False
            assert time.monotonic() < deadline
        return True

    def kill(self, waits: Callable[[int], bool]) -> None:
        """Kill the transaction: its connection is lost."""
        self._killed = True
        self._go.release()

    def _run(self, work: Callable[[Connection], Any]) -> None:
        _here.hand = self
        try:
            self._go.acquire()
            if self._killed:
                raise Killed
            with self._engine.connect() as connection:
                if connection.dialect.name == "postgresql":
                    self.pid = connection.connection.dbapi_connection.info.backend_pid
                with connection.begin():
                    self.inside = True
                    coordination.begin(connection)
                    self.result = work(connection)
                    self.pause()
        except BaseException as error:
            self.error = error
        finally:
            self.inside, self.done = False, True
            self._stopped.release()
