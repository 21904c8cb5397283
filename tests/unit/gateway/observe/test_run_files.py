"""Which files of a run can be read: its logs and no others, a bounded end of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.observe.run_files import RunFiles, missing_logs
from headgate.used_settings import write_used

SECRET = "not-for-the-console"


def settings_of(folder: Path, **engine: Any) -> Settings:
    values = {
        "models": {"a": {"path": "."}},
        "engine": {"launch": "fake", "log": str(folder / "engine.log"), **engine},
    }
    return Settings.parse(values, environment=False)


def names(files: RunFiles) -> list[str]:
    return [log.path.name for log in files.logs()]


def test_links_folders_and_other_files_are_not_logs(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside.log"
    (run / "folder.log").mkdir(parents=True)
    outside.write_text(SECRET)
    (run / "link.log").symlink_to(outside)
    (run / "store.db").write_text(SECRET)
    (run / "gateway.log").write_text("ready\n")
    files = RunFiles.of([run], [], None)
    assert names(files) == ["gateway.log"]
    for name in (run / "link.log", run / "store.db", outside, run / "../outside.log"):
        assert files.tail(str(name), 1024) is None
    found = files.tail(str(run / "gateway.log"), 1024)
    assert found is not None
    assert found[1] == "ready\n"


def test_a_reported_folder_counts_only_if_a_trainer_wrote_there(tmp_path: Path) -> None:
    for name in ("trainer", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollout.log").write_text("x")
    (tmp_path / "trainer" / "metrics.jsonl").touch()
    files = RunFiles.of([], [tmp_path / "trainer", tmp_path / "other", tmp_path / "none"], None)
    assert files.folders == (tmp_path / "trainer",)


def test_the_logs_of_engines_are_those_of_the_models(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("engine-a-0.log", "engine-a-1.log", "engine-b-0.log", "other.log"):
        (tmp_path / name).touch()
    files = RunFiles.of([tmp_path / "run"], [], settings_of(tmp_path))
    assert names(files) == ["engine-a-0.log", "engine-a-1.log"]
    assert [one["program"] for one in missing_logs(files.logs(), files)] == ["gateway", "trainer"]


def test_an_end_has_whole_lines_and_nothing_for_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_bytes(b"0123456789\n" * 10 + b"\x1b[31mred\x1b[0m \xff\n")
    files = RunFiles.of([tmp_path], [], None)
    found = files.tail(str(log), 30)
    assert found is not None
    assert found[1] == "0123456789\nred \ufffd\n"
    log.write_bytes(b"x" * 50)
    found = files.tail(str(log), 30)
    assert found is not None
    assert found[1] == "x" * 30


@pytest.mark.parametrize("text", ["{", "[]", '{"at": 1}'])
def test_settings_that_are_missing_or_broken_have_the_reason(tmp_path: Path, text: str) -> None:
    files = RunFiles.of([tmp_path], [], None)
    found, why = files.settings_of("trainer")
    assert found is None
    assert f"looked in {tmp_path}" in why
    write_used(tmp_path, "trainer", settings_of(tmp_path))
    found, why = files.settings_of("trainer")
    assert found is not None
    assert why == ""
    (tmp_path / "trainer-settings.json").write_text(text)
    found, why = files.settings_of("trainer")
    assert found is None
    assert "cannot be read" in why
