"""Stop strings: what the automaton finds is what looking for each of them finds, at a cost that their number does not change."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.render.renderer import ChatRenderer
from gateway.render.segmenter import Segmenter
from gateway.render.stops import StopStrings

STRINGS = st.lists(st.text("ab\n-]^é", min_size=1, max_size=5), max_size=6)
PARTS = st.lists(st.text("ab\n-]^é", max_size=4), max_size=12)


def found_by_looking(strings: Sequence[str], parts: Sequence[str]) -> tuple[int, str]:
    """Return the end of a reply that arrives in these parts, and the stop string completed first (the reference)."""
    text = ""
    for part in parts:
        text += part
        if found := [(at, string) for string in strings if (at := text.find(string)) >= 0]:
            return min(found)
    return -1, ""


def longest_beginning(strings: Sequence[str], text: str) -> int:
    """Return the length of the longest suffix that is a proper prefix of a stop string (the reference)."""
    sizes = [size for string in strings for size in range(len(string)) if text.endswith(string[:size])]
    return max(sizes, default=0)


@given(STRINGS, PARTS)
def test_the_automaton_finds_what_looking_for_each_string_finds(strings: list[str], parts: list[str]) -> None:
    stops, place, text = StopStrings(strings), 0, ""
    begins, found = -1, ""
    for part in parts:
        place, at, found = stops.read(place, part)
        if found:
            begins = len(text) + at
            break
        text += part
        assert stops.depth[place] == longest_beginning(strings, text)
    assert (begins, found) == found_by_looking(strings, parts)


@given(STRINGS, st.text("ab\n-]^é", max_size=30))
def test_a_reply_ends_at_the_first_of_its_stop_strings(
    renderer: ChatRenderer, strings: list[str], text: str
) -> None:
    ids = renderer.encode(text)
    segmenter = Segmenter(renderer, reasoning=False, stop=StopStrings(strings), raw=True)
    delivered = ""
    for token in ids:
        delivered += "".join(piece.text for piece in segmenter.push([token]))
        assert text.startswith(delivered)
    delivered += "".join(piece.text for piece in segmenter.finish())
    at, string = found_by_looking(strings, list(text))  # a character is whole with its last token
    assert (segmenter.stopped, segmenter.matched_stop) == (at >= 0, string)
    assert delivered == (text if at < 0 else text[:at])
    assert segmenter.consumed == (len(ids) if at < 0 else len((text[:at] + string).encode()))


def cost_of(strings: Sequence[str], renderer: ChatRenderer) -> float:
    """Seconds of this thread for a reply that many of the strings begin in."""
    ids = renderer.encode("yes, a word with a few letters begins and goes on " * 40)
    stops = StopStrings(strings)
    costs = []
    for _ in range(5):
        segmenter = Segmenter(renderer, reasoning=False, stop=stops)
        began = time.thread_time()
        segmenter.push(ids)
        costs.append(time.thread_time() - began)
        assert segmenter.consumed == len(ids)
    return min(costs)


def test_the_number_of_strings_does_not_change_the_cost_of_a_token(renderer: ChatRenderer) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    few = [f"{letter}#" for letter in letters]
    many = [f"{letter}#{i}" for i in range(250) for letter in letters]
    assert cost_of(many, renderer) < 5 * cost_of(few, renderer)  # looking for each: 100 times as much


def test_a_beginning_of_a_string_that_ends_with_its_thought_is_forgotten(renderer: ChatRenderer) -> None:
    segmenter = Segmenter(renderer, reasoning=True, stop=StopStrings(["\nEND"]))
    pieces = segmenter.push(renderer.encode("hm\n</think>END of it")) + segmenter.finish()
    assert [(piece.kind, piece.text) for piece in pieces if piece.text] and not segmenter.stopped
    assert "".join(piece.text for piece in pieces if piece.kind == "content") == "END of it"
