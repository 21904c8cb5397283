"""The servers that `bench.peers` compares: each one process, started before the same mock engine, and what it responds."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from bench.model import MIXTURE
from bench.processes import Child, run_gateway, run_mock, run_server
from headgate.processes.ports import free_port

ROUTERS = ("vllm-router", "sglang-router")
LITELLM_RUST = "litellm-rust"
"""LiteLLM's proxy with `LITELLM_RUST=1`, which it uses for Anthropic's API alone."""
LITELLMS = ("litellm", LITELLM_RUST)
ROUTES = "headgate-routes"
"""headgate with router replay, before a mock engine of its own that reports the experts of tokens. Measured on request."""
APIS = {
    "chat": ("engine", "headgate", "passthrough", "litellm", *ROUTERS, ROUTES),
    "messages": ("engine", "headgate", "passthrough", *LITELLMS),
}
"""The targets that serve each API: OpenAI's chat completions, and Anthropic's messages."""
TARGETS = tuple(dict.fromkeys((*APIS["messages"], *APIS["chat"])))
_LITELLM_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "NO_DOCS": "True",
    "NO_PROXY": "127.0.0.1",
}
_ANTHROPIC = "bench-anthropic"


def model_of(name: str, api: str) -> str:
    """Return the model that requests to a target name; LiteLLM chooses its provider by it."""
    return _ANTHROPIC if api == "messages" and name in LITELLMS else "bench"


@asynccontextmanager
async def start_peer(
    name: str, programs: Mapping[str, Path], engine: Child, model: Path, work: Path
) -> AsyncIterator[Child]:
    """Yield a target before `engine`. Raise ChildDied, TimeoutError or OSError if it does not start."""
    port = free_port()
    match name:
        case "engine":
            yield engine
        case "headgate":
            async with run_gateway(engine, model, work) as child:
                yield child
        case _ if name == ROUTES:
            mixture = work / "mixture"
            shutil.copytree(model, mixture)
            config = mixture / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | MIXTURE))
            async with (
                run_mock(work, "--routes") as own,
                run_gateway(own, mixture, work, router_replay=True) as child,
            ):
                yield child
        case "passthrough":
            argv = [sys.executable, "-m", "bench.passthrough", "--port", str(port), "--engine", engine.url]
            async with run_server(name, argv, port, "/openapi.json", work) as child:
                yield child
        case _ if name in LITELLMS:
            litellm = work / "litellm.yaml"
            litellm.write_text(_litellm_config(engine))
            argv = [str(programs[name].absolute()), "--config", str(litellm), "--num_workers", "1"]
            argv += ["--host", "127.0.0.1", "--port", str(port)]
            env = _LITELLM_ENV | {"LITELLM_RUST": "1" if name == LITELLM_RUST else "0"}
            async with run_server(name, argv, port, "/health/liveliness", work, env) as child:
                yield child
        case _:
            argv = [str(programs[name].absolute()), *_router_options(name, engine, port)]
            async with run_server(name, argv, port, "/health", work) as child:
                yield child


def _router_options(name: str, engine: Child, port: int) -> list[str]:
    """Return options for one worker, the engine, and no other reason for a request to wait."""
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", engine.url]
    options += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    options += ["--log-level", "warning" if name == "vllm-router" else "warn"]
    return options if name == "vllm-router" else ["launch", *options]


def _litellm_config(engine: Child) -> str:
    """Return the engine by OpenAI's API and by Anthropic's; no database, no key, no logging."""
    return (
        "model_list:\n"
        "  - model_name: bench\n"
        "    litellm_params:\n"
        "      model: openai/bench\n"
        f"      api_base: {engine.url}/v1\n"
        "      api_key: none\n"
        f"  - model_name: {_ANTHROPIC}\n"
        "    litellm_params:\n"
        "      model: anthropic/bench\n"
        f"      api_base: {engine.url}\n"
        "      api_key: none\n"
        "litellm_settings:\n"
        "  telemetry: false\n"
        "  request_timeout: 120\n"
        "general_settings:\n"
        "  dangerously_permit_weak_or_unset_master_key: true\n"
    )
