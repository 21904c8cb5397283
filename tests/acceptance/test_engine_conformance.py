"""Engine conformance: the behavior that the gateway needs, on the fake engine behind both APIs and on real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.base import Engine, GenerateRequest, Level, TokenChunk
from gateway.engines.sglang import SGLangEngine
from gateway.engines.used import used
from headgate.errors import EngineRefused, EngineUnreachable
from headgate.types import Grammar, Sampling
from tests.harness.models import save_model
from tests.harness.requests import (
    LONG,
    PATIENCE_S,
    PROMPT,
    ask,
    begun,
    check_form,
    fake_engine,
    ids_of,
    response,
)
from tests.harness.vllm import SharedEngine
from tests.harness.waiting import result_of, within

pytestmark = pytest.mark.asyncio(loop_scope="module")

WHOLE = 400
"""Tokens of a request that is frozen, and then goes on to its end."""
ENGINES = ["fake-vllm", "fake-sglang", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that have nothing in common."""
    root = tmp_path_factory.mktemp("conformance")
    for seed in (0, 1):
        save_model(root / str(seed), seed)
    return [root / "0", root / "1"]


@pytest.fixture(scope="module", params=ENGINES)
async def engine(
    request: pytest.FixtureRequest, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    """One engine for all tests of this file."""
    async with AsyncExitStack() as stack:
        if request.param == "vllm":
            shared: SharedEngine = request.getfixturevalue("vllm")
            engine = await stack.enter_async_context(shared.running(models[0]))
        else:
            api = request.param.removeprefix("fake-")
            log = tmp_path_factory.mktemp(request.param) / "engine.log"
            engine = (await stack.enter_async_context(fake_engine(api, models[0], log))).engine
        yield engine


def counted(chunks: Sequence[TokenChunk]) -> int:
    """The number of sampled tokens according to the engine."""
    assert chunks[-1].labels is not None
    return sum(count for _, count in chunks[-1].labels)


async def sampled_by(engine: Engine) -> int:
    """The number of tokens that the engine has sampled since its start, by its own count."""
    load = await engine.read_load()
    assert load is not None
    return load.sampled


async def settled(engine: Engine, before: int, *requests: list[TokenChunk]) -> int:
    """The tokens of requests that began when the engine had sampled `before`: it samples no more of them, and all have come."""
    last = -1
    async with within("a paused engine samples nothing more, and what it has sampled comes", PATIENCE_S):
        while True:
            sampled = await sampled_by(engine) - before
            if sampled == last == sum(len(ids_of(chunks)) for chunks in requests):
                return sampled
            last = sampled
            await asyncio.sleep(0.3)


async def frozen(
    engine: Engine, name: str
) -> tuple[asyncio.Task[list[TokenChunk]], list[TokenChunk], int, int]:
    """A request of WHOLE tokens that a pause froze before its end, how many had come when the pause was sent, and how many the
    engine had sampled before the request."""
    for attempt in range(20):
        before = await sampled_by(engine)
        task, chunks = await begun(engine, ask(f"{name}.{attempt}", max_tokens=WHOLE))
        arrived = len(ids_of(chunks))
        await engine.pause(keep=True)
        if await settled(engine, before, chunks) < WHOLE:
            return task, chunks, arrived, before
        await engine.resume()
    raise AssertionError("the engine is always faster")


async def test_tokens_may_come_gathered_and_are_the_same(engine: Engine) -> None:
    single = await response(engine, ask("single", temperature=0.0, max_tokens=40))
    gathered = await response(engine, ask("gathered", interval=16, temperature=0.0, max_tokens=40))
    for chunks in (single, gathered):
        check_form(chunks)
        assert counted(chunks) == len(ids_of(chunks)) == 40
    assert ids_of(single) == ids_of(gathered)
    assert len(gathered) <= 5


async def test_the_limit_of_tokens_ends_with_length(engine: Engine) -> None:
    chunks = await response(engine, ask("length", max_tokens=5))
    assert (len(ids_of(chunks)), chunks[-1].finish) == (5, "length")


@pytest.mark.parametrize("interval", [1, 16])
async def test_a_stop_token_ends_with_stop_and_is_the_last_token(engine: Engine, interval: int) -> None:
    every = list(range(0, 272, 2))
    request = ask(f"stop-{interval}", interval=interval, max_tokens=LONG, stop_token_ids=every)
    chunks = await response(engine, request)
    check_form(chunks)
    assert chunks[-1].finish == "stop"
    assert ids_of(chunks)[-1] in every
    assert not set(ids_of(chunks)[:-1]) & set(every)


async def test_a_pause_gives_back_what_was_sampled_and_nothing_more_is(engine: Engine) -> None:
    request = ask("paused", max_tokens=LONG)
    task, chunks = await begun(engine, request)
    await engine.pause()
    try:
        await result_of(task, "the request ends", PATIENCE_S)
        check_form(chunks)
        assert chunks[-1].finish == "abort"
        sampled = ids_of(chunks)
        assert 3 <= len(sampled) < LONG
        late = asyncio.create_task(response(engine, ask("late", max_tokens=4)), name="late")
        async with within("the late request is given back, immediately or by a pause after it", PATIENCE_S):
            while not (await asyncio.wait({late}, timeout=0.5))[0]:
                await engine.pause()
        given_back = late.result()
        assert (ids_of(given_back), given_back[-1].finish) == ([], "abort")
    finally:
        await engine.resume()
    left = Sampling(max_tokens=6)
    continued = await response(engine, GenerateRequest("paused.2", [*PROMPT, *sampled], left))
    check_form(continued)
    assert len(ids_of(continued)) == 6


async def test_gathered_tokens_are_given_back_too(engine: Engine) -> None:
    """Also those that had not been sent when the pause came."""
    task, chunks = await begun(engine, ask("gathered-paused", interval=16, max_tokens=LONG))
    await engine.pause()
    try:
        await result_of(task, "the request ends", PATIENCE_S)
    finally:
        await engine.resume()
    check_form(chunks)
    assert chunks[-1].finish == "abort"
    assert counted(chunks) == len(ids_of(chunks))


async def test_a_frozen_request_goes_on_under_the_next_weights(engine: Engine, models: list[Path]) -> None:
    old, new = 20, 21
    await engine.label(old)
    task, chunks, arrived, start = await frozen(engine, "frozen")
    try:
        silent = len(ids_of(chunks))
        assert not task.done()
        await engine.load(str(models[1]))
        await engine.label(new)
        assert await settled(engine, start, chunks) == silent
    finally:
        await engine.resume()
    await result_of(task, "the request ends", PATIENCE_S)
    await reload(engine, models[0])
    check_form(chunks)
    assert (len(ids_of(chunks)), chunks[-1].finish) == (WHOLE, "length")
    assert chunks[-1].labels is not None
    (first, before), (second, after) = chunks[-1].labels
    assert (first, second, before + after) == (str(old), str(new), WHOLE)
    assert arrived <= before


@pytest.mark.parametrize("state", ["running", "frozen"])
async def test_one_request_is_given_back_and_another_is_not(engine: Engine, state: str) -> None:
    """Even if the other's id begins alike."""
    start = await sampled_by(engine)
    task, chunks = await begun(engine, ask(f"{state}.1", max_tokens=LONG))
    other, others = await begun(engine, ask(f"{state}.10", max_tokens=LONG))
    if state != "running":
        await engine.pause(keep=True)
    try:
        await engine.abort([f"{state}.1", "unknown"])
        await result_of(task, "the request ends", PATIENCE_S)
        if state != "running":
            await settled(engine, start, chunks, others)
        before = len(ids_of(others))
        assert not other.done()
    finally:
        await engine.resume()
    check_form(chunks)
    assert chunks[-1].finish == "abort"
    assert counted(chunks) == len(ids_of(chunks))
    await engine.abort([])
    async with within("the other request goes on", PATIENCE_S):
        while len(ids_of(others)) <= before:
            await asyncio.sleep(0.05)
    await engine.abort([f"{state}.1", f"{state}.10"])
    await result_of(other, "the other request ends", PATIENCE_S)
    assert counted(others) == len(ids_of(others))


async def test_frozen_requests_can_be_given_back_after_all(engine: Engine, models: list[Path]) -> None:
    task, chunks = await begun(engine, ask("thawed", max_tokens=LONG))
    await engine.pause(keep=True)
    await engine.pause()
    try:
        await result_of(task, "the request ends", PATIENCE_S)
        await engine.load(str(models[0]))
    finally:
        await engine.resume()
    check_form(chunks)
    assert chunks[-1].finish == "abort"
    assert len(ids_of(await response(engine, ask("after", max_tokens=3)))) == 3


async def test_salts_change_no_token(engine: Engine) -> None:
    prompt = PROMPT * 8
    responses = [
        await response(engine, ask(f"salt-{n}", prompt, salt=salt, temperature=0.0, max_tokens=12))
        for n, salt in enumerate(("", "v1", "v2", "v2"))
    ]
    for chunks in responses:
        check_form(chunks)
        assert ids_of(chunks) == ids_of(responses[0])


async def reload(engine: Engine, model: Path) -> None:
    await engine.pause()
    await engine.load(str(model))
    await engine.resume()


async def test_loading_changes_the_log_probabilities_of_the_same_tokens(
    engine: Engine, models: list[Path]
) -> None:
    sequence = PROMPT[1:8]
    before = await engine.score(sequence)
    assert len(before) == len(sequence) - 1
    for model in (models[1], models[0]):
        await reload(engine, model)
        after = await engine.score(sequence)
        gap = sum(abs(a - b) for a, b in zip(before, after, strict=True)) / len(before)
        assert gap > 0.1 if model == models[1] else gap < 1e-3


async def test_the_label_is_on_what_is_sampled_after_it(engine: Engine) -> None:
    for version in (7, 8):
        await engine.label(version)
        chunks = await response(engine, ask(f"label-{version}", max_tokens=3))
        assert [chunk.labels for chunk in chunks] == [None] * (len(chunks) - 1) + [((str(version), 3),)]


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_has_given_everything_back_and_wakes_with_the_weights_that_are_loaded(
    engine: Engine, models: list[Path], level: Level
) -> None:
    before = await engine.score(PROMPT)
    task, chunks = await begun(engine, ask(f"slept-{level}", max_tokens=LONG))
    await engine.pause()
    await result_of(task, "the request ends", PATIENCE_S)
    assert chunks[-1].finish == "abort"
    assert not await engine.frees_memory(), "there is no accelerator"
    await engine.sleep(level)
    assert await engine.healthy()
    late = asyncio.create_task(refused_or_silent(engine, f"late-{level}"), name="late")
    await asyncio.sleep(0.3)
    late.cancel()
    await asyncio.wait({late})
    assert late.cancelled() or late.exception() is None
    await engine.wake()
    await engine.load(str(models[1]))
    await engine.resume()
    other = await engine.score(PROMPT)
    assert sum(abs(a - b) for a, b in zip(before, other, strict=True)) / len(before) > 0.1
    assert len(ids_of(await response(engine, ask(f"woken-{level}", max_tokens=3)))) == 3
    await engine.pause()
    await engine.wake()  # it is awake: nothing but a pause
    await engine.load(str(models[0]))
    await engine.resume()
    again = await engine.score(PROMPT)
    assert sum(abs(a - b) for a, b in zip(before, again, strict=True)) / len(before) < 1e-3


async def refused_or_silent(engine: Engine, name: str) -> None:
    """A request to an engine that sleeps: no token comes of it."""
    with contextlib.suppress(EngineUnreachable):
        async for chunk in engine.generate(ask(name, max_tokens=3)):
            assert not chunk.ids


async def test_an_engine_reports_its_load(engine: Engine) -> None:
    """Running requests, cache use and sampled tokens are reported, and no running request at the end."""
    before = await engine.read_load()
    assert before is not None
    assert (before.running, before.waiting) == (0, 0)
    async with aclosing(engine.generate(ask("busy", max_tokens=LONG))) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            sampled = chunk.ids
            break
        assert sampled
        async with within("the engine reports the request", PATIENCE_S):
            while (
                (now := await engine.read_load()) is None or now.running != 1 or now.sampled <= before.sampled
            ):
                await asyncio.sleep(0.02)
            while (now := await engine.read_load()) is None or now.kv < len(PROMPT):
                await asyncio.sleep(0.02)
    async with within("the engine reports that it is idle", PATIENCE_S):
        while (after := await engine.read_load()) is None or after.running:
            await asyncio.sleep(0.02)
    assert now.sampled <= after.sampled < before.sampled + LONG, "closing the iterator stopped the work"


async def test_an_engine_that_counts_its_steps_counts_those_of_a_request(engine: Engine) -> None:
    """vLLM does; the fake engines have no steps."""
    before = await engine.read_load()
    assert before is not None
    if before.counts is None:
        pytest.skip("it does not count its steps")
    sampled = sum(len(chunk.ids) for chunk in await response(engine, ask("counted", max_tokens=20)))
    async with within("the engine reports the request", PATIENCE_S):
        while (after := await engine.read_load()) is None or after.sampled < before.sampled + sampled:
            await asyncio.sleep(0.02)
    assert after.counts is not None
    assert after.counts.gaps - before.counts.gaps == sampled - 1
    assert after.counts.gaps_s > before.counts.gaps_s
    assert sampled <= after.counts.steps - before.counts.steps <= sampled + 1
    assert 0 < after.counts.prompts - before.counts.prompts <= len(PROMPT)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/no"},
        {"allOf": [{"type": "string"}, {"type": "number"}]},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "string", "pattern": "("},
        {"type": "object", "required": "a"},
        {"enum": []},
    ],
    ids=["reference", "types", "bounds", "pattern", "required", "enum"],
)
async def test_a_schema_that_cannot_be_compiled_is_refused(engine: Engine, schema: dict[str, Any]) -> None:
    grammar = Grammar("json", json.dumps(schema))
    with pytest.raises(EngineRefused) as refused:
        await response(engine, ask(f"schema-{hash(grammar)}", max_tokens=3, grammar=grammar))
    assert re.search("grammar|schema", refused.value.message, re.IGNORECASE)
    assert await engine.healthy()


async def test_a_least_number_of_tokens_forbids_an_earlier_end(engine: Engine) -> None:
    every = list(range(0, 272, 2))
    chunks = await response(engine, ask("least", max_tokens=6, min_tokens=6, stop_token_ids=every))
    assert len(ids_of(chunks)) == 6
    assert chunks[-1].finish == "length"


async def test_a_token_that_the_model_does_not_have_is_refused(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    if isinstance(request.node, pytest.Function) and "fake" in request.node.name:
        pytest.skip("the fake engine has a token for every number")
    with pytest.raises(EngineRefused):
        await response(engine, ask("unknown", [1, 2, 10_000_000], max_tokens=3))
    assert await engine.healthy()


@pytest.mark.parametrize(
    "requested",
    [
        {"temperature": 0.5},
        {"temperature": 0.02},
        {"temperature": 0.001},
        {"temperature": 1e-50},
        {"temperature": 0.0, "top_p": 0.1, "top_k": 1, "min_p": 0.9},
    ],
    ids=str,
)
async def test_the_recorded_temperature_is_the_one_that_the_engine_divides_by(
    engine: Engine, requested: dict[str, Any]
) -> None:
    """By logits l, log-probabilities at temperature T differ by (l_i - l_j) / T: two reports of one prompt have the ratio T."""
    recorded = used("sglang" if isinstance(engine, SGLangEngine) else "vllm", Sampling(**requested))
    plain = await first_gap(engine, Sampling())
    found = [await first_gap(engine, sampling) for sampling in (Sampling(**requested), recorded)]
    if plain == 0.0:
        pytest.skip("the fake engine has no distributions")
    assert [plain / gap for gap in found] == pytest.approx([recorded.temperature or 1.0] * 2, rel=1e-3)


async def first_gap(engine: Engine, sampling: Sampling) -> float:
    """Return how much the first token's greatest log-probability is above the fourth greatest, in nats; 0: not reported.

    The sampled token may be in place of the fifth.
    """
    request = GenerateRequest("gap", PROMPT, replace(sampling, max_tokens=1, top_logprobs=5))
    values = sorted(
        value for chunk in await response(engine, request) for row in chunk.top or () for _, value in row
    )
    return values[-1] - values[-4] if values else 0.0


async def test_a_seed_of_minus_1_is_none_to_vllm_as_it_is_recorded(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    if isinstance(engine, SGLangEngine):
        pytest.skip("it is a seed to SGLang")
    assert used("vllm", Sampling(seed=-1)).seed is None
    responses = []
    for n, seed in enumerate((-1, -1, None, 7, 7)):
        responses.append(ids_of(await response(engine, ask(f"seed-{n}", seed=seed, max_tokens=40))))
    assert responses[3] == responses[4] != responses[0]
    if isinstance(request.node, pytest.Function) and "fake" in request.node.name:
        assert responses[0] == responses[2], "without a seed the fake engine always draws the same"
    else:
        assert responses[0] != responses[1]
