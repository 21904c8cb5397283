"""The fake engine: it samples, pauses, aborts, loads and misbehaves. `vllm_api` and `sglang_api` serve it on a port.

Sampling is a pure function (`sampling.next_token`) of the weights' identity, all tokens so far and the seed, so a test can
compute, without this server, which token follows a context, with which log-probability and under which version. Its weights are
a directory; their identity is the sha256 of `model.safetensors`, or of the path if there is no such file. A directory with a
`block.json` samples only the tokens of its block (`blocks`): such weights name themselves in every token. One with a
`faults.json` cannot be loaded (`faults`). With a log (`log`) the log-probabilities are marks that name the sampling.

`set_faults` (`POST /fake/faults`) sets misbehavior: `delay_s` (per token), `lag_s` (between sampling a token and sending it),
`drop_after` (the connection breaks after this many tokens), `stale_reload` (a reload succeeds and changes nothing), `stall`
(no more tokens), `load_s` (the duration of a load), `fail_load`, `fail_after` (an error event after this many tokens),
`logprob_noise`, `endless` (replies end at their `max_tokens`), `sick` (`/health` fails), `sleep_mode` (it reports that sleeping
frees its memory), `sleep_s` (the time that falling asleep takes), `wake_s`, `fail_sleep`, `fail_wake`.

`hold_after` is a barrier: a request stops after this many tokens, until it is aborted or the barrier moves. `arrived`
waits for requests at it (`held` counts them), and `release` lets them go; so a test can act when it knows what runs. `hold_load`
is a barrier for loads: none begins to take weights before it is removed; `hold_receive` one for transfers (`transfer`).

While asleep it samples nothing, refuses requests (`refused` counts them), and has no prefix cache; after level 2 no weights
either, so that until a load it samples tokens that no checkpoint would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from gateway.engines.fake.blocks import Block
from gateway.engines.fake.faults import Faults, catch
from gateway.engines.fake.log import SampleLog
from gateway.engines.fake.prefix_cache import PrefixCache
from gateway.engines.fake.requests import RunningRequest, choice_of
from gateway.engines.fake.routes import routers_in, token_routes
from gateway.engines.fake.sampling import Fingerprint, draw, identity, logprob_of
from gateway.engines.fake.transfer import Transfer
from headgate.routes import RouterShape
from headgate.weights.tensors import scan


class FakeEngine:
    """The engine's state: weights, label, pause, faults, a prefix cache, and the requests that run."""

    def __init__(
        self,
        weights: str,
        faults: Faults | None = None,
        log: SampleLog | None = None,
        *,
        returns_routes: bool = False,
    ) -> None:
        """`returns_routes`: report the experts of tokens. Raise ValueError if the weights are of no mixture."""
        self._log = log
        self.routers = routers_in(weights) if returns_routes else None
        """The routers whose experts it reports."""
        self.block: Block | None = None
        self.images: set[str] = set()
        """The hashes of the images that it was sent since its caches were emptied."""
        self.adapters: dict[str, tuple[str, Block | None]] = {}
        """The identity and the block of each adapter that requests can request, by its name."""
        self._workers: dict[int, tuple[str, Block | None]] = {}
        """The adapters that were loaded, by their numbers. Like vLLM's workers, it keeps one whose name is forgotten."""
        self._install(weights)
        self.label = "default"
        self._loading = asyncio.Lock()
        self.faults = faults or Faults()
        self.sampled = 0
        """Tokens since the start."""
        self.paused = False
        self.asleep = 0
        """The level; 0: awake."""
        self.refused = 0
        """Requests that were refused while the engine slept."""
        self.sleeps = 0
        self.cache = PrefixCache()
        self._requests: dict[str, RunningRequest] = {}
        self._changed = asyncio.Event()
        self.transfer = Transfer()

    @property
    def received_frames(self) -> int:
        """Frames that were begun of the running transfer, or of the last."""
        return self.transfer.received_frames

    @property
    def figures(self) -> tuple[int, int, int]:
        """Requests that are sampled, and that wait in the queue; and the tokens of the former."""
        inside = [request for request in self._requests.values() if not self._queued(request)]
        return len(inside), len(self._requests) - len(inside), sum(len(request.context) for request in inside)

    @property
    def running(self) -> int:
        """Requests that were begun and have not ended."""
        return len(self._requests)

    @property
    def held(self) -> int:
        """Requests at the barrier."""
        return sum(request.waits and self._at_barrier(request) for request in self._requests.values())

    async def arrived(self, requests: int) -> None:
        """Wait until this many requests, or more, wait at the barrier."""
        while self.held < requests:
            await self._changed.wait()

    def hold_after(self, tokens: int) -> None:
        """Set the barrier: requests that have sampled this many tokens stop, and those before it continue."""
        self.set_faults({"hold_after": tokens})

    def release(self) -> None:
        """Take the barrier away."""
        self.set_faults({"hold_after": None})

    def pause(self, *, keep: bool = False, clear_cache: bool = True) -> None:
        """Sample nothing more, and abort what runs unless `keep`."""
        if not keep:
            self.abort(list(self._requests))
        if clear_cache:
            self.clear_cache()
        self._set_paused(True)

    def clear_cache(self) -> None:
        """Forget every prefix."""
        self.cache.clear()
        self.images.clear()

    def resume(self) -> None:
        """Sample again."""
        self._set_paused(False)

    def abort(self, request_ids: Sequence[str]) -> int:
        """End requests; return how many there were."""
        found = [self._requests[name] for name in request_ids if name in self._requests]
        for request in found:
            request.aborted = True
        self._wake()
        return len(found)

    async def load(self, weights: str) -> None:
        """Take over the weights in a directory, unless a fault forbids it; one load after the other, also if its client left."""
        async with self._loading:
            await self._may_load()
            if not self.faults.stale_reload:
                self._install(weights)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter while requests run, unless a fault forbids it."""
        async with self._loading:
            await self._may_load()
            own = (self.weights_id, self.block)
            catch(path)
            self.adapters[name] = own if self.faults.stale_reload else (identity(path), Block.read(path))
            self._workers[max(self._workers, default=0) + 1] = self.adapters[name]
            if self._log is not None:
                self._log.load(path)

    def list_adapters(self) -> set[int]:
        """Return the numbers of the adapters that the workers have."""
        return set(self._workers)

    def remove_adapter(self, number: int) -> bool:
        """Take an adapter out of the workers; return whether they had it."""
        return self._workers.pop(number, None) is not None

    def _weights_of(self, model: str | None) -> tuple[str, Block | None]:
        """Return the identity and the block of an adapter, or of the engine's own weights.

        Its own weights cannot be used once it has adapters: like vLLM's CPU build, it runs such requests with the last adapter.
        """
        last = list(self._workers.values())[-1:]
        return self.adapters.get(model or "", *last or [(self.weights_id, self.block)])

    async def receive_weights(self, version: int, timeout_s: float) -> None:
        """Take over the weights that were received, unless a fault forbids it."""
        async with self._loading:
            found = await self.transfer.received(version, timeout_s)
            await self._may_load()
            if not self.faults.stale_reload:
                self.weights_id, self.block = found
            if self._log is not None:
                self._log.load(f"v{version:06d}")

    def prove(self, path: str, *, adapter: bool = False) -> dict[str, Any]:
        """Compare the weights with those in a directory, in the form of the plugin that vLLM has."""
        held = {one for one, _ in self._workers.values()} if adapter else {self.weights_id}
        hashes = {
            name: digests
            for file in sorted(Path(path).glob("*.safetensors"))
            for name, digests in scan(file).digests.items()
        }
        wrong = (
            {}
            if identity(path) in held
            else dict.fromkeys(hashes or ("all",), "the engine holds other weights")
        )
        return {"hashes": hashes, "wrong": wrong, "missing": []}

    async def _may_load(self) -> None:
        await asyncio.sleep(self.faults.load_s)
        while self.faults.hold_load:
            await self._changed.wait()
        if self.faults.fail_load:
            raise RuntimeError("load failed (fault)")

    async def sleep(self, level: int) -> None:
        """End what runs, pause, and free the memory, unless a fault forbids it."""
        await asyncio.sleep(self.faults.sleep_s)
        if self.faults.fail_sleep:
            raise RuntimeError("sleep failed (fault)")
        self.pause()
        self.asleep, self.sleeps = level, self.sleeps + 1
        if level == 2:
            self.weights_id = "forgotten"
            self.block = None

    async def wake(self) -> None:
        """Take its memory again."""
        await asyncio.sleep(self.faults.wake_s)
        if self.faults.fail_wake:
            raise RuntimeError("wake failed (fault)")
        self.asleep = 0

    def awake(self) -> bool:
        """Return true if the engine can do what is requested; count it otherwise."""
        self.refused += self.asleep > 0
        return not self.asleep

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield one choice a token, the last with its finish reason."""
        name = body.get("request_id") or f"request-{id(body)}"
        context = self._context(body)
        self._requests[name] = request = RunningRequest(context)
        if self._log is not None:
            self._log.request(name, context)
        try:
            self._look_up(context, body.get("cache_salt", ""))
            params = body["sampling_params"]
            async for choice in self._sample(name, request, context, params, body.get("model")):
                yield choice
        finally:
            if self._requests.get(name) is request:
                del self._requests[name]
                if self.faults.slots:
                    self._wake()

    def _context(self, body: dict[str, Any]) -> list[int]:
        """Return the context of a request: in place of an image's placeholders numbers that depend on the image.

        Like vLLM, fails a request that names an image which the engine does not have.
        """
        context, features = list(body["token_ids"]), body.get("features") or {}
        names, places, items = (
            (features.get(part) or {}).get("image") or ()
            for part in ("mm_hashes", "mm_placeholders", "kwargs_data")
        )
        for name, place, item in zip(names, places, items, strict=True):
            if item is None and name not in self.images:
                raise RuntimeError("Internal server error")
            self.images.add(name)
            for i in range(place["length"]):
                context[place["offset"] + i] = 10_000 + int(name[:6], 16) + i
        return context

    async def _sample(
        self,
        name: str,
        request: RunningRequest,
        context: list[int],
        params: dict[str, Any],
        model: str | None,
    ) -> AsyncIterator[dict[str, Any]]:
        stop, limit = params.get("stop_token_ids") or [], params.get("max_tokens", 16)
        request.routes_from = params.get("routed_experts_prompt_start", 0)
        least = params.get("min_tokens") or 0
        fingerprint, adapter = Fingerprint(context), self.adapters.get(model or "")
        while True:
            await self._turn(request)
            if request.aborted:
                yield choice_of([], [], "abort", request)
                return
            sampling = {**params, "stop_token_ids": []} if request.sampled < least else params
            own = adapter or self._weights_of(None)
            if self.routers is not None:
                self._route(request, own[0], self.routers)
            token, logprob = self._next(context, fingerprint, sampling, *own)
            if self._log is not None:
                logprob = self._log.sampled(name, token)
            context.append(token)
            fingerprint.add(token)
            self.sampled += 1
            request.count(self.label)
            if self.faults.drop_after and request.sampled > self.faults.drop_after:
                raise ConnectionError("dropped (fault)")
            if self.faults.fail_after and request.sampled > self.faults.fail_after:
                raise RuntimeError("failed (fault)")
            ended = token in stop and request.sampled > least
            finish = "stop" if ended else "length" if request.sampled >= limit else None
            yield choice_of([token], [logprob - self.faults.logprob_noise], finish, request)
            if finish:
                return

    def _route(self, request: RunningRequest, weights_id: str, routers: RouterShape) -> None:
        """Compute what is new in a request: each token goes through the experts of the weights that predict the next one."""
        for at in range(request.routes_from + len(request.routes), len(request.context)):
            request.routes.append(token_routes(weights_id, at, request.context[at], routers))

    async def _turn(self, request: RunningRequest) -> None:
        """Wait until the request may sample its next token, or is aborted."""
        await asyncio.sleep(self.faults.delay_s)
        while not request.aborted and self._must_wait(request):
            if not request.waits:
                request.waits = True
                self._wake()
            await self._changed.wait()
        request.waits = False

    def _must_wait(self, request: RunningRequest) -> bool:
        return self.paused or self.faults.stall or self._queued(request) or self._at_barrier(request)

    def _at_barrier(self, request: RunningRequest) -> bool:
        after = self.faults.hold_after
        reached = after is not None and request.sampled >= after
        return reached and not request.aborted and not self._queued(request)

    def _queued(self, request: RunningRequest) -> bool:
        slots = self.faults.slots
        return slots > 0 and all(request is not known for known in islice(self._requests.values(), slots))

    def _next(
        self,
        context: Sequence[int],
        fingerprint: Fingerprint,
        params: dict[str, Any],
        weights_id: str,
        block: Block | None,
    ) -> tuple[int, float]:
        if block is not None:
            token = block.next(context)
            return token, logprob_of(weights_id, block, context[-1], token)
        stop = () if self.faults.endless else params.get("stop_token_ids") or ()
        return draw(weights_id, fingerprint, context[-1], params.get("seed"), stop)

    async def score(self, ids: Sequence[int], model: str | None = None) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` in vLLM's form. `model`: the adapter's name."""
        while self.paused:
            await self._changed.wait()
        noise = self.faults.logprob_noise
        rows: list[dict[str, Any] | None] = [None]
        for previous, token in pairwise(ids):
            value = logprob_of(*self._weights_of(model), previous, token) - noise
            rows.append({str(token): {"logprob": value, "rank": 1}})
        return rows

    def set_faults(self, values: dict[str, Any]) -> None:
        """Change some faults."""
        self.faults = replace(self.faults, **values)
        self.transfer.hold(self.faults.hold_receive)
        self._wake()

    def _install(self, weights: str) -> None:
        catch(weights)
        self.weights_id = identity(weights)
        self.block = Block.read(weights)
        if self._log is not None:
            self._log.load(weights)

    def _look_up(self, prompt: Sequence[int], salt: str) -> None:
        self.cache.look_up(prompt, salt, self.weights_id)

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
