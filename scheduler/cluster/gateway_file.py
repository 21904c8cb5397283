"""The part of the gateway's configuration that a cluster needs; the gateway checks the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.configuration import Unreadable, read_toml
from headgate.processes.ports import url_of
from scheduler.cluster.errors import BadFile

_SHARE = "--gpu-memory-utilization"
_SPREAD = ("--tensor-parallel-size", "-tp")


@dataclass(frozen=True, slots=True)
class GatewayFile:
    """The gateway's TOML file and environment."""

    path: Path
    url: str
    """The URL for calls."""
    admin_url: str
    key: str | None
    """The admin key of the file or the environment."""
    model: str
    share: float | None = None
    """`--gpu-memory-utilization` of the engines, if the file has it."""
    sleeps: bool = True
    """True if engines on accelerators free their memory while they sleep."""
    gpus: int = 1
    """GPUs over which one engine is spread."""
    spread_by_args: bool = False
    """True if `[engine] args` have the number of GPUs, which `engine_gpus` of a node cannot change."""
    starts_vllm: bool = True
    python: str = "python"
    """The interpreter of vLLM's environment."""
    checkpoint: Path | None = None
    """The model's folder."""
    public_url: str = ""
    """The URL for agents."""
    shutdown_s: float = 10.0
    """Seconds in which running calls finish at a stop."""

    @classmethod
    def read(cls, path: Path, model: str | None, environment: Mapping[str, str] = os.environ) -> GatewayFile:
        """Read a file. Raise BadFile, also if the gateway would start engines of its own."""
        values = tables_in(path)
        server, admin = table_of(path, values, "server"), table_of(path, values, "admin")
        models = table_of(path, values, "models")
        trained = [
            n
            for n, m in models.items()
            if isinstance(m, dict) and m.get("train", True) and "upstream" not in m
        ]
        name = model or next(iter(trained), None)
        if name is None or name not in models:
            raise BadFile(
                f"{path}: [engine] model of the cluster: no model {model!r}; known models: {', '.join(models)}"
            )
        engine = models[name].get("engine", values.get("engine", {}))
        _check_engine(path, name, engine)
        if not server.get("port", 8000):
            raise BadFile(f"{path}: [server] port = 0: the cluster needs a fixed port to find the gateway")
        url = url_of(server.get("host", "127.0.0.1"), server.get("port", 8000))
        port = admin.get("port")
        admin_url = url_of(admin.get("host", server.get("host", "127.0.0.1")), port) if port else url
        spread = _number(path, engine.get("args", ()), *_SPREAD)
        return cls(
            path,
            url,
            admin_url,
            admin.get("key") or environment.get("HEADGATE_ADMIN_KEY") or None,
            name,
            _number(path, engine.get("args", ()), _SHARE),
            engine.get("sleep", "auto") != "pause",
            int(spread or engine.get("tensor_parallel", 1)),
            spread is not None,
            engine.get("launch", "vllm") == "vllm",
            engine.get("python", "python"),
            Path(models[name]["path"]) if "path" in models[name] else None,
            server.get("public_url") or environment.get("HEADGATE_PUBLIC_URL") or url,
            server.get("shutdown_s", 10.0),
        )

    def check_gpus(self, reserved: int | None, others: Sequence[int | None] = (None,)) -> None:
        """Raise BadFile if engines use another number of GPUs than is `reserved`. None: nothing is reserved.

        `others`: `engine_gpus` of each node with engines.
        """
        if any(others) and not self.starts_vllm:
            raise BadFile(
                f"{self.path}: nodes of the cluster file have engine_gpus, and only vLLM is spread over GPUs"
            )
        if any(others) and self.spread_by_args:
            raise BadFile(
                f"{self.path}: [engine] args have the number of GPUs of every engine, and nodes of the cluster file have"
                " engine_gpus: use [engine] tensor_parallel in place of the argument"
            )
        if (
            None not in others
            or reserved is None
            or reserved == self.gpus
            or (reserved == 0 and self.gpus == 1)
        ):
            return
        raise BadFile(
            f"{self.path}: an engine is spread over {self.gpus} GPUs ([engine] tensor_parallel), and the cluster file reserves"
            f" {reserved} for it ([engine] gpus): use the same number in both"
        )


def _number(path: Path, args: Sequence[str], *options: str) -> float | None:
    """Return the number of an option of vLLM, as one argument or two, or None. Raise BadFile."""
    parts = [part for arg in args for part in str(arg).split("=", 1)]
    for option in options:
        if option in parts[:-1]:
            text = parts[parts.index(option) + 1]
            try:
                return float(text)
            except ValueError:
                raise BadFile(f"{path}: [engine] args: {option} {text} is not a number") from None
    return None


def _check_engine(path: Path, model: str, engine: dict[str, Any]) -> None:
    """Raise BadFile unless the cluster can start the engines of this model."""
    if engine.get("launch", "vllm") == "external":
        message = f"'external' has no command for {model}'s engines, and the cluster starts them"
        raise BadFile(f"{path}: [engine] launch: {message}")
    if engine.get("count", 1) != 0:
        raise BadFile(
            f"{path}: [engine] count = 0 is needed: the cluster starts {model}'s engines, on its nodes"
        )


def tables_in(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raise BadFile."""
    try:
        return read_toml(path)
    except Unreadable as error:
        raise BadFile(str(error)) from error


def table_of(path: Path, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table; an empty one if it is missing. Raise BadFile."""
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise BadFile(f"{path}: {name} is not a table")
    return table
