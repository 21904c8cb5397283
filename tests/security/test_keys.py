"""Keys: none is kept, shown or logged, all are compared in constant time, and each reaches what it is for."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

import headgate.keys
from gateway.config.settings import ConfigError, Settings
from gateway.episodes.callers import Caller
from tests.harness.gateways import settings_for
from tests.security.tenants import ROOT, UPSTREAM_KEY, Tenants, agent_key_of, bearer, key_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {
    "root": ROOT,
    "upstream": UPSTREAM_KEY,
    **{f"project {name}": key_of(name) for name in ("ann", "bob")},
    **{f"agent {name}": agent_key_of(name) for name in ("ann", "bob")},
}
WORK = "*"


async def test_keys_are_hashes_at_rest(stage: Tenants) -> None:
    """No key is in any file that the gateway wrote: database, write-ahead log, recording."""
    await stage.gateway.chat(bearer(agent_key_of("ann")), model="common", max_tokens=4)
    folder = stage.gateway.settings.control.recording
    assert folder is not None
    keys = {**KEYS, "episode": stage.ann.episode_key}
    files = [file for file in folder.parent.rglob(WORK) if file.is_file()]
    assert {"gateway.db", "control.jsonl"} <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        for name, key in keys.items():
            assert key.encode() not in content, (name, file)

    def hashes(connection: Connection) -> list[str]:
        return list(connection.execute(text("select key_hash from episodes")).scalars())

    assert all(
        len(found) == 64 or found.startswith("call:")
        for found in await stage.gateway.services.database.read(hashes)
    )


async def test_no_response_and_no_metric_holds_a_key(stage: Tenants) -> None:
    keys = {**KEYS, "episode": stage.ann.episode_key}
    for path in ("/metrics", "/healthz", "/readyz", "/openapi.json"):
        response = (await stage.gateway.http.get(path)).text
        assert not [name for name, key in keys.items() if key in response], path
    for path in (
        "/status",
        "/episodes",
        "/engines",
        "/calls",
        "/staleness",
        f"/episodes/{stage.ann.names['episode_id']}",
    ):
        response = (await stage.gateway.http.get(f"/admin/v1{path}", headers=bearer(ROOT))).text
        assert not [name for name, key in keys.items() if key in response], path
    for key in keys.values():
        for path in ("/admin/v1/status", "/v1/responses/resp_x"):
            wrong = await stage.gateway.http.get(path, headers=bearer(key + "x"))
            assert wrong.status_code == 401 and key not in wrong.text


async def test_settings_show_no_key(tiny_model: Path, tmp_path: Path) -> None:
    """Settings end up in tracebacks and in what people paste."""
    values = settings_for(
        tiny_model,
        tmp_path,
        admin={"key": ROOT},
        projects={"p": {"key": key_of("p"), "models": ["demo"]}},
        agents={"a": {"key": agent_key_of("a")}},
        models={"oracle": {"train": False, "upstream": {"url": "http://127.0.0.1:1", "key": UPSTREAM_KEY}}},
        bus={"url": "redis://:the-bus-password@127.0.0.1:1"},
        engine={"env": {"HF_TOKEN": "the-token"}, "args": ["--api-key", "the-engines-key"]},
    )
    values["store"]["url"] = "postgresql://u:the-store-password@127.0.0.1/x"
    settings = Settings.parse(
        {**values, "cluster": {"key": "the-cluster-key-itself", "url": "http://127.0.0.1:1"}}
    )
    caller = Caller("hg-the-episode-key", "demo", None)
    for shown in (
        repr(settings),
        str(settings),
        repr(settings.store),
        repr(settings.engine_of("demo")),
        repr(caller),
    ):
        for secret in (
            *(ROOT, key_of("p"), agent_key_of("a"), UPSTREAM_KEY, "the-bus-password", "the-token"),
            *("the-engines-key", "the-store-password", "the-cluster-key-itself", "hg-the-episode-key"),
        ):
            assert secret not in shown


async def test_errors_of_a_configuration_quote_no_key(tiny_model: Path, tmp_path: Path) -> None:
    for section in (
        {"agents": {"a": {"key": "too-short-secret"[:15]}}},
        {"admin": {"key": ROOT}, "projects": {"p": {"key": "too-short-secret"[:15], "models": ["demo"]}}},
        {"admin": {"key": ["too-short-secret"]}},
        {"cluster": {"key": "too-short-secret"[:15], "url": "ftp://too-short-secret"}},
        {"agents": {"a": {"key": ROOT}, "b": {"key": ROOT}}},
    ):
        with pytest.raises(ConfigError) as error:
            Settings.parse(settings_for(tiny_model, tmp_path, **section))
        assert "too-short" not in str(error.value) and ROOT not in str(error.value)


async def test_admin_keys_are_compared_in_constant_time(
    stage: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents' keys too: each is compared with every key, as hashes of one length, whether it matches early, late or never."""
    compared: list[tuple[bytes, bytes]] = []

    def comparing(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return hmac.compare_digest(given, known)

    class Counting:
        compare_digest = staticmethod(comparing)

    monkeypatch.setattr(headgate.keys, "hmac", Counting)
    counts = []
    for key in (ROOT, key_of("ann"), key_of("bob"), "wrong", "", ROOT[:-1]):
        compared.clear()
        response = await stage.gateway.http.get("/admin/v1/engines", headers=bearer(key) if key else {})
        assert response.status_code == (200 if key in KEYS.values() else 401)
        assert all(len(given) == len(known) == 32 for given, known in compared)
        counts.append(len(compared))
    assert set(counts) == {3}
    for key in (agent_key_of("ann"), agent_key_of("bob"), "wrong", ROOT):
        compared.clear()
        response = await stage.gateway.http.get("/v1/responses/none", headers=bearer(key))
        assert response.status_code == (401 if key in ("wrong", ROOT) else 404)
        assert all(len(given) == len(known) == 32 for given, known in compared)
        # A key that no agent has may be an administrator's, which is a mistake with a sentence of its own.
        assert len(compared) == (5 if key in ("wrong", ROOT) else 2)


async def test_keys_open_what_they_are_for_alone(stage: Tenants) -> None:
    """No key of one kind is one of another kind, and the refusal of a wrong one shows nothing of others."""
    http, body = stage.gateway.http, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    refusals = set()
    for key in (stage.ann.episode_key, agent_key_of("ann"), UPSTREAM_KEY, "wrong", "é"):
        response = await http.get("/admin/v1/status", headers={"Authorization": f"Bearer {key}".encode()})
        refusals.add((response.status_code, response.text))
    assert len(refusals) == 1 and refusals.pop()[0] == 401
    for key in (UPSTREAM_KEY, "hg-wrong"):
        response = await http.post("/v1/chat/completions", headers=bearer(key), json=body)
        refusals.add((response.status_code, response.text))
    assert len(refusals) == 1 and refusals.pop()[0] == 401
    for key in (ROOT, key_of("ann")):
        response = await http.post("/v1/chat/completions", headers=bearer(key), json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await http.get("/admin/v1/status")).status_code == 401
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 401


async def test_an_episodes_key_reaches_its_episode_alone(stage: Tenants) -> None:
    """On every route of agents, by prefix and by header too: another's episode is not there."""
    http, ann, bob = stage.gateway.http, stage.ann, stage.bob
    messages = [{"role": "user", "content": "hi"}]
    asks = [
        ("POST", "/v1/chat/completions", {"model": "bob-policy", "messages": messages}),
        ("POST", "/v1/completions", {"model": "bob-policy", "prompt": "hi"}),
        ("POST", "/v1/responses", {"model": "bob-policy", "input": "hi"}),
        ("POST", "/v1/responses/input_tokens", {"input": "hi"}),
        ("POST", "/v1/messages", {"model": "bob-policy", "messages": messages, "max_tokens": 4}),
        ("POST", "/v1/messages/count_tokens", {"model": "bob-policy", "messages": messages}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/bob-policy", None),
    ]
    for method, path, body in asks:
        for key in (bob.episode_key, agent_key_of("bob")):
            found = []
            for episode in (ann.names["episode_id"], stage.unknown["episode_id"]):
                prefixed = await http.request(method, f"/e/{episode}{path}", headers=bearer(key), json=body)
                named = {**bearer(key), "x-headgate-episode": episode}
                headed = await http.request(method, path, headers=named, json=body)
                found += [(a.status_code, a.text.replace(episode, "ID")) for a in (prefixed, headed)]
            assert len(set(found)) == 1 and found[0][0] == 404, (path, found)


async def test_stored_responses_are_their_episodes(stage: Tenants) -> None:
    http, ann, bob, unknown = stage.gateway.http, stage.ann, stage.bob, stage.unknown
    asks = [
        ("GET", "/v1/responses/{response_id}", None),
        ("GET", "/v1/responses/{response_id}/input_items", None),
        ("POST", "/v1/responses/{response_id}/cancel", {}),
        ("DELETE", "/v1/responses/{response_id}", None),
        (
            "POST",
            "/v1/responses",
            {"model": "bob-policy", "input": "x", "previous_response_id": "{response_id}"},
        ),
        ("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": "{response_id}"}),
    ]
    for method, path, body in asks:
        for key in (bob.episode_key, agent_key_of("bob")):
            found = []
            for names in (ann.names, unknown):
                given = body and {k: v.format(**names) if isinstance(v, str) else v for k, v in body.items()}
                response = await http.request(method, path.format(**names), headers=bearer(key), json=given)
                shown = response.text.replace(names["response_id"], "ID")
                found.append((response.status_code, shown))
            assert found[0] == found[1] and found[0][0] == 404, (path, found)
    own = await http.get("/v1/responses/{response_id}".format(**ann.names), headers=ann.headers)
    assert own.status_code == 200


async def test_routes_of_agents_need_a_key(stage: Tenants) -> None:
    """Each of them; a new one without a key would be found here."""
    from gateway.app import create_app
    from tests.security.tenants import routes

    schema = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
    free = {*schema, "/", "/healthz", "/readyz", "/health", "/ping", "/version", "/metrics", "/console"}
    checked = 0
    for method, path in routes(create_app(stage.gateway.settings)):
        if method == "WS" or path in free:
            continue
        shown = path.replace("{batch}", "0").replace("{version}", "0").replace("{", "").replace("}", "")
        response = await stage.gateway.http.request(method, shown, json={} if method == "POST" else None)
        assert response.status_code == 401, (method, path, response.text)
        checked += 1
    assert checked > 40
