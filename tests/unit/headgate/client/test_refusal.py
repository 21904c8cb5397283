"""Responses of other servers than a gateway."""

from __future__ import annotations

import httpx
import pytest

from headgate.client.refusal import NotAGateway, body_of, refusal

SENTENCE = "http://host/ is not a headgate gateway: it responded with {} with text/html"


def page(status: int) -> httpx.Response:
    return httpx.Response(
        status, html="<p>hello</p>", request=httpx.Request("GET", "http://host/admin/v1/status")
    )


def test_a_page_of_a_web_server_is_named_as_the_wrong_address() -> None:
    with pytest.raises(NotAGateway) as error:
        body_of(page(200))
    assert str(error.value) == SENTENCE.format(200)
    assert str(refusal(page(404))) == SENTENCE.format(404)
