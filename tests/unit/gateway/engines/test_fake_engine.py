"""The fake engine is a ground truth: its tokens depend on every token of the context, and are those of `next_token`."""

from __future__ import annotations

import pytest

from gateway.engines.fake import FakeEngine, identity, next_token

CONTEXT = list(range(40, 72))


def continued(context: list[int], tokens: int = 8) -> list[int]:
    context = list(context)
    for _ in range(tokens):
        context.append(next_token("weights", context, None, [])[0])
    return context[-tokens:]


@pytest.mark.parametrize("place", range(len(CONTEXT)))
def test_a_token_that_was_substituted_anywhere_changes_what_follows(place: int) -> None:
    """The last token is one of those that follow it, so even a substitution far back shows immediately."""
    changed = [*CONTEXT[:place], CONTEXT[place] + 100, *CONTEXT[place + 1 :]]
    assert continued(changed) != continued(CONTEXT)


async def test_a_running_request_samples_what_the_function_returns() -> None:
    engine = FakeEngine("weights")
    params = {"seed": 3, "max_tokens": 30, "stop_token_ids": []}
    body = {"request_id": "r", "token_ids": CONTEXT, "sampling_params": params}
    context = list(CONTEXT)
    async for choice in engine.generate(body):
        expected, logprob = next_token(identity("weights"), context, 3, [])
        assert choice["token_ids"] == [expected]
        assert choice["logprobs"]["content"][0]["logprob"] == logprob
        context.append(expected)
    assert len(context) == len(CONTEXT) + 30
