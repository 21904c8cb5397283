"""Keys of the configuration that may stand in the environment instead of the file. The file takes precedence."""

from __future__ import annotations

import json
import os
from typing import Any

ENVIRONMENT = {
    "HEADGATE_PUBLIC_URL": ("server", "public_url"),
    "HEADGATE_ADMIN_KEY": ("admin", "key"),
    "HEADGATE_STORE_URL": ("store", "url"),
    "HEADGATE_BUS_URL": ("bus", "url"),
    "HEADGATE_CLUSTER_URL": ("cluster", "url"),
    "HEADGATE_CLUSTER_KEY": ("cluster", "key"),
    "HEADGATE_WEIGHTS_KEY": ("weights", "key"),
    "HEADGATE_REDACTION_KEY": ("redaction", "key"),
}
"""The configuration key that each environment variable can set."""
SECRETS = (*ENVIRONMENT, "HEADGATE_AGENT_KEY_", "HEADGATE_PROJECT_KEY_")
"""Prefixes of variables that engines must not see."""
ENGINE_URLS = "HEADGATE_ENGINE_URLS"
"""JSON, `{"model": ["url", ...]}`: these models' engines run already, whatever `[engine]` configures."""


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """Return a file's values with what the environment has of the rest. Raise ValueError for a variable that cannot be read."""
    for variable, (section, key) in ENVIRONMENT.items():
        if (given := os.environ.get(variable)) and isinstance(table := values.get(section, {}), dict):
            values = {**values, section: {key: given, **table}}
    if urls := os.environ.get(ENGINE_URLS):
        values = _with_engines(values, _engine_urls(urls))
    for section, kind in (("agents", "AGENT"), ("projects", "PROJECT")):
        if isinstance(holders := values.get(section), dict):
            values = {
                **values,
                section: {name: _with_key(name, given, kind) for name, given in holders.items()},
            }
    return values


def key_variable(name: str, kind: str = "AGENT") -> str:
    """Return the variable for the key of an agent or a project."""
    return f"HEADGATE_{kind}_KEY_{name.upper().replace('-', '_')}"


def _with_key(name: str, values: Any, kind: str) -> Any:
    key = os.environ.get(key_variable(str(name), kind))
    return {"key": key, **values} if key and isinstance(values, dict) else values


def _engine_urls(text: str) -> dict[str, list[str]]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(urls, list) for urls in found.values()):
        raise ValueError(
            f'{ENGINE_URLS} must be JSON such as {{"policy": ["http://engine:8000", "http://engine-2:8000"]}}'
        )
    return found


def _with_engines(values: dict[str, Any], urls: dict[str, list[str]]) -> dict[str, Any]:
    models = dict(values.get("models", {}))
    for name, places in urls.items():
        if not isinstance(models.get(name), dict):
            raise ValueError(
                f"{ENGINE_URLS} names the model {name!r}; the configuration has: {', '.join(models) or 'none'}"
            )
        engine = dict(models[name].get("engine", values.get("engine", {})))
        for key in ("count", "url"):
            engine.pop(key, None)
        if engine.get("launch", "vllm") == "vllm":
            engine["api"] = "vllm"
        models[name] = {**models[name], "engine": {**engine, "launch": "external", "urls": places}}
    return {**values, "models": models}
