"""The reports of a run: `metrics.jsonl`, and a live table or plain lines on the terminal. Trackers follow the file (`tracking`).

Owns the file under `[run] dir`; a resumed run appends to it. It has a line for each trained batch; its keys are the names in
`trainer.data.batch`, `trainer.rank_trainer` and `trainer.algorithms`. A figure that is not finite is left out.

- `staleness_tokens/S`: trained tokens of staleness S. `masked_tokens/REASON`: tokens that may not be trained. `skipped_tokens`:
  tokens of groups without gradient, because their rewards are equal.
- `reward_mean`, `equal_reward_groups` (a share): of the batch, so of the groups that the gateway left in it. `reward_mean_all`,
  `equal_reward_groups_all`, `dropped_groups/REASON`: of all groups that ended since the step before, before any filter.
- `truncated_episodes`: the share of episodes with a call that stopped at its token limit, or whose context was full at the end.
- `excluded_share`: the share of the episodes that ended since the step before and failed. `excluded/REASON`: their numbers.
  Rewards are of the other episodes.
- `skipped_steps`: the newest steps in a row that were skipped, because their loss or gradient was not finite.
- `rollout_s/...`, `eta`, `ranks`: what the gateway's engines and episodes did since the step before, for what limits the run
  (`scheduler.policies.limits`).
- `compiled_graphs`: the graphs that the process has compiled so far; a number that grows in every step costs more than it saves.
- `memory_peak_gib`, `memory_reserved_gib`: on a GPU, the peak of rank 0's tensors, and of its allocator.

An evaluation has a line with its `version`, the `step`, and figures named `eval/...` (`trainer.evaluation.figures`);
`eval/versions` counts its episodes by the versions that sampled them.

`seconds/...` are times of each step: `lease`; `first_group`, the wait for the first group; `stream`, from then until the batch is
complete; `claim`, the wait for lent nodes, with `onload`, the return of the weights to them (`offload`, when they left, was
before the step); `step`; `checkpoint`; `evaluation`, the wait for the end of one; `publish`, the copy of the weights and the wait
for the version before (the rest of publishing runs during training); `ack`; `details`, the writing of samples and tokens. Across
them, `idle` is waiting for a lease, groups, nodes or an evaluation, and `compute` is forward, backward and optimizer.
`idle_share` is idle over `seconds/total`, `blocked_share` publish over it. `spans` has [name, start, end] of each, in seconds
since 1970, with the name `idle` or `compute` if it is one of them: `scheduler plan --run` reads it.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headgate.mask_reasons import REMEDIES
from scheduler.policies import limits
from trainer.evaluation.figures import in_a_line, scalars
from trainer.report.tracking import Trackers

Span = tuple[str, float, float]
"""A block's name, start and end, in seconds since 1970."""
_MASKED = "masked_tokens/"
_MOST_TRUNCATED = 0.5
"""Share of truncated tokens in a batch above which a warning is shown."""
_TAIL = 4096
_HEIGHTS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
SPARK = 60
"""Points of a sparkline."""
BAR = 32
"""Characters of the longest bar."""
_LEAST = 0.005
"""The share of a step below which a phase has no bar."""
_NOT_PHASES = ("total", "idle", "compute", "onload", "offload")
"""Times that are sums over phases, or parts of them."""
_SHOWN = (
    ("reward of the batch", "reward_mean", "{:.3f}"),
    ("reward of all episodes", "reward_mean_all", "{:.3f}"),
    ("failed episodes, left out", "excluded_share", "{:.1%}"),
    ("loss", "loss", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("KL to the sampler (k3)", "kl_recorded_k3", "{:.5f}"),
    ("clipped", "clip_fraction", "{:.1%}"),
    ("importance weight", "importance_weight", "{:.3f}"),
    ("log-prob gap, same version: mean", "logprob_gap_mean", "{:.2e}"),
    ("log-prob gap, same version: max", "logprob_gap_max", "{:.2e}"),
    ("staleness, mean", "staleness_mean", "{:.2f}"),
    ("staleness, max", "staleness_max", "{:.0f}"),
    ("gradient norm", "grad_norm", "{:.3f}"),
    ("groups of equal rewards, in the batch", "equal_reward_groups", "{:.0%}"),
    ("groups of equal rewards, in all", "equal_reward_groups_all", "{:.0%}"),
    ("trained tokens", "trained_tokens", "{:.0f}"),
    ("episodes per second", "episodes_per_second", "{:.1f}"),
    ("idle", "idle_share", "{:.0%}"),
    ("blocked by publishing", "blocked_share", "{:.0%}"),
)


class Clock:
    """The seconds of one step, by what they were spent on."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        """When each block ran, under the last of its names, in order."""
        self._offset = time.time() - self.started

    @contextmanager
    def on(self, *names: str) -> Iterator[None]:
        """Count a block's seconds under every name."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            for name in names:
                self.seconds[name] = self.seconds.get(name, 0.0) + ended - started
            self.spans.append((names[-1], started + self._offset, ended + self._offset))

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self.started


class Metrics:
    """The reporter of one run; use it with `with`."""

    def __init__(
        self,
        directory: Path,
        steps: int,
        console: Console | None = None,
        agents: Path | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """`agents`: the log of the agents' driver, whose last line is shown."""
        self._agents = agents
        self._trackers = trackers
        self.directory = directory
        self.steps = steps
        self.console = console or Console(stderr=True)
        self._rewards: list[float] = []
        self._record: dict[str, float] = {}
        self._steps: deque[dict[str, float]] = deque(maxlen=limits.STEPS)
        self._state = "starting"
        self._watched_at = ""

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = (self.directory / "metrics.jsonl").open("a", buffering=1)
        if self._trackers:
            self._trackers.start(self.notify)
        self._live = Live(console=self.console, auto_refresh=False) if self._is_terminal else None
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if self._steps:
            self.notify(limits.line(self._steps))
        self._file.close()
        if self._trackers:
            self._trackers.finish(failed=isinstance(error, Exception))

    def notify(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def watched_at(self, gateway: str) -> None:
        """Report where the run is shown: the console of the gateway at this URL."""
        self._watched_at = f"{gateway}/console"
        self.notify(f"watch the run at {self._watched_at}")

    @property
    def has_steps(self) -> bool:
        """True once this process has trained a batch."""
        return bool(self._rewards)

    def waiting(self, version: int, steps: int) -> None:
        """Show that the trainer leases the batch of `version`, after `steps` steps."""
        self._show(f"step {steps} of {self.steps}, version {version}: leasing")

    def collected(self, groups: int, size: int) -> None:
        """Show how many groups of the leased batch have arrived."""
        self._show(f"{groups} of {size} groups")

    def trained(
        self,
        version: int,
        measured: dict[str, float],
        times: dict[str, float],
        seconds: float,
        spans: Sequence[Span] = (),
    ) -> dict[str, float]:
        """Write the record of the batch of `version`, which was trained and acknowledged; return its finite figures."""
        record = {
            **measured,
            "episodes_per_second": measured["episodes"] / seconds,
            "idle_share": times["idle"] / seconds,
            "blocked_share": times.get("publish", 0.0) / seconds,
            **{f"seconds/{step}": value for step, value in times.items()},
            "seconds/total": seconds,
        }
        finite = {name: value for name, value in record.items() if math.isfinite(value)}
        line: dict[str, object] = {
            "time": round(time.time(), 3),
            "version": version + 1,
            "batch": version,
            **finite,
        }
        if spans:
            line["spans"] = [[name, round(start, 4), round(end, 4)] for name, start, end in spans]
        self._write(line)
        self._rewards.append(measured["reward_mean"])
        self._record = record
        self._steps.append(finite)
        if self._live is None:
            self.console.print(self._line(version + 1), highlight=False, soft_wrap=True)
        self._show(f"version {version + 1} is ready")
        return finite

    def evaluated(self, version: int, step: int, result: dict[str, Any]) -> None:
        """Write the result of evaluating a version, which `step` steps made."""
        values = scalars(result)
        line = {"time": round(time.time(), 3), "version": version, "step": step, **values}
        self._write({**line, "eval/versions": result["versions"]})
        self.notify(f"evaluation of version {version}: {in_a_line(result)}")

    def fine_tuned(self, step: int, values: dict[str, float]) -> None:
        """Write the record of a step of supervised fine-tuning, and print it as a line."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._write({"time": round(time.time(), 3), "version": step, "step": step, **finite})
        shown = {"loss": "loss", "held_out_loss": "held out"}
        losses = "".join(f"  {label} {values[name]:.4f}" for name, label in shown.items() if name in values)
        self.notify(f"step {step}/{self.steps}  epoch {values['epoch']:.2f}{losses}")

    def evaluated_versions(self) -> set[int]:
        """Return the versions whose evaluation is in the file."""
        with (self.directory / "metrics.jsonl").open() as lines:
            # A line without an end was cut by a crash.
            complete = (line for line in lines if '"eval/versions"' in line and line.endswith("\n"))
            return {json.loads(line)["version"] for line in complete}

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._trackers:
            self._trackers.wake()

    @property
    def _is_terminal(self) -> bool:
        return self.console.is_terminal

    def _line(self, version: int) -> str:
        r = self._record
        return (
            f"step {r['step']:.0f}/{self.steps}  version {version}  reward {r['reward_mean']:.3f}  loss {r['loss']:+.4f}  "
            f"entropy {r.get('entropy', 0):.3f}  staleness {r['staleness_mean']:.2f}  "
            f"{r['episodes_per_second']:.1f} episodes/s  {r['seconds/total']:.1f} s"
        )

    def _show(self, state: str) -> None:
        self._state = state
        if self._live:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        caption = "  ".join(filter(None, (str(self.directory), self._watched_at)))
        table = Table(title=f"trainer: {self._state}", caption=caption, min_width=64)
        table.add_column("figure")
        table.add_column("of the last batch", justify="right")
        if state := last_line(self._agents):
            table.add_row("agents", Text(state))
        table.add_row("reward by version", sparkline(self._rewards))
        for label, name, form in _SHOWN:
            if name in self._record:
                table.add_row(label, form.format(self._record[name]))
        for name, value in sorted(self._record.items()):
            if name.startswith("masked_tokens/") and value:
                table.add_row(f"not trained: {name.removeprefix('masked_tokens/')}", f"{value:.0f}")
        if self._steps:
            table.add_row("", Text(limits.line(self._steps)))
        for phase, bar in phases(self._record):
            table.add_row(f"seconds: {phase}", bar)
        return table


def last_line(log: Path | None) -> str:
    """Return the last line of a log that is not blank; empty if there is none."""
    try:
        with open(log, "rb") if log is not None else io.BytesIO() as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def sparkline(values: list[float]) -> str:
    """Return the last `SPARK` values as bars between their least and greatest."""
    values = values[-SPARK:]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(_HEIGHTS[round((value - low) * scale)] for value in values)


def phases(record: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the phases that took a visible share of a step, in their order, each with its bar and its seconds."""
    total = record.get("seconds/total", 0.0)
    found = {
        name.removeprefix("seconds/"): value for name, value in record.items() if name.startswith("seconds/")
    }
    visible = {
        name: value for name, value in found.items() if name not in _NOT_PHASES and value > _LEAST * total
    }
    return [
        (name, f"{_bar(value / max(visible.values()))} {value:8.2f} s  {value / total:4.0%}")
        for name, value in visible.items()
    ]


def _bar(share: float) -> str:
    full, rest = divmod(round(share * BAR * 8), 8)
    return ("█" * full + _EIGHTHS[rest] * (rest > 0)).ljust(BAR)


def masked_warning(measured: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the reason and the text of a warning about a batch's metrics; None if there is nothing to warn of.

    A batch is warned of if no token of it is trained, or if truncated distributions mask most of them.
    """
    masked = {k.removeprefix(_MASKED): n for k, n in measured.items() if k.startswith(_MASKED) and n}
    if not masked or measured["equal_reward_groups"] == 1.0:
        return None
    trained = measured["trained_tokens"] + measured.get("skipped_tokens", 0.0)
    sampled = trained + sum(masked.values())
    reason = max(masked, key=masked.__getitem__)
    if masked.get("truncated", 0.0) > _MOST_TRUNCATED * sampled:
        reason = "truncated"
    elif trained:
        return None
    remedy = REMEDIES.get(reason)
    return reason, (
        f"warning: {masked[reason]:.0f} of the batch's {sampled:.0f} sampled tokens are not trained, because they are"
        f" {reason.upper()}{': ' if remedy else ''}{remedy or ''}"
    )
