"""Rankers: what they learn, that they forget, and that they are functions of the calls that they received."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scheduler.lengths import RANKERS, Features, Ranker, boosted, make_ranker
from scheduler.lengths.boosted import Boosted
from scheduler.lengths.encoding import Encoder, _words
from scheduler.lengths.recall import tail_recall

EASY, HARD = [5, 6, 7, 8], [50, 60, 70, 80]


def features(
    i: int, task: str = "t", turn: int = 0, prompt: list[int] | None = None, most: int = 0
) -> Features:
    return Features(f"c{i}", task, f"{task}-g", f"e{i}", turn, prompt or EASY, 1, 0, most)


def shown(
    ranker: Ranker, count: int, task: Callable[[int], str], seed: int = 0
) -> tuple[list[float], list[int]]:
    """Calls with hard or easy words, four to a task; hard ones are some ten times as long."""
    draw, scores, lengths = random.Random(seed), [], []
    for i in range(count):
        hard = hash_of(task(i)) % 4 == 0
        call = features(i, task(i), prompt=HARD if hard else EASY)
        length = int(math.exp((6 if hard else 3.5) + draw.gauss(0, 0.2)))
        scores.append(ranker.predict(call).expected)
        ranker.learn(call, length)
        lengths.append(length)
    return scores, lengths


def hash_of(task: str) -> int:
    return sum(map(ord, task))


@pytest.mark.parametrize("name", sorted(RANKERS))
def test_predictions_are_a_function_of_the_calls_that_were_learned(name: str) -> None:
    first, second = make_ranker(name), make_ranker(name)
    assert shown(first, 300, lambda i: f"t{i % 9}") == shown(second, 300, lambda i: f"t{i % 9}")
    assert first.predict(features(1)) == second.predict(features(1))


def test_no_ranker_knows_nothing() -> None:
    ranker = make_ranker("none")
    ranker.learn(features(0), 9)
    assert not ranker.predict(features(1)).known


def test_history_predicts_the_mean_of_the_task() -> None:
    ranker = make_ranker("history")
    assert not ranker.predict(features(0)).known
    for length in (10, 20):
        ranker.learn(features(0), length)
    found = ranker.predict(features(1))
    assert found.known
    assert found.expected == pytest.approx((10 * 0.97 + 20) / 1.97)
    other = ranker.predict(features(2, task="new"))
    assert not other.known
    assert 10 < other.expected < 20


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'nonsense'.*history"):
        make_ranker("nonsense")


def test_without_its_package_boosted_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ImportError, match=r"boosted.*headgate\[lengths\]"):
        make_ranker("boosted")


def test_openmp_comes_from_torchs_package_on_a_system_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(boosted, "_loads", lambda library: bool(tried.append(library)))
    boosted._load_openmp()
    assert tried[0] == "libgomp.so.1"
    assert [Path(library).is_file() for library in tried[1:]] == [True]


def test_its_package_is_imported_only_for_who_chose_it() -> None:
    text = (
        "import sys, gateway.services, scheduler.lengths as l; l.make_ranker('history');"
        "assert 'lightgbm' not in sys.modules; l.make_ranker('boosted'); assert 'lightgbm' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


def test_the_words_of_a_prompt_predict_how_long_the_calls_of_a_new_task_are() -> None:
    scores, lengths = shown(make_ranker("boosted"), 1200, lambda i: f"t{i}")
    recall = tail_recall(scores[600:], lengths[600:])
    assert recall is not None
    assert (
        recall > 0.7
    )  # a ranking without the words reaches 0.2; noise within the hard quarter keeps it from 1


def test_the_history_of_a_task_predicts_what_its_words_do_not() -> None:
    ranker, draw = make_ranker("boosted"), random.Random(1)
    scores, lengths = [], []
    for i in range(1500):
        task = i % 50
        call = features(i, f"t{task}")
        scores.append(ranker.predict(call).expected)
        lengths.append(int(math.exp(3 + 0.1 * task + draw.gauss(0, 0.1))))
        ranker.learn(call, lengths[-1])
    recall = tail_recall(scores[750:], lengths[750:])
    assert recall is not None
    assert recall > 0.85


def test_turns_have_lengths_of_their_own() -> None:
    ranker = make_ranker("boosted")
    for i in range(640):
        ranker.learn(features(i, f"t{i}", turn=i % 2), 1000 if i % 2 else 10)
    first, second = (ranker.predict(features(9999, "new", turn=turn)).expected for turn in (0, 1))
    assert first < 40
    assert second > 300


def test_about_the_share_are_called_tails_and_they_are_the_long_ones() -> None:
    ranker = make_ranker("boosted")
    flagged: list[int] = []
    draw = random.Random(3)
    for i in range(1500):
        call = features(i, f"t{i % 50}")
        if ranker.predict(call).tail:
            flagged.append(i)
        ranker.learn(call, int(math.exp(3 + 0.1 * (i % 50) + draw.gauss(0, 0.1))))
    late = [i for i in flagged if i >= 750]
    assert 0.15 < len(late) / 750 < 0.25
    assert sum(i % 50 >= 40 for i in late) / len(late) > 0.85


def test_no_more_is_expected_than_may_be_sampled() -> None:
    ranker = make_ranker("boosted")
    for i in range(128):
        ranker.learn(features(i), 1000)
    assert ranker.predict(features(999, most=16)).expected == 16
    assert ranker.predict(features(999)).expected > 500


def test_what_is_learned_of_a_call_is_what_was_known_when_it_was_predicted() -> None:
    """All samples of a group begin together: what the first ones teach was not known to the others."""
    work: list[Callable[[], None]] = []
    ranker = Boosted(0.2, 100, run=work.append)
    calls = [features(i) for i in range(64)]
    for call in calls:
        ranker.predict(call)
    for call in calls:
        ranker.learn(call, 50)
    (some,) = work[0].args  # type: ignore[attr-defined]
    assert len(some) == 32
    assert all((call.row == some[0][0].row).all() for call, _ in some)
    assert all(call.encoded.past == ((0, 0),) * 4 for call, _ in some)


def test_before_the_first_fit_it_predicts_as_history_and_fits_run_elsewhere() -> None:
    work: list[Callable[[], None]] = []
    ranker, history = Boosted(0.2, 100, run=work.append), make_ranker("history", memory=100)
    draw = random.Random(5)
    for i in range(200):
        call = features(i, f"t{i % 7}")
        assert ranker.predict(call) == history.predict(call)
        length = draw.randrange(10, 99)
        ranker.learn(call, length)
        history.learn(call, length)
    assert len(work) == 1, "while a fit runs, no other one is requested"
    work.pop()()
    assert ranker.predict(features(999)) != history.predict(features(999))
    ranker.learn(features(999), 5)
    assert len(work) == 1


def test_trees_that_were_fitted_to_few_calls_count_little(monkeypatch: pytest.MonkeyPatch) -> None:
    ranker = Boosted(0.2, 100)
    shown(ranker, 32, lambda i: f"t{i}")
    models = ranker._models
    assert models._trees is not None
    trees, few = models._trees
    shown(ranker, 400, lambda i: f"t{i}")
    assert 0 < few < models._trees[1] < 0.1
    call = models.call(ranker._encoder.encode(features(999)))
    monkeypatch.setattr(models, "_trees", (trees, 0.25))
    own = float(trees.predict(call.row[None])[0])
    assert own != call.expected
    assert models.predict(call) == pytest.approx(0.75 * call.expected + 0.25 * own)


def test_a_fit_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ranker = Boosted(0.2, 100)
    monkeypatch.setattr(ranker._models._lightgbm, "train", lambda *_: 1 / 0)
    for i in range(31):
        ranker.learn(features(i), 50)
    with pytest.raises(ZeroDivisionError):
        ranker.learn(features(31), 50)
    monkeypatch.undo()
    shown(ranker, 100, lambda i: f"t{i}")
    assert ranker.predict(features(1)).known


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.lengths.boosted._MOST_OPEN", 40)
    monkeypatch.setattr("scheduler.lengths.boosted._WINDOW", 80)
    encoder = Encoder(memory=10)
    for i in range(100):
        encoder.add(features(i, f"t{i}"), 5)
    assert len(encoder) == 4 * 10
    for i in range(100):
        encoder.encode(features(i, f"t{i}"))
    assert len(encoder) == 5 * 10
    work: list[Callable[[], None]] = []
    ranker = Boosted(0.2, memory=10, run=work.append)
    for i in range(100):
        ranker.predict(features(i, f"t{i}"))
    assert len(ranker._open) == 40
    for i in range(100):
        ranker.learn(features(i, f"t{i}"), 5)
    assert len(ranker._newest) == 80


def test_a_history_draws_what_is_expected_without_it_and_the_narrowest_has_the_last_word() -> None:
    encoder = Encoder(memory=4)
    assert encoder.encode(features(0)).shrunk(0.7) == [0.7] * 4, "nothing is known"
    encoder.add(features(0, "other"), 10)
    encoder.add(features(1), 1000)
    more = math.log1p(1000) - encoder._turns[0].value
    same_task = Features("c", "t", "another", "another", 5, EASY)
    assert encoder.encode(same_task).shrunk(0.0) == pytest.approx([more / 1.3] * 4)
    first, second, group, episode = encoder.encode(features(1)).shrunk(0.0)
    assert first < second < group < episode < more


@pytest.mark.parametrize("prompt", [[], [1], [2**31 - 1] * 1000, list(range(1000))])
def test_any_prompt_is_a_row(prompt: list[int]) -> None:
    encoder = Encoder(memory=4)
    for given in (prompt, np.asarray(prompt, np.int32)):
        call = Features("c", "t", "g", "e", 30, given, 3, 2, 100)
        for _ in range(2):
            seen = encoder.encode(call)
            assert (seen.prompt.shape, seen.row.shape) == ((encoder.prompt,), (encoder.width,))
            assert seen.row.dtype == np.float32
            assert np.isfinite(seen.prompt).all()
            assert np.isfinite(seen.row).all()
            encoder.add(call, 7)


def test_the_words_at_the_end_of_a_long_prompt_count() -> None:
    encoder = Encoder(memory=4)
    rows = [encoder.encode(features(0, prompt=[1] * 5000 + [last] * 20)).row for last in (5, 6)]
    assert (rows[0] != rows[1]).any()


def test_a_word_of_long_calls_predicts_long_calls_of_a_new_task() -> None:
    encoder = Encoder(memory=4)
    for i in range(40):
        encoder.add(features(i, f"t{i}", prompt=HARD if i % 2 else EASY), 1000 if i % 2 else 10)
    means = [
        encoder._summary(np.unique(np.concatenate(_words(prompt))))[0]
        for prompt in (EASY, HARD, [1, 2, 3, 4])
    ]
    assert means[0] < -1
    assert means[1] > 1
    assert means[2] == 0
