"""Matching of a retry to the earlier request that it repeats, case by case."""

from __future__ import annotations

import itertools

import pytest

from gateway.generation.request_key import RequestKey
from gateway.generation.retry_matching import EarlierRequest, RequestState, find_repeated, is_retried


def chosen(*states: RequestState, exact: bool = False) -> int | None:
    """Return the place of the request that is repeated."""
    found = find_repeated(
        [EarlierRequest(str(at), state, None) for at, state in enumerate(states)], exact=exact
    )
    return None if found is None else int(found.call_id)


LOST, REFUSED, HERE, ELSEWHERE, RECORDED = RequestState


@pytest.mark.parametrize("state", RequestState)
def test_the_only_request_is_the_one(state: RequestState) -> None:
    assert chosen(state) == 0


@pytest.mark.parametrize("served", itertools.product((HERE, ELSEWHERE, RECORDED), repeat=2))
def test_of_several_the_one_without_a_reply_is_repeated(served: tuple[RequestState, ...]) -> None:
    assert chosen(*served, REFUSED) == 2
    assert chosen(*served, LOST) == 2
    assert chosen(REFUSED, *served, LOST) == 3, "a client that is back goes on with what was sampled for it"


def test_a_reply_of_a_client_that_is_served_is_given_to_no_other() -> None:
    assert chosen(HERE, HERE) is chosen(RECORDED, RECORDED) is chosen(HERE, RECORDED) is None
    assert chosen(HERE, ELSEWHERE) is None


def test_a_process_that_runs_equal_requests_knows_whether_a_client_left() -> None:
    assert chosen(ELSEWHERE, ELSEWHERE) == 0
    assert chosen(RECORDED, ELSEWHERE) == 1


@pytest.mark.parametrize(
    ("arrived", "call_id", "retried"),
    [
        (9.9, "other", False),
        (7.1, "other", False),
        (6.9, "other", True),
        (6.9, "own", False),
        (None, "other", False),
    ],
)
def test_a_retry_that_started_over_serves_the_requests_that_arrived_before_it(
    arrived: float | None, call_id: str, retried: bool
) -> None:
    """A call that began three seconds ago, at 7.0."""
    for state in RequestState:
        request = EarlierRequest("own", state, None, arrived)
        assert is_retried(request, call_id, 3.0, now=10.0) is (retried and state is REFUSED)


@pytest.mark.parametrize("state", [LOST, HERE, ELSEWHERE, RECORDED])
def test_an_idempotency_key_names_one_request(state: RequestState) -> None:
    assert chosen(REFUSED, state, exact=True) == 1
    assert chosen(REFUSED, exact=True) is None


def test_the_stored_name_of_a_request_is_of_this_form_for_good() -> None:
    """Another build may get the retry than got the first request."""
    plain, keyed = RequestKey.of("e", b"{}", "", 0), RequestKey.of("e", b"{}", "an id", 0)
    body = "ae1757ce9b447e02e37e9cd3921b1269"
    assert (plain.stored, plain.retry, plain.exact) == (body * 2, False, False)
    assert (keyed.stored, keyed.retry, keyed.exact) == ("688a7b137a5b5561e109537ba604e709" + body, True, True)
    assert plain.choice(0) is plain
    assert plain.choice(1).stored == "9afbbf82f37a621de788d60c32ffe14e" + body
