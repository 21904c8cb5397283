"""Weight updates under open calls: a gateway with two engines, agents that call it by the `openai` package, and updates.

Owns the gateway (in this process, so that a mutant can be put into it), the engines that it starts and the agents. Lengths,
pauses, and which engine is killed and when are drawn from the seed. Updates are crossed for certain: an engine is held for one
only in the middle of requests (`tests.harness.crossing`). The evidence is that of a crash run, without logs of the engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import orjson

from gateway.engines.fake import identity
from gateway.generation.slot import Slot
from headgate.types import EpisodeOpened
from tests.faults.callers import FAILURES, Call, Caller, question
from tests.faults.checker import COUNTS, Report, check
from tests.faults.evidence import Journal, read, read_database, save_tables
from tests.faults.mutants import Mutant
from tests.faults.routes import WRONG, check_routes
from tests.faults.weights import BLOCK, ROUTERS, VERSIONS, build
from tests.harness.crossing import HOLD_S, crossed, freeze
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.transports import Way, served
from tests.harness.vllm import vllm_settings

ORDERS = ("rolling", "pull")
TOKENS = {"fake": 100, "vllm": 1600}
"""The tokens of a long stream, so that it takes some seconds."""
_WAIT_S = 600.0
"""The longest that anything may take: an engine is restarted in between, on a machine that may be busy."""
_AFTER_FAILURE_S = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a trial."""

    engine: str = "fake"
    mode: str = "abort"
    order: str = "rolling"
    transport: str = "filesystem"
    """One of `tests.harness.transports`."""
    seed: int = 0
    updates: int = VERSIONS - 1
    streams: int = 16
    agents: int = 8
    kill: bool = True
    """One engine is killed, at some moment of the update in the middle."""
    tokens: int = TOKENS["fake"]
    """The most tokens of a call of a long stream."""
    crossed: int = 3
    """Requests that are in their middle in an engine when it is held for an update."""
    delay_s: float = 0.02
    """The fake engine's time for a token."""
    lag_s: float = 0.05
    """Seconds that the fake engine holds sampled tokens back, so that they may arrive after an update."""

    @property
    def name(self) -> str:
        """Describe the plan."""
        return f"{self.engine}, {self.mode}, {self.order}, {self.transport}"

    @property
    def routed(self) -> bool:
        """True if the experts of tokens are recorded: with fake engines, which load whole versions from files."""
        return self.engine == "fake" and self.transport == "filesystem"


def small(plan: Plan) -> Plan:
    """Return a plan that is enough to notice a mutant: few streams; with `keep` many tokens in the pipe."""
    lag_s, tokens = (0.5, 80) if plan.mode == "keep" else (0.0, 60)
    return replace(
        plan, engine="fake", updates=2, streams=4, agents=2, tokens=tokens, crossed=1, kill=False, lag_s=lag_s
    )  # fmt: skip


@dataclass(slots=True)
class Trial:
    """A plan, its outcome, and the checker's report."""

    plan: Plan
    updates: list[dict[str, Any]] = field(default_factory=list)
    """The versions' records."""
    restarts: int = 0
    report: Report = field(default_factory=Report)
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """Return why engines failed in updates."""
        return [row["failure"] for update in self.updates for row in update["report"] if row["failure"]]

    @property
    def problems(self) -> list[str]:
        """Return why this is not a proof."""
        facts, plan = self.report.facts, self.plan
        found = [text for texts in self.report.findings.values() for text in texts]
        found += [f"{facts[fact]} {fact.replace('_', ' ')}" for fact in _NONE if facts[fact]]
        found += [f"version {u['version']} is {u['state']}" for u in self.updates if u["state"] != "live"]
        found += self._too_few_crossings()
        if plan.routed and not facts["routed"]:
            found.append("no experts are recorded")
        if facts["unrouted"] and not plan.kill:
            found.append(
                f"{facts['unrouted']} tokens have no recorded experts, although no engine was killed"
            )
        if not plan.kill:
            found += self.failures
        elif not self.restarts:
            found.append("the killed engine was not restarted")
        return [f"{plan.name}: {problem}" for problem in found]

    def _too_few_crossings(self) -> list[str]:
        """Return the updates that too few calls crossed; with `pull` a call may skip a version, so all updates count together."""
        plan, crossings = self.plan, self.report.crossings
        wanted = 0 if plan.transport == "lora" else plan.crossed  # no call crosses an adapter
        if plan.order == "pull":
            total = crossings.total()
            few = total < wanted * plan.updates
            return [f"{total} calls crossed a version, not {wanted * plan.updates}"] if few else []
        versions = range(1, plan.updates + 1)
        return [
            f"{crossings[v]} calls crossed version {v}, not {wanted}"
            for v in versions
            if crossings[v] < wanted
        ]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        report = self.report
        return {
            **asdict(self.plan),
            **{kind: report.counts[kind] for kind in COUNTS},
            WRONG: report.counts[WRONG],
            "tokens_checked": report.facts["tokens"],
            **{
                fact: report.facts[fact]
                for fact in ("finished_replies", "unconfirmed", "routed", "unrouted", *_NONE)
            },
            "crossings": {
                str(version): count for version, count in sorted(report.crossings.items()) if count
            },
            "findings": report.findings,
            "failures": self.failures,
            "restarts": self.restarts,
            "seconds": round(self.seconds, 1),
        }


_NONE = ("broken_replies", "masked_turns")
"""Facts that are problems here: no request fails, and no turn is masked."""


async def run_trial(plan: Plan, log: Callable[[str], None], mutant: Mutant | None = None) -> Trial:
    """Run a plan, with a mutant in the gateway or without, and check the evidence.

    Raise TimeoutError (in a group), with the missing event, if the run does not continue.
    """
    trial, started = Trial(plan), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headgate-updates-") as folder:
        work = Path(folder)
        versions = build(work / "models", plan.updates + 1, plan.transport, mixture=plan.routed)
        with mutant.put_in() if mutant else nullcontext():
            await _play(trial, versions, work, log)
        evidence = read(work / "evidence")
        trial.report = check(evidence)
        if plan.routed:
            check_routes(evidence, trial.report)
    trial.seconds = time.monotonic() - started
    return trial


async def _play(trial: Trial, versions: list[Path], work: Path, log: Callable[[str], None]) -> None:
    plan, evidence = trial.plan, work / "evidence"
    update = {"mode": plan.mode, "order": plan.order, "pause_timeout_s": HOLD_S}
    async with served(plan.transport, work / "models" / "versions", work) as way:
        engine = _engines(plan, work) | way.engine
        # An update waits for calls in the engine that it holds; by `gain` all may stay in the other one.
        routing = {"rule": "cached"}
        values = settings_for(
            versions[0], work, engine=engine, update=update, routing=routing, weights=way.weights
        )
        values["models"]["demo"] |= {"max_model_len": 4096, "router_replay": plan.routed}
        async with run_gateway(values, in_process=False) as gateway:
            with Journal(evidence / "agents" / "all.jsonl") as journal:
                world = _World(trial, versions, gateway, way, journal, log)
                with crossed(world.stop_in_the_middle):
                    await world.run()
            trial.restarts = sum(e["restarts"] for e in (await gateway.admin.status())["engines"])
    form: dict[str, Any] = {"block": BLOCK, "blocks": VERSIONS, "unlogged_engines": ["all"], "batch": 1}
    if plan.routed:
        form |= {"routers": ROUTERS, "weights_ids": [identity(str(version)) for version in versions]}
    (evidence / "plan.json").write_bytes(orjson.dumps(form))
    save_tables(read_database(values["store"]["url"]), evidence / "database.json")


def _engines(plan: Plan, work: Path) -> dict[str, Any]:
    """Return the `[engine]` table."""
    if plan.engine == "fake":
        return {"count": 2, "args": ["--delay-s", str(plan.delay_s)]}
    return vllm_settings(work / "engine.log") | {"count": 2, "start_s": _WAIT_S}


class _World:
    """One gateway's agents and updates."""

    def __init__(
        self,
        trial: Trial,
        versions: list[Path],
        gateway: RunningGateway,
        way: Way,
        journal: Journal,
        log: Callable[[str], None],
    ) -> None:
        self._trial = trial
        self._plan = trial.plan
        self._versions = versions
        self._gateway = gateway
        self._way = way
        self._journal = journal
        self._log = log
        self._random = Random(f"{trial.plan.seed} updates")
        self._over = asyncio.Event()
        self._calling = asyncio.Event()
        """Cleared: no new calls; open ones continue."""
        self._calling.set()
        self._progress = [0] * trial.plan.streams
        """The number of chunks that each long stream has received."""

    async def stop_in_the_middle(self, slot: Slot) -> None:
        """Let an update wait for streams that cross it."""
        self._calling.set()
        await freeze(slot, self._plan.crossed)

    async def run(self) -> None:
        """Run agents all the time, and updates one after another; the agents end with their present calls."""
        await self._all_engines_open()
        await self._set_lag()
        async with asyncio.TaskGroup() as agents:
            for number in range(self._plan.streams):
                agents.create_task(self._long_stream(number), name=f"stream-{number}")
            for number in range(self._plan.agents):
                agents.create_task(self._short_calls(number), name=f"agent-{number}")
            for version in range(1, self._plan.updates + 1):
                if not await self._update(version):
                    break
            await self._all_engines_open()
            await self._all_continue()
            self._over.set()

    # Agents

    async def _long_stream(self, number: int) -> None:
        random, count = Random(f"{self._plan.seed} stream {number}"), 0

        def progress() -> None:
            self._progress[number] += 1

        caller = Caller(self._journal, on_chunk=progress)
        opened = await self._gateway.admin.open_episode(f"stream-{number}", mode="eval")
        async with self._sdk(opened) as client:
            while not self._over.is_set():
                count += 1
                ask, words = f"{number}-{count}", "count! " * random.randrange(1, 20)
                tokens = random.randrange(3 * self._plan.tokens // 4, self._plan.tokens)
                await self._call(caller, client, opened, [question(ask, words)], ask, tokens, True)

    async def _short_calls(self, number: int) -> None:
        """Hold conversations of a few turns, whole and streamed."""
        random, count = Random(f"{self._plan.seed} agent {number}"), 0
        caller = Caller(self._journal)
        while not self._over.is_set():
            opened = await self._gateway.admin.open_episode(f"agent-{number}", mode="eval")
            messages: list[dict[str, str]] = []
            async with self._sdk(opened) as client:
                for _ in range(random.randrange(1, 5)):
                    count += 1
                    ask = f"{self._plan.streams + number}-{count}"
                    messages.append(question(ask, "next! " * random.randrange(1, 5)))
                    tokens, streamed = random.randrange(1, 24), random.random() < 0.5
                    text = await self._call(caller, client, opened, messages, ask, tokens, streamed)
                    messages.append({"role": "assistant", "content": text})

    def _sdk(self, opened: EpisodeOpened) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=opened.base_url, api_key=opened.api_key, max_retries=0, timeout=_WAIT_S
        )

    async def _call(
        self,
        caller: Caller,
        client: openai.AsyncOpenAI,
        opened: EpisodeOpened,
        messages: list[dict[str, str]],
        ask: str,
        tokens: int,
        streamed: bool,
    ) -> str:
        await self._calling.wait()
        with suppress(*FAILURES):
            if response := await caller.send(
                client, Call(ask, opened.episode_id, messages, tokens, streamed)
            ):
                return response.text
        self._log(f"a call has failed: {ask}")
        await asyncio.sleep(_AFTER_FAILURE_S)
        return ""

    # Updates

    async def _update(self, version: int) -> bool:
        """Return whether the version is live; if it is not, the next would be refused for its parent."""
        plan, random = self._plan, self._random
        await self._all_engines_open()
        await self._set_lag()
        await self._all_continue()
        await asyncio.sleep(random.uniform(0, 0.2))
        self._log(f"version {version} of {plan.updates}")
        place = self._way.place(self._versions[version])
        publish = self._gateway.admin.publish(version, wait_s=_WAIT_S, **place)
        if plan.kill and version == plan.updates // 2 + 1:
            _, record = await asyncio.gather(self._kill(random), publish)
        else:
            record = await publish
        self._trial.updates.append(record)
        return bool(record["state"] == "live")

    async def _kill(self, random: Random) -> None:
        """Kill an engine before or during the update."""
        engines = (await self._gateway.admin.status())["engines"]
        victim = random.choice(sorted(engines, key=lambda engine: engine["name"]))
        await asyncio.sleep(random.uniform(0, 0.2))
        self._log(f"{victim['name']} is killed")
        os.kill(victim["pid"], signal.SIGKILL)
        if self._plan.engine == "vllm":
            self._calling.clear()  # a real engine needs the whole of a small machine to start

    async def _set_lag(self) -> None:
        """Set the fault of every engine, for later requests. A restarted engine has lost it."""
        if self._plan.engine != "fake" or not self._plan.lag_s:
            return

        async def is_set() -> bool:
            for engine in (await self._gateway.admin.status())["engines"]:
                if engine["url"] is None:  # it is being restarted
                    return False
                url = f"{engine['url']}/fake/faults"
                try:
                    response = await self._gateway.http.post(url, json={"lag_s": self._plan.lag_s})
                except httpx.TransportError:
                    return False
                response.raise_for_status()
            return True

        await self._until(is_set, "every engine has its fault")

    async def _all_engines_open(self) -> None:
        async def are_open() -> bool:
            engines = (await self._gateway.admin.status())["engines"]
            return {engine["state"] for engine in engines} == {"open"}

        await self._until(are_open, "every engine is open")
        self._calling.set()

    async def _all_continue(self) -> None:
        """Wait until every long stream receives a chunk: none of them hangs, and the next update crosses them all."""
        before = list(self._progress)

        async def received() -> bool:
            return all(now > then for now, then in zip(self._progress, before, strict=True))

        await self._until(received, "every long stream continues")

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                while not await condition():
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise TimeoutError(f"not within {_WAIT_S:g} s: {what}") from error
