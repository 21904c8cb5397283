"""Looking through episodes over HTTP: a list keeps its length while others open, and shows a project what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.harness.gateways import RunningGateway, gateway_of
from tests.harness.waiting import LONG_S

ROUTE = "/admin/v1/episodes"


async def test_a_pinned_list_keeps_its_length_and_positions(gateway: RunningGateway) -> None:
    opened = [(await gateway.open(f"task-{i}", mode="eval"))[0] for i in range(5)]
    first = (
        await gateway.http.get(ROUTE, params={"total": True, "calls": True, "limit": 2, "mode": "eval"})
    ).json()
    assert first["total"] == 5
    assert [row["episode_id"] for row in first["episodes"]] == opened[:2:-1]
    assert first["episodes"][0]["calls"] == 0
    await gateway.open("task-later", mode="eval")
    query = {"total": True, "limit": 10, "mode": "eval", "offset": 3, "pin": first["pin"]}
    rest = (await gateway.http.get(ROUTE, params=query)).json()
    assert rest["total"] == 5
    assert [row["episode_id"] for row in rest["episodes"]] == opened[1::-1]
    drawn = (await gateway.http.get(f"{ROUTE}/histogram", params={"pin": first["pin"], "bins": 4})).json()
    assert sum(drawn["counts"]) == 5
    assert (await gateway.http.get(f"{ROUTE}/facets")).json()["modes"] == {"eval": 6}


async def test_the_list_refuses_what_it_cannot_answer(gateway: RunningGateway) -> None:
    for params in ({"after": "1.0_ep-1", "offset": 1}, {"pin": "yesterday"}, {"reward_min": "nan"}):
        answer = await gateway.http.get(ROUTE, params=params)
        assert answer.status_code == 400, params
        assert answer.json()["error"]["message"]


async def test_a_project_looks_through_its_own_episodes_alone(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {
        "admin": {"key": "the-root-key-of-the-test"},
        "projects": {"team": {"key": "the-key-of-the-team", "models": ["theirs"]}},
    }
    models: dict[str, Any] = {"ours": {"aliases": ["*"]}, "theirs": {}}
    async with gateway_of(tiny_model, tmp_path, models, **overrides) as (gateway, _):
        await gateway.open("root-task", model="ours")
        await gateway.open("team-task", model="theirs")
        headers = {"Authorization": "Bearer the-key-of-the-team"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=LONG_S) as team:
            for params, total in (({}, 1), ({"text": "root"}, 0)):
                found = (await team.get(ROUTE, params={**params, "total": True})).json()
                assert found["total"] == len(found["episodes"]) == total, params
            drawn = (await team.get(f"{ROUTE}/histogram")).json()
            assert sum(drawn["counts"]) == 1
            for path in (ROUTE, f"{ROUTE}/facets"):
                for model in ("ours", "nobodys"):
                    answer = await team.get(path, params={"model": model})
                    assert answer.json()["error"]["message"] == f"no model {model!r}; there are: theirs"
