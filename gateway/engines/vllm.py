"""vLLM 0.32 and 0.33 over HTTP: token ids in, token ids and log-probabilities out.

The server must run with `--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm` and
`VLLM_SERVER_DEV_MODE=1` (`process.py` starts it so). Its control endpoints have no authentication, so it must listen on a
loopback address or a private network.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway.engines.base import GenerateRequest, Level, Load, StepCounts, TokenChunk
from gateway.engines.http import FINISH, EngineHTTP, HTTPEngine, failure, version_spans
from gateway.engines.prometheus_text import label, samples
from gateway.engines.vllm_images import EngineImages
from headgate.errors import EngineError, EngineReplaced, EngineUnreachable, NotComparable
from headgate.types import Sampling
from scheduler.policies.proof import Holding

_GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"
_GRAMMARS = {"json": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
_FIGURES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total",
)
_COUNTS = (
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
)
_CACHE = "vllm:cache_config_info"


class VLLMEngine(HTTPEngine):
    """One vLLM server at `base_url`."""

    def __init__(self, name: str, base_url: str, silence_s: float = 600.0) -> None:
        super().__init__(name, EngineHTTP(name, base_url, silence_s))
        self._images = EngineImages(name, self._http)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        finished = False
        try:
            check = partial(self._check, request.label) if request.label else None
            body = _body(request)
            if request.images:
                body["features"] = await self._images.features(request)
            async with aclosing(self._http.events(_GENERATE, body, check)) as events:
                async for event in events:
                    chunk = _chunk(event)
                    finished = chunk.finish is not None
                    if finished and request.routes_from is not None:
                        chunk = chunk._replace(routes=_routes(event["choices"][0]))
                    # vLLM's label is the engine's, and not the adapter's
                    yield chunk._replace(labels=None) if finished and request.adapter else chunk
        except EngineUnreachable as error:
            if "engine_paused" not in error.message:
                raise
            # vLLM 0.33 refuses what arrives during a pause; 0.32 queues it
            yield TokenChunk([], [], "abort")
            return
        except EngineError as error:
            if request.images:
                self._images.forget()  # it may have been sent one by name that it did not have any more
            if not request.adapter or "does not exist" not in error.message:
                raise
            raise EngineReplaced(
                f"engine {self.name} lacks the adapter {request.adapter}: it was restarted"
            ) from error
        if not finished:
            raise self._cut_off()

    async def _check(self, label: str) -> None:
        found = orjson.loads(await self._http.get("/weight_info"))["weight_version"]
        if found != label:
            raise EngineReplaced(
                f"engine {self.name} is labeled {found!r}, and not {label!r}: it was restarted"
            )

    async def pause(self, *, keep: bool = False) -> None:
        self._images.forget()
        mode = "keep" if keep else "abort"
        await self._http.post("/pause", params={"mode": mode, "clear_cache": "true"})

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; an empty list would mean every request to vLLM."""
        if request_ids:
            await self._http.post(
                "/abort_requests", {"request_ids": [f"{_ID_PREFIX}{name}" for name in request_ids]}
            )

    async def resume(self) -> None:
        await self._http.post("/resume")

    async def load(self, path: str) -> None:
        """After an error the weights are in no defined state: restart the engine."""
        await self._http.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
        )

    async def workers(self) -> int:
        return int(orjson.loads(await self._http.get("/get_world_size"))["world_size"])

    async def devices(self) -> list[dict[str, str]]:
        """vLLM needs the worker extension of `prove`; it refuses the call without."""
        try:
            answer = await self._http.post("/collective_rpc", {"method": "headgate_device"})
        except EngineUnreachable:
            raise
        except EngineError:
            return []
        return [{"gpu": one["gpu"], "memory": one["memory"]} for one in orjson.loads(answer)["results"]]

    async def receive(self, join: dict[str, Any]) -> None:
        await self._http.post("/init_weight_transfer_engine", {"init_info": join})

    async def receive_weights(self, version: int, timeout_s: float) -> None:
        """After an error the weights are as before, unless the error came while they were put in place."""
        try:
            await self._http.post("/start_weight_update")
        except EngineError as error:
            if "already active" not in error.message:
                raise
            await self._http.post(
                "/finish_weight_update"
            )  # a gateway that died began it, and changed nothing
            await self._http.post("/start_weight_update")
        info = {"version": version, "timeout_s": timeout_s}
        await self._http.post("/update_weights", {"update_info": info})
        await self._http.post("/finish_weight_update")

    async def load_adapter(self, name: str, path: str) -> None:
        """vLLM needs `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
        try:
            await self._http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except EngineError as error:
            if "already been loaded" not in error.message:
                raise

    async def unload_adapter(self, name: str) -> None:
        try:
            await self._http.post("/v1/unload_lora_adapter", {"lora_name": name})
        except EngineError as error:
            if "cannot be found" not in error.message:
                raise

    async def forget_adapters(self) -> None:
        """vLLM's server only forgets a name; its workers keep the adapter, and on the CPU put it on requests without one."""
        for model in orjson.loads(await self._http.get("/v1/models"))["data"]:
            if model.get("parent"):
                await self.unload_adapter(model["id"])
        response = await self._http.post("/collective_rpc", {"method": "list_loras"})
        numbers = {int(number) for number in re.findall(r"\d+", str(orjson.loads(response)["results"]))}
        for number in sorted(numbers):
            await self._http.post("/collective_rpc", {"method": "remove_lora", "args": [number]})

    async def label(self, version: int) -> None:
        await self._http.post("/update_weight_version", {"new_version": str(version)})

    async def returns_routes(self) -> bool:
        """vLLM needs `--enable-return-routed-experts`; releases before 0.32 have no such setting."""
        found = orjson.loads(await self._http.get("/server_info?config_format=json"))
        return bool((found["vllm_config"].get("aux_output_config") or {}).get("enable_return_routed_experts"))

    async def frees_memory(self) -> bool:
        """vLLM ends at its start if it is to sleep and has no accelerator."""
        found = orjson.loads(await self._http.get("/server_info?config_format=json"))
        return bool(found["vllm_config"]["model_config"]["enable_sleep_mode"])

    async def sleep(self, level: Level) -> None:
        """Without an accelerator vLLM only pauses."""
        await self._http.post("/sleep", params={"level": str(level), "mode": "abort"})

    async def wake(self) -> None:
        """Wake vLLM and pause it immediately, because it would sample. No request can arrive before the pause."""
        await self._http.post("/wake_up")
        await self.pause()

    async def score(self, ids: Sequence[int], adapter: str = "") -> list[float]:
        """Score by one prefill with `prompt_logprobs`."""
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(ids), "sampling_params": params}
        response = await self._http.post(_GENERATE, body | ({"model": adapter} if adapter else {}))
        rows = orjson.loads(response)["prompt_logprobs"]
        return [row[str(token)]["logprob"] for token, row in zip(ids[1:], rows[1:], strict=True)]

    async def prove(self, version: int, path: str, adapter: str = "") -> list[Holding]:
        """vLLM needs `--worker-extension-cls headgate_transfer.vllm_worker.ProvingWorker`."""
        call: dict[str, Any] = {"method": "headgate_prove", "args": [version, path]}
        if adapter:
            call = {"method": "headgate_prove_adapter", "args": [path]}
        try:
            response = await self._http.post("/collective_rpc", call)
            found = orjson.loads(response)["results"]
            return [Holding(one["hashes"], one["wrong"], one["missing"]) for one in found]
        except EngineUnreachable:
            raise
        except EngineError as error:
            raise NotComparable(
                f"engine {self.name} cannot compare its weights", quoted=error.message
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            what = f"engine {self.name} cannot compare its weights: its response has no comparison"
            raise NotComparable(what) from error

    async def read_load(self) -> Load | None:
        """Read the size of the cache from the labels of `vllm:cache_config_info`."""
        page = (await self._http.get("/metrics")).decode()
        found = samples(page, (*_FIGURES, *_COUNTS))
        running, waiting, usage, sampled = (found[name] for name in _FIGURES)
        if not running:
            return None
        blocks, size = (label(page, _CACHE, key) or "" for key in ("num_gpu_blocks", "block_size"))
        tokens = int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
        total = int(sum(sampled))
        counts = _counts([found[name] for name in _COUNTS], total)
        return Load(int(sum(running)), int(sum(waiting)), int(sum(usage) * tokens), total, counts)

    async def healthy(self) -> bool:
        return await self._http.returns_ok("/health", 5.0)


def _counts(found: Sequence[Sequence[float]], sampled: int) -> StepCounts | None:
    """Return the values of `_COUNTS`. A step's tokens are those that it sampled, and those of prompts that it computed.

    Data-parallel ranks step side by side, each with counts of its own.
    """
    if not all(found):
        return None
    steps, tokens, gaps, gaps_s = (sum(values) for values in found)
    return StepCounts(int(steps / len(found[0])), int(tokens) - sampled, int(gaps), gaps_s)


def _body(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.top_logprobs,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": True,  # the gateway decides which tokens end a turn
        "detokenize": False,
        "stream_interval": request.interval,
    }
    params.update({name: value for name, value in _optional(sampling).items() if value})
    if request.routes_from:
        params["routed_experts_prompt_start"] = request.routes_from
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.repetition_penalty != 1.0:
        params["repetition_penalty"] = sampling.repetition_penalty
    if sampling.grammar is not None:
        params["structured_outputs"] = {_GRAMMARS[sampling.grammar.kind]: sampling.grammar.value}
    body = {
        "request_id": request.request_id,
        "token_ids": request.prompt,
        "sampling_params": params,
        "stream": True,
    }
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.adapter:
        body["model"] = request.adapter
    return body


def _optional(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters that have an effect: bodies are many, and neutral values cost."""
    return {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): value for token, value in sampling.logit_bias.items()},
    }


def _chunk(event: dict[str, Any]) -> TokenChunk:
    if "error" in event:
        raise failure(event["error"])
    choice = event["choices"][0]
    ids = choice["token_ids"]
    logprobs = choice["logprobs"]
    content = (logprobs["content"] if logprobs else None) or ()
    if len(content) != len(ids):
        raise EngineError("the engine sent tokens without their log-probabilities")
    finish = choice["finish_reason"]
    return TokenChunk(
        ids=ids,
        logprobs=[entry["logprob"] for entry in content],
        finish=FINISH[finish] if finish else None,
        labels=version_spans(choice.get("weight_versions")) if finish else None,
        top=_top(content) if content and content[0].get("top_logprobs") else None,
    )


def _routes(choice: dict[str, Any]) -> npt.NDArray[np.integer[Any]] | None:
    """Return the experts that a choice reports; of no shape if they cannot be read."""
    if (text := choice.get("routed_experts")) is None:
        return None
    try:
        found: npt.NDArray[np.integer[Any]] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (ValueError, EOFError, TypeError):
        return np.empty(0, np.uint8)
    return found


def _top(content: list[dict[str, Any]]) -> list[list[tuple[int, float]]]:
    return [[(top["token_id"], top["logprob"]) for top in entry["top_logprobs"]] for entry in content]
