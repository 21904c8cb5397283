"""The reports of a run: `metrics.jsonl`, and a live table or plain lines on the terminal. Trackers follow the file (`senders`).

Owns the file under `[run] dir`; a resumed run appends to it. One record per trained buffer; its keys are the names in
`trainer.data.batch`, `trainer.learner` and `trainer.algorithms`. `staleness_tokens/S` counts the trained tokens of staleness S,
`masked_tokens/REASON` those that may not be trained, `skipped_tokens` those of groups without gradient, because their rewards are
equal. `reward_mean` and `equal_reward_groups` (a share) are of the batch, so of the groups that the gateway left in it;
`reward_mean_all`, `equal_reward_groups_all` and `dropped_groups/REASON` are of all that ended since the step before, before any
filter. `truncated_episodes` is the share of episodes with a call that was cut at its token limit, or whose context was full at
the end. `excluded_share` is the share of the episodes that ended since the step before and failed, `excluded/REASON` their
numbers; the rewards are of the others alone. A figure that is not finite is left out.
`skipped_steps` counts the newest steps in a row that were skipped, because their loss or gradient was not finite.
On a GPU, `memory_peak_gib` is the most that the first rank's tensors took so far, and `memory_reserved_gib` what its allocator
held.

An evaluation has a line of its own, with its `version`, the `step`, and figures named `eval/...` (`trainer.evaluation.figures`);
`eval/versions` counts its episodes by the versions that sampled them.

`seconds/...` are times: of each step (`lease`, `first_group` the wait for the first group, `stream` from then until the batch is
whole, `claim` the wait for nodes that were lent, with `onload`, the return of the weights to them (`offload`, when they left, was
before the step), `step`, `checkpoint`, `evaluation` the wait for the end of one, `publish` the copy of the weights and the wait
for the version before (all else of publishing is beside training), `ack`, `details` the writing of samples and tokens), and
across them `idle` (waiting for a lease, for groups, for nodes or for an evaluation) and `compute` (forward, backward, optimizer).
`idle_share` is idle over `seconds/total`, `blocked_share` publish over it. `spans` says when that was, as [name, start, end] in
seconds since 1970, with the name `idle` or `compute` where it is one of them: `scheduler plan --run` reads it.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainer.evaluation.figures import in_a_line, scalars
from trainer.report.bars import phases, sparkline
from trainer.report.senders import Senders

Span = tuple[str, float, float]
"""A block's name, start and end, in seconds since 1970."""
_TAIL = 4096
_SHOWN = (
    ("reward of the batch", "reward_mean", "{:.3f}"),
    ("reward of all episodes", "reward_mean_all", "{:.3f}"),
    ("episodes left out, because they failed", "excluded_share", "{:.1%}"),
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
    ("groups of equal rewards, of the batch", "equal_reward_groups", "{:.0%}"),
    ("groups of equal rewards, of all", "equal_reward_groups_all", "{:.0%}"),
    ("trained tokens", "trained_tokens", "{:.0f}"),
    ("episodes per second", "episodes_per_second", "{:.1f}"),
    ("idle", "idle_share", "{:.0%}"),
    ("blocked by publishing", "blocked_share", "{:.0%}"),
)


class Metrics:
    """The reporter of one run; use it with `with`."""

    def __init__(
        self,
        directory: Path,
        steps: int,
        console: Console | None = None,
        agents: Path | None = None,
        senders: Senders | None = None,
    ) -> None:
        """`agents`: where the driver of the agents says how they fare; its last line is shown. `senders`: those that follow."""
        self._agents = agents
        self._senders = senders
        self.directory = directory
        self.steps = steps
        self.console = console or Console(stderr=True)
        self._rewards: list[float] = []
        self._record: dict[str, float] = {}
        self._state = "starting"
        self._watched_at = ""

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = (self.directory / "metrics.jsonl").open("a", buffering=1)
        if self._senders:
            self._senders.start(self.say)
        self._live = Live(console=self.console, auto_refresh=False) if self._is_terminal else None
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        self._file.close()
        if self._senders:
            self._senders.finish(failed=isinstance(error, Exception))

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def watched_at(self, gateway: str) -> None:
        """Says where the run is shown: the console of the gateway at this URL."""
        self._watched_at = f"{gateway}/console"
        self.say(f"watch the run at {self._watched_at}")

    @property
    def has_steps(self) -> bool:
        """True once this process has trained a batch."""
        return bool(self._rewards)

    def waiting(self, version: int, steps: int) -> None:
        """The trainer is about to lease buffer `version`, after so many steps."""
        self._show(f"step {steps} of {self.steps}, version {version}: leasing")

    def collected(self, groups: int, size: int) -> None:
        """Shows how many groups of the leased buffer have arrived."""
        self._show(f"{groups} of {size} groups")

    def trained(
        self,
        version: int,
        measured: dict[str, float],
        times: dict[str, float],
        seconds: float,
        spans: Sequence[Span] = (),
    ) -> dict[str, float]:
        """Writes the record of the buffer `version`, which was trained and acknowledged; answers its finite figures."""
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
            "buffer": version,
            **finite,
        }
        if spans:
            line["spans"] = [[name, round(start, 4), round(end, 4)] for name, start, end in spans]
        self._write(line)
        self._rewards.append(measured["reward_mean"])
        self._record = record
        if self._live is None:
            self.console.print(self._line(version + 1), highlight=False, soft_wrap=True)
        self._show(f"version {version + 1} is made")
        return finite

    def evaluated(self, version: int, step: int, result: dict[str, Any]) -> None:
        """Writes the result of evaluating a version, which training came to after so many steps."""
        values = scalars(result)
        line = {"time": round(time.time(), 3), "version": version, "step": step, **values}
        self._write({**line, "eval/versions": result["versions"]})
        self.say(f"evaluation of version {version}: {in_a_line(result)}")

    def fine_tuned(self, step: int, values: dict[str, float]) -> None:
        """Writes the record of a step of supervised fine-tuning, and says it in a line."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._write({"time": round(time.time(), 3), "version": step, "step": step, **finite})
        shown = {"loss": "loss", "held_out_loss": "held out"}
        losses = "".join(f"  {label} {values[name]:.4f}" for name, label in shown.items() if name in values)
        self.say(f"step {step}/{self.steps}  epoch {values['epoch']:.2f}{losses}")

    def evaluated_versions(self) -> set[int]:
        """Returns the versions whose evaluation is written down."""
        with (self.directory / "metrics.jsonl").open() as lines:
            # A line without an end was cut by a crash.
            whole = (line for line in lines if '"eval/versions"' in line and line.endswith("\n"))
            return {json.loads(line)["version"] for line in whole}

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._senders:
            self._senders.wake()

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
        if said := last_line(self._agents):
            table.add_row("agents", Text(said))
        table.add_row("reward by version", sparkline(self._rewards))
        for label, name, form in _SHOWN:
            if name in self._record:
                table.add_row(label, form.format(self._record[name]))
        for name, value in sorted(self._record.items()):
            if name.startswith("masked_tokens/") and value:
                table.add_row(f"not trained: {name.removeprefix('masked_tokens/')}", f"{value:.0f}")
        for phase, bar in phases(self._record):
            table.add_row(f"seconds: {phase}", bar)
        return table


def last_line(log: Path | None) -> str:
    """Returns the last line of a log that is not blank; empty if there is none yet."""
    try:
        with open(log, "rb") if log is not None else io.BytesIO() as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
