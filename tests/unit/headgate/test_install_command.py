"""The command that adds an extra names the place from which headgate was installed."""

from __future__ import annotations

import pytest

from headgate.extras import _source


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ({}, "'headgate[ray]'"),
        ({"url": "file:///src/head%20gate", "dir_info": {}}, "'/src/head gate[ray]'"),
        ({"url": "file:///src", "dir_info": {"editable": True}}, "--editable '/src[ray]'"),
        ({"url": "file:///headgate.whl", "archive_info": {}}, "'headgate[ray] @ file:///headgate.whl'"),
        (
            {"url": "https://host/h.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "'headgate[ray] @ git+https://host/h.git@ab12'",
        ),
    ],
)
def test_each_origin_that_pip_records(origin: dict[str, dict[str, str]], source: str) -> None:
    assert _source(origin, "ray") == source
