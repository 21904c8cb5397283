"""A gateway in a process of its own, which a test may kill with SIGKILL and start again on the same store."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from tests.harness.forks import forks, keep_what_is_loaded, say_to
from tests.harness.waiting import until


class GatewayProcess:
    """`values` as `Settings.parse` takes them; its engines are external, so they outlive it."""

    def __init__(self, values: dict[str, Any], log: Path) -> None:
        self.url = f"http://127.0.0.1:{values['server']['port']}"
        self._values = values
        self._log = log
        self._process: BaseProcess | None = None

    async def start(self) -> None:
        """Returns once calls would be served."""
        self._process = process = forks().Process(target=_main, args=(self._values, self._log), daemon=True)
        process.start()

        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as http:

            async def ready() -> bool:
                assert process.is_alive(), self._log.read_text()
                try:
                    return (await http.get("/readyz")).is_success
                except httpx.HTTPError:
                    return False

            await until(ready, "the gateway is ready")

    @property
    def pid(self) -> int:
        """The id of the process that runs, or ran last."""
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL; nothing of it runs when this returns."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _main(values: dict[str, Any], log: Path) -> None:
    keep_what_is_loaded()
    say_to(log)
    import uvicorn

    from gateway.app import create_app
    from gateway.settings import Settings

    settings = Settings.parse(values)
    uvicorn.run(create_app(settings), port=settings.server.port, log_level="warning")
