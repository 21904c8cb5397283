"""The fake engine's log: each sampled token before it leaves, under a mark of its own, by the weights of that moment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from gateway.engines.fake import FakeEngine
from gateway.engines.fake.blocks import Block
from gateway.engines.fake.log import MARKS, SampleLog, logprob_of
from tests.faults.real.processes import _last_mark

_COUNTED = {"first": 10, "size": 10, "digits": [0, 90]}


def _weights(folder: Path, first: int) -> str:
    folder.mkdir()
    (folder / "block.json").write_text(json.dumps(_COUNTED | {"first": first}))
    return str(folder)


async def test_tokens_are_logged_before_they_leave(tmp_path: Path) -> None:
    log, weights = tmp_path / "log.jsonl", _weights(tmp_path / "v1", 10)
    engine = FakeEngine(weights, log=SampleLog(log, 5))
    body = {"request_id": "call", "token_ids": [200], "sampling_params": {"max_tokens": 3}}
    seen = []
    async for choice in engine.generate(body):
        seen.append(choice)
        mark, token, request = json.loads(log.read_text().splitlines()[-1])
        assert (token, request) == (choice["token_ids"][0], "call")
        assert choice["logprobs"]["content"][0]["logprob"] == logprob_of(mark)
    assert len(seen) == 3
    other = _weights(tmp_path / "v2", 20)
    await engine.load(other)
    _ = [choice async for choice in engine.generate(body | {"request_id": "next"})]
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        {"load": weights}, {"ask": "call", "prompt": [200]}, [5, 10, "call"], [6, 11, "call"], [7, 12, "call"],
        {"load": other}, {"ask": "next", "prompt": [200]}, [8, 20, "next"], [9, 21, "next"], [10, 22, "next"],
    ]  # fmt: skip
    assert _last_mark(log) == 10


def test_marks_differ_in_32_bits() -> None:
    marks = np.array([1, 2, MARKS // 2, MARKS - 1, MARKS])
    stored = np.array([logprob_of(int(mark)) for mark in marks], np.float32)
    assert np.rint(-stored.astype(np.float64) * 2**20).astype(int).tolist() == marks.tolist()


def test_versions_count_on_where_another_stopped() -> None:
    one, other = Block(0, 10, (0, 90)), Block(10, 10, (0, 90))
    assert one.next([200]) == 0  # any other token is a nine
    assert one.next([200, 0]) == 1
    assert other.next([200, 0, 1]) == 12
    assert other.next([200, 9]) == 10
    assert other.logprob(11, 12) > -1e-6
    assert one.logprob(11, 12) < -29
