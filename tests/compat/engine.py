"""The scripted engine: vLLM's API, and `script.py`'s replies.

It returns the prompt and the reply of each request at `/compat/requests` (`?prefix=chatcmpl-...`), so that a test can compare
the recorded tree with the truth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.engines.fake import create_fake_app
from gateway.engines.fake.serve import App, Receive, Scope, Send, send_json
from tests.compat.script import reply
from tests.harness.scripted import ScriptedEngine

KEPT = 20_000
"""Requests; the oldest are forgotten."""


class CompatEngine(ScriptedEngine):
    """Reply what `script.reply` returns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.kept: dict[str, dict[str, Any]] = {}

    def _reply(self, body: dict[str, Any]) -> list[int]:
        params = body["sampling_params"]
        prompt = self._tokenizer.decode(body["token_ids"], skip_special_tokens=False)
        text = reply(prompt, params.get("structured_outputs"), self._spelled)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _keep(self, body: dict[str, Any], ids: list[int]) -> None:
        params = body["sampling_params"]
        self.kept[body.get("request_id", "")] = {
            "prompt": body["token_ids"],
            "sampled": ids,
            "params": params,
        }
        while len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]

    def _spelled(self, token: int) -> str:
        return str(self._tokenizer.id_to_token(token))

    def _entry(self, token: int, logprob: float, params: dict[str, Any]) -> dict[str, Any]:
        entry = super()._entry(token, logprob, params)
        if alternatives := params.get("logprobs") or 0:
            others = [65 + i for i in range(alternatives) if 65 + i != token][: alternatives - 1]
            tops = [(token, logprob), *((other, logprob - 1 - i) for i, other in enumerate(others))]
            entry["top_logprobs"] = [
                {"token_id": other, "logprob": value, "rank": rank}
                for rank, (other, value) in enumerate(tops, 1)
            ]
        return entry


def create_scripted_app(engine: CompatEngine) -> App:
    """vLLM's API before it, and `/compat/requests`."""
    vllm = create_fake_app(engine)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/compat/requests":
            await receive()
            prefix = scope["query_string"].decode().removeprefix("prefix=")
            found = {name: kept for name, kept in engine.kept.items() if name.startswith(prefix)}
            await send_json(send, 200, found)
            return
        await vllm(scope, receive, send)

    return app


def serve(model: Path, port: int) -> None:
    """Serve one on the loopback interface until it is ended; `model`: a folder with tokenizer.json (Qwen's marks)."""
    import uvicorn

    engine = CompatEngine(Tokenizer.from_file(str(model / "tokenizer.json")))
    uvicorn.run(create_scripted_app(engine), host="127.0.0.1", port=port, log_level="warning")
