"""Values and their form in JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.reactor import codec


@dataclass(frozen=True, slots=True)
class Leaf:
    n: int
    x: float = 0.0
    on: bool = False


@dataclass(frozen=True, slots=True)
class Twig:
    kind: Literal["a", "b", 3]
    note: str | None
    leaves: tuple[Leaf | None, ...]
    pair: tuple[int, str] = (0, "")
    twigs: tuple[Twig, ...] = ()


@dataclass
class Thawed:
    n: int


@dataclass(frozen=True)
class Listed:
    items: list[int]


LEAVES = st.builds(
    Leaf, st.integers(), st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5), st.booleans()
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=6)
TWIGS = st.recursive(
    st.builds(
        Twig,
        st.sampled_from(["a", "b", 3]),
        st.none() | TEXT,
        st.lists(st.none() | LEAVES, max_size=3).map(tuple),
        st.tuples(st.integers(), TEXT),
    ),
    lambda inner: st.builds(
        Twig, st.just("a"), st.none(), st.just(()), twigs=st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=4,
)
VALUES = st.one_of(
    st.tuples(st.just(Twig), TWIGS),
    st.tuples(st.just(tuple[Leaf | None, ...]), st.lists(LEAVES | st.none(), max_size=3).map(tuple)),
    st.tuples(st.just(int), st.integers()),
    st.tuples(st.just(str), TEXT),
    st.tuples(
        st.just(tuple[bool | int | None, ...]), st.lists(st.booleans() | st.integers() | st.none()).map(tuple)
    ),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_what_is_written_is_read_back(typed: tuple[Any, Any]) -> None:
    declared, value = typed
    form = codec.Form(declared)
    assert form.fits(value)
    text = form.text(value)
    again = codec.from_json(json.loads(text), declared)
    assert again == value
    assert json.loads(form.text(again)) == json.loads(text)


def test_the_form() -> None:
    assert codec.Form(tuple[Leaf, ...]).text((Leaf(1),)) == '[{"n":1,"x":0.0,"on":false}]'
    assert [codec.Form(declared).name for declared in (Leaf, tuple[Leaf, ...], int)] == [
        '"Leaf"',
        '"Leaf"',
        '"int"',
    ]


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        (True, int),
        (1, bool),
        (1.0, int),
        (None, int),
        (Leaf(1), Twig),
        ([Leaf(1)], tuple[Leaf, ...]),
        (True, Literal[1]),
        (1, str | None),
    ],
)
def test_a_value_of_another_class_does_not_fit(value: Any, declared: Any) -> None:
    assert not codec.Form(declared).fits(value)


@pytest.mark.parametrize(
    ("form", "declared"),
    [
        ({"n": "1", "x": 0.0, "on": False}, Leaf),
        ({"x": 0.0, "on": False}, Leaf),
        ({"n": 1, "x": None}, Leaf),
        ([1], Leaf),
        ([1, 2], tuple[int]),
        (1, tuple[int, ...]),
        ("c", Literal["a", "b"]),
        ([True], tuple[int | str, ...]),
    ],
)
def test_a_form_of_another_type_is_refused(form: Any, declared: Any) -> None:
    with pytest.raises(TypeError):
        codec.from_json(form, declared)


@pytest.mark.parametrize(
    "declared",
    [
        list,
        dict[str, int],
        object,
        bytes,
        Any,
        Thawed,
        Listed,
        tuple[Thawed, ...],
        Leaf | Twig,
        tuple[Leaf | Twig, ...],
    ],
)
def test_a_type_that_cannot_be_recorded_is_refused(declared: Any) -> None:
    with pytest.raises(TypeError):
        codec.Form(declared)


def test_the_description_changes_with_the_fields() -> None:
    assert codec.describe(Leaf) == "Leaf(n:int,x:float,on:bool)"
    assert codec.describe(Twig).endswith("pair:(int,str),twigs:(Twig,...))")
    assert codec.describe(Literal["a", 1] | None) == "'a'|1|None"
