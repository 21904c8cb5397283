"""The history of engines and nodes as spans, computed from events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.store.events import Event


def spans(
    events: Iterable[Event], since: float | None, until: float | None
) -> dict[str, list[dict[str, Any]]]:
    """Return engines and nodes with the spans of their states and roles, and the versions, within a time; in order of events."""
    engines: dict[tuple[str, str], dict[str, Any]] = {}
    nodes: dict[str, dict[str, Any]] = {}
    versions: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events:
        subject, _, what = event.kind.partition(".")
        data = event.data
        if subject == "engine":
            key = event.model, data["engine"]
            known = {"name": data["engine"], "model": event.model, "node": data.get("node"), "spans": []}
            engine = engines.setdefault(key, known)
            _close(engine["spans"], event.at)
            if what != "removed":
                span = {"state": what, "version": data.get("version"), "reason": data.get("reason", "")}
                engine["spans"].append({**span, "from": event.at, "to": None})
        elif subject == "node":
            node = nodes.setdefault(data["node"], {"name": data["node"], "spans": []})
            _close(node["spans"], event.at)
            if what != "removed":
                span = {"role": what, "reason": data.get("reason", "")}
                node["spans"].append({**span, "from": event.at, "to": None})
        elif what in ("published", "live"):
            blank = {"model": event.model, "version": data["version"], "published_at": None, "live_at": None}
            version = versions.setdefault((event.model, data["version"]), blank)
            version[f"{what}_at"] = event.at
    for machine in (*engines.values(), *nodes.values()):
        machine["spans"] = [
            span for span in machine["spans"] if _within(span["from"], span["to"], since, until)
        ]
    marks = [v for v in versions.values() if _within(_at(v), _at(v), since, until)]
    return {"engines": list(engines.values()), "nodes": list(nodes.values()), "versions": marks}


def _at(version: dict[str, Any]) -> float:
    return float(version["live_at"] or version["published_at"])


def _close(spans: list[dict[str, Any]], at: float) -> None:
    if spans and spans[-1]["to"] is None:
        spans[-1]["to"] = at


def _within(first: float, last: float | None, since: float | None, until: float | None) -> bool:
    return (since is None or last is None or last >= since) and (until is None or first < until)
