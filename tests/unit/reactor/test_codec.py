"""Values and their form in JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.reactor import codec
from scheduler.reactor.forms import form


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


@dataclass(frozen=True)
class Sub(Leaf):
    pass


@dataclass
class Thawed:
    n: int


@dataclass(frozen=True)
class Named:
    type: str


@dataclass(frozen=True)
class Listed:
    items: list[int]


LEAVES = st.builds(Leaf, st.integers(), st.floats(allow_nan=False) | st.integers(-5, 5), st.booleans())
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
    st.tuples(st.just(tuple[Leaf | Twig, ...]), st.lists(LEAVES | TWIGS, max_size=3).map(tuple)),
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
    codec.validate(declared)
    codec.check(value, declared)
    text = codec.canonical(codec.to_json(value, declared))
    again = codec.from_json(json.loads(text), declared)
    assert again == value
    assert repr(again) == repr(value)
    assert codec.canonical(codec.to_json(again, declared)) == text


def test_the_form() -> None:
    assert codec.to_json((Leaf(1),), tuple[Leaf, ...]) == [{"type": "Leaf", "n": 1, "x": 0.0, "on": False}]
    assert codec.canonical({"b": (1, None), "a": "ü"}) == '{"a":"\\u00fc","b":[1,null]}'


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        (True, int),
        (1, bool),
        (1.0, int),
        ("1", int),
        (None, int),
        (Leaf(1), Twig),
        (Sub(1), Leaf),
        (Leaf("1"), Leaf),  # type: ignore[arg-type]
        (Leaf(1, on=1), Leaf),  # type: ignore[arg-type]
        (Twig("a", None, (Leaf(True),)), Twig),
        (Twig("c", None, ()), Twig),  # type: ignore[arg-type]
        (Twig("a", None, (), (1, "", 2)), Twig),  # type: ignore[arg-type]
        ([Leaf(1)], tuple[Leaf, ...]),
        ((Leaf(1), 1), tuple[Leaf, ...]),
        ((1, 2), tuple[int]),
        (True, Literal[1]),
    ],
)
def test_a_value_of_another_type_is_refused(value: Any, declared: Any) -> None:
    with pytest.raises(TypeError):
        codec.check(value, declared)


@pytest.mark.parametrize(
    ("form", "declared"),
    [
        ({"type": "Twig", "n": 1, "x": 0.0, "on": False}, Leaf),
        ({"type": "Leaf", "n": 1, "x": 0.0}, Leaf),
        ({"type": "Leaf", "n": 1, "x": 0.0, "on": False, "more": 1}, Leaf),
        ({"type": "Leaf", "n": "1", "x": 0.0, "on": False}, Leaf),
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
    "declared", [list, dict[str, int], object, bytes, Any, Thawed, Named, Listed, tuple[Thawed, ...]]
)
def test_a_type_that_cannot_be_recorded_is_refused(declared: Any) -> None:
    with pytest.raises(TypeError):
        codec.validate(declared)


def test_classes_of_one_name_cannot_share_a_union() -> None:
    other = dataclasses.make_dataclass("Leaf", [("n", int)], frozen=True)
    with pytest.raises(TypeError, match="one name"):
        codec.validate(tuple[Leaf | other, ...])  # type: ignore[valid-type]


def test_the_description_changes_with_the_fields() -> None:
    assert codec.describe(Leaf) == "Leaf(n:int,x:float,on:bool)"
    assert codec.describe(Twig).endswith("pair:(int,str),twigs:(Twig,...))")
    assert codec.describe(Literal["a", 1] | None) == "'a'|1|None"


NUMBERS = st.floats() | st.integers()


@settings(deadline=None)
@given(
    st.lists(NUMBERS, max_size=4).map(tuple),
    NUMBERS,
    TEXT,
    st.booleans(),
    st.sampled_from(["é", '"', 3, False, None]),
)
def test_the_text_is_what_json_would_write(
    numbers: tuple[float, ...], one: float, text: str, yes: bool, named: Any
) -> None:
    declared = tuple[
        tuple[float, ...], float | None, str | tuple[int, ...], bool, Literal["é", '"', 3, False, None]
    ]
    value = (numbers, one, text, yes, named)
    codec.check(value, declared)
    plain = [list(numbers), one, text, yes, named]
    assert form(declared).text(value) == json.dumps(plain, separators=(",", ":"))


def test_arms_of_one_class_are_told_apart() -> None:
    declared = tuple[int, ...] | tuple[str, bool] | Literal["a", 1]
    assert form(declared).text(("a", True)) == '["a",true]'
    assert form(declared).text((1, 2)) == "[1,2]"
    for wrong in ((1, "a"), True, "b", 2):
        assert not form(declared).fits(wrong)
