"""The scripted engine: vLLM's API, and `script.py`'s replies.

It keeps what it was asked and what it said, per request, and shows it at `/compat/requests` (`?prefix=chatcmpl-...`),
so that a test can hold the recorded tree against the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.engines.fake import FakeEngine, create_fake_app
from gateway.engines.fake.serve import App, Receive, Scope, Send, answer
from tests.compat.script import reply

KEPT = 20_000
"""Requests; the oldest are forgotten."""


class ScriptedEngine(FakeEngine):
    """Says what `script.reply` says. Its log-probabilities fall by 1/64 a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__("none")
        self._tokenizer = tokenizer
        self.kept: dict[str, dict[str, Any]] = {}

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yields one choice a token, the last with its finish reason."""
        params = body["sampling_params"]
        prompt = self._tokenizer.decode(body["token_ids"], skip_special_tokens=False)
        text = reply(prompt, params.get("structured_outputs"), self._spelled)
        end = params["stop_token_ids"][-1] if params.get("stop_token_ids") else 258
        said = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids = [*said, end][: params["max_tokens"]]
        self._keep(body, ids)
        for count, token in enumerate(ids, 1):
            await asyncio.sleep(0)
            last = count == len(ids)
            yield {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": [_entry(token, -count / 64, params.get("logprobs") or 0)]},
                "finish_reason": ("stop" if token == end else "length") if last else None,
                "weight_versions": [{"version": self.label, "start": 0, "end": count}] if last else None,
            }

    def _spelled(self, token: int) -> str:
        return str(self._tokenizer.id_to_token(token))

    def _keep(self, body: dict[str, Any], ids: list[int]) -> None:
        name = body.get("request_id", "")
        self.kept[name] = {"prompt": body["token_ids"], "said": ids, "params": body["sampling_params"]}
        while len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]


def create_scripted_app(engine: ScriptedEngine) -> App:
    """vLLM's API before it, and `/compat/requests`."""
    vllm = create_fake_app(engine)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/compat/requests":
            await receive()
            prefix = scope["query_string"].decode().removeprefix("prefix=")
            found = {name: kept for name, kept in engine.kept.items() if name.startswith(prefix)}
            await answer(send, 200, found)
            return
        await vllm(scope, receive, send)

    return app


def _entry(token: int, logprob: float, alternatives: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"token_id": token, "logprob": logprob, "rank": 1}
    if alternatives:
        others = [65 + i for i in range(alternatives) if 65 + i != token][: alternatives - 1]
        tops = [(token, logprob), *((other, logprob - 1 - i) for i, other in enumerate(others))]
        entry["top_logprobs"] = [
            {"token_id": other, "logprob": value, "rank": rank} for rank, (other, value) in enumerate(tops, 1)
        ]
    return entry


def serve(model: Path, port: int) -> None:
    """Serves one on the loopback interface until it is ended; `model`: a folder with tokenizer.json (Qwen's marks)."""
    import uvicorn

    engine = ScriptedEngine(Tokenizer.from_file(str(model / "tokenizer.json")))
    uvicorn.run(create_scripted_app(engine), host="127.0.0.1", port=port, log_level="warning")
