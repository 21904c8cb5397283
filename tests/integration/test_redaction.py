"""What `[redaction]` finds is stored, logged and published nowhere, and is not trained; conversations go on all the same."""

from __future__ import annotations

import io
import json
import logging
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.cli.logs import Formatter
from tests.harness.callers import Stage, assistant, chat, code, send, user
from tests.harness.scripted import TOOLS, scripted_gateway

KEY = "the-key-of-the-helper"
WINDOW = 7
"""Characters of a secret of which no piece may be found anywhere."""
RETRY = {"x-stainless-retry-count": "1"}


def names(text: str) -> list[str]:
    """Find what is written as a name here: the hook of these tests."""
    if "fail the hook" in text:
        raise RuntimeError(text)
    return [word for word in text.replace('"', " ").replace("\\", " ").split() if word.startswith("Zoë")]


def settings(model: Path, work: Path, **more: Any) -> dict[str, Any]:
    return {
        "agents": {"helper": {"key": KEY, "mode": "train", "group_size": 1, "live": True}},
        "models": {"demo": {"path": str(model), "thinking": False}},
        "staleness": {"batch": 2, "eta": 1, "min_members": 1},
        "redaction": {
            "patterns": ["email", "phone", "card", "key"],
            "rules": {"order": r"\bORD-\w{12}\b"},
            "hook": "tests.integration.test_redaction:names",
            "key": "sixteen-characters-or-more",
        },
        **more,
    }


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    written, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(written), root.level
    handler.setFormatter(Formatter("%(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


def secrets(rng: random.Random) -> list[str]:
    def letters(n: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase + string.digits, k=n))

    digits = [rng.randrange(10) for _ in range(15)]
    doubled = sum(d * 2 - 9 * (d > 4) for d in digits[::-2])
    card = "".join(map(str, [*digits, -(doubled + sum(digits[-2::-2])) % 10]))
    return [
        f"{letters(9)}@{letters(8)}.example",
        "+49 " + "".join(str(rng.randrange(10)) for _ in range(10)),
        card,
        "-".join(card[i : i + 4] for i in range(0, 16, 4)),
        f"sk-{letters(24)}",
        f"ORD-{letters(12)}",
        f"Zoë{letters(9)}",
    ]


def pieces(secret: str) -> Iterator[str]:
    for start in range(len(secret) - WINDOW + 1):
        yield secret[start : start + WINDOW]


def check(found: bytes, secret: str, ids: list[int], where: str) -> None:
    """Fail if a piece of the secret's text, as it is or escaped, or of its tokens is in `found`."""
    for piece in pieces(secret):
        for form in (piece.encode(), json.dumps(piece)[1:-1].encode()):
            assert form not in found, (secret, where)
    for start in range(len(ids) - WINDOW + 1):
        assert np.asarray(ids[start : start + WINDOW], "<i4").tobytes() not in found, (secret, where)


async def published(stage: Stage) -> dict[str, bytes]:
    """Return everything that the admin API shows."""
    http, found = stage[0].http, {}
    episodes = (await http.get("/admin/v1/episodes?limit=100")).json()
    paths = ["/admin/v1/episodes", "/admin/v1/staleness", "/metrics"]
    for row in episodes["episodes"] if isinstance(episodes, dict) else episodes:
        paths += [f"/admin/v1/episodes/{row['id']}{end}" for end in ("", "/trajectory", "/tokens", "/why")]
    for path in paths:
        response = await http.get(path)
        assert response.status_code == 200, (path, response.text)
        found[path] = (
            json.dumps(response.json(), ensure_ascii=False).encode()
            if path != "/metrics"
            else response.content
        )
    return found


async def turns(stage: Stage, rng: random.Random, planted: list[str]) -> None:
    """Have a conversation in each dialect, with secrets of the user, of tools and of the model."""
    secret = rng.choice
    talk: list[dict[str, Any]] = [user(f"hello {secret(planted)}, and {secret(planted)}")]
    for _ in range(3):
        reply = f"I note {secret(planted)} for {secret(planted)}"
        stage[1].replies.append(reply)
        more = {"stream": True} if rng.random() < 0.5 else {}
        given = {"metadata": {"mail": secret(planted)}, "user": secret(planted), "tools": TOOLS}
        response = await send(stage, KEY, talk, **more, **given)
        assert response.status_code == 200
        text = (
            "".join(
                json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                for line in response.text.splitlines()
                if line.startswith("data: {") and json.loads(line[6:])["choices"]
            )
            if more
            else response.json()["choices"][0]["message"]["content"]
        )
        assert text == reply, "the client gets what was sampled"
        talk += [assistant(reply), user(f"and {secret(planted)}?")]
    bearer = {"Authorization": f"Bearer {KEY}"}
    post = stage[0].http.post
    stage[1].replies += [
        f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': secret(planted)}})}\n</tool_call>"
    ]
    assert (await send(stage, KEY, [user(secret(planted))], tools=TOOLS)).status_code == 200
    stage[1].replies += [f"<tool_call>\n{secret(planted)} broken"]
    assert (await send(stage, KEY, [user("call")], tools=TOOLS)).status_code == 200
    stage[1].replies += [f"yes {secret(planted)}"] * 4
    body = {"model": "m", "max_tokens": 200}
    said = {"messages": [user(secret(planted))], "system": f"you serve {secret(planted)}"}
    assert (await post("/v1/messages", headers=bearer, json={**body, **said})).status_code == 200
    assert (
        await post("/v1/completions", headers=bearer, json={**body, "prompt": secret(planted)})
    ).status_code == 200
    first = {"model": "m", "input": f"it is {secret(planted)}", "instructions": secret(planted)}
    one = await post("/v1/responses", headers=bearer, json=first)
    assert one.status_code == 200
    again = {"model": "m", "input": f"now {secret(planted)}", "previous_response_id": one.json()["id"]}
    assert (await post("/v1/responses", headers=bearer, json=again)).status_code == 200
    wrong = await send(stage, KEY, [user("x")], metadata={"train": secret(planted)})
    assert code(wrong) == (400, "invalid_value")


@pytest.mark.parametrize("seed", range(3))
async def test_no_secret_is_stored_logged_or_published(
    seed: int, tiny_model: Path, tmp_path: Path, log: io.StringIO
) -> None:
    rng = random.Random(seed)
    planted = secrets(rng)
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model, tmp_path)) as stage:
        await turns(stage, rng, planted)
        opened = await stage[0].http.post(
            "/admin/v1/episodes",
            json={"task_id": "t", "mode": "eval", "metadata": {"note": [planted[0], int(planted[2])]}},
        )
        await stage[0].admin.abandon(
            opened.json()["episode_id"], "crashed", f"Traceback: {planted[0]} {planted[6]}"
        )
        logging.getLogger("test").warning("as a library may: %s", planted[0])
        encode = stage[1].encode
        shown = await published(stage)
    files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(name.startswith("gateway.db") for name in files)
    for secret in planted:
        for where, found in {**files, **shown, "the log": log.getvalue().encode()}.items():
            check(found, secret, encode(secret), where)
    assert "[redacted email " in log.getvalue()


async def test_turns_after_a_secret_are_not_trained_and_those_before_are(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model, tmp_path)) as stage:
        gateway = stage[0]
        talk = [user("hello")]
        episode = await chat(stage, KEY, talk, "good day")
        talk += [assistant("good day"), user("I am a.b@c.example")]
        assert await chat(stage, KEY, talk, "noted") == episode
        talk += [assistant("noted"), user("thanks")]
        assert await chat(stage, KEY, talk, "bye") == episode
        assert "a.b@c.example" in gateway.model.renderer.decode(stage[1].requests[-1]["token_ids"]), (
            "engines see it"
        )
        nodes = (await gateway.admin.trajectory(episode))["nodes"]
        assert [node["mask_reason"] for node in nodes if node["sampled"]] == ["", "redacted", "redacted"]
        other = await chat(stage, KEY, [user("none here")], "fine")
        for one in (episode, other):
            await gateway.admin.reward(one, 1.0)
        sent = (await gateway.http.post("/admin/v1/leases", json={"consumer": "t"})).json()
        groups = await gateway.http.get(
            f"/admin/v1/leases/{sent['lease_id']}/groups", params={"fence": sent["fence"]}
        )
        check(groups.content, "a.b@c.example", stage[1].encode("a.b@c.example"), "the feed")
        why = await gateway.admin.why(episode)
        assert "redacted" in json.dumps(why)


async def test_a_conversation_goes_on_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    """It is found by its messages, and the engine gets the client's text, never the stored marks."""
    values = settings(tiny_model, tmp_path)
    talk = [user("I am a.b@c.example")]
    async with scripted_gateway(tiny_model, tmp_path, **values) as stage:
        first = await chat(stage, KEY, talk, "hello a.b@c.example")
        clean = await chat(stage, KEY, [user("nothing")], "kept")
    async with scripted_gateway(tiny_model, tmp_path, **values) as stage:
        assert code(await send(stage, KEY, talk, headers=RETRY)) == (409, "reply_redacted")
        again = await send(stage, KEY, [user("nothing")], headers=RETRY)
        assert (again.headers["x-headgate-episode"], again.json()["choices"][0]["message"]["content"]) == (
            clean,
            "kept",
        )
        talk += [assistant("hello a.b@c.example"), user("go on")]
        assert await chat(stage, KEY, talk, "fine") == first
        prompt = stage[0].model.renderer.decode(stage[1].requests[-1]["token_ids"])
        assert prompt.count("a.b@c.example") == 2
        assert "*" not in prompt


async def test_a_hook_that_fails_redacts_everything(
    tiny_model: Path, tmp_path: Path, log: io.StringIO
) -> None:
    async with scripted_gateway(tiny_model, tmp_path, **settings(tiny_model, tmp_path)) as stage:
        await chat(stage, KEY, [user("please fail the hook")], "now quietly")
        encode = stage[1].encode
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        check(path.read_bytes(), "fail the hook", encode("fail the hook"), path.name)
    assert "hook failed" in log.getvalue()
    assert "please" not in log.getvalue()
