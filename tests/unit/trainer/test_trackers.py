"""Trackers get each step once, whatever becomes of them or of the trainer; read back with readers of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headgate.extras import install_command
from tests.harness.forks import run_to_end
from tests.harness.wandb_files import history, runs
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.report import tracking
from trainer.report.files import samples_file
from trainer.report.metrics import Metrics
from trainer.report.samples import Sample, episodes_of
from trainer.report.samples import write as write_samples
from trainer.report.trackers import check
from trainer.report.tracking import Bookmark, Follower, Trackers

KEY, PASSWORD = "the-admin-key", "the-password"


def settings_of(directory: Path, report: dict[str, Any]) -> Settings:
    return Settings.parse({
        "run": {"dir": directory, "steps": 9},
        "gateway": {"url": f"http://user:{PASSWORD}@127.0.0.1:1", "admin_key": KEY},
        "model": {"path": directory},
        "optimizer": {"lr": 1e-3},
        "report": report,
    })  # fmt: skip


def measured(step: int) -> dict[str, float]:
    return {
        "step": float(step), "reward_mean": step / 10, "loss": -step / 8, "staleness_mean": 0.0, "episodes": 8.0,
        "pass@1": step / 7, "broken": float("nan"),
    }  # fmt: skip


SAMPLE = Sample(
    "g1", "t1", "e1", 1, "What is 2 + 2?", "```4```", 1.0, None, 0.5, "2-3", "stop", "late (1 of 3)", 3
)

EPISODE = {
    "task_id": "t1", "group_id": "g1", "episode_id": "e1", "reward": 1.0, "reason": "late (1 of 3)", "versions": "2-3",
    "calls": 2, "tokens": 6, "finish_reason": "stop", "text": "```4```",
}  # fmt: skip


def train(settings: Settings, versions: range) -> str:
    """A run of the trainer without training, with a sample of its second step; returns its output."""
    console = Console(file=io.StringIO(), record=True, width=300)
    with Metrics(settings.run.dir, 9, console, trackers=Trackers(settings)) as metrics:
        for version in versions:
            if version == 1:
                write_samples(samples_file(settings.run.dir, 2), [SAMPLE, replace(SAMPLE, turn=2)])
            metrics.trained(version, measured(version + 1), {"idle": 0.5}, 1.0)
    return console.export_text()


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two steps in its first start and one in its second, with all trackers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr(tracking, "FINISH_S", 300.0)  # the trackers' packages are imported in it
        return trained_twice(tmp_path_factory)


def trained_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "frozen"
    settings = settings_of(directory, {"trackers": ["tensorboard", "wandb", "mlflow"]})
    for versions in (range(2), range(2, 3)):
        output = train(settings, versions)
        assert "warning" not in output
    return directory


def test_wandb_has_each_step_once_in_one_run(two_starts: Path) -> None:
    (first, before), (second, after) = runs(two_starts / "wandb")
    assert first == second
    rows = [*history(before), *history(after)]
    assert [row["_step"] for row in rows] == [row["version"] for row in rows] == [1, 2, 3]
    for step, row in enumerate(rows, 1):
        assert (row["loss"], row["pass@1"], row["idle_share"]) == (-step / 8, step / 7, 0.5)
        assert "broken" not in row


def test_mlflow_has_each_step_once_in_one_run(two_starts: Path) -> None:
    """Read as any SQL client would: MLflow's own tables."""
    with sqlite3.connect(two_starts / "mlflow.db") as database:
        ((run, name, status),) = database.execute("select run_uuid, name, status from runs").fetchall()
        assert (name, status) == ("frozen", "FINISHED")
        assert database.execute("select name from experiments").fetchall()[-1] == ("headgate",)
        rows = database.execute(
            "select step, value from metrics where key = 'pass_1' and run_uuid = ? order by step", [run]
        ).fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
    assert rows == [(step, step / 7) for step in (1, 2, 3)]
    assert (params["optimizer.lr"], params["algorithm.type"]) == ("0.001", "grpo")


def test_tensorboard_has_each_step_once(two_starts: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(two_starts / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(step, -step / 8) for step in (1, 2, 3)]


def test_wandb_has_the_samples_of_a_step_as_a_table(two_starts: Path) -> None:
    ((_, file), _) = runs(two_starts / "wandb")
    (row,) = (row for row in history(file) if "samples" in row or "samples.path" in row)
    assert row["version"] == 2
    (table,) = two_starts.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    assert_is_the_sample(json.loads(table.read_text()))
    (table,) = two_starts.glob("wandb/offline-run-*/files/media/table/episodes_*.table.json")
    assert rows_of(json.loads(table.read_text())) == [EPISODE]


def test_mlflow_has_the_samples_of_a_step_as_a_table(two_starts: Path, tmp_path: Path) -> None:
    """Read by MLflow's own reader of tables."""
    assert run_to_end(mlflow_reads, f"sqlite:///{two_starts}/mlflow.db", tmp_path) == 0
    samples, episodes = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("samples", "episodes")
    )
    assert_is_the_sample(samples)
    assert rows_of(episodes) == [EPISODE]


def mlflow_reads(uri: str, folder: Path) -> None:
    """Writes each table of the second step to a file: the reader keeps state in the process that imports it."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow

    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("headgate").experiment_id
    for name in ("samples", "episodes"):
        table = client.load_table(experiment, f"{name}/step-000002.json")
        (folder / f"{name}.json").write_text(table.to_json(orient="split"))


def rows_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def assert_is_the_sample(table: dict[str, Any]) -> None:
    assert rows_of(table) == [asdict(SAMPLE), asdict(replace(SAMPLE, turn=2))]


def test_tensorboard_has_the_samples_of_a_step_as_text(two_starts: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(two_starts / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples")
    assert event.step == 2
    text = event.tensor_proto.string_val[0].decode()
    assert text.count("What is 2 + 2?") == text.count("not trained: late (1 of 3)") == 2
    (event,) = events.Tensors("episodes")
    assert event.tensor_proto.string_val[0].decode().splitlines()[2].startswith("| t1 | g1 | e1 | 1.0 |")


def test_no_secret_is_written_anywhere(two_starts: Path) -> None:
    files = [path for path in two_starts.rglob("*") if path.is_file()]
    assert any(b"127.0.0.1:1" in path.read_bytes() for path in files), "the configuration is written"
    for path in files:
        for secret in (KEY, PASSWORD):
            assert secret.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_hangs_stops_neither_training_nor_its_end(tracker: str, tmp_path: Path) -> None:
    """Its server accepts connections and never responds; `wandb` by itself would delay the end of the process by 90 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run_to_end(train_with_a_stuck_tracker, tmp_path, tracker, url) == 7
    warning = (
        f"warning: {tracker}: it has not received all figures; the next start of this run sends the rest"
    )
    assert (tmp_path / "output").read_text().count(warning) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def train_with_a_stuck_tracker(directory: Path, tracker: str, url: str) -> None:
    """Exits with status 7, if nothing delays that."""
    os.environ |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "MLFLOW_TRACKING_URI": url}
    tracking.FINISH_S = 0.2
    (directory / "output").write_text(train(settings_of(directory, {"trackers": [tracker]}), range(2)))
    tracking.exit_if_stuck(7)


@pytest.mark.long
def test_a_tracker_that_was_unavailable_gets_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start of two has no key for W&B; its second is offline."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    output = train(settings_of(tmp_path / "run", {"trackers": ["wandb"]}), range(2))
    assert output.count("no API key of W&B: set WANDB_API_KEY, or WANDB_MODE=offline") == 1
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "warning" not in train(settings_of(tmp_path / "run", {"trackers": ["wandb"]}), range(2, 3))
    ((_, file),) = runs(tmp_path / "run" / "wandb")
    assert [row["version"] for row in history(file)] == [1, 2, 3]


def train_and_die(directory: Path) -> None:
    """Two steps, then SIGKILL."""
    settings = settings_of(directory, {})
    with Metrics(settings.run.dir, 9, trackers=Trackers(settings)) as metrics:
        for version in range(2):
            metrics.trained(version, measured(version + 1), {"idle": 0.5}, 1.0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_figures_of_a_killed_trainer_arrive_once(tmp_path: Path) -> None:
    assert run_to_end(train_and_die, tmp_path) == -signal.SIGKILL
    assert "warning" not in train(settings_of(tmp_path, {}), range(2, 3))
    test_tensorboard_has_each_step_once(tmp_path)


class Recording:
    """A tracker in memory, which fails a given number of times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.taken: list[tuple[int, Mapping[str, float]]] = []
        self.opened: list[str | None] = []
        self.closed: list[bool] = []

    def open(self, run: str | None) -> str:
        self.opened.append(run)
        return run or "its own id"

    def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError(f"https://me:{PASSWORD}@host is away")
        self.taken.append((step, figures))

    def samples(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        raise AssertionError("there are none")

    def episodes(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        raise AssertionError("there are none")

    def close(self, failed: bool) -> None:
        self.closed.append(failed)


def follower_of(tracker: Recording, folder: Path, warned: list[str]) -> Follower:
    Bookmark.begin(folder / "bookmark.json", 0)
    return Follower(tracker, folder / "metrics.jsonl", folder / "bookmark.json", warned.append)


def write(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def line(version: int, **figures: Any) -> dict[str, Any]:
    return {"time": 1.5, "version": version, "batch": version - 1, "spans": [["idle", 1, 2]]} | figures


def test_a_tracker_that_fails_warns_once_and_gets_everything_in_order(tmp_path: Path) -> None:
    tracker, warned = Recording(failures=3), []
    write(tmp_path, line(1, loss=1.0), line(2, loss=2.0))
    follower_of(tracker, tmp_path, warned).follow([None, None, False])
    assert tracker.taken == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert warned == ["ConnectionError: https://***@host is away; figures are sent again later"]
    assert (tracker.opened, tracker.closed) == ([None], [False])


def test_what_was_not_sent_is_sent_by_the_next_start(tmp_path: Path) -> None:
    write(tmp_path, line(1), line(2))
    follower_of(Recording(failures=9), tmp_path, []).follow([True])
    tracker = Recording()
    follower_of(tracker, tmp_path, []).follow([])
    assert [step for step, _ in tracker.taken] == [1, 2]
    assert (tracker.opened, tracker.closed) == (["its own id"], [True])


def test_what_a_killed_trainer_had_begun_to_send_is_not_sent_again(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Dying(Recording):
        def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
            super().figures(step, at, figures)
            if step == 2:
                raise Killed

    write(tmp_path, line(1), line(2), line(3))
    with pytest.raises(Killed):
        follower_of(Dying(), tmp_path, []).follow([])
    tracker = Recording()
    follower_of(tracker, tmp_path, []).follow([])
    assert [step for step, _ in tracker.taken] == [3]


def test_steps_never_go_backwards_and_half_a_line_waits(tmp_path: Path) -> None:
    """An evaluation has a line with the version of the step before; the line of a reset run does not count."""
    tracker = Recording()
    write(tmp_path, line(2), {"time": 2.0, "version": 2, "eval/reward": 0.5}, line(1), line(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(4, loss=1)))
        file.flush()

        def commands() -> Iterator[bool | None]:
            yield None
            assert [step for step, _ in tracker.taken] == [2, 2, 3]
            file.write("\n")
            file.flush()
            yield False

        follower_of(tracker, tmp_path, []).follow(commands())
    assert tracker.taken[1:] == [(2, {"eval/reward": 0.5}), (3, {}), (4, {"loss": 1.0})]


def test_a_tracker_begins_with_the_run_that_turns_it_on(tmp_path: Path) -> None:
    train(settings_of(tmp_path, {"trackers": []}), range(1))
    train(settings_of(tmp_path, {}), range(1, 3))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [2, 3]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as refused:
        check(["tensorboard", name])
    assert str(refused.value) == f"[report] trackers: {name} is not installed: {install_command('trackers')}"


def test_a_row_of_an_episode_sums_its_calls_and_bounds_its_text() -> None:
    calls = [
        asdict(replace(SAMPLE, episode_id="a", versions="3", mask_reason="", reply="x" * 5_000)),
        asdict(replace(SAMPLE, episode_id="b", versions="4-11", mask_reason="")),
        asdict(replace(SAMPLE, episode_id="b", versions="9", turn=2, mask_reason="", finish_reason="length")),
    ]
    first, second = episodes_of(calls)
    assert (first["reason"], first["calls"], len(first["text"])) == ("trained", 1, 300)
    assert (second["versions"], second["calls"], second["tokens"], second["finish_reason"]) == (
        "4-11",
        2,
        6,
        "length",
    )
