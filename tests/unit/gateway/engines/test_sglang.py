"""Parsing of SGLang's streams: every form in which SGLang 0.5 sends tokens yields the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.engines.base import GenerateRequest, TokenChunk
from gateway.engines.sglang import StreamReader, _body
from headgate.errors import EngineError, EngineRefused
from headgate.types import Sampling

ROWS = [[-0.5, 11, None], [-1.0, 12, None], [-1.5, 12, None], [-2.0, 14, None]]
LENGTH = {"type": "length", "length": 4}
ABORT = {"type": "abort", "message": "Abort in waiting queue"}


def event(
    rows: Sequence[list[Any]], total: int, reason: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    given = {"output_token_logprobs": list(rows), "completion_tokens": total, "finish_reason": reason, **meta}
    return {"output_ids": [row[1] for row in rows], "meta_info": given}


def read(events: Sequence[dict[str, Any]]) -> list[TokenChunk]:
    reader = StreamReader()
    chunks = [reader.chunk(one) for one in events]
    assert reader.finished == (chunks[-1].finish is not None)
    return chunks


def tokens(chunks: Sequence[TokenChunk]) -> list[tuple[int, float]]:
    return [pair for chunk in chunks for pair in zip(chunk.ids, chunk.logprobs, strict=True)]


CUMULATIVE = [event(ROWS[:1], 1), event(ROWS[:3], 3), event(ROWS, 4, LENGTH)]
INCREMENTAL = [event(ROWS[:1], 1), event(ROWS[1:3], 3), event(ROWS[3:], 4, LENGTH)]


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTAL], ids=["cumulative", "incremental"])
def test_both_forms_are_the_same_tokens(events: list[dict[str, Any]]) -> None:
    chunks = read(events)
    assert tokens(chunks) == [(11, -0.5), (12, -1.0), (12, -1.5), (14, -2.0)]
    assert [len(chunk.ids) for chunk in chunks] == [1, 2, 1]
    assert [chunk.finish for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize(
    "last",
    [
        event(ROWS[:3], 3, ABORT),
        {**event(ROWS[:3], 3, ABORT), "output_ids": [12]},
        event([], 3, ABORT),
        {"output_ids": [], "meta_info": {"finish_reason": ABORT}},
    ],
    ids=["cumulative", "incremental repeats its last token", "nothing new", "bare"],
)
def test_an_abort_in_the_queue_adds_no_token(last: dict[str, Any]) -> None:
    chunks = read([*INCREMENTAL[:2], last])
    assert len(tokens(chunks)) == 3
    assert (chunks[-1].ids, chunks[-1].finish) == ([], "abort")


def test_an_abort_that_was_joined_with_the_tokens_before_it_keeps_them() -> None:
    """SGLang joins what a slow reader has not read: the delta's log-probabilities, and all of them again."""
    joined = event([*ROWS[1:3], *ROWS[:3]], 3, ABORT)
    assert tokens(read([INCREMENTAL[0], joined])) == [(11, -0.5), (12, -1.0), (12, -1.5)]


def test_the_account_is_in_the_spans() -> None:
    spans = [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 3, "end": 4}]
    last = event(ROWS, 4, LENGTH, weight_version="4", weight_versions=spans)
    assert read([*CUMULATIVE[:2], last])[-1].labels == (("3", 3), ("4", 1))
    assert (
        read([event([], 0, ABORT, weight_versions=[{"version": "3", "start": 0, "end": 0}])])[0].labels == ()
    )


def test_one_version_for_the_whole_is_no_account() -> None:
    assert read([event(ROWS, 4, LENGTH, weight_version="4")])[0].labels is None


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ({"error": {"message": "too long", "code": 400}}, EngineRefused),
        ({"error": {"message": "dead", "code": 500}}, EngineError),
        (event([], 0, {"type": "abort", "message": "too long", "status_code": 400}), EngineRefused),
        (event([], 0, {"type": "abort", "message": "queue is full", "status_code": 503}), EngineError),
        (event(ROWS[:1], 1, {"type": "stop", "matched": "NaN happened"}), EngineError),
        (event(ROWS[:1], 2), EngineError),
    ],
)
def test_a_failure_is_no_response(last: dict[str, Any], error: type[EngineError]) -> None:
    with pytest.raises(EngineError) as raised:
        StreamReader().chunk(last)
    assert type(raised.value) is error


def test_stop_tokens_are_not_switched_off() -> None:
    with_stop = _body(GenerateRequest("a", [1], Sampling(stop_token_ids=[7])))
    without = _body(GenerateRequest("a", [1], Sampling()))
    assert not with_stop["sampling_params"]["ignore_eos"]
    assert without["sampling_params"]["ignore_eos"]


def test_no_id_begins_with_another() -> None:
    rids = [_body(GenerateRequest(name, [1], Sampling()))["rid"] for name in ("c.0.1", "c.0.10", "c.0")]
    assert not [(a, b) for a in rids for b in rids if a != b and b.startswith(a)]
