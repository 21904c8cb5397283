"""An exported file is what trainers were given, for programs that know nothing of headgate; and the commands that show things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from gateway.training_feed import export as exports
from headgate.arrow import FEED_SCHEMA, groups_from_arrow, groups_to_arrow
from headgate.types import Group
from tests.harness.gateway_command import gateway_command
from tests.harness.gateways import RunningGateway, run_gateway, settings_for


async def rewarded(gateway: RunningGateway, task: str, members: int = 2, calls: int = 2) -> None:
    opened = [await gateway.open(task, group_id=task, group_size=members) for _ in range(members)]
    for number, (episode, headers) in enumerate(opened):
        for call in range(calls):
            messages = [{"role": "user", "content": f"{task} {call}"}]
            assert (await gateway.chat(headers, messages=messages, max_tokens=6)).status_code == 200
        await gateway.admin.reward(episode, number / 4)


def toml(values: dict[str, Any], path: Path) -> Path:
    """A configuration file of settings whose tables hold plain values."""
    lines = []
    for section, given in values.items():
        for name, table in given.items() if section == "models" else [("", given)]:
            lines.append(f"[{section}.{name}]" if name else f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    path.write_text("\n".join(lines))
    return path


def same(exported: tuple[Group, ...], groups: list[Group]) -> bool:
    return groups_to_arrow(exported).equals(groups_to_arrow(groups))


@pytest.fixture
def values(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    return settings_for(tiny_model, tmp_path, staleness={"batch": 2, "eta": 2, "min_members": 1})


async def filled(gateway: RunningGateway, batches: int) -> list[list[Group]]:
    """Train some batches of two groups, and leave one group waiting and one episode open; return the batches as leased."""
    leased = []
    for batch in range(batches):
        for group in "ab":
            # the names repeat from the third batch on, as those of a driver's second epoch may
            await rewarded(gateway, f"{group}{batch % 2}", calls=1 + batch % 2)
        lease = await gateway.admin.lease("trainer")
        leased.append(list((await gateway.admin.leased_groups(lease)).groups))
        await gateway.admin.ack(lease, f"checkpoint-{batch}")
        await gateway.as_if_published(batch + 1)
    await rewarded(gateway, "waits")
    await gateway.open("open", group_id="open")
    evaluated, headers = await gateway.open("waits", mode="eval")
    await gateway.chat(headers, max_tokens=2)
    await gateway.admin.reward(evaluated, 1.0)
    return leased


async def test_the_file_holds_what_the_leases_gave(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "ROW_GROUP", 3)
    config, out = toml(values, tmp_path / "gateway.toml"), tmp_path / "deep" / "out.parquet"
    async with run_gateway(values) as gateway:
        leased = await filled(gateway, 4)
        (waiting,) = [
            g for g in (await gateway.admin.staleness())["batches"][0]["groups"] if g["state"] == "occupied"
        ]
        running = await gateway_command("export", "--config", config, "--out", out)
    assert running.exit_code == 0, running.output
    everything = [group for batch in leased for group in batch]
    table = pq.read_table(out)
    assert table.schema.metadata == FEED_SCHEMA.metadata
    assert table.cast(FEED_SCHEMA).num_rows == table.num_rows  # Parquet calls the items of a list `element`
    assert same(groups_from_arrow(table), everything)
    assert [g.group_id for g in everything[::4]] == ["a0", "a0"]
    assert pq.ParquetFile(out).num_row_groups == 3

    stopped = await gateway_command(
        "export", "--config", config, "--out", out, "--batches", "1:3", "--model", "demo"
    )
    assert stopped.exit_code == 0, stopped.output
    assert same(groups_from_arrow(pq.read_table(out)), leased[1] + leased[2])

    whole = await gateway_command("export", "--config", config, "--out", out, "--all")
    assert whole.output.endswith("9 groups\n")
    *trained, last = groups_from_arrow(pq.read_table(out))
    assert same(tuple(trained), everything)
    assert (last.group_id, last.batch, len(last.episodes)) == (waiting["group_id"], -1, 2) == ("waits", -1, 2)
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.parquet"]


async def test_pandas_reads_the_file(values: dict[str, Any], tmp_path: Path) -> None:
    config, out = toml(values, tmp_path / "gateway.toml"), tmp_path / "out.parquet"
    async with run_gateway(values) as gateway:
        (groups,) = await filled(gateway, 1)
    assert (await gateway_command("export", "--config", config, "--out", out)).exit_code == 0
    frame = pd.read_parquet(out)
    assert list(frame.columns) == FEED_SCHEMA.names
    nodes = [(g, e, n) for g in groups for e in g.episodes for n in e.nodes]
    assert len(frame) == len(nodes)
    for (group, episode, node), row in zip(nodes, frame.itertuples(), strict=True):
        assert (row.group_id, row.episode_id, row.reward) == (
            group.group_id,
            episode.episode_id,
            episode.reward,
        )
        assert (row.batch, row.node, row.parent) == (0, node.index, node.parent)
        assert row.ids.tolist() == node.ids.tolist()
        assert row.logprobs.tolist() == node.logprobs.tolist()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--batches", "3"], "two batch numbers"),
        (["--batches", "a:b"], "two batch numbers"),
        (["--batches", "1:2", "--all"], "--all exports every batch"),
        (["--format", "csv"], "the only format is parquet"),
        (["--model", "none"], "no trained model 'none'"),
        ([], "no database at"),
    ],
)
async def test_an_impossible_export_is_refused_with_the_reason(
    values: dict[str, Any], tmp_path: Path, argv: list[str], reason: str
) -> None:
    config, out = toml(values, tmp_path / "gateway.toml"), tmp_path / "out.parquet"
    result = await gateway_command("export", "--config", config, "--out", out, *argv)
    assert result.exit_code == 2
    assert reason in result.output
    assert not out.exists()
    assert not (tmp_path / "gateway.db").exists()


async def test_a_database_with_the_tables_of_another_build_is_refused(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config, out = toml(values, tmp_path / "gateway.toml"), tmp_path / "out.parquet"
    async with run_gateway(values) as gateway:
        await gateway.services.database.submit(
            lambda c: c.exec_driver_sql("UPDATE alembic_version SET version_num = '0002'")
        )
    result = await gateway_command("export", "--config", config, "--out", out)
    assert result.exit_code == 2
    assert "tables of revision 0002" in result.output
    assert not out.exists()


async def test_serving_a_ledger_under_other_settings_is_refused_in_one_line(
    values: dict[str, Any], tmp_path: Path
) -> None:
    async with run_gateway(values):
        pass
    changed = {**values, "staleness": {**values["staleness"], "eta": 5, "drop_equal": True}}
    result = await gateway_command("serve", "--config", toml(changed, tmp_path / "gateway.toml"))
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "drop_equal = False (now True), eta = 2 (now 5)" in result.output
    assert "[store] url" in result.output
