"""Rewards as a phase: an episode that is closed is graded while it holds its slot, by functions and by URLs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fastapi import FastAPI, Request, Response
from typer.testing import CliRunner

from gateway.cli import app
from gateway.grading import grading as gateway_grading
from headgate.client import EpisodeRunner, Task
from headgate.client.admin import GatewayRefused
from headgate.client.agents import FunctionAgent
from headgate.processes.ports import free_port
from tests.harness.agents import ONE_CALL, one_call
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.records import nodes_of, path_to
from tests.harness.waiting import LONG_S, result_of, until
from tests.harness.weights import fake_weights, publish

ONE_SLOT = {"batch": 1, "eta": 0, "min_members": 1}
GATED = {"gated": {"function": "tests.harness.graders:gated", "workers": 1, "timeout_s": 600.0}}


class Judge:
    """A grader behind a URL; replies what a test put into `responses`, else `{"reward": 1}`."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.responses: deque[tuple[int, str]] = deque()

    def app(self) -> FastAPI:
        app = FastAPI()

        async def grade(request: Request) -> Response:
            self.requests.append(await request.json())
            status, body = self.responses.popleft() if self.responses else (200, '{"reward": 1}')
            return Response(body, status, media_type="application/json")

        app.post("/")(grade)
        return app


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_grading, "_FIRST_BACKOFF_S", 0.01)


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    made, port = Judge(), free_port()
    made.url = f"http://127.0.0.1:{port}/"
    async with serve(made.app(), port):
        yield made


def values(model: Path, work: Path, graders: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return settings_for(model, work, **{"staleness": ONE_SLOT, "graders": graders, **overrides})


def gates(work: Path, name: str = "") -> tuple[dict[str, str], Path, Path]:
    """The metadata of an episode that a gated grader waits with; the file that it writes then, and the file that it waits for."""
    begun, gate = work / f"begun{name}", work / f"gate{name}"
    return {"begun": str(begun), "gate": str(gate)}, begun, gate


async def refused(work: Any, code: str) -> str:
    with pytest.raises(GatewayRefused) as error:
        await work
    assert (error.value.status, error.value.code) == (409, code)
    return error.value.message


async def fed(gateway: RunningGateway) -> dict[str, float]:
    """The rewards that a trainer gets, by episode."""
    lease = await gateway.admin.lease("trainer")
    got = await gateway.admin.leased_groups(lease, wait_s=LONG_S)
    return {episode.episode_id: episode.reward for group in got.groups for episode in group.episodes}


async def test_an_episode_is_graded_by_functions_and_urls_with_their_weights(
    tiny_model: Path, tmp_path: Path, judge: Judge
) -> None:
    graders = {
        "value": {"function": "tests.harness.graders:constant", "weight": 2.0},
        "judge": {"url": judge.url, "weight": -1.0},
    }
    judge.responses.append((200, '{"reward": 0.25}'))
    async with run_gateway(values(tiny_model, tmp_path, graders)) as gateway:
        episode, headers = await gateway.open("task", group_id="g", metadata={"value": 0.75})
        await gateway.chat(headers, max_tokens=4)
        fate = await gateway.admin.close_episode(episode, wait_s=LONG_S)
        expected = {
            "state": "closed",
            "reason": "rewarded",
            "reward": 2.0 * 0.75 - 0.25,
            "components": {"value": 0.75, "judge": 0.25},
            "error": "",
        }
        assert fate == {"episode_id": episode, **expected}
        row = await gateway.admin.episode(episode)
        assert {name: row[name] for name in expected} == expected
        assert await gateway.admin.close_episode(episode) == fate, "closing again is not an error"
        assert await fed(gateway) == {episode: 1.25}
        assert len(judge.requests) == 1


async def test_what_a_grader_is_given_is_the_episode_as_it_was(
    tiny_model: Path, tmp_path: Path, judge: Judge
) -> None:
    async with run_gateway(values(tiny_model, tmp_path, {"judge": {"url": judge.url}})) as gateway:
        episode, headers = await gateway.open("task", group_id="g", metadata={"answer": "42"})
        responses = []
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            response = (await gateway.chat(headers, messages=messages, max_tokens=5, temperature=0.5)).json()
            responses.append(response)
            messages += [response["choices"][0]["message"], {"role": "user", "content": "and?"}]
        await gateway.admin.call_reward(episode, responses[0]["id"], 0.5)
        await gateway.admin.close_episode(episode, wait_s=LONG_S)
        (given,) = judge.requests
        assert {name: given[name] for name in ("episode_id", "task_id", "group_id", "model", "metadata")} == {
            "episode_id": episode,
            "task_id": "task",
            "group_id": "g",
            "model": "demo",
            "metadata": {"answer": "42"},
        }
        calls = given["calls"]
        assert [call["call_id"] for call in calls] == [response["id"] for response in responses]
        assert [call["reward"] for call in calls] == [0.5, None]
        reasons = [response["choices"][0]["finish_reason"] for response in responses]
        assert [call["finish_reason"] for call in calls] == reasons
        assert [call["requested"]["temperature"] for call in calls] == [0.5, 0.5]
        nodes = await nodes_of(gateway, episode)
        sampled = [node for node in nodes if node["sampled"]]
        decode = gateway.model.renderer.decode
        for turn, node in zip(given["turns"], sampled, strict=True):
            assert turn["call_id"] == node["call_id"]
            assert turn["prompt_text"] == decode(path_to(nodes, node))
            assert node["text"].startswith(turn["text"])
            assert node["text"].removeprefix(turn["text"]) in ("", *map(decode, ([256], [258])))
        assert given["final_text"] == given["turns"][-1]["text"]


async def test_the_slot_is_held_until_the_reward_is_there(tiny_model: Path, tmp_path: Path) -> None:
    metadata, begun, gate = gates(tmp_path)
    async with run_gateway(values(tiny_model, tmp_path, GATED)) as gateway:
        episode, headers = await gateway.begin("task", group_id="g", metadata=metadata)
        live = gateway.services.episodes._live[episode]
        fate = await gateway.admin.close_episode(episode)
        assert (fate["state"], fate["reward"]) == ("grading", None)
        await until(begun.exists, "the grader runs", LONG_S)
        live.opened_at = live.last_used_at = -1e9
        await gateway.services.episodes.sweep()
        assert (await gateway.admin.close_episode(episode, wait_s=0.05))["state"] == "grading"
        assert (await gateway.admin.episode(episode))["state"] == "grading"
        with pytest.raises(GatewayRefused) as error:
            await gateway.open("late")
        assert error.value.code == "no_slot"
        await refused(gateway.admin.reward(episode, 1.0), "episode_grading")
        await refused(gateway.admin.reward(episode, 1.0, final=False), "episode_grading")
        await refused(gateway.admin.abandon(episode, "enough"), "episode_grading")
        response = await gateway.chat(headers)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "episode_grading")
        waiting = asyncio.create_task(gateway.admin.close_episode(episode, wait_s=LONG_S))
        gate.touch()
        assert (await waiting)["reward"] == 1.0
        assert await fed(gateway) == {episode: 1.0}


async def test_a_group_whose_member_is_graded_is_not_forsaken(tiny_model: Path, tmp_path: Path) -> None:
    metadata, _, gate = gates(tmp_path)
    async with run_gateway(values(tiny_model, tmp_path, GATED)) as gateway:
        episode, _ = await gateway.begin("task", group_id="g", group_size=2, metadata=metadata)
        await gateway.admin.close_episode(episode)
        episodes = gateway.services.episodes
        await episodes.sweep()
        assert not episodes._group_deadlines._without_member
        gate.touch()
        await gateway.admin.close_episode(episode, wait_s=LONG_S)
        await episodes.sweep()
        assert list(episodes._group_deadlines._without_member) == [("demo", "g")]


async def test_a_call_that_runs_when_its_episode_is_closed_is_stopped(
    tiny_model: Path, tmp_path: Path
) -> None:
    metadata, _, gate = gates(tmp_path)
    async with run_gateway(values(tiny_model, tmp_path, GATED)) as gateway:
        assert gateway.engine is not None
        episode, headers = await gateway.begin("task", metadata=metadata)
        await gateway.fake("faults", stall=True)
        call = asyncio.create_task(gateway.chat(headers))
        await until(lambda: gateway.engine.running == 1, "the call runs", LONG_S)
        await gateway.admin.close_episode(episode)
        response = await result_of(call, "the call is refused", LONG_S)
        assert response.json()["error"]["code"] == "episode_grading"
        gate.touch()
        assert (await gateway.admin.close_episode(episode, wait_s=LONG_S))["reason"] == "rewarded"


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_an_episode_that_cannot_be_graded_is_dropped_and_its_slot_is_free(
    tiny_model: Path, tmp_path: Path, judge: Judge, mode: Any
) -> None:
    graders = {"value": {"function": "tests.harness.graders:constant"}, "judge": {"url": judge.url}}
    judge.responses.append((422, "what is this?"))
    async with run_gateway(values(tiny_model, tmp_path, graders)) as gateway:
        episode, _ = await gateway.begin("task", metadata={"value": 1.0}, mode=mode)
        fate = await gateway.admin.close_episode(episode, wait_s=LONG_S)
        assert (fate["state"], fate["reason"], fate["reward"]) == ("closed", "grading_failed", None)
        assert len(judge.requests) == 1
        assert (await gateway.admin.status())["free_slots"] == 1
        if mode == "train":
            story = (await gateway.admin.why(episode))["story"]
            (dropped,) = [s for s in story if s["kind"] == "dropped" and s["about"] == "episode"]
            assert dropped["reason"] == "grading_failed"
            assert "what is this?" in dropped["details"]["error"]


async def test_a_posted_reward_needs_no_grader(tiny_model: Path, tmp_path: Path, judge: Judge) -> None:
    async with run_gateway(values(tiny_model, tmp_path, {"judge": {"url": judge.url}})) as gateway:
        episode, _ = await gateway.begin("task")
        await gateway.admin.reward(episode, 0.125)
        fate = await gateway.admin.close_episode(episode)
        assert (fate["state"], fate["reward"]) == ("closed", 0.125)
        assert not judge.requests


async def test_without_graders_the_reward_is_what_was_posted(gateway: RunningGateway) -> None:
    nothing, _ = await gateway.begin("nothing")
    message = await refused(gateway.admin.close_episode(nothing), "no_reward")
    assert "[graders]" in message
    assert "/reward" in message
    assert (await gateway.admin.episode(nothing))["state"] == "open"
    await gateway.admin.reward(nothing, 0.5, {"form": 1.0}, final=False)
    fate = await gateway.admin.close_episode(nothing)
    assert (fate["reason"], fate["reward"], fate["components"]) == ("rewarded", 0.5, {"form": 1.0})
    with pytest.raises(GatewayRefused, match="no episode 'ep-none'"):
        await gateway.admin.close_episode("ep-none")


async def test_a_grading_that_was_cut_by_a_restart_is_repeated(tiny_model: Path, tmp_path: Path) -> None:
    metadata, begun, gate = gates(tmp_path)
    given = values(tiny_model, tmp_path, GATED)
    async with run_gateway(given) as gateway:
        episode, headers = await gateway.open("task", group_id="g", metadata={**metadata, "value": 0.25})
        call = (await gateway.chat(headers, max_tokens=3)).json()["id"]
        await gateway.admin.call_reward(episode, call, 2.0)
        await gateway.admin.close_episode(episode)
        # The file alone is not enough: the gateway's end kills the worker, perhaps before it has written into it.
        await until(lambda: begun.exists() and begun.read_text().endswith("\n"), "the grader runs", LONG_S)
    async with run_gateway(given) as gateway:
        await until(lambda: begun.read_text().count("\n") == 2, "it runs again", LONG_S)
        assert (await gateway.admin.episode(episode))["state"] == "grading"
        with pytest.raises(GatewayRefused) as error:
            await gateway.open("late")
        assert error.value.code == "no_slot"
        await refused(gateway.admin.reward(episode, 1.0), "episode_grading")
        gate.touch()
        fate = await gateway.admin.close_episode(episode, wait_s=LONG_S)
        assert (fate["reward"], fate["components"]) == (2.25, {"gated": 0.25, "calls": 2.0})
        assert await fed(gateway) == {episode: 2.25}
        first, second = (json.loads(line) for line in begun.read_text().splitlines())
        assert first == second


async def test_an_episode_that_is_not_needed_any_more_is_aborted_while_it_is_graded(
    tiny_model: Path, tmp_path: Path
) -> None:
    staleness = {**ONE_SLOT, "spare_members": 1}
    metadata, begun, gate = gates(tmp_path)
    async with run_gateway(values(tiny_model, tmp_path, GATED, staleness=staleness)) as gateway:
        slow, _ = await gateway.begin("task", group_id="g", metadata=metadata)
        fast, _ = await gateway.begin("task", group_id="g")
        waiting = asyncio.create_task(gateway.admin.close_episode(slow, wait_s=LONG_S))
        await until(begun.exists, "the grader runs", LONG_S)
        await gateway.admin.reward(fast, 1.0)
        fate = await waiting
        assert (fate["state"], fate["reason"], fate["reward"]) == ("closed", "surplus", None)
        assert await fed(gateway) == {fast: 1.0}
        other, _ = await gateway.begin("other", mode="eval", metadata={"begun": str(begun)})
        fate = await gateway.admin.close_episode(other, wait_s=LONG_S)
        assert fate["reason"] == "rewarded", "the only worker does not wait for an episode that is not needed"
        assert not gate.exists()


async def test_an_episode_whose_group_was_given_up_is_closed_as_untrained(
    tiny_model: Path, tmp_path: Path, judge: Judge
) -> None:
    """With `late_groups = "drop"` the agent may continue, but no batch takes its episode."""
    given = values(
        tiny_model, tmp_path, {"judge": {"url": judge.url}}, staleness={**ONE_SLOT, "late_groups": "drop"}
    )
    async with run_gateway(given) as gateway:
        episodes = [(await gateway.begin("task", group_id="g", group_size=2))[0] for _ in range(2)]
        new = publish(fake_weights(tmp_path / "one", "one"), tmp_path / "v1", 1, 0)
        await gateway.admin.publish(1, str(new), wait_s=LONG_S)
        await gateway.admin.reward(episodes[0], 1.0)
        fate = await gateway.admin.close_episode(episodes[0])
        assert (fate["reason"], fate["reward"]) == ("untrained_late", 1.0)
        fate = await gateway.admin.close_episode(episodes[1], wait_s=LONG_S)
        assert (fate["state"], fate["reason"], fate["reward"]) == ("closed", "untrained_late", None)
        assert not judge.requests


async def test_the_last_group_of_a_stuck_batch_is_given_up(tiny_model: Path, tmp_path: Path) -> None:
    stuck = {"on_stuck": "truncate", "stuck_groups": 1, "stuck_s": 0.2}
    given = settings_for(tiny_model, tmp_path, staleness={"batch": 2, "eta": 0, "min_members": 1, **stuck})
    async with run_gateway(given) as gateway:
        done, _ = await gateway.begin("done")
        endless, _ = await gateway.begin("endless")
        await gateway.admin.reward(done, 1.0)
        lease = await gateway.admin.lease("trainer")

        async def whole() -> bool:
            await gateway.admin.renew(lease)
            return (await gateway.admin.leased_groups(lease)).complete

        await until(whole, "the batch is trained without it", LONG_S)
        assert await fed(gateway) == {done: 1.0}

        async def given_up() -> bool:
            return (await gateway.admin.episode(endless))["reason"] == "truncated"

        await until(given_up, "its episode is aborted", LONG_S)


async def test_a_batch_without_a_waiting_trainer_is_not_stuck(tiny_model: Path, tmp_path: Path) -> None:
    stuck = {"on_stuck": "retry", "stuck_groups": 1, "stuck_s": 1e-6}
    given = settings_for(tiny_model, tmp_path, staleness={"batch": 2, "eta": 0, "min_members": 1, **stuck})
    async with run_gateway(given) as gateway:
        done, _ = await gateway.begin("done")
        slow, _ = await gateway.begin("slow")
        await gateway.admin.reward(done, 1.0)
        for _ in range(3):
            await gateway.services.episodes.sweep()
        assert (await gateway.admin.episode(slow))["state"] == "open"
        await gateway.admin.lease("trainer")

        async def given_up() -> bool:
            return (await gateway.admin.episode(slow))["reason"] == "retry"

        await until(given_up, "it is given up once a trainer waits", LONG_S)
        assert (await gateway.admin.status())["free_slots"] == 1


async def test_the_driver_has_its_agents_graded(tiny_model: Path, tmp_path: Path, judge: Judge) -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        await one_call(base_url, api_key)

    given = values(tiny_model, tmp_path, {"judge": {"url": judge.url}}, staleness={"min_members": 1})
    judge.responses.extend([(200, '{"reward": 0.5}'), (400, "no")])
    async with run_gateway(given) as gateway:
        runner = EpisodeRunner(gateway.admin, FunctionAgent(solve), concurrency=1)
        tasks = [Task(name, {"task_id": name}) for name in ("good", "bad")]
        good, bad = await runner.run(tasks)
        assert (good.reward, good.components, good.error) == (0.5, {"judge": 0.5}, None)
        assert bad.reward is None
        assert bad.error is not None and bad.error.endswith("closed by the gateway: grading_failed")


async def test_the_command_line_has_a_command_graded(tiny_model: Path, tmp_path: Path, judge: Judge) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "a"}\n{"task_id": "b"}\n')
    given = values(tiny_model, tmp_path, {"judge": {"url": judge.url}}, staleness={"min_members": 1})
    judge.responses.extend([(200, '{"reward": 0.5}'), (200, '{"reward": 0.25}')])
    async with run_gateway(given) as gateway:
        argv = [
            "episodes",
            "run",
            "--tasks",
            str(tasks),
            "--gateway",
            gateway.url,
            "--grade",
            "--group-size",
            "1",
            "--concurrency",
            "1",
        ]

        async def invoke(*more: str) -> Result:
            return await asyncio.to_thread(CliRunner().invoke, app, [*argv, *more])

        done = await invoke("--", sys.executable, "-c", f"{ONE_CALL}\nprint(7.0)")
        assert done.exit_code == 0, done.output
        summary = json.loads(done.output.splitlines()[-1])
        assert {name: summary[name] for name in ("episodes", "failed", "aborted", "reward_mean")} == {
            "episodes": 2,
            "failed": 0,
            "aborted": 0,
            "reward_mean": 0.375,
        }
        assert [given["metadata"] for given in judge.requests] == [{"task_id": "a"}, {"task_id": "b"}]
        for more in (("--agent", "tests.harness.graders:slowly"), ("--worker", "--", sys.executable)):
            refusal = await invoke(*more)
            assert refusal.exit_code == 2
            assert "--grade is for a command" in refusal.output.replace("\n", " ")


async def test_a_driver_without_a_reward_and_without_graders_frees_its_slot(gateway: RunningGateway) -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        return None

    (outcome,) = await EpisodeRunner(gateway.admin, FunctionAgent(solve)).run([Task("t", {"task_id": "t"})])
    assert outcome.error is not None
    assert "[graders]" in outcome.error
    assert (await gateway.admin.episode(outcome.episode_id or ""))["state"] == "closed"
    assert (await gateway.admin.status())["free_slots"] == 4


async def test_spare_members_race_and_what_is_left_of_them_is_no_failure(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Three run, two are trained: the third is stopped in the middle of its call."""
    started: list[str] = []
    everyone, stopped = asyncio.Event(), asyncio.Event()

    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        started.append(api_key)
        number = len(started)
        await one_call(base_url, api_key)
        if number == 3:
            everyone.set()
        await everyone.wait()
        if number < 3:
            return float(number)
        headers = {"Authorization": f"Bearer {api_key}"}
        try:
            while (await gateway.chat(headers, max_tokens=2)).status_code == 200:
                pass
        finally:  # refused, or cancelled by the driver
            stopped.set()
        raise RuntimeError("the episode is closed")

    given = settings_for(tiny_model, tmp_path, staleness={**ONE_SLOT, "spare_members": 1})
    async with run_gateway(given) as gateway:
        runner = EpisodeRunner(gateway.admin, FunctionAgent(solve), group_size=2, spare=1, concurrency=3)
        outcomes = await result_of(
            runner.run([Task("t", {"task_id": "t"})]), "the driver has run its task", LONG_S
        )
        assert stopped.is_set()
        assert sorted(o.reward for o in outcomes if o.reward is not None) == [1.0, 2.0]
        (left,) = [o for o in outcomes if o.reward is None]
        assert (left.aborted, left.error, left.attempts) == ("surplus", None, 1)
        assert sorted((await fed(gateway)).values()) == [1.0, 2.0]


async def test_a_refusal_is_stored_with_its_reason_and_waiting_is_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    given = settings_for(tiny_model, tmp_path, staleness=ONE_SLOT)
    async with run_gateway(given) as gateway:

        async def lost() -> dict[str, int]:
            rows = (await gateway.admin.staleness())["lost"]
            return {row["reason"]: row["count"] for row in rows if row["kind"] == "refused"}

        first, _ = await gateway.begin("first", group_id="g")
        await refused(gateway.admin.open_episode("first", "g", 1), "group_full")
        with pytest.raises(GatewayRefused):
            await gateway.open("second")
        assert await lost() == {"group_full": 1, "no_slot": 1}
        waiting = asyncio.create_task(gateway.admin.open_episode("third", wait_s=LONG_S))
        await until(lambda: bool(gateway.services.episodes.waiting("demo")), "it waits", LONG_S)
        await gateway.admin.abandon(first, "makes room")
        await waiting
        assert await lost() == {"group_full": 1, "no_slot": 1}


async def test_what_is_stored_as_rewarded_is_what_the_ledger_took(
    tiny_model: Path, tmp_path: Path, judge: Judge
) -> None:
    """Members race, graders fail, versions come, and every episode ends once, in the store as in the ledger."""
    staleness = {"batch": 2, "eta": 1, "min_members": 1, "spare_members": 2, "spare_groups": 1}
    chance = random.Random(7)
    bad = (400, "no")
    judge.responses.extend(chance.choice([(200, '{"reward": 1}'), (500, ""), bad]) for _ in range(60))
    given = values(tiny_model, tmp_path, {"judge": {"url": judge.url, "workers": 3}}, staleness=staleness)
    async with run_gateway(given) as gateway:

        async def act(episode: str, deed: int) -> None:
            with contextlib.suppress(GatewayRefused):
                match deed:
                    case 0 | 1:
                        await gateway.admin.close_episode(episode, wait_s=chance.choice([0.0, LONG_S]))
                    case 2:
                        await gateway.admin.reward(episode, 0.5)
                    case 3:
                        await gateway.admin.abandon(episode, "gave up")

        async def group(number: int) -> list[str]:
            opened = []
            for _ in range(4):
                with contextlib.suppress(GatewayRefused):
                    episode, headers = await gateway.open(
                        "t", group_id=f"g{number}", group_size=2, wait_s=LONG_S
                    )
                    opened.append(episode)
                    await gateway.chat(headers, max_tokens=2)  # it may be closed already, as there is no room
            deeds = [act(e, chance.randrange(4)) for e in opened for _ in range(3)]
            await asyncio.gather(*deeds)
            return opened

        async def train() -> None:
            for version in range(1, 4):
                lease = await gateway.admin.lease("trainer")
                while not (await gateway.admin.leased_groups(lease, wait_s=1.0)).complete:
                    await gateway.admin.renew(lease)
                new = publish(
                    fake_weights(tmp_path / f"w{version}", str(version)),
                    tmp_path / f"v{version}",
                    version,
                    version - 1,
                )
                await gateway.admin.publish(version, str(new), wait_s=LONG_S)
                await gateway.admin.ack(lease, "checkpoint")

        training = asyncio.create_task(train())
        groups = []
        for number in range(0, 40, 4):
            if training.done():
                break
            groups += await asyncio.gather(*(group(number + i) for i in range(4)))
        await result_of(training, "the trainer has its batches", LONG_S)
        opened = [episode for group in groups for episode in group]
        rows = {e: await gateway.admin.close_episode(e, wait_s=LONG_S) for e in opened}
        kinds_of = {
            e: [s["kind"] for s in (await gateway.admin.why(e))["story"] if s["about"] == "episode"]
            for e in opened
        }
        assert not gateway.services.episodes._closing.unclosed
    assert {row["state"] for row in rows.values()} == {"closed"}
    rewarded = {e for e, row in rows.items() if row["reason"] == "rewarded"}
    assert rewarded == {e for e, kinds in kinds_of.items() if "rewarded" in kinds}
    assert len({row["reason"] for row in rows.values()}) >= 3, rows
    for episode, kinds in kinds_of.items():
        ends = [kind for kind in kinds if kind in ("rewarded", "dropped", "aborted")]
        # An episode is dropped and stopped; one whose group was dropped is only stopped.
        assert ends in (["rewarded"], ["dropped"], ["dropped", "aborted"], ["aborted"]), (episode, kinds)
