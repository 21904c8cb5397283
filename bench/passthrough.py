"""`python -m bench.passthrough`: the least that a FastAPI gateway can do, and so what any one on this stack costs at least."""

from __future__ import annotations

import argparse

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from httpx_aiohttp import AiohttpTransport
from starlette.background import BackgroundTask


def create_app(engine: str) -> FastAPI:
    """Pass chats and messages on to the engine at `engine` and return its responses, as it comes."""
    app = FastAPI()
    limits = httpx.Limits(max_connections=0, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=engine, timeout=None, transport=AiohttpTransport(limits=limits))

    @app.post("/v1/chat/completions")
    @app.post("/v1/messages")
    async def chat(request: Request) -> StreamingResponse:
        request_out = client.build_request("POST", request.url.path, content=await request.body())
        response = await client.send(request_out, stream=True)
        kind, close = response.headers["content-type"], BackgroundTask(response.aclose)
        return StreamingResponse(
            response.aiter_raw(), response.status_code, media_type=kind, background=close
        )

    return app


def main() -> None:
    """Serve it on a loopback port."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m bench.passthrough", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True, help="the engine's root URL")
    options = parser.parse_args()
    app = create_app(options.engine)
    uvicorn.run(
        app, host="127.0.0.1", port=options.port, loop="uvloop", log_level="warning", access_log=False
    )


if __name__ == "__main__":
    main()
