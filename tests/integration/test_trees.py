"""Whatever a client does with its conversations: exactly what the engine got and sampled is trained, each token once.

The truth is the engine's own log of its prompts and of the ids that it sampled; the trees are read as a trainer reads them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.store import turns
from headgate.types import Episode, Node
from tests.harness.gateways import RunningGateway
from tests.harness.retries import RETRY
from tests.harness.scripted import TOOL_CALL, TOOLS, ScriptedEngine, scripted_gateway
from trainer.data.tree import rows_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "the-key-of-an-agent-and-its-helpers"
THOUGHT = "<think>\nhmm\n</think>\n\n"
Sampled = tuple[list[int], list[int]]
"""The engine's prompts and replies."""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@dataclass
class Stage:
    """A gateway before a scripted engine that keeps a log; `log` starts again with every agent."""

    gateway: RunningGateway
    engine: ScriptedEngine
    log: list[Sampled] = field(default_factory=list)

    def __post_init__(self) -> None:
        generate = self.engine.generate

        async def logged(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            ids: list[int] = []
            self.log.append((body["token_ids"], ids))
            async for event in generate(body):
                ids += event["token_ids"]
                yield event

        self.engine.generate = logged  # type: ignore[method-assign]

    async def agent(self) -> Agent:
        """An episode that its agents share."""
        self.log.clear()
        opened = await self.gateway.admin.open_episode("t", mode="eval")
        return Agent(self, opened.api_key, opened.episode_id)


@dataclass
class Agent:
    """The holder of one key."""

    stage: Stage
    key: str
    episode: str

    async def call(
        self, messages: Sequence[Any], *replies: str, headers: dict[str, str] | None = None, **body: Any
    ) -> list[dict[str, Any]]:
        """The messages of the choices, one for each of `replies`, which the engine samples then."""
        self.stage.engine.replies += replies
        values = {"model": "m", "messages": messages, "n": max(1, len(replies)), "tools": TOOLS, **body}
        sent = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        response = await self.stage.gateway.http.post("/v1/chat/completions", json=values, headers=sent)
        assert response.status_code == 200, response.text
        return [choice["message"] for choice in response.json()["choices"]]

    async def go(self, messages: list[Any], reply: str, then: str = "go on") -> None:
        """Make a turn, then the message of the user; the client keeps no thinking."""
        (message,) = await self.call(messages, reply)
        messages += [without_thinking(message), user(then)]

    async def nodes(self) -> list[Node]:
        """The tree, as the store has it."""
        found = await self.stage.gateway.services.database.read(
            lambda c: turns.nodes(c, "demo", [self.episode])
        )
        return found[self.episode]

    async def check(self) -> list[Node]:
        """Check that the tree is exactly the engine's log, without anything twice, and that it is trained so."""
        nodes, log = await self.nodes(), self.stage.log
        paths = [path(nodes, node) for node in nodes]
        sampled = [node for node in nodes if node.sampled]
        recorded = [(paths[n.index][: -len(n.ids)], n.ids.tolist()) for n in sampled]
        assert sorted(recorded) == sorted(log), "the record is what the engine got and sampled"
        assert len({node.call_id for node in sampled}) == len(sampled)
        calls = (await self.stage.gateway.admin.episode(self.episode))["calls"]
        bridged = {call["id"]: call["used"]["bridged"] for call in calls}
        for node in sampled:
            check_branch(nodes, paths, node, bridged[node.call_id])
        check_trained(self.episode, nodes, log)
        return nodes

    async def lineages(self) -> list[int]:
        """Return the turns' lineages in the order in which they were sampled."""
        return [node["lineage"] for node in await self.shown()]

    async def shown(self) -> list[dict[str, Any]]:
        """The turns as people see them."""
        nodes = (await self.stage.gateway.admin.trajectory(self.episode))["nodes"]
        assert all((node["lineage"] is None) is not node["sampled"] for node in nodes)
        return [node for node in nodes if node["sampled"]]


def path(nodes: Sequence[Node], node: Node) -> list[int]:
    """Every id from the root to the end of a node."""
    ids = node.ids.tolist()
    while node.parent >= 0:
        parent = nodes[node.parent]
        ids, node = parent.ids[: node.at].tolist() + ids, parent
    return ids


def common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def check_branch(nodes: Sequence[Node], paths: Sequence[list[int]], turn: Node, bridged: bool) -> None:
    """A turn's prompt has no token of its own that the tree had already where the prompt left it."""
    if turn.parent < 0 or nodes[turn.parent].sampled or nodes[turn.parent].index != turn.index - 1:
        return  # the tree had the whole prompt
    prompt = nodes[turn.parent]
    assert turn.at == len(prompt.ids) > 0
    start = len(paths[prompt.index]) - len(prompt.ids)
    given = paths[prompt.index]
    shared = max((common(given, known) for known in paths[: prompt.index]), default=0)
    if not bridged:
        assert start == shared, "a new rendering branches exactly where it differs from all that was there"
        return
    before = nodes[prompt.parent]
    assert start <= shared
    siblings = [n for n in nodes[: prompt.index] if (n.parent, n.at) == (prompt.parent, prompt.at)]
    onward = [before.ids[prompt.at]] if prompt.at < len(before.ids) else []
    assert prompt.ids[0] not in [*onward, *(n.ids[0] for n in siblings)], "the shared prefix is stored once"


def check_trained(episode: str, nodes: Sequence[Node], log: Sequence[Sampled]) -> None:
    """Check that each sampled token is trained once, after its own context, and that nothing else is."""
    rows = rows_of([(Episode(episode, 1.0, tuple(nodes)), {})])
    assert not rows.masked
    trained: Counter[tuple[tuple[int, ...], int, float]] = Counter()
    for row in rows.rows:
        ids = row.ids.tolist()
        for j in row.train.nonzero()[0].tolist():
            trained[tuple(ids[:j]), ids[j], float(row.logprobs[j])] += 1
    truth: Counter[tuple[tuple[int, ...], int, float]] = Counter()
    for prompt, ids in log:
        for k, token in enumerate(ids):
            truth[tuple(prompt + ids[:k]), token, -(k + 1) / 64] += 1
    assert trained == truth


def without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


@pytest.fixture(scope="module")
async def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    work = tmp_path_factory.mktemp("trees")
    agents = {"shared": {"key": KEY}}
    async with scripted_gateway(tiny_model, work, agents=agents) as (gateway, engine):
        yield Stage(gateway, engine)


async def test_a_retry_adds_nothing_and_another_sample_is_a_branch_after_the_same_prompt(
    stage: Stage,
) -> None:
    agent = await stage.agent()
    messages = [user("again")]
    await agent.go(messages, "one")
    (first,) = await agent.call(messages, "two", user="x")
    (same,) = await agent.call(messages, headers=RETRY, user="x")
    assert same == first
    await agent.call(messages, "three", user="x")
    nodes = await agent.check()
    assert [node.sampled for node in nodes] == [False, True, False, True, True]
    assert [node.parent for node in nodes] == [-1, 0, 1, 2, 2]
    assert await agent.lineages() == [0, 0, 1]


@pytest.mark.parametrize("named", [True, False])
async def test_agents_that_share_a_key_have_lineages_of_their_own(stage: Stage, named: bool) -> None:
    """Named: all in one episode. Otherwise the conversations identify them, and each is an episode."""
    agent = await stage.agent()
    if not named:
        agent.key = KEY
    ones: list[Any] = [{"role": "system", "content": "you plan"}, user("plan")]
    others: list[Any] = [{"role": "system", "content": "you search"}, user("search")]
    for turn in range(3):
        await agent.go(ones, f"plan {turn}")
        await agent.go(others, f"found {turn}")
    if named:
        await agent.check()
        assert await agent.lineages() == [0, 1] * 3
        return
    log, rows = stage.log, await stage.gateway.admin.episodes(agent="shared", state="open")
    assert len(rows) == 2
    for row, own in zip(rows[::-1], (log[::2], log[1::2]), strict=True):
        stage.log = own
        agent.episode = row["id"]
        await agent.check()
        assert await agent.lineages() == [0, 0, 0]
        await stage.gateway.admin.abandon(row["id"], "done")
    stage.log = log


async def test_thinking_that_is_dropped_is_kept_where_the_template_keeps_it_and_else_a_branch(
    stage: Stage,
) -> None:
    agent = await stage.agent()
    messages: list[Any] = [user("think")]
    (message,) = await agent.call(messages, f"{THOUGHT}{TOOL_CALL}")
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    messages += [without_thinking(message), result]
    await agent.go(messages, f"{THOUGHT}three", then="and now?")
    await agent.go(messages, f"{THOUGHT}four")
    nodes = await agent.check()
    turns_ = [node for node in nodes if node.sampled]
    assert path(nodes, turns_[1])[: len(path(nodes, turns_[0]))] == path(nodes, turns_[0]), (
        "within the tool cycle"
    )
    assert [node["lineage"] for node in await agent.shown()] == [0, 0, 1]
    first, branch = turns_[0], nodes[turns_[2].parent]
    assert (branch.parent, branch.at) == (first.parent, first.at), (
        "the thinking is gone from its first token on"
    )


@pytest.mark.parametrize("chosen", [0, 1])
async def test_of_replies_that_look_the_same_the_one_whose_tool_calls_are_named_goes_on(
    stage: Stage, chosen: int
) -> None:
    """The replies differ in their reasoning, which clients do not send back."""
    agent = await stage.agent()
    messages: list[Any] = [user("add")]
    choices = await agent.call(messages, f"<think>\none\n</think>\n\n{TOOL_CALL}", f"{THOUGHT}{TOOL_CALL}")
    message = choices[chosen]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    await agent.go([*messages, without_thinking(message), result], "three")
    nodes = await agent.check()
    thought, decode = ("one", "hmm")[chosen], stage.gateway.model.renderer.decode
    assert message["reasoning_content"].strip() == thought
    (first,) = (node for node in nodes if node.sampled and thought in decode(node.ids.tolist()))
    onward = nodes[nodes[-1].parent]
    assert (onward.parent, onward.at) == (first.index, len(first.ids))


texts = st.sampled_from(["a", "b", "a b", "é 漢\n"])
replies = st.builds(
    lambda thought, text, tools: (
        (THOUGHT if thought else "") + (text if not tools else "\n".join([TOOL_CALL] * tools))
    ),
    *(st.booleans(), texts, st.sampled_from([0, 0, 0, 1, 2])),
)
which = st.integers(0, 9)
steps = st.one_of(
    st.tuples(st.just("begin"), which, texts, replies),
    st.tuples(st.just("go"), which, texts, replies),
    st.tuples(st.just("choices"), which, texts, replies),
    st.tuples(st.just("both"), which, texts, replies),
    st.tuples(st.just("retry"), which, texts, replies),
    st.tuples(st.just("fork"), which, texts, replies),
    st.tuples(st.just("edit"), which, texts, replies),
    st.tuples(st.just("compact"), which, texts, replies),
)


class Client:
    """Conversations of one key that grow, fork, and are edited and compacted."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.conversations: list[list[Any]] = [[user("a")]]

    async def do(self, what: str, number: int, text: str, reply: str) -> None:
        """One step of one of the conversations."""
        index = number % len(self.conversations)
        messages = self.conversations[index]
        match what:
            case "begin":
                self.conversations.append([user(text)])
            case "go":
                self._keep(messages, (await self.agent.call(messages, reply))[0], text)
            case "choices":
                self._keep(messages, (await self.agent.call(messages, reply, text, reply))[number % 3], text)
            case "both":
                other = self.conversations[-1]
                found = await asyncio.gather(self.agent.call(messages, reply), self.agent.call(other, text))
                self._keep(messages, found[0][0], text)
                if other is not messages:
                    self._keep(other, found[1][0], text)
            case "retry":
                seed = len(
                    self.agent.stage.log
                )  # which of several equal requests is repeated could not be known
                (first,) = await self.agent.call(messages, reply, seed=seed)
                (again,) = await self.agent.call(messages, headers=RETRY, seed=seed)
                assert again == first
            case "fork":
                self.conversations.append([*messages])
            case "edit":
                place = number % len(messages)
                if messages[place]["role"] != "tool":
                    edited = {name: v for name, v in messages[place].items() if name != "tool_calls"}
                    messages[place] = {**edited, "content": text}
            case "compact":
                last = next(i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "user")
                self.conversations[index] = [user(f"so far: {text}"), *messages[last:]]

    @staticmethod
    def _keep(messages: list[Any], message: dict[str, Any], text: str) -> None:
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        messages += [without_thinking(message), *(results or [user(text)])]


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=3, max_size=10))
async def test_any_interleaving_is_recorded_and_trained_exactly(stage: Stage, story: list[Any]) -> None:
    agent = await stage.agent()
    client = Client(agent)
    for step in story:
        await client.do(*step)
    await client.do("go", 0, "a", "the end")
    await agent.check()
    lines = await agent.lineages()
    assert sorted(set(lines)) == list(range(max(lines) + 1))
