"""Why tests of foreign suites fail or are skipped: each reason once. A failure without one fails `make test-compat`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """A reason, and the tests that it explains (regular expressions, searched)."""

    suite: str
    test: str
    message: str
    why: str


_OWN = "own tests"
_MOCK = "The tests were made for a mock server that serves any id: "
KNOWN: tuple[Known, ...] = (
    Known(
        _OWN,
        "",
        "/v1/chat/completions(: this route has POST|/.*: no route has this path)",
        "Chat completions are recorded, and not stored for their clients.",
    ),
    Known(
        _OWN,
        "",
        r"include\[\].*: Input should be",
        "The tests ask for results of file search, which is OpenAI's own.",
    ),
    Known(_OWN, "", "Response with id .* not found", _MOCK + "no response was stored under this id here."),
    Known(
        _OWN,
        "",
        "limit: Input should be greater",
        "The tests ask for a page of 0 (a mock server's example); OpenAI allows 1 to 100.",
    ),
    Known(
        _OWN,
        "",
        "model: Field required",
        "The tests name no model, which OpenAI allows with a stored `prompt` alone; there are none here.",
    ),
    Known(
        _OWN,
        "",
        "/v1/responses/compact",
        "Not offered: agents compact their conversations themselves, which the record shows as a branch.",
    ),
    Known(_OWN, "Models.*delete", "Error code: 405", "Agents cannot delete models."),
    Known(
        _OWN,
        "",
        "access_programs: this parameter",
        "The tests send every parameter together; `access_programs` is OpenAI's own.",
    ),
    Known(
        _OWN,
        "",
        "audio: this parameter",
        "The tests send every parameter together; local models write text, and know no `audio`.",
    ),
    Known(
        _OWN,
        "",
        "suffix: filling a gap",
        "The tests send every parameter together; the model cannot fill a gap before a `suffix`.",
    ),
    Known(
        _OWN,
        "",
        "conversation: this parameter",
        "The tests send every parameter together; conversations are not stored as objects.",
    ),
    Known(
        _OWN,
        "count",
        "No messages provided",
        "The tests count the tokens of nothing; OpenAI's response to that is not documented.",
    ),
    Known(
        "langchain",
        "test_serdes",
        "",
        "Compares ChatOpenAI's own serialization with a snapshot in langchain's repository; no call is made.",
    ),
)
