"""An episode, as a client's test uses it: where to call, with which key, and afterwards whether the record is exact.

Needs the standard library alone, because every client runs it in its own environment.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

MODEL = "demo"
AGENT, AGENT_KEY = "shared", "the key of a program whose key never changes"
HELLO = "Hello from the scripted engine."
WEATHER = "What is the weather in Tokyo?"
SUNNY = "sunny, 24 degrees"
ADA = "Make a person named Ada who is 36 years old"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """A gateway and its scripted engine, by their URLs."""

    gateway: str
    engine: str

    def open(self, task: str, agent: str | None = None) -> Episode:
        """A new episode; `agent`: whose key reaches it too."""
        body = {"task_id": task, "mode": "eval", "agent": agent}
        opened = _json(f"{self.gateway}/admin/v1/episodes", body)
        return Episode(self, opened["episode_id"], opened["base_url"], opened["api_key"])

    def errors(self) -> dict[str, str]:
        """The requests that were refused or failed so far, by code and status."""
        with urllib.request.urlopen(f"{self.gateway}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith("headgate_errors_total"))


@dataclass(frozen=True, slots=True)
class Episode:
    """One client's episode."""

    gate: Gate
    id: str
    base_url: str
    """The base URL for the openai SDK, with `/v1`."""
    api_key: str

    @property
    def root(self) -> str:
        """The base URL for the anthropic SDK, without `/v1`."""
        return self.gate.gateway

    @property
    def header(self) -> dict[str, str]:
        """The header that names it, for clients whose key reaches several."""
        return {"X-Headgate-Episode": self.id}

    def nodes(self) -> list[dict[str, Any]]:
        """The recorded tree."""
        nodes: list[dict[str, Any]] = _json(f"{self.gate.gateway}/admin/v1/episodes/{self.id}/trajectory")[
            "nodes"
        ]
        return nodes

    def check(self, turns: int | None = None) -> None:
        """Check that the record of every turn is what the engine got and sampled, and that there are `turns` turns."""
        nodes = self.nodes()
        sampled = [node for node in nodes if node["sampled"]]
        if turns is not None:
            assert len(sampled) == turns, f"{len(sampled)} turns were recorded, not {turns}"
        for node in sampled:
            known = _json(f"{self.gate.engine}/compat/requests?prefix={node['call_id']}")
            path, ids = _path_to(nodes, node), node["ids"]
            assert ids
            assert any(
                kept["prompt"] == path and kept["sampled"][: len(ids)] == ids for kept in known.values()
            ), f"the engine was never given the path to node {node['index']} of {self.id}"


def _path_to(nodes: list[dict[str, Any]], node: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    while node["parent"] >= 0:
        parent = nodes[node["parent"]]
        ids = parent["ids"][: node["at"]] + ids
        node = parent
    return ids


def _json(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
