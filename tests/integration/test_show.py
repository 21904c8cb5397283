"""`gateway status`, `staleness` and `episodes list|show|why` show what a running gateway has recorded."""

from __future__ import annotations

import json

import pytest

from headgate.processes.ports import free_port
from tests.harness.gateway_command import gateway_command
from tests.harness.gateways import RunningGateway


async def test_a_run_and_its_episodes_are_shown(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("[task]")
    response = (await gateway.chat(headers, max_tokens=5)).json()
    where = ("--gateway", gateway.url)

    status = await gateway_command("status", *where)
    assert status.exit_code == 0, status.output
    assert "version 0 is live" in status.output
    (engine,) = [line for line in status.output.splitlines() if gateway.slot.name in line]
    assert engine.replace("│", " ").split()[2:] == ["open", "0", "0", "0"]
    assert "1 more are on their way" in status.output

    listed = await gateway_command("episodes", "list", "--state", "open", *where)
    (row,) = [line for line in listed.output.splitlines() if episode in line]
    assert row.split()[1:4] == ["train", "0", "open"] and "[task]" in row
    none = await gateway_command("episodes", "list", "--state", "closed", *where)
    assert none.output == "no episodes\n"

    shown = await gateway_command("episodes", "show", episode, *where)
    assert "5 tokens sampled by version 0, mean log-probability -" in shown.output
    assert response["choices"][0]["message"]["content"] in shown.output
    raw = await gateway_command("episodes", "show", episode, "--json", *where)
    assert json.loads(raw.output)["nodes"][1]["call_id"] == json.loads(raw.output)["calls"][0]["call_id"]


async def test_an_unknown_episode_is_reported(gateway: RunningGateway) -> None:
    result = await gateway_command("episodes", "show", "ep-unknown", "--gateway", gateway.url)
    assert result.exit_code == 1 and "ep-unknown" in result.output


async def test_the_tables_are_printed_from_a_running_gateway(gateway: RunningGateway) -> None:
    for _ in range(2):
        rewarded, headers = await gateway.open("[a]", group_id="[a]", group_size=2)
        assert (await gateway.chat(headers, max_tokens=5)).status_code == 200
        await gateway.admin.reward(rewarded, 1.0)
    shown = await gateway_command("staleness", "--gateway", gateway.url)
    assert "all batches from 1 to 1 are empty" in shown.output
    episode, _ = await gateway.open("b", group_id="b", group_size=2)
    shown = await gateway_command("staleness", "--gateway", gateway.url)
    assert shown.exit_code == 0, shown.output
    assert "[a] (version 0, occupied): 2 rewarded of 2" in shown.output
    assert "b (version 0, reserved): 1 open of 2" in shown.output
    await gateway.admin.abandon(episode, "crashed")
    shown = await gateway_command("episodes", "why", episode, "--gateway", gateway.url)
    assert shown.exit_code == 0, shown.output
    assert shown.output.endswith("verdict: not trained, because crashed\n")
    assert "admitted to batch 1" in shown.output
    unknown = await gateway_command("episodes", "why", "ep-unknown", "--gateway", gateway.url)
    assert unknown.exit_code == 1
    assert "no decision is recorded for an episode 'ep-unknown'" in unknown.output


@pytest.mark.parametrize("command", [("staleness",), ("status", "--watch")])
async def test_an_unreachable_gateway_is_reported(command: tuple[str, ...]) -> None:
    port = free_port()
    result = await gateway_command(*command, "--gateway", f"http://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert f"no gateway responds at http://127.0.0.1:{port}" in result.output
