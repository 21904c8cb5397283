"""Choice of the line in an engine's log that has the reason of its end."""

from __future__ import annotations

import pytest

from gateway.engines.process import exit_reason

VLLM = """
(APIServer pid=41) INFO 11-22 21:00:00 [api_server.py:1772] vLLM API server version 0.32.0
(APIServer pid=41) WARNING 11-22 21:00:01 [x.py:1] Failed to import with ModuleNotFoundError: No module named 'y'
(EngineCore pid=77) ERROR 11-22 21:00:09 [core.py:1080] EngineCore failed to start.
(EngineCore pid=77) ERROR 11-22 21:00:09 [core.py:1080] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-22 21:00:09 [core.py:1080]   File "core.py", line 1054, in run_engine_core
(EngineCore pid=77) ERROR 11-22 21:00:09 [core.py:1080] ValueError: There is no module or parameter named 'extra'
(EngineCore pid=77) Traceback (most recent call last):
(EngineCore pid=77) ValueError: There is no module or parameter named 'extra'
(APIServer pid=41) Traceback (most recent call last):
(APIServer pid=41) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


MEMORY = "torch.OutOfMemoryError: CUDA out of memory."
USAGE = "api_server: error: unrecognized arguments: --x"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (VLLM, "ValueError: There is no module or parameter named 'extra'"),
        (f"Traceback (most recent call last):\n  File\n{MEMORY}\n", MEMORY),
        (f"usage: api_server\n{USAGE}\n\n", USAGE),
        ("RuntimeError: " + "x" * 9000, "RuntimeError: " + "x" * 286),
        ("", "it wrote nothing"),
    ],
)
def test_the_first_error_is_the_reason(log: str, words: str) -> None:
    assert exit_reason(log) == words
