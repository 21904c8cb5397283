"""The verdict over what an engine's workers hold of a version."""

from __future__ import annotations

from scheduler.policies.proof import Holding, ProofReport, weigh

PUBLISHED = {"a": ["1", "2"], "b": ["3"]}


def test_an_engine_that_read_and_holds_everything_is_proven() -> None:
    assert weigh([Holding(PUBLISHED, {})], PUBLISHED) == ProofReport("proven", 2, 2)
    assert weigh([Holding(PUBLISHED, {})], None).verdict == "proven", "a version without hashes"


def test_one_wrong_piece_of_one_tensor_fails_the_engine() -> None:
    read = PUBLISHED | {"a": ["1", "x"]}
    report = weigh([Holding(PUBLISHED, {}), Holding(read, {})], PUBLISHED)
    assert report.verdict == "failed"
    assert report.why == "tensor 'a': the bytes that the engine read are not the manifest's"


def test_tensors_that_were_not_read_or_are_too_many_fail_the_engine() -> None:
    assert "'b': the engine did not read it" in weigh([Holding({"a": ["1", "2"]}, {})], PUBLISHED).why
    assert weigh([Holding({"a": ["1", "2"]}, {})], PUBLISHED, {"b"}).verdict == "proven"
    assert "does not have it" in weigh([Holding(PUBLISHED | {"c": ["4"]}, {})], PUBLISHED).why


def test_other_numbers_in_the_memory_of_one_worker_fail_the_engine() -> None:
    report = weigh([Holding(PUBLISHED, {}), Holding(PUBLISHED, {"b": "x", "a": "y"})], PUBLISHED)
    assert (report.verdict, report.why) == ("failed", "tensor 'b': x (and 1 more)")


def test_a_tensor_that_no_worker_can_compare_leaves_the_proof_partial() -> None:
    either = [Holding(PUBLISHED, {}, ["a"]), Holding(PUBLISHED, {}, ["b"])]
    assert weigh(either, PUBLISHED).verdict == "proven", "workers hold different layers"
    report = weigh([Holding(PUBLISHED, {}, ["a"])] * 2, PUBLISHED)
    assert (report.verdict, report.tensors, report.compared) == ("partial", 2, 1)
    assert "1 of 2 tensors in another form, such as 'a'" in report.why


def test_an_engine_without_workers_proves_nothing() -> None:
    assert weigh([], PUBLISHED).verdict == "none"
