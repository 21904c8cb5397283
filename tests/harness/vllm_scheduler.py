"""A barrier in real vLLM: a scheduler that stands still, as in a pause that keeps requests, once enough are in their middle.

It runs in vLLM's own environment. Nothing outside can stop an engine between two tokens for certain: on a busy machine vLLM's
HTTP server is seconds behind the process that samples, so a pause comes when the replies are over.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler


class BarrierScheduler(Scheduler):
    """vLLM's scheduler, with a barrier while its file is there: "4 100" holds everything until 4 requests have come, and again
    when 4 have 100 tokens each and have not ended. Then the file goes, and the engine stands still until it is resumed.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._barrier = Path(os.environ["HEADGATE_TESTS_BARRIER"])

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self._stop_or_go()

    def schedule(self, *args: Any, **named: Any) -> Any:
        self._stop_or_go()
        return super().schedule(*args, **named)

    def _stop_or_go(self) -> None:
        try:
            requests, tokens = map(int, self._barrier.read_text().split())
        except FileNotFoundError:
            return
        stand = sum(request.num_output_tokens >= tokens for request in self.running) >= requests
        if stand:
            self._barrier.unlink(missing_ok=True)
        state = PauseState.PAUSED_ALL if stand or len(self.requests) < requests else PauseState.UNPAUSED
        if state != self.pause_state:
            self.set_pause_state(state)
