"""Sampling parameters, and trees that travel to a trainer."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.store.turns import spans_of
from headgate.arrow import FEED_SCHEMA, groups_from_arrow, groups_to_arrow
from headgate.routes import PackedRoutes
from headgate.types import Episode, Group, Node, Probe, Sampling, TokenFlag


def test_flags_of_sampling_parameters() -> None:
    assert Sampling().flags() == TokenFlag.NONE
    assert Sampling(temperature=0.0).flags() == TokenFlag.GREEDY
    assert Sampling(top_p=0.5).flags() == TokenFlag.TRUNCATED
    assert Sampling(temperature=0.0, top_p=0.5).flags() == TokenFlag.GREEDY | TokenFlag.TRUNCATED


SCHEMA_2 = [
    *("group_id", "task_id", "group_version", "batch", "episode_id", "reward", "node", "parent", "at", "sampled", "ids"),
    *("logprobs", "versions", "flags", "temperature", "mask_reason", "call_id", "call_reward"),
]  # fmt: skip
"""The columns of the feed's schema 2 when it was new."""
names = st.text(min_size=1, max_size=6)
int32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def nodes(draw: st.DrawFn, index: int) -> Node:
    size = draw(st.integers(0, 5))
    sampled = draw(st.booleans())
    count = size if sampled else 0

    def several(of: st.SearchStrategy, n: int, kind: type) -> np.ndarray:
        return np.asarray(draw(st.lists(of, min_size=n, max_size=n)), kind)

    return Node(
        index=index,
        parent=draw(st.integers(-1, index - 1)),
        at=draw(st.integers(0, 9)),
        sampled=sampled,
        ids=several(int32, size, np.int32),
        logprobs=several(st.floats(-1e4, 0, width=32), count, np.float32),
        versions=several(st.integers(0, 2**31 - 1), count, np.int32),
        flags=several(st.integers(0, 255), count, np.uint8),
        temperature=draw(st.floats(0, 2, width=32)),
        mask_reason=draw(st.sampled_from(["", "abandoned"])),
        call_id=draw(st.text(max_size=4)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        finish_reason=draw(st.sampled_from(["", "stop", "length"])),
        routes=draw(st.none() | st.just(PackedRoutes(bytes(range(size * 6)), 3, 2, "uint8"))),
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, ...]:
    """Group ids and episode ids are unique; every episode has a node."""

    def episode(name: str) -> Episode:
        finite = st.floats(allow_nan=False, allow_infinity=False)
        reward = draw(finite)
        own = tuple(draw(nodes(i)) for i in range(draw(st.integers(1, 3))))
        return Episode(name, reward, own, draw(st.booleans()), draw(st.dictionaries(st.text(), finite)))

    def group(name: str) -> Group:
        members = [f"{name}/{i}" for i in range(draw(st.integers(1, 3)))]
        return Group(name, draw(names), draw(st.integers(0, 99)), tuple(episode(m) for m in members))

    return tuple(group(name) for name in draw(st.lists(names, max_size=3, unique=True)))


def same(left: Node, right: Node) -> bool:
    arrays = ("ids", "logprobs", "versions", "flags")
    rest = ("index", "parent", "at", "sampled", "temperature", "mask_reason", "call_id")
    rest += ("reward", "finish_reason", "routes")
    return all(
        np.array_equal(getattr(left, n), getattr(right, n))
        and getattr(left, n).dtype == getattr(right, n).dtype
        for n in arrays
    ) and all(getattr(left, n) == getattr(right, n) for n in rest)


def check_same(left: tuple[Group, ...], right: tuple[Group, ...]) -> None:
    heads = [[(g.group_id, g.task_id, g.version, len(g.episodes)) for g in side] for side in (left, right)]
    assert heads[0] == heads[1]
    for a, b in zip(
        (e for g in left for e in g.episodes), (e for g in right for e in g.episodes), strict=True
    ):
        assert (a.episode_id, a.reward, a.context_full) == (b.episode_id, b.reward, b.context_full)
        assert a.components == b.components
        assert len(a.nodes) == len(b.nodes)
        assert all(same(x, y) for x, y in zip(a.nodes, b.nodes, strict=True))


@settings(max_examples=40)
@given(groups())
def test_groups_come_back_from_a_stream(original: tuple[Group, ...]) -> None:
    table = groups_to_arrow(original)
    assert table.schema.equals(FEED_SCHEMA)
    routed = any(node.routes for group in original for e in group.episodes for node in e.nodes)
    shape = table.schema.metadata.get(b"routed_experts_shape")
    assert (shape and json.loads(shape)) == ({"layers": 3, "top_k": 2, "dtype": "uint8"} if routed else None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        check_same(groups_from_arrow(reader.read_all()), original)


@settings(max_examples=40)
@given(groups())
def test_a_feed_without_the_later_columns_is_read_with_what_stands_for_them(
    original: tuple[Group, ...],
) -> None:
    """A gateway or an export from before these columns."""
    check_same(
        groups_from_arrow(
            groups_to_arrow(original).drop_columns(
                ["finish_reason", "context_full", "routed_experts", "components"]
            )
        ),
        tuple(
            replace(
                group,
                episodes=tuple(
                    replace(
                        e,
                        nodes=tuple(replace(n, finish_reason="", routes=None) for n in e.nodes),
                        context_full=False,
                        components={},
                    )
                    for e in group.episodes
                ),
            )
            for group in original
        ),
    )


def test_a_trainer_from_before_finish_reasons_finds_every_column_that_it_reads() -> None:
    """Such a trainer takes columns by name, and refuses another schema version."""
    table = groups_to_arrow(())
    assert table.schema.metadata == {b"headgate_feed": b"2"}
    assert table.schema.names[: len(SCHEMA_2)] == SCHEMA_2
    assert [str(table.schema.field(n).type) for n in ("call_id", "call_reward")] == ["string", "double"]


@pytest.mark.parametrize("metadata", [{}, {"headgate_feed": "999"}])
def test_another_schema_version_is_refused(metadata: dict[str, str]) -> None:
    table = groups_to_arrow(()).replace_schema_metadata(metadata)
    with pytest.raises(ValueError, match="feed schema"):
        groups_from_arrow(table)


@given(st.lists(st.integers(0, 2), max_size=12))
def test_spans_count_the_tokens_of_each_version(versions: list[int]) -> None:
    empty = np.empty(0)
    node = Node(0, -1, 0, True, empty, empty, np.asarray(versions, np.int32), empty)
    spans = spans_of(node)
    assert [version for version, count in spans for _ in range(count)] == versions
    assert all(a[0] != b[0] for a, b in itertools.pairwise(spans))


PROBE = {
    "sequences": [[1, 2, 3], [4, 5]],
    "new_logprobs": [[-1.0, -2.0], [-3.0]],
    "parent_logprobs": [[-1.5, 0.0], [-4.0]],
    "noise": 0.25,
}


def test_a_probe_comes_back_from_json_as_it_was() -> None:
    probe = Probe.from_json(PROBE)
    assert probe.to_json() == PROBE
    assert Probe.from_json(probe.to_json()) == probe


def test_the_first_version_needs_no_parent_in_its_probe() -> None:
    assert Probe.from_json({**PROBE, "parent_logprobs": []}).parent_logprobs == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"new_logprobs": [[-1.0], [-3.0]]},
        {"new_logprobs": [[-1.0, -2.0]]},
        {"parent_logprobs": [[-1.0, -2.0], [-3.0, -1.0]]},
        {"sequences": [["a", 2, 3], [4, 5]]},
        {"sequences": 7},
    ],
)
def test_a_probe_that_does_not_fit_together_is_refused(wrong: dict) -> None:
    with pytest.raises((ValueError, TypeError)):
        Probe.from_json({**PROBE, **wrong})


@pytest.mark.parametrize("missing", [part for part in PROBE if part != "noise"])
def test_a_probe_needs_every_part(missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        Probe.from_json({k: v for k, v in PROBE.items() if k != missing})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["new_logprobs", "parent_logprobs"])
def test_a_probe_whose_numbers_are_none_is_refused(which: str, value: float) -> None:
    """No engine could pass it: each would be restarted for what is wrong with the manifest."""
    with pytest.raises(ValueError, match="finite"):
        Probe.from_json({**PROBE, which: [[value, -2.0], [-3.0]]})
