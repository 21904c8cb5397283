"""The report as one HTML file that needs nothing else: what was measured, compared with what prime-rl publishes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bench.report import number

Rows = list[tuple[str, ...]]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #d6dde4; text-align: right; }
th:first-child, td:first-child { text-align: left; } .bar { background: #2b6cb0; height: .7rem; display: block; }
.bad { color: #b00020; } .note { color: #5a6772; }
"""


def share(value: float | None) -> str:
    """Return a share for people."""
    return "-" if value is None else f"{value:.1%}"


def alone_rows(report: Mapping[str, Any]) -> Rows:
    """Return the trainer alone: figure, here, published."""
    here, other = report["alone"], report["published"]
    if here is None:
        return [("failed", report["errors"]["alone"], "-")]
    return [
        ("tokens/s", number(here["tokens_per_s"]), number(other["tokens_per_s"])),
        ("MFU, useful operations alone", share(here["mfu"]), "-"),
        ("MFU as prime-rl counts", share(here["mfu_as_prime_rl_counts"]), share(other["mfu_as_prime_rl_counts"])),
        ("peak memory, tensors, GiB", number(here["memory_gib"]), "-"),
        ("peak memory, allocator, GiB", number(here["memory_reserved_gib"]), number(other["memory_gib"])),
        ("seconds a step", number(here["step_s"]), number(other["step_s"])),
    ]  # fmt: skip


def training_rows(report: Mapping[str, Any]) -> Rows:
    """Return the rows of training next to the engine: figure, here."""
    run, made = report["training"], report["updates"]
    if run is None:
        return [("failed", report["errors"]["training"])]
    return [
        ("steps", str(run["steps"])),
        ("tokens/s of the trainer's passes", number(run["tokens_per_s_of_compute"])),
        ("tokens/s of the whole run, sampling included", number(run["tokens_per_s"])),
        ("MFU of the passes", share(run["mfu_of_compute"])),
        ("peak memory, tensors, GiB", number(run["memory_gib"])),
        ("engine's log-probabilities against the trainer's, mean gap, nats", number(run["logprob_gap_mean"])),
        ("versions live", f"{made['live']} of {made['versions']}"),
        (f"probes ({', '.join(made['probe_verdicts']) or 'none'}), greatest gap, nats", number(made["probe_gap_max"])),
    ]  # fmt: skip


def part_rows(measured: Mapping[str, Any] | None) -> Rows:
    """Return the seconds by part: name, seconds; failed parts have none."""
    return [(name, number(value)) for name, value in (measured or {"seconds": {}})["seconds"].items()]


def render(report: Mapping[str, Any]) -> str:
    """Return the whole page."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)" for gpu in report["gpus"]) or "no GPU"
    tests = report["tests"]
    failures = (
        _table(("test", "how it ended"), list(tests["not_passed"].items())) if tests["not_passed"] else ""
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>headgate on a GPU</title><style>{_STYLE}</style>
<h1>headgate on {escape(gpus)}</h1>
<p class="note">{escape(report["time"])}, commit {escape(report["commit"])}, shape {escape(report["shape"])}, PyTorch
{escape(report["torch"])}. Random weights.</p>
<h2>Tests that need a GPU</h2>
<p class="{"bad" if tests["failed"] else ""}">{tests["passed"]} passed, {tests["failed"]} failed, {tests["skipped"]} skipped</p>
{failures}
<h2>The trainer alone</h2>
{_table(("figure", "here", "prime-rl, one H100"), alone_rows(report))}
<p class="note">prime-rl: {escape(report["published"]["what"])}. {escape(report["published"]["source"])}. Formulas:
bench/gpu/figures.py.</p>
<h2>Training next to vLLM</h2>
{_table(("figure", "here"), training_rows(report))}
<h2>Seconds of a step, median</h2>
{_bars(report["training"])}
<h2>Seconds of a weight update, median</h2>
{_bars(report["updates"])}
</html>
"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _bars(measured: Mapping[str, Any] | None) -> str:
    seconds = measured["seconds"] if measured else {}
    most = max(seconds.values(), default=0.0) or 1.0
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{number(value)}</td>"
        f'<td style="width:60%"><span class="bar" style="width:{100 * value / most:.1f}%"></span></td></tr>'
        for name, value in seconds.items()
    )
    return f"<table>{rows}</table>"
