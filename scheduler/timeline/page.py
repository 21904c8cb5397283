"""A timeline as one page that needs nothing else (`page.html`), and as a picture."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from scheduler.timeline.intervals import KINDS, Kind, Timeline

MOST_NODES = 200
"""More are not drawn, but counted."""
COLOURS: dict[Kind, str] = {
    "rollout": "#2f6fdb",
    "train": "#1c8a53",
    "switching": "#c77a12",
    "idle": "#c9ced8",
}
_HEIGHTS: dict[Kind, float] = {"rollout": 0.72, "train": 0.72, "switching": 0.45, "idle": 0.12}


def write(timeline: Timeline, folder: Path, title: str) -> dict[str, str]:
    """Writes `timeline.html` and `timeline.png` into a folder, and makes it. Without matplotlib there is no picture."""
    folder.mkdir(parents=True, exist_ok=True)
    html, png = folder / "timeline.html", folder / "timeline.png"
    html.write_text(page(timeline, title), encoding="utf-8")
    files = {"html": str(html)}
    with contextlib.suppress(ImportError):
        picture(timeline, png, title)
        files["png"] = str(png)
    return files


def page(timeline: Timeline, title: str) -> str:
    """The whole page, as HTML."""
    template = resources.files("scheduler.timeline").joinpath("page.html").read_text(encoding="utf-8")
    # Only "</" could end the script early.
    return template.replace("{{data}}", json.dumps(_data(timeline, title)).replace("<", "\\u003c"))


def _data(timeline: Timeline, title: str) -> dict[str, Any]:
    bars: dict[str, list[tuple[int, float, float, int]]] = {node: [] for node in drawn_nodes(timeline)}
    for i in timeline.intervals:
        if i.node in bars:
            bars[i.node].append((KINDS.index(i.kind), round(i.start_s, 4), round(i.end_s, 4), i.step))
    bubbles = timeline.bubbles()
    return {
        "title": title,
        "about": _about(timeline),
        "kinds": KINDS,
        "start": timeline.start_s,
        "end": timeline.end_s,
        "tiles": _tiles(timeline),
        "nodes": [{"name": node, "bars": found} for node, found in bars.items()],
        "steps": [(step.number, round(step.end_s, 4)) for step in timeline.steps],
        "seconds": [(node, *seconds.values()) for node, seconds in timeline.by_kind().items()],
        "bubbles": [(b.step, b.seconds, b.train_s, b.rollout_s) for b in bubbles],
    }


def _about(timeline: Timeline) -> str:
    count = len(timeline.nodes)
    nodes = f"{count} node{'s' if count != 1 else ''}, {timeline.seconds:.1f} s, {len(timeline.steps)} steps."
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timeline.began + timeline.start_s))
    began = f" It began at {when}." if timeline.began else " In virtual time."
    left = f" The first {MOST_NODES} nodes are drawn." if count > MOST_NODES else ""
    return nodes + began + left


def _tiles(timeline: Timeline) -> list[tuple[str, str]]:
    train = [node for node in timeline.nodes if node in timeline.train_nodes]
    others = [node for node in timeline.nodes if node not in timeline.train_nodes]
    tiles = [("idle, all nodes", _percent(timeline.share("idle")))]
    tiles += [("idle, train nodes", _percent(timeline.share("idle", train)))] if train else []
    tiles += [("idle, other nodes", _percent(timeline.share("idle", others)))] if others else []
    if bubbles := timeline.bubbles():
        mean = sum(bubble.train_s for bubble in bubbles) / len(bubbles)
        tiles.append(("train nodes idle, a step", f"{mean:.2f} s"))
    return tiles


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def drawn_nodes(timeline: Timeline) -> Sequence[str]:
    """The nodes that are drawn."""
    return timeline.nodes[:MOST_NODES]


def picture(timeline: Timeline, path: Path, title: str) -> None:
    """Writes the same as a PNG. Needs matplotlib (`pip install headgate[demo]`); raises ImportError without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    nodes = drawn_nodes(timeline)
    figure, axes = pyplot.subplots(figsize=(12, min(40.0, 1.6 + 0.42 * len(nodes))), layout="constrained")
    for row, node in enumerate(nodes):
        for kind in KINDS:
            bars = [(i.start_s, i.seconds) for i in timeline.intervals if (i.node, i.kind) == (node, kind)]
            height = _HEIGHTS[kind]
            axes.broken_barh(bars, (row - height / 2, height), color=COLOURS[kind], linewidth=0)
            if kind == "train":  # distinguishes it from rollout without colour
                axes.broken_barh(bars, (row - 0.03, 0.06), color="white", linewidth=0)
    for step in timeline.steps:
        axes.axvline(step.end_s, color="#5d6675", linewidth=0.6, alpha=0.6)
    axes.set(xlim=(timeline.start_s, timeline.end_s), ylim=(len(nodes) - 0.5, -0.5), xlabel="seconds")
    axes.set_yticks(range(len(nodes)), nodes)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    keys = [Patch(color=COLOURS[kind], label=kind) for kind in KINDS]
    figure.legend(handles=keys, loc="outside upper right", ncols=len(KINDS), frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
