"""Predicts the lengths of calls when they begin, and learns from finished calls.

Owns a ranker (`scheduler/lengths`) for each trained model. Each process learns from its own calls; at its start it reads the
newest calls from the store, whichever process made them. Invariants: the ranker learns only from calls that were sampled to their
end; work of more than about a millisecond runs in a thread; a call without a prediction is served like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection

from gateway.config import LengthSettings
from gateway.generation.call import Call
from gateway.store import lengths as statements
from gateway.store import turns
from gateway.store.database import Database
from gateway.trajectories.tree import TokenTree, TreePosition
from headgate.errors import GatewayError
from scheduler.lengths import TAIL_SHARE, Features, Prediction, Ranker, make_ranker
from scheduler.lengths.recall import tail_recall

log = logging.getLogger(__name__)
_WARM_CALLS = 2000
"""The newest calls in the store from which a process learns when it starts: enough for every task of a pass."""
_WARM_S = 5.0
"""The longest time that this may delay a start, for all models."""

_WINDOW = 500
"""The newest calls that `describe` summarizes."""
_LEAST = 50
"""The least number of calls for which figures are returned."""
_EPISODES = 64
"""Episodes that are read from the store in one query."""

Past = tuple[Features, int]
"""A call of the past, and its length."""


class Episode(Protocol):
    """An open episode, as far as predictions need it."""

    @property
    def id(self) -> str: ...

    @property
    def task_id(self) -> str: ...

    @property
    def group_id(self) -> str: ...


class Lengths:
    """The rankers of a process."""

    def __init__(self, settings: LengthSettings, models: Iterable[str]) -> None:
        """`models`: the trained ones."""
        self._settings = settings
        self._threads = ThreadPoolExecutor(1, "lengths")
        self._closed = False
        self._models = {name: _Model(settings, self._submit) for name in models}

    async def close(self) -> None:
        """Finish what was begun; calls that end later teach nothing."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def begin(
        self, model: str, episode: Episode, call: Call, messages: Sequence[Any], tools: Sequence[Any]
    ) -> PredictedCall | None:
        """Predict the length of a call that begins; None for a model that is not trained."""
        found = self._models.get(model)
        if found is None:
            return None
        features = Features(
            call=call.call_id,
            task=episode.task_id,
            group=episode.group_id,
            episode=episode.id,
            turn=sum(message.get("role") == "assistant" for message in messages),
            prompt=call.prompt,
            messages=len(messages),
            tools=len(tools),
            most=call.sampling.max_tokens,
        )
        prediction = found.ranker.predict(features)
        if prediction.known:
            call.predicted(round(prediction.expected))
        return PredictedCall(found, features, prediction)

    def describe(self, model: str) -> dict[str, Any] | None:
        """Return the quality of the newest predictions; None for a model that is not trained."""
        return self._models[model].describe() if model in self._models else None

    async def warm_up(self, database: Database) -> None:
        """Learn from the newest calls in the store, for `_WARM_S` seconds at most."""
        ends = time.monotonic() + _WARM_S
        for name, model in self._models.items():
            try:
                past = await self._newest(database, name, ends)
            except GatewayError as error:
                log.warning("length predictions of %s: past calls could not be read: %s", name, error.message)
                continue
            learned = await asyncio.to_thread(_learn, model.ranker, past, ends)
            log.info("length predictions of %s: fitted to %d calls in the store", name, learned)

    async def _newest(self, database: Database, model: str, ends: float) -> list[Past]:
        """Return the newest calls, oldest first, as far as there is time to read them."""
        limit = _WARM_CALLS
        episodes = await database.read(lambda c: statements.newest_episodes(c, model, limit))
        found: list[Past] = []
        for start in range(0, len(episodes), _EPISODES):
            if len(found) >= limit or time.monotonic() > ends:
                break
            some = episodes[start : start + _EPISODES]
            found = await database.read(partial(past_calls, model=model, episode_ids=some)) + found
        return found

    def _submit(self, work: Callable[[], None]) -> None:
        if not self._closed:
            self._threads.submit(work).add_done_callback(_report)


class PredictedCall:
    """A call whose length was predicted. Its true length is learned once it is complete."""

    def __init__(self, model: _Model, features: Features, prediction: Prediction) -> None:
        self._model = model
        self._features = features
        self._prediction = prediction

    def completed(self, tokens: int) -> None:
        """Learn the number of sampled tokens."""
        self._model.end(self._features, self._prediction, tokens)


class _Model:
    """A model's ranker, and how good its recent predictions were."""

    def __init__(self, settings: LengthSettings, background: Callable[[Callable[[], None]], None]) -> None:
        self.ranker: Ranker = make_ranker(settings.ranker, run=background)
        self._share = TAIL_SHARE
        self._newest: deque[tuple[Prediction, int]] = deque(maxlen=_WINDOW)

    def end(self, features: Features, prediction: Prediction, length: int) -> None:
        """Learn from a call that has ended."""
        self.ranker.learn(features, length)
        if prediction.known:
            self._newest.append((prediction, length))

    def describe(self) -> dict[str, Any]:
        count = len(self._newest)
        predictions = [prediction for prediction, _ in self._newest]
        lengths = [length for _, length in self._newest]
        known: dict[str, float | None] = {"tail_recall": None, "mean_error": None, "tail_share": None}
        if count >= _LEAST:
            expected = [prediction.expected for prediction in predictions]
            known["tail_recall"] = tail_recall(expected, lengths, self._share)
            known["mean_error"] = sum(abs(e - n) for e, n in zip(expected, lengths, strict=True)) / count
            known["tail_share"] = sum(prediction.tail for prediction in predictions) / count
        return {"calls": count, **known}


def past_calls(connection: Connection, model: str, episode_ids: Sequence[str]) -> list[Past]:
    """Return the past calls of some episodes. Numbers of messages are not stored; they are taken to be those of a plain
    conversation."""
    nodes = turns.nodes(connection, model, episode_ids)
    trees = {episode: TokenTree(found) for episode, found in nodes.items()}
    before: dict[str, int] = {}
    found: list[Past] = []
    for call in statements.finished_calls(connection, model, episode_ids):
        episode, tokens, sampled = call["episode_id"], call["prompt_tokens"], call["completion_tokens"]
        turn = before.get(episode, 0)
        before[episode] = turn + 1
        prompt = trees[episode].path(TreePosition(call["node"], sampled, tokens + sampled))[:tokens]
        most = int(call["used"].get("max_tokens") or 0)
        names = call["id"], call["task_id"], call["group_id"], episode
        found.append((Features(*names, turn, prompt, 2 * turn + 1, 0, most), sampled))
    return found


def _learn(ranker: Ranker, past: Sequence[Past], ends: float) -> int:
    """Teach the ranker until the time is up; return the number of calls learned."""
    for i, (features, length) in enumerate(past):
        if time.monotonic() > ends:
            return i
        ranker.learn(features, length)
    return len(past)


def _report(work: Future[None]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.error("a length ranker could not be fitted: %r", error)
