"""Looking through episodes over HTTP: a list keeps its length while others open, and shows a project what is its own."""

from __future__ import annotations

from tests.harness.gateways import RunningGateway

ROUTE = "/admin/v1/episodes"


async def test_a_pinned_list_keeps_its_length_and_positions(gateway: RunningGateway) -> None:
    opened = [(await gateway.open(f"task-{i}", mode="eval"))[0] for i in range(5)]
    first = (
        await gateway.http.get(ROUTE, params={"total": True, "calls": True, "limit": 2, "mode": "eval"})
    ).json()
    assert first["total"] == 5
    assert [row["episode_id"] for row in first["episodes"]] == opened[:2:-1]
    assert first["episodes"][0]["calls"] == 0
    later = (await gateway.http.get(ROUTE, params={"after": first["next"], "mode": "eval"})).json()
    assert [row["episode_id"] for row in later["episodes"]] == opened[2::-1]
    await gateway.open("task-later", mode="eval")
    query = {"total": True, "limit": 10, "mode": "eval", "offset": 3, "pin": first["pin"]}
    rest = (await gateway.http.get(ROUTE, params=query)).json()
    assert rest["total"] == 5
    assert [row["episode_id"] for row in rest["episodes"]] == opened[1::-1]
    drawn = (await gateway.http.get(f"{ROUTE}/histogram", params={"pin": first["pin"], "bins": 4})).json()
    assert sum(drawn["counts"]) == 5
    assert (await gateway.http.get(f"{ROUTE}/facets")).json()["modes"] == {"eval": 6}


async def test_the_list_refuses_what_it_cannot_serve(gateway: RunningGateway) -> None:
    for params in (
        {"after": "nonsense"},
        {"after": "1.0_ep-1", "offset": 1},
        {"pin": "yesterday"},
        {"reward_min": "nan"},
    ):
        response = await gateway.http.get(ROUTE, params=params)
        assert response.status_code == 400, params
        assert response.json()["error"]["message"]
