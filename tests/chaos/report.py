"""A run's report: one JSON object, and one HTML page that needs nothing else.

Knows the evidence and the checker's findings; judges nothing. The page shows replies a second against the faults, says how many
of each kind were survived, and follows the reader's choice of a light or a dark page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import Any

from tests.chaos.checker import COUNTS, Report
from tests.chaos.evidence import Evidence

KILLS = ("kill_gateway", "kill_coordinator", "kill_in_update", "kill_engine", "kill_trainer")
_WORDS = {
    "kill_gateway": "a gateway killed (SIGKILL)",
    "kill_coordinator": "the coordinator killed (SIGKILL)",
    "kill_in_update": "coordinator or engine killed in a weight update",
    "kill_engine": "an engine killed (SIGKILL)",
    "kill_trainer": "the trainer killed (SIGKILL)",
    "pause_gateway": "a gateway stopped for longer than its lease",
    "stop_redis": "Redis killed and started",
    "flush_redis": "Redis emptied (FLUSHALL)",
    "stop_postgres": "PostgreSQL stopped and started",
    "drop_connections": "all connections of a link reset",
    "drop_clients": "all clients' connections reset",
    "cut_link": "a link cut for some seconds",
    "delay_link": "a link slow for some seconds",
    "hang_up": "a client hung up",
}
_RECOVERED = ("reply_median", "reply_max", "version_median", "version_max", "ready_median", "ready_max")
_COUNTED = {
    "absent": "finished replies that are not stored as they were received",
    "not_prefix": "unfinished replies that begin nothing stored or sampled",
    "doubled": "tokens or calls stored twice",
    "wrong_version": "tokens under a version that did not sample them",
    "trained_twice": "groups trained twice",
    "never_trained": "complete groups that were promised a batch and are in none",
    "leaks": "keys that reached another's data",
}


def summary(evidence: Evidence, report: Report) -> dict[str, Any]:
    """The keys of the last line."""
    plan = evidence.plan
    return {
        "faults": dict(sorted(faults(evidence).items())),
        **{count: report.counts[count] for count in COUNTS},
        "calls": report.facts["finished_replies"],
        "tokens": report.facts["tokens"],
        "seconds": plan["seconds"],
        "seed": plan["seed"],
        "recovery_s": recovery(evidence),
        "facts": dict(sorted(report.facts.items())),
        "findings": dict(report.findings),
    }


def faults(evidence: Evidence) -> Counter[str]:
    """Counts the faults by kind."""
    found = Counter(event["fault"] for event in evidence.faults if event["kind"] == "end")
    gone = sum(event["kind"] == "end" and event["how"] == "hung_up" for event in evidence.agents)
    return found + Counter({"hang_up": gone} if gone else {})


def recovery(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Returns for each kind of kill the seconds until a reply that was asked for afterwards was whole, until a version went live,
    and until a gateway that was killed served calls again."""
    asked: dict[tuple[str, int], float] = {}
    whole: list[tuple[float, float]] = []
    for event in evidence.agents:
        if event["kind"] == "ask":
            asked[event["ask"], event["attempt"]] = event["at"]
        elif event["kind"] == "end" and event["how"] == "finished":
            whole.append((asked[event["ask"], event["attempt"]], event["at"]))
    live = sorted(event["at"] for event in evidence.trainer if event["kind"] == "live")
    found: dict[str, dict[str, float]] = {}
    for kind in KILLS:
        kills = [e for e in evidence.faults if e["kind"] == "end" and e["fault"] == kind]
        moments = [kill["since"] for kill in kills]
        replies = [min((end for begin, end in whole if begin > at), default=at) - at for at in moments]
        versions = [next((end for end in live if end > at), at) - at for at in moments]
        if moments:
            ready = _spread("ready", [kill["ready_s"] for kill in kills if "ready_s" in kill])
            found[kind] = {**_spread("reply", replies), **_spread("version", versions), **ready}
    return found


def _spread(name: str, values: list[float]) -> dict[str, float]:
    known = sorted(value for value in values if value > 0)  # nothing came any more: the run was over
    if not known:
        return {}
    return {f"{name}_median": round(known[len(known) // 2], 2), f"{name}_max": round(known[-1], 2)}


# The page


def page(evidence: Evidence, values: dict[str, Any]) -> str:
    """The HTML page."""
    wrong = {count: values[count] for count in COUNTS}
    verdict = "Nothing was lost, doubled or mixed up." if not any(wrong.values()) else "Something is wrong."
    survived = sum(values["faults"].values())
    rows = ((_WORDS.get(kind, kind), f"{count:,}") for kind, count in values["faults"].items())
    counts = ((_COUNTED[count], f"{wrong[count]:,}") for count in COUNTS)
    found = [
        f"<li>{escape(kind)}: {escape(said)}</li>"
        for kind, all_ in values["findings"].items()
        for said in all_
    ]
    recovered = (
        (
            _WORDS[kind],
            *(_seconds(r.get(key)) for key in _RECOVERED),
        )
        for kind, r in values["recovery_s"].items()
    )
    head = (
        "after",
        "reply, median s",
        "most",
        "new version, median s",
        "most",
        "gateway ready, median s",
        "most",
    )
    plan = evidence.plan
    what = (
        f"{plan['gateways']} gateways, engines: {', '.join(plan['engines'])}, {plan['agents']} agents, "
        f"seed {plan['seed']}, {values['seconds']:g} s of faults, {values['calls']:,} whole replies, "
        f"{values['tokens']:,} tokens."
    )
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>headgate: chaos</title>
<style>{_STYLE}</style></head><body><main>
<h1>{survived:,} faults. {verdict}</h1><p>{escape(what)}</p>
{_timeline(evidence)}
<section><h2>What was counted</h2>{_table(("", "found"), counts)}{"<ul>" + "".join(found) + "</ul>" if found else ""}</section>
<section><h2>Faults that were survived</h2>{_table(("", "times"), rows)}</section>
<section><h2>Recovery</h2>{_table(head, recovered)}</section>
</main></body></html>
"""


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


_WIDTH, _HEIGHT, _LEFT, _ROW = 1000, 190, 150, 17


def _timeline(evidence: Evidence) -> str:
    """Replies a second, and under them a row of marks for each kind of fault, on one axis of time."""
    ends = [e["at"] for e in evidence.agents if e["kind"] == "end" and e["how"] == "finished"]
    if not ends:
        return "<p>No reply was whole.</p>"
    start, end = min(ends), max(*ends, min(ends) + 1)
    width = max((end - start) / 240, 1.0)
    bins = Counter(int((at - start) / width) for at in ends)
    most = max(bins.values()) / width

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * min(max((at - start) / (end - start), 0.0), 1.0)

    def y(rate: float) -> float:
        return _HEIGHT - 10 - (_HEIGHT - 30) * rate / most

    last = int((end - start) / width)
    points = " ".join(f"{x(start + (i + 0.5) * width):.1f},{y(bins[i] / width):.1f}" for i in range(last + 1))
    kinds = sorted({e["fault"] for e in evidence.faults if e["kind"] == "end"})
    marks = []
    for number, kind in enumerate(kinds):
        top = _HEIGHT + 12 + number * _ROW
        marks.append(
            f'<text x="{_LEFT - 8}" y="{top + 9}" class="name">{escape(kind.replace("_", " "))}</text>'
        )
        for event in evidence.faults:
            if event["kind"] == "end" and event["fault"] == kind:
                away = event.get("seconds", 0.0)
                since = event.get("since", event["at"] - away)
                left, right = x(since), x(since + away)
                title = escape(
                    ", ".join(f"{k} {v}" for k, v in event.items() if k in ("who", "seconds", "how"))
                )
                marks.append(
                    f'<rect x="{left:.1f}" y="{top}" width="{max(right - left, 2.5):.1f}" height="11" rx="2">'
                    f"<title>{title}</title></rect>"
                )
    bottom = _HEIGHT + 12 + len(kinds) * _ROW
    minutes = range(0, int(end - start) + 1, 60 if end - start > 180 else 15)
    axis = "".join(
        f'<line x1="{x(start + s):.1f}" x2="{x(start + s):.1f}" y1="12" y2="{bottom}" class="grid"/>'
        f'<text x="{x(start + s):.1f}" y="{bottom + 14}" class="tick">{s // 60}:{s % 60:02d}</text>'
        for s in minutes
    )
    return f"""<figure><svg viewBox="0 0 {_WIDTH} {bottom + 20}" role="img" aria-label="Replies a second, and faults">
{axis}<text x="{_LEFT - 8}" y="{y(most) + 4:.1f}" class="name">{most:.1f} replies/s</text>
<text x="{_LEFT - 8}" y="{y(0) + 4:.1f}" class="name">0</text>
<polyline points="{points}" class="rate"/>{"".join(marks)}</svg>
<figcaption>Whole replies a second (line); when each fault was, and how long (marks). Minutes:seconds.</figcaption></figure>"""


_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6572;--line:#d9dee4;--page:#fff;--rate:#0b62c4;--mark:#c2410c}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebef;--soft:#9aa5b1;--line:#2f3742;--page:#14181d;--rate:#6cb2ff;--mark:#ff9b5e}}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1060px;margin:0 auto;padding:32px 20px 64px}h1{font-size:28px;line-height:1.25;margin:0 0 8px}
h2{font-size:18px;margin:32px 0 8px}p,figcaption{color:var(--soft);margin:0 0 16px}figure{margin:24px 0;overflow-x:auto}
svg{width:100%;min-width:720px;height:auto;display:block}.grid{stroke:var(--line)}.tick,.name{fill:var(--soft);font-size:11px}
.tick{text-anchor:middle}.name{text-anchor:end}.rate{fill:none;stroke:var(--rate);stroke-width:1.6}rect{fill:var(--mark)}
table{border-collapse:collapse;width:100%}th,td{text-align:right;padding:6px 10px;border-bottom:1px solid var(--line);
font-variant-numeric:tabular-nums}th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left;padding-left:0}
figcaption,li{font-size:13px}li{overflow-wrap:anywhere}
"""
