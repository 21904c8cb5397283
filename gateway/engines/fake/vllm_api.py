"""vLLM's API before a fake engine."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

from gateway.engines.fake.engine import FakeEngine
from gateway.engines.fake.grammars import check_grammar
from gateway.engines.fake.serve import (
    App,
    Send,
    begin_events,
    create_app,
    end_events,
    gathered,
    no_such_path,
    send_event,
    send_json,
)

_PATCH = 28


def create_fake_app(engine: FakeEngine) -> App:
    """Return a bare ASGI application around one fake engine."""

    async def respond(body: dict[str, Any], send: Send) -> None:
        if not engine.awake():
            await send_json(send, 503, {"error": {"message": "the engine sleeps"}})
            return
        if (model := body.get("model")) and model not in engine.adapters:
            await send_json(send, 404, {"error": {"message": f"The model `{model}` does not exist."}})
            return
        if body["sampling_params"].get("seed") == -1:  # as vLLM takes it
            body["sampling_params"]["seed"] = None
        await (_stream if body.get("stream") else _whole)(engine, body, send)

    async def control(path: str, query: dict[str, str], values: dict[str, Any]) -> tuple[int, Any]:
        return await _control(engine, path, query, values)

    return create_app(engine, "/inference/v1/generate", respond, control, _metrics)


def _metrics(engine: FakeEngine) -> str:
    """Write the part of vLLM's metrics page that the gateway reads, and a histogram that it does not."""
    (running, waiting, kv), blocks, size = engine.figures, 4096, 16
    labels = 'engine="0",model_name="fake"'
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {float(running)}
vllm:num_requests_waiting{{{labels}}} {float(waiting)}
vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} {float(waiting)}
vllm:cache_config_info{{block_size="{size}",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}"}} 1.0
vllm:kv_cache_usage_perc{{{labels}}} {kv / (blocks * size)}
vllm:generation_tokens_total{{{labels}}} {float(engine.sampled)}
vllm:time_to_first_token_seconds_bucket{{{labels},le="0.001"}} 0.0
"""


async def _control(
    engine: FakeEngine, path: str, query: dict[str, str], values: dict[str, Any]
) -> tuple[int, Any]:
    match path:
        case "/health":
            return (500, {}) if engine.faults.sick else (200, {})
        case "/pause":
            clear = query.get("clear_cache", "true") == "true"
            engine.pause(keep=query.get("mode") == "keep", clear_cache=clear)
            return 200, {"status": "paused"}
        case "/abort_requests":
            names = [name.removeprefix("generate-tokens-") for name in values["request_ids"]]
            return 200, {"status": "aborted", "aborted": engine.abort(names)}
        case "/resume":
            engine.resume()
            return 200, {"status": "resumed"}
        case "/is_paused":
            return 200, {"is_paused": engine.paused}
        case "/sleep":
            level = int(query.get("level", "1"))
            if level not in (0, 1, 2):
                return 422, {"error": {"message": "level must be 0, 1 or 2"}}
            if level == 0:
                engine.pause(clear_cache=False)
                return 200, {"status": "sleeping", "level": 0}
            return await _tried(engine.sleep(level), {"status": "sleeping", "level": level})
        case "/wake_up":
            status, value = await _tried(engine.wake(), {"status": "awake", "tags": None})
            if status == 200:
                engine.resume()
            return status, value
        case "/server_info":
            shown = {
                "model_config": {"enable_sleep_mode": engine.faults.sleep_mode},
                "aux_output_config": {"enable_return_routed_experts": engine.routers is not None},
            }
            return 200, {"vllm_config": shown}
        case "/is_sleeping":
            return 200, {"is_sleeping": engine.asleep > 0}
        case "/collective_rpc":
            if not engine.awake():
                return 500, {"error": {"message": "the engine sleeps"}}
            try:
                return 200, {"results": [await _called(engine, values)]}
            except (RuntimeError, OSError) as error:
                return 500, {"error": {"message": str(error)}}
        case "/v1/load_lora_adapter":
            if values["lora_name"] in engine.adapters:
                message = f"The lora adapter '{values['lora_name']}' has already been loaded."
                return 400, {"error": {"message": message}}
            load = engine.load_adapter(values["lora_name"], values["lora_path"])
            return await _tried(load, "Success")
        case "/v1/unload_lora_adapter":
            if engine.adapters.pop(values["lora_name"], None) is None:
                message = f"The lora adapter '{values['lora_name']}' cannot be found."
                return 404, {"error": {"message": message}}
            return 200, "Success"
        case "/v1/models":
            cards = [{"id": "fake", "parent": None}, *({"id": n, "parent": "fake"} for n in engine.adapters)]
            return 200, {"object": "list", "data": cards}
        case "/get_world_size":
            return 200, {"world_size": 1}
        case "/init_weight_transfer_engine":
            await engine.transfer.receive(values["init_info"])
            return 200, {"message": "Weight transfer initialized"}
        case "/start_weight_update" | "/update_weights" | "/finish_weight_update":
            return await _tried(_update(engine, path, values), {"message": "done"})
        case "/update_weight_version":
            engine.label = values["new_version"]
            return 200, {"success": True}
        case "/v1/chat/completions/render":
            return 200, {"features": _rendered(values)}
        case "/weight_info":
            return 200, {"weight_version": engine.label}
        case _:
            return no_such_path(path)


async def _called(engine: FakeEngine, values: dict[str, Any]) -> Any:
    """Return a worker's response to a call of one of its methods; vLLM converts anything but an object to a text."""
    match values["method"]:
        case "list_loras":
            return str(engine.list_adapters())
        case "headgate_device":
            return await engine.transfer.device()
        case "headgate_prove":
            return await asyncio.to_thread(engine.prove, values["args"][1])
        case "headgate_prove_adapter":
            return await asyncio.to_thread(partial(engine.prove, values["args"][0], adapter=True))
        case "remove_lora":
            return str(engine.remove_adapter(*values["args"]))
        case _:
            await engine.load(values["kwargs"]["weights_path"])
            return None


async def _update(engine: FakeEngine, path: str, values: dict[str, Any]) -> None:
    """Check that an update begins once, and end it on a failure, as vLLM's workers do."""
    if engine.transfer.active == (path == "/start_weight_update"):
        raise RuntimeError(
            f"{path}: an update is {'already active' if engine.transfer.active else 'not active'}"
        )
    engine.transfer.active = path != "/finish_weight_update"
    if path == "/update_weights":
        try:
            await engine.receive_weights(**values["update_info"])
        except BaseException:
            engine.transfer.active = False
            raise


async def _tried(work: Coroutine[Any, Any, None], value: Any) -> tuple[int, Any]:
    try:
        await work
    except RuntimeError as error:
        return 500, {"error": {"message": str(error)}}
    return 200, value


async def _whole(engine: FakeEngine, body: dict[str, Any], send: Send) -> None:
    choices = [choice async for choice in engine.generate(body)]
    whole = {
        **choices[-1],
        "token_ids": [token for c in choices for token in c["token_ids"]],
        "logprobs": {"content": [entry for c in choices for entry in c["logprobs"]["content"]]},
    }
    value = {"request_id": body.get("request_id", ""), "created": int(time.time()), "choices": [whole]}
    if body["sampling_params"].get("prompt_logprobs") is not None:
        value["prompt_logprobs"] = await engine.score(body["token_ids"], body.get("model"))
    await send_json(send, 200, value)


async def _stream(engine: FakeEngine, body: dict[str, Any], send: Send) -> None:
    await begin_events(send)
    try:
        for name, value in (body["sampling_params"].get("structured_outputs") or {}).items():
            check_grammar(name, value)
        async with aclosing(gathered(engine, body)) as choices:
            async for choice in choices:
                await send_event(send, {"request_id": body.get("request_id", ""), "choices": [choice]})
    except ValueError as error:
        await send_event(send, {"error": {"message": str(error), "code": 400}})
    except RuntimeError as error:
        await send_event(send, {"error": {"message": str(error)}})
    await end_events(send)


def _rendered(values: dict[str, Any]) -> dict[str, Any]:
    """Return the features of the one image in a request, for a model whose patches of 14 pixels are merged two by two.

    The sides must be multiples of 28, because nothing is resized here.
    """
    (part,) = values["messages"][0]["content"]
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    if width % _PATCH or height % _PATCH:
        raise RuntimeError(f"the fake engine resizes no image, and this one has {width} x {height} pixels")
    length = width // _PATCH * (height // _PATCH)
    return {
        "mm_hashes": {"image": ["by its pixels"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": length}]},
        "kwargs_data": {"image": ["pixels"]},
    }
