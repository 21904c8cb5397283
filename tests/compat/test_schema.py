"""schemathesis on our own OpenAPI schema, every operation, the admin API too: no server error, and every request is served.

`HEADGATE_COMPAT_EXAMPLES` sets how many examples of each kind (valid, invalid) an operation gets: few in CI, more in
`make test-compat`. The seed is fixed. The gateway is one of its own, because some operations take engines away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode

from tests.compat.clients.gate import MODEL, Episode, Gate
from tests.compat.stage import stage

EXAMPLES = int(os.environ.get("HEADGATE_COMPAT_EXAMPLES", "2"))
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway of this file's own."""
    with stage(tmp_path_factory.mktemp("schema") / "stage") as there:
        yield Gate(there.gateway, there.engine)


@pytest.mark.filterwarnings("ignore")
def test_no_operation_fails_for_any_input(gate: Gate) -> None:
    schema = schemathesis.openapi.from_url(f"{gate.gateway}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 30
    failed: list[str] = []
    with httpx.Client(timeout=60) as http:
        for operation in operations:
            for mode in MODES if can_be_invalid(operation) else MODES[:1]:
                try_examples(operation, mode, gate, http, failed)
    assert not failed, "\n".join(failed)


def can_be_invalid(operation: Any) -> bool:
    """An operation has invalid inputs unless all it takes is text in its path: any text is valid there."""
    in_path = (it.definition["schema"]["type"] for it in operation.path_parameters if it.name != "episode_id")
    in_query = any(it.name != "wait" for it in operation.query)
    return bool(operation.body or operation.headers) or in_query or any(kind != "string" for kind in in_path)


def try_examples(
    operation: Any, mode: GenerationMode, gate: Gate, http: httpx.Client, failed: list[str]
) -> None:
    """Some examples of one operation, in an episode of its own, which its path names where it names one."""
    episode = gate.open("schema")
    fixed = {
        key: {"episode_id": episode.id} for key in ["path_parameters"] if "{episode_id}" in operation.path
    }
    if any(parameter.name == "wait" for parameter in operation.query):
        fixed["query"] = {"wait": 0}  # a long wait is not an error

    @seeded(1)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(case=operation.as_strategy(mode, **fixed))
    def one(case: Any) -> None:
        response = sent(case, gate, episode, http)
        if response is not None and response.status_code >= 500:
            what = f"{response.status_code} {operation.method.upper()} {operation.path} {case.body!r}"
            failed.append(f"{what}: {response.text[:200]}")

    one()


def sent(case: Any, gate: Gate, episode: Episode, http: httpx.Client) -> httpx.Response | None:
    """The response to an example; None if no client can send it."""
    kwargs = case.as_transport_kwargs(base_url=gate.gateway)
    headers = {**kwargs.pop("headers", {}), "authorization": f"Bearer {episode.api_key}"}
    kwargs.pop("cookies", None)
    for given_values in (kwargs.get("json"), kwargs.get("params")):
        if isinstance(given_values, dict) and isinstance(given_values.get("model"), str):
            given_values["model"] = MODEL  # with a random name nothing behind it would be reached
    try:
        return http.request(headers=headers, **kwargs)
    except (httpx.InvalidURL, UnicodeEncodeError, ValueError):
        return None


@pytest.mark.parametrize("text", ['{"x": 99999999999999999999}', '{"x": "\\ud800"}'], ids=["integer", "half"])
def test_metadata_that_the_store_cannot_hold_is_refused(gate: Gate, text: str) -> None:
    """The ledger once accepted it and the store did not, and the gateway was of no use until its restart."""
    body = '{"task_id": "task", "metadata": ' + text + "}"
    headers = {"content-type": "application/json"}
    for _ in range(2):
        response = httpx.post(f"{gate.gateway}/admin/v1/episodes", content=body, headers=headers, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("path", ["weights/{}", "batches/{}/groups", "leases/one/groups?fence={}"])
def test_a_number_that_the_store_cannot_hold_is_refused(gate: Gate, path: str) -> None:
    with httpx.Client(base_url=f"{gate.gateway}/admin/v1/", timeout=60) as http:
        assert http.get(path.format(2**63)).status_code == 400
        assert http.get(path.format(2**53 - 1)).status_code in (404, 410)
