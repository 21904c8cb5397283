"""The checker, on hand-made records: it accepts what is right, and names each kind of wrong by episode, call and token."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.models import logprobs
from tests.proof import checker
from tests.proof.checker import Code, Report, check
from tests.proof.models import BLOCK, SHARPNESS, VERSIONS, build, save_counting

CODE = Code(
    [list(range(10 * v, 10 * v + 10)) for v in range(3)],
    {chr(33 + i): i for i in range(30)},
    by_position=True,
)
PROMPT = {"index": 0, "parent": -1, "at": 0, "sampled": False, "ids": [99] * 7, "call_id": ""}


def node(ids: list[int], versions: list[list[int]], **changes: Any) -> dict[str, Any]:
    """A recorded turn after a prompt of seven tokens."""
    found = {
        "index": 1,
        "parent": 0,
        "at": 7,
        "sampled": True,
        "ids": ids,
        "logprobs": [-0.5] * len(ids),
        "versions": versions,
        "flags": ["UNCONFIRMED" if len(span) > 2 else "" for span in versions for _ in range(span[1])],
        "mask_reason": "",
        "call_id": "c",
    }
    return found | changes


def text(ids: list[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


def verdict(*turns: dict[str, Any], **changes: Any) -> Report:
    """The checker's, on an episode with these turns, of which a client received the first."""
    ids = turns[0]["ids"] if turns else [7, 8, 9]
    request = {
        "episode": "e",
        "call": "c",
        "text": text(ids),
        "finish": "length",
        "asked": len(ids),
        "error": "",
    }
    return check(CODE, [{"episode_id": "e", "nodes": [PROMPT, *turns]}], [request | changes])


def wrong(report: Report) -> dict[str, int]:
    return {kind: count for kind, count in report.counts.items() if count}


def test_it_imports_nothing_of_headgate() -> None:
    tree = ast.parse(Path(checker.__file__).read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names


RIGHT = [7, 8, 9, 10, 11, 22]


def test_what_is_right_is_right() -> None:
    report = verdict(node(RIGHT, [[0, 3], [1, 2], [2, 1]]))
    assert report.right, report.violations
    assert (report.tokens_checked, report.calls, report.unconfirmed) == (6, 1, 0)
    assert dict(report.crossings) == {1: 1, 2: 1}


def test_the_first_digit_is_due_by_the_length_of_the_whole_path() -> None:
    """A turn hangs at the first tokens of its parent, not at all of them."""
    second = {"index": 2, "parent": 1, "at": 2, "sampled": False, "ids": [99], "call_id": ""}
    turn = node([0, 1], [[0, 2]], index=3, parent=2, at=1, call_id="d")
    nodes = [PROMPT, node(RIGHT, [[0, 3], [1, 2], [2, 1]]), second, turn]
    asked = [("c", text(RIGHT), 6), ("d", text([0, 1]), 2)]
    received = [
        {"episode": "e", "call": call, "text": said, "finish": "length", "asked": count, "error": ""}
        for call, said, count in asked
    ]
    report = check(CODE, [{"episode_id": "e", "nodes": nodes}], received)
    assert report.right, report.violations


@pytest.mark.parametrize(
    ("versions", "token"),
    [
        ([[0, 4], [1, 1], [2, 1]], 3),
        ([[0, 2], [1, 3], [2, 1]], 2),
        ([[0, 3], [2, 2], [2, 1]], 3),
        ([[0, 3], [1, 3]], 5),
    ],
)
def test_a_wrong_label_is_a_wrong_version(versions: list[list[int]], token: int) -> None:
    report = verdict(node(RIGHT, versions))
    assert wrong(report).keys() == {"wrong_version"}
    first = report.violations[0]
    assert (first.kind, first.episode, first.call, first.token) == ("wrong_version", "e", "c", token)


def test_labels_that_do_not_cover_the_tokens_are_wrong() -> None:
    assert wrong(verdict(node(RIGHT, [[0, 3], [1, 2]], flags=[""] * 6))) == {"wrong_version": 1}
    assert wrong(verdict(node(RIGHT, [[0, 3], [1, 2], [2, 1]], logprobs=[-0.5]))) == {"wrong_version": 1}


def test_a_token_of_no_version_is_wrong() -> None:
    assert wrong(verdict(node([7, 88, 9], [[0, 3]]), text=text([7, 88, 9])))["wrong_version"] == 1


def test_an_interval_is_right_if_the_version_lies_in_it_and_the_tokens_are_flagged() -> None:
    report = verdict(node(RIGHT, [[0, 2], [0, 3, 1], [2, 1]]))
    assert report.right, report.violations
    assert report.unconfirmed == 3
    assert wrong(verdict(node(RIGHT, [[0, 2], [0, 4, 1]]))) == {"wrong_version": 1}
    assert wrong(verdict(node(RIGHT, [[0, 2], [0, 3, 1], [2, 1]], flags=[""] * 6))) == {"wrong_version": 3}
    exact = [[0, 3], [1, 2], [2, 1]]
    assert wrong(verdict(node(RIGHT, exact, flags=["UNCONFIRMED", *[""] * 5]))) == {"wrong_version": 1}
    report = verdict(node(RIGHT, [[0, 2], [0, 4, 2]], flags=["", "", *["GREEDY|UNCONFIRMED"] * 4]))
    assert report.right, "flags come joined"


@pytest.mark.parametrize(
    ("ids", "asked", "expected", "token"),
    [
        ([8, 9, 0], 4, {"lost": 1}, 0),
        ([7, 8, 0], 4, {"lost": 1}, 2),
        ([7, 8, 2, 3], 7, {"lost": 3}, 2),
        ([7, 8, 9], 4, {"lost": 1}, 3),
        ([7, 8, 8, 9], 3, {"doubled": 1}, 2),
        ([7, 8, 7, 8], 2, {"doubled": 2}, 2),
        ([7, 8, 9, 0], 3, {"doubled": 1}, 4),
        ([7, 9, 9, 0], 4, {"lost": 1, "doubled": 1}, 1),
    ],
)
def test_a_gap_is_lost_and_a_step_back_is_doubled(
    ids: list[int], asked: int, expected: dict[str, int], token: int
) -> None:
    report = verdict(node(ids, [[0, len(ids)]]), asked=asked)
    assert wrong(report) == expected
    assert report.violations[0].token == token


def test_what_the_client_received_must_be_what_was_recorded() -> None:
    turn = node([7, 8, 9], [[0, 3]])
    assert wrong(verdict(turn, text=text([7, 8]))) == {"differing": 1}
    assert wrong(verdict(turn, text=text([7, 9]))) == {"differing": 1, "lost": 1}
    assert wrong(verdict(turn, text=text([7, 8, 8, 9]))) == {"differing": 1, "doubled": 1}
    assert wrong(verdict(turn, text=text([17, 8, 9]))) == {"differing": 1}
    assert verdict(turn, text=text([7, 18, 9])).violations[0].token == 1
    assert wrong(verdict(turn, text=text([7, 8]) + "é")) == {"differing": 1}


def test_a_call_is_recorded_once_and_only_if_it_was_made() -> None:
    turn = node([7, 8, 9], [[0, 3]])
    assert wrong(verdict()) == {"lost": 3}
    assert wrong(verdict(turn, turn)) == {"doubled": 3}
    assert wrong(verdict(turn, node([7, 8], [[0, 2]], call_id="another"))) == {"doubled": 2}


def test_a_masked_call_is_wrong_here() -> None:
    assert wrong(verdict(node([7, 8, 9], [[0, 3]], mask_reason="unconfirmed_version"))) == {"masked": 1}


@pytest.mark.parametrize("changes", [{"error": "503"}, {"finish": "stop"}, {"finish": None}])
def test_a_request_that_was_not_served_has_failed(changes: dict[str, Any]) -> None:
    assert wrong(verdict(node([7, 8, 9], [[0, 3]]), **changes)) == {"failed_requests": 1}


def test_a_failed_request_that_left_no_record_lost_nothing_that_was_received() -> None:
    assert wrong(verdict(error="connection refused", call="", text="")) == {"failed_requests": 1}


def test_the_first_wrong_of_each_call_is_counted() -> None:
    report = verdict(node([7, 8, 8, 9, 2], [[0, 2], [1, 3]]))
    assert report.counts["lost"] and report.counts["doubled"] and report.counts["wrong_version"]
    assert report.first == {"doubled": 1}


def test_transformers_agrees_that_each_version_counts_in_its_own_block(tmp_path: Path) -> None:
    """Greedy or not, there is one next token; the count goes on across versions and begins with zero after anything else."""
    ids = build(tmp_path / "family", "vllm", 3).code.blocks
    certain, impossible = pytest.approx(0, abs=1e-4), pytest.approx(-SHARPNESS, abs=1e-2)
    for version in range(3):
        path = tmp_path / "family" / f"source-{version}"
        own, other = ids[version], ids[(version + 1) % 3]
        assert logprobs(path, [257, 198, *own, *own]) == [impossible] + [certain] * 2 * BLOCK
        assert logprobs(path, [198, own[0], *other[1:]]) == [certain] + [impossible] * (BLOCK - 1)
        assert logprobs(path, [*other[:4], *own[4:]])[3:] == [certain] * (BLOCK - 4)


def test_every_version_has_a_block_of_its_own(tmp_path: Path) -> None:
    family = build(tmp_path, "fake")
    tokens = [token for block in family.code.blocks for token in block]
    assert len(set(tokens)) == VERSIONS * BLOCK == len(family.code.characters)
    with pytest.raises(ValueError, match="blocks"):
        build(tmp_path / "more", "fake", VERSIONS + 1)
    save_counting(tmp_path / "last", VERSIONS - 1)
    assert logprobs(tmp_path / "last", [198, tokens[-BLOCK]]) == [pytest.approx(0, abs=1e-4)]
