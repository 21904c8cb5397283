"""SGLang 0.5 over HTTP (written against 0.5.23): token ids in, token ids and log-probabilities out.

The server must run without `SGLANG_RETURN_ORIGINAL_LOGPROB`, so that log-probabilities are those after temperature. They are
those before top-p, so they are the sampling distribution's only where `top_p` is 1 (the gateway flags other tokens as truncated
in any case). A seed has an effect only with `--enable-deterministic-inference`. `--incremental-streaming-output` makes
long responses cheaper: without it every event repeats all earlier tokens. `--tokenizer-worker-num` must be 1. A client that
reaches the control endpoints can change the weights, so the server must listen on a loopback address or a private network.

Behavior of SGLang that its names do not suggest, and where they are handled:
- `ignore_eos` switches `stop_token_ids` off too (`_body`);
- an abort reaches every id that begins with the given one (`_rid`);
- an abort does not reach a request that arrived during a pause and waits before the scheduler (`_first`);
- an abort of a request that is frozen in place takes effect only when the engine resumes: frozen requests are put back into the
  queue (`retract`), where aborts reach them;
- a load with `flush_cache` fails, half done, while requests are just ending: `pause` flushes when that is possible, and `load`
  never does;
- a new label aborts every request unless configured otherwise (`label`);
- `/health` samples a token, so it calls a paused engine ill (`healthy`);
- only an idle server can release memory, and releasing it twice fails (`sleep`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from gateway.engines.base import GenerateRequest, Level, Load, TokenChunk
from gateway.engines.http import FINISH, EngineHTTP, HTTPEngine, failure, version_spans
from gateway.engines.prometheus_text import samples
from headgate.errors import EngineError, EngineUnreachable
from headgate.types import FinishReason

_GENERATE = "/generate"
_GRAMMARS = {"json": "json_schema", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}
_FIGURES = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_used_tokens",
    "sglang:generation_tokens_total",
)
_IDLE_S = "60"
"""The time that the engine may take to release aborted requests."""


class SGLangEngine(HTTPEngine):
    """One SGLang server at `base_url`, which no other client pauses."""

    def __init__(self, name: str, base_url: str, silence_s: float = 600.0) -> None:
        """Connect to the server; a restart is noticed by the version that it reports at the end of a run."""
        super().__init__(name, EngineHTTP(name, base_url, silence_s))
        self._paused = False
        self._asleep: bool | None = None
        """None: it is not known of a server that was found."""
        self._silent: dict[str, asyncio.Task[dict[str, Any] | None]] = {}
        """Requests from which nothing has come yet: the task that waits for their first event."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample a request; give it back immediately during a pause."""
        if self._paused:
            yield TokenChunk([], [], "abort")
            return
        reader = StreamReader()
        async with aclosing(self._http.events(_GENERATE, _body(request))) as events:
            first = await self._first(request.request_id, events)
            if first is None:
                yield TokenChunk([], [], "abort")
                return
            yield reader.chunk(first)
            async for event in events:
                yield reader.chunk(event)
        if not reader.finished:
            raise self._cut_off()

    async def pause(self, *, keep: bool = False) -> None:
        """Frozen requests go back to the queue, and their tokens are computed again."""
        await self._pause("retract" if keep else "abort")
        if self._paused and not keep:
            self._cut(list(self._silent))
        self._paused = True
        # With a timeout the engine would also wait for an empty queue, which it does not have after `retract`.
        await self._http.post("/flush_cache", params=None if keep else {"timeout": _IDLE_S})

    async def abort(self, request_ids: Sequence[str]) -> None:
        if not request_ids:
            return
        await asyncio.gather(
            *(self._http.post("/abort_request", {"rid": _rid(name)}) for name in request_ids)
        )
        if self._paused:
            self._cut(request_ids)

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {})
        self._paused = False

    async def load(self, path: str) -> None:
        """`pause` has cleared the cache, if it was to be."""
        await self._http.post("/update_weights_from_disk", {"model_path": path, "flush_cache": False})

    async def label(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._http.post("/update_weight_version", body)

    async def returns_routes(self) -> bool:
        return False

    async def frees_memory(self) -> bool:
        """With `--enable-memory-saver`."""
        return bool(orjson.loads(await self._http.get("/get_server_info")).get("enable_memory_saver"))

    async def sleep(self, level: Level) -> None:
        """SGLang has one level, at which the weights are forgotten; it needs `--enable-memory-saver`."""
        await self._http.post("/release_memory_occupation", {})
        self._asleep = True

    async def wake(self) -> None:
        """Wake the server; ignore the error of one that is awake."""
        try:
            if self._asleep is not False:
                await self._http.post("/resume_memory_occupation", {})
        except EngineUnreachable:
            raise
        except EngineError:
            if self._asleep:
                raise
        self._asleep = False
        await self.pause()

    async def score(self, ids: Sequence[int], adapter: str = "") -> list[float]:
        """Score by one prefill with the prompt's log-probabilities."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        rows = orjson.loads(await self._http.post(_GENERATE, body))["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(ids):
            raise EngineError(f"engine {self.name} scored other tokens than requested")
        return [row[0] for row in rows[1:]]

    async def read_load(self) -> Load | None:
        """None without `--enable-metrics`. SGLang counts a request's tokens only when it ends."""
        try:
            page = (await self._http.get("/metrics")).decode()
        except EngineUnreachable:
            raise
        except EngineError:
            return None
        found = samples(page, _FIGURES)
        running, waiting, kv, sampled = (int(sum(found[name])) for name in _FIGURES)
        return Load(running, waiting, kv, sampled) if found[_FIGURES[0]] else None

    async def healthy(self) -> bool:
        """Return true if the engine responds. `/health` takes a second and can take twenty."""
        return await (
            self._http.returns_ok("/ping", 5.0) if self._paused else self._http.returns_ok("/health", 25.0)
        )

    async def _pause(self, mode: str) -> None:
        await self._http.post("/pause_generation", {"mode": mode})

    async def _first(self, name: str, events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the first event of a request; None if it was cut before one came."""
        first = asyncio.ensure_future(anext(events, None))
        self._silent[name] = first
        try:
            await asyncio.wait({first})
        finally:
            del self._silent[name]
            first.cancel()
            await asyncio.wait({first})
        if first.cancelled():
            return None
        return first.result() or {"error": {"message": "the stream ended before it began"}}

    def _cut(self, names: Iterable[str]) -> None:
        """Give back requests that no abort reaches, by closing their connections. Only what is silent is: nothing is lost."""
        for name in names:
            if name in self._silent:
                self._silent[name].cancel()


class StreamReader:
    """Turns the events of one response into chunks, whether each repeats what came before or not."""

    def __init__(self) -> None:
        self.finished = False
        self._count = 0

    def chunk(self, event: dict[str, Any]) -> TokenChunk:
        """Return the new tokens of an event. In every form of stream, `completion_tokens` counts all tokens so far and the newest
        log-probabilities come last. `output_ids` is not read: in an incremental stream the event of an abort repeats the last
        token there."""
        if "error" in event:
            raise failure(event["error"])
        meta = event["meta_info"]
        count = meta.get("completion_tokens", self._count)
        new = count - self._count
        rows = meta["output_token_logprobs"][-new:] if new > 0 else ()
        if len(rows) != new:
            raise EngineError("the engine sent tokens without their log-probabilities")
        self._count = count
        reason = meta["finish_reason"]
        finish = _finish(reason) if reason else None
        self.finished = finish is not None
        return TokenChunk(
            ids=[row[1] for row in rows],
            logprobs=[row[0] for row in rows],
            finish=finish,
            # Without spans the account is missing: the one `weight_version` is that of the end.
            labels=version_spans(meta.get("weight_versions")) if finish else None,
            top=_top(meta, new),
        )


def _rid(request_id: str) -> str:
    """Return the id by which SGLang knows a request: one that no other id begins with."""
    return f"{request_id}|"


def _body(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "min_new_tokens": sampling.min_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        # SGLang heeds these together with the model's own stop tokens, or not at all.
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": not sampling.stop_token_ids,
        "stream_interval": request.interval,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
    if sampling.grammar is not None:
        params[_GRAMMARS[sampling.grammar.kind]] = sampling.grammar.value
    body: dict[str, Any] = {
        "rid": _rid(request.request_id),
        "input_ids": request.prompt,
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
    }
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body


def _finish(reason: dict[str, Any]) -> FinishReason:
    """Raise if the end is a failure: aborts that were not requested have a status, and NaNs look like a stop."""
    if reason.get("status_code") is not None:
        raise failure({"message": reason.get("message"), "code": reason["status_code"]})
    if reason["type"] == "stop" and isinstance(reason.get("matched"), str):
        raise failure({"message": reason["matched"]})
    return FINISH[reason["type"]]


def _top(meta: dict[str, Any], new: int) -> list[list[tuple[int, float]]] | None:
    """Return the alternatives to the newest tokens, if they were requested."""
    rows = meta.get("output_top_logprobs")
    if not rows or not new:
        return None
    return [[(entry[1], entry[0]) for entry in row or ()] for row in rows[-new:]]
